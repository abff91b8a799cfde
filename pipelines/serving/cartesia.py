"""Cartesia's protocol: `/tts/bytes`, `/tts/sse` and `/tts/websocket`. Several contexts share a WebSocket; the
text of each arrives in pieces, and its speech is sent while it is made."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from pipelines.errors import ErrorCode
from pipelines.request import Generation, Handle, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.connections import DRAIN, SET_IDLE
from pipelines.serving.encoding import MAX_RATE, MIN_RATE, Encoding, PcmStream
from pipelines.serving.errors import ApiError, JsonObject, as_api_error, bad_request, check_text, empty_text
from pipelines.serving.middleware import CLIENT_CLOSED, WEBSOCKET
from pipelines.serving.request_body import Body, SpokenBody, cancel, read
from pipelines.serving.streaming import Head, Parts, Serving, SpeechPiece, event, event_head, speech_pieces
from pipelines.text_units import Piece, TextUnits, has_words, unit_request, unit_requests, units_of

log = logging.getLogger(__name__)

#: Cartesia's default for the time that text waits for the end of its sentence.
DEFAULT_BUFFER_MS = 3_000
_MAX_BUFFER_MS = 60_000
#: Maximum length of the name of a context, a voice, a language or a model.
MAX_NAME_CHARACTERS = 200
#: Maximum bytes of audio in one message, a multiple of the sample size of every encoding. Clients accept
#: messages of 1 MiB, and base64 adds a third.
MAX_PIECE_BYTES = 1 << 18
#: Maximum time that a passage holds its slot while it waits for text.
MAX_TEXT_WAIT_SECONDS = 30.0
_GOING_AWAY = 1001
#: Fields that must stay the same in a context.
SETTINGS = frozenset({"model_id", "voice", "language", "output_format", "generation_config"})

_IGNORE_OTHERS = ConfigDict(extra="ignore")

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class Voice(Body):
    """A voice by its name."""

    model_config = _IGNORE_OTHERS

    id: Name | None = None
    mode: Literal["id"] = "id"


class OutputFormat(Body):
    """The format of the audio."""

    model_config = _IGNORE_OTHERS

    container: Literal["raw", "wav"] = "raw"
    encoding: Encoding = "pcm_s16le"
    sample_rate: Annotated[int, Field(ge=MIN_RATE, le=MAX_RATE)] = 24_000


class GenerationConfig(SpokenBody):
    """Nightjar's settings, as in a line's `generation`. Cartesia's settings (speed, volume, emotion) are
    ignored."""

    model_config = _IGNORE_OTHERS

    instruct: str | None = None
    cfg: float | None = None


class SpeechFields(Body):
    """The fields of every request in Cartesia's format."""

    model_config = ConfigDict(extra="allow")
    #: Fields that this kind of request does not support with any model.
    unsupported: ClassVar = ("add_timestamps", "add_phoneme_timestamps", "pronunciation_dict_id", "save")

    transcript: str = ""
    model_id: Name | None = None
    #: Newer clients send only the name.
    voice: Annotated[
        Voice | None, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)
    ] = None
    language: Annotated[Name | None, Field(validation_alias=AliasChoices("language", "locale"))] = None
    output_format: OutputFormat = OutputFormat()
    generation_config: GenerationConfig = GenerationConfig()


class MessagesFields(SpeechFields):
    """The fields of a request that is answered in messages, which can have times of words and phonemes."""

    unsupported: ClassVar = SpeechFields.unsupported[2:]

    add_timestamps: bool | None = None
    add_phoneme_timestamps: bool | None = None

    def messages(
        self,
        piece: SpeechPiece,
        context_id: str | None,
        step_seconds: float,
        maximum_bytes: int = sys.maxsize,
    ) -> Iterator[JsonObject]:
        """The messages with a piece of speech, each with up to `maximum_bytes`, and with its requested times.
        `step_seconds`: time since the previous piece, or since the start."""
        for begin in range(0, len(piece.data), maximum_bytes):
            data = piece.data[begin : begin + maximum_bytes]
            yield _message("chunk", context_id, data=data, step_time=round(1000 * step_seconds, 3))
            step_seconds = 0.0
        for wanted, kind, name, said in (
            (self.add_timestamps, "timestamps", "word", piece.words),
            (self.add_phoneme_timestamps, "phoneme_timestamps", "phoneme", piece.phonemes),
        ):
            if wanted and said:
                texts, start, end = zip(*map(msgspec.structs.astuple, said), strict=True)
                times = {f"{name}s": texts, "start": start, "end": end}
                facts = {"estimated": True} if piece.estimated else {}
                yield _message(kind, context_id, **{f"{name}_timestamps": times, **facts})


