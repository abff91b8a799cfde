"""Contexts of WebSockets: the text of each arrives in pieces, and its speech is sent while it is made. A protocol
is a `ContextSocket`, which reads messages, and the `Replies` of its contexts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from pipelines.errors import ErrorCode
from pipelines.request import Handle, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.connections import DRAIN, SET_IDLE
from pipelines.serving.encoding import PcmStream
from pipelines.serving.errors import ApiError, JsonObject, as_api_error, bad_request
from pipelines.serving.middleware import CLIENT_CLOSED
from pipelines.serving.request_body import cancel, read
from pipelines.serving.streaming import Serving, SpeechPiece, speech_pieces
from pipelines.text_units import Piece, TextUnits, has_words, unit_request

log = logging.getLogger(__name__)

#: Default time that text waits for the end of its sentence.
DEFAULT_BUFFER_MS = 3_000
#: Maximum bytes of audio in one message, a multiple of the sample size of every encoding. Clients accept
#: messages of 1 MiB, and base64 adds a third.
MAX_PIECE_BYTES = 1 << 18
#: Maximum time that a passage holds its slot while it waits for text.
MAX_TEXT_WAIT_SECONDS = 30.0
_GOING_AWAY = 1001

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
        self,
        socket: ContextSocket,
        name: str,
        first: Any,
        request: SynthesisRequest,
        by_word: bool = True,
        serving: Serving | None = None,
    ) -> None:
        """`first`: the settings of the context, for its socket. `request`: a template; each unit of text replaces
        its last message. `by_word`: whether text may be spoken while it grows. `serving`: the model; None: that
        of the connection."""
        self.name = name
        self.first = first
        self._socket = socket
        self.serving = serving = serving or socket.serving
        self._request = request
        wanted = serving.options.text_in
        if wanted is None:
            # A voice cloned with its transcript needs a text token for each frame of the recording: speech by
            # sentences starts sooner.
            wanted = request.generation.reference_text is None
        self._streams_text = wanted and serving.model.takes_text and by_word
        self._text = TextUnits(by_word=self._streams_text)
        self._passage: Passage | None = None
        #: Texts to speak, and numbers of flushes, each of which is reported once the speech before it is
        #: sent.
        self._queue: deque[Passage | int] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._characters = 0
        self._flushes = 0
        self._units = 0
        self._sent_seconds = 0.0
        #: The monotonic time at which a player that started with the first chunk will have played all sent
        #: audio.
        self._played_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._active_at = time.monotonic()

    def add(
        self,
        text: str,
        *,
        ends: bool = False,
        flush: bool = False,
        max_delay_seconds: float = DEFAULT_BUFFER_MS / 1000,
    ) -> None:
        """Adds text. `flush` speaks the text so far, `ends` does that and ends the context; other text waits
        for the end of its sentence up to `max_delay_seconds`. Raises `ApiError` (400) for too much text, and
        for text after the end."""
        if self._ended:
            if text.strip():
                raise bad_request("The context has ended. Begin another context.", "context_ended")
            return
        # A message without text counts as one character, so that flushes are limited too.
        self._characters += len(text) or 1
        if self._characters > (limit := self.serving.options.context_characters):
            raise bad_request(f"The context has more than {limit:,} characters.", ErrorCode.INPUT_TOO_LONG)
        self._active_at = time.monotonic()
        pieces = self._text.add(text, final=ends or flush or not max_delay_seconds)
        if pieces or (self._streams_text and text):
            self._set_timer(None)
        self._extend(pieces)
        if flush:
            self._flushes += 1
            self._queue.append(self._flushes)
        self._ended = ends
        self._set_timer(max_delay_seconds)
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
                    await self._socket.send(*self._socket.flushed(self, next_part))
                    continue
                # The player has audio for `ahead_seconds`, and may then be silent for `stream_queue_seconds`.
                ahead_seconds = max(self._played_until - time.monotonic(), 0.0)
                max_wait_seconds = self.serving.options.stream_queue_seconds + ahead_seconds
                permit = await self.serving.admission.admit(None, max_wait_seconds, continuing=True)
                seconds = self.serving.options.request_seconds
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
                    self._active_at + self.serving.options.context_idle_seconds - time.monotonic()
                ):
                    await self._changed.wait()
            except TimeoutError:
                # No text follows: an unfinished sentence is spoken as it is.
                self._extend(self._text.add("", final=True))
                self._ended = True
        return bool(self._queue)

    async def _speak(self, passage: Passage, permit: Permit) -> None:
        step = time.monotonic()
        number, self._units = self._units, self._units + 1
        request = replace(unit_request(self._request, passage.text, number), text_open=self._streams_text)
        opened = partial(passage.attach, sent_characters=len(passage.text)) if self._streams_text else None
        encoder = self._socket.encoder(self)
        has_sent_audio = number > 0
        speech = speech_pieces(
            self.serving, [request], permit, encoder, opened, self._sent_seconds, lambda: passage.text
        )
        async with aclosing(speech) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                seconds = len(piece.data) / encoder.bytes_per_second
                self._sent_seconds += seconds
                self._played_until = max(self._played_until, now) + seconds
                await self._socket.send(*self._socket.spoken(self, piece, now - step))
                step = now if piece.data else step
                if not has_sent_audio and piece.data:
                    has_sent_audio = True
                    self.serving.metrics.first_audio(self._socket.route, time.monotonic() - permit.since)

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
        await send({"type": "websocket.accept"})
        await protocol(self, scope, send).run(receive)


class ContextSocket:
    """One connection and its contexts."""

    #: The label of its metrics.
    route: ClassVar[str]

    def __init__(self, speech: WebSocketSpeech, scope: Scope, send: Send) -> None:
        self._speech = speech
        self.serving = speech.serving
        self._options = speech.serving.options
        self._asgi_send = send
        self.contexts: dict[str, Context] = {}
        self._draining = False
        self._set_idle: Callable[[bool], None] = scope[SET_IDLE]
        #: Ends the connection after some time without a context.
        self._idle = asyncio.timeout(None)

    def named(self, given: JsonObject) -> str | None:
        """The context that a message names; an error in the message ends it."""
        raise NotImplementedError

    async def handle(self, given: JsonObject) -> None:
        """Handles a client's message. Raises `ApiError`, `ValidationError` and `NightjarError`."""
        raise NotImplementedError

    def encoder(self, context: Context) -> PcmStream:
        """An encoder for one text of a context."""
        raise NotImplementedError

    def spoken(self, context: Context, piece: SpeechPiece, step_seconds: float) -> Iterable[Reply]:
        """The messages with a piece of speech. `step_seconds`: time since the piece before it, or since the
        beginning of its text."""
        raise NotImplementedError

    def flushed(self, context: Context, number: int) -> Iterable[Reply]:
        """The messages after the speech of a flush."""
        raise NotImplementedError

    def ended(self, name: str) -> Iterable[Reply]:
        """The last messages of a context."""
        raise NotImplementedError

    def failed(self, error: ApiError, name: str | None) -> Iterable[Reply]:
        """The messages about an error, which ends the context that it names."""
        raise NotImplementedError

    async def run(self, receive: Receive) -> None:
        """Serves until the client disconnects or is idle for too long, or the server stops; then cancels
        all open contexts."""
        try:
            async with self._idle:
                self._update_idle()
                while (message := await receive())["type"] != "websocket.disconnect":
                    if message["type"] == DRAIN:
                        self._draining = True
                    else:
                        await self._handle(message)
                    self._update_idle()
        except TimeoutError:
            code, reason = 1000, "The connection was idle for too long."
            if self._draining:
                code, reason = _GOING_AWAY, "The server is shutting down."
            await self._asgi_send({"type": "websocket.close", "code": code, "reason": reason})
        except ClientDisconnected:
            log.debug("a client disconnected")
        finally:
            await cancel(*(context.speaking for context in self.contexts.values()))

    def _update_idle(self) -> None:
        """Starts or stops the idle timer: a connection without contexts is closed after
        `connection_idle_seconds`, and at once when the server stops."""
        self._set_idle(not self.contexts)
        seconds = 0 if self._draining else self._options.connection_idle_seconds
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
            name = self.named(given)
            await self.handle(given)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # every error is reported to the client
            await self.cancel(name)
            await self.send(*self.failed(as_api_error(error), name))

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Counts a context that the block opens. Raises `ApiError` for too many contexts, and while the server
        stops."""
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
            yield
        except BaseException:
            self._speech.contexts -= 1
            raise

    def start(self, context: Context) -> None:
        """Starts to speak a context, which `opening` has counted."""
        self.contexts[context.name] = context
        context.speaking = asyncio.create_task(self._run(context))
        context.speaking.add_done_callback(partial(self._on_context_end, context.name, time.monotonic()))

    async def _run(self, context: Context) -> int:
        """Speaks a context and reports its end to the client. Returns the status."""
        try:
            await context.run()
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            api_error = as_api_error(error)
            await self.send(*self.failed(api_error, context.name))
            return api_error.status_code
        await self.send(*self.ended(context.name))
        return 200

    def _on_context_end(self, name: str, begin: float, task: asyncio.Task[int]) -> None:
        del self.contexts[name]
        self._speech.contexts -= 1
        status = CLIENT_CLOSED if task.cancelled() or task.exception() else task.result()
        self.serving.metrics.answered(self.route, status, time.monotonic() - begin)
        self._update_idle()

    async def cancel(self, name: str | None) -> None:
        """Cancels a context, if it is open."""
        if (context := self.contexts.get(name or "")) is not None:
            await cancel(context.speaking)

    async def send(self, *replies: Reply) -> None:
        """Sends messages. Raises `ClientDisconnected` if the client is gone."""
        for reply in replies:
            content = (
                {"bytes": reply}
                if isinstance(reply, bytes)
                else {"text": msgspec.json.encode(reply).decode()}
            )
            await self._asgi_send({"type": "websocket.send", **content})
