"""Cartesia's protocol: `/tts/bytes`, `/tts/sse` and `/tts/websocket`. Several contexts share a WebSocket; the
text of each arrives in pieces, and its speech is sent while it is made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from pipelines.errors import ErrorCode
from pipelines.request import Generation, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import MAX_RATE, MIN_RATE, Encoding, PcmStream
from pipelines.serving.errors import JsonObject, as_api_error, bad_request, check_text, empty_text
from pipelines.serving.request_body import Body, SpokenBody, Trim
from pipelines.serving.streaming import Head, Parts, Serving, SpeechPiece, event, event_head, speech_pieces
from pipelines.text_units import unit_requests, units_of

#: Cartesia's default for the time that text waits for the end of its sentence.
DEFAULT_BUFFER_MS = 3_000
_MAX_BUFFER_MS = 60_000
#: Maximum length of the name of a context, a voice, a language or a model.
MAX_NAME_CHARACTERS = 200
#: Maximum bytes of audio in one message, a multiple of the sample size of every encoding. Clients accept
#: messages of 1 MiB, and base64 adds a third.
MAX_PIECE_BYTES = 1 << 18

_IGNORE_OTHERS = ConfigDict(extra="ignore")

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class Voice(Body):
    """A voice by its name."""

    model_config = _IGNORE_OTHERS

    id: Name | None = None
    mode: Literal["id"] = "id"


class OutputFormat(Body):
    """The format of the audio."""

    model_config = _IGNORE_OTHERS

    container: Literal["raw", "wav"] = "raw"
    encoding: Encoding = "pcm_s16le"
    sample_rate: Annotated[int, Field(ge=MIN_RATE, le=MAX_RATE)] = 24_000


class GenerationConfig(SpokenBody):
    """Nightjar's settings, as in a line's `generation`. Cartesia's settings (speed, volume, emotion) are
    ignored."""

    model_config = _IGNORE_OTHERS

    instruct: str | None = None
    cfg: float | None = None
    trim_leading_silence_ms: Trim = 0.0


class SpeechFields(Body):
    """The fields of every request in Cartesia's format."""

    model_config = ConfigDict(extra="allow")
    #: Fields that this kind of request does not support with any model.
    unsupported: ClassVar = ("add_timestamps", "add_phoneme_timestamps", "pronunciation_dict_id", "save")

    transcript: str = ""
    model_id: Name | None = None
    #: Newer clients send only the name.
    voice: Annotated[
        Voice | None, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)
    ] = None
    language: Annotated[Name | None, Field(validation_alias=AliasChoices("language", "locale"))] = None
    output_format: OutputFormat = OutputFormat()
    generation_config: GenerationConfig = GenerationConfig()


class MessagesFields(SpeechFields):
    """The fields of a request that is answered in messages, which can have times of words and phonemes."""

    unsupported: ClassVar = SpeechFields.unsupported[2:]

    add_timestamps: bool | None = None
    add_phoneme_timestamps: bool | None = None

    def messages(
        self, piece: SpeechPiece, context_id: str | None, step_seconds: float
    ) -> Iterator[JsonObject]:
        """The messages with a piece of speech, each with up to `MAX_PIECE_BYTES`, and with its requested times.
        `step_seconds`: time since the piece before it, or since the start."""
        for begin in range(0, len(piece.data), MAX_PIECE_BYTES):
            data = piece.data[begin : begin + MAX_PIECE_BYTES]
            yield _message("chunk", context_id, data=data, step_time=round(1000 * step_seconds, 3))
            step_seconds = 0.0
        for wanted, kind, name, said in (
            (self.add_timestamps, "timestamps", "word", piece.words),
            (self.add_phoneme_timestamps, "phoneme_timestamps", "phoneme", piece.phonemes),
        ):
            if wanted and said:
                texts, start, end = zip(*map(msgspec.structs.astuple, said), strict=True)
                times = {f"{name}s": texts, "start": start, "end": end}
                facts = {"estimated": True} if piece.estimated else {}
                yield _message(kind, context_id, **{f"{name}_timestamps": times, **facts})


#: Fields that must stay the same in a context: all but the text.
SETTINGS = MessagesFields.model_fields.keys() - {"transcript"}


class EventsRequest(MessagesFields):
    """A request for speech as events, each of which has the client's `context_id`."""

    context_id: Name | None = None


