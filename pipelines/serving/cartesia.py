"""What clients of Cartesia's protocol send, and what they are sent: over `/tts/websocket`, and to
`/tts/bytes` and `/tts/sse`."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from pipelines.errors import ErrorCode
from pipelines.request import Generation, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import MAX_RATE, MIN_RATE, Encoding, PcmStream
from pipelines.serving.errors import as_api_error, bad_request, check_text, empty_text
from pipelines.serving.request_body import Body, SpokenBody
from pipelines.serving.streaming import EVENT_STREAM, Head, Parts, Serving, event, spoken, unit_requests
from pipelines.serving.text_units import units_of

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
#: What must stay the same in a context.
SETTINGS = frozenset({"model_id", "voice", "language", "output_format", "generation_config"})

_IGNORE_OTHERS = ConfigDict(extra="ignore")

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class Voice(Body):
    """A voice by its name."""

    model_config = _IGNORE_OTHERS

    id: Name | None = None
    mode: Literal["id"] = "id"


class OutputFormat(Body):
    """How the audio comes."""

    model_config = _IGNORE_OTHERS

    container: Literal["raw", "wav"] = "raw"
    encoding: Encoding = "pcm_s16le"
    sample_rate: Annotated[int, Field(ge=MIN_RATE, le=MAX_RATE)] = 24_000


class GenerationConfig(SpokenBody):
    """Settings of ours, as in a line's `generation`. Cartesia's own (speed, volume, emotion) mean nothing
    here."""

    model_config = _IGNORE_OTHERS

    instruct: str | None = None
    cfg: float | None = None


class SpeechFields(Body):
    """What every request for speech says."""

    model_config = ConfigDict(extra="allow")

    transcript: str = ""
    model_id: Name | None = None
    #: Newer clients give the bare name.
    voice: Annotated[
        Voice | None, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)
    ] = None
    language: Annotated[Name | None, Field(validation_alias=AliasChoices("language", "locale"))] = None
    output_format: OutputFormat = OutputFormat()
    generation_config: GenerationConfig = GenerationConfig()


class EventsRequest(SpeechFields):
    """A text whose speech comes as events, each with the name that the client gave them."""

    context_id: Name | None = None


class ContextMessage(SpeechFields):
    """One message of a context."""

    context_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    more: Annotated[bool, Field(alias="continue")] = False
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: Annotated[float, Field(ge=0, le=_MAX_BUFFER_MS)] = DEFAULT_BUFFER_MS


def check_fields(fields: SpeechFields) -> None:
    """Raises `ApiError` (400) for what no model does here."""
    # Pipecat's and LiveKit's services always ask for times of words over a WebSocket, and speak without them.
    unasked = "add_timestamps" if isinstance(fields, ContextMessage) else None
    for name in _ABSENT:
        if name != unasked and (fields.model_extra or {}).get(name):
            message = f"`{name}` is not supported here. Remove it."
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED, name)


def check_speech(serving: Serving, fields: SpeechFields) -> None:
    """Raises `ApiError` (400, 404) for what this model and this route cannot do."""
    if fields.output_format.container != "raw" and isinstance(fields, (EventsRequest, ContextMessage)):
        message = "Messages have the container `raw`; /tts/bytes sends WAV."
        raise bad_request(message, "invalid_value", "output_format.container")
    serving.voices.check_model(fields.model_id, "model_id")


def check(serving: Serving, fields: SpeechFields) -> None:
    """As `check_fields` and `check_speech`, and for a text that no slot is worth."""
    check_fields(fields)
    check_speech(serving, fields)
    check_text(fields.transcript, serving.options.context_characters, "transcript")


async def request_of(serving: Serving, fields: SpeechFields, request_id: str) -> SynthesisRequest:
    """The request with its whole transcript. Raises `InputError`."""
    config = fields.generation_config
    # Clients name a language to models that have none to choose from, too.
    language = fields.language if serving.model.card.capabilities.languages else None
    generation = Generation(language=language, **config.settings())
    asked = None if fields.voice is None else fields.voice.id
    return await serving.voices.request(
        request_id, config.seed_or_new(), asked, generation, fields.transcript
    )


def encoder_of(serving: Serving, output: OutputFormat) -> PcmStream:
    """Makes the bytes of a format."""
    rate = serving.model.card.sample_rate
    return PcmStream(rate, output.sample_rate, output.encoding, with_header=output.container == "wav")


async def answer(serving: Serving, fields: SpeechFields, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer to a whole text: bytes, or events, which are the messages of a context. Raises
    `ApiError` and `NightjarError`."""
    request = await request_of(serving, fields, request_id)
    units = units_of(fields.transcript)
    if not units:
        raise empty_text()
    requests = unit_requests(request, units)
    headers = {"x-seed": str(request.seed)}
    async with aclosing(
        spoken(serving, requests, permit, encoder_of(serving, fields.output_format))
    ) as pieces:
        if not isinstance(fields, EventsRequest):
            yield Head(
                "audio/wav" if fields.output_format.container == "wav" else "application/octet-stream",
                headers,
            )
            async for piece in pieces:
                yield piece
            return
        name, step = fields.context_id, permit.since
        headers["cache-control"] = "no-cache"
        yield Head(EVENT_STREAM, headers, lambda error: failure(error, name) | {"request_id": request_id})
        async for piece in pieces:
            now = time.monotonic()
            yield event(chunk(name, piece, 1000 * (now - step)))
            step = now
        yield event(done(name))


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


def failure(error: Exception, context_id: str | None) -> dict[str, Any]:
    """An error, which ends the context that it names."""
    api_error = as_api_error(error)
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