class EventsRequest(MessagesFields):
    """A request for speech as events, each of which has the client's `context_id`."""

    context_id: Name | None = None


class ContextMessage(MessagesFields):
    """One message of a context."""

    context_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    more: Annotated[bool, Field(alias="continue")] = False
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: Annotated[float, Field(ge=0, le=_MAX_BUFFER_MS)] = DEFAULT_BUFFER_MS


def check_fields(fields: SpeechFields) -> None:
    """Raises `ApiError` (400) for a field that no model supports."""
    for name in fields.unsupported:
        if (fields.model_extra or {}).get(name):
            raise bad_request(
                f"`{name}` is not supported here. Remove it.", ErrorCode.INPUT_UNSUPPORTED, name
            )


def check_speech(serving: Serving, fields: SpeechFields) -> None:
    """Raises `ApiError`: 400 for fields that this model or this route does not support, 404 for a model that
    is not served here."""
    check_fields(fields)
    if isinstance(fields, MessagesFields):
        if fields.output_format.container != "raw":
            raise bad_request(
                "Messages have the container `raw`; /tts/bytes sends WAV.",
                "invalid_value",
                "output_format.container",
            )
        name = "add_phoneme_timestamps"
        if fields.add_phoneme_timestamps and not serving.model.card.capabilities.word_times:
            raise bad_request(
                f"This model does not know when it says a phoneme. Remove `{name}`.",
                ErrorCode.INPUT_UNSUPPORTED,
                name,
            )
    serving.voices.check_model(fields.model_id, "model_id")


def check(serving: Serving, fields: SpeechFields) -> None:
    """Raises as `check_speech`, and 400 for a text that is empty or too long."""
    check_speech(serving, fields)
    check_text(fields.transcript, serving.options.context_characters, "transcript")


async def request_of(serving: Serving, fields: SpeechFields, request_id: str) -> SynthesisRequest:
    """The request for the whole transcript. Raises `InputError`."""
    config = fields.generation_config
    # Clients also send a language to models without a choice of languages.
    language = fields.language if serving.model.card.capabilities.languages else None
    timed = isinstance(fields, MessagesFields) and (fields.add_timestamps or fields.add_phoneme_timestamps)
    return await serving.voices.request(
        request_id,
        config.seed_or_new(),
        fields.voice and fields.voice.id,
        Generation(language=language, **config.settings()),
        fields.transcript,
        timestamps=bool(timed),
    )


def encoder_of(serving: Serving, output: OutputFormat) -> PcmStream:
    """An encoder for this format."""
    rate = serving.model.card.sample_rate
    return PcmStream(rate, output.sample_rate, output.encoding, with_header=output.container == "wav")


