"""The embedded voice: hibari-tts, English, one voice, 24 kHz, on the CPU, with its weights in its wheel."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipelines.audio import normalize_loudness
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.hibari import CAPABILITIES, SAMPLE_RATE
from pipelines.hibari.text import EnglishReader
from pipelines.request import AudioChunk, EngineInfo, EngineStats, Speech, SynthesisRequest
from pipelines.validation import speech_task

_SAMPLES_PER_FRAME = 300
_WAITING_PER_THREAD = 16
# Speech peaks at 0.1 and above before it is normalized; what the model makes of nothing to say peaks at 0.02.
_SILENT_PEAK = 0.03


@dataclass(eq=False, slots=True)
class _Synthesis:
    request: SynthesisRequest
    text: str
    #: Phoneme ids, one list a piece of speech.
    pieces: list[list[int]] = field(default_factory=list[list[int]])
    future: Future[Speech] = field(default_factory=Future)
    aborted: bool = False


class HibariPipeline:
    """Threads that share one loaded model: inference and signal processing run outside the interpreter lock.

    Two threads on two cores make 1.9 times the speech of one, as two processes do, in half their memory (240 MB). Each request
    is synthesized alone with its own seed, so its speech does not depend on what else runs. Text is read in `submit`, so
    that what the voice cannot read is refused there; that takes about a second for the worst text of 5,000 characters.
    """

    name = "hibari"
    sample_rate = SAMPLE_RATE
    capabilities = CAPABILITIES

    def __init__(self, *, threads: int | None = None, waiting_room: int | None = None) -> None:
        count = threads or len(os.sched_getaffinity(0))
        self._reader = EnglishReader()
        self._room = waiting_room or count * _WAITING_PER_THREAD
        self.info = EngineInfo(slots=count, waiting_room=self._room, device="cpu", dtype="float32")
        self._waiting: deque[_Synthesis] = deque()
        self._running: set[_Synthesis] = set()
        self._reading: set[_Synthesis] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._requests_done = 0
        self._samples_made = 0
        self._threads = [threading.Thread(target=self._work, name=f"hibari-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Reads the text and queues the request; blocks while the waiting room is full.

        Raises `InputError` for what this voice cannot serve and `SynthesisError` (`synth.aborted`) once closed, or aborted meanwhile.
        """
        task = speech_task(request.messages, request.generation, CAPABILITIES)
        synthesis = _Synthesis(request, task.text)
        with self._changed:
            self._reading.add(synthesis)
        try:
            synthesis.pieces = self._reader.read(task.text, lambda: synthesis.aborted or self._closed)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or synthesis.aborted or len(self._waiting) < self._room)
                if self._closed or synthesis.aborted:
                    raise _aborted()
                self._waiting.append(synthesis)
                self._changed.notify_all()
        finally:
            with self._changed:
                self._reading.discard(synthesis)
        return synthesis.future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Refused: loudness is normalized over the whole utterance."""
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, "hibari does not stream.", "Submit the request, or use a model that streams.")

    def abort(self, request_id: str) -> None:
        """Ends a request at the end of the sentence it is in, read or spoken; its future, or `submit`, fails with `synth.aborted`.

        Unknown ids are ignored.
        """
        with self._changed:
            ended = [synthesis for synthesis in self._waiting if synthesis.request.request_id == request_id]
            for synthesis in ended:
                self._waiting.remove(synthesis)
            for synthesis in (*self._reading, *self._running):
                synthesis.aborted = synthesis.aborted or synthesis.request.request_id == request_id
            self._changed.notify_all()
        _fail(ended)

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                requests_done=self._requests_done,
                frames=self._samples_made // _SAMPLES_PER_FRAME,
                audio_seconds=self._samples_made / SAMPLE_RATE,
            )

    def close(self) -> None:
        """Ends the threads; what waits or runs fails with `synth.aborted`. May be called more than once."""
        with self._changed:
            self._closed = True
            ended = list(self._waiting)
            self._waiting.clear()
            for synthesis in self._running:
                synthesis.aborted = True
            self._changed.notify_all()
        _fail(ended)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        while (synthesis := self._next()) is not None:
            if synthesis.future.set_running_or_notify_cancel():
                self._finish(synthesis)
            with self._changed:
                self._running.discard(synthesis)

    def _next(self) -> _Synthesis | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            synthesis = self._waiting.popleft()
            self._running.add(synthesis)
            self._changed.notify_all()
            return synthesis

    def _finish(self, synthesis: _Synthesis) -> None:
        try:
            speech = self._synthesize(synthesis)
        except NightjarError as error:
            synthesis.future.set_exception(error)
        except MemoryError as error:
            failure = SynthesisError(ErrorCode.SYNTH_OOM, "There was not enough memory for this speech.", "Use fewer threads.")
            failure.__cause__ = error
            synthesis.future.set_exception(failure)
        except Exception as error:  # noqa: BLE001  # whatever the runtime raises ends this request, not the thread
            failure = SynthesisError(ErrorCode.SYNTH_ENGINE, f"hibari failed: {type(error).__name__}: {error}.", "Try again.")
            failure.__cause__ = error
            synthesis.future.set_exception(failure)
        else:
            with self._changed:
                self._requests_done += 1
                self._samples_made += len(speech.samples)
            synthesis.future.set_result(speech)

    def _synthesize(self, synthesis: _Synthesis) -> Speech:
        generator = np.random.default_rng(synthesis.request.seed)
        limit = synthesis.request.generation.max_seconds
        parts: list[NDArray[np.float32]] = []
        seconds = 0.0
        for piece in synthesis.pieces:
            if synthesis.aborted:
                raise _aborted()
            parts.append(self._reader.voice.from_ids(piece, 1.0, generator))
            seconds += len(parts[-1]) / SAMPLE_RATE
            if limit is not None and seconds > limit:
                raise InputError(
                    ErrorCode.INPUT_TOO_LONG, f"The speech is longer than max_seconds ({limit:g}).", "Shorten the text or raise the limit."
                )
        if synthesis.aborted:
            raise _aborted()
        raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
        samples, lufs = normalize_loudness(raw, SAMPLE_RATE)
        if lufs == -math.inf or max(float(raw.max()), -float(raw.min())) < _SILENT_PEAK:
            raise SynthesisError(ErrorCode.SYNTH_SILENT, "The voice made no audible speech of this text.", "Check the text.")
        meta: dict[str, str | int | float | bool] = {
            "frames": len(samples) // _SAMPLES_PER_FRAME,
            "finish_reason": "stop",
            "loudness_lufs": round(lufs, 2),
        }
        return Speech(samples, SAMPLE_RATE, synthesis.text, meta=meta)


def _aborted() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.", "Submit it again.")


def _fail(syntheses: list[_Synthesis]) -> None:
    for synthesis in syntheses:
        if synthesis.future.set_running_or_notify_cancel():
            synthesis.future.set_exception(_aborted())
