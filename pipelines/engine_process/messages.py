"""What an engine process and its client say to each other. A request has a number of its own, because its id may come twice."""

from __future__ import annotations

from typing import Any

import msgspec

from pipelines.errors import (
    ConfigError,
    EngineCrashError,
    ErrorCode,
    InputError,
    ModelError,
    NightjarError,
    NoAudioError,
    NotFoundError,
    ServiceError,
    StoreError,
    SynthesisError,
)
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

Meta = dict[str, str | int | float | bool]

#: The child's variable with the process id of its client.
CLIENT_PID = "NIGHTJAR_ENGINE_CLIENT_PID"

_CLASSES: dict[str, type[NightjarError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        EngineCrashError,
        InputError,
        ModelError,
        NightjarError,
        NotFoundError,
        ServiceError,
        StoreError,
        SynthesisError,
    )
}


class ErrorRecord(msgspec.Struct, frozen=True):
    """A `NightjarError` as it travels."""

    #: The name of its class in `pipelines.errors`, or of the nearest one there.
    kind: str
    code: ErrorCode
    message: str
    advice: str
    #: Of a `NoAudioError`.
    text_out: str | None = None
    meta: Meta = {}

    @classmethod
    def of(cls, error: NightjarError) -> ErrorRecord:
        if isinstance(error, NoAudioError):
            return cls(NoAudioError.__name__, error.code, error.message, error.advice, error.text_out, plain(error.meta))
        kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _CLASSES)
        return cls(kind, error.code, error.message, error.advice)

    @property
    def error(self) -> NightjarError:
        if self.text_out is not None:
            return NoAudioError(self.message, self.advice, self.text_out, self.meta)
        return _CLASSES[self.kind](self.code, self.message, self.advice)


def plain(meta: Meta) -> Meta:
    """Facts whose numbers are Python's own: NumPy's do not travel. What is neither text nor a number becomes text."""
    values: dict[str, Any] = meta
    own = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in own.items()}


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
        messages: tuple[tuple[Role, Modality, Any], ...] = tuple((one.role, one.modality, one.content) for one in request.messages)
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


class SpeechMade(msgspec.Struct, frozen=True, tag=True):
    """A `Done`; the samples of its speech, float32, come as a descriptor, where it has any."""

    number: int
    sample_rate: int
    text: str
    text_out: str | None
    meta: Meta

    @classmethod
    def of(cls, number: int, speech: Speech) -> SpeechMade:
        return cls(number, speech.sample_rate, speech.text, speech.text_out, plain(speech.meta))


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A `Failed`."""

    number: int
    error: ErrorRecord


class ChunkMade(msgspec.Struct, frozen=True, tag=True):
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
ToClient = Opened | NotOpened | Taken | SpeechMade | RequestFailed | ChunkMade | Stats
