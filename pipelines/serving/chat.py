"""`POST /v1/chat/completions`: dialogues with models that write text and audio. The body has the fields of
OpenAI's API that apply to such a model, and `vllm_xargs`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from pipelines.audio import NO_SAMPLES
from pipelines.errors import ErrorCode, NightjarError, NoAudioError
from pipelines.request import Done, Generation, Message, Mode, Role, Speech, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import SpeechFormat, read_audio, whole_file
from pipelines.serving.errors import ApiError, JsonObject, as_api_error, bad_request, named_field
from pipelines.serving.request_body import Body, SpokenBody
from pipelines.serving.streaming import Head, Parts, Serving, event, event_head
from pipelines.stored_voices import DEFAULT_VOICE

#: Time until `expires_at`, a field of OpenAI's audio. The server itself keeps no audio.
_AUDIO_LIFE_SECONDS = 3600
_FORMATS: dict[str, SpeechFormat] = {"wav": "wav", "flac": "flac", "pcm16": "pcm"}
MAX_MESSAGES = 1000


class InputAudio(Body):
    """A file as base64 or a data URL. Its format is detected; `format` is ignored."""

    data: str
    format: str


class AudioUrl(Body):
    """A data URL."""

    url: str


class Part(Body):
    """A piece of text, or audio in OpenAI's or vLLM's format; `type` names the field that holds it."""

    type: Literal["text", "input_audio", "audio_url"]
    text: str | None = None
    input_audio: InputAudio | None = None
    audio_url: AudioUrl | None = None

    @model_validator(mode="after")
    def _is_of_its_type(self) -> Part:
        if self.model_fields_set != {"type", self.type}:
            raise ValueError(f"A part of the type {self.type} has the field `{self.type}` and no other")
        return self


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[Part],
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]


class Xargs(Body):
    """Settings of a model that writes text and audio, with the names that its published server uses."""

    mode: Mode | None = None
    #: The modality that an answer begins with; every answer begins with text.
    phase: Literal["text"] | None = None
    text_temperature: float | None = None
    audio_temperature: float | None = None
    #: 0 or less: no limit.
    audio_topk: int | None = None
    cfg: float | None = None


class AudioOut(Body):
    """The format and the voice of an answer's audio."""

    format: Literal["wav", "flac", "pcm16"] = "wav"
    voice: str | None = None


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class ChatBody(SpokenBody):
    """The body of a request."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    vllm_xargs: Xargs = Xargs()
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOut = AudioOut()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    #: Only the id at which text always ends is accepted.
    stop_token_ids: list[Literal[3]] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    #: Ignored.
    user: str | None = None


#: The field of the body for each setting of `Generation`.
_FIELDS = {
    **{name: name for name in ChatBody.model_fields},
    **{name: f"vllm_xargs.{name}" for name in Xargs.model_fields},
    "audio_top_k": "vllm_xargs.audio_topk",
    "voice": "audio.voice",
}
_XARG_ONLY_WITH_AUDIO = ("audio_temperature", "audio_topk", "cfg")


def api_error(error: NightjarError) -> ApiError:
    """The answer to an error of the pipeline. It names the field of the setting that the error is about; if
    the error's message names no setting, `messages`."""
    return as_api_error(error, named_field(error, _FIELDS) or "messages")


def check(serving: Serving, body: ChatBody) -> None:
    """Raises `ApiError` (400) for what this model cannot do."""
    if not serving.model.card.capabilities.text_out:
        raise bad_request(
            "This model speaks texts. Use /v1/audio/speech.", ErrorCode.INPUT_UNSUPPORTED, "model"
        )


