"""A proxy in front of an S3 server, which answers with 404 while it is told to, and flips a bit of one
answer."""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: What a server says of a key whose disk is not mounted, and of a bucket when it was started on an empty
#: disk.
FORGOTTEN = {
    "NoSuchKey": "The specified key does not exist.",
    "NoSuchBucket": "The specified bucket does not exist.",
}
_NO_BODY = {204, 304}
_OF_A_CONNECTION = {"connection", "content-length", "keep-alive", "transfer-encoding"}


class S3Proxy:
    """`refuses` gets method and path of each request, and gives the code that it is answered with, one of
    `FORGOTTEN`, or None.

    Where the server is away, a client's connection ends without an answer.
    """

    def __init__(self, endpoint: str) -> None:
        self.refuses: Callable[[str, str], str | None] = lambda method, path: None
        #: Requests that were answered with 404, and bits that were flipped, so far.
        self.refused = 0
        self.flipped = 0
        self._flips: re.Pattern[str] | None = None
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self, urlsplit(endpoint).netloc))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-proxy", daemon=True)
        self._thread.start()

    def forget(self, code: str, seconds: float) -> None:
        """Answers every request with 404 and this code from now on, for so long."""
        until = time.monotonic() + seconds
        self.refuses = lambda method, path: code if time.monotonic() < until else None

    def flip_next(self, path: str | None) -> None:
        """Flips a bit in the body of the next answer to a GET whose path matches this expression; the
        server's copy stays right.

        None: flips no more.
        """
        with self._lock:
            self._flips = None if path is None else re.compile(path)

    def spoiled(self, path: str, body: bytes) -> bytes:
        """The body of an answer to a GET as the client gets it."""
        with self._lock:
            if self._flips is None or not body or self._flips.search(path) is None:
                return body
            self._flips = None
            self.flipped += 1
        changed, bit = bytearray(body), random.randrange(len(body) * 8)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    """A proxy that is closed in the end."""
    proxy = S3Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: Of connections that are not accepted yet.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""


def _handler(proxy: S3Proxy, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: Heads and bodies are small, and each is written at once.
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            self._upstream = http.client.HTTPConnection(server, timeout=120)

        def finish(self) -> None:
            self._upstream.close()
            super().finish()

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if (code := proxy.refuses(self.command, self.path)) is not None:
                proxy.refused += 1
                text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{FORGOTTEN[code]}</Message></Error>"
                return self.answer(404, [("Content-Type", "application/xml")], text.encode())
            try:
                status, headers, answer = self.passed_on(body)
            except (OSError, http.client.HTTPException):
                self.close_connection = True
                return None
            if self.command == "GET" and status in (200, 206):
                answer = proxy.spoiled(self.path, answer)
            return self.answer(status, headers, answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - names of the standard library

        def passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            """Status, headers and body of the server's answer. The signature of the request holds for its
            headers as they are."""
            self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":
                    self._upstream.putheader(name, value)
            self._upstream.endheaders(body)
            response = self._upstream.getresponse()
            headers = [
                (name, value) for name, value in response.getheaders() if name.lower() not in _OF_A_CONNECTION
            ]
            if self.command == "HEAD" and (length := response.getheader("Content-Length")) is not None:
                headers.append(("Content-Length", length))
            return response.status, headers, response.read()

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD" and status not in _NO_BODY:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler
