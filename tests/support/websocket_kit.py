"""Clients of WebSockets: one of `/tts/websocket` that collects what each context hears, and one of any protocol."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from websockets.sync.client import ClientConnection, connect

from tests.support.serving_kit import PATIENCE_SECONDS, Running

PATH = "/tts/websocket"


class Talk:
    """One connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        #: What came and was not asked for yet, by context.
        self._kept: list[dict[str, Any]] = []

    def say(self, context_id: str, transcript: str = "", *, more: bool = False, **fields: Any) -> None:
        self.send({"context_id": context_id, "transcript": transcript, "continue": more, **fields})

    def cancel(self, context_id: str) -> None:
        self.send({"context_id": context_id, "cancel": True})

    def send(self, view: dict[str, Any] | str | bytes) -> None:
        self.socket.send(json.dumps(view) if isinstance(view, dict) else view)

    def next(self, context_id: str | None) -> dict[str, Any]:
        """The next message of a context."""
        for number, view in enumerate(self._kept):
            if view["context_id"] == context_id:
                return self._kept.pop(number)
        while True:
            view = json.loads(self.socket.recv(PATIENCE_SECONDS))
            if view["context_id"] == context_id:
                return view
            self._kept.append(view)

    def hear(self, context_id: str, until: str = "done") -> bytes:
        """The audio of a context up to a message of this type."""
        audio = b""
        while (view := self.next(context_id))["type"] != until:
            assert view["type"] in ("chunk", "flush_done"), view
            if view["type"] == "chunk":
                audio += base64.b64decode(view["data"])
        return audio

    def error(self, context_id: str | None = None) -> dict[str, Any]:
        """The next message of a context, which must be an error."""
        view = self.next(context_id)
        assert (view["type"], view["done"]) == ("error", True), view
        assert view["title"]
        assert view["message"].endswith((".", "?")), view
        return view


@contextmanager
def talk(url: str, query: str = "", path: str = PATH, **headers: str) -> Iterator[Talk]:
    """A connection to a server."""
    address = url.replace("http://", "ws://") + path + (f"?{query}" if query else "")
    with connect(address, additional_headers=headers, compression=None, max_size=None, proxy=None) as socket:
        yield Talk(socket)


@contextmanager
def wire(
    server: Running, path: str, headers: dict[str, str] | None = None, **query: object
) -> Iterator[Wire]:
    url = f"{server.url.replace('http', 'ws', 1)}{path}?{urlencode(query)}"
    with connect(url, additional_headers=headers, compression=None, max_size=None, proxy=None) as socket:
        yield Wire(socket)


class Wire:
    """One connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.patience_seconds = socket, PATIENCE_SECONDS

    def send(self, *views: dict[str, Any] | str | bytes) -> None:
        for view in views:
            self.socket.send(json.dumps(view) if isinstance(view, dict) else view)

    def next(self) -> Any:
        message = self.socket.recv(self.patience_seconds)
        return message if isinstance(message, bytes) else json.loads(message)

    def until(self, key: str, value: object) -> list[Any]:
        """The messages up to one that has this field."""
        messages = [self.next()]
        while isinstance(messages[-1], bytes) or messages[-1].get(key) != value:
            messages.append(self.next())
        return messages

    def until_final(self, name: str = "a") -> list[dict[str, Any]]:
        """The messages of a context of ElevenLabs; there must be no other."""
        messages = self.until("isFinal", True)
        assert {one["contextId"] for one in messages} == {name}
        return messages

    def until_done(self) -> list[Any]:
        """The messages of an utterance of vLLM-Omni."""
        return self.until("type", "session.done")

    def closed(self) -> int | None:
        """The code of the end, before which no message may come."""
        assert list(self.socket) == []
        return self.socket.close_code
