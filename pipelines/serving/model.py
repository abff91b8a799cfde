"""The pipeline that a server serves: opened while the server already answers, and opened anew when its
engine is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Literal

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import InputError, NightjarError
from pipelines.registry import ModelCard
from pipelines.request import AudioChunk, Done, EngineStats, Handle, Pipeline, Speech, SynthesisRequest
from pipelines.serving.admission import Permit
from pipelines.serving.async_bridge import PipelineCall, Unread
from pipelines.serving.errors import unavailable
from pipelines.stored_voices import DEFAULT_VOICE


class Progress:
    """Calls of the pipeline that are under way, and when one of them, or the engine itself, last came
    further.

    Counts are changed on the event loop; `is_stuck` may be asked from any thread.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds = stuck_seconds
        self._clock = clock
        self._under_way = 0
        self._moves = 0
        self._seen: tuple[object, ...] = ()
        self._moved_at = clock()

    def began(self) -> None:
        """A call of the pipeline begins."""
        self._under_way += 1

    def moved(self) -> None:
        """A call gave something, or failed in the pipeline."""
        self._moves += 1

    def ended(self) -> None:
        """A call is over. That says nothing of the engine: its client may have left."""
        self._under_way -= 1

    def is_stuck(self, stats: EngineStats) -> bool:
        """Whether calls are under way and for `stuck_seconds` nothing came of any; to be asked now and
        then. `stats`: the engine's."""
        now = (self._moves, stats.requests_done, stats.frames, stats.audio_seconds, stats.state)
        if not self._under_way or now != self._seen:
            self._seen, self._moved_at = now, self._clock()
        return self._clock() - self._moved_at >= self._stuck_seconds


log = logging.getLogger(__name__)

