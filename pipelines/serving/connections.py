"""The connections of a server: how many there may be, how long each may take for its headers, and which
ones make room."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pipelines.serving.errors import unavailable

#: In the scope of a request: when its first byte came, by the monotonic clock.
FIRST_BYTE = "nightjar.first_byte"
log = logging.getLogger(__name__)

#: Descriptors that stay free for everything that is no connection: files, the model, its threads and
#: processes.
_RESERVED_DESCRIPTORS = 256
_NO_ROOM_TO_ACCEPT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_SECONDS = 60.0
#: Chunks of a body, or frames of a WebSocket, pings among them, in a second; others are read later.
PIECES_A_SECOND = 1000
#: What is read of them before others have their turn: each may have 6 bytes.
_TURN_BYTES = 2048
#: What the app receives between the messages when the server stops.
DRAIN = "nightjar.drain"
#: What the app calls, by its scope, with whether it has nothing to do for this connection.
SET_IDLE = "nightjar.resting"
#: Seconds between two pings, and for an answer. A listener that plays as it reads answers late.
PING_SECONDS, PONG_SECONDS = 20.0, 60.0
#: Of a message.
MAX_FRAMES = 1024
#: Between two reads of what a client sends that is to hear why its connection ends.
_DISCARD_SECONDS = 0.05
_BAD_TEXT, _TOO_BIG = 1007, 1009


class Connections:
    """All connections of one server. Used on its event loop only."""

    def __init__(
        self, maximum: int, header_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`maximum` connections at once. A request's headers may take `header_seconds` from the connection
        or their first byte."""
        self.maximum = maximum
        self.header_seconds = header_seconds
        self._clock = clock
        self._open: set[Connection] = set()
        #: Those that have sent no whole request yet, and those that wait for their next one; the oldest
        #: first.
        self._silent: OrderedDict[Connection, None] = OrderedDict()
        self._resting: OrderedDict[Connection, None] = OrderedDict()
        self._logged_at = -float("inf")
        self._unlogged = 0

    def enter(self, connection: Connection) -> bool:
        """Takes a new connection in, in the place of one without a request where all are taken; False:
        there is no place."""
        if len(self._open) >= self.maximum and not self._make_room():
            self._say("All %d connections are taken by requests; a client was turned away.", self.maximum)
            return False
        self._open.add(connection)
        self._silent[connection] = None
        return True

    def change(self, connection: Connection, resting: bool) -> None:
        """The connection is `resting`: its request is answered, and it may be closed for another; or it has a
        whole request."""
        self._silent.pop(connection, None)
        if not resting:
            self._resting.pop(connection, None)
        elif connection in self._open:
            self._resting[connection] = None

    def leave(self, connection: Connection) -> None:
        """The connection is closed."""
        self._open.discard(connection)
        self.change(connection, False)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler: a socket that cannot be accepted makes room and is logged
        once a minute."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_ROOM_TO_ACCEPT and "socket" in context:
            # Half of those without a request, so that the many that may wait behind them come in.
            for _ in range(len(self._silent) // 2 + 1):
                self._make_room()
            self._say(
                "No connection can be accepted: %s. Raise the limit of descriptors (ulimit -n).",
                error.strerror,
            )
        elif isinstance(error, ValueError) and "_start_serving" in context["message"]:
            # asyncio tries an accept that failed again after a second, once for each of the backlog, and the
            # socket was closed since.
            log.debug("The server stopped before a failed accept was tried again.")
        else:
            loop.default_exception_handler(context)

    def _make_room(self) -> bool:
        """Ends the connection that has gone without a request for longest."""
        closing = (connection for connection in self._open if connection.transport.is_closing())
        oldest = next(iter(self._silent), None) or next(iter(self._resting), None) or next(closing, None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.transport.abort()
        return True

    def _say(self, message: str, *facts: object) -> None:
        self._unlogged += 1
        if self._clock() - self._logged_at >= _LOG_SECONDS:
            log.warning(f"{message} (%d times since this was last said)", *facts, self._unlogged)
            self._logged_at, self._unlogged = self._clock(), 0


class Connection(asyncio.Protocol):
    """A connection that is counted, and read in turn with other clients."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._unread = bytearray()
        self._turn: asyncio.TimerHandle | None = None
        #: When what was read would have come at `PIECES_A_SECOND`.
        self._due = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the place back."""
        super().connection_lost(exc)
        if self._turn is not None:
            self._turn.cancel()
        self._all.leave(self)

    def data_received(self, data: bytes) -> None:
        """Reads the first bytes, and the rest in turn with other clients."""
        self._unread += data
        if self._turn is None:
            self._read_some()
        else:
            self.transport.pause_reading()

    def _read_some(self) -> None:
        self._turn = None
        if not self._holds():
            # No bytes at all would say that the client has ended.
            if piece := bytes(self._unread[: self._turn_bytes()]):
                del self._unread[: len(piece)]
                self._read(piece)
            self._read_on()

    def _read_on(self) -> None:
        """Reads more at this client's next turn."""
        if self._turn is not None or self._holds():
            return
        wait_seconds = self._due - self.loop.time() - 1
        if self._unread or wait_seconds > 0:
            self.transport.pause_reading()
            self._turn = self.loop.call_later(max(wait_seconds, 0), self._read_some)
        else:
            self.transport.resume_reading()

    def _holds(self) -> bool:
        """Whether nothing more is to be read for now."""
        raise NotImplementedError

    def _turn_bytes(self) -> int:
        """What may be read at once."""
        return _TURN_BYTES

    def _read(self, data: bytes) -> None:
        super().data_received(data)


class HttpProtocol(Connection, H11Protocol):
    """uvicorn's connection, closed where the headers of a request do not come in time. Of it a body in chunks
    is read in turn, and all else at once."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(connections, **given)
        self._deadline: asyncio.TimerHandle | None = None
        self._first_byte_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses with 503 where there is no place."""
        super().connection_made(transport)
        if self._all.enter(self):
            self._expect_headers()
        else:
            transport.write(_no_room())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """No headers are waited for."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def _holds(self) -> bool:
        gone = self.transport.is_closing() or self.transport.get_protocol() is not self
        return gone or (self.flow.read_paused and not self._unread)

    def _turn_bytes(self) -> int:
        """Where a request ends and a body in chunks begins shows only once that is read."""
        in_turn = self.conn.their_state is h11.IDLE or self._in_chunks()
        return _TURN_BYTES if in_turn else len(self._unread)

    def _in_chunks(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and any(
            name == b"transfer-encoding" for name, _ in self.headers
        )

    def _read(self, data: bytes) -> None:
        """The first bytes of a request start its time."""
        if self._idle():
            self._first_byte_at = self._first_byte_at or time.monotonic()
            if self._deadline is None:
                self._expect_headers()
        super()._read(data)
        if self._in_chunks():
            self._due = max(self._due, self.loop.time()) + data.count(b"\r\n") / 2 / PIECES_A_SECOND

    def handle_events(self) -> None:
        """Once a request is there its time is the guard's to bound."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            scope: dict[str, Any] = cast(Any, self.cycle.scope)
            scope[FIRST_BYTE], self._first_byte_at = self._first_byte_at, None
            self._cancel_deadline()
        if not self._idle() and not self.cycle.more_body:
            self._all.change(self, False)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """A WebSocket takes the place of its connection."""
        self._cancel_deadline()
        self._all.leave(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """The connection may be closed for another from now on, unless it has its next request already."""
        self._all.change(self, True)
        super().on_response_complete()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self._all.header_seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class WebSocketProtocol(Connection, WebSocketsSansIOProtocol):
    """uvicorn's connection, which lets the app end what is under way when the server stops, and says why
    it closes."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(connections, **given)
        self._failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A WebSocket without a context is closed to make room, like a connection without a request."""
        super().connection_made(transport)
        self._all.enter(self)
        self._all.change(self, False)

    async def run_asgi(self) -> None:
        """Runs the app, which says when it rests."""
        self.scope[SET_IDLE] = partial(self._all.change, self)  # pyright: ignore[reportGeneralTypeIssues]
        await super().run_asgi()

    def data_received(self, data: bytes) -> None:
        """What comes behind a failure is read and dropped, slowly."""
        if self._failed:
            self.transport.pause_reading()
            self.loop.call_later(_DISCARD_SECONDS, self.transport.resume_reading)
        else:
            super().data_received(data)

    def _holds(self) -> bool:
        """The app may have yet to take what it was sent."""
        return self._failed or self.read_paused

    def handle_events(self) -> None:
        """Counts the frames. A message of too many ends the connection."""
        self._due = max(self._due, self.loop.time()) + len(self.conn.events) / PIECES_A_SECOND
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


def connection_limit(maximum: int) -> int:
    """How many connections there may be: `maximum`, or what the limit of descriptors has room for once it
    was raised for them."""
    wanted = maximum + _RESERVED_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return maximum
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised == wanted:
        return maximum
    room = max(raised - _RESERVED_DESCRIPTORS, raised // 4)
    log.warning(
        "The limit of descriptors (%d) has room for %d connections, not %d. Raise it (ulimit -n).",
        raised,
        room,
        maximum,
    )
    return room


def _no_room() -> bytes:
    error = unavailable("All connections of the server are taken. Try again.", "too_many_connections")
    body = json.dumps(error.view()).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 5\r\nconnection: close\r\n\r\n".encode() + body
