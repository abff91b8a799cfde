"""What an engine process and its client say to each other. A request has a number of its own, because its
id may come twice.

The recording of a voice is sent once, and requests name it by a number: a voice speaks many requests,
sentence by sentence or item by item, and its recording is a thousand times as long as a text.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from pipelines.ipc import ErrorRecord, Meta, plain
from pipelines.request import (
    Capabilities,
    EngineInfo,
    EngineStats,
    Generation,
    Message,
    Modality,
    PreparedRequest,
    Role,
    Speech,
    SynthesisRequest,
)

#: Of the recordings used last, which the child keeps.
MAXIMUM_BYTES = 64 << 20


class RequestRecord(msgspec.Struct, frozen=True, tag=True):
    """A `SynthesisRequest` as it travels."""

    request_id: str
    #: The content is text, or the bytes of a recording.
    messages: tuple[tuple[Role, Modality, Any], ...]
    generation: Generation
    seed: int
    text_open: bool

    @classmethod
    def of(cls, request: SynthesisRequest) -> RequestRecord:
        messages: tuple[tuple[Role, Modality, Any], ...] = tuple(
            (one.role, one.modality, one.content) for one in request.messages
        )
        return cls(request.request_id, messages, request.generation, request.seed, request.text_open)

    @property
    def request(self) -> SynthesisRequest:
        messages = tuple(Message(*one) for one in self.messages)
        return SynthesisRequest(self.request_id, messages, self.generation, self.seed, self.text_open)


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first message: what `open_pipeline` takes."""

    model: str
    options: dict[str, Any]


class Keep(msgspec.Struct, frozen=True, tag=True):
    """A recording that requests name by its number from here on."""

    number: int
    recording: bytes


class Forget(msgspec.Struct, frozen=True, tag=True):
    """No request names these recordings any more."""

    numbers: list[int]


class Start(msgspec.Struct, frozen=True, tag=True):
    """What `Pipeline.start` takes."""

    number: int
    request: RequestRecord | PreparedRequest
    stream: bool
    #: Numbers of the request's recordings, in their order; in their places there is nothing.
    recordings: list[int] = []


class Append(msgspec.Struct, frozen=True, tag=True):
    """What `Handle.append` takes."""

    number: int
    text: str | list[int]
    final: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """The child closes the pipeline and ends."""


#: What the child receives.
ToChild = Open | Keep | Forget | Start | Append | Cancel | Close


class Opened(msgspec.Struct, frozen=True, tag=True):
    name: str
    sample_rate: int
    capabilities: Capabilities
    info: EngineInfo


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """The model could not be opened; the child ends."""

    error: ErrorRecord


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The pipeline has accepted a whole utterance: there is room for another one."""

    number: int


class SpeechMessage(msgspec.Struct, frozen=True, tag=True):
    """A `Done`; the samples of its speech, float32, come as a descriptor, where it has any."""

    number: int
    sample_rate: int
    text: str
    text_out: str | None
    meta: Meta

    @classmethod
    def of(cls, number: int, speech: Speech) -> SpeechMessage:
        return cls(number, speech.sample_rate, speech.text, speech.text_out, plain(speech.meta))


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A `Failed`."""

    number: int
    error: ErrorRecord


class ChunkMessage(msgspec.Struct, frozen=True, tag=True):
    """An `AudioChunk`, its samples as bytes of float32."""

    number: int
    samples: bytes
    sample_rate: int
    text: str


class Stats(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats
    #: Where it is no longer what the client was told: a persistent kernel can give up.
    info: EngineInfo | None = None


#: What the client receives.
ToClient = Opened | NotOpened | Taken | SpeechMessage | RequestFailed | ChunkMessage | Stats


class SentRecordings:
    """What the child keeps, as its client knows it. Numbers are never used again."""

    def __init__(self, maximum_bytes: int = MAXIMUM_BYTES) -> None:
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._unused = itertools.count(1)

    def numbered(self, recordings: Sequence[bytes]) -> tuple[list[int], list[Keep]]:
        """The numbers of the recordings of one request, and those that the child has to be given before
        it."""
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


def with_recordings(
    request: RequestRecord | PreparedRequest, recordings: Sequence[bytes]
) -> RequestRecord | PreparedRequest:
    """The request with these in the places of its recordings."""
    if not recordings:
        return request
    if isinstance(request, PreparedRequest):
        return msgspec.structs.replace(request, recording=recordings[0])
    left = iter(recordings)
    messages = tuple(
        [
            (role, kind, next(left) if isinstance(content, bytes) else content)
            for role, kind, content in request.messages
        ]
    )
    return msgspec.structs.replace(request, messages=messages)
