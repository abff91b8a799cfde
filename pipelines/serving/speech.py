"""`POST /v1/audio/speech`: text to speech, for every pipeline that speaks one."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Literal, cast

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import MAX_REFERENCE_SECONDS, Generation, Message, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import (
    COMPRESSED,
    MEDIA_TYPES,
    SpeechFormat,
    read_audio,
    stream_encoder,
    whole_file,
)
from pipelines.serving.errors import as_api_error, bad_request, check_text, named_field, unknown_field
from pipelines.serving.long_text import Chunks, chunks_of, unit_chunks
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.serving.request_body import SpokenBody
from pipelines.serving.streaming import EVENT_STREAM, Head, Parts, event
from pipelines.serving.text_units import units_of
from pipelines.serving.voices import Voices

log = logging.getLogger(__name__)

ROUTE = "/v1/audio/speech"
_PARAMS = {
    ErrorCode.INPUT_UNKNOWN_VOICE: "voice",
    ErrorCode.INPUT_UNKNOWN_LANGUAGE: "language",
    ErrorCode.INPUT_EMPTY_TEXT: "input",
    ErrorCode.INPUT_UNPRONOUNCEABLE: "input",
    ErrorCode.INPUT_TOO_LONG: "input",
    ErrorCode.INPUT_AUDIO_MISSING: "reference_audio",
    ErrorCode.INPUT_AUDIO_UNREADABLE: "reference_audio",
    ErrorCode.INPUT_AUDIO_FORBIDDEN: "reference_audio",
    ErrorCode.INPUT_REFERENCE_LENGTH: "reference_audio",
    ErrorCode.INPUT_REFERENCE_SILENT: "reference_audio",
    ErrorCode.INPUT_REFERENCE_TEXT: "reference_text",
}

#: What to do, where an error is worded for the lines of a job.
_ADVICE = {
    ErrorCode.INPUT_AUDIO_MISSING: "Name a stored voice, or send `reference_audio`.",
    ErrorCode.INPUT_BAD_GENERATION: "Correct its value.",
}

References = Annotated[
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(max_length=16),
]

#: Of the name of a field that nobody knows, in a header and in the log.
_NAME_CHARACTERS = 64
#: Fields of clients of vLLM-Omni and Nari that choose nothing here: the checkpoint and the request say it
#: already.
_OTHERS = frozenset(
    {
        "initial_codec_chunk_frames",
        "max_new_tokens",
        "non_streaming_mode",
        "task_type",
        "user",
        "x_vector_only_mode",
    }
)


def _voice_name(given: object) -> object:
    """OpenAI's clients name a voice of their own as an object."""
    return (
        cast("dict[str, object]", given)["id"] if isinstance(given, dict) and set(given) == {"id"} else given
    )


def _known_format(given: object) -> object:
    if given == "aac":
        raise ValueError("AAC is not written here. Ask for mp3 or opus")
    return given


