"""The body of a request. Its size, its JSON delimiters and its time are limited while it arrives; the shape
of its JSON is checked before it is parsed. Long JSON is parsed outside the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response
from starlette.types import Message, Receive

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode
from pipelines.request import Generation
from pipelines.serving.errors import ApiError, bad_request
from pipelines.tasks import cancel

#: Limits of a client's JSON: commas and opening brackets outside of strings, and levels of brackets.
MAX_VALUES = 10_000
MAX_DEPTH = 32
#: Maximum number of `_DELIMITERS` in JSON, inside and outside of strings, which limits the time to find the
#: strings. A text of 50,000 characters has a tenth as many.
MAX_DELIMITERS = 1 << 19
_DELIMITERS = b'"\\[{,'
#: Longest JSON, in bytes, that is parsed on the event loop, which takes less time than a change of thread.
INLINE_BYTES = 1 << 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
#: One thread, because parsing holds the GIL: the event loop can run between two bodies.
_parser = DaemonThreads(1, "json")


class JsonRoute(APIRoute):
    """A route whose body is parsed by `read`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, with `_JsonRequest` as the request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        return await read(await self.body())


def count_delimiters(part: bytes) -> int:
    """Counts the `_DELIMITERS` in a part of JSON."""
    return len(part) - len(part.translate(None, _DELIMITERS))


def too_complex() -> ApiError:
    """The error for JSON whose shape exceeds a limit."""
    return bad_request(
        f"The JSON is nested too deeply or has too many values: {MAX_DEPTH} levels and {MAX_VALUES:,} values are the maximum.",
        ErrorCode.INPUT_BAD_JSON,
    )


async def read(text: bytes | str) -> Any:
    """The value of a JSON text. Raises `ApiError` (400) for invalid JSON, and for a shape that exceeds a
    limit."""
    data = text.encode() if isinstance(text, str) else text
    return (
        parse(data) if len(data) <= INLINE_BYTES else await asyncio.wrap_future(_parser.submit(parse, data))
    )


def parse(data: bytes) -> Any:
    """As `read`, on the calling thread."""
    if count_delimiters(data) > MAX_DELIMITERS:
        raise too_complex()
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    # Up to the first syntax error, every second piece between unescaped quotes is outside of strings.
    structure = b"".join(plain.split(b'"')[::2])
    opened = structure.count(b"[") + structure.count(b"{")
    if opened + structure.count(b",") > MAX_VALUES:
        raise too_complex()
    if opened > MAX_DEPTH:
        brackets = structure.translate(None, _NO_BRACKETS)
        if max(accumulate(1 if sign in b"[{" else -1 for sign in brackets)) > MAX_DEPTH:
            raise too_complex()
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error).split(" - ")[0].rstrip(".")
        raise bad_request(f"The message is not JSON: {reason}.", ErrorCode.INPUT_BAD_JSON) from None


#: Limits of reading a refused body, which is read so that the client gets the error, not a reset connection.
_DISCARD_BYTES = 512 << 20
DISCARD_SECONDS = 10.0
#: Pause between two reads of a refused body, in favour of other clients.
_DISCARD_PAUSE_SECONDS = 0.01
#: Maximum memory of bodies without a slot, as a multiple of the maximum size of a body.
MAX_LARGE_BODIES = 8
_CLOSE = {"connection": "close"}


@dataclass(slots=True)
class BodyMemory:
    """Counts the bytes of all bodies that have no slot yet, except small ones."""

    max_body_bytes: int
    bytes: int = 0

    def take(self, count: int) -> None:
        """Counts bytes. Raises `ApiError` (429) beyond the limit."""
        if self.bytes + count > MAX_LARGE_BODIES * self.max_body_bytes:
            raise ApiError(
                429,
                "Too many large requests are waiting. Try again after 5 s.",
                "rate_limit_exceeded",
                headers={**_CLOSE, "retry-after": "5"},
            )
        self.bytes += count


@dataclass(slots=True)
class LimitedBody:
    """An ASGI `receive` that enforces the limits of a body."""

    _receive: Receive
    _memory: BodyMemory
    _seconds: float
    _deadline: float | None = None
    _bytes: int = 0
    _delimiters: int = 0
    _held: int = 0
    _is_complete: bool = False

    async def __call__(self) -> Message:
        """The next message. Raises `ApiError`: 400 for a body that exceeds a limit, 408 if it is late, 429 if
        it is large and too many other large ones wait."""
        if self._is_complete:
            return await self._receive()
        self._deadline = self._deadline or asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._next()
        except ApiError:
            await self.discard()
            raise
        except TimeoutError:
            raise ApiError(
                408,
                f"The request did not arrive within {self._seconds:g} s.",
                "request_timeout",
                headers=_CLOSE,
            ) from None

    def release(self) -> None:
        """Stops counting the body, because it is discarded or its request has a slot."""
        self._memory.bytes -= self._held
        self._held = 0

    async def discard(self) -> None:
        """Reads and drops the rest of the body, within limits."""
        self.release()
        end = self._bytes + _DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._is_complete and self._bytes < end:
                    await self._read()
                    await asyncio.sleep(_DISCARD_PAUSE_SECONDS)
        except TimeoutError:
            return

    async def _next(self) -> Message:
        message = await self._read()
        self._delimiters += count_delimiters(message.get("body", b""))
        if self._bytes > self._memory.max_body_bytes:
            raise too_large(self._memory.max_body_bytes)
        if self._delimiters > MAX_DELIMITERS:
            raise too_complex()
        if self._bytes > INLINE_BYTES:
            self._memory.take(self._bytes - self._held)
            self._held = self._bytes
        return message

    async def _read(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        return message


async def finishes_before_disconnect(receive: Receive, work: asyncio.Future[Any]) -> bool:
    """Waits for the end of `work`; False if the client disconnects first. The whole body must have been
    read."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    leaving = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        await cancel(leaving)


def too_large(max_bytes: int) -> ApiError:
    """The error for a body that exceeds the limit."""
    return ApiError(
        400,
        f"The body is larger than {max_bytes:,} bytes. Send less audio, or FLAC.",
        "body_too_large",
        headers=_CLOSE,
    )


class Body(BaseModel):
    """An object of a request. Unknown fields are refused, and null means a missing field, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return (
            {name: value for name, value in given.items() if value is not None}
            if isinstance(given, dict)
            else given
        )

    def settings(self) -> dict[str, Any]:
        """The fields that are settings of a line's `generation`, except the seed."""
        # Declared fields only: unknown fields may be attributes too.
        names = type(self).model_fields.keys() & set(Generation.__struct_fields__) - {"seed"}
        return {name: getattr(self, name) for name in names}


#: Maximum leading silence in ms that is left out of a stream.
Trim = Annotated[float, Field(ge=0, le=5000)]


class SpokenBody(Body):
    """The settings of a line's `generation` that every request accepts."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_seconds: float | None = None

    def seed_or_new(self) -> int:
        """The requested seed, or a random one."""
        return secrets.randbits(63) if self.seed is None else self.seed
