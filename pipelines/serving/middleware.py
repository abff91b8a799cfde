"""What stands before every route: the key, the bounds of a request, a slot for what costs something, and one log line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.body_limit import LimitedBody, too_large
from pipelines.serving.connections import FIRST_BYTE
from pipelines.serving.errors import ApiError, unavailable
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.options import ServeOptions

log = logging.getLogger(__name__)

#: Needs no key: a load balancer has none.
HEALTH = "/health"
#: Routes that cost engine time.
TTS = frozenset({"/tts/bytes", "/tts/sse"})
WORK = TTS | {"/v1/audio/speech", "/v1/chat/completions"}
WEBSOCKET = "/tts/websocket"
#: What the body of a request says that is answered while it is made.
_STREAMS = re.compile(rb'"stream"\s*:\s*true|"stream_format"\s*:\s*"|"response_format"\s*:\s*"pcm"')
#: Status of a request whose client left before its answer, as nginx has it.
CLIENT_LEFT = 499
PERMIT, REQUEST_ID = "nightjar.ticket", "nightjar.request_id"


class RequestMiddleware:
    """The ASGI app around the routes."""

    def __init__(self, app: ASGIApp, options: ServeOptions, gate: AdmissionQueue, metrics: ServerMetrics) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key.encode()) for key in options.keys]
        self._gate = gate
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._connect(scope, receive, send)
            return
        begin = time.monotonic()
        status = CLIENT_LEFT
        scope[REQUEST_ID] = request_id = f"req-{secrets.token_hex(12)}"

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, LimitedBody(receive, self._options.max_body_bytes, self._options.body_seconds), tell)
        except asyncio.CancelledError:
            if not self._gate.closed:
                raise
            # The drain is over. Where the status is out, the answer breaks off.
            if status == CLIENT_LEFT:
                api_error = unavailable("The server is shutting down.", "shutting_down")
                await JSONResponse(api_error.view(), api_error.status_code, api_error.headers)(scope, receive, tell)
        finally:
            seconds = time.monotonic() - begin
            path = self._metrics.answered(scope["path"], status, seconds)
            log.log(
                logging.DEBUG if path == HEALTH else logging.INFO,
                "%s %s %d in %.0f ms, %s",
                scope["method"],
                path,
                status,
                1000 * seconds,
                request_id,
            )

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A WebSocket, or the answer that there is none; its contexts take slots of their own."""
        begin = time.monotonic()
        try:
            if scope["type"] != "websocket" or scope["path"] != WEBSOCKET:
                raise ApiError(404, "Not Found.", "not_found")
            self._check(scope["path"], scope["headers"], parse_qs(scope["query_string"]).get(b"api_key", []))
            if not self._keys:
                _check_origin(dict(scope["headers"]))
            self._gate.check_open()
        except ApiError as api_error:
            headers = [(b"content-type", b"application/json"), *_raw(api_error.headers)]
            await send({"type": "websocket.http.response.start", "status": api_error.status_code, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": json.dumps(api_error.view()).encode()})
            path = self._metrics.answered(scope["path"], api_error.status_code, time.monotonic() - begin)
            log.info("WebSocket %s %d", path, api_error.status_code)
            return
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._gate.closed:
                raise
        finally:
            log.info("WebSocket %s open for %.0f ms", scope["path"], 1000 * (time.monotonic() - begin))

    async def _answer(self, scope: Scope, body: LimitedBody, send: Send) -> None:
        permit: Permit | None = None
        try:
            self._check(scope["path"], scope["headers"])
            if scope["path"] in WORK and scope["method"] == "POST":
                permit = await self._admit(scope["path"], body, scope.get(FIRST_BYTE))
                if permit is None:
                    return
                scope[PERMIT] = permit
            await self._app(scope, body, send)
        except ApiError as api_error:
            await body.discard()
            headers = {**(api_error.headers or {}), "connection": "close"}
            await JSONResponse(api_error.view(), api_error.status_code, headers)(scope, body, send)
        finally:
            if permit is not None:
                permit.let_go()

    def _check(self, path: str, raw_headers: Sequence[tuple[bytes, bytes]], more_keys: Sequence[bytes] = ()) -> None:
        """Raises `ApiError`: 401 without a key that fits, 404 for a path with control characters, 400 for a body that is too large."""
        headers = dict(raw_headers)
        if self._keys and path != HEALTH and not self._fits(headers, more_keys):
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`, or as `X-API-Key`."
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        if not path.isprintable():
            # A route matches a path with a newline at its end, too, and what stands here would take it for another path.
            raise ApiError(404, "Not Found.", "not_found")
        if int(headers.get(b"content-length", b"0")[:20]) > self._options.max_body_bytes:
            raise too_large(self._options.max_body_bytes)

    def _fits(self, headers: Mapping[bytes, bytes], more_keys: Sequence[bytes]) -> bool:
        """Compares what was given with every key, in a time that tells nothing of them."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), *more_keys[:1], *([bearer.strip()] if scheme.lower() == b"bearer" else [])]
        fitting = [hmac.compare_digest(_digest(key), known) for key in given for known in self._keys]
        return any(fitting)

    async def _admit(self, path: str, body: LimitedBody, since: float | None) -> Permit | None:
        """A slot; None when the client left while it waited. Raises `ApiError` where the gate does."""
        # Only where it matters, so that a server with free slots reads nothing twice.
        streams = self._gate.full and (path in TTS or _STREAMS.search(await body.peek()) is not None)
        waiter = self._gate.ask(since, self._options.stream_queue_seconds if streams else None)
        if waiter.done():
            return waiter.result()
        leaving = asyncio.create_task(body.left())
        admitted = False
        try:
            await asyncio.wait((waiter, leaving), return_when=asyncio.FIRST_COMPLETED)
            admitted = waiter.done()
            return waiter.result() if admitted else None
        finally:
            if not admitted:
                self._gate.cancel(waiter)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


def _check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Raises `ApiError` (403) where a page of another site wants to speak: browsers let any page open a WebSocket to anywhere."""
    origin = headers.get(b"origin", b"")
    if origin and origin.partition(b"://")[2] != headers.get(b"host", b""):
        message = "A page of another site may not use a server that has no key. Set SPEECH_SERVE__API_KEY."
        raise ApiError(403, message, "origin_forbidden", headers={"connection": "close"})


def _raw(headers: Mapping[str, str] | None) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
