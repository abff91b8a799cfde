"""One context of a WebSocket: text that comes in pieces, and its speech unit by unit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Done, Handle, SynthesisRequest
from pipelines.serving import cartesia
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.encoding import Resampler, encoded
from pipelines.serving.errors import ApiError, bad_request
from pipelines.serving.long_text import chunks_of, unit_request
from pipelines.serving.metrics import ServerMetrics
from pipelines.serving.model import ServedModel
from pipelines.serving.options import ServeOptions
from pipelines.serving.text_units import TextPassages, TextUnits, has_words

log = logging.getLogger(__name__)

ROUTE = "/tts/websocket"
#: Of the audio in one message; whole samples in every encoding. Clients take messages of 1 MiB, and base64
#: adds a third.
MAX_PIECE_BYTES = 1 << 18
#: How long a passage may wait in its slot for text.
MAX_STARVED_SECONDS = 30.0

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Serving:
    """What all contexts of a server share."""

    model: ServedModel
    options: ServeOptions
    gate: AdmissionQueue
    metrics: ServerMetrics


@dataclass(frozen=True, slots=True)
class Flush:
    """A place in the speech that a client wants to hear of."""

    number: int


class Passage:
    """A text that is spoken while it grows."""

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
        context_id: str,
        first: cartesia.ContextMessage,
        request: SynthesisRequest,
        send: Send,
    ) -> None:
        """`request`: that of all units; each takes the place of its last message."""
        self.id = context_id
        self._settings = first.settings()
        self._serving = serving
        self._output = first.output_format or cartesia.OutputFormat()
        self._settings.setdefault("output_format", self._output)
        self._settings.setdefault("generation_config", cartesia.GenerationConfig())
        self._request = request
        self._send = send
        self._text = TextUnits()
        # The prompt of a clone in context holds a token of text for each frame of the recording: a sentence
        # alone is heard sooner.
        in_context = request.generation.reference_text is not None
        wanted = not in_context if serving.options.text_in is None else serving.options.text_in
        grows = wanted and serving.model.takes_text and first.max_buffer_delay_ms > 0
        self._passages = TextPassages() if grows else None
        self._passage: Passage | None = None
        self._todo: deque[str | Passage | Flush] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._characters = 0
        self._flushes = 0
        self._units = 0
        #: When a listener who began with the first chunk has heard all that was sent.
        self._heard_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._moved_at = time.monotonic()

    def add(self, message: cartesia.ContextMessage) -> None:
        """More text. Raises `ApiError` (400) for too much of it, and for a message that changes what must
        stay the same."""
        for name, value in message.settings().items():
            if self._settings.get(name) != value:
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
        # A message without text counts too: each may be a flush.
        self._characters += len(message.transcript) or 1
        if self._characters > self._serving.options.context_characters:
            limit = self._serving.options.context_characters
            raise bad_request(
                f"The context has more than {limit:,} characters.",
                ErrorCode.INPUT_TOO_LONG.value,
                "transcript",
            )
        self._moved_at = time.monotonic()
        ends = not message.more or message.flush or not message.max_buffer_delay_ms
        if self._passages is not None:
            if message.transcript:
                self._wait(None)
            self._extend(self._passages.add(message.transcript, final=ends))
        else:
            units = self._text.add(message.transcript) + (self._text.flush() if ends else [])
            if units:
                self._todo.extend(units)
                self._wait(None)
        if message.flush:
            self._flushes += 1
            self._todo.append(Flush(self._flushes))
        self._ended = not message.more
        self._wait(message.max_buffer_delay_ms / 1000)
        self._changed.set()

    def _extend(self, pieces: list[tuple[str, bool]]) -> None:
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
                if isinstance(todo, Flush):
                    await self._send(cartesia.flush_done(self.id, todo.number))
                    continue
                permit = await self._admitted()
                try:
                    await self._say_in_time(todo, permit)
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
                self._end_text()
        return bool(self._todo)

    def _end_text(self) -> None:
        """Nothing follows: what waits for its end is whole."""
        if self._passages is not None:
            self._extend(self._passages.add("", final=True))
        self._todo.extend(self._text.flush())
        self._ended = True

    async def _admitted(self) -> Permit:
        """A slot. Raises `ApiError` (429) for a wait that leaves the listener without sound for
        `stream_queue_seconds`."""
        ahead_seconds = max(self._heard_until - time.monotonic(), 0.0)
        waiter = self._serving.gate.ask(
            patience_seconds=self._serving.options.stream_queue_seconds + ahead_seconds, under_way=True
        )
        try:
            await asyncio.wait((waiter,))
            return waiter.result()
        except asyncio.CancelledError:
            self._serving.gate.cancel(waiter)
            raise

    async def _say_in_time(self, text: str | Passage, permit: Permit) -> None:
        seconds = self._serving.options.request_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._say(text, permit)
        except TimeoutError:
            raise ApiError(
                504,
                f"The speech took longer than {seconds:g} s and was ended.",
                ErrorCode.SYNTH_TIMEOUT.value,
            ) from None

    async def _say(self, said: str | Passage, permit: Permit) -> None:
        step = time.monotonic()
        number, self._units = self._units, self._units + 1
        text, opened = (
            (said, None) if isinstance(said, str) else (said.text, partial(said.follow, begun=len(said.text)))
        )
        request = replace(unit_request(self._request, text, number), text_open=opened is not None)
        resampler = Resampler(self._serving.model.card.sample_rate, self._output.sample_rate)
        metrics = self._serving.metrics
        heard = told = False
        async with aclosing(chunks_of(self._serving.model, request, permit, opened)) as chunks:
            async for chunk in chunks:
                if len(chunk.samples):
                    seconds = len(chunk.samples) / chunk.sample_rate
                    metrics.spoke(seconds)
                    self._heard_until = max(self._heard_until, time.monotonic()) + seconds
                    heard = True
                samples = resampler.add(chunk.samples, last=isinstance(chunk, Done))
                if len(samples):
                    now = time.monotonic()
                    data = encoded(samples, self._output.encoding)
                    for begin_byte in range(0, len(data), MAX_PIECE_BYTES):
                        piece = data[begin_byte : begin_byte + MAX_PIECE_BYTES]
                        await self._send(cartesia.chunk(self.id, piece, 1000 * (now - step)))
                        step = now
                    if not told and not number:
                        metrics.began(ROUTE, time.monotonic() - permit.since)
                    told = True
        if not heard:
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio.", "Try another seed.")

    def _wait(self, seconds: float | None) -> None:
        """Speaks the words that have waited for the end of their sentence, or for more text, for so long;
        None: no longer."""
        pending = self._text.pending or (self._passages is not None and self._passages.pending)
        if self._timer is not None and (seconds is None or not pending):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and seconds is not None and pending:
            limit_seconds = seconds if self._passages is None else min(seconds, MAX_STARVED_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(limit_seconds, self._waited)

    def _waited(self) -> None:
        self._timer = None
        if self._passages is not None:
            self._extend(self._passages.cut())
        self._todo.extend(self._text.words())
        self._changed.set()
