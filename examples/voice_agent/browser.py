"""A page of a browser as a transport: its microphone comes over a WebSocket in Pipecat's protobuf frames,
and speech goes back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipecat.serializers.protobuf import ProtobufFrameSerializer
from pipecat.transports.base_transport import BaseTransport
from pipecat.transports.websocket.server import (
    SingleClientWebsocketServerParams,
    SingleClientWebsocketServerTransport,
)

_PAGE = Path(__file__).parent / "page"
#: Browsers give the microphone to pages of this machine only, unless they come over HTTPS.
_HOST = "127.0.0.1"


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def browser_transport(port: int) -> Iterator[BaseTransport]:
    """Serves the page on this port (0: a free one) and prints its address once it can be used, by one page
    at a time."""
    with ThreadingHTTPServer((_HOST, port), partial(_Files, directory=str(_PAGE))) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        audio_port = _free_port()
        hosts = (f"http://{host}:{files.server_port}" for host in (_HOST, "localhost"))
        params = SingleClientWebsocketServerParams(
            audio_in_enabled=True,
            audio_out_enabled=True,
            serializer=ProtobufFrameSerializer(),
            allowed_origins=list(hosts),
        )
        transport = SingleClientWebsocketServerTransport(params, _HOST, audio_port)

        @transport.event_handler("on_websocket_ready")
        async def ready(_transport: BaseTransport) -> None:
            print(f"Open http://{_HOST}:{files.server_port}/?audio={audio_port}", flush=True)

        try:
            yield transport
        finally:
            files.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]
