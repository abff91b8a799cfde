"""A proxy before an S3 server that forgets for a while what the server holds, and flips a bit of one answer."""

from __future__ import annotations

import http.client
import random
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.support.services import free_port

#: What a server whose disk is not mounted says of a key, and one that was started on an empty disk of the bucket.
FORGOTTEN = {"NoSuchKey": "The specified key does not exist.", "NoSuchBucket": "The specified bucket does not exist."}
_NO_BODY = {204, 304}
_HOP_BY_HOP = {"connection", "expect", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class S3Proxy:
    """Passes requests on to the server at a port of this machine, on a port of its own. A server that is away is a closed connection."""

    def __init__(self, upstream_port: int) -> None:
        self.port = free_port()
        self.upstream_port = upstream_port
        #: Requests that were answered with 404, and bits that were flipped, so far.
        self.refused = 0
        self.flipped = 0
        self._refuses_as = ""
        self._refuses_until = 0.0
        self._flips: re.Pattern[str] | None = None
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", self.port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="s3-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self, code: str, seconds: float) -> None:
        """Answers every request with 404 and this code of `FORGOTTEN` from now on, for so long."""
        with self._lock:
            self._refuses_as, self._refuses_until = code, time.monotonic() + seconds

    def flip_next(self, path: str | None) -> None:
        """Flips a bit in the body of the next answer to a GET whose path matches this expression; the server's copy stays right.

        None: flips no more.
        """
        with self._lock:
            self._flips = None if path is None else re.compile(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def refusal(self) -> str:
        """The code of the window that is open; empty for none."""
        with self._lock:
            if time.monotonic() >= self._refuses_until:
                return ""
            self.refused += 1
            return self._refuses_as

    def spoiled(self, path: str, body: bytes) -> bytes:
        """The body of an answer to a GET as the client gets it."""
        with self._lock:
            if self._flips is None or not body or self._flips.search(path) is None:
                return body
            self._flips = None
            self.flipped += 1
        return flipped(body, random.randrange(len(body) * 8))


def flipped(data: bytes, bit: int) -> bytes:
    """The data with another value of one bit."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: Of connections that are not accepted yet.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error."""


def _handler(proxy: S3Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        #: Heads and bodies are small, and each is written at once.
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            self._upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream_port, timeout=120)

        def finish(self) -> None:
            self._upstream.close()
            super().finish()

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if code := proxy.refusal():
                return self._refuse(code)
            try:
                status, headers, answer = self._passed_on(body)
            except (OSError, http.client.HTTPException):
                self.close_connection = True
                return None
            if self.command == "GET" and status in (200, 206):
                answer = proxy.spoiled(self.path, answer)
            return self._answer(status, headers, answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do  # noqa: N815 - names of http.server

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

        def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            """Status, headers and body of the server's answer. The signature of the request holds for its headers as they are."""
            self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "expect":
                    self._upstream.putheader(name, value)
            self._upstream.endheaders(body)
            response = self._upstream.getresponse()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP]
            if self.command == "HEAD" and (length := response.getheader("Content-Length")) is not None:
                headers.append(("Content-Length", length))
            return response.status, headers, response.read()

        def _refuse(self, code: str) -> None:
            text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{FORGOTTEN[code]}</Message></Error>"
            self._answer(404, [("Content-Type", "application/xml")], text.encode())

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD" and status not in _NO_BODY:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
