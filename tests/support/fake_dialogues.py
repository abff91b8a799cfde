"""A small engine that answers dialogues with text and audio: slots, a waiting room, steps, streams,
aborts, and no model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from pipelines.errors import ErrorCode, NightjarError, NoAudioError, SynthesisError
from pipelines.request import (
    AudioChunk,
    Capabilities,
    EngineInfo,
    EngineState,
    EngineStats,
    Message,
    Speech,
    SynthesisRequest,
)
from pipelines.validation import speech_task
from tests.support.called import CalledPipeline
from tests.support.fakes import Markers

RATE = 16_000
FRAME = 320
_SILENCE = np.zeros(0, np.float32)


@dataclass(eq=False)
class _Sequence:
    request: SynthesisRequest
    words: list[str]
    frames: int
    #: None at the end, an error where it failed, else a piece.
    heard: queue.SimpleQueue[AudioChunk | NightjarError | None] = field(default_factory=queue.SimpleQueue)
    future: Future[Speech] = field(default_factory=Future)
    steps: int = 0
    aborted: bool = False
    held: bool = False


class DialoguePipeline(CalledPipeline):
    """Answers with what it heard, a word a step and then a frame a step; equal requests give equal answers.

    Markers in a text: `[[no_audio]]` ends after the text, `[[fail:CODE]]` fails at its end, `[[steps:N]]`
    speaks N frames, `[[long]]` never ends by itself; `[[held]]` takes no step after its words until
    `let_go`.
    """

    name = "dialogues"
    sample_rate = RATE

    def __init__(
        self, *, slots: int = 16, waiting_room: int = 16, step_seconds: float = 0.001, streaming: bool = True
    ) -> None:
        self.capabilities = Capabilities(
            guidance=True,
            text_out=True,
            audio_in=True,
            multi_turn=True,
            streaming=streaming,
            modes=("text_audio", "text_only"),
        )
        self.seen: list[SynthesisRequest] = []
        self.aborted: list[str] = []
        #: What `stats` says; while it is not `ready`, `submit` waits, as an engine does that starts again.
        self.state: EngineState = "ready"
        self.info = EngineInfo(slots=slots, waiting_room=waiting_room)
        self.slots, self.room, self._step_seconds = slots, waiting_room, step_seconds
        self._changed = threading.Condition()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._done = 0
        self.closed = False
        self._holds = True
        self._thread = threading.Thread(target=self._run, name="dialogues", daemon=True)
        self._thread.start()

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        return self._enter(request).future

    def stream(self, request: SynthesisRequest) -> Generator[AudioChunk, None, Speech]:
        sequence = self._enter(request)
        try:
            while (piece := sequence.heard.get()) is not None:
                if isinstance(piece, NightjarError):
                    raise piece
                yield piece
            speech = sequence.future.result()
            if len(speech.samples):
                yield AudioChunk(speech.samples, RATE)
            return replace(speech, samples=_SILENCE)
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborted.append(request_id)
            for sequence in [*self._waiting, *self._running]:
                sequence.aborted = sequence.aborted or sequence.request.request_id == request_id
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                requests_done=self._done,
                state=self.state,
            )

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._thread.join()

    def let_go(self) -> None:
        """What is held goes on, now and from now on."""
        self._holds = False

    def die(self) -> None:
        """All that is in the engine fails, and nothing enters until `state` is set again."""
        with self._changed:
            self.state = "starting"
            left, self._waiting, self._running = [*self._waiting, *self._running], [], []
            for sequence in left:
                _fail(sequence, SynthesisError(ErrorCode.SYNTH_ENGINE, "The engine died at /secret/place."))

    def _enter(self, request: SynthesisRequest) -> _Sequence:
        speech_task(request.messages, request.generation, self.capabilities)
        with self._changed:
            self.seen.append(request)
            self._changed.wait_for(
                lambda: self.closed or (self.state == "ready" and len(self._waiting) < self.room)
            )
            if self.closed:
                raise SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")
            sequence = _sequence(request)
            self._waiting.append(sequence)
            self._changed.notify_all()
        return sequence

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or self._waiting or self._running)
                if self.closed:
                    break
                while self._waiting and len(self._running) < self.slots:
                    self._running.append(self._waiting.pop(0))
                self._running = [sequence for sequence in self._running if not self._step(sequence)]
                self._changed.notify_all()
            time.sleep(self._step_seconds)
        for sequence in [*self._waiting, *self._running]:
            _fail(sequence, SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed."))

    def _step(self, sequence: _Sequence) -> bool:
        """One word or frame of a sequence; whether it is over."""
        place = sequence.steps
        if self._holds and sequence.held and place >= len(sequence.words) and not sequence.aborted:
            return False
        sequence.steps += 1
        if sequence.aborted:
            _fail(sequence, SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))
        elif place < len(sequence.words):
            sequence.heard.put(AudioChunk(_SILENCE, RATE, text=sequence.words[place]))
            return False
        elif place < len(sequence.words) + sequence.frames:
            return False
        else:
            _finish(sequence)
        self._done += 1
        return True


def _sequence(request: SynthesisRequest) -> _Sequence:
    words = Markers.of(_said(request.messages)).words
    asked = request.generation
    reply = f"<think>cfg {asked.cfg or 1:g}</think>" + "".join(
        f" {_shown(message)}" for message in request.messages
    )
    frames = 0 if asked.mode == "text_only" else int(words.get("steps", 8))
    if "long" in words:
        frames = 1 << 40
    pieces = [f"{word} " for word in reply.split(" ")]
    limit = asked.max_tokens or len(pieces) + frames
    return _Sequence(request, pieces[:limit], min(frames, max(limit - len(pieces), 0)), held="held" in words)


def _shown(message: Message) -> str:
    what = f"{len(message.content)} bytes" if isinstance(message.content, bytes) else message.content
    return f"{message.role}/{message.modality}: {what}"


def _said(messages: tuple[Message, ...]) -> str:
    return " ".join(message.content for message in messages if isinstance(message.content, str))


def _finish(sequence: _Sequence) -> None:
    text = "".join(sequence.words).strip()
    words = Markers.of(_said(sequence.request.messages)).words
    cut = (
        sequence.request.generation.max_tokens is not None
        and sequence.steps > sequence.request.generation.max_tokens
    )
    meta: dict[str, str | int | float | bool] = {"prompt_positions": 5, "tokens": sequence.steps - 1}
    meta["finish"] = "length" if cut else "stop"
    if code := words.get("fail"):
        _fail(sequence, SynthesisError(ErrorCode(code), "The engine was asked to fail."))
    elif "no_audio" in words and sequence.frames:
        _fail(sequence, NoAudioError("The model ended after its text.", "Try another seed.", text, meta))
    else:
        pitch = 200 + sequence.request.seed % 400
        samples = (0.3 * np.sin(2 * np.pi * pitch / RATE * np.arange(FRAME * sequence.frames))).astype(
            np.float32
        )
        sequence.future.set_result(Speech(samples, RATE, _said(sequence.request.messages), text, meta))
        sequence.heard.put(None)


def _fail(sequence: _Sequence, error: NightjarError) -> None:
    sequence.future.set_exception(error)
    sequence.heard.put(error)
