"""The runtime of one worker process: ledger, pipelines, leases, maintenance. Celery passes the tickets of messages to
it."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Literal, TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from jobs import installed_version
from jobs.dispatch import Publisher
from jobs.ledger import Ledger
from jobs.ledger.records import HOME_WORKER_PREFIX, Ticket, WorkerInfo
from jobs.provenance import ProvenanceWriter
from jobs.settings import Settings
from jobs.worker_group import WorkerReport
from pipelines.errors import (
    ConfigError,
    EngineCrashError,
    ErrorCode,
    ModelError,
    NightjarError,
    NotFoundError,
    ServiceError,
)
from pipelines.request import Pipeline
from worker.admission import SHARDS_AT_START, Demand, ExclusiveLock
from worker.leases import Clock, HeldLeases, LeaseGoneError
from worker.maintenance import Maintenance, report_ended_jobs
from worker.metrics import Metrics
from worker.models import PipelineCache, Preload, open_model
from worker.quality.process import MeterPool
from worker.result_writer import ResultWriter
from worker.shard_run import ShardRunner
from worker.supervisor import is_supervised, report, report_refusal, wait_for_release
from worker.writer_processes import WriterProcesses

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: Pause before this worker returns the message of a job that it does not run.
REFUSE_PAUSE_SECONDS = 0.5
#: Number of jobs whose models a worker for one model remembers.
_KNOWN_JOBS = 64
#: Time from the deadline of a drain until the process is forced to end.
EXIT_SECONDS = 20.0


#: The outcome of a message. `dropped`: it is old or a duplicate, or its job is paused or cancelled. `refused`: it returns to
#: the end of the queue, for another worker.
Handling = Literal["ran", "dropped", "refused"]


def _indicates_bad_gpu(error: NightjarError) -> bool:
    """Whether an engine crashed while opening or had too little memory; other failures may concern only one model."""
    return isinstance(error, EngineCrashError) or error.code is ErrorCode.SYNTH_OOM


class Runtime:
    """The runtime of one worker process. Call `start`, then `handle` from several threads, then `drain` and `stop`."""

    def __init__(
        self,
        settings: Settings,
        model: str | None = None,
        private: bool = False,
        preload: Preload | None = None,
        clock: Clock = time,
    ) -> None:
        """`model`: the only model that this worker serves; None: any model. `preload`: a model that is already being
        opened.

        `private`: whether the worker serves only one run, as with `nightjar run`. It then ends if it cannot open the job's
        model with its settings. A worker that is not private leaves such a job to others, or fails its items if there
        are none.
        """
        self.settings = settings
        self._model = model
        self._private = private
        self._preload = preload
        self._clock = clock
        #: Job -> time at which this worker refused it.
        self._refused_at: dict[str, float] = {}
        self._draining = threading.Event()
        self._stopping_now = threading.Event()
        self._stopped = threading.Event()
        self.metrics = Metrics()
        self.leases = HeldLeases(settings.times.lease_seconds, self._clock, self.metrics.count_retry)
        self.pipelines = PipelineCache(self._open)
        place = HOME_WORKER_PREFIX if settings.effective_broker_url.startswith("redis+socket:") else ""
        self.worker = WorkerInfo(
            id=f"{place}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            host=socket.gethostname(),
            pid=os.getpid(),
            gpu=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            model=model or "",
            version=installed_version() or "unknown",
            slots=settings.times.shards_in_flight or SHARDS_AT_START,
        )
        #: The error that ended this worker.
        self.failure: NightjarError | None = None
        self._up = False
        self._stop_serving = lambda: None
        self.ledger = Ledger.of(settings)
        self._job = lru_cache(_KNOWN_JOBS)(self.ledger.job)
        self._writer = ResultWriter(meters=MeterPool(settings.worker.meter_processes))
        self._writer_processes = WriterProcesses(settings.times.writer_processes, settings.s3)
        #: URL -> store, whose client is kept until the process ends.
        self.store_for = cache(self._writer_processes.open)
        self._exclusive = ExclusiveLock()
        self.demand = Demand(
            settings.times.shards_in_flight,
            lambda: sum(pipeline.info.slots for pipeline in self.pipelines.pipelines()),
            lambda: self._exclusive.closed,
            self._clock,
        )
        self.runner = ShardRunner(
            self.ledger,
            self.store_for,
            self.pipelines,
            settings,
            writer=self._writer,
            leases=self.leases,
            metrics=self.metrics,
            clock=self._clock,
            provenance=ProvenanceWriter(),
            demand=self.demand,
            only_worker=private,
            on_claimed=lambda: self.maintenance.claimed(),
        )
        self.maintenance = Maintenance(
            self.ledger,
            settings,
            self.worker,
            self.leases,
            self.metrics,
            self._clock,
            Publisher(settings),
            self.store_for,
            self.demand,
            # `nightjar run` reports its jobs itself, after their manifest and report are written.
            (lambda: None) if private else partial(report_ended_jobs, self.ledger, settings),
        )

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def start(self) -> None:
        """Opens the model of this worker and registers this worker; waits for unreachable services until a signal.

        Raises `NightjarError` if this worker cannot work.
        """
        if is_supervised():
            threading.Thread(target=self._watch_parent, name="parent-watch", daemon=True).start()
        self.metrics.watch(lambda: len(self.leases), self.pipelines.pipelines)
        if (port := self.settings.worker.metrics_port) is not None:
            self._stop_serving = self.metrics.serve(port, self.settings.worker.metrics_address)
        for step in (self.ledger.check_schema, self._load_model, self.maintenance.start):
            if self._retrying(lambda step=step: [step()]) is None:
                return
        report(WorkerReport(up=True))
        self._up = True
        log.info(
            "worker up", worker=self.worker.id, slots=self.worker.slots, model=self.worker.model or "any"
        )

    def handle(self, ticket: Ticket) -> Handling:
        """Claims the shard of a message and runs it. Raises only errors that a retry of the message cannot solve."""
        with bound_contextvars(job=ticket.job_id, shard=ticket.shard_no, worker=self.worker.id):
            try:
                return self._handle(ticket)
            except ServiceError as error:
                if error.code is not ErrorCode.LEDGER_SCHEMA:
                    raise
                # The ledger was upgraded: the shards in flight end, and a worker of the new version gets the message.
                self._end_with(error)
                return "refused"

    def _handle(self, ticket: Ticket) -> Handling:
        if self.draining:
            return "refused"
        if self._leaves_to_others(ticket.job_id):
            self._draining.wait(REFUSE_PAUSE_SECONDS)
            return "refused"
        should_run_alone = self._retrying(lambda: self.ledger.should_run_alone(ticket))
        with self._exclusive.hold(bool(should_run_alone), lambda: self.draining) as placed:
            ran = placed and self._run(ticket)
        if not ran:
            return "refused" if self.draining else "dropped"
        self.maintenance.dispatches.wake()
        self.maintenance.end_job(ticket.job_id)
        return "ran"

    def drain(self) -> None:
        """Takes no more shards and finishes those in flight; gives them back after `drain_seconds` or a second call."""
        if self._draining.is_set():
            self._stopping_now.set()
            return
        self._draining.set()
        log.info("draining", shards=len(self.leases), seconds=self.settings.worker.drain_seconds)
        threading.Thread(target=self._end_drain, name="drain", daemon=True).start()

    def stop_now(self) -> None:
        """Drains, but gives shards in flight back at once."""
        self.drain()
        self._stopping_now.set()

    def stop(self) -> None:
        """Releases all resources, after the last shard has ended. Idempotent."""
        if self._stopped.is_set():
            return
        self.maintenance.stop()
        self._writer.close()
        self._writer_processes.close()
        self.pipelines.close()
        if self._preload is not None:
            self._preload.close()
        self._stop_serving()
        self.ledger.close()
        self._stopped.set()
        log.info("worker down", worker=self.worker.id)

    def _open(self, model: str, decodes: bool) -> Pipeline:
        try:
            pipeline = None if self._preload is None else self._preload.take(model, decodes)
            pipeline = pipeline or open_model(self.settings, model, decodes)
        except NightjarError as error:
            if not self._ends_worker(error) or not self._up:
                raise
            # No item was in the engine, so the shard is given back unchanged.
            self.stop_now()
            self._end_with(error)
            raise LeaseGoneError("drained") from error
        log.info(f"engine ready: {pipeline.info.summary(pipeline.name)}")
        return pipeline

    def _ends_worker(self, error: NightjarError) -> bool:
        """Whether an error of opening a model ends this worker.

        If an engine crashes while opening or has too little memory, its GPU is broken, lost or full, or the model is
        broken. A supervised worker would then fail every shard, so it ends, and its supervisor restarts it after a pause
        or quarantines it. An error that no restart can solve ends a worker that is starting or serves only one run; it
        is reported to the supervisor.
        """
        if _indicates_bad_gpu(error):
            return is_supervised()
        if (
            not isinstance(error, ConfigError | ModelError)
            or error.code.retryable
            or (self._up and not self._private)
        ):
            return False
        report_refusal(error)
        return True

    def _end_with(self, error: NightjarError) -> None:
        """Ends this process because of an error that would affect every shard."""
        if self.failure is not None:
            return
        self.failure = error
        log.error("the worker ends", error=str(error))
        # Only a signal ends Celery's loop; the first one drains.
        os.kill(os.getpid(), signal.SIGTERM)

    def _run(self, ticket: Ticket) -> bool:
        """Claims a shard and runs it; False if it cannot be claimed."""
        lease = self._retrying(
            lambda: self.ledger.claim(ticket, self.worker.id, self.settings.times.lease_seconds)
        )
        if lease is None:
            return False
        with bound_contextvars(epoch=lease.epoch):
            end = self.runner.run(lease)
        if end == "refused":
            self._refused_at[ticket.job_id] = self._clock.monotonic()
        else:
            self._refused_at.pop(ticket.job_id, None)
        return True

    def _leaves_to_others(self, job_id: str) -> bool:
        """Whether this worker leaves a job to others, because it serves another model or recently could not run the
        job."""
        refused_at = self._refused_at.get(job_id, -math.inf)
        if self._clock.monotonic() - refused_at < self.settings.times.quarantine_seconds:
            return bool(self._retrying(lambda: self.ledger.others_may_run(job_id, self.worker.id)))
        if self._model is None:
            return False
        job = self._retrying(lambda: self._job(job_id))
        # An unknown job is dropped at the claim.
        return job is not None and job.spec.model != self._model

    def _retrying(self, call: Callable[[], T]) -> T | None:
        """The result of `call`, retried with growing pauses after retryable errors; None if the worker drains or the job
        is unknown."""
        pause_seconds = 0.2
        while not self.draining:
            try:
                return call()
            except NotFoundError:
                return None
            except NightjarError as error:
                # A retry would fail in the same way, so the worker cannot start.
                if not error.code.retryable or _indicates_bad_gpu(error):
                    raise
                self.metrics.count_retry(error)
            self._draining.wait(pause_seconds)
            pause_seconds = min(pause_seconds * 2, 5.0)
        return None

    def _load_model(self) -> None:
        # A run opens its model for its first shard, which says whether the decoder is needed.
        if self._model is not None and not self._private:
            with self.pipelines.use(self._model):
                log.info("model ready", model=self._model)

    def _end_drain(self) -> None:
        self.maintenance.drain()
        self._stopping_now.wait(self.settings.worker.drain_seconds)
        self.leases.drain()
        if not self._stopped.wait(EXIT_SECONDS):
            # The leases were given back, but a library keeps the process from ending.
            log.error("worker did not end in time", shards=len(self.leases))
            os._exit(0 if len(self.leases) == 0 else 1)

    def _watch_parent(self) -> None:
        while wait_for_release():
            pass
        if self._stopped.is_set():
            return
        log.warning("the parent process has ended")
        self.stop_now()
        # Only a signal ends Celery's loop.
        os.kill(os.getpid(), signal.SIGTERM)
