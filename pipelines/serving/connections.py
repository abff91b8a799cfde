"""The connections of a server: their number, the time for headers, and which ones are closed to make room."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from pipelines.serving.errors import unavailable

#: In the scope of a request: the arrival of its first byte, by the monotonic clock.
FIRST_BYTE = "nightjar.first_byte"
log = logging.getLogger(__name__)

#: File descriptors that are reserved for files, the model, its threads and processes.
_RESERVED_DESCRIPTORS = 256
_NO_ROOM_TO_ACCEPT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Minimum time between two warnings.
_LOG_SECONDS = 60.0
#: Maximum chunks of a body, or frames of a WebSocket including its pings, that are read per second.
PIECES_PER_SECOND = 1000
#: Maximum bytes that are read from a client before other clients are read. A chunk can have only 6 bytes, so
#: they may contain hundreds of chunks.
_TURN_BYTES = 2048
#: The message that the app receives when the server stops.
DRAIN = "nightjar.drain"
#: In the scope of a WebSocket: the function that the app calls with whether the connection is idle.
SET_IDLE = "nightjar.set_idle"
#: Interval of pings, and maximum time for an answer. A client that reads only as fast as it plays answers
#: late.
PING_SECONDS = 20.0
PONG_SECONDS = 60.0
#: Maximum frames of a message.
MAX_FRAMES = 1024
#: Pause between two reads of a refused client's data.
_DISCARD_SECONDS = 0.05
_BAD_TEXT = 1007
_TOO_BIG = 1009


class Connections:
    """All connections of one server. Used on its event loop only."""

    def __init__(
        self, maximum: int, header_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`maximum`: open connections. The headers of a request must arrive within `header_seconds` after the
        connection opens, or after their first byte."""
        self.maximum = maximum
        self.header_seconds = header_seconds
        self._clock = clock
        self._open = set[Connection]()
        #: Connections that have not sent a complete request, in the order in which they opened.
        self._without_request = dict[Connection, None]()
        #: Connections that are idle after an answer; those that are idle for the longest time come first.
        self._idle = dict[Connection, None]()
        self._logged_at = -float("inf")
        self._unlogged = 0

    def enter(self, connection: Connection) -> bool:
        """Adds a connection. At the maximum, one without a request is closed first; False if all have
        requests."""
        if len(self._open) >= self.maximum and not self._make_room():
            self._warn("All %d connections have requests; a client was refused.", self.maximum)
            return False
        self._open.add(connection)
        self._without_request[connection] = None
        return True

    def set_idle(self, connection: Connection, idle: bool) -> None:
        """Marks a connection as idle, so that it may be closed to make room, or as busy."""
        self._without_request.pop(connection, None)
        if not idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)
        self.set_idle(connection, False)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler. If no connection can be accepted, it closes connections without
        a request, and logs that once a minute."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_ROOM_TO_ACCEPT and "socket" in context:
            # Closes half of the connections that never sent one, so that waiting clients can connect.
            for _ in range(len(self._without_request) // 2 + 1):
                self._make_room()
            self._warn(
                "No connection can be accepted: %s. Raise the limit of descriptors (ulimit -n).",
                error.strerror,
            )
        elif isinstance(error, ValueError) and "_start_serving" in context["message"]:
            # asyncio repeats failed accepts after a second; the socket was closed meanwhile.
            log.debug("The server stopped before a failed accept was tried again.")
        else:
            loop.default_exception_handler(context)

    def _make_room(self) -> bool:
        """Closes the connection that has been without a request for the longest time; False if there is
        none."""
        closing = (connection for connection in self._open if connection.transport.is_closing())
        oldest = next(chain(self._without_request, self._idle, closing), None)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.transport.abort()
        return True

    def _warn(self, message: str, *facts: object) -> None:
        self._unlogged += 1
        if self._clock() - self._logged_at >= _LOG_SECONDS:
            log.warning(f"{message} (%d times since the last warning)", *facts, self._unlogged)
            self._logged_at = self._clock()
            self._unlogged = 0


class Connection(asyncio.Protocol):
    """A connection that `Connections` counts. Its data is read in turn with that of other clients."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._unread = bytearray()
        self._turn: asyncio.TimerHandle | None = None
        #: Time of the event loop at which the data read so far would have arrived at `PIECES_PER_SECOND`.
        self._due = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        super().connection_lost(exc)
        if self._turn is not None:
            self._turn.cancel()
        self._connections.leave(self)

    def data_received(self, data: bytes) -> None:
        """Reads the first bytes at once, and the rest in turn with other clients."""
        self._unread += data
        if self._turn is None:
            self._read_some()
        else:
            self.transport.pause_reading()

    def _read_some(self) -> None:
        self._turn = None
        if not self._is_paused():
            # Empty data would mean that the client has ended.
            if piece := bytes(self._unread[: self._turn_bytes()]):
                del self._unread[: len(piece)]
                self._read(piece)
            self._read_on()

    def _read_on(self) -> None:
        """Schedules this client's next turn, or resumes reading if nothing is left."""
        if self._turn is not None or self._is_paused():
            return
        wait_seconds = self._due - self.loop.time() - 1
        if self._unread or wait_seconds > 0:
            self.transport.pause_reading()
            self._turn = self.loop.call_later(max(wait_seconds, 0), self._read_some)
        else:
            self.transport.resume_reading()

    def _is_paused(self) -> bool:
        """Whether reading is paused."""
        raise NotImplementedError

    def _turn_bytes(self) -> int:
        """Maximum bytes to read at once."""
        return _TURN_BYTES

    def _read(self, data: bytes) -> None:
        super().data_received(data)


class HttpProtocol(Connection, H11Protocol):
    """uvicorn's connection with a time limit for headers. A chunked body is read in turn with other clients;
    other data is read at once."""

    _deadline: asyncio.TimerHandle | None = None
    _first_byte_at: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of headers, or refuses with 503 if all connections have requests."""
        super().connection_made(transport)
        if self._connections.enter(self):
            self._expect_headers()
        else:
            error = unavailable("The server has no free connection. Try again.", "too_many_connections")
            body = json.dumps(error.view()).encode()
            head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            transport.write(f"{head}retry-after: 5\r\nconnection: close\r\n\r\n".encode() + body)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer of headers."""
        self._cancel_deadline()
        super().connection_lost(exc)

    def _is_paused(self) -> bool:
        gone = self.transport.is_closing() or self.transport.get_protocol() is not self
        return gone or (self.flow.read_paused and not self._unread)

    def _turn_bytes(self) -> int:
        """The limit also applies between requests, where a chunked body may begin."""
        in_turn = self.conn.their_state is h11.IDLE or self._in_chunks()
        return _TURN_BYTES if in_turn else len(self._unread)

    def _in_chunks(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and any(
            name == b"transfer-encoding" for name, _ in self.headers
        )

    def _read(self, data: bytes) -> None:
        """Starts the timer at the first bytes of a request."""
        if self._idle():
            self._first_byte_at = self._first_byte_at or time.monotonic()
            if self._deadline is None:
                self._expect_headers()
        super()._read(data)
        if self._in_chunks():
            self._due = max(self._due, self.loop.time()) + data.count(b"\r\n") / 2 / PIECES_PER_SECOND

    def handle_events(self) -> None:
        """Stops the timer once the headers of a request are complete; the middleware then limits its time."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            scope: dict[str, Any] = cast(Any, self.cycle.scope)
            scope[FIRST_BYTE], self._first_byte_at = self._first_byte_at, None
            self._cancel_deadline()
        if not self._idle() and not self.cycle.more_body:
            self._connections.set_idle(self, False)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Replaces this protocol by a `WebSocketProtocol`."""
        self._cancel_deadline()
        self._connections.leave(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Marks the connection as idle, unless its next request has arrived."""
        self._connections.set_idle(self, True)
        super().on_response_complete()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self._connections.header_seconds, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class WebSocketProtocol(Connection, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket. When the server stops, the app may finish its contexts. A protocol error is
    reported to the client before the connection is closed."""

    _failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Adds the connection, which counts as busy until the app marks it as idle."""
        super().connection_made(transport)
        self._connections.enter(self)
        self._connections.set_idle(self, False)

    async def run_asgi(self) -> None:
        """Runs the app with `SET_IDLE` in its scope."""
        self.scope[SET_IDLE] = partial(self._connections.set_idle, self)  # pyright: ignore[reportGeneralTypeIssues]
        await super().run_asgi()

    def data_received(self, data: bytes) -> None:
        """Reads data; after a failure drops it, slowly."""
        if self._failed:
            self.transport.pause_reading()
            self.loop.call_later(_DISCARD_SECONDS, self.transport.resume_reading)
        else:
            super().data_received(data)

    def _is_paused(self) -> bool:
        """True after a failure, and while the app has not read its messages."""
        return self._failed or self.read_paused

    def handle_events(self) -> None:
        """Counts frames. A message that has too many ends the connection."""
        self._due = max(self._due, self.loop.time()) + len(self.conn.events) / PIECES_PER_SECOND
        super().handle_events()
        if len(self.frames) > MAX_FRAMES and not self.close_sent:
            self.conn.fail(_TOO_BIG, f"A message may have {MAX_FRAMES:,} frames.")
            self.handle_parser_exception()

    async def receive(self) -> Any:
        """Returns the next message for the app, and resumes reading."""
        message = await super().receive()
        self._read_on()
        return message

    def shutdown(self) -> None:
        """Sends `DRAIN` to the app, which closes the connection after its contexts."""
        if self.handshake_complete and not self.close_sent:
            self.queue.put_nowait({"type": DRAIN})  # pyright: ignore[reportArgumentType]
        elif self.close_sent or not self.handshake_initiated:
            super().shutdown()

    async def send(self, message: Any) -> None:
        """Sends a message. An HTTP answer, which refuses the WebSocket, completes the handshake too."""
        await super().send(message)
        self._read_on()
        self.handshake_complete |= message["type"] == "websocket.http.response.body"

    def send_receive_event_to_app(self) -> None:
        """Passes a message to the app. Text that is not UTF-8 ends the connection as the client's error."""
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
        """Sends the reason and closes the connection a little later, so that the client can read the
        reason."""
        if self.close_sent:
            return
        closing = self.conn.close_sent
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": 1006 if closing is None else closing.code}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            # Clients report the reason only once the server has ended its side of the connection.
            self.transport.write_eof()
        self.close_sent = True
        self.stop_keepalive()
        self._failed = True
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    def eof_received(self) -> None:
        """Closes the connection of a client that has closed its side."""
        self.transport.close()


def connection_limit(maximum: int) -> int:
    """Raises the limit of file descriptors for `maximum` connections. Returns their number, which is smaller
    if the limit cannot be raised enough."""
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
