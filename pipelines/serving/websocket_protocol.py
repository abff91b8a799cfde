"""A WebSocket connection of the server: counted like others, with bounds on what a client may send and how long it may be away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

#: What the app receives between the messages when the server stops.
DRAIN = "nightjar.drain"
#: What the app calls, by its scope, with whether it has nothing to do for this connection.
RESTING = "nightjar.resting"
#: Seconds between two pings, and for an answer. A listener that plays as it reads answers late.
PING_SECONDS, PONG_SECONDS = 20.0, 60.0
_BAD_TEXT = 1007


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's connection, which lets the app end what is under way when the server stops, and says why it closes."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        #: Called once the connection is closed.
        self.on_lost: Callable[[], None] = lambda: None
        #: Called with whether nothing is done for the connection from now on.
        self.on_change: Callable[[bool], None] = lambda _resting: None

    async def run_asgi(self) -> None:
        """Runs the app, which says when it rests."""
        self.scope[RESTING] = self.on_change  # pyright: ignore[reportGeneralTypeIssues]
        await super().run_asgi()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the connection's place back."""
        super().connection_lost(exc)
        self.on_lost()

    def shutdown(self) -> None:
        """Tells the app, which closes the connection when its contexts are done."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": DRAIN})  # pyright: ignore[reportArgumentType]
        elif self.close_sent or not self.handshake_initiated:
            super().shutdown()

    async def send(self, message: Any) -> None:
        """An answer without a handshake is one too."""
        await super().send(message)
        self.handshake_complete |= message["type"] == "websocket.http.response.body"

    def send_receive_event_to_app(self) -> None:
        """Refuses text that is not UTF-8 as a mistake of the client."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.fail(_BAD_TEXT, "The text is not UTF-8.")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Says why, then reads on for a while what the client still sends, so that it can read that."""
        if self.close_sent:
            return
        closing = self.conn.close_sent
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006 if closing is None else closing.code})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            # Clients wait for the end of the connection before they say that it was closed.
            self.transport.write_eof()
        self.close_sent = True
        self.stop_keepalive()
        self._read_on()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def eof_received(self) -> None:
        """A client that has sent its last byte, in a frame or not, has left."""
        self.transport.close()

    def _read_on(self) -> None:
        if self.read_paused and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()


def protocol_of(transport: asyncio.BaseTransport) -> WebSocketProtocol:
    """The protocol that a connection was handed to."""
    protocol = transport.get_protocol()
    assert isinstance(protocol, WebSocketProtocol)
    return protocol
