"""Contexts of WebSockets: the text of each arrives in pieces, and its speech is sent while it is made. The messages
are those of Cartesia; other protocols translate them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from pipelines.errors import ErrorCode
from pipelines.request import Handle, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.cartesia import (
    MAX_NAME_CHARACTERS,
    SETTINGS,
    ContextMessage,
    check_fields,
    check_speech,
    done,
    encoder_of,
    failure,
    flush_done,
    request_of,
)
from pipelines.serving.connections import DRAIN, SET_IDLE
from pipelines.serving.encoding import PcmStream
from pipelines.serving.errors import ApiError, JsonObject, as_api_error, bad_request
from pipelines.serving.metrics import WEBSOCKET
from pipelines.serving.middleware import CLIENT_CLOSED
from pipelines.serving.request_body import read
from pipelines.serving.streaming import Serving, speech_pieces
from pipelines.tasks import cancel
from pipelines.text_units import Piece, TextUnits, has_words, unit_request
from pipelines.validation import speech_task

log = logging.getLogger(__name__)

#: Maximum time that a passage holds its slot while it waits for text.
MAX_TEXT_WAIT_SECONDS = 30.0
#: Codes and reasons of the end of a connection.
CLOSED = (1000, "")
_STOPPED = (1001, "The server is shutting down.")
_IDLE = 1000, "The connection was idle for too long."

#: A message to a client: bytes, or an object that is sent as JSON.
Reply = bytes | JsonObject


@dataclass(eq=False, slots=True)
class Passage:
    """A text to speak, complete or still growing."""

    text: str = ""
    _complete: bool = False
    _handle: Handle | None = None

    def add(self, text: str, final: bool) -> None:
        """Adds text; `final` ends it. Raises `InputError` for text that the model refuses."""
        self.text += text
        self._complete = final
        if self._handle is not None:
            self._handle.append(text, final)

    def attach(self, handle: Handle, sent_characters: int) -> None:
        """Sets the request that speaks this text and has its first `sent_characters`; appends the others."""
        self._handle = handle
        if self._complete or len(self.text) > sent_characters:
            handle.append(self.text[sent_characters:], self._complete)


class Context:
    """Speaks the text of one context in order.

    A model with `text_in` speaks text while it grows, in passages. A passage keeps its slot while it waits
    for text, until it has its maximum length or its maximum delay is over. Other models speak sentence by
    sentence: each sentence takes a slot, and no slot is held while the context waits for text.
    """

    #: Speaks the context; its result is the status.
    speaking: asyncio.Task[int]

    def __init__(
        self, socket: ContextSocket, serving: Serving, first: ContextMessage, request: SynthesisRequest
    ) -> None:
        """`request`: a template; each unit of text replaces its last message."""
        self.name = first.context_id
        self._first = first
        self._socket = socket
        self._serving = serving
        self._request = request
        wanted = serving.options.text_in
        if wanted is None:
            # A voice cloned with its transcript needs a text token for each frame of the recording: speech by
            # sentences starts sooner.
            wanted = request.generation.reference_text is None
        self._streams_text = wanted and serving.model.takes_text and first.max_buffer_delay_ms > 0
        self._text = TextUnits(by_word=self._streams_text)
        self._passage: Passage | None = None
        #: Texts to speak, and numbers of flushes, each of which is reported once the speech before it is
        #: sent.
        self._queue = deque[Passage | int]()
        self._changed = asyncio.Event()
        #: Whether all text so far is to be spoken, and whether no text follows.
        self._flushed = self._ended = False
        self._characters = 0
        self._flushes = 0
        self._units = 0
        self._sent_seconds = 0.0
        #: The monotonic time at which a player that started with the first chunk will have played all sent
        #: audio.
        self._played_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._active_at = time.monotonic()

    @property
    def flushed(self) -> bool:
        """Whether the context is open, and all of its text is flushed."""
        return self._flushed and not self._ended

    def add(self, message: ContextMessage) -> None:
        """Adds text. Raises `ApiError` (400) for too much text, for text after the end, and for a message that
        changes one of `SETTINGS`."""
        for name in SETTINGS & message.model_fields_set:
            if getattr(self._first, name) != getattr(message, name):
                raise bad_request(
                    f"`{name}` cannot change in a context. Begin another context.", "invalid_value"
                )
        text = message.transcript
        if self._ended:
            if text.strip():
                raise bad_request("The context has ended. Begin another context.", "context_ended")
            return
        # A message without text counts as one character, so that flushes are limited too.
        characters = self._characters + (len(text) or 1)
        if characters > (limit := self._serving.options.context_characters):
            raise bad_request(f"The context has more than {limit:,} characters.", ErrorCode.INPUT_TOO_LONG)
        self._characters = characters
        self._active_at = time.monotonic()
        ends = not message.more or message.flush or not message.max_buffer_delay_ms
        pieces = self._text.add(text, final=ends)
        if pieces or (self._streams_text and text):
            self._set_timer(None)
        self._extend(pieces)
        if message.flush:
            self._flushes += 1
            self._queue.append(self._flushes)
        self._flushed = message.flush or (self._flushed and not text.strip())
        self._ended = not message.more
        self._set_timer(message.max_buffer_delay_ms / 1000)
        self._changed.set()

    def _extend(self, pieces: list[Piece]) -> None:
        """Adds pieces to the current passage; after a complete one a new passage begins."""
        for piece, complete in pieces:
            passage = self._passage = self._passage or Passage()
            had_words = has_words(passage.text)
            passage.add(piece, complete)
            if not had_words and has_words(passage.text):
                self._queue.append(passage)
            if complete:
                self._passage = None

    async def run(self) -> None:
        """Speaks until the context ends or the task is cancelled. Raises `ApiError` and `NightjarError`."""
        try:
            while await self._wait_for_work():
                next_part = self._queue.popleft()
                if isinstance(next_part, int):
                    await self._socket.send(flush_done(self.name, next_part))
                    continue
                # The player has audio for `ahead_seconds`, and may then be silent for `stream_queue_seconds`.
                ahead_seconds = max(self._played_until - time.monotonic(), 0.0)
                max_wait_seconds = self._serving.options.stream_queue_seconds + ahead_seconds
                permit = await self._serving.admission.admit(None, max_wait_seconds, continuing=True)
                seconds = self._serving.options.request_seconds
                try:
                    async with asyncio.timeout(seconds):
                        await self._speak(next_part, permit)
                except TimeoutError:
                    raise ApiError(
                        504,
                        f"The speech took longer than {seconds:g} s and was ended.",
                        ErrorCode.SYNTH_TIMEOUT,
                    ) from None
                finally:
                    permit.disconnect()
                self._active_at = time.monotonic()
        finally:
            self._set_timer(None)

    async def _wait_for_work(self) -> bool:
        """Waits for something to speak; False at the end of the context. A context without new messages
        ends after `context_idle_seconds`."""
        while not self._queue and not self._ended:
            self._changed.clear()
            try:
                async with asyncio.timeout(
                    self._active_at + self._serving.options.context_idle_seconds - time.monotonic()
                ):
                    await self._changed.wait()
            except TimeoutError:
                # No text follows: an unfinished sentence is spoken as it is.
                self._extend(self._text.add("", final=True))
                self._ended = True
        return bool(self._queue)

    async def _speak(self, passage: Passage, permit: Permit) -> None:
        step = time.monotonic()
        number = self._units
        self._units += 1
        request = replace(unit_request(self._request, passage.text, number), text_open=self._streams_text)
        opened = partial(passage.attach, sent_characters=len(passage.text)) if self._streams_text else None
        encoder = self._socket.encoder(self._serving, self._first)
        has_sent_audio = number > 0
        # Silence between two texts is a pause.
        trim_ms = 0.0 if number else self._first.generation_config.trim_leading_silence_ms
        speech = speech_pieces(
            self._serving,
            [request],
            permit,
            encoder,
            opened,
            self._sent_seconds,
            lambda: passage.text,
            trim_ms,
        )
        async with aclosing(speech) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                seconds = piece.end_seconds - self._sent_seconds
                self._sent_seconds += seconds
                self._played_until = max(self._played_until, now) + seconds
                await self._socket.send(*self._first.messages(piece, self.name, now - step))
                step = now if piece.data else step
                if not has_sent_audio and piece.data:
                    has_sent_audio = True
                    self._serving.metrics.first_audio(self._socket.route, time.monotonic() - permit.since)

    def _set_timer(self, seconds: float | None) -> None:
        """Starts the timer, unless it runs, after which an unfinished sentence is spoken. None: stops it."""
        pending = self._text.pending
        if self._timer is not None and (seconds is None or not pending):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and seconds is not None and pending:
            limit_seconds = min(seconds, MAX_TEXT_WAIT_SECONDS) if self._streams_text else seconds
            self._timer = asyncio.get_running_loop().call_later(limit_seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._extend(self._text.cut())
        self._changed.set()


@dataclass(eq=False, slots=True)
class WebSocketSpeech:
    """The ASGI app of all WebSockets. The middleware has already checked the key."""

    serving: Serving
    #: Open contexts of all connections.
    contexts: int = 0

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, *, protocol: type[ContextSocket]
    ) -> None:
        """Serves one connection until it ends."""
        await receive()
        socket = protocol(self, scope, send)
        try:
            await socket.open(scope)
        except Exception as error:  # noqa: BLE001  # every error is reported to the client
            await as_api_error(error).response(connection="close")(scope, receive, send)
        else:
            await send({"type": "websocket.accept"})
            await socket.run(receive)


class ContextSocket:
    """A WebSocket with Cartesia's protocol: it receives texts in pieces, and sends their speech while it is made."""

    #: Its path, which is the label of its metrics.
    route = WEBSOCKET
    #: The context of messages that name none.
    default_context: str | None = None
    #: Held while a context speaks; a lock if one speaks after the other.
    turn: AbstractAsyncContextManager[None] = nullcontext()

    def __init__(self, speech: WebSocketSpeech, scope: Scope, send: Send) -> None:
        self._speech = speech
        self.serving = speech.serving
        self._options = speech.serving.options
        self._asgi_send = send
        self.contexts = dict[str, Context]()
        #: The code and the reason of the end, which follows the last context.
        self.closing: tuple[int, str] | None = None
        self._set_idle: Callable[[bool], None] = scope[SET_IDLE]
        #: Ends the connection after some time without a context.
        self._idle = asyncio.timeout(None)

    async def open(self, scope: Scope) -> None:
        """Checks the handshake. Raises as `handle`."""

    async def check(self, first: ContextMessage) -> None:
        """Raises as `request`, and `InputError` for what the model cannot do."""
        serving = self.serving.of(first.model_id, "model_id")
        request = await self.request(serving, first)
        speech_task(request.messages, request.generation, serving.model.card.capabilities)

    async def handle(self, given: JsonObject) -> None:
        """Handles a client's message. Raises `ApiError`, `ValidationError` and `NightjarError`."""
        await self.say(ContextMessage.model_validate(given))

    def translated(self, view: JsonObject) -> Iterable[Reply]:
        """The client's form of a message of Cartesia."""
        return (view,)

    async def request(self, serving: Serving, first: ContextMessage) -> SynthesisRequest:
        """A template of the requests of a context. Raises as `handle`."""
        check_speech(serving, first)
        return await request_of(serving, first, "")

    def encoder(self, serving: Serving, first: ContextMessage) -> PcmStream:
        """An encoder for one text of a context."""
        return encoder_of(serving, first.output_format)

    async def run(self, receive: Receive) -> None:
        """Serves until the client disconnects or is idle for too long, or the server stops; then cancels
        all open contexts."""
        try:
            async with self._idle:
                self._update_idle()
                while (message := await receive())["type"] != "websocket.disconnect":
                    if message["type"] == DRAIN:
                        self.closing = _STOPPED
                    else:
                        await self._handle(message)
                    self._update_idle()
        except TimeoutError:
            code, reason = self.closing or _IDLE
            await self._asgi_send({"type": "websocket.close", "code": code, "reason": reason})
        except ClientDisconnected:
            log.debug("a client disconnected")
        finally:
            await cancel(*(context.speaking for context in self.contexts.values()))

    def _update_idle(self) -> None:
        """Starts or stops the idle timer: a connection without contexts is closed after
        `connection_idle_seconds`, and at once when it is `closing`."""
        self._set_idle(not self.contexts)
        seconds = 0 if self.closing else self._options.connection_idle_seconds
        with suppress(RuntimeError):  # the timeout has already ended
            self._idle.reschedule(None if self.contexts else asyncio.get_running_loop().time() + seconds)

    async def _handle(self, message: Any) -> None:
        """Handles a message. An error is sent to the client and ends the context that it names."""
        name: str | None = None
        try:
            if (text := message.get("text")) is None:
                raise bad_request("The message is binary. Send JSON as text.", "invalid_value")
            given = await read(text)
            if not isinstance(given, dict):
                raise bad_request("The message is not a JSON object.", ErrorCode.INPUT_BAD_JSON)
            given_name = given.get("context_id", self.default_context)
            if isinstance(given_name, str) and len(given_name) <= MAX_NAME_CHARACTERS:
                name = given_name
            await self.handle(given)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            if (context := self.contexts.get(name or "")) is not None:
                await cancel(context.speaking)
            await self.send(failure(error, name))

    async def say(self, message: ContextMessage, **fields: object) -> None:
        """Opens, continues or cancels a context. `fields`: those in which the message differs from `message`. Raises
        as `request` and `Context.add`, and `ApiError` for too many contexts, and while the server stops."""
        message = message.model_copy(update=fields)
        check_fields(message)
        name = message.context_id
        context = self.contexts.get(name)
        if message.cancel:
            if context is None:
                raise ApiError(
                    404, "The context is not open: it has ended or was never opened.", "context_not_found"
                )
            await cancel(context.speaking)
            await self.send(done(name))
            return
        if context is not None:
            context.add(message)
            return
        self.serving.admission.check_open()
        for count, limit, owner in (
            (len(self.contexts), self._options.contexts_per_connection, "connection"),
            (self._speech.contexts, self._options.contexts, "server"),
        ):
            if count >= limit:
                raise ApiError(
                    429,
                    f"The {owner} has {limit} open contexts. Cancel one, or wait until one is done.",
                    "too_many_contexts",
                    headers={"retry-after": "1"},
                )
        # Counted first: other contexts may be opened while a recording is read.
        self._speech.contexts += 1
        try:
            serving = self.serving.of(message.model_id, "model_id")
            serving.model.check_queue()
            request = await self.request(serving, message)
            request = replace(request, request_id=f"ctx-{secrets.token_hex(8)}")
            context = Context(self, serving, message, request)
            context.add(message)
        except BaseException:
            self._speech.contexts -= 1
            raise
        self.contexts[name] = context
        context.speaking = asyncio.create_task(self._run(context))
        context.speaking.add_done_callback(partial(self._on_context_end, name, time.monotonic()))

    async def _run(self, context: Context) -> int:
        """Speaks a context and reports its end to the client. Returns the status."""
        try:
            async with self.turn:
                await context.run()
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            api_error = as_api_error(error)
            await self.send(failure(api_error, context.name))
            return api_error.status_code
        await self.send(done(context.name))
        return 200

    def _on_context_end(self, name: str, begin: float, task: asyncio.Task[int]) -> None:
        del self.contexts[name]
        self._speech.contexts -= 1
        status = CLIENT_CLOSED if task.cancelled() or task.exception() else task.result()
        self.serving.metrics.answered(self.route, status, time.monotonic() - begin)
        self._update_idle()

    async def send(self, *views: JsonObject) -> None:
        """Sends messages. Raises `ClientDisconnected` if the client is gone."""
        for view in views:
            for reply in self.translated(view):
                content: JsonObject = (
                    {"bytes": reply}
                    if isinstance(reply, bytes)
                    else {"text": msgspec.json.encode(reply).decode()}
                )
                await self._asgi_send({"type": "websocket.send", **content})
