"""A server process: its socket, its signals, its start and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from types import FrameType

import uvicorn

from pipelines.errors import invalid
from pipelines.serving.app import create_app
from pipelines.serving.connections import (
    PING_SECONDS,
    PONG_SECONDS,
    Connections,
    HttpProtocol,
    WebSocketProtocol,
    connection_limit,
)
from pipelines.serving.model import ServedModel

_BACKLOG = 2048
#: Maximum idle time of a connection. It is longer than that of clients, so that no client sends a request
#: while the server closes the connection.
_KEEP_ALIVE_SECONDS = 75


class Server(uvicorn.Server):
    """The server of one or more models. `run` serves until `stop` or a signal."""

    def __init__(self, served: Sequence[ServedModel], address: str, port: int) -> None:
        """Binds the address; port 0 takes a free one. Raises `ConfigError` (`config.invalid`) if that fails.

        `served`: the models; the options of the whole server are those of the first one."""
        self._socket = bound_socket(address, port)
        self.served = served
        options = served[0].options
        connections = Connections(connection_limit(options.connections), options.header_seconds)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        super().__init__(
            uvicorn.Config(
                create_app(served, self.stop),
                log_config=None,
                access_log=False,
                server_header=False,
                http=partial(HttpProtocol, connections),  # pyright: ignore[reportArgumentType]
                ws=partial(WebSocketProtocol, connections),  # pyright: ignore[reportArgumentType]
                ws_max_size=options.message_bytes,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=PONG_SECONDS,
                # Speech in base64 costs more to compress than to send.
                ws_per_message_deflate=False,
                loop="asyncio",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=options.drain_seconds,  # pyright: ignore[reportArgumentType]
            )
        )
        self._connections = connections
        #: Whether the model failed to close, so that its threads or processes may keep this process alive.
        self.hangs = False

    @property
    def url(self) -> str:
        """The address of the server."""
        address, port = self._socket.getsockname()[:2]
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `stop` or a signal. Running requests then have `drain_seconds` to finish before they
        are aborted.

        Raises the error if the model could not be opened.
        """
        try:
            super().run(sockets or [self._socket])
        finally:
            self.hangs = False in [model.close() for model in self.served]
            self._socket.close()
        for model in self.served:
            if model.failure is not None:
                raise model.failure

    def stop(self) -> None:
        """Refuses new requests, and ends the server after the running ones. May be called from any thread,
        and more than once."""
        self.should_exit = True
        for model in self.served:
            model.admission.closed = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's startup; errors of accepting connections are handled by `Connections`."""
        asyncio.get_running_loop().set_exception_handler(self._connections.on_loop_error)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains the server; a second one ends it at once. They are not recorded, because
        uvicorn would raise them again: the process ends with status 0."""
        self.force_exit = self.should_exit
        self.stop()


def bound_socket(address: str, port: int) -> socket.socket:
    try:
        family, *_, where = socket.getaddrinfo(address, port, flags=socket.AI_PASSIVE)[0]
        # From here on clients can connect; they are answered once the server runs.
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        # Accepted connections inherit this option. asyncio sets it only on sockets that name their protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise invalid(
            f"The server cannot listen at {address} port {port}: {reason}.", "Choose another port or address."
        ) from error