#: Threads that prepare requests: prompts, phonemes, reference audio. More would only share the cores.
_SUBMIT_THREADS = 16
#: Audio that slow clients have not taken, in bytes. Below that a stream gives its slot back once it is made;
#: above, once it is taken.
_UNREAD_BYTES = 1 << 30
_LOOK_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 60.0
#: Of a pipeline that is closed: what it takes an engine core to end, and more.
_CLOSE_SECONDS = 60.0


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
        self._progress = progress
        self._submitters = DaemonThreads(_SUBMIT_THREADS, "submit")
        #: For pipelines whose start of a stream may wait: never behind whole requests.
        self._starters = DaemonThreads(_SUBMIT_THREADS, "starter")
        self._unread = Unread()
        #: Is called with the seconds that a player of a stream had nothing to play.
        self.underran: Callable[[float], None] = lambda _seconds: None
        #: Why the model could not be opened the first time, which ends the server.
        self.failure: BaseException | None = None
        self._close_seconds = _CLOSE_SECONDS

    def voice(self, asked: str | None) -> str | None:
        """The voice that a client means; None for the model's own."""
        return (
            None if asked == DEFAULT_VOICE and DEFAULT_VOICE not in self.card.capabilities.voices else asked
        )

    @property
    def state(self) -> Literal["ready", "starting", "broken", "stuck"]:
        """That of the engine; `stuck` where it calls itself ready, but nothing comes of its requests."""
        stats = self.stats()
        stuck = self._progress.is_stuck(stats)
        return "stuck" if stuck and stats.state == "ready" else stats.state

    def pipelines(self) -> list[Pipeline]:
        """The pipeline, where it is open."""
        return [] if (pipeline := self._pipeline) is None else [pipeline]

    def stats(self) -> EngineStats:
        return EngineStats(state="starting") if self._pipeline is None else self._pipeline.stats()

    async def speech(self, request: SynthesisRequest, permit: Permit) -> Speech:
        """The whole speech; being cancelled aborts it. Raises `NightjarError`, and `ApiError` (503) while
        the engine is away."""
        call = PipelineCall(
            self._living(), request, self._began(permit), self._unread, self.underran, stream=False
        )
        async with contextlib.aclosing(call.events(self._submitters)) as events:
            with self._answered():
                async for event in events:
                    if isinstance(event, Done):
                        self._progress.moved()
                        return event.speech
        raise AssertionError("a request has an end")

    @property
    def takes_text(self) -> bool:
        """Whether the pipeline, where it is open, speaks text while it is being written."""
        return any(pipeline.capabilities.text_in for pipeline in self.pipelines())

    async def chunks(
        self, request: SynthesisRequest, permit: Permit, opened: Callable[[Handle], None] | None = None
    ) -> AsyncGenerator[AudioChunk | Done, None]:
        """The speech as it is made, and its end; closing the generator ends it. Raises as `speech`.

        `opened`: takes the stream where more of the request's text follows.
        The ticket is given back when the speech is made, whenever it is taken: `_UNREAD_BYTES`.
        """
        pipeline = self._living()
        over = self._began(permit)

        def made() -> None:
            over()
            if self._unread.bytes < _UNREAD_BYTES:
                permit.let_go()

        call = PipelineCall(pipeline, request, made, self._unread, self.underran, opened, stream=True)
        async with contextlib.aclosing(call.events(self._starters)) as events:
            with self._answered():
                async for event in events:
                    self._progress.moved()
                    yield event

    @contextlib.contextmanager
    def _answered(self) -> Generator[None]:
        """An error of the pipeline is an answer of it, but for one of the request, which is found before
        that."""
        try:
            yield
        except NightjarError as error:
            if not isinstance(error, InputError):
                self._progress.moved()
            raise

    def _began(self, permit: Permit) -> Callable[[], None]:
        """Holds the ticket for a call of the pipeline; what is to be called once that is over."""
        permit.hold()
        self._progress.began()

        def over() -> None:
            self._progress.ended()
            permit.release()

        return over

    async def run(self, failed: Callable[[], None]) -> None:
        """Opens the model and keeps it open, until cancelled; calls `failed` when it cannot be opened at
        all."""
        try:
            await self._open_beside()
        except Exception as error:  # noqa: BLE001  # whoever started the server hears of it
            self.failure = error
            failed()
            return
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # Also what notices a core that died while nobody asked for anything.
            if (state := self.state) in ("broken", "stuck"):
                log.error("the engine is %s", state)
                await self._renew()

    def close(self) -> bool:
        """Closes the pipeline; what is in it fails with `synth.aborted`. May be called more than once.
        False: it does not end."""
        pipeline, self._pipeline = self._pipeline, None
        ended = True
        if pipeline is not None:
            closer = DaemonThreads(1, "close")
            closing = closer.submit(pipeline.close)
            closer.shutdown()
            try:
                closing.result(self._close_seconds)
            except TimeoutError:
                log.error(
                    "the model did not close within %g s; the process ends without it", self._close_seconds
                )
                ended = False
        self._submitters.shutdown(cancel_futures=True)
        self._starters.shutdown(cancel_futures=True)
        return ended

    async def _renew(self) -> None:
        broken, self._pipeline = self._pipeline, None
        pause_seconds = 1.0
        while self._pipeline is None:
            log.error("the engine is given up; the model is opened again")
            try:
                if broken is not None:
                    await asyncio.to_thread(broken.close)
                    broken = None
                await self._open_beside()
            except NightjarError as error:
                log.error("the model cannot be opened: %s", error)
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    async def _open_beside(self) -> None:
        """Opens the pipeline in a thread, while the server answers."""
        await asyncio.to_thread(self._open_now)
        # A new engine has all its time.
        self._progress.moved()
        if (pipeline := self._pipeline) is not None:
            log.info("engine ready: %s", pipeline.info.summary(pipeline.name))
            self._opened(pipeline)

    def _open_now(self) -> None:
        # In the thread, so that a model that is still loading when the server ends is there to be closed.
        self._pipeline = self._open()

    def _living(self) -> Pipeline:
        pipeline = self._pipeline
        if pipeline is None or pipeline.stats().state != "ready":
            raise unavailable("The engine is starting. Try again.", "engine_starting")
        return pipeline
