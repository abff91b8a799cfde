"""`POST /v1/chat/completions`: dialogues, for pipelines that write text and audio. Its body has OpenAI's
fields, as far as they mean something here, and `vllm_xargs`."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from pipelines.errors import ErrorCode, NightjarError, NoAudioError
from pipelines.request import AudioChunk, Done, Generation, Message, Mode, Role, Speech, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.encoding import SpeechFormat, read_audio, whole_file
from pipelines.serving.errors import as_api_error, bad_request, named_field
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.serving.request_body import Body, SpokenBody
from pipelines.serving.streaming import EVENT_STREAM, Head, Parts, event, whole

ROUTE = "/v1/chat/completions"
#: The token after which the published server has to be told to stop; a text ends there by itself.
_END_OF_TURN = 3
#: How long OpenAI's clients may take an answer's audio for known; the server keeps none.
_AUDIO_LIFE_SECONDS = 3600
_FORMATS: dict[str, SpeechFormat] = {"wav": "wav", "flac": "flac", "pcm16": "pcm"}
MAX_MESSAGES = 1000


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str


class InputAudio(Body):
    """A file as base64 or a data URL, and its format."""

    data: str
    format: str


class AudioPart(Body):
    """Audio, as OpenAI has it."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(Body):
    """A data URL."""

    url: str


class AudioUrlPart(Body):
    """Audio, as vLLM has it."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


def _part_tag(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return f"of:{kind}" if kind in ("text", "input_audio", "audio_url") else None


def _content_tag(content: Any) -> str:
    return "of:parts" if isinstance(content, list) else "of:string"


#: Tags begin with `of:`, so that an error's path shows only what the client wrote.
Part = Annotated[
    Annotated[TextPart, Tag("of:text")]
    | Annotated[AudioPart, Tag("of:input_audio")]
    | Annotated[AudioUrlPart, Tag("of:audio_url")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message="A part has the type text, input_audio or audio_url",
    ),
]
Content = Annotated[
    Annotated[str, Tag("of:string")]
    | Annotated[list[Part], Tag("of:parts"), Field(min_length=1, max_length=MAX_MESSAGES)],
    Discriminator(_content_tag),
]


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Xargs(Body):
    """The settings of a model that writes text and audio, in the spelling of its published server."""

    mode: Mode | None = None
    #: Where a request begins; the only beginning there is.
    phase: Literal["text"] | None = None
    text_temperature: float | None = None
    audio_temperature: float | None = None
    #: 0 or less: among all codes.
    audio_topk: int | None = None
    cfg: float | None = None


class AudioOut(Body):
    """How the audio of an answer comes."""

    format: Literal["wav", "flac", "pcm16"] = "wav"
    voice: str | None = None


class StreamOptions(Body):
    """OpenAI's."""

    include_usage: bool = False


class ChatBody(SpokenBody):
    """The whole request."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    vllm_xargs: Xargs = Xargs()
    modalities: list[Literal["text", "audio"]] | None = None
    audio: AudioOut = AudioOut()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop_token_ids: list[int] = Field(default_factory=list[int])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    #: Kept nowhere.
    user: str | None = None


#: The field that says each setting of `Generation`.
_FIELDS = {
    **{name: name for name in ChatBody.model_fields},
    **{name: f"vllm_xargs.{name}" for name in Xargs.model_fields},
    "audio_top_k": "vllm_xargs.audio_topk",
    "voice": "audio.voice",
}
_XARG_ONLY_WITH_AUDIO = ("audio_temperature", "audio_topk", "cfg")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and how its answer is written."""

    request: SynthesisRequest
    model: str
    mode: Mode | None
    audio_format: SpeechFormat
    with_usage: bool
    created: int

    @property
    def head(self) -> dict[str, Any]:
        """What every part of the answer begins with."""
        return {
            "id": f"chatcmpl-{self.request.request_id.removeprefix('req-')}",
            "created": self.created,
            "model": self.model,
        }


