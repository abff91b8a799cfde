"""The pipeline of a server: opened while the server already answers, and reopened after its engine has failed
or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.registry import ModelCard
from pipelines.request import (
    AudioChunk,
    Done,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Handle,
    Pipeline,
    SynthesisRequest,
)
from pipelines.serving import ServeOptions
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.errors import ApiError, unavailable

log = logging.getLogger(__name__)

#: Threads that prepare requests: prompts, phonemes, reference audio. More threads would not be faster.
SUBMIT_THREADS = 16
#: Number of slots if the pipeline does not report it.
_UNKNOWN_SLOTS = 256
#: Limit of the audio that clients have not yet read. Below it a stream gives its slot back when its speech is
#: made; above it, when the client has read all of it.
UNREAD_BYTES = 1 << 30
#: Interval at which the engine's state is checked, and maximum pause between two attempts to open the model.
_CHECK_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 60.0
#: Codes of the errors of requests whose engine is not ready, and has died.
_STARTING = "engine_starting"
_DEAD = (ErrorCode.WORKER_CRASH, ErrorCode.MODEL_UNREACHABLE)
#: Maximum time for closing a pipeline.
CLOSE_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class Progress:
    """Counts open calls of the pipeline and remembers when one of them, or the engine, last made progress.

    Calls are counted on the event loop; `is_stuck` may be called from any thread.
    """

    _stuck_seconds: float
    _clock: Callable[[], float] = time.monotonic
    #: Open calls.
    calls: int = 0
    _seen: tuple[object, ...] = ()
    _advanced_at: float = 0.0

    def advanced(self) -> None:
        """Records progress: a call returned something, or failed in the pipeline."""
        self._advanced_at = self._clock()

    def is_stuck(self, stats: EngineStats) -> bool:
        """Whether there are open calls and none of them has made progress for `stuck_seconds`. Must be called
        regularly. `stats`: those of the engine."""
        counts = (stats.requests_done, stats.frames, stats.audio_seconds, stats.state)
        if not self.calls or counts != self._seen:
            self._seen = counts
            self.advanced()
        return self._clock() - self._advanced_at >= self._stuck_seconds


@dataclass(eq=False, slots=True)
class _Call:
    """A request in the pipeline. No thread waits for it: its events are queued on the event loop."""

    _model: ServedModel
    _request: SynthesisRequest
    _permit: Permit
    _on_open: Callable[[Handle], None] | None
    _stream: bool
    #: When a player that starts with the first chunk, and pauses if a chunk is late, has played all chunks; 0
    #: before the first one.
    _played_until: float = 0.0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Event])
    _cancelled: bool = False
    _settled: bool = False

    async def events(self) -> AsyncGenerator[AudioChunk | Done, None]:
        """Yields the chunks, then `Done`. Every event counts as progress of the engine, and so does every
        error except an `InputError`, which is raised before the engine works."""
        pipeline = self._model.pipeline
        if pipeline is None or pipeline.stats().state != "ready":
            raise _starting()
        start = partial(pipeline.start, self._request, self._on_event, self._stream)
        started = Future[Handle]()
        self._permit.hold()
        self._model.progress.calls += 1
        try:
            # The content of a recording is hashed, which takes longer than a change of thread.
            has_text_only = all(isinstance(one.content, str) for one in self._request.messages)
            if self._stream and pipeline.starts_at_once and has_text_only:
                started.set_result(start())
            else:
                started = self._model.threads[self._stream].submit(start)
                await asyncio.wrap_future(started)
            if self._on_open is not None:
                self._on_open(started.result())
            while True:
                event = await self._events.get()
                self._model.unread_bytes -= _bytes(event)
                if isinstance(event, Failed):
                    raise event.error
                self._model.progress.advanced()
                yield event
                if isinstance(event, Done):
                    return
        except NightjarError as error:
            if not isinstance(error, InputError):
                self._model.progress.advanced()
            raise
        finally:
            self._cancelled = True
            while not self._events.empty():
                self._model.unread_bytes -= _bytes(self._events.get_nowait())
            if started.cancel():
                self._settle()
            else:
                started.add_done_callback(self._end)

    def _on_event(self, event: Event) -> None:
        self._on_loop(partial(self._deliver, event))

    def _deliver(self, event: Event) -> None:
        if not self._cancelled:
            self._model.unread_bytes += _bytes(event)
            self._events.put_nowait(event)
            # While a text is still being written, pauses are not underruns.
            if self._on_open is None and isinstance(event, AudioChunk) and len(event.samples):
                now = self._loop.time()
                if 0 < self._played_until < now:
                    self._model.on_underrun(now - self._played_until)
                seconds = len(event.samples) / event.sample_rate
                self._played_until = max(self._played_until, now) + seconds
        if not isinstance(event, AudioChunk):
            self._settle()

    def _end(self, started: Future[Handle]) -> None:
        """Cancels the request once it has started; if it is still being started, that thread calls this. The
        slot is given back even if the pipeline raises."""
        try:
            if started.exception() is None:
                started.result().cancel()
        finally:
            self._on_loop(self._settle)

    def _settle(self) -> None:
        """Gives the slot back after the pipeline has finished the request, even if events are unread."""
        if not self._settled:
            self._settled = True
            # No progress of the engine: the client may have disconnected.
            self._model.progress.calls -= 1
            self._permit.release()
            if self._stream and self._model.unread_bytes < UNREAD_BYTES:
                self._permit.disconnect()

    def _on_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(call)


def _starting() -> ApiError:
    return unavailable("The engine is starting. Try again.", _STARTING)


def _bytes(event: Event) -> int:
    if isinstance(event, Failed):
        return 0
    return (event.speech if isinstance(event, Done) else event).samples.nbytes


@dataclass(eq=False, slots=True)
class ServedModel:
    """One model, its slots, and the threads that start its requests."""

    card: ModelCard
    _open: Callable[[], Pipeline]
    options: ServeOptions
    admission: AdmissionQueue = field(init=False)
    progress: Progress = field(init=False)
    pipeline: Pipeline | None = None
    #: Threads that start requests; streams have their own, so that they never wait for whole requests.
    threads: dict[bool, DaemonThreads] = field(
        default_factory=lambda: {
            False: DaemonThreads(SUBMIT_THREADS, "submit"),
            True: DaemonThreads(SUBMIT_THREADS, "starter"),
        }
    )
    #: Bytes of audio of all streams that clients have not read.
    unread_bytes: int = 0
    #: Called with the seconds of each underrun.
    on_underrun: Callable[[float], None] = lambda _seconds: None
    #: Called for each request that is tried again.
    on_retry: Callable[[], None] = lambda: None
    #: Why the first opening of the model failed, which ends the server.
    failure: BaseException | None = None
    #: The monotonic time at which the engine was found dead; requests that arrived before wait for the next one.
    _died_at: float = 0.0

    def __post_init__(self) -> None:
        self.admission = AdmissionQueue(self.options.slots or _UNKNOWN_SLOTS, self.options.waiting_room)
        self.progress = Progress(self.options.stuck_seconds)

    @property
    def state(self) -> Literal["ready", "starting", "broken", "stuck"]:
        """The state of the engine; `stuck` if it is ready, but its requests make no progress."""
        stats = self.stats()
        return "stuck" if self.progress.is_stuck(stats) and stats.state == "ready" else stats.state

    def pipelines(self) -> list[Pipeline]:
        """The pipeline, if it is open."""
        return [] if (pipeline := self.pipeline) is None else [pipeline]

    def stats(self) -> EngineStats:
        return EngineStats(state="starting") if self.pipeline is None else self.pipeline.stats()

    def check_queue(self) -> None:
        """Raises `ApiError` (503) while all slots are held for the next engine, so that no new request waits
        behind those that are tried again."""
        if self.pipeline is None and self.admission.full:
            raise _starting()

    async def chunks(
        self,
        request: SynthesisRequest,
        permit: Permit,
        opened: Callable[[Handle], None] | None = None,
        *,
        stream: bool = True,
    ) -> AsyncGenerator[AudioChunk | Done, None]:
        """The chunks of the speech, then `Done`, which has all samples of a request that is not streamed.
        Closing the generator cancels the request. Raises `NightjarError`, and `ApiError` (503) while no engine is
        ready.

        If the engine dies before the first event, the request is tried once more by the next engine; callers
        limit the time.

        `opened`: called with the handle of a request whose text is still open.
        A stream's slot is given back when the speech is made, even if it is not yet read.
        """
        stream = stream and self.card.capabilities.streaming
        # The slot is kept until no other attempt can follow.
        permit.hold()
        held = True
        try:
            for is_last in (False, True):
                call = _Call(self, request, permit, opened, stream)
                try:
                    async with contextlib.aclosing(call.events()) as events:
                        async for event in events:
                            if held:
                                held = False
                                permit.release()
                            yield event
                    return
                except (NightjarError, ApiError) as error:
                    # A dead engine that is still here is found a little later.
                    is_lost = self.pipeline is not None and self.stats().state == "broken"
                    was_early = error.code == _STARTING and (is_lost or permit.since < self._died_at)
                    if is_last or not held or not (was_early or error.code in _DEAD):
                        raise
                self.on_retry()
                while self.stats().state != "ready":
                    await asyncio.sleep(_CHECK_SECONDS)
        finally:
            if held:
                permit.release()

    @property
    def takes_text(self) -> bool:
        """Whether the pipeline is open and speaks text while it is being written."""
        return any(pipeline.capabilities.text_in for pipeline in self.pipelines())

    async def run(self, failed: Callable[[], None]) -> None:
        """Opens the model and reopens it after failures, until cancelled. Calls `failed` if the first
        opening fails."""
        try:
            await self.open()
        except Exception as error:  # noqa: BLE001  # `Server.run` raises it
            self.failure = error
            failed()
            return
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            # Also detects an engine that died while it had no requests.
            if (state := self.state) in ("broken", "stuck"):
                log.error("the engine is %s; the model is opened again", state)
                self._died_at = time.monotonic()
                broken = self.pipeline
                self.pipeline = None
                if broken is not None:
                    await asyncio.to_thread(broken.close)
                pause_seconds = 1.0
                while self.pipeline is None:
                    try:
                        await self.open()
                    except Exception as error:  # noqa: BLE001  # the next attempt may succeed, whatever it was
                        log.error("the model cannot be opened: %s", error)
                        await asyncio.sleep(pause_seconds)
                        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    async def open(self) -> None:
        """Opens the pipeline in a thread, while the server already answers. Sets the number of slots to the
        number of requests that the engine runs and queues, unless it is configured."""

        def opened() -> Pipeline:
            # Set in the thread, so that a model that loads while the server stops is closed too.
            self.pipeline = pipeline = self._open()
            return pipeline

        pipeline = await asyncio.to_thread(opened)
        # Restarts the time that `is_stuck` measures.
        self.progress.advanced()
        info = pipeline.info
        log.info("engine ready: %s", info.summary(pipeline.name))
        if self.options.slots is None and info != EngineInfo():
            # The native engine does not bound waiting streams, so they wait here and its waiting room stays empty.
            waits_here = bool(info.executor) and pipeline.capabilities.streaming
            self.admission.resize(info.slots + (0 if waits_here else info.waiting_room))

    def close(self) -> bool:
        """Closes the pipeline; its requests fail with `synth.aborted`. May be called more than once. False if
        the pipeline does not close in time."""
        pipeline = self.pipeline
        self.pipeline = None
        closing = threading.Thread(target=pipeline.close if pipeline else None, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.error("the model did not close within %g s; the process ends without it", CLOSE_SECONDS)
        for threads in self.threads.values():
            threads.shutdown(cancel_futures=True)
        return not closing.is_alive()
