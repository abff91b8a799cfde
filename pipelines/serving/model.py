"""The pipeline that a server serves: opened while the server already answers, and opened anew when its
engine is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import InputError, NightjarError
from pipelines.registry import ModelCard
from pipelines.request import (
    AudioChunk,
    Done,
    EngineStats,
    Event,
    Failed,
    Handle,
    Pipeline,
    Speech,
    SynthesisRequest,
)
from pipelines.serving.admission import Permit
from pipelines.serving.errors import unavailable

log = logging.getLogger(__name__)

#: Threads that prepare requests: prompts, phonemes, reference audio. More would only share the cores.
SUBMIT_THREADS = 16
#: Audio that slow clients have not taken, in bytes. Below that a stream gives its slot back once it is made;
#: above, once it is taken.
UNREAD_BYTES = 1 << 30
_LOOK_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 60.0
#: Of a pipeline that is closed: what it takes an engine core to end, and more.
CLOSE_SECONDS = 60.0


class Progress:
    """Calls of the pipeline that are under way, and when one of them, or the engine itself, last came
    further.

    Counts are changed on the event loop; `is_stuck` may be asked from any thread.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds = stuck_seconds
        self._clock = clock
        self._under_way = 0
        self._seen: tuple[object, ...] = ()
        self._moved_at = clock()

    def began(self) -> None:
        """A call of the pipeline begins."""
        self._under_way += 1

    def moved(self) -> None:
        """A call gave something, or failed in the pipeline."""
        self._moved_at = self._clock()

    def ended(self) -> None:
        """A call is over. That says nothing of the engine: its client may have left."""
        self._under_way -= 1

    def is_stuck(self, stats: EngineStats) -> bool:
        """Whether calls are under way and for `stuck_seconds` nothing came of any; to be asked now and
        then. `stats`: the engine's."""
        now = (stats.requests_done, stats.frames, stats.audio_seconds, stats.state)
        if not self._under_way or now != self._seen:
            self._seen = now
            self.moved()
        return self._clock() - self._moved_at >= self._stuck_seconds


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


@dataclass(eq=False, slots=True)
class _Call:
    """A request inside the pipeline. No thread waits for it: what the pipeline tells comes to the event loop,
    where it is kept until it is asked for."""

    _model: ServedModel
    _request: SynthesisRequest
    _permit: Permit
    _opened: Callable[[Handle], None] | None
    _stream: bool
    _playback: Playback = field(default_factory=Playback)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])
    _given_up: bool = False
    _settled: bool = False

    async def events(self) -> AsyncGenerator[AudioChunk | Done, None]:
        """The chunks and the end. Every event says that the engine came further, and every error but one of
        the request, which is found before that."""
        pipeline = self._model.living()
        start = partial(pipeline.start, self._request, self._hear, self._stream)
        started: Future[Handle] = Future()
        self._permit.hold()
        self._model.progress.began()
        try:
            if self._stream and pipeline.starts_at_once:
                started.set_result(start())
            else:
                started = self._model.threads[self._stream].submit(start)
                await asyncio.wrap_future(started)
            if self._opened is not None:
                self._opened(started.result())
            while True:
                event = await self._events.get()
                self._model.unread_bytes -= _bytes(event)
                if isinstance(event, Failed):
                    raise event.error
                self._model.progress.moved()
                yield event
                if isinstance(event, Done):
                    return
        except NightjarError as error:
            if not isinstance(error, InputError):
                self._model.progress.moved()
            raise
        finally:
            self._given_up = True
            while not self._events.empty():
                self._model.unread_bytes -= _bytes(self._events.get_nowait())
            if started.cancel():
                self._settle()
            else:
                started.add_done_callback(self._end)

    def _hear(self, event: Event) -> None:
        self._on_loop(partial(self._arrived, event))

    def _arrived(self, event: Event) -> None:
        if not self._given_up:
            self._model.unread_bytes += _bytes(event)
            self._events.put_nowait(event)
            # A pause in a text that is open is no underrun.
            if self._opened is None and isinstance(event, AudioChunk) and len(event.samples):
                late = self._playback.add(self._loop.time(), len(event.samples) / event.sample_rate)
                if late:
                    self._model.underran(late)
        if not isinstance(event, AudioChunk):
            self._settle()

    def _end(self, started: Future[Handle]) -> None:
        """Ends what was started, on the thread that started it where that took longer than its client
        waited. Whatever the pipeline does, its request gives its slot back."""
        try:
            if started.exception() is None:
                started.result().cancel()
        finally:
            self._on_loop(self._settle)

    def _settle(self) -> None:
        """The pipeline has let go of the request, however much of it was asked for by then."""
        if not self._settled:
            self._settled = True
            self._model.progress.ended()
            self._permit.release()
            if self._stream and self._model.unread_bytes < UNREAD_BYTES:
                self._permit.let_go()

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the server is gone, and nobody waits
            self._loop.call_soon_threadsafe(call)


