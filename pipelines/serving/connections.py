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

from pipelines.serving.errors import error_view
from pipelines.serving.websocket_protocol import protocol_of

#: In the scope of a request: when its first byte came, by the monotonic clock.
FIRST_BYTE = "nightjar.first_byte"
log = logging.getLogger(__name__)

#: Descriptors that stay free for everything that is no connection: files, the model, its threads and
#: processes.
_RESERVED_DESCRIPTORS = 256
_NO_ROOM_TO_ACCEPT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_SECONDS = 60.0
#: Chunks of a body in a second; others are read later.
CHUNKS_A_SECOND = 1000
#: What is read of a connection before others have their turn: a piece of many chunks, which may have 6 bytes,
#: and one of few.
_TURN_BYTES, _LARGE_TURN_BYTES = 2048, 1 << 16
_FEW_CHUNKS = 32


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
        self._open: set[HttpProtocol] = set()
        #: Those that have sent no whole request yet, and those that wait for their next one; the oldest
        #: first.
        self._silent: OrderedDict[HttpProtocol, None] = OrderedDict()
        self._resting: OrderedDict[HttpProtocol, None] = OrderedDict()
        self._logged_at = -float("inf")
        self._unlogged = 0

    def enter(self, connection: HttpProtocol) -> bool:
        """Takes a new connection in, in the place of one without a request where all are taken; False:
        there is no place."""
        if len(self._open) >= self.maximum and not self._make_room():
            self._say("All %d connections are taken by requests; a client was turned away.", self.maximum)
            return False
        self._open.add(connection)
        self._silent[connection] = None
        return True

    def work(self, connection: HttpProtocol) -> None:
        """The connection has a whole request."""
        self._silent.pop(connection, None)
        self._resting.pop(connection, None)

    def rest(self, connection: HttpProtocol) -> None:
        """The connection's request is answered."""
        if connection in self._open:
            self._resting[connection] = None

    def leave(self, connection: HttpProtocol) -> None:
        """The connection is closed."""
        self._open.discard(connection)
        self.work(connection)

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


class HttpProtocol(H11Protocol):
    """uvicorn's connection, counted, and closed where the headers of a request do not come in time."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._first_byte_at: float | None = None
        self._unread = bytearray()
        self._turn: asyncio.TimerHandle | None = None
        #: When the chunks that were read would have come at `CHUNKS_A_SECOND`.
        self._due = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses with 503 where there is no place."""
        super().connection_made(transport)
        if self._all.enter(self):
            self._expect_headers()
        else:
            transport.write(_no_room())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the place back."""
        self._cancel_deadline()
        if self._turn is not None:
            self._turn.cancel()
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a body that comes in chunks in turn with other clients, and all else at once."""
        self._unread += data
        if self._turn is None:
            self._read_some()
        else:
            self.transport.pause_reading()

    def _read_some(self) -> None:
        self._turn = None
        while self._unread:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                self._unread.clear()
                return
            piece = bytes(self._unread[: self._turn_bytes()])
            del self._unread[: len(piece)]
            self._read(piece)
            if self._in_chunks():
                now = self.loop.time()
                self._due = max(self._due, now) + piece.count(b"\r\n") / 2 / CHUNKS_A_SECOND
                self.transport.pause_reading()
                self._turn = self.loop.call_later(max(self._due - now - 1, 0), self._read_some)
                return
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def _turn_bytes(self) -> int:
        """What may be read at once: where a request ends and a body in chunks begins shows only once that
        is read."""
        if self._in_chunks():
            return (
                _TURN_BYTES
                if self._unread.count(b"\r\n", 0, _LARGE_TURN_BYTES) > 2 * _FEW_CHUNKS
                else _LARGE_TURN_BYTES
            )
        return _TURN_BYTES if self.conn.their_state is h11.IDLE else len(self._unread)

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
        super().data_received(data)

    def handle_events(self) -> None:
        """Once a request is there its time is the guard's to bound."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            scope: dict[str, Any] = cast(Any, self.cycle.scope)
            scope[FIRST_BYTE], self._first_byte_at = self._first_byte_at, None
            self._cancel_deadline()
        if not self._idle() and not self.cycle.more_body:
            self._all.work(self)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """A WebSocket keeps the place of its connection; one without a context is closed to make room,
        like one without a request."""
        self._cancel_deadline()
        self._all.work(self)
        super().handle_websocket_upgrade(event)
        protocol = protocol_of(self.transport)
        protocol.on_lost = partial(self._all.leave, self)
        protocol.on_change = lambda resting: (self._all.rest if resting else self._all.work)(self)

    def on_response_complete(self) -> None:
        """The connection may be closed for another from now on, unless it has its next request already."""
        self._all.rest(self)
        super().on_response_complete()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self._all.header_seconds, self._too_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self._idle():
            self.transport.abort()


def connection_limit(maximum: int) -> int:
    """How many connections there may be: `maximum`, or what the limit of descriptors has room for once it
    was raised for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = maximum + _RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return maximum
    room = max(soft - _RESERVED_DESCRIPTORS, soft // 4)
    log.warning(
        "The limit of descriptors (%d) has room for %d connections, not %d. Raise it (ulimit -n).",
        soft,
        room,
        maximum,
    )
    return room


def _no_room() -> bytes:
    body = json.dumps(
        error_view(503, "All connections of the server are taken. Try again.", "too_many_connections")
    ).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 5\r\nconnection: close\r\n\r\n".encode() + body
