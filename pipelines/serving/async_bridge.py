"""One request inside the pipeline, waited for on the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future

from pipelines.request import AudioChunk, Done, Event, Failed, Handle, Pipeline, SynthesisRequest

log = logging.getLogger(__name__)


class Playback:
    """A player that starts at the first chunk of a stream and waits for each that comes too late."""

    def __init__(self) -> None:
        self._lasts_until = math.inf

    def add(self, now: float, seconds: float) -> float:
        """A chunk of so many seconds comes; for how long the player had nothing to play, 0 where it came
        in time."""
        late = max(now - self._lasts_until, 0.0)
        self._lasts_until = seconds + (now if late or self._lasts_until == math.inf else self._lasts_until)
        return late


class Unread:
    """Bytes of audio that engines made and clients have not taken yet, of all streams. Used on the event
    loop only."""

    def __init__(self) -> None:
        self.bytes = 0


class PipelineCall:
    """A request. No thread waits for it: what the pipeline tells comes to the event loop, where it is kept
    until it is asked for."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: SynthesisRequest,
        over: Callable[[], None],
        unread: Unread,
        underran: Callable[[float], None],
        opened: Callable[[Handle], None] | None = None,
        *,
        stream: bool,
    ) -> None:
        """`opened`: takes the request where more of its text follows. A pause in such a text is no underrun.

        `over` is called on the event loop once the pipeline has let go of the request, however much of it
        was asked for by then.

        `underran` hears of each chunk that comes too late for a player that starts at the first one, and
        by how many seconds.
        """
        self._pipeline = pipeline
        self._request = request
        self._over = over
        self._unread = unread
        self._underran = underran
        self._opened = opened
        self._stream = stream
        self._playback = Playback()
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        #: Whether the pipeline was asked, and has taken the request or refused it.
        self._begun = False
        self._given_up = False
        self._settled = False

    async def events(self, threads: Executor) -> AsyncGenerator[AudioChunk | Done, None]:
        """The chunks and the end; closing the generator gives the request up. Raises `NightjarError`.

        `threads` start what may take its time.
        """
        starting: Future[None] | None = None
        try:
            if self._stream and self._pipeline.starts_at_once:
                self._start()
            else:
                starting = threads.submit(self._start)
                await asyncio.wrap_future(starting)
            if self._opened is not None and self._handle is not None:
                self._opened(self._handle)
            while True:
                event = await self._next()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Done):
                    return
        finally:
            self._unread.bytes -= sum(_bytes(event) for event in self._events)
            self._events.clear()
            self._give_up(starting)

    def _start(self) -> None:
        handle: Handle | None = None
        try:
            if not self._given_up:
                handle = self._pipeline.start(
                    self._request,
                    lambda event: _on_loop(self._loop, lambda: self._arrived(event)),
                    self._stream,
                )
        finally:
            with self._lock:
                self._handle, self._begun = handle, True
                unwanted = self._given_up
            if unwanted:
                if handle is not None:
                    handle.cancel()
                _on_loop(self._loop, self._settle)

    async def _next(self) -> Event:
        while not self._events:
            self._waiter = self._loop.create_future()
            await self._waiter
        event = self._events.popleft()
        self._unread.bytes -= _bytes(event)
        return event

    def _arrived(self, event: Event) -> None:
        if not self._given_up:
            self._events.append(event)
            self._play(event)
            self._unread.bytes += _bytes(event)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if not isinstance(event, AudioChunk):
            self._settle()

    def _play(self, event: Event) -> None:
        if self._opened is None and isinstance(event, AudioChunk) and len(event.samples):
            late_seconds = self._playback.add(self._loop.time(), len(event.samples) / event.sample_rate)
            if late_seconds:
                self._underran(late_seconds)

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._over()

    def _give_up(self, starting: Future[None] | None) -> None:
        """Ends the request, unless it is over. One that a thread is starting is ended by that thread."""
        with self._lock:
            self._given_up = True
            handle, begun = self._handle, self._begun
        if handle is not None:
            try:
                handle.cancel()
            except Exception:
                # Whatever a pipeline does, its request gives its slot back.
                log.exception("a request could not be ended")
        elif starting is not None and not begun and not starting.cancel():
            return
        self._settle()


def _bytes(event: Event) -> int:
    if isinstance(event, Failed):
        return 0
    return (event.speech if isinstance(event, Done) else event).samples.nbytes


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls back, unless the server is gone and nobody waits."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
