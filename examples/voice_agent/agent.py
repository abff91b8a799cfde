"""The agent: speech to text, a language model and Nightjar in one pipeline, with figures of every turn."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipecat.audio.vad.silero import SileroVADAnalyzer
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
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.audio.vad_processor import VADProcessor
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.whisper.stt import WhisperSTTService
from pipecat.transports.base_transport import BaseTransport
from pipecat.turns.user_start import VADUserTurnStartStrategy
from pipecat.turns.user_stop import SpeechTimeoutUserTurnStopStrategy
from pipecat.turns.user_turn_strategies import UserTurnStrategies
from pipecat.workers.runner import WorkerRunner
from pipecat_nightjar import NightjarTTSService, NightjarTTSSettings
from whisper_base import whisper_folder

IN_RATE, OUT_RATE = 16_000, 24_000
_FRAME_SECONDS = 0.02
#: How long somebody who speaks may pause within a question.
_PAUSE_SECONDS = 0.6
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
        first, of_speech = (
            1000 * (self.first_audio_at - self.asked_at),
            1000 * (self.first_audio_at - self.first_text_at),
        )
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
            turn.said = f"{turn.said}{frame.text}".lstrip()
        elif isinstance(frame, ErrorFrame):
            turn.error = turn.error or frame.error
            self._agent.answered.set()
        elif isinstance(frame, TTSStoppedFrame):
            self._agent.answered.set()
        await self.push_frame(frame, direction)


class Listening(FrameProcessor):
    """Stands behind a microphone and tells the agent when somebody begins to speak, and ends."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction is FrameDirection.DOWNSTREAM and isinstance(frame, VADUserStartedSpeakingFrame):
            self._agent.question_begins()
        elif direction is FrameDirection.DOWNSTREAM and isinstance(frame, VADUserStoppedSpeakingFrame):
            self._agent.turn.asked_at = time.monotonic()
        await self.push_frame(frame, direction)


class Agent:
    """Hears, answers and speaks: questions of files, or whoever speaks into the microphone of a transport."""

    def __init__(
        self,
        llm_url: str,
        llm_model: str,
        server_url: str,
        model: str,
        voice: str | None,
        transport: BaseTransport | None = None,
    ) -> None:
        self.turn = Turn()
        self.answered = asyncio.Event()
        self._started = asyncio.Event()
        self._reported = 0
        stt = WhisperSTTService(
            device="cpu",
            compute_type="int8",
            settings=WhisperSTTService.Settings(model=str(whisper_folder()), no_speech_prob=0.9),
        )
        llm = OpenAILLMService(
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            base_url=llm_url,
            settings=OpenAILLMService.Settings(model=llm_model, system_instruction=_PROMPT),
        )
        settings = NightjarTTSSettings(model=model, voice=voice)
        tts = NightjarTTSService(
            base_url=server_url, api_key=os.environ.get("SPEECH_SERVE__API_KEY"), settings=settings
        )
        tts.add_event_handler("on_tts_request", self._begun)
        # A file is a turn: its end is the end of what the user says.
        pause_seconds = 0.0 if transport is None else _PAUSE_SECONDS
        turns = UserTurnStrategies(
            start=[VADUserTurnStartStrategy()],
            stop=[SpeechTimeoutUserTurnStopStrategy(user_speech_timeout=pause_seconds)],
        )
        pair = LLMContextAggregatorPair(
            LLMContext(), user_params=LLMUserAggregatorParams(user_turn_strategies=turns)
        )
        begin: list[FrameProcessor] = (
            [] if transport is None else [transport.input(), VADProcessor(vad_analyzer=SileroVADAnalyzer())]
        )
        begin += [] if transport is None else [Listening(self)]
        end: list[FrameProcessor] = [] if transport is None else [transport.output()]
        self._worker = PipelineWorker(
            Pipeline(
                [
                    *begin,
                    Watch(self),
                    stt,
                    Watch(self),
                    pair.user(),
                    llm,
                    tts,
                    Watch(self),
                    *end,
                    pair.assistant(),
                ]
            ),
            params=PipelineParams(
                audio_in_sample_rate=IN_RATE, audio_out_sample_rate=OUT_RATE, enable_metrics=True
            ),
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
        )

        @self._worker.event_handler("on_pipeline_started")
        async def started(_worker: PipelineWorker, _frame: StartFrame) -> None:
            self._started.set()

    async def _begun(self, _service: NightjarTTSService, _context_id: str, _text: str) -> None:
        self.turn.first_text_at = self.turn.first_text_at or time.monotonic()

    async def talk(self, questions: Sequence[bytes]) -> list[Turn]:
        """Asks one question (16-bit mono PCM at IN_RATE) after the other. Raises `RuntimeError` for one
        that gets no answer."""
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
            [
                InputAudioRawFrame(question[begin : begin + step], IN_RATE, 1)
                for begin in range(0, len(question), step)
            ]
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

    def question_begins(self) -> None:
        """Somebody begins to speak; within an answer that is an interruption, and a new turn."""
        if self.turn.first_text_at or self.turn.error:
            self.turn = Turn()
            self.answered.clear()

    async def converse(self) -> None:
        """Answers whoever speaks, until Ctrl-C, and prints the figures of every answer that is spoken to
        its end."""
        runner = WorkerRunner()
        await runner.add_workers(self._worker)
        reporting = asyncio.create_task(self._report())
        try:
            await runner.run()
        finally:
            reporting.cancel()

    async def _report(self) -> None:
        await self._started.wait()
        print("The agent listens; Ctrl-C ends it.", flush=True)
        while True:
            await self.answered.wait()
            self.answered.clear()
            turn = self.turn
            if turn.error:
                print(turn.error, file=sys.stderr, flush=True)
            elif turn.audio:
                self._reported += 1
                print(turn.report(self._reported), flush=True)