class ContextMessage(MessagesFields):
    """One message of a context."""

    context_id: Annotated[Name, Field(min_length=1)]
    more: Annotated[bool, Field(alias="continue")] = False
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: Annotated[float, Field(ge=0, le=_MAX_BUFFER_MS)] = DEFAULT_BUFFER_MS


def check_fields(fields: SpeechFields) -> None:
    """Raises `ApiError` (400) for a field that no model supports."""
    for name in fields.unsupported:
        if (fields.model_extra or {}).get(name):
            raise bad_request(
                f"`{name}` is not supported here. Remove it.", ErrorCode.INPUT_UNSUPPORTED, name
            )


def check_speech(serving: Serving, fields: SpeechFields) -> None:
    """Raises `ApiError` (400) for fields that this model or this route does not support."""
    check_fields(fields)
    if isinstance(fields, MessagesFields):
        if fields.output_format.container != "raw":
            raise bad_request(
                "Messages have the container `raw`; /tts/bytes sends WAV.",
                "invalid_value",
                "output_format.container",
            )
        name = "add_phoneme_timestamps"
        if fields.add_phoneme_timestamps and not serving.model.card.capabilities.word_times:
            raise bad_request(
                f"This model does not know when it says a phoneme. Remove `{name}`.",
                ErrorCode.INPUT_UNSUPPORTED,
                name,
            )
    serving.voices.check_speaks("model_id")


def check(serving: Serving, fields: SpeechFields) -> None:
    """Raises as `check_speech`, and 400 for a text that is empty or too long."""
    check_speech(serving, fields)
    check_text(fields.transcript, serving.options.context_characters, "transcript")


async def request_of(serving: Serving, fields: SpeechFields, request_id: str) -> SynthesisRequest:
    """The request for the whole transcript. Raises `InputError`."""
    # Clients also send a language to models without a choice of languages.
    language = fields.language if serving.model.card.capabilities.languages else None
    timed = isinstance(fields, MessagesFields) and (fields.add_timestamps or fields.add_phoneme_timestamps)
    return await serving.voices.request(
        request_id,
        fields.generation_config.seed_or_new(),
        fields.voice and fields.voice.id,
        Generation(language=language, **fields.generation_config.settings()),
        fields.transcript,
        timestamps=bool(timed),
    )


def encoder_of(serving: Serving, output: OutputFormat) -> PcmStream:
    """An encoder for this format."""
    rate = serving.model.card.sample_rate
    return PcmStream(rate, output.sample_rate, output.encoding, with_header=output.container == "wav")


async def answer(serving: Serving, fields: SpeechFields, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer to a whole text: bytes, or events with the messages of a context. Raises
    `ApiError` and `NightjarError`."""
    request = await request_of(serving, fields, request_id)
    units = units_of(fields.transcript)
    if not units:
        raise empty_text("transcript")
    requests = unit_requests(request, units)
    headers = {"x-seed": str(request.seed)}
    step = permit.since
    output = fields.output_format
    trim_ms = fields.generation_config.trim_leading_silence_ms
    encoder = encoder_of(serving, output)
    async with aclosing(speech_pieces(serving, requests, permit, encoder, trim_ms=trim_ms)) as pieces:
        if not isinstance(fields, EventsRequest):
            yield Head("audio/wav" if output.container == "wav" else "application/octet-stream", headers)
            async for piece in pieces:
                yield piece.data
            return
        name = fields.context_id
        yield event_head(headers, lambda error: failure(error, name) | {"request_id": request_id})
        async for piece in pieces:
            now = time.monotonic()
            for message in fields.messages(piece, name, now - step):
                yield event(message)
            step = now
        yield event(done(name))


def _message(kind: str, context_id: str | None, **facts: object) -> JsonObject:
    return {"type": kind, "done": False, "status_code": 206, "context_id": context_id, **facts}


def done(context_id: str | None) -> JsonObject:
    """The message that a context has ended."""
    return _message("done", context_id, done=True)


def flush_done(context_id: str, number: int) -> JsonObject:
    """The message that the speech before a flush is sent."""
    return _message("flush_done", context_id, flush_done=True, flush_id=number)


def failure(error: Exception, context_id: str | None) -> JsonObject:
    """The message about an error, which ends the context that it names."""
    api_error = as_api_error(error)
    status = api_error.status_code
    headers = api_error.headers or {}
    facts = {"title": HTTPStatus(status).phrase, "message": str(api_error.detail), "status_code": status}
    if "retry-after" in headers:
        facts["retry_after"] = int(headers["retry-after"])
    return _message("error", context_id, done=True, error_code=api_error.code or "internal_error", **facts)
