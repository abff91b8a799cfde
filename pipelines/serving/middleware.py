"""What stands before every route: the key, the host, the bounds of a request, a slot for what costs
something, and one log line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.serving import ServeOptions, is_loopback
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.connections import FIRST_BYTE
from pipelines.serving.errors import ApiError, unavailable
from pipelines.serving.metrics import ROUTES, ServerMetrics
from pipelines.serving.request_body import BodyMemory, LimitedBody, before_client_leaves, too_large

log = logging.getLogger(__name__)

#: Needs no key: a load balancer has none.
HEALTH = "/health"
WEBSOCKET = "/tts/websocket"
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: Status of a request whose client left before its answer, as nginx has it.
CLIENT_LEFT = 499
_ACCEPTED = 101
#: In the scope of a request: what gives it a slot, called with whether it is answered while it is made.
ADMIT, REQUEST_ID = "nightjar.admit", "nightjar.request_id"
Admit = Callable[[bool], Awaitable[Permit]]
Headers = Mapping[bytes, bytes]


class RequestMiddleware:
    """The ASGI app around the routes."""

    def __init__(
        self, app: ASGIApp, options: ServeOptions, gate: AdmissionQueue, metrics: ServerMetrics
    ) -> None:
        self._app = app
        self._options = options
        self._keys = [_digest(key.encode()) for key in options.keys]
        self._gate = gate
        self._metrics = metrics
        self._hosts = frozenset(host.lower() for host in options.allowed_hosts)
        self._memory = BodyMemory(options.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status, request_id = CLIENT_LEFT, f"req-{secrets.token_hex(12)}"
        scope[REQUEST_ID] = request_id

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = _ACCEPTED
            elif message["type"].endswith("http.response.start"):
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, receive, tell)
        except asyncio.CancelledError:
            if not self._gate.closed:
                raise
            # The drain is over. Where the status is out, the answer breaks off.
            if status == CLIENT_LEFT:
                shutting_down = unavailable("The server is shutting down.", "shutting_down")
                await shutting_down.response()(scope, receive, tell)
        finally:
            seconds, path = time.monotonic() - begin, scope["path"]
            # Contexts are counted, and not what they share.
            if status != _ACCEPTED:
                path = self._metrics.answered(path, status, seconds)
            level = logging.DEBUG if path == HEALTH else logging.INFO
            method = scope.get("method", "WebSocket")
            log.log(level, "%s %s %d in %.0f ms, %s", method, path, status, 1000 * seconds, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer, or why there is none. Contexts of a WebSocket take slots of their own."""
        permits: list[Permit] = []
        body = LimitedBody(receive, self._memory, self._options.body_seconds)
        is_http = scope["type"] == "http"
        try:
            self._check(scope, dict(scope["headers"]))
            scope[ADMIT] = partial(self._admit, permits, body=body, since=scope.get(FIRST_BYTE))
            await self._app(scope, body if is_http else receive, send)
        except ApiError as api_error:
            if is_http:
                await body.discard()
            await api_error.response(connection="close")(scope, receive, send)
        finally:
            body.release()
            for permit in permits:
                permit.let_go()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises `ApiError`: 401 without a key that fits, 403 for a host or a site that a server without keys
        does not answer to, 404 for a path with control characters and for another WebSocket, 400 for a body
        that is too large, 415 for one of another type, 503 for a WebSocket once the server stops."""
        path, is_http = scope["path"], scope["type"] == "http"
        if not (is_http or (scope["type"] == "websocket" and path == WEBSOCKET)):
            raise ApiError(404, "Not Found.", "not_found")
        if not self._keys:
            self._check_host(headers)
            if not is_http:
                _check_origin(headers)
        elif path != HEALTH:
            in_query = [] if is_http else parse_qs(scope["query_string"]).get(b"api_key", [])
            self._check_key(headers, *in_query[:1])
        if not path.isprintable():
            # A route matches a path with a newline at its end, too, and what stands here would take it for
            # another path.
            raise ApiError(404, "Not Found.", "not_found")
        if int(headers.get(b"content-length", b"0")[:20]) > self._options.max_body_bytes:
            raise too_large(self._options.max_body_bytes)
        if not is_http:
            self._gate.check_open()
        # Where no route is, forms too get the answer that says so.
        elif scope["method"] == "POST" and path in ROUTES:
            _check_type(headers)

    def _check_host(self, headers: Headers) -> None:
        """Raises `ApiError` (403) where a name of another one led here: its owner can have browsers send
        what its pages say to this one."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")
        if name not in self._hosts and not is_loopback(name):
            message = f"This server has no key, and {host[:100]!r} is no name of this machine. Set SPEECH_SERVE__ALLOWED_HOSTS or a key."
            raise ApiError(403, message, "host_forbidden")

    def _check_key(self, headers: Headers, *more_keys: bytes) -> None:
        """Compares what was given with every key, in a time that tells nothing of them."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), *more_keys]
        if scheme.lower() == b"bearer":
            given.append(bearer.strip())
        fitting = [hmac.compare_digest(_digest(key), known) for key in given for known in self._keys]
        if not any(fitting):
            message = (
                "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`, or as `X-API-Key`."
            )
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _admit(
        self, permits: list[Permit], streams: bool, body: LimitedBody, since: float | None
    ) -> Permit:
        """A slot for a request that is whole, which becomes one of `permits`. Raises `ApiError` where the
        queue does, and where the client leaves while it waits."""
        patience_seconds = self._options.stream_queue_seconds if streams else None

        async def enter() -> None:
            permits.append(await self._gate.admit(since, patience_seconds))

        if self._gate.full:
            entering = asyncio.create_task(enter())
            try:
                if not await before_client_leaves(body, entering):
                    raise ApiError(CLIENT_LEFT, "The client left.")
                entering.result()
            finally:
                entering.cancel()
        else:
            await enter()
        body.release()
        return permits[-1]


def _check_type(headers: Headers) -> None:
    """Raises `ApiError` (415) for a body that is not JSON by its type: browsers let any page send the
    others to anywhere."""
    if not _JSON.fullmatch(headers.get(b"content-type", b"").strip()):
        message = "The body is not JSON by its type. Send `Content-Type: application/json`."
        raise ApiError(415, message, "unsupported_media_type")


def _check_origin(headers: Headers) -> None:
    """Raises `ApiError` (403) where a page of another site wants to speak: browsers let any page open a
    WebSocket to anywhere."""
    origin = headers.get(b"origin", b"")
    if origin and origin.partition(b"://")[2] != headers.get(b"host", b""):
        message = "A page of another site may not use a server that has no key. Set SPEECH_SERVE__API_KEY."
        raise ApiError(403, message, "origin_forbidden", headers={"connection": "close"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
