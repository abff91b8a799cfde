"""Recordings of voices on their way to an engine's process: each is sent once, and requests name it by a number.

A voice speaks many requests, sentence by sentence or item by item, and its recording is a thousand times as long as a text.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from pipelines.engine_process.messages import Keep, RequestRecord
from pipelines.request import PreparedRequest

#: Of the recordings used last, which the child keeps.
MAXIMUM_BYTES = 64 << 20


class SentRecordings:
    """What the child keeps, as its client knows it. Numbers are never used again."""

    def __init__(self, maximum_bytes: int = MAXIMUM_BYTES) -> None:
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._unused = itertools.count(1)

    def numbered(self, recordings: Sequence[bytes]) -> tuple[list[int], list[Keep]]:
        """The numbers of the recordings of one request, and those that the child has to be given before it."""
        new: dict[bytes, int] = {}
        numbers: list[int] = []
        for recording in recordings:
            if recording in self._numbers:
                self._numbers.move_to_end(recording)
                numbers.append(self._numbers[recording])
            else:
                numbers.append(new.setdefault(recording, next(self._unused)))
        return numbers, [Keep(number, recording) for recording, number in new.items()]

    def sent(self, given: Sequence[Keep]) -> list[int]:
        """The child is given these; the numbers of those that it has to forget after the request."""
        for keep in given:
            self._numbers[keep.recording] = keep.number
            self._bytes += len(keep.recording)
        forgotten: list[int] = []
        while self._bytes > self._maximum_bytes:
            recording, number = self._numbers.popitem(last=False)
            self._bytes -= len(recording)
            forgotten.append(number)
        return forgotten


def recordings_of(request: RequestRecord | PreparedRequest) -> list[bytes]:
    """The recordings of a request, in their order."""
    if isinstance(request, PreparedRequest):
        return [] if request.recording is None else [request.recording]
    return [content for _, _, content in request.messages if isinstance(content, bytes)]


def with_recordings(request: RequestRecord | PreparedRequest, recordings: Sequence[bytes]) -> RequestRecord | PreparedRequest:
    """The request with these in the places of its recordings."""
    if not recordings:
        return request
    if isinstance(request, PreparedRequest):
        return msgspec.structs.replace(request, recording=recordings[0])
    left = iter(recordings)
    messages = tuple([(role, kind, next(left) if isinstance(content, bytes) else content) for role, kind, content in request.messages])
    return msgspec.structs.replace(request, messages=messages)
