"""The JSON of a request or a message: its shape is bounded before it is parsed, and long ones are parsed beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode
from pipelines.serving.errors import ApiError, bad_request

#: Of JSON that a client sends: commas and brackets outside of its texts, and brackets that are open at once.
MAX_VALUES, MAX_DEPTH = 10_000, 32
#: Of the signs that JSON gives a meaning, wherever they stand: what finding the texts may cost. A text of 50,000 characters has a tenth.
MAX_MARKS = 1 << 19
_MARKS = b'"\\[{,'
#: What is parsed on the event loop: it takes less than a hop to a thread.
INLINE_BYTES = 1 << 16
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
#: One for all: each holds the interpreter while it parses, and the event loop has its turn between two of them.
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
    return bad_request(message, ErrorCode.INPUT_BAD_JSON.value)


async def read(text: bytes | str) -> Any:
    """The value of a JSON text. Raises `ApiError` (400) for one that is none, or whose shape is over a bound."""
    data = text.encode() if isinstance(text, str) else text
    return parse(data) if len(data) <= INLINE_BYTES else await asyncio.wrap_future(_parser.submit(parse, data))


def parse(data: bytes) -> Any:
    """As `read`, at once."""
    _check_shape(data)
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error).split(" - ")[0].rstrip(".")
        raise bad_request(f"The message is not JSON: {reason}.", ErrorCode.INPUT_BAD_JSON.value) from None


def _check_shape(data: bytes) -> None:
    if marks(data) > MAX_MARKS:
        raise too_complex()
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    # Up to the first error of its syntax, every second piece between two quotes that are not escaped is outside of texts.
    outside = b"".join(plain.split(b'"')[::2])
    opened = outside.count(b"[") + outside.count(b"{")
    if opened + outside.count(b",") > MAX_VALUES:
        raise too_complex()
    if opened > MAX_DEPTH:
        brackets = outside.translate(None, _NO_BRACKETS)
        if max(accumulate(1 if sign in b"[{" else -1 for sign in brackets)) > MAX_DEPTH:
            raise too_complex()
