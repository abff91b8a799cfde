"""A fake engine that streams without a thread for each stream, and its plug-in `fake-streaming` of the
engine `native`."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.registry import ModelCard
from pipelines.request import (
    AudioChunk,
    Done,
    EngineStats,
    Failed,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    Speech,
    SynthesisRequest,
)
from tests.support.fakes import LOOK_SECONDS, SAMPLE_RATE, FakePipeline, Markers, spoken_text

NAME = "fake-streaming"


class StreamingPipeline(FakePipeline):
    """Each stream is `chunks` chunks of `samples` samples and an end, `seconds` apart, all from one thread.

    Markers in a text: `[[chunks:N]]` and `[[seconds:S]]` change these; `[[refuse:CODE]]` and `[[crash]]`
    as with `FakePipeline`; `[[fail:CODE]]` fails after the first chunk; `[[encode:PATH]]` starts when
    there is a file PATH, and `start` blocks until then.
    """

    def __init__(
        self, name: str = NAME, *, chunks: int = 4, seconds: float = 0.0, samples: int = 320, **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.capabilities = replace(self.capabilities, streaming=True)
        self._chunks, self._seconds_apart, self._samples = chunks, seconds, samples
        self._due: list[tuple[float, int, Listener, int, Markers]] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self.live: set[Listener] = set()
        threading.Thread(target=self._speak, name="fake-codec", daemon=True).start()

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        if not stream:
            return super().start(request, on_event)
        assert isinstance(request, SynthesisRequest)
        markers = Markers.of(spoken_text(request))
        if "refuse" in markers.words:
            raise InputError(ErrorCode(markers.words["refuse"]), "The fake engine refuses this text.")
        while "encode" in markers.words and not os.path.exists(markers.words["encode"]):
            time.sleep(LOOK_SECONDS)
        listener = Listener(on_event, lambda _done: self._leave(listener))
        with self._wake:
            self.live.add(listener)
            heapq.heappush(self._due, (time.monotonic(), next(self._numbers), listener, 0, markers))
            self._wake.notify()
        return listener

    def stats(self) -> EngineStats:
        return replace(super().stats(), running=len(self.live))

    def _leave(self, listener: Listener) -> None:
        with self._wake:
            self.live.discard(listener)
            self._done += 1

    def _speak(self) -> None:
        while True:
            with self._wake:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._wake.wait(max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None)
                at, _, listener, count, markers = heapq.heappop(self._due)
            if not listener.is_open:
                continue
            if "crash" in markers.words:
                self._crash()
            if count and "fail" in markers.words:
                listener(
                    Failed(
                        SynthesisError(ErrorCode(markers.words["fail"]), "The fake engine was asked to fail.")
                    )
                )
                continue
            final = count == int(markers.words.get("chunks", self._chunks))
            if final:
                listener(Done(Speech(np.zeros(0, np.float32), SAMPLE_RATE)))
            else:
                listener(AudioChunk(np.full(self._samples, (count + 1) / 64, np.float32), SAMPLE_RATE))
                after = at + float(markers.words.get("seconds", self._seconds_apart))
                with self._wake:
                    heapq.heappush(self._due, (after, next(self._numbers), listener, count + 1, markers))


def describe() -> ModelCard:
    from tests.support.fake_worker import fake_card

    card = fake_card(NAME)
    return replace(card, engine="native", capabilities=replace(card.capabilities, streaming=True))


def load(**options: Any) -> StreamingPipeline:
    return StreamingPipeline(NAME, **options)
