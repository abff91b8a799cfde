"""`POST /v1/audio/speech`: text to speech."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Done, Generation, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import MEDIA_TYPES, SpeechFormat, stream_encoder, whole_file
from pipelines.serving.errors import ApiError, as_api_error, bad_request, check_text, named_field
from pipelines.serving.request_body import SpokenBody, Trim
from pipelines.serving.streaming import (
    Head,
    Parts,
    Serving,
    event,
    event_head,
    speech_pieces,
)
from pipelines.text_units import unit_requests, units_of

log = logging.getLogger(__name__)

#: The beginning of an error's code -> the field of the request that is wrong.
_PARAMS = {
    "input.unknown_voice": "voice",
    "input.unknown_language": "language",
    "input.empty_text": "input",
    "input.unpronounceable": "input",
    "input.too_long": "input",
    "input.reference_text": "reference_text",
    "input.reference_": "reference_audio",
    "input.audio_": "reference_audio",
}

#: Advice for clients, in place of an error's own advice, which is about the lines of a job.
_ADVICE = {
    ErrorCode.INPUT_AUDIO_MISSING: "Name a stored voice, or send `reference_audio`.",
    ErrorCode.INPUT_BAD_GENERATION: "Correct its value.",
}

References = Annotated[
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(max_length=16),
]

#: Maximum length of the name of an unknown field in a header and in the log.
_NAME_CHARACTERS = 64
#: Fields that clients of vLLM-Omni and Nari send. They have no effect here: the checkpoint and other fields
#: determine what they would set.
_WITHOUT_EFFECT = frozenset(
    {
        "initial_codec_chunk_frames",
        "max_new_tokens",
        "non_streaming_mode",
        "task_type",
        "user",
        "x_vector_only_mode",
    }
)


class SpeechBody(SpokenBody):
    """The request: OpenAI's fields, and fields of a line's `generation`.

    Other fields are ignored, and the header `x-ignored-fields` names them.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    input: str
    #: OpenAI's clients send a custom voice as an object.
    voice: Annotated[
        str | None,
        BeforeValidator(
            lambda given: given["id"] if isinstance(given, dict) and set(given) == {"id"} else given
        ),
    ] = None
    response_format: SpeechFormat = "mp3"
    speed: float | None = None
    instructions: str | None = None
    #: None: if the pipeline can stream, bare PCM and answers with a `stream_format` are streamed, others are
    #: not.
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    language: str | None = None
    #: Base64 or a data URL of a WAV, FLAC, OGG or MP3 file, or a list of them for models that clone several
    #: voices.
    reference_audio: Annotated[
        References | None, Field(validation_alias=AliasChoices("reference_audio", "ref_audio"))
    ] = None
    reference_text: Annotated[
        str | None, Field(validation_alias=AliasChoices("reference_text", "ref_text"))
    ] = None
    cfg: float | None = None
    #: The events also have the times of words.
    timestamps: bool = False
    trim_leading_silence_ms: Trim = 0.0


_FIELDS = {**{name: name for name in SpeechBody.model_fields}, "instruct": "instructions"}


def api_error(error: NightjarError) -> ApiError:
    """The answer to an error of the pipeline. It names the field of the body that is wrong."""
    error.advice = _ADVICE.get(error.code, error.advice)
    by_code = (field for begin, field in _PARAMS.items() if error.code.startswith(begin))
    return as_api_error(error, named_field(error, _FIELDS) or next(by_code, None))


