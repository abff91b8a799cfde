"""HTTP/1.1 and Cartesia's WebSocket on bare sockets, for clients that cost next to nothing: only the standard library is
imported."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: A piece of an answer: the time it came, and its bytes.
HeardBytes = Callable[[float, int], None]
SPEECH, CHAT = "/v1/audio/speech", "/v1/chat/completions"
CARTESIA_VERSION = "2025-04-16"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10


class AnswerParser:
    """One HTTP/1.1 answer, fed in pieces of any size; its body may be chunked, counted, or end with the connection."""

    def __init__(self) -> None:
        self.status, self.done, self.open_ended = 0, False, False
        self.headers: dict[str, str] = {}
        self._data, self._body = bytearray(), list[bytes]()
        self._steps = self._read()
        next(self._steps)

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of the connection; the bytes of the body among them. Raises `ValueError` for what is no
        answer."""
        self._data += data
        next(self._steps, None)
        body, self._body = b"".join(self._body), []
        return body

    def ended(self) -> bool:
        """The connection was closed; whether that was the end of the answer."""
        self.done = self.done or self.open_ended
        return self.done

    @property
    def rest(self) -> bytes:
        """Bytes that follow the answer."""
        return bytes(self._data)

    def _read(self) -> Iterator[None]:
        head = yield from self._until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status = first.split(maxsplit=2)[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP/1.1 answer: {first[:80]}")
        self.status, pairs = int(status), (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((yield from self._until(b"\r\n")).partition(b";")[0], 16):
                yield from self._take(size)
                yield from self._until(b"\r\n")
            while (yield from self._until(b"\r\n")):  # trailers
                pass
        elif "content-length" in self.headers:
            yield from self._take(int(self.headers["content-length"]))
        elif self.status != 101:
            self.open_ended = True
            yield from self._take(sys.maxsize)
        self.done = True
        yield

    def _until(self, end: bytes) -> Iterator[None]:
        while (at := self._data.find(end)) < 0:
            yield
        found = bytes(self._data[:at])
        del self._data[: at + len(end)]
        return found

    def _take(self, left: int) -> Iterator[None]:
        while left:
            if not self._data:
                yield
            self._body.append(bytes(self._data[:left]))
            left -= len(self._body[-1])
            del self._data[: len(self._body[-1])]


class FrameParser:
    """WebSocket messages of a server, fed in pieces of any size."""

    def __init__(self) -> None:
        self._data, self._parts = bytearray(), list[bytes]()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Takes bytes of the connection; the whole messages among them as (opcode, payload)."""
        self._data += data
        found: list[tuple[int, bytes]] = []
        while (frame := self._frame()) is not None:
            final, opcode, payload = frame
            if opcode >= _CLOSE:
                found.append((opcode, payload))
                continue
            self._parts.append(payload)
            if final:
                found.append((_TEXT, b"".join(self._parts)))
                self._parts = []
        return found

    def _frame(self) -> tuple[bool, int, bytes] | None:
        data = self._data
        length, start = (data[1] & 127, 2) if len(data) > 1 else (0, 2)
        if length >= 126:
            start = 4 if length == 126 else 10
            length = int.from_bytes(data[2:start], "big")
        if len(data) < start or len(data) < start + length:
            return None
        first, payload = data[0], bytes(data[start : start + length])
        del data[: start + length]
        return bool(first & 128), first & 15, payload


def masked_frame(payload: bytes, opcode: int = _TEXT) -> bytes:
    """A WebSocket message of a client: masked, as the protocol asks; a mask of zeros is one."""
    count = len(payload)
    size = bytes([128 | count]) if count < 126 else bytes([254]) + struct.pack(">H", count)
    if count >= 65536:
        size = bytes([255]) + struct.pack(">Q", count)
    return bytes([128 | opcode]) + size + bytes(4) + payload


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and what opens it."""

    url: str
    key: str = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 80

    def head(self, first: str, *lines: str) -> bytes:
        """The head of a request."""
        told = [first, f"Host: {self.host}:{self.port}", *lines]
        if self.key:
            told.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*told, "", ""]).encode()


