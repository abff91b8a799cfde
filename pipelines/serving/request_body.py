"""The body of a request: bounded in bytes, signs of JSON and time while it comes, and its JSON, whose
shape is bounded before it is parsed. Long JSON is parsed beside the event loop."""

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

#: Of JSON that a client sends: commas and brackets outside of its texts, and brackets that are open at once.
MAX_VALUES, MAX_DEPTH = 10_000, 32
#: Of the signs that JSON gives a meaning, wherever they stand: what finding the texts may cost. A text of
#: 50,000 characters has a tenth.
MAX_MARKS = 1 << 19
_MARKS = b'"\\[{,'
#: What is parsed on the event loop: it takes less than a hop to a thread.
INLINE_BYTES = 1 << 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
#: One for all: each holds the interpreter while it parses, and the event loop has its turn between two of
#: them.
_parser = DaemonThreads(1, "json")


class JsonRoute(APIRoute):
    """A route whose body is parsed by `read`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's own, with another request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        return await read(await self.body())


def marks(part: bytes) -> int:
    """The signs of JSON in a part of it."""
    return sum(map(part.count, _MARKS))


def too_complex() -> ApiError:
    """The refusal of JSON whose shape is over a bound."""
    message = f"The JSON is nested too deeply or has too many values: {MAX_DEPTH} levels and {MAX_VALUES:,} values are the maximum."
    return bad_request(message, ErrorCode.INPUT_BAD_JSON)


async def read(text: bytes | str) -> Any:
    """The value of a JSON text. Raises `ApiError` (400) for one that is none, or whose shape is over a
    bound."""
    data = text.encode() if isinstance(text, str) else text
    return (
        parse(data) if len(data) <= INLINE_BYTES else await asyncio.wrap_future(_parser.submit(parse, data))
    )


def parse(data: bytes) -> Any:
    """As `read`, at once."""
    _check_shape(data)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error).split(" - ")[0].rstrip(".")
        raise bad_request(f"The message is not JSON: {reason}.", ErrorCode.INPUT_BAD_JSON) from None


def _check_shape(data: bytes) -> None:
    if marks(data) > MAX_MARKS:
        raise too_complex()
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    # Up to the first error of its syntax, every second piece between two quotes that are not escaped is
    # outside of texts.
    outside = b"".join(plain.split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    if opened + outside.count(b",") > MAX_VALUES:
        raise too_complex()
    if opened > MAX_DEPTH:
        brackets = outside.translate(None, _NO_BRACKETS)
        if max(accumulate(1 if sign in b"[{" else -1 for sign in brackets)) > MAX_DEPTH:
            raise too_complex()


#: Of a body that nobody wants: reading on for a while lets the client read why, instead of a reset
#: connection.
_DISCARD_BYTES = 512 << 20
DISCARD_SECONDS = 10.0
#: Between two reads of it: others go first.
_DISCARD_PAUSE_SECONDS = 0.01
#: Bodies of the maximum size that may be there at once without a slot.
MAX_LARGE_BODIES = 8
_CLOSE = {"connection": "close"}


@dataclass(slots=True)
class BodyMemory:
    """The bytes of all bodies that have no slot yet, except small ones."""

    max_body_bytes: int
    bytes: int = 0

    def take(self, count: int) -> None:
        """Counts bytes. Raises `ApiError` (429) where there is no room."""
        if self.bytes + count > MAX_LARGE_BODIES * self.max_body_bytes:
            message = "Too many large requests wait. Try again after 5 s."
            raise ApiError(429, message, "rate_limit_exceeded", headers={**_CLOSE, "retry-after": "5"})
        self.bytes += count


@dataclass(slots=True)
class LimitedBody:
    """An ASGI `receive`."""

    _receive: Receive
    _memory: BodyMemory
    _seconds: float
    _deadline: float | None = None
    _bytes: int = 0
    _marks: int = 0
    _held: int = 0
    _over: bool = False

    async def __call__(self) -> Message:
        """The next message. Raises `ApiError`: 400 for a body over its bounds, 408 for one that does not
        come, 429 for a large one beside too many others."""
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
            raise ApiError(
                408,
                f"The request did not come within {self._seconds:g} s.",
                "request_timeout",
                headers=_CLOSE,
            ) from None

    def release(self) -> None:
        """The body is gone, or its request has a slot."""
        self._memory.bytes -= self._held
        self._held = 0

    async def discard(self) -> None:
        """Reads what a client is still sending, for a while."""
        self.release()
        end = self._bytes + _DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._over and self._bytes < end:
                    await self._read()
                    await asyncio.sleep(_DISCARD_PAUSE_SECONDS)
        except TimeoutError:
            return

    async def _next(self) -> Message:
        message = await self._read()
        self._marks += marks(message.get("body", b""))
        if self._bytes > self._memory.max_body_bytes:
            raise too_large(self._memory.max_body_bytes)
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


async def before_client_leaves(receive: Receive, work: asyncio.Future[Any]) -> bool:
    """Waits for the end of `work`; False: the client of a request that is whole left before."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    leaving = asyncio.create_task(leave())
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


def too_large(max_bytes: int) -> ApiError:
    """A refusal that names the bound."""
    return ApiError(
        400,
        f"The body is larger than {max_bytes:,} bytes. Send less audio, or FLAC.",
        "body_too_large",
        headers=_CLOSE,
    )


class Body(BaseModel):
    """An object of a request: fields that nobody knows are refused, and null is a field that was left out,
    as with OpenAI."""

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
        """The fields that are settings of a line's `generation`, but the seed, which is a request's."""
        # Of the model alone: fields that nobody knows may be attributes too.
        names = type(self).model_fields.keys() & set(Generation.__struct_fields__) - {"seed"}
        return {name: getattr(self, name) for name in names}


class SpokenBody(Body):
    """The settings of a line's `generation` that every request for speech may say."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_seconds: float | None = None

    def seed_or_new(self) -> int:
        """The seed that was asked for, or a new one."""
        return secrets.randbits(63) if self.seed is None else self.seed