async def answer(serving: Serving, body: ChatBody, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer. Raises `ApiError` and `NightjarError`."""
    request = await asyncio.to_thread(_request, serving, body, request_id)
    number = request_id.removeprefix("req-")
    created = int(time.time())
    facts = {"id": f"chatcmpl-{number}", "created": created, "model": serving.options.names[0]}
    facts["object"] = "chat.completion.chunk" if body.stream else "chat.completion"
    headers = {"x-seed": str(request.seed)}

    def choices(finish: str | None, **content: JsonObject) -> JsonObject:
        return {**facts, "choices": [{"index": 0, **content, "finish_reason": finish, "logprobs": None}]}

    def delta(content: JsonObject, finish: str | None = None) -> bytes:
        return event(choices(finish, delta=content))

    if body.stream:
        yield event_head(headers, ApiError.view)
    # Sent with the first piece.
    beginning = delta({"role": "assistant", "content": ""})
    speech: str | Speech = ""
    async with aclosing(_answer_pieces(serving, request, permit, stream=body.stream)) as pieces:
        async for speech in pieces:
            if body.stream and isinstance(speech, str):
                yield beginning + delta({"content": speech})
                beginning = b""
    assert isinstance(speech, Speech)
    audio: JsonObject | None = None
    if len(speech.samples):
        kind = _FORMATS[body.audio.format]
        audio = {
            "id": f"audio-{secrets.token_hex(12)}",
            "data": await asyncio.to_thread(whole_file, speech.samples, speech.sample_rate, kind),
            "expires_at": created + _AUDIO_LIFE_SECONDS,
            "transcript": speech.text_out or "",
        }
    serving.metrics.audio_sent(len(speech.samples) / speech.sample_rate)
    finish = "length" if speech.meta.get("finish") == "length" else "stop"
    if body.stream:
        yield beginning + (delta({"audio": audio}) if audio else b"") + delta({}, finish)
        if body.stream_options.include_usage:
            yield event({**facts, "choices": [], "usage": _usage(speech)})
        yield b"data: [DONE]\n\n"
        return
    message = {"role": "assistant", "content": speech.text_out or "", "audio": audio}
    view = {**choices(finish, message=message), "usage": _usage(speech)}
    data = await asyncio.to_thread(msgspec.json.encode, view)
    yield Head("application/json", {**headers, "content-length": str(len(data))})
    yield data


async def _answer_pieces(
    serving: Serving, request: SynthesisRequest, permit: Permit, *, stream: bool
) -> AsyncGenerator[str | Speech, None]:
    """Yields pieces of the text as it is written, then the result. Text without the requested audio is also a
    result."""
    audio = [NO_SAMPLES]
    written = ""
    speech = Speech(NO_SAMPLES, serving.model.card.sample_rate)
    try:
        async with aclosing(serving.model.chunks(request, permit, stream=stream)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, Done):
                    audio.append(chunk.speech.samples)
                    speech = replace(chunk.speech, samples=np.concatenate(audio))
                    continue
                audio.append(chunk.samples)
                if chunk.text:
                    written += chunk.text
                    yield chunk.text
    except NoAudioError as error:
        speech = replace(speech, text_out=error.text_out, meta=dict(error.meta))
    if speech.text_out and not written:
        yield speech.text_out
    yield speech


def _request(serving: Serving, body: ChatBody, request_id: str) -> SynthesisRequest:
    capabilities = serving.model.card.capabilities
    xargs = body.vllm_xargs
    is_default = body.audio.voice == DEFAULT_VOICE and DEFAULT_VOICE not in capabilities.voices
    seconds = serving.options.max_audio_seconds
    messages = tuple(message for turn in body.messages for message in _messages(turn, seconds))
    # By default text only, if the model has that mode.
    mode = xargs.mode
    if mode is None and body.modalities is not None:
        mode = "text_audio" if "audio" in body.modalities else "text_only"
    mode = mode or ("text_only" if "text_only" in capabilities.modes else None)
    for name in _XARG_ONLY_WITH_AUDIO if mode == "text_only" else ():
        value = getattr(xargs, name)
        if value is not None and not (name == "cfg" and 0 <= value <= 1):
            raise bad_request(
                f"`{name}` is a setting of audio, and the mode text_only makes none. Remove it, or set mode to text_audio.",
                ErrorCode.INPUT_BAD_GENERATION,
                f"vllm_xargs.{name}",
            )
    settings = {**body.settings(), **xargs.settings(), "mode": mode}
    if body.max_completion_tokens is not None:
        settings["max_tokens"] = body.max_completion_tokens
    settings["audio_top_k"] = None if xargs.audio_topk is None else max(xargs.audio_topk, 0)
    generation = Generation(voice=None if is_default else body.audio.voice, **settings)
    return SynthesisRequest(request_id, messages, generation, body.seed_or_new())


def _messages(turn: ChatMessage, max_seconds: float) -> Iterator[Message]:
    """One message for each part. Raises `ApiError` and `InputError` for audio that cannot be used."""
    role: Role = "system" if turn.role == "developer" else turn.role
    for part in turn.content:
        if part.text is not None:
            yield Message(role, "text", part.text)
            continue
        if role != "user":
            raise bad_request(
                f"Audio of the role {turn.role} is not supported. Only user messages may have audio.",
                "invalid_value",
                "messages",
            )
        audio = part.audio_url.url if part.audio_url else part.input_audio.data if part.input_audio else ""
        yield Message(role, "audio", read_audio(audio, max_seconds))


def _usage(speech: Speech) -> dict[str, int] | None:
    """OpenAI's `usage`: positions of the prompt and steps of the engine. None if the pipeline does not report
    them."""
    if "tokens" not in speech.meta:
        return None
    prompt = int(speech.meta.get("prompt_positions", 0))
    made = int(speech.meta["tokens"])
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
