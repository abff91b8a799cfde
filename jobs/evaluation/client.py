"""A client of a chat server that sends many requests at once, and sends one again while the server is busy or away."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec

from jobs.dialogue import Dialogue, speech_position
from jobs.references import ReferenceReader
from jobs.spec import item_seed
from pipelines.errors import ConfigError, ErrorCode, InputError, ServiceError
from pipelines.request import Generation, Mode
from pipelines.validation import check_generation, either

_CONNECT_SECONDS = 10.0
#: Of the first answer: a server that is busy may take a while to say what it serves.
_MODELS_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 30.0
_AWAY = frozenset({429, 502, 503})


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion, or the code and message of the server's refusal."""

    completion: dict[str, Any] | None
    code: str
    message: str
    attempts: int


class ChatClient:
    """One server; an asynchronous context manager. A cancelled request is disconnected, which frees the server's slot."""

    def __init__(self, url: str, key: str | None, connections: int, timeout_seconds: float, patience_seconds: float) -> None:
        """An answer may take `timeout_seconds`. A server that gives no answer to any request for `patience_seconds` is given up."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience_seconds = patience_seconds
        self._last_answer = time.monotonic()
        try:
            self._http = httpx2.AsyncClient(
                base_url=self.url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(timeout_seconds, connect=_CONNECT_SECONDS, pool=None),
                limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise _no_address(url) from error

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names of the server's models. Raises `server.unreachable`, `config.invalid` for a key or address it refuses."""
        try:
            answer = await self._http.get("/v1/models", timeout=httpx2.Timeout(_MODELS_SECONDS, connect=_CONNECT_SECONDS))
        except httpx2.UnsupportedProtocol as error:
            raise _no_address(self.url) from error
        except httpx2.TransportError as error:
            raise self._unreachable(str(error) or type(error).__name__) from error
        if answer.status_code == 401:
            raise ConfigError(ErrorCode.CONFIG_INVALID, f"The server {self.url} refuses the key.", "Set SPEECH_SERVE__API_KEY to its key.")
        try:
            return [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreachable(f"it answers {answer.status_code}, and no list of models") from error

    async def ask(self, body: dict[str, Any]) -> Answer:
        """The answer to one request. Raises `server.unreachable` when the patience has ended."""
        attempts = 0
        while True:
            attempts += 1
            wait_seconds = min(2.0 ** min(attempts - 1, 10), _MAX_PAUSE_SECONDS) * random.uniform(0.5, 1.0)
            try:
                answer = await self._http.post("/v1/chat/completions", json=body)
            except httpx2.ConnectTimeout as error:
                reason = str(error) or "it cannot be reached"
            except httpx2.TimeoutException:
                return Answer(None, ErrorCode.SYNTH_TIMEOUT.value, "The server did not answer in time.", attempts)
            except httpx2.TransportError as error:
                reason = str(error) or type(error).__name__
            else:
                # Busy is not away: others get their answers.
                if answer.status_code == 429 or answer.status_code not in _AWAY:
                    self._last_answer = time.monotonic()
                if answer.status_code not in _AWAY:
                    return _read(answer, attempts)
                reason = f"it answers {answer.status_code}"
                after = answer.headers.get("retry-after", "")
                wait_seconds = max(wait_seconds, float(after)) if after.isdigit() else wait_seconds
            if time.monotonic() - self._last_answer > self._patience_seconds:
                raise self._unreachable(reason)
            await asyncio.sleep(min(wait_seconds, _MAX_PAUSE_SECONDS))

    def _unreachable(self, reason: str) -> ServiceError:
        message = f"The server {self.url} cannot be asked: {reason}."
        return ServiceError(ErrorCode.SERVER_UNREACHABLE, message, "Start it, or correct --server; then the same command continues.")


def _read(answer: httpx2.Response, attempts: int) -> Answer:
    try:
        view = answer.json()
        if answer.status_code == 200:
            if isinstance(view["choices"][0]["message"].get("content"), str | None):
                return Answer(view, "", "", attempts)
            raise TypeError("the content is no text")
        error = view["error"]
        return Answer(None, str(error.get("code") or answer.status_code), str(error.get("message") or ""), attempts)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return Answer(None, str(answer.status_code), "The server's answer is not in OpenAI's format.", attempts)


def _no_address(url: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, f"{url[:200]!r} is not the address of a server.", "Write it as http://HOST:PORT.")


#: The token that ends a text. The published server has to be given it; ours knows it.
_END_OF_TURN = 3
#: Defaults of the published clients (specification of the API), for each mode.
_DEFAULTS: dict[Mode, Generation] = {
    "text_only": Generation(max_tokens=4096, temperature=0.6, top_k=20),
    "text_audio": Generation(max_tokens=12_000, temperature=0.8, top_k=20, text_temperature=0.6, audio_temperature=0.8, audio_top_k=20),
}
_XARGS = {"text_temperature": "text_temperature", "audio_temperature": "audio_temperature", "audio_top_k": "audio_topk", "cfg": "cfg"}
_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "max_seconds")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What is asked for all dialogues of a file. A line's own `generation` has precedence."""

    model: str
    mode: Mode
    generation: Generation = field(default_factory=Generation)
    seed: int = 0

    def view(self) -> dict[str, Any]:
        """As JSON. A file of answers is continued only with equal options."""
        return msgspec.to_builtins(self)


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and the answer that the file expects."""

    body: dict[str, Any]
    seed: int
    reference: str | None


def question(dialogue: Dialogue, options: RequestOptions, reader: ReferenceReader) -> Question:
    """The request of a dialogue.

    A request for speech has no assistant's messages, as in the published clients. A request for text has the assistant's earlier
    turns; its texts after the last user message are the expected answer, and are never sent. Raises `InputError` for a dialogue
    that cannot be sent.
    """
    generation = (dialogue.generation or Generation()).over(options.generation)
    mode: Mode = generation.mode or options.mode
    generation = _filled_in(generation, mode).over(_DEFAULTS[mode])
    check_generation(generation)
    _refuse_unsendable(generation)
    last = max((index for index, message in enumerate(dialogue.messages) if message[0] == "user"), default=-1)
    asked = [
        message
        for index, message in enumerate(dialogue.messages)
        if message[0] != "assistant" or (mode == "text_only" and index < last and message[1] == "text")
    ]
    if last < 0:
        raise InputError(ErrorCode.INPUT_EMPTY_TEXT, "The dialogue has no user message to answer.", "Give the line a user message.")
    expected = [content for role, modality, content in dialogue.messages[last + 1 :] if (role, modality) == ("assistant", "text")]
    position = speech_position(dialogue.messages)
    seed = item_seed(options.seed, dialogue.example_id, position, line_seed=generation.seed)
    body: dict[str, Any] = {"model": options.model, "messages": [_message(*message, reader) for message in asked], "seed": seed}
    body |= {name: value for name in _FIELDS if (value := getattr(generation, name)) is not None}
    if mode == "text_only":
        body["stop_token_ids"] = [_END_OF_TURN]
    else:
        xargs = {theirs: value for ours, theirs in _XARGS.items() if (value := getattr(generation, ours)) is not None}
        body["vllm_xargs"] = {"mode": mode, "phase": "text", **xargs}
    return Question(body, seed, "\n".join(expected) or None)


def _filled_in(generation: Generation, mode: Mode) -> Generation:
    """The settings with those of one modality filled in from those of both, so that no default replaces what was asked for.

    The published server samples stream 0 of the audio with `temperature`, which therefore has to be `audio_temperature`.
    """
    text = either(generation.text_temperature, generation.temperature)
    if mode == "text_only":
        return msgspec.structs.replace(generation, temperature=text)
    audio = either(generation.audio_temperature, generation.temperature)
    top_k = either(generation.audio_top_k, generation.top_k)
    return msgspec.structs.replace(generation, temperature=audio, text_temperature=text, audio_temperature=audio, audio_top_k=top_k)


def _refuse_unsendable(generation: Generation) -> None:
    for name in ("voice", "language", "instruct", "reference_text", "roles"):
        if getattr(generation, name) is not None:
            message = f"A request to a server cannot have `{name}`."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, f"Remove `{name}` from the line.")


def _message(role: str, modality: str, content: str, reader: ReferenceReader) -> dict[str, Any]:
    if modality == "text":
        return {"role": role, "content": content}
    if modality != "audio" or role != "user":
        message = f"A {role} message of modality {modality!r} cannot be sent to a server."
        raise InputError(ErrorCode.INPUT_BAD_MODALITY, message, "Remove the message.")
    audio = reader.read(content)
    data = audio.data
    if audio.ext != "wav":
        # The published server reads nothing else.
        from pipelines.audio import decode, encode

        data = encode(*decode(data), "wav")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    return {"role": role, "content": [part]}
