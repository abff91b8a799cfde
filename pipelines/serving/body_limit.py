"""The messages of one HTTP request: bounded in bytes and time, and watched for a client that leaves."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Receive

from pipelines.serving.errors import ApiError

#: Of a body that nobody wants: reading on for a while lets the client read why, instead of a reset connection.
_DISCARD_BYTES = 512 << 20
_DISCARD_SECONDS = 10.0
_CLOSE = {"connection": "close"}


class LimitedBody:
    """An ASGI `receive`."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline: float | None = None
        self._early: deque[Message] = deque()
        self._bytes = 0
        self._over = False

    async def __call__(self) -> Message:
        """The next message. Raises `ApiError`: 400 for a body over its bound, 408 for one that does not come."""
        if self._early:
            return self._early.popleft()
        if self._over:
            return await self._receive()
        self._deadline = self._deadline or asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._next()
        except ApiError:
            await self.discard()
            raise
        except TimeoutError:
            raise ApiError(408, f"The request did not come within {self._seconds:g} s.", "request_timeout", headers=_CLOSE) from None

    async def left(self) -> None:
        """Returns when the client leaves; to notice that, the first part of a body is read and kept."""
        while not self._early or self._over:
            message = await self._receive() if self._over else await self._next()
            self._early.append(message)
            if message["type"] == "http.disconnect":
                return
        await asyncio.Event().wait()

    async def peek(self) -> bytes:
        """The first part of the body, which is kept. Raises as the call."""
        if not self._early:
            self._early.append(await self())
        return self._early[0].get("body", b"")

    async def discard(self) -> None:
        """Reads what a client is still sending, for a while."""
        begin = self._bytes
        self._early.clear()
        self._max_bytes = begin + _DISCARD_BYTES
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._over:
                    await self._next()
        except (TimeoutError, ApiError):
            return

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._over = not message.get("more_body", False)
            if self._bytes > self._max_bytes:
                raise too_large(self._max_bytes)
        else:
            self._over = True
        return message


def too_large(max_bytes: int) -> ApiError:
    """A refusal that names the bound."""
    return ApiError(400, f"The body is larger than {max_bytes:,} bytes. Send less audio, or FLAC.", "body_too_large", headers=_CLOSE)
