"""A proxy in front of an S3 server, which answers with 404 while it is told to."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class S3Proxy:
    """`refuses` gets method and path of each request, and gives the code that it is answered with: `NoSuchKey`, `NoSuchBucket`, or None."""

    def __init__(self, endpoint: str) -> None:
        self.refuses: Callable[[str, str], str | None] = lambda method, path: None
        self.refused = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(urlsplit(endpoint).netloc))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self, server: str) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code = proxy.refuses(self.command, self.path)
                if code is not None:
                    proxy.refused += 1
                    self.answer(404, [], f"<Error><Code>{code}</Code></Error>".encode())
                    return
                connection = http.client.HTTPConnection(server, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                self.answer(answer.status, answer.getheaders(), answer.read())
                connection.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815 - names of the standard library

            def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
                self.send_response_only(status)
                of_a_head = self.command == "HEAD" and status < 400
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", *(() if of_a_head else ("content-length",))):
                        self.send_header(name, value)
                if not of_a_head:
                    self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        return Handler


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    """A proxy that is closed in the end."""
    proxy = S3Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()
