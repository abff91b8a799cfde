"""The messages between an engine process and its client. Messages name requests by numbers, because ids may
repeat.

The recording of a voice is sent once and then named by its number: many requests use the same voice, and a
recording is a thousand times as long as a text.
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
    """A `SynthesisRequest` in a message."""

    request_id: str
    #: The content is text; None stands for the next recording of the request.
    messages: tuple[tuple[Role, Modality, str | None], ...]
    generation: Generation
    seed: int
    text_open: bool


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first message: the arguments of `open_pipeline`."""

    model: str
    options: dict[str, Any]
    #: Maximum bytes of the recordings that the child keeps.
    recording_bytes: int


class Recording(msgspec.Struct, frozen=True, tag=True):
    """A new recording; it precedes the first request that names it."""

    number: int
    data: bytes


class Start(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `Pipeline.start`."""

    number: int
    #: The request without its recordings.
    request: RequestRecord | PreparedRequest
    stream: bool
    #: The numbers of the request's recordings, in their order.
    recordings: list[int] = []


class Append(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `Handle.append`."""

    number: int
    text: str | list[int]
    final: bool


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancels a request."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """The child closes the pipeline and ends."""


#: Messages to the child.
ToChild = Open | Recording | Start | Append | Cancel | Close


class Opened(msgspec.Struct, frozen=True, tag=True):
    name: str
    sample_rate: int
    capabilities: Capabilities
    info: EngineInfo


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """The model could not be opened; the child ends."""

    error: ErrorRecord


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The pipeline has accepted a whole utterance; the client may send another one."""

    number: int


class SpeechMessage(msgspec.Struct, frozen=True, tag=True):
    """A `Done` in a message. Its samples (float32), if there are any, are in shared memory."""

    number: int
    sample_rate: int
    text: str
    text_out: str | None
    meta: dict[str, Any]


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A `Failed` in a message."""

    number: int
    error: ErrorRecord


class ChunkMessage(msgspec.Struct, frozen=True, tag=True):
    """An `AudioChunk` in a message, with its samples as bytes of float32."""

    number: int
    samples: bytes
    sample_rate: int
    text: str


class Stats(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats
    #: Set if it has changed, for example because a persistent kernel was disabled.
    info: EngineInfo | None = None


#: Messages to the client.
ToClient = Opened | NotOpened | Accepted | SpeechMessage | RequestFailed | ChunkMessage | Stats


class RecentRecordings(Generic[Key, Value]):
    """A cache of the recently used recordings. Client and child keep the same ones, because they process the
    same requests in the same order: the client maps bytes to numbers, the child numbers to bytes."""

    def __init__(self, maximum_bytes: int) -> None:
        self._maximum_bytes = maximum_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        """The value of a recording, which becomes the most recent one; None: it is new."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Adds a recording of `size` bytes, if it is new."""
        if key not in self._kept:
            self._kept[key] = value, size
            self._bytes += size

    def forget(self) -> None:
        """Removes the oldest recordings beyond the limit; called after each request."""
        while self._bytes > self._maximum_bytes:
            self._bytes -= self._kept.popitem(last=False)[1][1]
