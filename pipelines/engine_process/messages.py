"""The messages between an engine process and its client. Messages name requests by numbers, because ids may
repeat.

A request has only the digests of its recordings. The child asks for the samples of a voice that it has not kept,
so that the client's process decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipelines.ipc import ErrorRecord
from pipelines.recording import Quality
from pipelines.request import (
    Capabilities,
    EngineInfo,
    EngineStats,
    Generation,
    Modality,
    Output,
    PreparedRequest,
    Role,
    Word,
)

#: Arguments of `Recording.read`: the sample rate, the channel and the quality.
Reading = tuple[int | None, int | None, Quality]


class RequestRecord(msgspec.Struct, frozen=True, tag=True):
    """A `SynthesisRequest` in a message."""

    request_id: str
    #: The content is text; None stands for the next recording of the request.
    messages: tuple[tuple[Role, Modality, str | None], ...]
    generation: Generation
    seed: int
    text_open: bool
    timestamps: bool
    output: Output = "audio"
    pronunciations: Mapping[str, str] = {}


class Open(msgspec.Struct, frozen=True, tag=True):
    """The first message: the arguments of `open_pipeline`."""

    model: str
    options: dict[str, Any]


class Start(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `Pipeline.start`."""

    number: int
    #: The request without its recordings.
    request: RequestRecord | PreparedRequest
    stream: bool
    #: The digests of the request's recordings, in their order.
    recordings: list[str] = []


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Wanted`: an error, or what was wanted in shared memory, and the rate of samples."""

    wanted: int
    sample_rate: int = 0
    error: ErrorRecord | None = None


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
ToChild = Open | Start | Answer | Append | Cancel | Close


class Opened(msgspec.Struct, frozen=True, tag=True):
    name: str
    sample_rate: int
    capabilities: Capabilities
    info: EngineInfo


class NotOpened(msgspec.Struct, frozen=True, tag=True):
    """The model could not be opened; the child ends."""

    error: ErrorRecord


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The pipeline has accepted or refused a request, and reads none of its recordings any more. The client may
    send another whole utterance. Not sent for streams without recordings."""

    number: int


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Asks for the samples (float32) of a recording of a request that is not accepted yet, or for its file."""

    #: The number of this message.
    wanted: int
    number: int
    #: Position among the request's recordings.
    place: int
    #: None: the file.
    reading: Reading | None


class SpeechMessage(msgspec.Struct, frozen=True, tag=True):
    """A `Done` in a message. Its samples (float32), if there are any, are in shared memory."""

    number: int
    sample_rate: int
    text: str
    text_out: str | None
    meta: dict[str, Any]
    words: tuple[Word, ...]
    phonemes: tuple[Word, ...]
    #: The codes and voice codes as bytes of int16 with `codebooks` in a frame, and the samples of a frame.
    codes: bytes | None = None
    voice_codes: bytes | None = None
    codebooks: int = 1
    frame_samples: int = 0


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
    words: tuple[Word, ...]
    phonemes: tuple[Word, ...]


class Stats(msgspec.Struct, frozen=True, tag=True):
    stats: EngineStats
    #: Set if it has changed, for example because a persistent kernel was disabled.
    info: EngineInfo | None = None


#: Messages to the client.
ToClient = Opened | NotOpened | Accepted | Wanted | SpeechMessage | RequestFailed | ChunkMessage | Stats
