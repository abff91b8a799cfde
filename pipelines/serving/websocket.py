"""`GET /tts/websocket`: speech in Cartesia's protocol. Several contexts share one connection."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pipelines.errors import NightjarError
from pipelines.serving import cartesia, request_body
from pipelines.serving.context import ROUTE, Context, Serving
from pipelines.serving.errors import ApiError, bad_request
from pipelines.serving.voices import Voices
from pipelines.serving.websocket_protocol import DRAIN, RESTING

log = logging.getLogger(__name__)

_GOING_AWAY = 1001
#: Status of a context that its client gave up, as nginx has it for a request.
CLIENT_LEFT = 499


class _ClientLeftError(Exception):
    """The connection is gone: nobody hears what is sent."""


class WebSocketSpeech:
    """An ASGI app, which stands behind the check of the key."""

    def __init__(self, serving: Serving, voices: Voices) -> None:
        self._serving = serving
        self._voices = voices
        #: Of all connections.
        self.contexts = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection until it ends."""
        await receive()
        await send({"type": "websocket.accept"})
        connection = _Connection(
            self, self._serving, self._voices, send, scope.get(RESTING, lambda _resting: None)
        )
        try:
            await connection.run(receive)
        except _ClientLeftError:
            # What was under way is given up below, as after a farewell.
            pass
        finally:
            await connection.end()


class _Connection:
    def __init__(
        self,
        route: WebSocketSpeech,
        serving: Serving,
        voices: Voices,
        send: Send,
        resting: Callable[[bool], None],
    ) -> None:
        self._route = route
        self._serving = serving
        self._voices = voices
        self._options = serving.options
        self._asgi_send = send
        self._contexts: dict[str, tuple[Context, asyncio.Task[None]]] = {}
        self._draining = False
        self._changed = asyncio.Event()
        self._resting = resting
        resting(True)

    async def run(self, receive: Receive) -> None:
        """Reads messages until the client leaves, says nothing for too long, or the server stops."""
        reading: asyncio.Task[Any] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(receive())  # pyright: ignore[reportArgumentType]
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                idle = None if self._contexts else self._options.connection_idle_seconds
                await asyncio.wait((reading, changed), timeout=idle, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if reading.done():
                    message, reading = reading.result(), None
                    if message["type"] == "websocket.disconnect":
                        return
                    if message["type"] == DRAIN:
                        self._draining = True
                    else:
                        await self._heard(message)
                elif idle is not None and not self._contexts and not self._changed.is_set():
                    await self._asgi_send(
                        {"type": "websocket.close", "code": 1000, "reason": "Nothing was said for too long."}
                    )
                    return
                if self._draining and not self._contexts:
                    await self._asgi_send(
                        {
                            "type": "websocket.close",
                            "code": _GOING_AWAY,
                            "reason": "The server is shutting down.",
                        }
                    )
                    return
        finally:
            if reading is not None:
                reading.cancel()

    async def end(self) -> None:
        """Gives all contexts up."""
        tasks = [task for _, task in self._contexts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _heard(self, message: Any) -> None:
        """Does what a message says, or says what is wrong with it; an error that names a context ends it."""
        context_id: str | None = None
        try:
            text = message.get("text")
            if text is None:
                raise bad_request("The message is binary. Send JSON as text.", "invalid_value")
            given = cartesia.as_object(await request_body.read(text))
            named = given.get("context_id")
            context_id = (
                named if isinstance(named, str) and len(named) <= cartesia.MAX_NAME_CHARACTERS else None
            )
            await self._act(cartesia.typed(given, cartesia.ContextMessage, strict=self._options.strict))
        except _ClientLeftError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the client waits for an answer
            if context_id is not None and context_id in self._contexts:
                await self._end(context_id)
            await self._send(_failure(error, context_id))

    async def _act(self, message: cartesia.ContextMessage) -> None:
        known = self._contexts.get(message.context_id)
        if message.cancel:
            if known is None:
                raise ApiError(
                    404,
                    "The context is not open: it has ended, or never began.",
                    "context_not_found",
                    "context_id",
                )
            await self._end(message.context_id)
            await self._send(cartesia.done(message.context_id))
        elif known is not None:
            known[0].add(message)
        else:
            await self._begin(message)

    async def _begin(self, message: cartesia.ContextMessage) -> None:
        """Opens a context. Raises `ApiError` where there are too many or the server stops, and for what
        the model cannot do."""
        self._serving.gate.check_open()
        for count, limit, whose in (
            (len(self._contexts), self._options.contexts_per_connection, "connection"),
            (self._route.contexts, self._options.contexts, "server"),
        ):
            if count >= limit:
                text = f"The {whose} has {limit} open contexts. Cancel one, or wait until one is done."
                raise ApiError(429, text, "too_many_contexts", "context_id", {"retry-after": "1"})
        if message.output_format is not None and message.output_format.container != "raw":
            raise bad_request(
                "Over a WebSocket the container is `raw`; /tts/bytes sends WAV.",
                "invalid_value",
                "output_format.container",
            )
        self._voices.check_model(message.model_id)
        # While a recording is read, others may begin.
        self._route.contexts += 1
        try:
            request = await self._voices.request_beside(message, f"ctx-{secrets.token_hex(8)}")
            context = Context(self._serving, message.context_id, message, request, self._send)
            context.add(message)
            task = asyncio.create_task(self._run(context))
        except BaseException:
            self._route.contexts -= 1
            raise
        self._contexts[message.context_id] = context, task
        self._resting(False)

    async def _run(self, context: Context) -> None:
        begin, status = time.monotonic(), 200
        try:
            last = cartesia.done(context.id)
            try:
                await context.run()
            except _ClientLeftError:
                raise
            except Exception as error:  # noqa: BLE001  # as above
                last = _failure(error, context.id)
                status = last["status_code"]
            await self._send(last)
        except (asyncio.CancelledError, _ClientLeftError):
            status = CLIENT_LEFT
        finally:
            del self._contexts[context.id]
            self._route.contexts -= 1
            self._resting(not self._contexts)
            self._serving.metrics.answered(ROUTE, status, time.monotonic() - begin)
            self._changed.set()

    async def _end(self, context_id: str) -> None:
        _, task = self._contexts[context_id]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _send(self, view: dict[str, Any]) -> None:
        text = msgspec.json.encode(view).decode()
        try:
            await self._asgi_send({"type": "websocket.send", "text": text})
        except OSError as error:
            raise _ClientLeftError from error


def _failure(error: Exception, context_id: str | None) -> dict[str, Any]:
    if not isinstance(error, (ApiError, NightjarError)):
        log.error("a context failed", exc_info=error)
        error = ApiError(
            500, "Something broke that should not; the server's log says what.", "internal_error"
        )
    return cartesia.failure(error, context_id)