def _bytes(event: Event) -> int:
    if isinstance(event, Failed):
        return 0
    return (event.speech if isinstance(event, Done) else event).samples.nbytes


class ServedModel:
    """One model and the threads that stand between it and the event loop."""

    def __init__(
        self,
        card: ModelCard,
        open_model: Callable[[], Pipeline],
        progress: Progress,
        opened: Callable[[Pipeline], None] = lambda _pipeline: None,
    ) -> None:
        """`opened` is called on the event loop with every pipeline that was opened."""
        self.card = card
        self._open = open_model
        self._opened = opened
        self._pipeline: Pipeline | None = None
        self.progress = progress
        #: Those that start whole requests, and streams, which never wait behind them.
        self.threads = {
            stream: DaemonThreads(SUBMIT_THREADS, name)
            for stream, name in ((False, "submit"), (True, "starter"))
        }
        #: Bytes of audio that the engine made and clients have not taken yet, of all streams.
        self.unread_bytes = 0
        #: Is called with the seconds that a player of a stream had nothing to play.
        self.underran: Callable[[float], None] = lambda _seconds: None
        #: Why the model could not be opened the first time, which ends the server.
        self.failure: BaseException | None = None

    @property
    def state(self) -> Literal["ready", "starting", "broken", "stuck"]:
        """That of the engine; `stuck` where it calls itself ready, but nothing comes of its requests."""
        stats = self.stats()
        stuck = self.progress.is_stuck(stats)
        return "stuck" if stuck and stats.state == "ready" else stats.state

    def pipelines(self) -> list[Pipeline]:
        """The pipeline, where it is open."""
        return [] if (pipeline := self._pipeline) is None else [pipeline]

    def stats(self) -> EngineStats:
        return EngineStats(state="starting") if self._pipeline is None else self._pipeline.stats()

    async def speech(self, request: SynthesisRequest, permit: Permit) -> Speech:
        """The whole speech; being cancelled aborts it. Raises `NightjarError`, and `ApiError` (503) while
        the engine is away."""
        async with contextlib.aclosing(self.chunks(request, permit, stream=False)) as events:
            done = await anext(events)
        assert isinstance(done, Done)
        return done.speech

    def chunks(
        self,
        request: SynthesisRequest,
        permit: Permit,
        opened: Callable[[Handle], None] | None = None,
        *,
        stream: bool = True,
    ) -> AsyncGenerator[AudioChunk | Done, None]:
        """The speech as it is made, then `Done`, which has all of its samples where they are made at once;
        closing the generator ends it. Raises as `speech`.

        `opened`: takes the stream where more of the request's text follows.
        The slot of a stream is given back when the speech is made, whenever it is taken: `UNREAD_BYTES`.
        """
        stream = stream and self.card.capabilities.streaming
        return _Call(self, request, permit, opened, stream).events()

    @property
    def takes_text(self) -> bool:
        """Whether the pipeline, where it is open, speaks text while it is being written."""
        return any(pipeline.capabilities.text_in for pipeline in self.pipelines())

    async def run(self, failed: Callable[[], None]) -> None:
        """Opens the model and keeps it open, until cancelled; calls `failed` when it cannot be opened at
        all."""
        try:
            await self.open()
        except Exception as error:  # noqa: BLE001  # whoever started the server hears of it
            self.failure = error
            failed()
            return
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # Also what notices a core that died while nobody asked for anything.
            if (state := self.state) in ("broken", "stuck"):
                log.error("the engine is %s and given up; the model is opened again", state)
                await self._renew()

    async def open(self) -> None:
        """Opens the pipeline in a thread, while the server answers."""

        def opened() -> Pipeline:
            # In the thread, so that a model that is still loading when the server ends is there to be closed.
            self._pipeline = pipeline = self._open()
            return pipeline

        pipeline = await asyncio.to_thread(opened)
        # A new engine has all its time.
        self.progress.moved()
        log.info("engine ready: %s", pipeline.info.summary(pipeline.name))
        self._opened(pipeline)

    async def _renew(self) -> None:
        broken, self._pipeline = self._pipeline, None
        if broken is not None:
            await asyncio.to_thread(broken.close)
        pause_seconds = 1.0
        while self._pipeline is None:
            try:
                await self.open()
            except NightjarError as error:
                log.error("the model cannot be opened: %s", error)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def close(self) -> bool:
        """Closes the pipeline; what is in it fails with `synth.aborted`. May be called more than once.
        False: it does not end."""
        pipeline, self._pipeline = self._pipeline, None
        closing = threading.Thread(target=pipeline.close if pipeline else None, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.error("the model did not close within %g s; the process ends without it", CLOSE_SECONDS)
        for threads in self.threads.values():
            threads.shutdown(cancel_futures=True)
        return not closing.is_alive()

    def living(self) -> Pipeline:
        pipeline = self._pipeline
        if pipeline is None or pipeline.stats().state != "ready":
            raise unavailable("The engine is starting. Try again.", "engine_starting")
        return pipeline
