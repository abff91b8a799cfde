"""A WebSocket connection of the server: counted like others, with bounds on what a client may send and how
long it may be away."""

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
#: Of what a client sends: the frames of a message, and those of a second, pings among them; others are read
#: later.
MAX_FRAMES, FRAMES_A_SECOND = 1024, 1000
#: What is read of it before others have their turn: a frame may have 6 bytes.
_TURN_BYTES = 2048
#: Between two reads of what a client sends that is to hear why its connection ends.
_DISCARD_SECONDS = 0.05
_BAD_TEXT, _TOO_BIG = 1007, 1009


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's connection, which lets the app end what is under way when the server stops, and says why
    it closes."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        #: Called once the connection is closed.
        self.on_lost: Callable[[], None] = lambda: None
        #: Called with whether nothing is done for the connection from now on.
        self.on_change: Callable[[bool], None] = lambda _resting: None
        self._failed = False
        self._unread = bytearray()
        self._turn: asyncio.TimerHandle | None = None
        #: When the frames that were read would have come at `FRAMES_A_SECOND`.
        self._due = 0.0

    async def run_asgi(self) -> None:
        """Runs the app, which says when it rests."""
        self.scope[RESTING] = self.on_change  # pyright: ignore[reportGeneralTypeIssues]
        await super().run_asgi()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the connection's place back."""
        super().connection_lost(exc)
        if self._turn is not None:
            self._turn.cancel()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Reads the first bytes, and the rest in turn with other clients."""
        if self._failed:
            self.transport.pause_reading()
            self.loop.call_later(_DISCARD_SECONDS, self.transport.resume_reading)
            return
        if not self.handshake_initiated:
            super().data_received(data)
            return
        self._unread += data
        if self._turn is None:
            self._read_some()

    def handle_events(self) -> None:
        """Counts the frames. A message of too many ends the connection."""
        self._due = max(self._due, self.loop.time()) + len(self.conn.events) / FRAMES_A_SECOND
        super().handle_events()
        if len(self.frames) > MAX_FRAMES and not self.close_sent:
            self.conn.fail(_TOO_BIG, f"A message may have {MAX_FRAMES:,} frames.")
            self.handle_parser_exception()

    async def receive(self) -> Any:
        """The next message for the app; once it has all of them, more is read."""
        message = await super().receive()
        self._read_on()
        return message

    def shutdown(self) -> None:
        """Tells the app, which closes the connection when its contexts are done."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": DRAIN})  # pyright: ignore[reportArgumentType]
        elif self.close_sent or not self.handshake_initiated:
            super().shutdown()

    async def send(self, message: Any) -> None:
        """An answer without a handshake is one too."""
        await super().send(message)
        self._read_on()
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
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": 1006 if closing is None else closing.code}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            # Clients wait for the end of the connection before they say that it was closed.
            self.transport.write_eof()
        self.close_sent = True
        self.stop_keepalive()
        self._failed = True
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def eof_received(self) -> None:
        """A client that has sent its last byte, in a frame or not, has left."""
        self.transport.close()

    def _read_some(self) -> None:
        self._turn = None
        if self._failed:
            return
        piece = bytes(self._unread[:_TURN_BYTES])
        del self._unread[:_TURN_BYTES]
        super().data_received(piece)
        self._read_on()

    def _read_on(self) -> None:
        """Reads more at this client's next turn, unless the app has yet to take what it was sent."""
        if self._failed or self.read_paused or self._turn is not None:
            return
        wait_seconds = self._due - self.loop.time() - 1
        if self._unread or wait_seconds > 0:
            self.transport.pause_reading()
            self._turn = self.loop.call_later(max(wait_seconds, 0), self._read_some)
        else:
            self.transport.resume_reading()


def protocol_of(transport: asyncio.BaseTransport) -> WebSocketProtocol:
    """The protocol that a connection was handed to."""
    protocol = transport.get_protocol()
    assert isinstance(protocol, WebSocketProtocol)
    return protocol
