"""One leased shard, from its input to its manifest: reads the items, feeds them to the pipeline, counts
them, commits their outcomes."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import structlog

from jobs.export.manifest import put_shard_manifest
from jobs.ledger.records import (
    LASTING_OUTAGES,
    WORKER_FAULTS,
    WORKING,
    Done,
    Failed,
    JobState,
    Lease,
    Outcome,
)
from jobs.provenance import ProvenanceWriter
from jobs.shard_file import ShardLine, read_shard
from jobs.store.base import ObjectStore
from jobs.worker_group import WorkerReport
from pipelines.errors import ErrorCode, ModelError, NightjarError, StoreError, SynthesisError
from pipelines.request import AudioChunk, Event, Pipeline, Speech
from pipelines.request import Done as SpeechDone
from worker.admission import Demand, ItemCounts
from worker.feeding import EngineTimer, FeedingOrder, ReferenceCache, RequestBuilder
from worker.leases import DOUBTS, Clock, GoneReason, HeldLease, LeaseBook, LeaseGoneError, SystemClock
from worker.metrics import Metrics
from worker.models import PipelineCache
from worker.pack_writer import PackWriter
from worker.quality.verdict import REDRAWN, History
from worker.result_writer import Answer, ItemDraw, ResultWriter
from worker.supervisor import report

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings

log = structlog.get_logger(__name__)

POLL_SECONDS, ROOM_POLL_SECONDS = 0.5, 0.02
#: How long a shard that stops early waits for speech that is made and not written yet.
WRITING_SECONDS = 5.0
#: Errors that say nothing about the item: they end the work on its shard.
_OF_THE_SHARD = LASTING_OUTAGES | {ErrorCode.WORKER_CRASH, ErrorCode.MODEL_UNREACHABLE}


class ShardEnd(StrEnum):
    """How a run of a shard ended."""

    FINISHED = "finished"
    #: The lease was gone: another worker has the shard, or its job was cancelled.
    LOST = "lost"
    #: Given back by a draining worker, or because its job was paused; what was done stays done.
    RELEASED = "released"
    #: Given back: this worker cannot run it, and another one may.
    REFUSED = "refused"
    #: The shard as a whole could not be worked on.
    FAILED = "failed"


@dataclass(eq=False)
class ShardRunner:
    """Runs leased shards, and has what their runs share; safe to use from several threads at once, one
    shard each.

    Every open item goes to the pipeline at once, so the engine sees the items of all shards in flight.
    Outcomes are committed in micro-batches, fenced by the lease's epoch. Calls to a ledger or store that
    is away are retried for as long as the lease lives.
    """

    ledger: Ledger
    store_for: Callable[[str], ObjectStore]
    pipelines: PipelineCache
    settings: Settings
    writer: ResultWriter
    leases: LeaseBook
    metrics: Metrics
    clock: Clock = field(default_factory=SystemClock)
    provenance: ProvenanceWriter | None = None
    demand: Demand = field(default_factory=Demand)
    #: No worker but this one runs its jobs, so what it cannot run it does not give back.
    alone: bool = False
    #: The demand knows of one more shard.
    on_claimed: Callable[[], None] = lambda: None
    references: ReferenceCache = field(default_factory=ReferenceCache, init=False)
    order: FeedingOrder = field(default_factory=FeedingOrder, init=False)
    timer: EngineTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = EngineTimer(self.clock)

    def run(self, lease: Lease) -> ShardEnd:
        """Works on a shard until it is finished or its lease is gone. Raises nothing."""
        held = self.leases.hold(lease)
        started_at = self.clock.monotonic()
        run = ShardRun(self, held)
        try:
            with self.demand.hold(run.counts):
                self.on_claimed()
                end = run.run()
        finally:
            self.leases.drop(held)
        self.metrics.shards.labels(outcome=end.value).inc()
        seconds = round(self.clock.monotonic() - started_at, 2)
        log.info("shard ended", outcome=end.value, items=len(lease.open_items), seconds=seconds)
        return end


class ShardRun:
    """A run of one leased shard. Every item ends with one outcome; the state of all is under one lock.

    An item is not begun, in the engine, being written, or settled; one that was begun is at each moment in
    exactly one of these states. A thread of its own feeds the pipeline, threads of pipeline and writer
    bring the items on, and the thread of `run` commits.
    """

    def __init__(self, runner: ShardRunner, held: HeldLease) -> None:
        self._runner = runner
        self.held = held
        self._lease = held.lease
        self._job = held.lease.job
        self._clock = runner.clock
        self._times = runner.settings.times
        #: Set where it is begun.
        self.store: ObjectStore
        #: What stores the artifacts, in a job with packs; None: each is an object of its own.
        self.packs: PackWriter | None = None
        self._builder: RequestBuilder
        self._pipeline: Pipeline | None = None
        self._changed = threading.Condition()
        #: Draws to feed: those that follow another draw first.
        self._waiting: deque[ItemDraw] = deque()
        self._unsettled: set[int] = set()
        #: By index, oldest first.
        self._in_engine: dict[int, ItemDraw] = {}
        #: What the feeding thread has in hand: it may not be in the engine yet.
        self._feeding: ItemDraw | None = None
        self._answered = 0
        #: Items that left the engine and are not settled.
        self._writing: set[int] = set()
        self._outcomes: list[Outcome] = []
        #: No more is fed; what is in the engine may finish.
        self._winding_down = False
        #: Nor may that.
        self._halted = False
        #: Outcomes are not taken any more.
        self._closed = False
        self._error: BaseException | None = None
        held.on_gone(self._wake)

    def run(self) -> ShardEnd:
        """Raises nothing."""
        try:
            self._work()
            return ShardEnd.FINISHED
        except LeaseGoneError as gone:
            return self._give_up(gone.reason)
        except NightjarError as error:
            return self._fail(error.code, str(error))
        except Exception as error:
            log.exception("shard runner failed")
            return self._fail(ErrorCode.WORKER_CRASH, f"The shard runner failed: {error!r}")

    def counts(self) -> ItemCounts:
        """How far it is; before the pipeline is open all its items are open."""
        if self._pipeline is None:
            return ItemCounts(len(self._lease.open_items), 0, 0)
        waiting = 0 if self._stopped else len(self._waiting)
        return ItemCounts(len(self._in_engine) + waiting, self._answered, len(self._writing))

    def _work(self) -> None:
        lease, retrying = self._lease, self.held.retrying
        store = self._runner.store_for(self._job.store_url)
        self._runner.writer.serve(store, self._job.spec.format)
        retrying(lambda: store.confirm(self._job.store_identity))
        lines = retrying(lambda: read_shard(store, lease.input_key, lease.input_sha256), DOUBTS)
        todo = [line for line in lines if line.index in lease.open_items]
        if missing := lease.open_items.keys() - {line.index for line in todo}:
            raise StoreError(
                ErrorCode.STORE_MISSING, f"{lease.input_key} lacks {len(missing)} items of its shard."
            )
        retry_later = False
        if todo:
            with self._runner.pipelines.use(self._job.spec.model, self.held.check) as pipeline:
                if (book := self._runner.provenance) is not None:
                    retrying(lambda: book.note(store, self._job, pipeline.info))
                retry_later = self._synthesize(store, todo, pipeline)
        self._finish(store, lines, retry_later)

    def _synthesize(self, store: ObjectStore, todo: Sequence[ShardLine], pipeline: Pipeline) -> bool:
        """Makes a committed outcome of every line. Returns whether some items are left for another attempt.

        Raises `LeaseGoneError` when the job was paused meanwhile, after the items that were begun are
        committed.
        """
        if self._is_paused():  # while the model was opened
            raise LeaseGoneError(GoneReason.PAUSED)
        drawn_before: Mapping[int, int] = {}
        if self._job.spec.quality is not None:
            # `nightjar retry` continues with the next draws; those of a lost worker are made again.
            places = self._job.id, todo[0].index, todo[-1].index
            drawn_before = self.held.retrying(lambda: self._runner.ledger.drawn_before(*places))
        self.begin(store, pipeline, todo, drawn_before)
        in_context, name = contextvars.copy_context().run, f"feeder-{self._lease.shard_no}"
        threading.Thread(target=in_context, args=(self.feed_all,), name=name, daemon=True).start()
        try:
            return self._collect(pipeline)
        finally:
            self._close()
            if pipeline.stats().state == "broken":
                self._runner.pipelines.discard(pipeline)

    def begin(
        self,
        store: ObjectStore,
        pipeline: Pipeline,
        lines: Sequence[ShardLine],
        drawn_before: Mapping[int, int],
    ) -> None:
        """Plans the first draw of each line. `drawn_before`: the number of draws of items that a person
        reopened."""
        quality = self._job.spec.quality
        more = 0 if quality is None else quality.draws - 1
        for line in lines:
            first = drawn_before.get(line.index, 0)
            self._waiting.append(ItemDraw(line, first, first + more))
        self._unsettled = {line.index for line in lines}
        self.store, self._builder = store, RequestBuilder(self.held, store, self._runner.references)
        if self._job.spec.pack is True:
            run = self._runner.writer.run
            self.packs = PackWriter(self.held, store, self._times, self._clock, run, self._only_waits_for)
        self._pipeline = pipeline

    @property
    def _stopped(self) -> bool:
        """Whether nothing more is fed."""
        return self._halted or self._winding_down or self._error is not None or self.held.gone is not None

    def feed_all(self) -> None:
        """The feeding thread: each draw, while it is the shard's turn and there is room behind the engine."""
        order, writer, quality = self._runner.order, self._runner.writer, self._job.spec.quality
        rank = order.place(self._job.priority, remote=self.store.remote)
        try:
            while True:
                if not self._waiting:
                    order.leave(rank)
                    if quality is None:
                        return
                    # Items may need another draw.
                    with self._changed:
                        self._changed.wait_for(lambda: self._waiting or not self._unsettled or self._stopped)
                if not self._waiting or not order.take(rank, lambda: self._stopped):
                    return
                while writer.full and not self._stopped:
                    self._clock.sleep(ROOM_POLL_SECONDS)
                with self._changed:
                    if self._stopped:
                        return
                    draw = self._feeding = self._waiting.popleft()
                self.feed(draw)
                with self._changed:
                    self._feeding = None
                    self._changed.notify_all()
        except Exception as error:
            log.exception("feeder failed")
            self._end_work(error)
        finally:
            order.leave(rank)

    def feed(self, draw: ItemDraw) -> None:
        """Hands a draw to the pipeline, which may wait for room. This is the one place that calls it."""
        pipeline, index = self._pipeline, draw.line.index
        assert pipeline is not None
        try:
            draw.request = self._builder.build(draw.line, draw.number)
            draw.sampled = pipeline.capabilities.sampling and draw.request.generation.temperature != 0
            with self._changed:
                draw.started_at, draw.entered_at = self._clock.monotonic(), self._runner.timer.change(+1)
                self._in_engine[index] = draw
            draw.handle = pipeline.start(draw.request, partial(self._made, draw))
        except NightjarError as error:
            with self._changed:
                self._leave(draw)
            self.settle(draw, error)
            return
        with self._changed:
            if self._halted:
                self._leave(draw)
            wanted = self._in_engine.pop(index, None) is not None
            if wanted:
                # The wait for room is the engine's: an item's own time starts now.
                draw.started_at = self._clock.monotonic()
                self._in_engine[index] = draw
        if not wanted:
            draw.handle.cancel()

    def _made(self, draw: ItemDraw, event: Event) -> None:
        """The engine has answered."""
        assert not isinstance(event, AudioChunk), "whole utterances have no chunks"
        with self._changed:
            # One that nobody waits for has left before.
            if not self._leave(draw):
                return
            # In the same step: at no time is an item that was begun in no state.
            self._writing.add(draw.line.index)
            self._answered += 1
        made = event.speech if isinstance(event, SpeechDone) else event.error
        # A failure that another seed may mend is a draw that did not pass its checks.
        redrawn = self._job.spec.quality is not None and not isinstance(made, Speech) and made.code in REDRAWN
        if isinstance(made, Speech) or redrawn:
            writer = self._runner.writer
            writer.run(partial(writer.work, self, draw, made))
        else:
            self.settle(draw, made)

    def _leave(self, draw: ItemDraw) -> bool:
        """Takes a draw out of the engine; False: it was not in it. Under the lock."""
        if self._in_engine.pop(draw.line.index, None) is None:
            return False
        draw.engine_ms = round((self._runner.timer.change(-1) - draw.entered_at) * 1000)
        return True

    def settle(self, draw: ItemDraw, answer: Answer) -> None:
        """Takes what became of a draw: an outcome (of an item only the first one counts), another draw, or
        an error."""
        index = draw.line.index
        outcome = self._judged(draw, answer) if isinstance(answer, BaseException) else answer
        with self._changed:
            self._writing.discard(index)
            if isinstance(outcome, History):
                if not self._stopped:
                    self._waiting.appendleft(ItemDraw(draw.line, draw.number + 1, draw.last, outcome))
            elif outcome is not None and index in self._unsettled:
                self._unsettled.discard(index)
                self._outcomes.append(outcome)
            # Once is enough: whoever takes outcomes looks before it waits.
            enough = not self._unsettled or len(self._outcomes) == self._times.commit_items
            if enough or self._halted or not isinstance(outcome, Done | Failed):
                self._changed.notify_all()
        # It may be the one that a pack has waited for.
        self._flush_packs()

    def _judged(self, draw: ItemDraw, error: BaseException) -> Failed | None:
        """The outcome of an item by an error that is its own; None where it gets none here.

        | error | what ends |
        |---|---|
        | the lease is gone, nobody wants the outcome | nothing: the item runs again |
        | a full store, a crashed engine, meters that cannot be opened | the work on the shard |
        | any other | the item |
        """
        if isinstance(error, LeaseGoneError | CancelledError):
            return None
        if not isinstance(error, NightjarError):
            log.error("item failed unexpectedly", index=draw.line.index, exc_info=error)
            message = f"The speech could not be made or stored: {error!r}"
            error = SynthesisError(ErrorCode.SYNTH_ENGINE, message)
        elif isinstance(error, ModelError) or error.code in _OF_THE_SHARD:
            self._end_work(error)
            return None
        engine_ms = draw.history.engine_ms + draw.engine_ms
        return Failed(draw.line.index, error.code, str(error), draw.history.draws, engine_ms=engine_ms)

    def _end_work(self, error: BaseException) -> None:
        """Ends the work on the whole shard with an error that is not an item's own."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants outcomes any more."""
        ended = self._closed or self._error is not None
        return ended or self.held.gone not in (None, GoneReason.DRAINED)

    @property
    def _over(self) -> bool:
        """Whether every item has its outcome; when it winds down, every item that was begun: that is about
        to be fed, in the engine, or being written."""
        if self._winding_down:
            return not (self._feeding or self._in_engine or self._writing)
        return not self._unsettled

    @property
    def finished(self) -> bool:
        """Whether it is over and every outcome was taken."""
        with self._changed:
            return self._over and not self._outcomes

    def _only_waits_for(self, stored: int) -> bool:
        """Whether the items that are on their way are as many as wait to be stored together, and no others
        will come."""
        with self._changed:
            if not self._stopped:
                return len(self._unsettled) <= stored
            # What is aborted does not come.
            coming = not self._halted and (self._feeding or self._in_engine)
            return not coming and len(self._writing) <= stored

    def _flush_packs(self) -> None:
        if self.packs is not None:
            self.packs.flush_due()

    def _collect(self, pipeline: Pipeline) -> bool:
        """Commits outcomes until the shard is finished. Returns whether some items are left for another
        attempt."""
        times = self._times
        committed: list[Outcome] = []
        due_at = look_at = self._clock.monotonic() + times.commit_seconds
        while not self.finished:
            self.held.check()
            if self._clock.monotonic() >= look_at:
                look_at = self._clock.monotonic() + times.commit_seconds
                if self._is_paused():
                    self.wind_down()
            self._flush_packs()
            batch = self.take(due_at)
            if batch:
                self._commit(batch)
                committed += batch
            if self.expire():
                self._runner.pipelines.discard(pipeline)
                raise SynthesisError(
                    ErrorCode.SYNTH_ENGINE, "The engine takes no more requests; it is opened again."
                )
            if batch or self._clock.monotonic() >= due_at:
                due_at = self._clock.monotonic() + times.commit_seconds
        if self._unsettled:
            raise LeaseGoneError(GoneReason.PAUSED)
        broken = any(isinstance(one, Failed) and one.code is ErrorCode.SYNTH_ENGINE for one in committed)
        if broken and not any(isinstance(one, Done) for one in committed):
            log.warning("the engine failed every item; it is opened again", model=self._job.spec.model)
            self._runner.pipelines.discard(pipeline)
        # The ledger keeps these open for another attempt.
        open_items, attempts = self._lease.open_items, self._job.max_attempts
        return any(
            isinstance(one, Failed) and one.code.retryable and open_items[one.index][1] + 1 < attempts
            for one in committed
        )

    def take(self, due_at: float, poll_seconds: float = POLL_SECONDS) -> list[Outcome]:
        """Outcomes when a commit is worth it: there are enough, the shard is finished, or it is `due_at`.
        Empty when `poll_seconds` pass first. Raises the error that ended the work early, such as that of a
        full store.
        """
        maximum = self._times.commit_items

        def is_worth_it() -> bool:
            enough = len(self._outcomes) >= maximum or self._over
            return enough or self._error is not None or self.held.gone is not None

        with self._changed:
            seconds = min(poll_seconds, max(0.0, due_at - self._clock.monotonic()))
            worth_it = self._changed.wait_for(is_worth_it, seconds)
            if self._error is not None:
                raise self._error
            if not worth_it and self._clock.monotonic() < due_at:
                return []
            taken, self._outcomes = self._outcomes[:maximum], self._outcomes[maximum:]
        return taken

    def expire(self) -> bool:
        """Fails items that were in the engine for too long (`synth.timeout`) and cancels their requests.
        Returns whether the engine is stuck: it has not even accepted the next request for so long.
        """
        seconds = self._runner.settings.worker.item_timeout_seconds
        started_before = self._clock.monotonic() - seconds
        with self._changed:
            late = [draw for draw in self._in_engine.values() if draw.started_at <= started_before]
            for draw in late:
                self._leave(draw)
                self._writing.add(draw.line.index)
            stuck = self._feeding in late
        message = f"The item took more than {seconds:g} s in the engine."
        for draw in late:
            self.settle(draw, SynthesisError(ErrorCode.SYNTH_TIMEOUT, message))
        _cancel(late)
        return stuck

    def wind_down(self) -> None:
        """Feeds no more. Items that were not begun and draws that would follow stay without an outcome."""
        self._winding_down = True
        self._wake()

    def _close(self) -> None:
        """Ends the work: nothing more is fed, and requests in the engine are cancelled without an outcome.
        Waits a while for what is being written, and commits it. A failure costs time only: the items run
        again, and adopt their objects.
        """
        with self._changed:
            self._halted = True
            ended = list(self._in_engine.values())
            for draw in ended:
                self._leave(draw)
            self._changed.notify_all()
        _cancel(ended)
        self._flush_packs()
        with self._changed:
            seconds = WRITING_SECONDS if self.held.gone in (None, GoneReason.DRAINED) else 0.0
            self._changed.wait_for(lambda: not self._writing, seconds)
            left, self._outcomes = self._outcomes, []
            self._unsettled.clear()
            self._closed = True
        if not left or self.held.gone not in (None, GoneReason.DRAINED):
            return
        try:
            self._commit(left)
        except (LeaseGoneError, NightjarError) as error:
            log.warning("last outcomes of a shard were not committed", items=len(left), error=str(error))

    def _is_paused(self) -> bool:
        """Whether the job was paused. Raises `LeaseGoneError` for a cancelled job, without waiting for a
        heartbeat."""
        state = self.held.retrying(lambda: self._runner.ledger.job_state(self._job.id))
        if state not in WORKING:
            self._lose()
        return state is JobState.PAUSED

    def _lose(self) -> None:
        """The ledger does not know this lease any more."""
        self.held.give_up(GoneReason.LOST)
        raise LeaseGoneError(GoneReason.LOST)

    def _commit(self, batch: list[Outcome]) -> None:
        """Commits outcomes, fenced by the epoch. Those that could not be committed are put back."""
        runner, retrying = self._runner, self.held.retrying
        try:
            with runner.metrics.commit_seconds.time():
                # Objects of done items must survive a power cut.
                retrying(self.store.sync)
                if retrying(lambda: runner.ledger.commit(self._lease.ticket, batch)).lost:
                    self._lose()
        except (LeaseGoneError, NightjarError):
            with self._changed:
                self._outcomes[:0] = batch
            raise
        runner.metrics.count(batch)
        if any(not isinstance(outcome, Failed) or not outcome.code.retryable for outcome in batch):
            report(WorkerReport(finished=True))

    def _finish(self, store: ObjectStore, lines: Sequence[ShardLine], retry_later: bool) -> None:
        ledger, lease = self._runner.ledger, self._lease

        def put_manifest() -> tuple[str, str]:
            made = ledger.shard_audio(self._job.id, lease.shard_no)
            return put_shard_manifest(store, self._job, lease.shard_no, made, lines)

        manifest = (None, None) if retry_later else self.held.retrying(put_manifest)
        if not self.held.retrying(lambda: ledger.finish_shard(lease.ticket, *manifest)):
            self._lose()

    def _give_up(self, reason: GoneReason) -> ShardEnd:
        if reason not in (GoneReason.DRAINED, GoneReason.PAUSED):
            self._runner.metrics.lease_lost.inc()
            log.warning("lease gone", reason=reason.value)
            return ShardEnd.LOST
        why = "drain" if reason is GoneReason.DRAINED else "pause"
        try:
            self._runner.ledger.release(self._lease.ticket, why)
        except NightjarError as error:
            log.warning("lease not released; it will expire", error=str(error))
        return ShardEnd.RELEASED

    def _fail(self, code: ErrorCode, message: str) -> ShardEnd:
        ledger, ticket, retrying = self._runner.ledger, self._lease.ticket, self.held.retrying
        mine = code not in WORKER_FAULTS or self._runner.alone
        try:
            if not mine and retrying(lambda: ledger.refuse(ticket, code, message)):
                what = "this worker cannot run the job; its shard is left to another one"
                log.error(what, code=code.value, error=message)
                return ShardEnd.REFUSED
            log.error("shard failed", code=code.value, error=message)
            retrying(lambda: ledger.fail_shard(ticket, code, message))
        except LeaseGoneError as gone:
            return self._give_up(gone.reason)
        except NightjarError as error:
            log.warning("failed shard not reported; its lease will expire", error=str(error))
        return ShardEnd.FAILED


def _cancel(draws: Sequence[ItemDraw]) -> None:
    """Ends requests in the engine; one that waits for room there is ended when it has it."""
    for draw in draws:
        if draw.handle is not None:
            draw.handle.cancel()