class ChatRoute:
    """Answers one request at a time for each call; holds what they share."""

    def __init__(self, model: ServedModel, options: ServeOptions, metrics: ServerMetrics) -> None:
        self._model = model
        self._options = options
        self._metrics = metrics

    async def answer(self, body: ChatBody, permit: Permit, request_id: str) -> Parts:
        """The parts of the answer. Raises `ApiError` and `NightjarError` before the first one."""
        if not self._model.card.capabilities.text_out:
            raise bad_request(
                "This model speaks texts. Use /v1/audio/speech.", ErrorCode.INPUT_UNSUPPORTED.value, "model"
            )
        try:
            asked = await asyncio.to_thread(self._asked, body, request_id)
            parts = self._streamed(asked, permit) if body.stream else self._whole(asked, permit)
            async with aclosing(parts):
                async for part in parts:
                    yield part
        except NightjarError as error:
            raise as_api_error(error, _param(error)) from error

    def _asked(self, body: ChatBody, request_id: str) -> Asked:
        mode = self._mode(body)
        messages = tuple(message for turn in body.messages for message in self._messages(turn))
        xargs = body.vllm_xargs
        generation = Generation(
            voice=self._model.voice(body.audio.voice),
            **body.settings(),
            max_tokens=_either(body.max_tokens, body.max_completion_tokens),
            mode=mode,
            text_temperature=xargs.text_temperature,
            audio_temperature=xargs.audio_temperature,
            audio_top_k=None if xargs.audio_topk is None else max(xargs.audio_topk, 0),
            cfg=xargs.cfg,
        )
        request = SynthesisRequest(request_id, messages, generation, body.seed_or_new())
        audio_format = _FORMATS[body.audio.format]
        return Asked(
            request,
            self._options.names[0],
            mode,
            audio_format,
            body.stream_options.include_usage,
            int(time.time()),
        )

    def _mode(self, body: ChatBody) -> Mode | None:
        """What is written; text alone where the request says nothing. Raises `ApiError` for what
        contradicts itself."""
        modes = self._model.card.capabilities.modes
        said = body.vllm_xargs.mode
        if body.modalities is not None:
            asked: Mode = "text_audio" if "audio" in body.modalities else "text_only"
            if said not in (None, asked):
                message = f"`modalities` asks for {asked}, `vllm_xargs.mode` for {said}. Keep one of them."
                raise bad_request(message, "invalid_value", "modalities")
            said = asked
        mode = said or ("text_only" if "text_only" in modes else None)
        if mode == "text_only":
            for name in _XARG_ONLY_WITH_AUDIO:
                if (value := getattr(body.vllm_xargs, name)) is not None and not (
                    name == "cfg" and 0 <= value <= 1
                ):
                    message = f"`{name}` is about audio, which the mode text_only does not make. Remove it, or set mode to text_audio."
                    raise bad_request(message, ErrorCode.INPUT_BAD_GENERATION.value, f"vllm_xargs.{name}")
        stops = set(body.stop_token_ids)
        if stops and (mode == "text_audio" or stops != {_END_OF_TURN}):
            message = f"Answers end by themselves: `stop_token_ids` may be [{_END_OF_TURN}] for text, and nothing else. Remove it."
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED.value, "stop_token_ids")
        return mode

    def _messages(self, turn: ChatMessage) -> list[Message]:
        """One message a part. Raises `InputError` for audio that cannot be used."""
        role: Role = "system" if turn.role == "developer" else turn.role
        if isinstance(turn.content, str):
            return [Message(role, "text", turn.content)]
        found: list[Message] = []
        for part in turn.content:
            if isinstance(part, TextPart):
                found.append(Message(role, "text", part.text))
                continue
            if role != "user":
                raise bad_request(
                    f"Audio of the role {turn.role} cannot be heard. Only users bring audio.",
                    "invalid_value",
                    "messages",
                )
            is_url = isinstance(part, AudioUrlPart)
            text, declared = (
                (part.audio_url.url, None) if is_url else (part.input_audio.data, part.input_audio.format)
            )
            if is_url and ":" not in text[:64]:
                raise bad_request(
                    "`audio_url` is a data URL: data:audio/wav;base64,...",
                    ErrorCode.INPUT_AUDIO_FORBIDDEN.value,
                    "messages",
                )
            found.append(Message(role, "audio", read_audio(text, self._options.max_audio_seconds, declared)))
        return found

    async def _whole(self, asked: Asked, permit: Permit) -> Parts:
        speech = await self._speech(asked, permit)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": speech.text_out or "",
            "audio": await self._audio(asked, speech),
        }
        choice = {"index": 0, "message": message, "finish_reason": _finish(speech), "logprobs": None}
        view = {**asked.head, "object": "chat.completion", "choices": [choice], "usage": _usage(speech)}
        # JSON of an answer with audio is long; its event form is the same bytes with a frame around them.
        body = await asyncio.to_thread(event, view)
        async for part in whole(body[6:-2], "application/json", {"x-seed": str(asked.request.seed)}):
            yield part

    async def _speech(self, asked: Asked, permit: Permit) -> Speech:
        """The result; text without the audio that was asked for is a result too."""
        try:
            return await self._model.speech(asked.request, permit)
        except NoAudioError as error:
            return _text_alone(error, self._model.card.sample_rate)

    async def _streamed(self, asked: Asked, permit: Permit) -> Parts:
        started = False
        try:
            async with aclosing(self._deltas(asked, permit)) as deltas:
                async for delta in deltas:
                    if not started:
                        started = True
                        yield Head(
                            EVENT_STREAM, {"cache-control": "no-cache", "x-seed": str(asked.request.seed)}
                        )
                        yield self._event(asked, {"role": "assistant", "content": ""})
                        yield delta
                        self._metrics.began(ROUTE, time.monotonic() - permit.since)
                    else:
                        yield delta
            yield b"data: [DONE]\n\n"
        except NightjarError as error:
            if not started:
                raise
            yield event(as_api_error(error, _param(error)).view())

    async def _deltas(self, asked: Asked, permit: Permit) -> AsyncGenerator[bytes, None]:
        """The events after the first: pieces of text, the audio, the reason of the end, and the usage if
        it was asked for."""
        none = np.zeros(0, np.float32)
        heard = [none]
        speech = Speech(none, self._model.card.sample_rate)
        try:
            async with aclosing(self._chunks(asked, permit)) as chunks:
                async for chunk in chunks:
                    heard.append(chunk.samples)
                    if isinstance(chunk, Done):
                        speech = replace(chunk.speech, samples=np.concatenate(heard))
                    elif chunk.text:
                        yield self._event(asked, {"content": chunk.text})
        except NoAudioError as error:
            speech = _text_alone(error, self._model.card.sample_rate)
        if (audio := await self._audio(asked, speech)) is not None:
            yield self._event(asked, {"audio": audio})
        yield self._event(asked, {}, _finish(speech))
        if asked.with_usage:
            yield event(
                {**asked.head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(speech)}
            )

    async def _chunks(self, asked: Asked, permit: Permit) -> AsyncGenerator[AudioChunk | Done, None]:
        if self._model.card.capabilities.streaming:
            async with aclosing(self._model.chunks(asked.request, permit)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        speech = await self._model.speech(asked.request, permit)
        yield AudioChunk(np.zeros(0, np.float32), speech.sample_rate, speech.text_out or "")
        yield Done(speech)

    def _event(self, asked: Asked, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event({**asked.head, "object": "chat.completion.chunk", "choices": [choice]})

    async def _audio(self, asked: Asked, speech: Speech) -> dict[str, Any] | None:
        """`message.audio`, or None where there is no sound."""
        if not len(speech.samples):
            return None
        data = await asyncio.to_thread(whole_file, speech.samples, speech.sample_rate, asked.audio_format)
        self._metrics.spoke(len(speech.samples) / speech.sample_rate)
        return {
            "id": f"audio-{secrets.token_hex(12)}",
            "data": (await asyncio.to_thread(base64.b64encode, data)).decode(),
            "expires_at": asked.created + _AUDIO_LIFE_SECONDS,
            "transcript": speech.text_out or "",
        }


def _text_alone(error: NoAudioError, sample_rate: int) -> Speech:
    return Speech(np.zeros(0, np.float32), sample_rate, text_out=error.text_out, meta=dict(error.meta))


def _finish(speech: Speech) -> str:
    return "length" if speech.meta.get("finish") == "length" else "stop"


def _usage(speech: Speech) -> dict[str, int] | None:
    """Positions of the prompt and steps of the engine, where the pipeline says them."""
    if "tokens" not in speech.meta:
        return None
    prompt, made = int(speech.meta.get("prompt_positions", 0)), int(speech.meta["tokens"])
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _either(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    if max_tokens is not None and max_completion_tokens not in (None, max_tokens):
        raise bad_request(
            "`max_tokens` and `max_completion_tokens` differ. Keep one of them.",
            "invalid_value",
            "max_tokens",
        )
    return max_completion_tokens if max_tokens is None else max_tokens


def _param(error: NightjarError) -> str | None:
    """The field at fault: a setting that the message names, else the dialogue itself."""
    return named_field(error, _FIELDS) or ("messages" if error.code.value.startswith("input.") else None)
