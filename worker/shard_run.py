"""The run of one leased shard: reads its items, feeds them to the pipeline, commits their outcomes and writes its
manifest."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial

import structlog
from msgspec import structs

from jobs.codes import codec_of
from jobs.dialogue import spoken_text
from jobs.export.manifest import put_shard_manifest
from jobs.ledger import Ledger
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
from jobs.settings import Settings
from jobs.shard_file import ShardLine, read_shard
from jobs.store.base import ObjectStore
from jobs.worker_group import WorkerReport
from pipelines.errors import ErrorCode, ModelError, NightjarError, StoreError, SynthesisError, engine_error
from pipelines.recording import KEPT_BYTES, SizedCache
from pipelines.request import AudioChunk, CodecIdentity, Event, Pipeline, Speech
from pipelines.request import Done as SpeechDone
from pipelines.text_units import parts_of, unit_request
from worker.admission import Demand, ItemCounts
from worker.feeding import EngineTimer, FeedingOrder, RequestBuilder
from worker.leases import MAX_REREADS, Clock, GoneReason, HeldLease, HeldLeases, LeaseGoneError, ShardEnd
from worker.metrics import Metrics
from worker.models import PipelineCache
from worker.pack_writer import PackWriter
from worker.quality.verdict import REDRAWABLE, History
from worker.result_writer import MAX_BACKLOG, Answer, ItemDraw, LongItem, ResultWriter
from worker.supervisor import report

log = structlog.get_logger(__name__)

POLL_SECONDS, ROOM_POLL_SECONDS = 0.5, 0.02
#: Maximum time that a shard that stops early waits for results that are being stored.
WRITING_SECONDS = 5.0
#: Errors that are not the fault of an item, so they end the work on its shard.
_SHARD_ERRORS = LASTING_OUTAGES | {ErrorCode.WORKER_CRASH, ErrorCode.MODEL_UNREACHABLE}


@dataclass
class ShardRunner:
    """Runs leased shards with the resources that they share. Thread-safe; each thread runs one shard.

    All open items go to the pipeline, so the engine batches items of all shards in flight. Outcomes are committed in
    micro-batches, fenced by the lease's epoch. Calls to an unreachable ledger or store are retried until it ends.
    """

    ledger: Ledger
    store_for: Callable[[str], ObjectStore]
    pipelines: PipelineCache
    settings: Settings
    writer: ResultWriter
    leases: HeldLeases
    metrics: Metrics
    clock: Clock
    provenance: ProvenanceWriter | None = None
    demand: Demand = field(default_factory=Demand)
    #: Whether this is the only worker for its jobs. Then shards that it cannot run are not given back for other
    #: workers.
    only_worker: bool = False
    #: Called after a claimed shard is counted in `demand`.
    on_claimed: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.references = SizedCache[bytes](KEPT_BYTES, len)
        self.order, self.timer = FeedingOrder(), EngineTimer(self.clock)

    def run(self, lease: Lease) -> ShardEnd:
        """Runs a shard until it is finished or its lease ends. Does not raise."""
        held = self.leases.hold(lease)
        started_at = self.clock.monotonic()
        run = ShardRun(self, held)
        try:
            with self.demand.hold(run.counts):
                self.on_claimed()
                end = run.run()
        finally:
            self.leases.drop(held)
        self.metrics.shards.labels(outcome=end).inc()
        seconds = round(self.clock.monotonic() - started_at, 2)
        log.info("shard ended", outcome=end, items=len(lease.open_items), seconds=seconds)
        return end


class ShardRun:
    """A run of one leased shard. Every item gets one outcome; the state of all items is under one lock.

    At any time an item has exactly one of four states: it waits, is in the engine, is being written, or is settled. A
    separate thread feeds the pipeline, threads of the pipeline and the writer process the items, and the thread of
    `run` commits.
    """

    def __init__(self, runner: ShardRunner, held: HeldLease) -> None:
        self._runner = runner
        self.held = held
        self._lease = held.lease
        self._job = held.lease.job
        self._clock = runner.clock
        self._times = runner.settings.times
        #: Set by `run`; `packs`, `_builder` and `_pipeline` are set by `begin`.
        self.store: ObjectStore
        #: Stores the artifacts of a job with packs; None if each artifact is a separate object.
        self.packs: PackWriter | None = None
        self._builder: RequestBuilder
        self._pipeline: Pipeline | None = None
        #: The codec of a job that makes codes.
        self.codec: CodecIdentity | None = None
        self._changed = threading.Condition()
        #: Draws to feed. A draw that follows a rejected one is fed before the first draws of other items.
        self._waiting = deque[ItemDraw]()
        self._unsettled = set[int]()
        self._in_engine = set[ItemDraw]()
        #: The draw that the feeding thread is passing to the engine, which may not have it yet.
        self._feeding: ItemDraw | None = None
        self._answered = 0
        #: Draws that left the engine and are not yet settled.
        self._writing = set[ItemDraw]()
        self._outcomes: list[Outcome] = []
        #: Whether feeding has stopped while items in the engine may finish.
        self._winding_down = False
        #: Whether feeding has stopped and items in the engine are cancelled.
        self._halted = False
        #: Whether outcomes are no longer accepted.
        self._closed = False
        self._error: BaseException | None = None
        held.on_gone = self._wake

    def run(self) -> ShardEnd:
        """Runs the shard. Does not raise."""
        try:
            self._work()
            return "finished"
        except LeaseGoneError as gone:
            return self._give_up(gone.reason)
        except NightjarError as error:
            return self._fail(error.code, str(error))
        except Exception as error:
            log.exception("shard runner failed")
            return self._fail(ErrorCode.WORKER_CRASH, f"The shard runner failed: {error!r}")

    def counts(self) -> ItemCounts:
        """The progress of the shard. Until the pipeline is open, all items count as open."""
        if self._pipeline is None:
            return ItemCounts(len(self._lease.open_items), 0, 0)
        waiting = 0 if self._stopped else len(self._waiting)
        return ItemCounts(len(self._in_engine) + waiting, self._answered, len(self._writing))

    def _work(self) -> None:
        lease, ledger, retrying = self._lease, self._runner.ledger, self.held.retrying
        store = self.store = self._runner.store_for(self._job.store_url)
        self._runner.writer.ensure_threads(store, self._job.spec.format)
        retrying(lambda: store.confirm(self._job.store_identity))
        lines = retrying(lambda: read_shard(store, lease.input_key, lease.input_sha256), MAX_REREADS)
        todo = [line for line in lines if line.index in lease.open_items]
        if missing := lease.open_items.keys() - {line.index for line in todo}:
            raise StoreError(
                ErrorCode.STORE_MISSING,
                f"{len(missing)} items of the shard are missing in {lease.input_key}.",
            )
        retry_later = False
        if todo:
            spec = self._job.spec
            self.codec = codec_of(spec.model) if spec.output else None
            with self._runner.pipelines.use(spec.model, self.held.check, spec.output != "codes") as pipeline:
                if (provenance := self._runner.provenance) is not None:
                    retrying(lambda: provenance.note(store, self._job, pipeline.info))
                retry_later = self._synthesize(todo, pipeline)

        def put_manifest() -> tuple[str, str]:
            return put_shard_manifest(
                store, self._job, lease.shard_no, ledger.shard_audio(self._job.id, lease.shard_no), lines
            )

        manifest = (None, None) if retry_later else retrying(put_manifest)
        if not retrying(lambda: ledger.finish_shard(lease.ticket, *manifest)):
            self._raise_lost()

    def _synthesize(self, todo: Sequence[ShardLine], pipeline: Pipeline) -> bool:
        """Synthesizes every line and commits the outcomes. Returns whether items are left for another attempt.

        Raises `LeaseGoneError` if the job was paused, after the items in the engine are committed.
        """
        if self._is_paused():  # while the model was being opened
            raise LeaseGoneError("paused")
        drawn_before: Mapping[int, int] = {}
        if self._job.spec.quality is not None:
            # An item of `nightjar retry` continues with its next draw; draws of a lost worker are repeated.
            places = self._job.id, todo[0].index, todo[-1].index
            drawn_before = self.held.retrying(lambda: self._runner.ledger.drawn_before(*places))
        self.begin(pipeline, todo, drawn_before)
        in_context, name = contextvars.copy_context().run, f"feeder-{self._lease.shard_no}"
        threading.Thread(target=in_context, args=(self.feed_all,), name=name, daemon=True).start()
        try:
            return self._collect(pipeline)
        finally:
            self._close()
            if pipeline.stats().state == "broken":
                self._runner.pipelines.discard(pipeline)

    def begin(self, pipeline: Pipeline, lines: Sequence[ShardLine], drawn_before: Mapping[int, int]) -> None:
        """Plans the first draws. `drawn_before`: index of a reopened item -> number of its earlier draws."""
        spec, able = self._job.spec, pipeline.capabilities
        more = 0 if spec.quality is None else spec.quality.draws - 1
        self._builder = RequestBuilder(self.held, self.store, self._runner.references)
        for line in lines:
            first = drawn_before.get(line.index, 0)
            text = "" if line.role is None else spoken_text(line.messages)
            # A text that is too long for one request is spoken in parts.
            parts = parts_of(text, able) if len(text) > able.max_text_characters else ()
            long = LongItem(parts, first, spec, partial(line.seed, spec.seed)) if parts else None
            for part in range(max(len(parts), 1)):
                self._waiting.append(ItemDraw(line, first, first + more, long=long, part=part))
        self._unsettled = {line.index for line in lines}
        if spec.pack is True:
            run = self._runner.writer.threads.submit
            self.packs = PackWriter(self.held, self.store, self._times, self._clock, run, self._are_last)
        self._pipeline = pipeline
        self._joules_before = pipeline.stats().joules or 0.0
        self._busy_before = self._runner.timer.busy_seconds

    @property
    def _stopped(self) -> bool:
        """Whether feeding has stopped."""
        return self._halted or self._winding_down or self._error is not None or self.held.gone is not None

    def feed_all(self) -> None:
        """The feeding thread: feeds each draw when it is the shard's turn and the writer has capacity."""
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
                while (writer.threads.waiting >= MAX_BACKLOG or writer.meters.full) and not self._stopped:
                    self._clock.sleep(ROOM_POLL_SECONDS)
                with self._changed:
                    if self._stopped:
                        return
                    draw = self._waiting.popleft()
                    # Otherwise another part of the item has failed.
                    self._feeding = draw if draw.line.index in self._unsettled else None
                if self._feeding is not None:
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
        """Passes a draw to the pipeline; the call may wait for a free slot. Only this method starts requests."""
        pipeline = self._pipeline
        assert pipeline is not None
        try:
            draw.request = self._builder.build(draw.line, draw.number)
            if draw.long is not None:
                draw.request = unit_request(draw.request, draw.long.parts[draw.part].text, draw.part)
            draw.sampled = pipeline.capabilities.sampling and draw.request.generation.temperature != 0
            with self._changed:
                draw.started_at, draw.entered_at = self._clock.monotonic(), self._runner.timer.change(+1)
                self._in_engine.add(draw)
            draw.handle = pipeline.start(draw.request, partial(self._made, draw))
        except NightjarError as error:
            with self._changed:
                self._leave(draw)
            self.settle(draw, error)
            return
        with self._changed:
            if self._halted:
                self._leave(draw)
            # The time limit of the item starts after the wait for a slot.
            draw.started_at = self._clock.monotonic()
            wanted = draw in self._in_engine
        if not wanted:
            draw.handle.cancel()

    def _made(self, draw: ItemDraw, event: Event) -> None:
        """Handles the answer of the engine."""
        assert not isinstance(event, AudioChunk), "whole utterances have no chunks"
        with self._changed:
            if not self._leave(draw):
                # The draw was cancelled or has timed out.
                return
            # Changed without releasing the lock in between, so that the item always has exactly one state.
            self._writing.add(draw)
            self._answered += 1
        made, writer = event.speech if isinstance(event, SpeechDone) else event.error, self._runner.writer
        # A failure that another seed may avoid counts as a draw that failed its checks.
        redrawable = REDRAWABLE if self._job.spec.quality is not None else frozenset[ErrorCode]()
        if isinstance(made, Speech) or made.code in redrawable:
            writer.threads.submit(writer.work, self, draw, made)
        else:
            self.settle(draw, made)

    def _leave(self, draw: ItemDraw) -> bool:
        """Removes a draw from those in the engine; False if it was not among them. The caller must hold the lock."""
        if draw not in self._in_engine:
            return False
        self._in_engine.remove(draw)
        draw.engine_ms = round((self._runner.timer.change(-1) - draw.entered_at) * 1000)
        if draw.long is not None:
            draw.long.engine_ms += draw.engine_ms
        return True

    def settle(self, draw: ItemDraw, answer: Answer) -> None:
        """Accepts the answer for a draw: an outcome (only the first one of an item counts), a history (the item needs
        another draw), a kept part, or an error."""
        index = draw.line.index
        outcome = self._judged(draw, answer) if isinstance(answer, BaseException) else answer
        others: list[ItemDraw] = []
        with self._changed:
            self._writing.discard(draw)
            if isinstance(outcome, History):
                if not self._stopped:
                    self._waiting.appendleft(draw.following(outcome))
            elif isinstance(outcome, Done | Failed) and index in self._unsettled:
                self._unsettled.discard(index)
                self._outcomes.append(outcome)
                # The other parts of a failed item are not needed.
                others = [one for one in self._in_engine if draw.long and one.long is draw.long]
                for one in others:
                    self._leave(one)
            # The committing thread also checks before it waits, so it is notified only once per batch.
            enough = not self._unsettled or len(self._outcomes) == self._times.commit_items
            if enough or self._halted or not isinstance(outcome, Done | Failed):
                self._changed.notify_all()
        if others:
            _cancel(others)
        if self.packs is not None:
            # A pack may have waited for this item.
            self.packs.flush_due()

    def _judged(self, draw: ItemDraw, error: BaseException) -> Failed | None:
        """The outcome of an item after an error; None if it gets no outcome.

        | error | what the error ends |
        |---|---|
        | the lease ended, or the outcome is no longer needed | nothing: the item runs again |
        | a full store, a crashed engine, meters that cannot be opened | the work on the shard |
        | any other | the item |
        """
        if isinstance(error, LeaseGoneError | CancelledError):
            return None
        if not isinstance(error, NightjarError):
            log.error("item failed unexpectedly", index=draw.line.index, exc_info=error)
            error = engine_error(f"The speech could not be synthesized or stored: {error!r}")
        elif isinstance(error, ModelError) or error.code in _SHARD_ERRORS:
            self._end_work(error)
            return None
        failed = draw.line.index, error.code, f"{draw.where}{error}", draw.history.draws
        return Failed(*failed, engine_ms=draw.spent_ms)

    def _end_work(self, error: BaseException) -> None:
        """Ends the work on the shard with an error that is not the fault of an item."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def abandoned(self) -> bool:
        """Whether outcomes are no longer needed."""
        return self._closed or self._error is not None or self.held.gone not in (None, "drained")

    @property
    def _over(self) -> bool:
        """Whether every item has its outcome. While winding down, only items that are being fed, in the engine or being
        written count."""
        if self._winding_down:
            return not (self._feeding or self._in_engine or self._writing)
        return not self._unsettled

    @property
    def finished(self) -> bool:
        """Whether all items have outcomes, and all outcomes were taken."""
        with self._changed:
            return self._over and not self._outcomes

    def _are_last(self, packed: int) -> bool:
        """Whether no items except the `packed` ones of the open pack are in progress, and no others will follow."""
        with self._changed:
            if not self._stopped:
                return len(self._unsettled) <= packed
            # Cancelled items do not follow.
            others_follow = not self._halted and (self._feeding or self._in_engine)
            return not others_follow and len(self._writing) <= packed

    def _collect(self, pipeline: Pipeline) -> bool:
        """Commits outcomes until the shard is finished. Returns whether items are left for another attempt."""
        times = self._times
        committed: list[Outcome] = []
        due_at = check_at = self._clock.monotonic() + times.commit_seconds
        while not self.finished:
            self.held.check()
            if self._clock.monotonic() >= check_at:
                check_at = self._clock.monotonic() + times.commit_seconds
                if self._is_paused():
                    self.wind_down()
            if self.packs is not None:
                self.packs.flush_due()
            batch = self.take(due_at)
            if batch:
                self._commit(batch)
                committed += batch
            if self.expire():
                self._runner.pipelines.discard(pipeline)
                raise engine_error("The engine accepts no more requests and is reopened.")
            if batch or self._clock.monotonic() >= due_at:
                due_at = self._clock.monotonic() + times.commit_seconds
        if self._unsettled:
            raise LeaseGoneError("paused")
        broken = any(isinstance(one, Failed) and one.code is ErrorCode.SYNTH_ENGINE for one in committed)
        if broken and not any(isinstance(one, Done) for one in committed):
            log.warning("the engine failed every item and is reopened", model=self._job.spec.model)
            self._runner.pipelines.discard(pipeline)
        # The ledger keeps these items pending for another attempt.
        open_items, attempts = self._lease.open_items, self._job.max_attempts
        return any(
            isinstance(one, Failed) and one.code.retryable and open_items[one.index][1] + 1 < attempts
            for one in committed
        )

    def take(self, due_at: float, poll_seconds: float = POLL_SECONDS) -> list[Outcome]:
        """Waits for outcomes and returns those to commit: when there are enough, when the shard is finished, or at
        `due_at`. Returns an empty list after `poll_seconds`. Raises the error that ended the work early, for example
        that of a full store.
        """
        maximum = self._times.commit_items
        with self._changed:
            seconds = min(poll_seconds, max(0.0, due_at - self._clock.monotonic()))
            is_due = self._changed.wait_for(
                lambda: len(self._outcomes) >= maximum or self._over or self._error or self.held.gone, seconds
            )
            if self._error is not None:
                raise self._error
            if not is_due and self._clock.monotonic() < due_at:
                return []
            taken, self._outcomes = self._outcomes[:maximum], self._outcomes[maximum:]
        return taken

    def expire(self) -> bool:
        """Fails items that have been in the engine too long (`synth.timeout`) and cancels their requests. Returns
        whether the engine is stuck, that is, it did not accept the request that is being fed within that time.
        """
        seconds = self._runner.settings.worker.item_timeout_seconds
        started_before = self._clock.monotonic() - seconds
        with self._changed:
            late = [draw for draw in self._in_engine if draw.started_at <= started_before]
            for draw in late:
                self._leave(draw)
                self._writing.add(draw)
            stuck = self._feeding in late
        message = f"The item took more than {seconds:g} s in the engine."
        for draw in late:
            self.settle(draw, SynthesisError(ErrorCode.SYNTH_TIMEOUT, message))
        _cancel(late)
        return stuck

    def wind_down(self) -> None:
        """Stops feeding. Items that were not started, or that need another draw, get no outcome."""
        self._winding_down = True
        self._wake()

    def _close(self) -> None:
        """Ends the work: stops feeding, cancels the requests in the engine, whose items get no outcome, waits a short
        time for items that are being written, and commits those. A failure costs only time: the items run again and
        adopt the objects that were stored.
        """
        with self._changed:
            self._halted = True
            ended = list(self._in_engine)
            for draw in ended:
                self._leave(draw)
            self._changed.notify_all()
        _cancel(ended)
        if self.packs is not None:
            self.packs.flush_due()
        with self._changed:
            seconds = WRITING_SECONDS if self.held.gone in (None, "drained") else 0.0
            self._changed.wait_for(lambda: not self._writing, seconds)
            left, self._outcomes = self._outcomes, []
            self._unsettled.clear()
            self._closed = True
        if not left or self.held.gone not in (None, "drained"):
            return
        try:
            self._commit(left)
        except (LeaseGoneError, NightjarError) as error:
            log.warning("last outcomes of a shard were not committed", items=len(left), error=str(error))

    def _is_paused(self) -> bool:
        """Whether the job is paused. Raises `LeaseGoneError` for a cancelled job."""
        state = self.held.retrying(lambda: self._runner.ledger.job_state(self._job.id))
        if state not in WORKING:
            self._raise_lost()
        return state is JobState.PAUSED

    def _raise_lost(self) -> None:
        """Gives up a lease that the ledger no longer accepts."""
        self.held.give_up("lost")
        raise LeaseGoneError("lost")

    def _commit(self, batch: list[Outcome]) -> None:
        """Commits outcomes, fenced by the epoch. After a failure they are put back into the list of outcomes."""
        runner, retrying = self._runner, self.held.retrying
        assert self._pipeline is not None
        # The energy of the engine's GPU since this shard began, by the time in which the engine had work.
        joules, seconds = self._pipeline.stats().joules, runner.timer.busy_seconds - self._busy_before
        if joules and seconds and (watts := (joules - self._joules_before) / seconds) > 0:
            batch = [structs.replace(one, energy_mj=round(one.engine_ms * watts)) for one in batch]
        try:
            with runner.metrics.commit_seconds.time():
                # The objects of done items must survive a power cut.
                retrying(self.store.sync)
                if retrying(lambda: runner.ledger.commit(self._lease.ticket, batch)).lost:
                    self._raise_lost()
        except (LeaseGoneError, NightjarError):
            with self._changed:
                self._outcomes[:0] = batch
            raise
        runner.metrics.count(batch)
        if any(not isinstance(outcome, Failed) or not outcome.code.retryable for outcome in batch):
            report(WorkerReport(finished=True))

    def _give_up(self, reason: GoneReason) -> ShardEnd:
        if reason not in ("drained", "paused"):
            self._runner.metrics.lease_lost.inc()
            log.warning("lease lost", reason=reason)
            return "lost"
        why = "drain" if reason == "drained" else "pause"
        try:
            self._runner.ledger.release(self._lease.ticket, why)
        except NightjarError as error:
            log.warning("lease not released; it will expire", error=str(error))
        return "released"

    def _fail(self, code: ErrorCode, message: str) -> ShardEnd:
        ledger, ticket, retrying = self._runner.ledger, self._lease.ticket, self.held.retrying
        refusable = code in WORKER_FAULTS and not self._runner.only_worker
        try:
            if refusable and retrying(lambda: ledger.refuse(ticket, code, message)):
                what = "this worker cannot run the job; its shard is given back for another worker"
                log.error(what, code=code.value, error=message)
                return "refused"
            log.error("shard failed", code=code.value, error=message)
            retrying(lambda: ledger.fail_shard(ticket, code, message))
        except LeaseGoneError as gone:
            return self._give_up(gone.reason)
        except NightjarError as error:
            log.warning("failed shard not reported; its lease will expire", error=str(error))
        return "failed"


def _cancel(draws: Sequence[ItemDraw]) -> None:
    """Cancels requests in the engine. A request that still waits for a slot is cancelled when it gets one."""
    for draw in draws:
        if draw.handle is not None:
            draw.handle.cancel()
