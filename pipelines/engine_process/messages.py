"""The messages between an engine process and its client. Messages name requests by numbers, because ids may
repeat.

A request has only the digests of its recordings. The child asks for the samples of a voice that it has not kept,
so that the client's process decodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pipelines.errors import NightjarError
from pipelines.recording import Reading
from pipelines.request import (
    AudioChunk,
    Capabilities,
    EngineInfo,
    EngineStats,
    Generation,
    Modality,
    Output,
    PreparedRequest,
    Role,
    Speech,
)


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message, tagged with the name of its class."""


class RequestRecord(_Message, frozen=True):
    """The fields of a `SynthesisRequest`, in their order."""

    request_id: str
    #: The content is text; None stands for the next recording of the request.
    messages: tuple[tuple[Role, Modality, str | None], ...]
    generation: Generation
    seed: int
    text_open: bool
    timestamps: bool
    output: Output = "audio"
    pronunciations: Mapping[str, str] = {}


class Open(_Message, frozen=True):
    """The first message: the arguments of `open_pipeline`."""

    model: str
    options: dict[str, Any]


class Import(_Message, frozen=True):
    """The first message to a spare child: it imports these modules, reads the model's tokenizer, and waits for
    `Open`."""

    modules: list[str]
    model: str


class Start(_Message, frozen=True):
    """The arguments of `Pipeline.start`."""

    number: int
    #: The request without its recordings.
    request: RequestRecord | PreparedRequest
    stream: bool
    #: The digests of the request's recordings, in their order.
    recordings: list[str] = []


class Answer(_Message, frozen=True):
    """The answer to `Wanted`: samples and their rate, the bytes (uint8) of a file, or a `NightjarError`."""

    wanted: int
    data: Any
    sample_rate: int = 0


class Append(_Message, frozen=True):
    """The arguments of `Handle.append`."""

    number: int
    text: str | list[int]
    final: bool


class Cancel(_Message, frozen=True):
    """Cancels a request."""

    number: int


class Close(_Message, frozen=True):
    """The child closes the pipeline and ends."""


#: Messages to the child.
ToChild = Import | Open | Start | Answer | Append | Cancel | Close


class Opened(_Message, frozen=True):
    name: str
    sample_rate: int
    capabilities: Capabilities
    info: EngineInfo
    #: Our modules that the child has imported.
    modules: list[str]


class NotOpened(_Message, frozen=True):
    """The model could not be opened; the child ends."""

    error: NightjarError


class Accepted(_Message, frozen=True):
    """The pipeline has accepted or refused a request, and reads none of its recordings any more. The client may
    send another whole utterance. Not sent for a stream without recordings, for which nothing waits."""

    number: int


class Wanted(_Message, frozen=True):
    """Asks for the samples (float32) of a recording of a request that is not accepted yet, or for its file."""

    #: The number of this message.
    wanted: int
    number: int
    #: Position among the request's recordings.
    place: int
    #: None: the file.
    reading: Reading | None


class SpeechMessage(_Message, frozen=True):
    """A `Done` in a message."""

    number: int
    speech: Speech


class RequestFailed(_Message, frozen=True):
    """A `Failed` in a message."""

    number: int
    error: NightjarError


class ChunkMessage(_Message, frozen=True):
    number: int
    chunk: AudioChunk


class Stats(_Message, frozen=True):
    stats: EngineStats
    #: May have changed, for example because a persistent kernel was disabled.
    info: EngineInfo


#: Messages to the client.
ToClient = Opened | NotOpened | Accepted | Wanted | SpeechMessage | RequestFailed | ChunkMessage | Stats
