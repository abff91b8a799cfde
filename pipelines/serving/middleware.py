"""The middleware before every route: it checks the key, the host and the size of a request, gives slots, and
writes one log line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.serving import ServeOptions, is_loopback
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.connections import FIRST_BYTE
from pipelines.serving.errors import ApiError, unavailable
from pipelines.serving.metrics import ROUTES, WEBSOCKETS, MetricsPage, route_of
from pipelines.serving.request_body import BodyMemory, LimitedBody, finishes_before_disconnect, too_large

log = logging.getLogger(__name__)

#: Needs no key, because load balancers have none.
HEALTH = "/health"
_JSON = re.compile(rb"application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
#: Status of a request whose client disconnected before its answer, as in nginx.
CLIENT_CLOSED = 499
_ACCEPTED = 101
#: Keys in the scope of a request. ADMIT: the function that gives the request a slot; its arguments are the
#: model's queue and whether the answer is streamed. REQUEST_ID: the request's id.
ADMIT = "nightjar.admit"
REQUEST_ID = "nightjar.request_id"
Headers = Mapping[bytes, bytes]


@dataclass(eq=False)
class RequestMiddleware:
    """The ASGI app around the routes."""

    _app: ASGIApp
    _options: ServeOptions
    #: The queue of any of the models; all of them are closed at once.
    _admission: AdmissionQueue
    _metrics: MetricsPage

    def __post_init__(self) -> None:
        self._keys = [_digest(key.encode()) for key in self._options.keys]
        self._hosts = frozenset(host.lower() for host in self._options.allowed_hosts)
        self._memory = BodyMemory(self._options.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status = CLIENT_CLOSED
        request_id = f"req-{secrets.token_hex(12)}"
        scope[REQUEST_ID] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = _ACCEPTED
            elif message["type"].endswith("http.response.start"):
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not self._admission.closed:
                raise
            # The time for draining is over. An answer whose status is already sent is cut off.
            if status == CLIENT_CLOSED:
                shutting_down = unavailable("The server is shutting down.", "shutting_down")
                await shutting_down.response()(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - begin
            path = scope["path"]
            # The contexts of a WebSocket are counted one by one; the connection itself is not counted.
            if status != _ACCEPTED:
                path = self._metrics.answered(path, status, seconds)
            level = logging.DEBUG if path == HEALTH else logging.INFO
            method = scope.get("method", "WebSocket")
            log.log(level, "%s %s %d in %.0f ms, %s", method, path, status, 1000 * seconds, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the app's answer, or the error. Contexts of a WebSocket take their own slots."""
        permits = list[Permit]()
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
                permit.disconnect()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises `ApiError`: 401 without a valid key, 403 for a foreign host or site on a server without keys,
        404 for a path with control characters and for an unknown WebSocket, 400 for a body that is too large,
        415 for a body of another type, 503 for a WebSocket while the server stops."""
        path = scope["path"]
        is_http = scope["type"] == "http"
        if not (is_http or (scope["type"] == "websocket" and route_of(path) in WEBSOCKETS)):
            raise ApiError(404, "Not Found.", "not_found")
        if not self._keys:
            # Otherwise the pages of an attacker, whose own domain points to this machine, could send requests to
            # it (DNS rebinding).
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")
            if name not in self._hosts and not is_loopback(name):
                raise ApiError(
                    403,
                    f"This server has no key, and {host[:100]!r} is not a name of this machine. Set SPEECH_SERVE__ALLOWED_HOSTS or a key.",
                    "host_forbidden",
                )
            # Browsers let any page open a WebSocket to any server.
            origin = b"" if is_http else headers.get(b"origin", b"")
            if origin and origin.partition(b"://")[2] != headers.get(b"host", b""):
                raise ApiError(
                    403,
                    "A page of another site may not use a server that has no key. Set SPEECH_SERVE__API_KEY.",
                    "origin_forbidden",
                )
        elif path != HEALTH:
            in_query = [] if is_http else parse_qs(scope["query_string"]).get(b"api_key", [])
            self._check_key(headers, *in_query[:1])
        if not path.isprintable():
            # Routes also match a path that ends in a newline, which these checks would treat as another path.
            raise ApiError(404, "Not Found.", "not_found")
        if int(headers.get(b"content-length", b"0")[:20]) > self._options.max_body_bytes:
            raise too_large(self._options.max_body_bytes)
        if not is_http:
            self._admission.check_open()
        # Other paths get 404 from the routes, whatever the type of the body.
        elif (
            scope["method"] == "POST"
            and path in ROUTES
            and not _JSON.fullmatch(headers.get(b"content-type", b"").strip())
        ):
            # Browsers let any page send other types to any server.
            raise ApiError(
                415,
                "The content type of the body is not JSON. Send `Content-Type: application/json`.",
                "unsupported_media_type",
            )

    def _check_key(self, headers: Headers, *more_keys: bytes) -> None:
        """Raises `ApiError` (401) without a valid key. Compares in constant time."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b""), headers.get(b"xi-api-key", b""), *more_keys]
        if scheme.lower() in (b"bearer", b"api-key"):
            given.append(bearer.strip())
        matches = [hmac.compare_digest(_digest(key), known) for key in given for known in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`, or as `X-API-Key`.",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _admit(
        self,
        permits: list[Permit],
        admission: AdmissionQueue,
        streams: bool,
        body: LimitedBody,
        since: float | None,
    ) -> Permit:
        """A slot for a complete request, added to `permits`. Raises `ApiError` as `AdmissionQueue.admit`, and
        if the client disconnects while it waits."""
        max_wait_seconds = self._options.stream_queue_seconds if streams else None

        async def enter() -> None:
            permits.append(await admission.admit(since, max_wait_seconds))

        if admission.full:
            entering = asyncio.create_task(enter())
            try:
                if not await finishes_before_disconnect(body, entering):
                    raise ApiError(CLIENT_CLOSED, "The client disconnected.")
                entering.result()
            finally:
                entering.cancel()
        else:
            await enter()
        body.release()
        return permits[-1]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