async def answer(serving: Serving, fields: SpeechFields, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer to a whole text: bytes, or events with the messages of a context. Raises
    `ApiError` and `NightjarError`."""
    request = await request_of(serving, fields, request_id)
    units = units_of(fields.transcript)
    if not units:
        raise empty_text("transcript")
    requests = unit_requests(request, units)
    headers, step = {"x-seed": str(request.seed)}, permit.since
    output = fields.output_format
    async with aclosing(speech_pieces(serving, requests, permit, encoder_of(serving, output))) as pieces:
        if not isinstance(fields, EventsRequest):
            yield Head("audio/wav" if output.container == "wav" else "application/octet-stream", headers)
            async for piece in pieces:
                yield piece.data
            return
        name = fields.context_id
        yield event_head(headers, lambda error: failure(error, name) | {"request_id": request_id})
        async for piece in pieces:
            now = time.monotonic()
            for message in fields.messages(piece, name, now - step):
                yield event(message)
            step = now
        yield event(done(name))


def _message(kind: str, context_id: str | None, **facts: object) -> JsonObject:
    return {"type": kind, "done": False, "status_code": 206, "context_id": context_id, **facts}


def done(context_id: str | None) -> JsonObject:
    """The message that a context has ended."""
    return _message("done", context_id, done=True)


def failure(error: Exception, context_id: str | None) -> JsonObject:
    """The message about an error, which ends the context that it names."""
    api_error = as_api_error(error)
    status, headers = api_error.status_code, api_error.headers or {}
    facts = {"title": HTTPStatus(status).phrase, "message": str(api_error.detail), "status_code": status}
    if "retry-after" in headers:
        facts["retry_after"] = int(headers["retry-after"])
    return _message("error", context_id, done=True, error_code=api_error.code or "internal_error", **facts)


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
    for text, until it has its maximum length or `max_buffer_delay_ms` is over. Other models speak sentence by
    sentence: each sentence takes a slot, and no slot is held while the context waits for text.
    """

    def __init__(
        self,
        serving: Serving,
        first: ContextMessage,
        request: SynthesisRequest,
        send: Callable[[JsonObject], Awaitable[None]],
    ) -> None:
        """`request`: a template; each unit of text replaces its last message."""
        self.id = first.context_id
        self._serving = serving
        self._first = first
        self._request = request
        self._send = send
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

    def add(self, message: ContextMessage) -> None:
        """Adds text. Raises `ApiError` (400) for too much text, and for a message that changes one of
        `SETTINGS`."""
        for name in SETTINGS & message.model_fields_set:
            if getattr(self._first, name) != getattr(message, name):
                raise bad_request(
                    f"`{name}` cannot change in a context. Begin another context.", "invalid_value", name
                )
        if self._ended:
            if message.transcript.strip():
                raise bad_request(
                    "The context has ended: nothing can follow `continue: false`.",
                    "context_ended",
                    "context_id",
                )
            return
        # A message without text counts as one character, so that flushes are limited too.
        self._characters += len(message.transcript) or 1
        if self._characters > (limit := self._serving.options.context_characters):
            raise bad_request(
                f"The context has more than {limit:,} characters.", ErrorCode.INPUT_TOO_LONG, "transcript"
            )
        self._active_at = time.monotonic()
        ends = not message.more or message.flush or not message.max_buffer_delay_ms
        pieces = self._text.add(message.transcript, final=ends)
        if pieces or (self._streams_text and message.transcript):
            self._set_timer(None)
        self._extend(pieces)
        if message.flush:
            self._flushes += 1
            self._queue.append(self._flushes)
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
                    await self._send(_message("flush_done", self.id, flush_done=True, flush_id=next_part))
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
        number, self._units = self._units, self._units + 1
        request = replace(unit_request(self._request, passage.text, number), text_open=self._streams_text)
        opened = partial(passage.attach, sent_characters=len(passage.text)) if self._streams_text else None
        encoder = encoder_of(self._serving, self._first.output_format)
        has_sent_audio = number > 0
        speech = speech_pieces(
            self._serving, [request], permit, encoder, opened, self._sent_seconds, lambda: passage.text
        )
        async with aclosing(speech) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                seconds = len(piece.data) / encoder.bytes_per_second
                self._sent_seconds += seconds
                self._played_until = max(self._played_until, now) + seconds
                for message in self._first.messages(piece, self.id, now - step, MAX_PIECE_BYTES):
                    await self._send(message)
                step = now if piece.data else step
                if not has_sent_audio and piece.data:
                    has_sent_audio = True
                    self._serving.metrics.first_audio(WEBSOCKET, time.monotonic() - permit.since)

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
    """The ASGI app of the WebSocket. The middleware has already checked the key."""

    serving: Serving
    #: Open contexts of all connections.
    contexts: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection until it ends."""
        await receive()
        await send({"type": "websocket.accept"})
        await _Connection(self, send, scope[SET_IDLE]).run(receive)


class _Connection:
    def __init__(self, route: WebSocketSpeech, send: Send, set_idle: Callable[[bool], None]) -> None:
        self._route = route
        self._serving = route.serving
        self._options = route.serving.options
        self._asgi_send = send
        self._contexts: dict[str, tuple[Context, asyncio.Task[int]]] = {}
        self._draining = False
        self._set_idle = set_idle
        #: Ends the connection after some time without a context.
        self._idle = asyncio.timeout(None)

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
            await cancel(*(task for _, task in self._contexts.values()))

    def _update_idle(self) -> None:
        """Starts or stops the idle timer: a connection without contexts is closed after
        `connection_idle_seconds`, and at once when the server stops."""
        self._set_idle(not self._contexts)
        seconds = 0 if self._draining else self._options.connection_idle_seconds
        with suppress(RuntimeError):  # the timeout has already ended
            self._idle.reschedule(None if self._contexts else asyncio.get_running_loop().time() + seconds)

    async def _handle(self, message: Any) -> None:
        """Handles a message. An error is sent to the client and ends the context that it names."""
        context_id: str | None = None
        try:
            if (text := message.get("text")) is None:
                raise bad_request("The message is binary. Send JSON as text.", "invalid_value")
            given = await read(text)
            if not isinstance(given, dict):
                raise bad_request("The message is not a JSON object.", ErrorCode.INPUT_BAD_JSON)
            named = given.get("context_id")
            if isinstance(named, str) and len(named) <= MAX_NAME_CHARACTERS:
                context_id = named
            parsed = ContextMessage.model_validate(given)
            check_fields(parsed)
            if parsed.cancel:
                if not await self._cancel(parsed.context_id):
                    raise ApiError(
                        404,
                        "The context is not open: it has ended or was never opened.",
                        "context_not_found",
                        "context_id",
                    )
                await self._send(done(parsed.context_id))
            elif parsed.context_id in self._contexts:
                self._contexts[parsed.context_id][0].add(parsed)
            else:
                await self._begin(parsed)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # every error is reported to the client
            await self._cancel(context_id)
            await self._send(failure(error, context_id))

    async def _begin(self, message: ContextMessage) -> None:
        """Opens a context. Raises `ApiError` for too many contexts, while the server stops, and for what the
        model cannot do."""
        self._serving.admission.check_open()
        for count, limit, owner in (
            (len(self._contexts), self._options.contexts_per_connection, "connection"),
            (self._route.contexts, self._options.contexts, "server"),
        ):
            if count >= limit:
                raise ApiError(
                    429,
                    f"The {owner} has {limit} open contexts. Cancel one, or wait until one is done.",
                    "too_many_contexts",
                    "context_id",
                    {"retry-after": "1"},
                )
        check_speech(self._serving, message)
        # Counted first: other contexts may be opened while a recording is read.
        self._route.contexts += 1
        try:
            request = await request_of(self._serving, message, f"ctx-{secrets.token_hex(8)}")
            context = Context(self._serving, message, request, self._send)
            context.add(message)
        except BaseException:
            self._route.contexts -= 1
            raise
        task = asyncio.create_task(self._run(context))
        self._contexts[context.id] = context, task
        task.add_done_callback(partial(self._on_context_end, context.id, time.monotonic()))

    async def _run(self, context: Context) -> int:
        """Speaks a context and reports its end to the client. Returns the status."""
        try:
            await context.run()
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            last = failure(error, context.id)
            await self._send(last)
            return last["status_code"]
        await self._send(done(context.id))
        return 200

    def _on_context_end(self, context_id: str, begin: float, task: asyncio.Task[int]) -> None:
        del self._contexts[context_id]
        self._route.contexts -= 1
        status = CLIENT_CLOSED if task.cancelled() or task.exception() else task.result()
        self._serving.metrics.answered(WEBSOCKET, status, time.monotonic() - begin)
        self._update_idle()

    async def _cancel(self, context_id: str | None) -> bool:
        """Cancels a context; False if there is none."""
        _, task = self._contexts.get(context_id or "", (None, None))
        if task is not None:
            await cancel(task)
        return task is not None

    async def _send(self, view: JsonObject) -> None:
        """Sends a message as JSON. Raises `ClientDisconnected` if the client is gone."""
        await self._asgi_send({"type": "websocket.send", "text": msgspec.json.encode(view).decode()})
