"""What every worker process does beside its shards: heartbeats, dispatch, repair of the ledger's state,
manifests of ended jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from jobs.dispatch import Dispatcher, Publisher
from jobs.ledger.records import WorkerInfo
from jobs.notification import report_ends
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError, NotFoundError
from worker.admission import Demand
from worker.leases import Clock, LeaseBook
from worker.metrics import Metrics

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings


log = structlog.get_logger(__name__)

UP, DRAINING = "up", "draining"

#: Between a nudge and the run it asks for, so that one run serves several nudges.
NUDGE_SECONDS = 0.02
#: Before a manifest is tried again whose inputs are lost or damaged.
PAUSE_SECONDS = 600.0


class PeriodicTask:
    """A task that runs in a thread of its own: every `seconds`, and soon after a nudge. An error is logged
    once while it lasts."""

    def __init__(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        self._name = name
        self._seconds = seconds
        self._work = work
        self._nudged = threading.Event()
        self._stopping = False
        self._failing: ErrorCode | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        self._nudged.set()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        self._stopping = True
        self._nudged.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def run_once(self) -> None:
        try:
            self._work()
        except NightjarError as error:
            if error.code is not self._failing:
                log.warning("periodic task fails", task=self._name, code=error.code.value, error=str(error))
            self._failing = error.code
        except Exception:
            log.exception("periodic task failed unexpectedly", task=self._name)
        else:
            if self._failing is not None:
                log.info("periodic task works again", task=self._name)
            self._failing = None

    def _run(self) -> None:
        while not self._stopping:
            if self._nudged.wait(self._seconds) and not self._stopping:
                time.sleep(NUDGE_SECONDS)
            self._nudged.clear()
            if not self._stopping:
                self.run_once()


@dataclass(eq=False)
class Maintenance:
    """Registers the worker, extends its leases, hands out shards and reconciles.

    Heartbeats have a thread of their own: a broker that hangs must not cost a lease.
    """

    ledger: Ledger
    settings: Settings
    worker: WorkerInfo
    leases: LeaseBook
    metrics: Metrics
    clock: Clock
    publisher: Publisher
    #: Writes those of jobs that ended, and of those that have none yet.
    manifests: Manifests
    #: How many shards the worker can use.
    demand: Demand = field(default_factory=Demand)
    #: Reports ends to the operator's hook, in a thread of its own.
    report_ends: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        times = self.settings.times
        self._dispatcher = Dispatcher(self.ledger, self.settings, self.publisher)
        self._state = UP
        self._registered = False
        self._reconciled_at = self._depth_at = float("-inf")
        #: To be nudged when a shard ended: there may be room for another one.
        self.dispatches = PeriodicTask("dispatch", times.dispatch_seconds, self.dispatch)
        self._heartbeats = PeriodicTask("heartbeats", times.heartbeat_seconds, self.beat)
        #: To be nudged when a job may have ended: the operator's hook need not wait for the next look.
        self.reports = PeriodicTask("reports", times.reconcile_seconds, self.report_ends)
        self._tasks = (self.dispatches, self._heartbeats, self.reports)

    def start(self) -> None:
        """Registers the worker and starts the threads. Raises `ServiceError` when the ledger refuses this
        worker."""
        self.ledger.register_worker(self.worker)
        self._registered = True
        for task in self._tasks:
            task.start()
        self.dispatches.nudge()
        self.reports.nudge()

    def claimed(self) -> None:
        """A shard was claimed: the worker may be able to use more of them than it has said."""
        if self.demand.shards > self.worker.slots:
            self.dispatches.nudge()

    def drain(self) -> None:
        """The worker takes no more shards: others are told, and it dispatches no more."""
        self._state = DRAINING
        self._heartbeats.nudge()

    def stop(self) -> None:
        """Ends the threads and strikes the worker off. The ledger may be unreachable."""
        for task in self._tasks:
            task.stop()
        if not self._registered:
            return
        try:
            self.ledger.retire_worker(self.worker.id)
        except NightjarError as error:
            log.warning("worker not retired; it goes stale by itself", error=str(error))

    def beat(self) -> None:
        """One heartbeat of the worker and of all its leases."""
        sent_at = self.clock.monotonic()
        tickets = self.leases.tickets()
        if tickets:
            lost = self.ledger.heartbeat(self.worker.id, tickets, self.settings.times.lease_seconds)
            self.leases.renewed(tickets, lost, sent_at)
        self._report(self.demand.shards)

    def dispatch(self) -> None:
        """One pass of the reconciler, if it is time, and of the dispatcher."""
        if self._state != UP:
            return
        now = self.clock.monotonic()
        if now - self._reconciled_at >= self.settings.times.reconcile_seconds:
            self._reconciled_at = now
            self._reconcile()
        shards = self.demand.shards
        # Fewer at once would be written at each end of a shard, and more in the queue do no harm.
        if shards > self.worker.slots or shards < self.worker.slots / 2:
            self._report(shards)
        dispatched = self._dispatcher.run_once()
        self.metrics.dispatched.inc(dispatched)
        if now - self._depth_at >= self.settings.times.dispatch_seconds:
            self._depth_at = now
            self.metrics.queue_depth.set(self.publisher.queue_depth())

    def _report(self, shards: int) -> None:
        """A sign of life, with the number of shards that the worker can use."""
        worker = replace(self.worker, slots=shards)
        try:
            self.ledger.worker_heartbeat(worker.id, self._state, shards)
        except NotFoundError:
            self.ledger.register_worker(worker)
        self.worker = worker

    def _reconcile(self) -> None:
        report = self.ledger.reconcile(self.settings.times.queued_timeout_seconds)
        if report.changed:
            log.info("reconciled", **report.counts)
            for name, count in report.counts.items():
                self.metrics.reconciled.labels(what=name).inc(count)
        for job_id in {*report.ended_jobs, *report.without_manifest}:
            self.end_job(job_id)

    def end_job(self, job_id: str) -> None:
        """Writes the manifest and reports the end of a job, if it has ended."""
        self.manifests.put_if_over(job_id)
        self.reports.nudge()


def report_ended_jobs(ledger: Ledger, settings: Settings) -> None:
    """Reports the ends of jobs that are due to the operator's hook, and logs what became of it. A hook
    that fails holds up nothing."""
    for one in report_ends(ledger, settings):
        about = {"job": one.job_id, "attempt": one.attempt, "reason": one.reason}
        if not one.reason:
            log.info("end of the job reported", job=one.job_id)
        elif one.again_seconds is None:
            log.error("end of the job not reported; it is not tried again", **about)
        else:
            log.warning("end of the job not reported yet", **about, again_seconds=round(one.again_seconds, 1))


@dataclass(eq=False)
class Manifests:
    """Writes the manifests of jobs that have ended; any number of workers may do so. One that cannot be
    written is logged, and tried again with each pass of the reconciler until it is there: after a pause
    where the failure is not of the store or the ledger.
    """

    ledger: Ledger
    store_for: Callable[[str], ObjectStore]
    clock: Clock
    #: Job -> when its manifest is tried again.
    due_at: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def put_if_over(self, job_id: str) -> None:
        """Writes the manifest of a job with audio, if the job has ended."""
        if self.clock.monotonic() < self.due_at.get(job_id, 0.0):
            return
        from jobs.export.manifest import put_manifest

        try:
            job = self.ledger.job(job_id)
            if job.state.final and self.ledger.status(job_id).items.done:
                store = self.store_for(job.store_url)
                store.confirm(job.store_identity)
                info = put_manifest(self.ledger, store, job_id)
                log.info("job ended", job=job_id, state=job.state.value, manifest=info.key)
            elif job.state.final:
                self.ledger.note_manifest(job)
            self.due_at.pop(job_id, None)
        except NightjarError as error:
            if not error.code.retryable:
                self.due_at[job_id] = self.clock.monotonic() + PAUSE_SECONDS
            log.warning(
                "manifest of the job not written", job=job_id, code=error.code.value, error=str(error)
            )
