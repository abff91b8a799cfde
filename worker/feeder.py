"""Feeds the items of a leased shard to a pipeline, and what it makes of them to the result writer."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

import structlog

from jobs.dialogue import spoken_text
from jobs.ledger import records
from jobs.ledger.records import Outcome
from jobs.ledger.states import LASTING_OUTAGES
from jobs.shard_file import ShardLine
from jobs.store.base import ObjectStore
from jobs.voices import stored_voice_of
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Done, Event, Failed, Pipeline, Speech, SynthesisRequest
from worker.demand import MAX_WRITING_ITEMS
from worker.feeding_order import FeedingOrder, Turn
from worker.leases import Clock, HeldLease, LeaseGoneError
from worker.pack_writer import PackWriter
from worker.quality.verdict import REDRAWN, History
from worker.result_writer import EngineResult, Redraw, ResultWriter
from worker.shard_progress import PlannedDraw, ShardProgress

log = structlog.get_logger(__name__)

ROOM_POLL_SECONDS = 0.02
#: Errors that say nothing about the item: they end the work on its shard.
_OF_THE_SHARD = LASTING_OUTAGES | {ErrorCode.WORKER_CRASH, ErrorCode.MODEL_UNREACHABLE}


class Feeder:
    """Feeds draws to a pipeline from a thread of its own. Each item ends with one outcome in `progress`.

    `build` turns a line and the number of its draw into its request, or raises a `NightjarError` that becomes the item's outcome. It feeds
    while it has its `turn`.
    """

    def __init__(
        self,
        held: HeldLease,
        progress: ShardProgress,
        build: Callable[[ShardLine, int], SynthesisRequest],
        *,
        pipeline: Pipeline,
        writer: ResultWriter,
        store: ObjectStore,
        clock: Clock,
        packs: PackWriter | None = None,
        turn: Turn | None = None,
    ) -> None:
        self._held = held
        self._progress = progress
        self._build = build
        self._pipeline = pipeline
        self._writer = writer
        self._store = store
        self._clock = clock
        self._packs = packs
        self._turn = turn or FeedingOrder().turn(0, remote=False)
        self._checked = held.lease.job.spec.quality is not None
        in_context = contextvars.copy_context().run
        self._thread = threading.Thread(target=in_context, args=(self._run,), name=f"feeder-{held.lease.shard_no}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits until everything was fed."""
        self._thread.join()

    def expire(self, timeout_seconds: float) -> bool:
        """Fails items that were in the engine for too long (`synth.timeout`) and cancels their requests.

        Returns whether the engine is stuck: it has not even accepted the next request for so long.
        """
        late, stuck = self._progress.take_late(timeout_seconds)
        message = f"The item took more than {timeout_seconds:g} s in the engine."
        for one in late:
            # Settled first: what the engine still makes of it comes too late to count.
            self._fail(one.index, ErrorCode.SYNTH_TIMEOUT, message, one.entry.history, one.engine_ms)
            if one.entry.handle is not None:
                one.entry.handle.cancel()
        return stuck

    def close(self, writing_seconds: float) -> list[Outcome]:
        """Ends the work: nothing more is fed, and requests in the engine are cancelled without an outcome.

        Waits so long for what is being written, and returns the outcomes that were not taken.
        """
        for handle in self._progress.halt():
            handle.cancel()
        self._flush_packs()
        return self._progress.close(writing_seconds)

    def _run(self) -> None:
        try:
            while (planned := self._next_draw()) is not None:
                while (self._writer.full or self._progress.writing_items >= MAX_WRITING_ITEMS) and not self._progress.stopped:
                    self._clock.sleep(ROOM_POLL_SECONDS)
                if not self._progress.begin():
                    return
                self._feed(planned)
                self._progress.begun()
        except Exception as error:
            log.exception("feeder failed")
            self._progress.fail(error)
        finally:
            self._turn.leave()

    def _next_draw(self) -> PlannedDraw | None:
        """The next draw, once it is the shard's turn; None when no more come."""
        if not self._progress.has_draw:
            self._turn.leave()
            self._progress.wait_for_draw()
        return self._progress.next_draw() if self._turn.take(lambda: self._progress.stopped) else None

    def _feed(self, planned: PlannedDraw) -> None:
        index = planned.line.index
        try:
            request = self._build(planned.line, planned.draw)
            self._progress.enter(planned)
            handle = self._pipeline.start(request, lambda event: self._made(planned, request, event))
        except NightjarError as error:
            engine_ms = self._progress.refused(index)
            if error.code in _OF_THE_SHARD:
                self._progress.fail(error, index)
            else:
                self._fail(index, error.code, str(error), planned.history, engine_ms)
            return
        if not self._progress.entered(index, handle):
            handle.cancel()

    def _made(self, planned: PlannedDraw, request: SynthesisRequest, event: Event) -> None:
        """The engine has answered."""
        index, error = planned.line.index, event.error if isinstance(event, Failed) else None
        engine_ms = self._progress.answered(index, failed=error is not None)
        if engine_ms is None:
            return
        if isinstance(event, Done):
            self._write(planned, request, event.speech, engine_ms)
        elif error is None:
            raise AssertionError("whole utterances come without chunks")
        elif error.code in _OF_THE_SHARD:
            self._progress.fail(error, index)
        elif self._checked and error.code in REDRAWN:
            # A failure that another seed may mend is a draw that did not pass its checks.
            self._write(planned, request, error, engine_ms)
        else:
            self._fail(index, error.code, str(error), planned.history, engine_ms)

    def _write(self, planned: PlannedDraw, request: SynthesisRequest, made: Speech | NightjarError, engine_ms: float) -> None:
        line = planned.line
        result = EngineResult(
            self._held,
            self._store,
            line.index,
            line.example_id,
            request,
            made,
            round(engine_ms),
            text=spoken_text(line.messages) if self._checked else "",
            stored_voice=stored_voice_of(line, self._held.lease.job.spec) if self._checked else None,
            draw=planned.draw,
            last_draw=self._progress.last_draw(line.index),
            sampled=self._pipeline.capabilities.sampling and request.generation.temperature != 0,
            history=planned.history,
            over=lambda: self._progress.over,
            packs=self._packs,
        )
        self._writer.submit(result).add_done_callback(partial(self._written, line.index))

    def _written(self, index: int, future: Future[Outcome | Redraw]) -> None:
        """The writer has answered."""
        try:
            answer = future.result()
        except (CancelledError, LeaseGoneError):
            self._progress.drop(index)
        except NightjarError as error:
            self._progress.fail(error, index)
        else:
            if isinstance(answer, Redraw):
                self._progress.redraw(index, answer.history)
            else:
                self._progress.settle(answer)
        self._flush_packs()

    def _fail(self, index: int, code: ErrorCode, message: str, history: History, engine_ms: float) -> None:
        """Settles an item that failed in the engine; `engine_ms` is its last draw's."""
        self._progress.settle(records.Failed(index, code, message, history.draws, engine_ms=history.engine_ms + round(engine_ms)))
        self._flush_packs()

    def _flush_packs(self) -> None:
        """An item has left: it may be the one that a pack has waited for."""
        if self._packs is not None:
            self._packs.flush_due()