class SpeechBody(SpokenBody):
    """What a client sends: OpenAI's fields, and those of ours that a line's `generation` has.

    Further fields are ignored, and the header `x-ignored-fields` names them; a strict server refuses them.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    input: str
    voice: Annotated[str | None, BeforeValidator(_voice_name)] = None
    response_format: Annotated[SpeechFormat, BeforeValidator(_known_format)] = "mp3"
    speed: float | None = None
    instructions: str | None = None
    #: None: bare PCM is streamed where the pipeline can, files are not.
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


_FIELDS = {**{name: name for name in SpeechBody.model_fields}, "instruct": "instructions"}


class SpeechRoute:
    """Answers one request at a time for each call; holds what they share."""

    def __init__(
        self, model: ServedModel, options: ServeOptions, metrics: ServerMetrics, voices: Voices
    ) -> None:
        self._model = model
        self._options = options
        self._metrics = metrics
        self._voices = voices

    async def answer(self, body: SpeechBody, permit: Permit, request_id: str) -> Parts:
        """The parts of the answer. Raises `ApiError` and `NightjarError` before the first one."""
        since = permit.since
        ignored = self._ignored_fields(body)
        streams = self.streams(body)
        try:
            # A hop between threads costs more than a request without a recording.
            has_audio = bool(body.reference_audio) or self._voices.is_stored(body.voice)
            units = self._units(body.input)
            request = (
                await asyncio.to_thread(self._request, body, request_id)
                if has_audio
                else self._request(body, request_id)
            )
            chunks = (
                unit_chunks(self._model, request, units, permit)
                if units
                else chunks_of(self._model, request, permit)
            )
            if body.stream_format == "sse":
                parts = self._events(chunks, body, request.seed, since)
            elif streams or units:
                parts = self._audio(chunks, body.response_format, request.seed, since)
            else:
                parts = self._file(request, body.response_format, permit)
            async with aclosing(chunks), aclosing(parts):
                async for part in parts:
                    yield (
                        part
                        if isinstance(part, bytes) or not ignored
                        else replace(part, headers={**part.headers, **ignored})
                    )
        except NightjarError as error:
            error.advice = _ADVICE.get(error.code, error.advice)
            raise as_api_error(error, named_field(error, _FIELDS) or _PARAMS.get(error.code)) from error

    def _ignored_fields(self, body: SpeechBody) -> dict[str, str]:
        """A header that names fields which nobody knows."""
        unknown = sorted(name for name in (body.model_extra or {}) if name not in _OTHERS)
        if not unknown:
            return {}
        names = ", ".join(
            name[:_NAME_CHARACTERS] for name in unknown[:10] if name.isascii() and name.isidentifier()
        )
        log.info("a request has unknown fields: %s", names)
        return {"x-ignored-fields": names}

    def _units(self, text: str) -> list[str]:
        """The units of a text that is longer than the model speaks at once; else none."""
        return [] if len(text) <= self._model.card.capabilities.max_text_characters else units_of(text)

    def check(self, body: SpeechBody) -> None:
        """Raises `ApiError` (400) for a request that no slot is worth."""
        unknown = sorted((body.model_extra or {}).keys() - _OTHERS)
        if self._options.strict and unknown:
            raise unknown_field(unknown[0])
        able = self._model.card.capabilities
        check_text(body.input, max(able.max_text_characters, self._options.context_characters), "input")

    def streams(self, body: SpeechBody) -> bool:
        """Whether the audio is sent as it is made. Raises `ApiError` for what this model cannot do."""
        able = self._model.card.capabilities
        if able.multi_turn:
            raise bad_request(
                "This model answers dialogues. Use /v1/chat/completions.",
                ErrorCode.INPUT_UNSUPPORTED.value,
                "model",
            )
        if body.speed is not None and body.speed != 1.0:
            raise bad_request(
                "This model has one speed. Remove `speed`.", ErrorCode.INPUT_UNSUPPORTED.value, "speed"
            )
        if body.instructions and not able.instruct:
            message = (
                "This model takes no instructions. Remove `instructions`, or use a model that follows them."
            )
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED.value, "instructions")
        if body.stream and not able.streaming:
            raise bad_request(
                "This model makes the whole speech at once. Remove `stream`.",
                ErrorCode.INPUT_UNSUPPORTED.value,
                "stream",
            )
        wanted = (
            body.stream
            if body.stream is not None
            else body.response_format == "pcm" or body.stream_format is not None
        )
        return wanted and able.streaming

    def _request(self, body: SpeechBody, request_id: str) -> SynthesisRequest:
        seconds = min(self._options.max_audio_seconds, MAX_REFERENCE_SECONDS)
        messages = [
            Message("user", "audio", read_audio(audio, seconds)) for audio in body.reference_audio or ()
        ]
        generation = Generation(
            language=body.language,
            instruct=body.instructions or None,
            reference_text=body.reference_text,
            cfg=body.cfg,
            **body.settings(),
        )
        messages, generation = self._voices.spoken_by(body.voice, generation, messages, body.input)
        return SynthesisRequest(request_id, tuple(messages), generation, body.seed_or_new())

    async def _file(self, request: SynthesisRequest, kind: SpeechFormat, permit: Permit) -> Parts:
        speech = await self._model.speech(request, permit)
        data = await asyncio.to_thread(whole_file, speech.samples, speech.sample_rate, kind)
        self._metrics.spoke(len(speech.samples) / speech.sample_rate)
        yield Head(
            MEDIA_TYPES[kind], {**_facts(speech.sample_rate, request.seed), "content-length": str(len(data))}
        )
        yield data

    async def _audio(self, chunks: Chunks, kind: SpeechFormat, seed: int, since: float) -> Parts:
        started = False
        async with aclosing(self._encoded(chunks, kind, since)) as pieces:
            async for piece in pieces:
                if not started:
                    started = True
                    yield Head(MEDIA_TYPES[kind], _facts(self._model.card.sample_rate, seed))
                yield piece

    async def _events(self, chunks: Chunks, body: SpeechBody, seed: int, since: float) -> Parts:
        """OpenAI's server-sent events: `speech.audio.delta` with base64 of the next bytes, then
        `speech.audio.done`."""
        started = False
        # A model counts no tokens here that a client could be billed for: characters of text stand for them.
        usage = {"input_tokens": len(body.input), "output_tokens": 0, "total_tokens": len(body.input)}
        try:
            async with aclosing(self._encoded(chunks, body.response_format, since)) as pieces:
                async for piece in pieces:
                    if not started:
                        started = True
                        yield Head(
                            EVENT_STREAM,
                            {**_facts(self._model.card.sample_rate, seed), "cache-control": "no-cache"},
                        )
                    yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
            yield event({"type": "speech.audio.done", "usage": usage})
        except NightjarError as error:
            if not started:
                raise
            yield event(as_api_error(error).view())

    async def _encoded(self, chunks: Chunks, kind: SpeechFormat, since: float) -> AsyncGenerator[bytes, None]:
        """The bytes of the chunks, none of them empty. Raises `synth.no_audio` where there are none."""
        encoder = stream_encoder(self._model.card.sample_rate, kind)
        # Compressing takes the time of many other clients' chunks; PCM takes less than a hop to a thread.
        compresses = kind in COMPRESSED
        heard = told = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if not len(chunk.samples):
                    continue
                heard = True
                self._metrics.spoke(len(chunk.samples) / chunk.sample_rate)
                piece = (
                    await asyncio.to_thread(encoder.add, chunk.samples)
                    if compresses
                    else encoder.add(chunk.samples)
                )
                if piece:
                    yield piece
                    # It is sent.
                    if not told:
                        told = True
                        self._metrics.began(ROUTE, time.monotonic() - since)
        if not heard:
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio.", "Try another seed.")
        if piece := await asyncio.to_thread(encoder.end) if compresses else encoder.end():
            yield piece


def _facts(sample_rate: int, seed: int) -> dict[str, str]:
    """What a client needs to play bare PCM, and to ask for the speech again with the same noise."""
    return {"x-sample-rate": str(sample_rate), "x-seed": str(seed)}
