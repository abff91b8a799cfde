"""A fake engine that takes recordings as `Recording`s, and reads each once."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
from numpy.typing import NDArray

from pipelines.recording import Reading, ReadsRecordings, Recording, RecordingCache
from pipelines.registry import ModelCard
from pipelines.request import Speech, SynthesisRequest
from tests.support.fakes import FakePipeline

NAME = "fake-reading"
#: How it reads recordings.
RATE, CHANNEL = 24_000, 0


def heard(samples: NDArray[Any]) -> str:
    """What it writes for a recording with these samples."""
    return hashlib.sha256(samples.tobytes()).hexdigest()


class ReadingPipeline(FakePipeline, ReadsRecordings):
    """Writes what it heard in its recordings beside its audio. It reads one that it knows already no more."""

    def __init__(self, **options: Any) -> None:
        super().__init__(NAME, **options)
        self._known: RecordingCache[str] = RecordingCache(1 << 20, len)

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        recordings = [one.content for one in request.messages if isinstance(one.content, Recording)]
        said = " ".join(self._known.get(one, None, lambda one=one: self._read(one)) for one in recordings)
        text = msgspec.structs.replace(request.messages[-1], content=f"[[says:{said}]]")
        return super().submit(replace(request, messages=(text,)))

    def _read(self, recording: Recording) -> str:
        samples, rate = recording.read(Reading(RATE, CHANNEL, "VHQ", True))
        assert rate == RATE
        return heard(samples)


def describe() -> ModelCard:
    from tests.support.fake_worker import fake_card

    return replace(fake_card(NAME), engine="native")


def load(**options: Any) -> ReadingPipeline:
    return ReadingPipeline(**options)
