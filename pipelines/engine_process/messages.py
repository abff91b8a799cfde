"""What an engine process and its client say to each other. A request has a number of its own, because its
id may come twice.

The recording of a voice is sent once, and requests name it by a number: a voice speaks many requests,
sentence by sentence or item by item, and its recording is a thousand times as long as a text.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec

from pipelines.ipc import ErrorRecord
from pipelines.request import (
    Capabilities,
    EngineInfo,
    EngineStats,
    Generation,
    Modality,
    PreparedRequest,
    Role,
)

Key = TypeVar("Key")
Value = TypeVar("Value")


class RequestRecord(msgspec.Struct, frozen=True, tag=True):
    """A `SynthesisRequest` as it travels."""

    request_id: str
    #: The content is text; None: the next one of the recordings that come with the request.
    messages: tuple[tuple[Role, Modality, str | None], ...]
    generation: Generation
    seed: int
    text_open: bool


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first message: what `open_pipeline` takes."""

    model: str
    options: dict[str, Any]
    #: Of the recordings used last, which the child keeps.
    recording_bytes: int


class Recording(msgspec.Struct, frozen=True, tag=True):
    """A recording that is new, before the first request that names it."""

    number: int
    data: bytes


class Start(msgspec.Struct, frozen=True, tag=True):
    """What `Pipeline.start` takes."""

    number: int
    #: Without its recordings.
    request: RequestRecord | PreparedRequest
    stream: bool
    #: The numbers of the request's recordings, in their order.
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
ToChild = Open | Recording | Start | Append | Cancel | Close


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
    meta: dict[str, Any]


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


class RecentRecordings(Generic[Key, Value]):
    """The recordings that requests named last. Client and child keep the same ones, because they see the
    same requests in the same order: the client their numbers by their bytes, the child the reverse."""

    def __init__(self, maximum_bytes: int) -> None:
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """What is kept of a recording, which was used now; None: it is new."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Keeps one of so many bytes, where it is new."""
        if key not in self._kept:
            self._kept[key] = value, size
            self._bytes += size

    def forget(self) -> None:
        """Forgets those that are too many, once a request has all of its own."""
        while self._bytes > self._maximum_bytes:
            self._bytes -= self._kept.popitem(last=False)[1][1]
