"""One request inside the pipeline, waited for on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future

from pipelines.errors import NightjarError
from pipelines.request import AudioChunk, Pipeline, Speech, SynthesisRequest
from pipelines.streams import End, Heard, Playback, TextStream, start_stream, start_text_stream

log = logging.getLogger(__name__)


class SpeechCall:
    """`submit` and what comes of it. The thread that submits may have to wait for room in the engine."""

    def __init__(self, pipeline: Pipeline, request: SynthesisRequest, over: Callable[[], None]) -> None:
        """`over` is called on the event loop once the pipeline has let go of the request, however it ended."""
        self._pipeline = pipeline
        self._request = request
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Speech] = self._loop.create_future()
        self._lock = threading.Lock()
        self._given_up = False

    async def result(self, threads: Executor) -> Speech:
        """The speech; being cancelled gives the request up. Raises `NightjarError`."""
        work = threads.submit(self._submit)
        try:
            return await self._outcome
        finally:
            if work.cancel():
                self._over()
            else:
                self._give_up()

    def _submit(self) -> None:
        if self._given_up:
            self._tell(None)
            return
        try:
            future = self._pipeline.submit(self._request)
        except BaseException as error:  # noqa: BLE001  # whatever it is, somebody waits for it
            self._tell(error)
            return
        future.add_done_callback(self._ended)
        with self._lock:
            unwanted = self._given_up
        if unwanted:
            self._pipeline.abort(self._request.request_id)

    def _ended(self, future: Future[Speech]) -> None:
        try:
            self._tell(future.result())
        except Exception as error:  # noqa: BLE001  # as above
            self._tell(error)

    def _tell(self, outcome: Speech | BaseException | None) -> None:
        def settle() -> None:
            self._over()
            if self._outcome.done() or outcome is None:
                return
            if isinstance(outcome, BaseException):
                self._outcome.set_exception(outcome)
            else:
                self._outcome.set_result(outcome)

        _on_loop(self._loop, settle)

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            # Also while it is being submitted, where it may be read or wait for room: a pipeline ignores an id it does not know yet.
            unwanted = not self._outcome.done() or self._outcome.cancelled()
        if unwanted:
            self._pipeline.abort(self._request.request_id)


class Unread:
    """Bytes of audio that engines made and clients have not taken yet, of all streams. Used on the event loop only."""

    def __init__(self) -> None:
        self.bytes = 0


class StreamCall:
    """A stream. No thread waits for it: what the pipeline tells comes to the event loop, where it is kept until it is asked for."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: SynthesisRequest,
        over: Callable[[], None],
        unread: Unread,
        underran: Callable[[float], None],
        opened: Callable[[TextStream], None] | None = None,
    ) -> None:
        """`opened`: takes the stream where more of the request's text follows. A pause in such a text is no underrun.

        `over` is called on the event loop once the pipeline has let go of the request, however much of it was asked for by then.

        `underran` hears of each chunk that comes too late for a player that starts at the first one, and by how many seconds.
        """
        self._pipeline = pipeline
        self._request = request
        self._over = over
        self._unread = unread
        self._underran = underran
        self._opened = opened
        self._playback = Playback()
        self._loop = asyncio.get_running_loop()
        self._outcomes: deque[AudioChunk | NightjarError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._end: End | None = None
        #: Whether the pipeline was asked, and has taken the request or refused it.
        self._begun = False
        self._text: TextStream | None = None
        self._given_up = False
        self._settled = False

    async def chunks(self, threads: Executor) -> AsyncGenerator[AudioChunk, None]:
        """The chunks; closing the generator gives the request up. Raises `NightjarError`.

        `threads` start the streams of a pipeline whose `start_stream` may take its time.
        """
        starting: Future[None] | None = None
        try:
            if getattr(self._pipeline, "starts_at_once", False):
                self._start()
            else:
                starting = threads.submit(self._start)
                await asyncio.wrap_future(starting)
            if self._opened is not None and self._text is not None:
                self._opened(self._text)
            while True:
                outcome = await self._next()
                if isinstance(outcome, NightjarError):
                    raise outcome
                yield outcome
                if outcome.final:
                    return
        finally:
            self._unread.bytes -= sum(_bytes(outcome) for outcome in self._outcomes)
            self._outcomes.clear()
            self._give_up(starting)

    def _start(self) -> None:
        end: End | None = None
        try:
            if not self._given_up:
                end = self._begin(lambda outcome: _on_loop(self._loop, lambda: self._arrived(outcome)))
        finally:
            with self._lock:
                self._end, self._begun = end, True
                unwanted = self._given_up
            if unwanted:
                if end is not None:
                    end()
                _on_loop(self._loop, self._settle)

    def _begin(self, heard: Heard) -> End:
        if self._opened is None:
            return start_stream(self._pipeline, self._request, heard)
        self._text = start_text_stream(self._pipeline, self._request, heard)
        return self._text.end

    async def _next(self) -> AudioChunk | NightjarError:
        while not self._outcomes:
            self._waiter = self._loop.create_future()
            await self._waiter
        outcome = self._outcomes.popleft()
        self._unread.bytes -= _bytes(outcome)
        return outcome

    def _arrived(self, outcome: AudioChunk | NightjarError) -> None:
        if not self._given_up:
            self._outcomes.append(outcome)
            self._play(outcome)
            self._unread.bytes += _bytes(outcome)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        if isinstance(outcome, NightjarError) or outcome.final:
            self._settle()

    def _play(self, outcome: AudioChunk | NightjarError) -> None:
        if self._opened is None and isinstance(outcome, AudioChunk) and len(outcome.samples):
            late_seconds = self._playback.add(self._loop.time(), len(outcome.samples) / outcome.sample_rate)
            if late_seconds:
                self._underran(late_seconds)

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._over()

    def _give_up(self, starting: Future[None] | None) -> None:
        """Ends the stream, unless it is over. One that a thread is starting is ended by that thread."""
        with self._lock:
            self._given_up = True
            end, begun = self._end, self._begun
        if end is not None:
            try:
                end()
            except Exception:
                # Whatever a pipeline does, its request gives its slot back.
                log.exception("a stream could not be ended")
        elif starting is not None and not begun and not starting.cancel():
            return
        self._settle()


def _bytes(outcome: AudioChunk | NightjarError) -> int:
    return 0 if isinstance(outcome, NightjarError) else outcome.samples.nbytes


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls back, unless the server is gone and nobody waits."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
