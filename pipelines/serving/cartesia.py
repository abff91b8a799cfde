"""What clients of Cartesia's protocol send, and what they are sent: over `/tts/websocket`, and to
`/tts/bytes` and `/tts/sse`."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec

from pipelines.errors import ErrorCode, NightjarError
from pipelines.serving.encoding import MAX_RATE, MIN_RATE, Encoding
from pipelines.serving.errors import ApiError, as_api_error, bad_request, unknown_field

#: Cartesia's own: how long text waits for the end of its sentence where a client does not say.
DEFAULT_BUFFER_MS = 3_000
_MAX_BUFFER_MS = 60_000
#: Of the name of a context, a voice, a language or a model.
MAX_NAME_CHARACTERS = 200
_TITLES = {
    400: "Invalid request",
    401: "Unauthorized",
    404: "Not found",
    422: "No usable speech",
    429: "Too many requests",
}
#: Fields that ask for what no model makes here.
_ABSENT = ("add_timestamps", "add_phoneme_timestamps", "pronunciation_dict_id", "save")
#: Fields of Cartesia's clients that change nothing here.
_IGNORED = frozenset({*_ABSENT, "normalization", "speed", "use_normalized_timestamps"})

T = TypeVar("T", bound=msgspec.Struct)

Text = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Voice(msgspec.Struct, frozen=True):
    """A voice by its name."""

    id: Text | None = None
    mode: Literal["id"] = "id"


class OutputFormat(msgspec.Struct, frozen=True):
    """How the audio comes."""

    container: Literal["raw", "wav"] = "raw"
    encoding: Encoding = "pcm_s16le"
    sample_rate: Annotated[int, msgspec.Meta(ge=MIN_RATE, le=MAX_RATE)] = 24_000


class GenerationConfig(msgspec.Struct, frozen=True):
    """`generation_config`: settings of ours, as in a line's `generation`. Cartesia's own (speed, volume,
    emotion) mean nothing here."""

    seed: Seed | None = None
    instruct: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    cfg: float | None = None
    max_seconds: float | None = None


class SpeechFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every request for speech says."""

    transcript: str = ""
    model_id: Text | None = None
    voice: Voice | None = None
    language: Text | None = None
    output_format: OutputFormat | None = None
    generation_config: GenerationConfig | None = None

    @property
    def seed(self) -> int:
        """The seed that was asked for, or a new one."""
        asked = None if self.generation_config is None else self.generation_config.seed
        return secrets.randbits(63) if asked is None else asked


class EventsRequest(SpeechFields, frozen=True, kw_only=True):
    """A text whose speech comes as events, each with the name that the client gave them."""

    context_id: Text | None = None


class ContextMessage(SpeechFields, frozen=True, kw_only=True):
    """One message of a context."""

    context_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    more: bool = msgspec.field(default=False, name="continue")
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: Annotated[float, msgspec.Meta(ge=0, le=_MAX_BUFFER_MS)] = DEFAULT_BUFFER_MS

    def settings(self) -> dict[str, Any]:
        """What must stay the same in a context, as far as it was given."""
        names = ("model_id", "voice", "language", "output_format", "generation_config")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def as_object(given: object) -> dict[str, Any]:
    """The JSON object of a message. Raises `ApiError` (400)."""
    if not isinstance(given, dict):
        raise bad_request("The message is not a JSON object.", ErrorCode.INPUT_BAD_JSON.value)
    return cast("dict[str, Any]", given)


def typed(given: object, kind: type[T], *, strict: bool = False) -> T:
    """The message of this kind. Raises `ApiError` (400) that names the field at fault; with `strict` also
    for a field nobody knows."""
    given = _in_first_words(as_object(given))
    # Pipecat's and LiveKit's services always ask for times of words over a WebSocket, and speak without them.
    unasked = () if strict or kind is not ContextMessage else ("add_timestamps",)
    absent = next((name for name in _ABSENT if given.get(name) and name not in unasked), None)
    if absent is not None:
        raise bad_request(
            f"`{absent}` is not supported here. Remove it.", ErrorCode.INPUT_UNSUPPORTED.value, absent
        )
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    unknown = sorted(given.keys() - known - _IGNORED)
    if strict and unknown:
        raise unknown_field(unknown[0])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        raise bad_request(f"`{param}`: {said}." if param else f"{said}.", "invalid_value", param) from None


def _in_first_words(given: dict[str, Any]) -> dict[str, Any]:
    """The fields without nulls; the words of newer clients, a bare name as the voice and `locale`, as
    those that all of them know."""
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("voice"), str):
        given["voice"] = {"id": given["voice"]}
    if "locale" in given:
        given.setdefault("language", given.pop("locale"))
    return given


def chunk(context_id: str | None, data: bytes, step_ms: float) -> dict[str, Any]:
    """A piece of speech."""
    facts = {"done": False, "status_code": 206, "step_time": round(step_ms, 3), "context_id": context_id}
    return {"type": "chunk", "data": data, **facts}


def flush_done(context_id: str, number: int) -> dict[str, Any]:
    """All that was said before a flush is sent; flushes of a context are numbered from 1."""
    return {
        "type": "flush_done",
        "done": False,
        "flush_done": True,
        "flush_id": number,
        "status_code": 206,
        "context_id": context_id,
    }


def done(context_id: str | None) -> dict[str, Any]:
    """The context is over."""
    return {"type": "done", "done": True, "status_code": 206, "context_id": context_id}


def failure(error: NightjarError | ApiError, context_id: str | None) -> dict[str, Any]:
    """An error, which ends the context that it names."""
    api_error = as_api_error(error) if isinstance(error, NightjarError) else error
    view = {
        "type": "error",
        "done": True,
        "title": _TITLES.get(api_error.status_code, "Server error"),
        "message": str(api_error.detail),
        "error_code": api_error.code or "internal_error",
        "status_code": api_error.status_code,
        "context_id": context_id,
    }
    headers = api_error.headers or {}
    return view | {"retry_after": int(headers["retry-after"])} if "retry-after" in headers else view
