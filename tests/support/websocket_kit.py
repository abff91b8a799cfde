"""A client of `/tts/websocket` that collects what each context hears."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.serving_kit import PATIENCE_SECONDS

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
