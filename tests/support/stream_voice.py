"""A pipeline that streams at once: a tone whose pitch says which text and seed it is."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.request import AudioChunk, Capabilities, EngineInfo, EngineStats, Speech, SynthesisRequest
from pipelines.validation import speech_task
from tests.support.called import CalledPipeline
from tests.support.fakes import spoken_text

SAMPLE_RATE = 24_000
CHUNKS = 4


def tone(text: str, seed: int, rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    """The speech of a unit, float32 [samples]: begins and ends in silence."""
    digest = int.from_bytes(hashlib.sha256(f"{text}|{seed}".encode()).digest()[:4], "big")
    length = rate // 20 + rate // 200 * min(len(text), 100)
    wave = np.sin(2 * np.pi * (200 + digest % 997) / rate * np.arange(length)) * np.hanning(length)
    return (0.3 * wave).astype(np.float32)


class StreamVoice(CalledPipeline):
    """Streams `tone`. In a text `hold` waits after the first chunk until `let_go` or abort; `refuse` and
    `break` fail around it."""

    name = "tone"
    sample_rate = SAMPLE_RATE
    info = EngineInfo()

    def __init__(self, **capabilities: object) -> None:
        self.capabilities = Capabilities(
            **{"voices": ("ada", "bob"), "languages": ("english",), "streaming": True, **capabilities}
        )  # type: ignore[arg-type]
        self.requests: list[SynthesisRequest] = []
        self.aborted: set[str] = set()
        self.running = 0
        self._changed = threading.Condition()
        self._free = False

    @property
    def texts(self) -> list[str]:
        """What was said, in order."""
        return [spoken_text(request) for request in self.requests]

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        future: Future[Speech] = Future()
        pieces = list(self.stream(request))
        future.set_result(Speech(np.concatenate([piece.samples for piece in pieces]), self.sample_rate))
        return future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        text = speech_task(request.messages, request.generation, self.capabilities).text
        if "refuse" in text:
            raise InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, "The voice cannot read this.", "Write it out.")
        self.requests.append(request)
        samples = tone(text, request.seed)
        cuts = np.linspace(0, len(samples), CHUNKS + 1).astype(int)
        with self._changed:
            self.running += 1
        try:
            for begin, end in pairwise(cuts):
                yield AudioChunk(samples[begin:end], self.sample_rate)
                if "break" in text:
                    raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The engine broke.")
                if "hold" in text:
                    self._wait(request.request_id)
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()

    def _wait(self, request_id: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free or request_id in self.aborted)
            if request_id in self.aborted:
                raise SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was ended.")

    def let_go(self) -> None:
        with self._changed:
            self._free = True
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborted.add(request_id)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    def close(self) -> None:
        self.let_go()
