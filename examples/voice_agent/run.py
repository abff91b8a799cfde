"""A voice agent on one machine, without a key: a question in a WAV file is heard, answered and spoken into another.

`python examples/voice_agent/run.py question.wav --to answer.wav`: whisper-base hears it, a language model answers, Nightjar speaks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import soundfile
import soxr
from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    StartFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.whisper.stt import WhisperSTTService
from pipecat.turns.user_start import VADUserTurnStartStrategy
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner
from pipecat_nightjar import NightjarTTSService, NightjarTTSSettings
from speech_server import speech_server
from stub_llm import stub_llm
from whisper_base import whisper_folder

IN_RATE, OUT_RATE = 16_000, 24_000
_FRAME_SECONDS = 0.02
_PATIENCE_SECONDS = 120.0
_PROMPT = "You are a voice agent. Answer in one or two short sentences, without lists or emoji."


@dataclass
class Turn:
    """One question and its answer. Times are of `time.monotonic`."""

    asked_at: float = 0.0
    first_text_at: float = 0.0
    first_audio_at: float = 0.0
    last_audio_at: float = 0.0
    heard: str = ""
    said: str = ""
    audio: bytes = b""
    error: str = ""

    @property
    def audio_seconds(self) -> float:
        return len(self.audio) / 2 / OUT_RATE

    def report(self, number: int) -> str:
        """What a person wants to know of it."""
        first, of_speech = 1000 * (self.first_audio_at - self.asked_at), 1000 * (self.first_audio_at - self.first_text_at)
        factor = (self.last_audio_at - self.first_text_at) / self.audio_seconds
        return (
            f"turn {number}\n  heard: {self.heard}\n  said:  {self.said}\n"
            f"  time to first audio: {first:.0f} ms after the question, {of_speech:.0f} ms of it speech synthesis\n"
            f"  real-time factor: {factor:.3f} ({self.audio_seconds:.1f} s of speech)"
        )


class Watch(FrameProcessor):
    """Stands in the pipeline and notes what passes in the turn under way."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        turn = self._agent.turn
        if isinstance(frame, TranscriptionFrame):
            turn.heard = f"{turn.heard} {frame.text.strip()}".strip()
        elif isinstance(frame, TTSAudioRawFrame):
            turn.last_audio_at = time.monotonic()
            turn.first_audio_at = turn.first_audio_at or turn.last_audio_at
            turn.audio += frame.audio
        elif isinstance(frame, TTSTextFrame):
            turn.said = f"{turn.said} {frame.text.strip()}".strip()
        elif isinstance(frame, ErrorFrame):
            turn.error = turn.error or frame.error
            self._agent.answered.set()
        elif isinstance(frame, TTSStoppedFrame):
            self._agent.answered.set()
        await self.push_frame(frame, direction)


