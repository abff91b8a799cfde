"""`POST /v1/audio/speech`: text to speech, for every pipeline that speaks one."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import MAX_REFERENCE_SECONDS, AudioChunk, Generation, Message, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import MEDIA_TYPES, SpeechFormat, read_audio, stream_encoder, whole_file
from pipelines.serving.errors import Body, as_api_error, bad_request, named_field
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.serving.streaming import EVENT_STREAM, Head, Parts, event

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

Chunks = AsyncGenerator[AudioChunk, None]
References = Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given), Field(max_length=16)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SpeechBody(Body):
    """What a client sends: OpenAI's fields, and those of ours that a line's `generation` has."""

    model: str
    input: str
    voice: str | None = None
    response_format: SpeechFormat = "wav"
    speed: float | None = None
    instructions: str | None = None
    #: None: bare PCM is streamed where the pipeline can, files are not.
    stream: bool | None = None
    stream_format: Literal["audio", "sse"] | None = None
    language: str | None = None
    #: Base64 or a data URL of a WAV, FLAC, OGG or MP3 file, or a list of them for models that clone several voices.
    reference_audio: References | None = None
    reference_text: str | None = None
    seed: Seed | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    cfg: float | None = None
    max_seconds: float | None = None


_FIELDS = {**{name: name for name in SpeechBody.model_fields}, "instruct": "instructions"}


class SpeechRoute:
    """Answers one request at a time for each call; holds what they share."""

    def __init__(self, model: ServedModel, options: ServeOptions, metrics: ServerMetrics) -> None:
        self._model = model
        self._options = options
        self._metrics = metrics

    async def answer(self, body: SpeechBody, permit: Permit, request_id: str) -> Parts:
        """The parts of the answer. Raises `ApiError` and `NightjarError` before the first one."""
        since = permit.since
        streams = self._streams(body)
        try:
            # A hop between threads costs more than a request without a recording.
            has_audio = bool(body.reference_audio)
            request = await asyncio.to_thread(self._request, body, request_id) if has_audio else self._request(body, request_id)
            if body.stream_format == "sse":
                source = self._model.chunks(request, permit) if streams else self._at_once(request, permit)
                parts = self._events(source, body.response_format, request.seed, since)
            elif streams:
                parts = self._audio(self._model.chunks(request, permit), body.response_format, request.seed, since)
            else:
                parts = self._file(request, body.response_format, permit)
            async with aclosing(parts):
                async for part in parts:
                    yield part
        except NightjarError as error:
            raise as_api_error(error, named_field(error, _FIELDS) or _PARAMS.get(error.code)) from error

    def _streams(self, body: SpeechBody) -> bool:
        """Whether the audio is sent as it is made. Raises `ApiError` for what this model cannot do."""
        able = self._model.card.capabilities
        if able.multi_turn:
            raise bad_request("This model answers dialogues. Use /v1/chat/completions.", ErrorCode.INPUT_UNSUPPORTED.value, "model")
        if body.speed is not None and body.speed != 1.0:
            raise bad_request("This model has one speed. Remove `speed`.", ErrorCode.INPUT_UNSUPPORTED.value, "speed")
        if body.instructions and not able.instruct:
            message = "This model takes no instructions. Remove `instructions`, or use a model that follows them."
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED.value, "instructions")
        if body.stream and not able.streaming:
            raise bad_request("This model makes the whole speech at once. Remove `stream`.", ErrorCode.INPUT_UNSUPPORTED.value, "stream")
        wanted = body.stream if body.stream is not None else body.response_format == "pcm" or body.stream_format is not None
        return wanted and able.streaming

    def _request(self, body: SpeechBody, request_id: str) -> SynthesisRequest:
        seconds = min(self._options.max_audio_seconds, MAX_REFERENCE_SECONDS)
        messages = [Message("user", "audio", read_audio(audio, seconds)) for audio in body.reference_audio or ()]
        messages.append(Message("user", "text", body.input))
        generation = Generation(
            voice=self._model.voice(body.voice),
            language=body.language,
            instruct=body.instructions or None,
            reference_text=body.reference_text,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            repetition_penalty=body.repetition_penalty,
            cfg=body.cfg,
            max_seconds=body.max_seconds,
        )
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return SynthesisRequest(request_id, tuple(messages), generation, seed)

    async def _file(self, request: SynthesisRequest, kind: SpeechFormat, permit: Permit) -> Parts:
        speech = await self._model.speech(request, permit)
        data = await asyncio.to_thread(whole_file, speech.samples, speech.sample_rate, kind)
        self._metrics.spoke(len(speech.samples) / speech.sample_rate)
        yield Head(MEDIA_TYPES[kind], {**_facts(speech.sample_rate, request.seed), "content-length": str(len(data))})
        yield data

    async def _audio(self, chunks: Chunks, kind: SpeechFormat, seed: int, since: float) -> Parts:
        started = False
        async with aclosing(self._encoded(chunks, kind, since)) as pieces:
            async for piece in pieces:
                if not started:
                    started = True
                    yield Head(MEDIA_TYPES[kind], _facts(self._model.card.sample_rate, seed))
                yield piece

    async def _events(self, chunks: Chunks, kind: SpeechFormat, seed: int, since: float) -> Parts:
        """OpenAI's server-sent events: `speech.audio.delta` with base64 of the next bytes, then `speech.audio.done`."""
        started = False
        try:
            async with aclosing(self._encoded(chunks, kind, since)) as pieces:
                async for piece in pieces:
                    if not started:
                        started = True
                        yield Head(EVENT_STREAM, {**_facts(self._model.card.sample_rate, seed), "cache-control": "no-cache"})
                    yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
            yield event({"type": "speech.audio.done"})
        except NightjarError as error:
            if not started:
                raise
            yield event(as_api_error(error).view())

    async def _encoded(self, chunks: Chunks, kind: SpeechFormat, since: float) -> AsyncGenerator[bytes, None]:
        """The bytes of the chunks, none of them empty. Raises `synth.no_audio` where there are none."""
        encoder = stream_encoder(self._model.card.sample_rate, kind)
        heard = told = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if not len(chunk.samples):
                    continue
                heard = True
                self._metrics.spoke(len(chunk.samples) / chunk.sample_rate)
                if piece := encoder.add(chunk.samples):
                    yield piece
                    # It is sent.
                    if not told:
                        told = True
                        self._metrics.began(ROUTE, time.monotonic() - since)
        if not heard:
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio.", "Try another seed.")
        if piece := encoder.end():
            yield piece

    async def _at_once(self, request: SynthesisRequest, permit: Permit) -> Chunks:
        """The whole speech as one chunk, for pipelines that do not stream."""
        speech = await self._model.speech(request, permit)
        yield AudioChunk(speech.samples, speech.sample_rate, final=True)


def _facts(sample_rate: int, seed: int) -> dict[str, str]:
    """What a client needs to play bare PCM, and to ask for the speech again with the same noise."""
    return {"x-sample-rate": str(sample_rate), "x-seed": str(seed)}