def check(serving: Serving, body: SpeechBody) -> bool:
    """Whether the audio is streamed. Raises `ApiError` for what this model cannot do, and for a text that is
    empty or too long."""
    capabilities = serving.model.card.capabilities
    serving.voices.check_speaks("model")
    for field, requested, message in (
        ("speed", body.speed not in (None, 1.0), "This model has one speed. Remove `speed`."),
        (
            "instructions",
            body.instructions and not capabilities.instruct,
            "This model takes no instructions. Remove `instructions`, or use a model that follows them.",
        ),
        (
            "stream",
            body.stream and not capabilities.streaming,
            "This model makes the whole speech at once. Remove `stream`.",
        ),
        (
            "timestamps",
            body.timestamps and body.stream_format != "sse",
            "Times of words are in events. Set `stream_format` to `sse`, or remove `timestamps`.",
        ),
        (
            "trim_leading_silence_ms",
            body.trim_leading_silence_ms and not _streams(serving, body),
            "Silence is left out of streams. Set `stream` to true, or remove `trim_leading_silence_ms`.",
        ),
    ):
        if requested:
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED, field)
    check_text(body.input, max(capabilities.max_text_characters, serving.options.context_characters), "input")
    return _streams(serving, body)


def _streams(serving: Serving, body: SpeechBody) -> bool:
    requested = body.stream
    if requested is None:
        requested = body.response_format == "pcm" or body.stream_format is not None
    return serving.model.card.capabilities.streaming and requested


async def request_of(serving: Serving, body: SpeechBody, request_id: str) -> SynthesisRequest:
    """The request for the whole text. Raises `InputError`."""
    return await serving.voices.request(
        request_id,
        body.seed_or_new(),
        body.voice,
        Generation(instruct=body.instructions or None, **body.settings()),
        body.input,
        body.reference_audio or (),
        body.timestamps,
    )


async def answer(serving: Serving, body: SpeechBody, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer: a whole file, a streamed file, or OpenAI's events (`speech.audio.delta` with
    the next bytes in base64 and, by `timestamps`, the words that end in them, then `speech.audio.done`).
    Raises `ApiError` and `NightjarError`."""
    model = serving.model
    kind = body.response_format
    request = await request_of(serving, body, request_id)
    # Clients need the rate to play bare PCM, and the seed to repeat the speech.
    headers = {"x-sample-rate": str(model.card.sample_rate), "x-seed": str(request.seed)}
    if unknown := sorted((body.model_extra or {}).keys() - _WITHOUT_EFFECT):
        names = [name[:_NAME_CHARACTERS] for name in unknown[:10] if name.isascii() and name.isidentifier()]
        headers["x-ignored-fields"] = ", ".join(names)
        log.info("a request has unknown fields: %s", headers["x-ignored-fields"])
    # A text that is too long for one request is spoken in units.
    long = len(body.input) > model.card.capabilities.max_text_characters
    units = units_of(body.input) if long else []
    requests = unit_requests(request, units) or [request]
    events = body.stream_format == "sse"
    if not (_streams(serving, body) or units or events):
        async with aclosing(model.chunks(request, permit, stream=False)) as made:
            done = await anext(made)
        assert isinstance(done, Done)
        speech = done.speech
        data = await asyncio.to_thread(whole_file, speech.samples, speech.sample_rate, kind)
        serving.metrics.audio_sent(len(speech.samples) / speech.sample_rate)
        yield Head(MEDIA_TYPES[kind], {**headers, "content-length": str(len(data))})
        yield data
        return
    encoder = stream_encoder(model.card.sample_rate, kind)
    async with aclosing(
        speech_pieces(serving, requests, permit, encoder, trim_ms=body.trim_leading_silence_ms)
    ) as pieces:
        yield event_head(headers, ApiError.view) if events else Head(MEDIA_TYPES[kind], headers)
        async for piece in pieces:
            times = {"words": piece.words, "estimated": piece.estimated} if body.timestamps else {}
            delta = {"type": "speech.audio.delta", "audio": piece.data, **times}
            yield event(delta) if events else piece.data
    if events:
        # The model does not count tokens, so `usage` counts characters of the text.
        usage = {"input_tokens": len(body.input), "output_tokens": 0, "total_tokens": len(body.input)}
        yield event({"type": "speech.audio.done", "usage": usage})