class Agent:
    """Speech to text, a language model and Nightjar in one pipeline."""

    def __init__(self, llm_url: str, llm_model: str, server_url: str, model: str, voice: str | None) -> None:
        self.turn = Turn()
        self.answered = asyncio.Event()
        self._started = asyncio.Event()
        stt = WhisperSTTService(
            device="cpu", compute_type="int8", settings=WhisperSTTService.Settings(model=str(whisper_folder()), no_speech_prob=0.9)
        )
        llm = OpenAILLMService(
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            base_url=llm_url,
            settings=OpenAILLMService.Settings(model=llm_model, system_instruction=_PROMPT),
        )
        settings = NightjarTTSSettings(model=model, voice=voice)
        tts = NightjarTTSService(base_url=server_url, api_key=os.environ.get("SPEECH_SERVE__API_KEY"), settings=settings)
        tts.add_event_handler("on_tts_request", self._begun)
        # A file is a turn: its end is the end of what the user says.
        turns = UserTurnStrategies(start=[VADUserTurnStartStrategy()], stop=[SpeechTimeoutUserTurnStopStrategy(user_speech_timeout=0.0)])
        pair = LLMContextAggregatorPair(LLMContext(), user_params=LLMUserAggregatorParams(user_turn_strategies=turns))
        self._worker = PipelineWorker(
            Pipeline([Watch(self), stt, Watch(self), pair.user(), llm, tts, Watch(self), pair.assistant()]),
            params=PipelineParams(audio_in_sample_rate=IN_RATE, audio_out_sample_rate=OUT_RATE, enable_metrics=True),
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
        )

        @self._worker.event_handler("on_pipeline_started")
        async def started(_worker: PipelineWorker, _frame: StartFrame) -> None:
            self._started.set()

    async def _begun(self, _service: NightjarTTSService, _context_id: str, _text: str) -> None:
        self.turn.first_text_at = self.turn.first_text_at or time.monotonic()

    async def talk(self, questions: Sequence[bytes]) -> list[Turn]:
        """Asks one question (16-bit mono PCM at IN_RATE) after the other. Raises `RuntimeError` for one that gets no answer."""
        runner = WorkerRunner()
        await runner.add_workers(self._worker)
        running = asyncio.create_task(runner.run())
        try:
            await self._started.wait()
            return [await self._ask(question) for question in questions]
        finally:
            await self._worker.queue_frame(EndFrame())
            await running

    async def _ask(self, question: bytes) -> Turn:
        self.turn = turn = Turn()
        self.answered.clear()
        step = int(_FRAME_SECONDS * IN_RATE) * 2
        await self._worker.queue_frame(VADUserStartedSpeakingFrame())
        await self._worker.queue_frames(
            [InputAudioRawFrame(question[begin : begin + step], IN_RATE, 1) for begin in range(0, len(question), step)]
        )
        await self._worker.queue_frame(VADUserStoppedSpeakingFrame())
        turn.asked_at = time.monotonic()
        try:
            await asyncio.wait_for(self.answered.wait(), _PATIENCE_SECONDS)
        except TimeoutError:
            turn.error = f"The question got no answer; what was heard in it: {turn.heard!r}."
        if turn.error or not turn.audio:
            raise RuntimeError(turn.error or "The answer has no audio.")
        return turn


def read_question(path: Path) -> bytes:
    """A recording of any rate as 16-bit mono PCM at IN_RATE."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    heard = soxr.resample(samples.mean(axis=1), rate, IN_RATE)
    return (heard.clip(-1, 1) * 32767).astype("<i2").tobytes()


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="+", type=Path, metavar="WAV", help="recordings of questions, one for each turn")
    parser.add_argument("--to", type=Path, default=Path("answer.wav"), metavar="WAV", help="where the answers go [default: answer.wav]")
    parser.add_argument("--server", metavar="URL", help="a Nightjar server that runs; without it one is started")
    parser.add_argument("--model", default="hibari", help="the model that speaks [default: hibari]")
    parser.add_argument("--voice", help="one of its voices")
    parser.add_argument("--llm", metavar="URL", help="base URL of an OpenAI chat server; without it a stub answers. Key: OPENAI_API_KEY")
    parser.add_argument("--llm-model", default="stub", metavar="NAME", help="name of the language model")
    parser.add_argument("--verbose", action="store_true", help="show Pipecat's log")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = parse_arguments(given)
    if not options.verbose:
        logger.remove()
    try:
        questions = [read_question(path) for path in options.questions]
        with ExitStack() as stack:
            llm = options.llm or stack.enter_context(stub_llm())
            server = options.server or stack.enter_context(speech_server(options.model))
            turns = asyncio.run(_converse(options, llm, server, questions))
    except (OSError, RuntimeError, soundfile.LibsndfileError) as error:
        print(error, file=sys.stderr)
        return 1
    for number, turn in enumerate(turns, 1):
        print(turn.report(number))
    with soundfile.SoundFile(options.to, "w", OUT_RATE, 1, "PCM_16") as file:
        for turn in turns:
            file.buffer_write(turn.audio, "int16")
    print(f"wrote {options.to}")
    return 0


async def _converse(options: argparse.Namespace, llm: str, server: str, questions: Sequence[bytes]) -> list[Turn]:
    return await Agent(llm, options.llm_model, server, options.model, options.voice).talk(questions)


if __name__ == "__main__":
    sys.exit(main())
