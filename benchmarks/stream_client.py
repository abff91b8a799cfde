"""Clients of a streaming server that cost next to nothing: HTTP/1.1 and Cartesia's WebSocket on bare sockets.

Only the standard library is imported, so that a process of clients starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: A piece of audio: the time it came (`time.monotonic`), and its bytes.
HeardBytes = Callable[[float, int], None]
BYTES_PER_SAMPLE = 2
CARTESIA_VERSION = "2025-04-16"
_HEAD_END = b"\r\n\r\n"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10


class AnswerParser:
    """One HTTP/1.1 answer, fed in pieces of any size; its body may be chunked, counted, or end with the
    connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._data = bytearray()
        #: What comes next: "head", "size", "chunk", "chunk end", "trailer", "counted" or "open".
        self._state = "head"
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Takes bytes of the connection; the bytes of the body among them. Raises `ValueError` for what is
        no answer."""
        self._data += data
        body: list[bytes] = []
        while not self.done and self._step(body):
            pass
        return b"".join(body)

    def ended(self) -> bool:
        """The connection was closed; whether that was the end of the answer."""
        self.done = self.done or self._state == "open"
        return self.done

    def _step(self, body: list[bytes]) -> bool:
        """Reads the next part; whether there may be more."""
        if self._state == "head":
            return self._read_head()
        if self._state in ("counted", "chunk", "open"):
            return self._read_body(body)
        end = self._data.find(b"\r\n")
        if end < 0:
            return False
        line = bytes(self._data[:end])
        del self._data[: end + 2]
        if self._state == "size":
            self._left = int(line.partition(b";")[0], 16)
            self._state = "chunk" if self._left else "trailer"
        elif self._state == "chunk end":
            self._state = "size"
        else:
            self.done = not line
        return True

    def _read_head(self) -> bool:
        end = self._data.find(_HEAD_END)
        if end < 0:
            return False
        first, *lines = bytes(self._data[:end]).decode("latin-1").split("\r\n")
        del self._data[: end + len(_HEAD_END)]
        version, status = first.split(maxsplit=2)[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP/1.1 answer: {first[:80]}")
        self.status = int(status)
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        if "chunked" in self.headers.get("transfer-encoding", ""):
            self._state = "size"
        elif "content-length" in self.headers:
            self._state, self._left = "counted", int(self.headers["content-length"])
            self.done = self._left == 0
        elif self.status == 101:
            self.done = True
        else:
            self._state = "open"
        return True

    def _read_body(self, body: list[bytes]) -> bool:
        count = len(self._data) if self._state == "open" else min(self._left, len(self._data))
        if count:
            body.append(bytes(self._data[:count]))
            del self._data[:count]
        self._left -= count
        if self._state == "open" or self._left:
            return False
        if self._state == "counted":
            self.done = True
        else:
            self._state = "chunk end"
        return True

    @property
    def rest(self) -> bytes:
        """Bytes that follow the answer."""
        return bytes(self._data)


class FrameParser:
    """WebSocket messages of a server, fed in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._parts: list[bytes] = []

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
        if len(self._data) < 2:
            return None
        length, start = self._data[1] & 127, 2
        if length >= 126:
            size = 2 if length == 126 else 8
            start += size
            if len(self._data) < start:
                return None
            length = int.from_bytes(self._data[2:start], "big")
        if len(self._data) < start + length:
            return None
        first, payload = self._data[0], bytes(self._data[start : start + length])
        del self._data[: start + length]
        return bool(first & 128), first & 15, payload


def masked_frame(payload: bytes, opcode: int = _TEXT) -> bytes:
    """A WebSocket message of a client: masked, as the protocol asks; a mask of zeros is one."""
    count = len(payload)
    if count < 126:
        size = bytes([128 | count])
    elif count < 65536:
        size = bytes([254]) + struct.pack(">H", count)
    else:
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


class Connection(asyncio.Protocol):
    """An open connection that asks for one speech at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.closed = False
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

    def start(self, body: dict[str, Any], heard: HeardBytes) -> asyncio.Future[str]:
        """Writes a request. The result is "" after a whole answer, else the code or the name of what went
        wrong."""
        self._heard = heard
        self._answer = asyncio.get_running_loop().create_future()
        self._send(body)
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

    def _send(self, body: dict[str, Any]) -> None:
        raise NotImplementedError

    def _read(self, at: float, data: bytes) -> None:
        raise NotImplementedError

    def _complete(self) -> bool:
        """The connection was closed by the other side; whether that ended an answer well."""
        return False


class HttpConnection(Connection):
    """`POST /v1/audio/speech` on a connection that is kept."""

    ROUTE = "/v1/audio/speech"

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._parser = AnswerParser()
        self._error = b""

    def _send(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self._parser, self._error = AnswerParser(), b""
        head = self.address.head(
            f"POST {self.ROUTE} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {len(content)}"
        )
        self._transport.write(head + content)

    def _read(self, at: float, data: bytes) -> None:
        body = self._parser.feed(data)
        if self._parser.status == 200:
            if body:
                self._heard(at, len(body))
        else:
            self._error += body
        if self._parser.done:
            if self._parser.headers.get("connection", "").lower() == "close":
                self.closed = True
            self._end("" if self._parser.status == 200 else _failure(self._parser.status, self._error))

    def _complete(self) -> bool:
        return self._parser.ended() and self._parser.status == 200


def _failure(status: int, body: bytes) -> str:
    """Such as `429 queue_full`."""
    try:
        error: Any = json.loads(body)["error"]
        return f"{status} {error['code'] or ''}".strip()
    except (ValueError, KeyError, TypeError):
        return str(status)


class CartesiaConnection(Connection):
    """Cartesia's `/tts/websocket`: one context at a time. `body` is what the message says beside its
    context."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._upgrade: asyncio.Future[int] | None = None
        self._head = AnswerParser()
        self._frames = FrameParser()
        self._contexts = 0

    async def open(self) -> None:
        """Connects and shakes hands. Raises `OSError` where there is no such route."""
        await super().open()
        self._upgrade = asyncio.get_running_loop().create_future()
        key = base64.b64encode(os.urandom(16)).decode()
        query = f"cartesia_version={CARTESIA_VERSION}" + (
            f"&api_key={self.address.key}" if self.address.key else ""
        )
        lines = (
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        )
        self._transport.write(self.address.head(f"GET /tts/websocket?{query} HTTP/1.1", *lines))
        status = await self._upgrade
        if status != 101:
            raise ConnectionError(f"the WebSocket was answered with {status}")

    @property
    def _context(self) -> str:
        return f"c{self._contexts}"

    def _send(self, body: dict[str, Any]) -> None:
        self._contexts += 1
        self._transport.write(masked_frame(json.dumps({**body, "context_id": self._context}).encode()))

    def cancel(self) -> None:
        """Ends the context and keeps the connection."""
        self._transport.write(
            masked_frame(json.dumps({"context_id": self._context, "cancel": True}).encode())
        )
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
        kind = message.get("type")
        if kind == "chunk" and (data := message.get("data")):
            self._heard(at, len(data) * 3 // 4 - data[-2:].count("="))
        elif kind == "error":
            self._end(f"error {message.get('error_code') or message.get('title') or ''}".strip())
        if message.get("done"):
            self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._upgrade is not None and not self._upgrade.done():
            self._upgrade.set_result(self._head.status)


CONNECTIONS: dict[str, type[Connection]] = {"http": HttpConnection, "websocket": CartesiaConnection}


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
