"""The shard runner: one leased shard, from its input to its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from jobs.child_process import say_finished
from jobs.export.manifest import put_shard_manifest
from jobs.ledger.records import Done, Failed, JobState, Outcome
from jobs.ledger.states import WORKER_FAULTS, WORKING
from jobs.provenance import ProvenanceBook
from jobs.shard_file import ShardLine, read_shard
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Pipeline, engine_info
from worker.demand import Demand
from worker.feeder import Feeder
from worker.feeding_order import FeedingOrder
from worker.leases import DOUBTS, Clock, GoneReason, HeldLease, LeaseBook, LeaseGoneError, SystemClock
from worker.metrics import Metrics
from worker.pack_writer import PackWriter
from worker.pipeline_cache import PipelineCache
from worker.request_builder import ReferenceCache, RequestBuilder
from worker.result_writer import ResultWriter
from worker.shard_progress import EngineTimer, ShardProgress

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Lease
    from jobs.settings import Settings

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.5
#: How long a shard that stops early waits for speech that is made and not written yet.
WRITING_SECONDS = 5.0


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


class ShardRunner:
    """Runs leased shards; safe to use from several threads at once, one shard each.

    Every open item goes to the pipeline at once, so the engine sees the items of all shards in flight. Outcomes are
    committed in micro-batches, fenced by the lease's epoch. Calls to a ledger or store that is away are retried for as long as
    the lease lives.
    """

    def __init__(
        self,
        ledger: Ledger,
        store_for: Callable[[str], ObjectStore],
        pipelines: PipelineCache,
        settings: Settings,
        *,
        writer: ResultWriter,
        leases: LeaseBook,
        metrics: Metrics,
        clock: Clock | None = None,
        provenance: ProvenanceBook | None = None,
        demand: Demand | None = None,
        alone: bool = False,
    ) -> None:
        """`alone`: no worker but this one runs its jobs, so what it cannot run it does not give back."""
        self._ledger = ledger
        self._store_for = store_for
        self._pipelines = pipelines
        self._settings = settings
        self._writer = writer
        self._leases = leases
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._references = ReferenceCache()
        self._timer = EngineTimer(self._clock)
        self._order = FeedingOrder()
        self._provenance = provenance
        self._demand = demand
        self._alone = alone

    def run(self, lease: Lease) -> ShardEnd:
        """Works on a shard until it is finished or its lease is gone. Raises nothing."""
        held = self._leases.hold(lease)
        started_at = self._clock.monotonic()
        try:
            end = self._guarded(held)
        finally:
            self._leases.drop(held)
        self._metrics.shards.labels(outcome=end.value).inc()
        seconds = round(self._clock.monotonic() - started_at, 2)
        log.info("shard ended", outcome=end.value, items=len(lease.open_items), seconds=seconds)
        return end

    def _guarded(self, held: HeldLease) -> ShardEnd:
        try:
            self._work(held)
            return ShardEnd.FINISHED
        except LeaseGoneError as gone:
            return self._give_up(held, gone.reason)
        except NightjarError as error:
            return self._fail(held, error.code, str(error))
        except Exception as error:
            log.exception("shard runner failed")
            return self._fail(held, ErrorCode.WORKER_CRASH, f"The shard runner failed: {error!r}")

    def _work(self, held: HeldLease) -> None:
        lease = held.lease
        store = self._store_for(lease.job.store_url)
        self._writer.serve(store, lease.job.spec.format)
        held.retrying(lambda: store.confirm(lease.job.store_identity), self._metrics.waited_for)
        lines = held.retrying(lambda: read_shard(store, lease.input_key, lease.input_sha256), self._metrics.waited_for, DOUBTS)
        todo = [line for line in lines if line.index in lease.open_items]
        if missing := lease.open_items.keys() - {line.index for line in todo}:
            raise StoreError(ErrorCode.STORE_MISSING, f"{lease.input_key} lacks {len(missing)} items of its shard.")
        retry_later = False
        if todo:
            with self._pipelines.use(lease.job.spec.model, held.check) as pipeline:
                if (book := self._provenance) is not None:
                    held.retrying(lambda: book.note(store, lease.job, engine_info(pipeline)), self._metrics.waited_for)
                retry_later = self._synthesize(held, store, todo, pipeline)
        self._finish(held, store, lines, retry_later)

    def _synthesize(self, held: HeldLease, store: ObjectStore, todo: Sequence[ShardLine], pipeline: Pipeline) -> bool:
        """Makes a committed outcome of every line. Returns whether some items are left for another attempt.

        Raises `LeaseGoneError` when the job was paused meanwhile, after the items that were begun are committed.
        """
        if self._is_paused(held):
            # While the model was opened.
            raise LeaseGoneError(GoneReason.PAUSED)
        progress = ShardProgress(
            held,
            todo,
            clock=self._clock,
            timer=self._timer,
            wake_at=self._settings.times.commit_items,
            drawn_before=self._drawn_before(held, todo),
        )
        packs = self._packs(held, store, progress)
        if self._demand is not None:
            self._demand.follow(held.lease.ticket, progress)
        build = RequestBuilder(held, store, self._references, self._metrics.waited_for).build
        turn = self._order.turn(held.lease.job.priority, remote=store.remote)
        feeder = Feeder(
            held, progress, build, pipeline=pipeline, writer=self._writer, store=store, clock=self._clock, packs=packs, turn=turn
        )
        feeder.start()
        try:
            return self._collect(held, store, progress, feeder, pipeline, packs)
        finally:
            left = feeder.close(WRITING_SECONDS if held.gone in (None, GoneReason.DRAINED) else 0.0)
            self._commit_once(held, store, left)
            if pipeline.stats().state == "broken":
                self._pipelines.discard(pipeline)

    def _drawn_before(self, held: HeldLease, todo: Sequence[ShardLine]) -> Mapping[int, int]:
        """How many draws open items have had: `nightjar retry` continues with the next ones; those of a lost worker are made again."""
        job = held.lease.job
        if job.spec.quality is None:
            return {}
        first, last = todo[0].index, todo[-1].index
        return held.retrying(lambda: self._ledger.drawn_before(job.id, first, last), self._metrics.waited_for)

    def _packs(self, held: HeldLease, store: ObjectStore, progress: ShardProgress) -> PackWriter | None:
        """What stores the artifacts of a job with packs; None: each is an object of its own."""
        if held.lease.job.spec.pack is not True:
            return None
        return PackWriter(
            held,
            store,
            pack_bytes=self._settings.times.pack_bytes,
            pack_seconds=self._settings.times.pack_seconds,
            clock=self._clock,
            on_retry=self._metrics.waited_for,
            run=self._writer.run,
            alone=progress.only_waits_for,
        )

    def _collect(
        self,
        held: HeldLease,
        store: ObjectStore,
        progress: ShardProgress,
        feeder: Feeder,
        pipeline: Pipeline,
        packs: PackWriter | None,
    ) -> bool:
        times = self._settings.times
        committed: list[Outcome] = []
        due_at = look_at = self._clock.monotonic() + times.commit_seconds
        while not progress.finished:
            held.check()
            if self._clock.monotonic() >= look_at:
                look_at = self._clock.monotonic() + times.commit_seconds
                if self._is_paused(held):
                    progress.wind_down()
            if packs is not None:
                packs.flush_due()
            batch = progress.take(times.commit_items, due_at, POLL_SECONDS)
            if batch:
                try:
                    self._commit(held, store, batch)
                except (LeaseGoneError, NightjarError):
                    progress.put_back(batch)
                    raise
                committed += batch
            if feeder.expire(self._settings.worker.item_timeout_seconds):
                self._pipelines.discard(pipeline)
                raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The engine takes no more requests; it is opened again.")
            if batch or self._clock.monotonic() >= due_at:
                due_at = self._clock.monotonic() + times.commit_seconds
        if progress.unfinished:
            raise LeaseGoneError(GoneReason.PAUSED)
        # One that is starting again by itself needs no second one beside it: items wait for it.
        if _engine_is_broken(committed) and pipeline.stats().state != "starting":
            log.warning("the engine failed every item; it is opened again", model=held.lease.job.spec.model)
            self._pipelines.discard(pipeline)
        return any(_runs_again(held.lease, outcome) for outcome in committed)

    def _is_paused(self, held: HeldLease) -> bool:
        """Whether the job was paused. Raises `LeaseGoneError` for a cancelled job, without waiting for a heartbeat."""
        state = held.retrying(lambda: self._ledger.job_state(held.lease.job.id), self._metrics.waited_for)
        if state not in WORKING:
            held.give_up(GoneReason.LOST)
            raise LeaseGoneError(GoneReason.LOST)
        return state is JobState.PAUSED

    def _commit(self, held: HeldLease, store: ObjectStore, batch: Sequence[Outcome]) -> None:
        ticket = held.lease.ticket
        with self._metrics.commit_seconds.time():
            # Objects of done items must survive a power cut.
            held.retrying(store.sync, self._metrics.waited_for)
            result = held.retrying(lambda: self._ledger.commit(ticket, batch), self._metrics.waited_for)
        if result.lost:
            held.give_up(GoneReason.LOST)
            raise LeaseGoneError(GoneReason.LOST)
        self._metrics.count(batch)
        if any(not isinstance(outcome, Failed) or not outcome.code.retryable for outcome in batch):
            say_finished()

    def _commit_once(self, held: HeldLease, store: ObjectStore, left: Sequence[Outcome]) -> None:
        """Commits what is left of a shard that stops early. A failure costs time only: the items run again, and adopt their objects."""
        if not left or held.gone not in (None, GoneReason.DRAINED):
            return
        try:
            self._commit(held, store, left)
        except (LeaseGoneError, NightjarError) as error:
            log.warning("last outcomes of a shard were not committed", items=len(left), error=str(error))

    def _finish(self, held: HeldLease, store: ObjectStore, lines: Sequence[ShardLine], retry_later: bool) -> None:
        lease = held.lease
        manifest: tuple[str, str] | tuple[None, None] = (None, None)
        if not retry_later:

            def put_manifest() -> tuple[str, str]:
                made = self._ledger.shard_audio(lease.job.id, lease.shard_no)
                return put_shard_manifest(store, lease.job, lease.shard_no, made, lines)

            manifest = held.retrying(put_manifest, self._metrics.waited_for)
        if not held.retrying(lambda: self._ledger.finish_shard(lease.ticket, *manifest), self._metrics.waited_for):
            held.give_up(GoneReason.LOST)
            raise LeaseGoneError(GoneReason.LOST)

    def _give_up(self, held: HeldLease, reason: GoneReason) -> ShardEnd:
        if reason not in (GoneReason.DRAINED, GoneReason.PAUSED):
            self._metrics.lease_lost.inc()
            log.warning("lease gone", reason=reason.value)
            return ShardEnd.LOST
        try:
            self._ledger.release(held.lease.ticket, "drain" if reason is GoneReason.DRAINED else "pause")
        except NightjarError as error:
            log.warning("lease not released; it will expire", error=str(error))
        return ShardEnd.RELEASED

    def _fail(self, held: HeldLease, code: ErrorCode, message: str) -> ShardEnd:
        try:
            if code in WORKER_FAULTS and not self._alone and self._refused(held, code, message):
                log.error("this worker cannot run the job; its shard is left to another one", code=code.value, error=message)
                return ShardEnd.REFUSED
            log.error("shard failed", code=code.value, error=message)
            held.retrying(lambda: self._ledger.fail_shard(held.lease.ticket, code, message), self._metrics.waited_for)
        except LeaseGoneError as gone:
            return self._give_up(held, gone.reason)
        except NightjarError as error:
            log.warning("failed shard not reported; its lease will expire", error=str(error))
        return ShardEnd.FAILED

    def _refused(self, held: HeldLease, code: ErrorCode, message: str) -> bool:
        """Whether the shard went back for another worker."""
        return held.retrying(lambda: self._ledger.refuse(held.lease.ticket, code, message), self._metrics.waited_for)


def _runs_again(lease: Lease, outcome: Outcome) -> bool:
    """Whether the ledger keeps this item open for another attempt."""
    if not isinstance(outcome, Failed) or not outcome.code.retryable:
        return False
    return lease.open_items[outcome.index][1] + 1 < lease.job.max_attempts


def _engine_is_broken(outcomes: Sequence[Outcome]) -> bool:
    failed = any(isinstance(outcome, Failed) and outcome.code is ErrorCode.SYNTH_ENGINE for outcome in outcomes)
    return failed and not any(isinstance(outcome, Done) for outcome in outcomes)
