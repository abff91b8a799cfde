"""A server that is asked many things at once: it may be busy or away for a while, and then it is asked again."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from pipelines.errors import ConfigError, ErrorCode, ServiceError

_CONNECT_SECONDS = 10.0
#: Of the first answer: a server that is busy may take a while to say what it serves.
_MODELS_SECONDS = 60.0
_MOST_PAUSE_SECONDS = 30.0
_AWAY = frozenset({429, 502, 503})


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said: a completion, or the code and words of its refusal."""

    completion: dict[str, Any] | None
    code: str
    message: str
    attempts: int


class ChatClient:
    """One server; an asynchronous context manager. Being cancelled hangs up, which frees the server's slot."""

    def __init__(self, url: str, key: str | None, connections: int, timeout_seconds: float, patience_seconds: float) -> None:
        """An answer may take `timeout_seconds`; a server that gives none to anybody for `patience_seconds` is given up."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience_seconds = patience_seconds
        self._last_word = time.monotonic()
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
        """The names that the server serves. Raises `server.unreachable`, `config.invalid` for a key or address it refuses."""
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
        """The answer to one request. Raises `server.unreachable` when patience is over."""
        attempts = 0
        while True:
            attempts += 1
            wait_seconds = min(2.0 ** min(attempts - 1, 10), _MOST_PAUSE_SECONDS) * random.uniform(0.5, 1.0)
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
                    self._last_word = time.monotonic()
                if answer.status_code not in _AWAY:
                    return _read(answer, attempts)
                reason = f"it answers {answer.status_code}"
                after = answer.headers.get("retry-after", "")
                wait_seconds = max(wait_seconds, float(after)) if after.isdigit() else wait_seconds
            if time.monotonic() - self._last_word > self._patience_seconds:
                raise self._unreachable(reason)
            await asyncio.sleep(min(wait_seconds, _MOST_PAUSE_SECONDS))

    def _unreachable(self, reason: str) -> ServiceError:
        message = f"The server {self.url} cannot be asked: {reason}."
        return ServiceError(ErrorCode.SERVER_UNREACHABLE, message, "Start it, or correct --server; then the same command goes on.")


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
        return Answer(None, str(answer.status_code), "The server's answer is not of OpenAI's form.", attempts)


def _no_address(url: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, f"{url[:200]!r} is no address of a server.", "Write it as http://HOST:PORT.")
