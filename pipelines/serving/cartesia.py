"""Cartesia's protocol: `/tts/bytes`, `/tts/sse` and `/tts/websocket`. Over a WebSocket several contexts share
one connection; each has text that comes in pieces, and its speech unit by unit."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from pipelines.errors import ErrorCode
from pipelines.request import Generation, Handle, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.connections import DRAIN, RESTING
from pipelines.serving.encoding import MAX_RATE, MIN_RATE, Encoding, PcmStream
from pipelines.serving.errors import ApiError, as_api_error, bad_request, check_text, empty_text
from pipelines.serving.middleware import CLIENT_LEFT, WEBSOCKET
from pipelines.serving.request_body import Body, SpokenBody, read
from pipelines.serving.streaming import (
    Head,
    Parts,
    Serving,
    event,
    event_head,
    spoken,
    unit_request,
    unit_requests,
)
from pipelines.serving.text_units import Piece, TextUnits, has_words, units_of

log = logging.getLogger(__name__)

#: Cartesia's own: how long text waits for the end of its sentence where a client does not say.
DEFAULT_BUFFER_MS = 3_000
_MAX_BUFFER_MS = 60_000
#: Of the name of a context, a voice, a language or a model.
MAX_NAME_CHARACTERS = 200
#: Of the audio in one message; whole samples in every encoding. Clients take messages of 1 MiB, and base64
#: adds a third.
MAX_PIECE_BYTES = 1 << 18
#: How long a passage may wait in its slot for text.
MAX_STARVED_SECONDS = 30.0
_GOING_AWAY = 1001
#: Fields that ask for what no model makes here.
_ABSENT = ("add_timestamps", "add_phoneme_timestamps", "pronunciation_dict_id", "save")
#: What must stay the same in a context.
SETTINGS = frozenset({"model_id", "voice", "language", "output_format", "generation_config"})

_IGNORE_OTHERS = ConfigDict(extra="ignore")

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class Voice(Body):
    """A voice by its name."""

    model_config = _IGNORE_OTHERS

    id: Name | None = None
    mode: Literal["id"] = "id"


class OutputFormat(Body):
    """How the audio comes."""

    model_config = _IGNORE_OTHERS

    container: Literal["raw", "wav"] = "raw"
    encoding: Encoding = "pcm_s16le"
    sample_rate: Annotated[int, Field(ge=MIN_RATE, le=MAX_RATE)] = 24_000


class GenerationConfig(SpokenBody):
    """Settings of ours, as in a line's `generation`. Cartesia's own (speed, volume, emotion) mean nothing
    here."""

    model_config = _IGNORE_OTHERS

    instruct: str | None = None
    cfg: float | None = None


class SpeechFields(Body):
    """What every request for speech says."""

    model_config = ConfigDict(extra="allow")

    transcript: str = ""
    model_id: Name | None = None
    #: Newer clients give the bare name.
    voice: Annotated[
        Voice | None, BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given)
    ] = None
    language: Annotated[Name | None, Field(validation_alias=AliasChoices("language", "locale"))] = None
    output_format: OutputFormat = OutputFormat()
    generation_config: GenerationConfig = GenerationConfig()


class EventsRequest(SpeechFields):
    """A text whose speech comes as events, each with the name that the client gave them."""

    context_id: Name | None = None


class ContextMessage(SpeechFields):
    """One message of a context."""

    context_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    more: Annotated[bool, Field(alias="continue")] = False
    flush: bool = False
    cancel: bool = False
    max_buffer_delay_ms: Annotated[float, Field(ge=0, le=_MAX_BUFFER_MS)] = DEFAULT_BUFFER_MS


def check_fields(fields: SpeechFields) -> None:
    """Raises `ApiError` (400) for what no model does here."""
    # Pipecat's and LiveKit's services always ask for times of words over a WebSocket, and speak without them.
    unasked = "add_timestamps" if isinstance(fields, ContextMessage) else None
    for name in _ABSENT:
        if name != unasked and (fields.model_extra or {}).get(name):
            message = f"`{name}` is not supported here. Remove it."
            raise bad_request(message, ErrorCode.INPUT_UNSUPPORTED, name)


def check_speech(serving: Serving, fields: SpeechFields) -> None:
    """Raises `ApiError` (400, 404) for what this model and this route cannot do."""
    if fields.output_format.container != "raw" and isinstance(fields, (EventsRequest, ContextMessage)):
        message = "Messages have the container `raw`; /tts/bytes sends WAV."
        raise bad_request(message, "invalid_value", "output_format.container")
    serving.voices.check_model(fields.model_id, "model_id")


def check(serving: Serving, fields: SpeechFields) -> None:
    """Raises as `check_fields` and `check_speech`, and for a text that is empty or too long."""
    check_fields(fields)
    check_speech(serving, fields)
    check_text(fields.transcript, serving.options.context_characters, "transcript")


async def request_of(serving: Serving, fields: SpeechFields, request_id: str) -> SynthesisRequest:
    """The request with its whole transcript. Raises `InputError`."""
    config = fields.generation_config
    # Clients name a language to models that have none to choose from, too.
    language = fields.language if serving.model.card.capabilities.languages else None
    generation = Generation(language=language, **config.settings())
    asked = None if fields.voice is None else fields.voice.id
    return await serving.voices.request(
        request_id, config.seed_or_new(), asked, generation, fields.transcript
    )


def encoder_of(serving: Serving, output: OutputFormat) -> PcmStream:
    """Makes the bytes of a format."""
    rate = serving.model.card.sample_rate
    return PcmStream(rate, output.sample_rate, output.encoding, with_header=output.container == "wav")


async def answer(serving: Serving, fields: SpeechFields, permit: Permit, request_id: str) -> Parts:
    """The parts of the answer to a whole text: bytes, or events, which are the messages of a context. Raises
    `ApiError` and `NightjarError`."""
    request = await request_of(serving, fields, request_id)
    units = units_of(fields.transcript)
    if not units:
        raise empty_text("transcript")
    requests = unit_requests(request, units)
    headers, step = {"x-seed": str(request.seed)}, permit.since
    encoder = encoder_of(serving, fields.output_format)
    async with aclosing(spoken(serving, requests, permit, encoder)) as pieces:
        if not isinstance(fields, EventsRequest):
            wav = fields.output_format.container == "wav"
            yield Head("audio/wav" if wav else "application/octet-stream", headers)
            async for piece in pieces:
                yield piece
            return
        name = fields.context_id
        yield event_head(headers, lambda error: failure(error, name) | {"request_id": request_id})
        async for piece in pieces:
            now = time.monotonic()
            yield event(chunk(name, piece, 1000 * (now - step)))
            step = now
        yield event(done(name))


def _message(kind: str, context_id: str | None, **facts: object) -> dict[str, Any]:
    return {"type": kind, "done": False, "status_code": 206, "context_id": context_id, **facts}


def chunk(context_id: str | None, data: bytes, step_ms: float) -> dict[str, Any]:
    """A piece of speech."""
    return _message("chunk", context_id, data=data, step_time=round(step_ms, 3))


def done(context_id: str | None) -> dict[str, Any]:
    """The end of a context."""
    return _message("done", context_id, done=True)


def failure(error: Exception, context_id: str | None) -> dict[str, Any]:
    """An error; it ends the context that it names."""
    api_error = as_api_error(error)
    status, headers = api_error.status_code, api_error.headers or {}
    facts = {"title": HTTPStatus(status).phrase, "message": str(api_error.detail), "status_code": status}
    if "retry-after" in headers:
        facts["retry_after"] = int(headers["retry-after"])
    return _message("error", context_id, done=True, error_code=api_error.code or "internal_error", **facts)


class Passage:
    """A text that is spoken, as a whole or while it grows."""

    def __init__(self) -> None:
        self.text = ""
        self._complete = False
        self._stream: Handle | None = None

    def add(self, text: str, final: bool) -> None:
        """More text; `final` ends it. Raises `InputError` for what the model does not take."""
        self.text += text
        self._complete = final
        if self._stream is not None:
            self._stream.append(text, final)

    def follow(self, stream: Handle, begun: int) -> None:
        """A stream says it, which began with its first `begun` characters."""
        self._stream = stream
        if self._complete or len(self.text) > begun:
            stream.append(self.text[begun:], self._complete)


class Context:
    """Speaks its text in order.

    A model that can speaks it while it grows, in passages, which keep their slot while they wait for text;
    their length and `max_buffer_delay_ms` bound that. Other models speak units: each takes a slot, and
    none is held while a context waits for text.
    """

    def __init__(
        self,
        serving: Serving,
        first: ContextMessage,
        request: SynthesisRequest,
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """`request`: that of all units; each takes the place of its last message."""
        self.id = first.context_id
        self._serving = serving
        self._first = first
        self._request = request
        self._send = send
        # The prompt of a clone in context holds a token of text for each frame of the recording: a sentence
        # alone is heard sooner.
        in_context = request.generation.reference_text is not None
        wanted = not in_context if serving.options.text_in is None else serving.options.text_in
        grows = wanted and serving.model.takes_text and first.max_buffer_delay_ms > 0
        self._grows = grows
        self._text = TextUnits(by_word=grows)
        self._passage: Passage | None = None
        #: What is said next, and the numbers of flushes: places in the speech that the client wants to hear of.
        self._todo: deque[Passage | int] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._characters = 0
        self._flushes = 0
        self._units = 0
        #: When a listener who began with the first chunk has heard all that was sent.
        self._heard_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._moved_at = time.monotonic()

    def add(self, message: ContextMessage) -> None:
        """More text. Raises `ApiError` (400) for too much of it, and for a message that changes what must
        stay the same."""
        for name in SETTINGS & message.model_fields_set:
            if getattr(self._first, name) != getattr(message, name):
                text = f"`{name}` cannot change in a context. Begin another context."
                raise bad_request(text, "invalid_value", name)
        if self._ended:
            if message.transcript.strip():
                text = "The context has ended: nothing can follow `continue: false`."
                raise bad_request(text, "context_ended", "context_id")
            return
        # A message without text counts too: each may be a flush.
        self._characters += len(message.transcript) or 1
        if self._characters > (limit := self._serving.options.context_characters):
            text = f"The context has more than {limit:,} characters."
            raise bad_request(text, ErrorCode.INPUT_TOO_LONG, "transcript")
        self._moved_at = time.monotonic()
        ends = not message.more or message.flush or not message.max_buffer_delay_ms
        pieces = self._text.add(message.transcript, final=ends)
        if pieces or (self._grows and message.transcript):
            self._wait(None)
        self._extend(pieces)
        if message.flush:
            self._flushes += 1
            self._todo.append(self._flushes)
        self._ended = not message.more
        self._wait(message.max_buffer_delay_ms / 1000)
        self._changed.set()

    def _extend(self, pieces: list[Piece]) -> None:
        """Adds pieces to the passage that grows, and begins others behind it."""
        for piece, complete in pieces:
            passage = self._passage = self._passage or Passage()
            was_said = has_words(passage.text)
            passage.add(piece, complete)
            if not was_said and has_words(passage.text):
                self._todo.append(passage)
            if complete:
                self._passage = None

    async def run(self) -> None:
        """Speaks until the context has ended; being cancelled gives it up. Raises `ApiError` and
        `NightjarError`."""
        try:
            while await self._more():
                todo = self._todo.popleft()
                if isinstance(todo, int):
                    await self._send(_message("flush_done", self.id, flush_done=True, flush_id=todo))
                    continue
                # A wait may not leave the listener without sound for longer.
                ahead_seconds = max(self._heard_until - time.monotonic(), 0.0)
                patience_seconds = self._serving.options.stream_queue_seconds + ahead_seconds
                permit = await self._serving.gate.admit(None, patience_seconds, under_way=True)
                seconds = self._serving.options.request_seconds
                try:
                    async with asyncio.timeout(seconds):
                        await self._say(todo, permit)
                except TimeoutError:
                    message = f"The speech took longer than {seconds:g} s and was ended."
                    raise ApiError(504, message, ErrorCode.SYNTH_TIMEOUT) from None
                finally:
                    permit.let_go()
                self._moved_at = time.monotonic()
        finally:
            self._wait(None)

    async def _more(self) -> bool:
        """Whether there is more to say; waits for it, and ends a context to which nothing comes for too
        long."""
        while not self._todo and not self._ended:
            self._changed.clear()
            try:
                async with asyncio.timeout(
                    self._moved_at + self._serving.options.context_idle_seconds - time.monotonic()
                ):
                    await self._changed.wait()
            except TimeoutError:
                # Nothing follows: what waits for its end is whole.
                self._extend(self._text.add("", final=True))
                self._ended = True
        return bool(self._todo)

    async def _say(self, said: Passage, permit: Permit) -> None:
        step = time.monotonic()
        number, self._units = self._units, self._units + 1
        request = replace(unit_request(self._request, said.text, number), text_open=self._grows)
        opened = partial(said.follow, begun=len(said.text)) if self._grows else None
        encoder = encoder_of(self._serving, self._first.output_format)
        told = number > 0
        async with aclosing(spoken(self._serving, [request], permit, encoder, opened)) as pieces:
            async for data in pieces:
                now = time.monotonic()
                self._heard_until = max(self._heard_until, now) + len(data) / encoder.bytes_per_second
                for begin_byte in range(0, len(data), MAX_PIECE_BYTES):
                    piece = data[begin_byte : begin_byte + MAX_PIECE_BYTES]
                    await self._send(chunk(self.id, piece, 1000 * (now - step)))
                    step = now
                if not told:
                    told = True
                    self._serving.metrics.began(WEBSOCKET, time.monotonic() - permit.since)

    def _wait(self, seconds: float | None) -> None:
        """Speaks the words that have waited for the end of their sentence, or for more text, for so long;
        None: no longer."""
        pending = self._text.pending
        if self._timer is not None and (seconds is None or not pending):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and seconds is not None and pending:
            limit_seconds = min(seconds, MAX_STARVED_SECONDS) if self._grows else seconds
            self._timer = asyncio.get_running_loop().call_later(limit_seconds, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self._extend(self._text.cut())
        self._changed.set()


class WebSocketSpeech:
    """An ASGI app, which stands behind the check of the key."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        #: Of all connections.
        self.contexts = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection until it ends."""
        await receive()
        await send({"type": "websocket.accept"})
        await _Connection(self, send, scope[RESTING]).run(receive)


class _Connection:
    def __init__(self, route: WebSocketSpeech, send: Send, resting: Callable[[bool], None]) -> None:
        self._route = route
        self._serving = route.serving
        self._options = route.serving.options
        self._asgi_send = send
        self._contexts: dict[str, tuple[Context, asyncio.Task[int]]] = {}
        self._draining = False
        self._resting = resting
        #: Is over where the connection has had no context for too long.
        self._idle = asyncio.timeout(None)

    async def run(self, receive: Receive) -> None:
        """Serves until the client leaves, says nothing for too long, or the server stops; gives up what is
        under way then."""
        try:
            async with self._idle:
                self._rest()
                while (message := await receive())["type"] != "websocket.disconnect":
                    if message["type"] == DRAIN:
                        self._draining = True
                    else:
                        await self._heard(message)
                    self._rest()
        except TimeoutError:
            code, reason = 1000, "Nothing was said for too long."
            if self._draining:
                code, reason = _GOING_AWAY, "The server is shutting down."
            await self._asgi_send({"type": "websocket.close", "code": code, "reason": reason})
        except ClientDisconnected:
            log.debug("a client left")
        finally:
            tasks = [task for _, task in self._contexts.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _rest(self) -> None:
        """A connection without contexts is closed after a while, and at once when the server stops."""
        self._resting(not self._contexts)
        seconds = 0 if self._draining else self._options.connection_idle_seconds
        with suppress(RuntimeError):  # it is closed meanwhile
            now = asyncio.get_running_loop().time()
            self._idle.reschedule(None if self._contexts else now + seconds)

    async def _heard(self, message: Any) -> None:
        """Does what a message says, or says what is wrong with it; an error that names a context ends it."""
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
            said = ContextMessage.model_validate(given)
            check_fields(said)
            if said.cancel:
                if not await self._end(said.context_id):
                    text = "The context is not open: it has ended, or never began."
                    raise ApiError(404, text, "context_not_found", "context_id")
                await self._send(done(said.context_id))
            elif said.context_id in self._contexts:
                self._contexts[said.context_id][0].add(said)
            else:
                await self._begin(said)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the client waits for an answer
            await self._end(context_id)
            await self._send(failure(error, context_id))

    async def _begin(self, message: ContextMessage) -> None:
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
        check_speech(self._serving, message)
        # While a recording is read, others may begin.
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
        task.add_done_callback(partial(self._over, context.id, time.monotonic()))

    async def _run(self, context: Context) -> int:
        """Speaks a context and says how it ended; its status."""
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

    def _over(self, context_id: str, begin: float, task: asyncio.Task[int]) -> None:
        del self._contexts[context_id]
        self._route.contexts -= 1
        status = CLIENT_LEFT if task.cancelled() or task.exception() else task.result()
        self._serving.metrics.answered(WEBSOCKET, status, time.monotonic() - begin)
        self._rest()

    async def _end(self, context_id: str | None) -> bool:
        """Gives a context up; False: there is none."""
        _, task = self._contexts.get(context_id or "", (None, None))
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task is not None

    async def _send(self, view: dict[str, Any]) -> None:
        """Raises `ClientDisconnected` where nobody hears what is sent."""
        await self._asgi_send({"type": "websocket.send", "text": msgspec.json.encode(view).decode()})