async def fetch(address: Address, path: str) -> tuple[int, bytes]:
    """A small page of a server: status and body. Raises `OSError` where nobody answers."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(address.head(f"GET {path} HTTP/1.1", "Connection: close"))
        parser, body = AnswerParser(), b""
        while not parser.done:
            data = await reader.read(65536)
            body += parser.feed(data)
            if not data and not parser.ended():
                raise ConnectionError(f"{address.url} broke off")
        return parser.status, body
    finally:
        writer.close()


class Connection(asyncio.Protocol):
    """An open connection that asks for one answer at a time."""

    def __init__(self, address: Address) -> None:
        self.address, self.closed = address, False
        self._heard: HeardBytes = lambda _at, _count: None
        self._answer: asyncio.Future[str] | None = None
        self._transport: Any = None

    async def open(self) -> None:
        """Connects. Raises `OSError` where nobody listens."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, self.address.host, self.address.port)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end("" if self._complete() else "connection lost")

    def hang_up(self) -> None:
        """Closes the connection in the middle of whatever comes."""
        self.closed = True
        self._transport.abort()
        self._end("cancelled")

    cancel = hang_up

    def start(self, body: dict[str, Any], heard: HeardBytes, route: str = SPEECH) -> asyncio.Future[str]:
        """Writes a request. The result is "" after a whole answer, else the code or the name of what went wrong."""
        self._heard = heard
        self._answer = asyncio.get_running_loop().create_future()
        self._send(body, route)
        return self._answer

    def data_received(self, data: bytes) -> None:
        at = time.monotonic()
        try:
            self._read(at, data)
        except ValueError:
            self.closed = True
            self._transport.abort()
            self._end("no answer of this protocol")

    def _end(self, failure: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(failure)

    def _send(self, body: dict[str, Any], route: str) -> None:
        raise NotImplementedError

    def _read(self, at: float, data: bytes) -> None:
        raise NotImplementedError

    def _complete(self) -> bool:
        """The connection was closed by the other side; whether that ended an answer well."""
        return False


class HttpConnection(Connection):
    """Requests on a connection that is kept."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._parser, self._error = AnswerParser(), b""

    def _send(self, body: dict[str, Any], route: str) -> None:
        content = json.dumps(body).encode()
        self._parser, self._error = AnswerParser(), b""
        lines = "Content-Type: application/json", f"Content-Length: {len(content)}"
        self._transport.write(self.address.head(f"POST {route} HTTP/1.1", *lines) + content)

    def _read(self, at: float, data: bytes) -> None:
        parser, body = self._parser, self._parser.feed(data)
        if parser.status != 200:
            self._error += body
        elif body:
            self._heard(at, len(body))
        if parser.done:
            self.closed |= parser.headers.get("connection", "").lower() == "close"
            self._end("" if parser.status == 200 else self._failure())

    def _failure(self) -> str:
        """Such as `429 queue_full`."""
        try:
            code = json.loads(self._error)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = ""
        return f"{self._parser.status} {code or ''}".strip()

    def _complete(self) -> bool:
        return self._parser.ended() and self._parser.status == 200


class CartesiaConnection(Connection):
    """Cartesia's `/tts/websocket`: one context at a time. `body` is what the message says beside its context."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._upgrade: asyncio.Future[int] | None = None
        self._head, self._frames, self._contexts = AnswerParser(), FrameParser(), 0

    async def open(self) -> None:
        """Connects and shakes hands. Raises `OSError` where there is no such route."""
        await super().open()
        self._upgrade = asyncio.get_running_loop().create_future()
        key, secret = base64.b64encode(os.urandom(16)).decode(), self.address.key
        query = f"cartesia_version={CARTESIA_VERSION}" + (f"&api_key={secret}" if secret else "")
        upgrade = "Upgrade: websocket", "Connection: Upgrade"
        lines = *upgrade, f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"
        self._transport.write(self.address.head(f"GET /tts/websocket?{query} HTTP/1.1", *lines))
        status = await self._upgrade
        if status != 101:
            raise ConnectionError(f"the WebSocket was answered with {status}")

    @property
    def _context(self) -> str:
        return f"c{self._contexts}"

    def _send(self, body: dict[str, Any], route: str) -> None:
        self._contexts += 1
        self._transport.write(masked_frame(json.dumps({**body, "context_id": self._context}).encode()))

    def cancel(self) -> None:
        """Ends the context and keeps the connection."""
        message = {"context_id": self._context, "cancel": True}
        self._transport.write(masked_frame(json.dumps(message).encode()))
        self._end("cancelled")

    def _read(self, at: float, data: bytes) -> None:
        if self._upgrade is not None and not self._upgrade.done():
            self._head.feed(data)
            if not self._head.done:
                return
            self._upgrade.set_result(self._head.status)
            data = self._head.rest
        for opcode, payload in self._frames.feed(data):
            if opcode == _TEXT:
                self._message(at, json.loads(payload))
            elif opcode == _PING:
                self._transport.write(masked_frame(payload, _PONG))
            elif opcode == _CLOSE:
                self._transport.close()

    def _message(self, at: float, message: dict[str, Any]) -> None:
        if message.get("context_id") != self._context:
            return
        if message.get("type") == "chunk" and (data := message.get("data")):
            self._heard(at, len(data) * 3 // 4 - data[-2:].count("="))
        elif message.get("type") == "error":
            self._end(f"error {message.get('error_code') or message.get('title') or ''}".strip())
        if message.get("done"):
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._upgrade is not None and not self._upgrade.done():
            self._upgrade.set_result(self._head.status)


CONNECTIONS: dict[str, type[Connection]] = {"http": HttpConnection, "websocket": CartesiaConnection}
