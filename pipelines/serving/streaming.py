"""An answer that is made while its client waits: it ends when the client leaves or its time is over,
whatever it was doing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipelines.errors import NightjarError
from pipelines.serving.errors import ApiError

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before the bytes. Until it has been given, an error becomes an answer of its own."""

    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Parts = AsyncGenerator[Head | bytes, None]


async def whole(body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> Parts:
    """The parts of an answer that is known."""
    yield Head(media_type, {**(headers or {}), "content-length": str(len(body))})
    yield body


def event(view: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(view, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Reply(Response):
    """Sends a `Head` and then bytes as they come. Closing the generator is how the work behind it is given
    up."""

    def __init__(self, parts: Parts, seconds: float) -> None:
        super().__init__()
        self._parts = parts
        self._seconds = seconds
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except (TimeoutError, NightjarError, ApiError) as error:
            if isinstance(error, TimeoutError):
                error = ApiError(
                    504, f"The request took longer than {self._seconds:g} s and was ended.", "synth.timeout"
                )
            if not self._started:
                raise error from None
            # The status is out: an answer that breaks off is all that can still be said.
            log.warning("an answer broke off: %s", error)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._parts.aclose()

    async def _send(self, send: Send) -> None:
        head = await anext(self._parts)
        assert isinstance(head, Head)
        headers = {"content-type": head.media_type, **head.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
