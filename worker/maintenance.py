"""Background tasks of every worker process: heartbeats, dispatch, repair of the ledger, manifests of ended jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from jobs.dispatch import Publisher, dispatch
from jobs.export.manifest import renew_manifest
from jobs.ledger import Ledger
from jobs.ledger.records import WorkerInfo
from jobs.notification import report_ends
from jobs.settings import Settings
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError, NotFoundError
from worker.admission import Demand
from worker.leases import Clock, HeldLeases
from worker.metrics import Metrics

log = structlog.get_logger(__name__)

UP, DRAINING = "up", "draining"

#: Delay between a wake-up and the run, so that one run serves several wake-ups.
WAKE_DELAY_SECONDS = 0.02
#: Maximum time that the end of a worker waits for a run.
STOP_SECONDS = 5.0
#: Pause before a retry of a manifest whose inputs are lost or damaged.
RETRY_SECONDS = 600.0


@dataclass(eq=False)
class PeriodicTask:
    """A task with its own thread, which runs every `seconds` and soon after `wake`. An error that repeats is logged
    once."""

    name: str
    seconds: float
    work: Callable[[], object]

    def __post_init__(self) -> None:
        self._woken = threading.Event()
        self._stopping = False
        self._failing: ErrorCode | None = None
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def run_once(self) -> None:
        try:
            self.work()
        except NightjarError as error:
            if error.code is not self._failing:
                log.warning("periodic task fails", task=self.name, code=error.code.value, error=str(error))
            self._failing = error.code
        except Exception:
            log.exception("periodic task failed unexpectedly", task=self.name)
        else:
            if self._failing is not None:
                log.info("periodic task works again", task=self.name)
            self._failing = None

    def _run(self) -> None:
        while not self._stopping:
            if self._woken.wait(self.seconds) and not self._stopping:
                time.sleep(WAKE_DELAY_SECONDS)
            self._woken.clear()
            if not self._stopping:
                self.run_once()


@dataclass(eq=False)
class Maintenance:
    """Registers the worker, extends its leases, dispatches shards and reconciles.

    Heartbeats have a separate thread, so that no lease expires while the broker hangs.
    """

    ledger: Ledger
    settings: Settings
    worker: WorkerInfo
    leases: HeldLeases
    metrics: Metrics
    clock: Clock
    publisher: Publisher
    store_for: Callable[[str], ObjectStore]
    #: The number of shards that the worker can use.
    demand: Demand = field(default_factory=Demand)
    #: Reports ended jobs to the operator's hook, in a separate thread.
    report_ends: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        times = self.settings.times
        self._state = UP
        self._registered = False
        self._reconciled_at = self._depth_at = float("-inf")
        #: Job -> time of the next try to write its manifest.
        self._due_at: dict[str, float] = {}
        #: Woken when a shard ends, because another one may then fit into the window of queued shards.
        self.dispatches = PeriodicTask("dispatch", times.dispatch_seconds, self.dispatch)
        self._heartbeats = PeriodicTask("heartbeats", times.heartbeat_seconds, self.send_heartbeat)
        #: Woken when a job may have ended, so that the hook need not wait for the next run.
        self.reports = PeriodicTask("reports", times.reconcile_seconds, self.report_ends)
        self._tasks = (self.dispatches, self._heartbeats, self.reports)

    def start(self) -> None:
        """Registers the worker and starts the threads. Raises `ServiceError` if the ledger refuses the worker."""
        self.ledger.register_worker(self.worker)
        self._registered = True
        for task in self._tasks:
            task.start()
        self.dispatches.wake()
        self.reports.wake()

    def claimed(self) -> None:
        """After a claim: dispatches soon if the worker can now use more shards than it has reported."""
        if self.demand.shards > self.worker.slots:
            self.dispatches.wake()

    def drain(self) -> None:
        """Reports to the ledger that the worker drains, and stops dispatching."""
        self._state = DRAINING
        self._heartbeats.wake()

    def stop(self) -> None:
        """Ends the threads, and marks the worker as ended in the ledger if that can be reached."""
        for task in self._tasks:
            task.stop()
        if not self._registered:
            return
        try:
            self.ledger.retire_worker(self.worker.id)
        except NightjarError as error:
            log.warning("worker not retired; it will be marked as lost", error=str(error))

    def send_heartbeat(self) -> None:
        """Sends a heartbeat of the worker and all its leases."""
        sent_at = self.clock.monotonic()
        tickets = self.leases.tickets()
        if tickets:
            lost = self.ledger.heartbeat(self.worker.id, tickets, self.settings.times.lease_seconds)
            self.leases.renewed(tickets, lost, sent_at)
        self._report(self.demand.shards)

    def dispatch(self) -> None:
        """Runs the reconciler, if it is due, and the dispatcher."""
        if self._state != UP:
            return
        now = self.clock.monotonic()
        if now - self._reconciled_at >= self.settings.times.reconcile_seconds:
            self._reconciled_at = now
            report = self.ledger.reconcile(self.settings.times.queued_timeout_seconds)
            if report.changed:
                log.info("reconciled", **report.counts)
                for name, count in report.counts.items():
                    self.metrics.reconciled.labels(what=name).inc(count)
            for job_id in {*report.ended_jobs, *report.without_manifest}:
                self.end_job(job_id)
        shards = self.demand.shards
        # Small decreases are not reported at once, since extra shards in the queue do no harm.
        if shards > self.worker.slots or shards < self.worker.slots / 2:
            self._report(shards)
        self.metrics.dispatched.inc(dispatch(self.ledger, self.settings, self.publisher))
        if now - self._depth_at >= self.settings.times.dispatch_seconds:
            self._depth_at = now
            self.metrics.queue_depth.set(self.publisher.queue_depth())

    def _report(self, shards: int) -> None:
        """Reports to the ledger the number of shards that the worker can use."""
        worker = replace(self.worker, slots=shards)
        try:
            self.ledger.worker_heartbeat(worker.id, self._state, shards)
        except NotFoundError:
            self.ledger.register_worker(worker)
        self.worker = worker

    def end_job(self, job_id: str) -> None:
        """Writes the manifest of a job and reports its end, if it has ended; several workers may do so at once. After
        a failure, which is logged, each pass of the reconciler tries again; it waits `RETRY_SECONDS` if the error is
        not retryable."""
        if self.clock.monotonic() >= self._due_at.get(job_id, 0.0):
            try:
                job = self.ledger.job(job_id)
                if job.state.final:
                    store = self.store_for(job.store_url)
                    store.confirm(job.store_identity)
                    renew_manifest(self.ledger, store, job_id)
                    log.info("job ended", job=job_id, state=job.state.value)
                self._due_at.pop(job_id, None)
            except NightjarError as error:
                if not error.code.retryable:
                    self._due_at[job_id] = self.clock.monotonic() + RETRY_SECONDS
                code = error.code.value
                log.warning("manifest of the job not written", job=job_id, code=code, error=str(error))
        self.reports.wake()


def report_ended_jobs(ledger: Ledger, settings: Settings) -> None:
    """Reports ended jobs to the operator's hook, and logs the results. A failing hook delays nothing."""
    for one in report_ends(ledger, settings):
        about = {"job": one.job_id, "attempt": one.attempt, "reason": one.reason}
        if not one.reason:
            log.info("end of the job reported", job=one.job_id)
        elif one.again_seconds is None:
            log.error("end of the job not reported; it is not retried", **about)
        else:
            log.warning("end of the job not reported yet", **about, again_seconds=round(one.again_seconds, 1))
