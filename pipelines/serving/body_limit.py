"""The messages of one HTTP request: bounded in bytes, signs of JSON and time, and watched for a client that leaves."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from pipelines.serving.errors import ApiError
from pipelines.serving.json_body import INLINE_BYTES, MAX_MARKS, marks, too_complex

#: Of a body that nobody wants: reading on for a while lets the client read why, instead of a reset connection.
_DISCARD_BYTES = 512 << 20
_DISCARD_SECONDS = 10.0
#: Between two reads of it: others go first.
_DISCARD_PAUSE_SECONDS = 0.01
#: Bodies of the maximum size that may be there at once without a slot.
MAX_LARGE_BODIES = 8
_CLOSE = {"connection": "close"}


class BodyMemory:
    """The bytes of all bodies that have no slot yet, except small ones."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.bytes = 0

    def take(self, count: int) -> None:
        """Counts bytes. Raises `ApiError` (429) where there is no room."""
        if self.bytes + count > MAX_LARGE_BODIES * self.max_body_bytes:
            message = "Too many large requests wait. Try again after 5 s."
            raise ApiError(429, message, "rate_limit_exceeded", headers={**_CLOSE, "retry-after": "5"})
        self.bytes += count


class LimitedBody:
    """An ASGI `receive`."""

    def __init__(self, receive: Receive, memory: BodyMemory, seconds: float) -> None:
        self._receive = receive
        self._memory = memory
        self._max_bytes = memory.max_body_bytes
        self._seconds = seconds
        self._deadline: float | None = None
        self._bytes = self._marks = self._held = 0
        self._over = False

    async def __call__(self) -> Message:
        """The next message. Raises `ApiError`: 400 for a body over its bounds, 408 for one that does not come, 429 for a large one
        beside too many others."""
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
        """Returns when the client of a request that is whole leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            continue

    def release(self) -> None:
        """The body is gone, or its request has a slot."""
        self._memory.bytes -= self._held
        self._held = 0

    async def discard(self) -> None:
        """Reads what a client is still sending, for a while."""
        self.release()
        end = self._bytes + _DISCARD_BYTES
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._over and self._bytes < end:
                    await self._read()
                    await asyncio.sleep(_DISCARD_PAUSE_SECONDS)
        except TimeoutError:
            return

    async def _next(self) -> Message:
        message = await self._read()
        self._marks += marks(message.get("body", b""))
        if self._bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if self._marks > MAX_MARKS:
            raise too_complex()
        if self._bytes > INLINE_BYTES:
            self._memory.take(self._bytes - self._held)
            self._held = self._bytes
        return message

    async def _read(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        self._over = not message.get("more_body", False)
        return message


def too_large(max_bytes: int) -> ApiError:
    """A refusal that names the bound."""
    return ApiError(400, f"The body is larger than {max_bytes:,} bytes. Send less audio, or FLAC.", "body_too_large", headers=_CLOSE)
