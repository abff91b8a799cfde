"""A shard runner on a real SQLite ledger, with the fake engine, the store in memory and a clock of choice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs.ingest import NO_OPTIONS, SubmitOptions, submit
from jobs.ledger import Ledger
from jobs.ledger.records import CommitResult, ItemRow, Job, JobSpec, Lease, Outcome, Ticket, WorkerInfo
from jobs.ledger.status import JobStatus
from jobs.settings import Settings, WorkerSettings
from jobs.store import ObjectStore
from jobs.times import Times
from pipelines.errors import ErrorCode, ServiceError
from pipelines.request import Pipeline
from tests.support.fakes import FakePipeline, MemoryStore
from tests.support.times import with_times
from worker.leases import Clock, HeldLeases
from worker.maintenance import Maintenance
from worker.metrics import Metrics
from worker.models import PipelineCache
from worker.result_writer import ResultWriter
from worker.shard_run import ShardEnd, ShardRunner

WORKER = WorkerInfo("worker-1", "host", 1, "", "", "test", 2)


class NoBroker:
    """Takes what is published, and delivers nothing."""

    def publish(self, tickets: Sequence[Ticket]) -> None:
        return

    def queue_depth(self) -> int:
        return 0


class Upkeep(Maintenance):
    """Maintenance that counts the jobs that it is asked to end."""

    asked = 0

    def end_job(self, job_id: str) -> None:
        self.asked += 1
        super().end_job(job_id)


class Rig:
    """One worker's parts without Celery. `run_next` dispatches, claims and runs one shard."""

    def __init__(
        self, folder: Path, pipeline: FakePipeline | None = None, clock: Clock | None = None, **worker: float
    ) -> None:
        self.folder = folder
        times = {name: worker.pop(name) for name in Times.__struct_fields__ if name in worker}
        settings = Settings(home=folder, worker=WorkerSettings(**worker))  # pyright: ignore[reportArgumentType]
        self.settings = with_times(settings, **times)
        self.ledger = Ledger(self.settings.ledger_url)
        self.ledger.migrate()
        self.ledger.register_worker(WORKER)
        self.store = MemoryStore()
        self.pipeline = pipeline or FakePipeline()
        self.opened: list[str] = []
        #: Of each: whether the decoder of its codec was opened.
        self.decodes: list[bool] = []
        self.clock = clock or time
        self.metrics = Metrics()
        self.leases = HeldLeases(self.settings.times.lease_seconds, self.clock, self.metrics.count_retry)
        self.pipelines = PipelineCache(self._open)
        self.writer = ResultWriter()
        self.runner = self.runner_on(self.ledger)

    def runner_on(self, ledger: Ledger) -> ShardRunner:
        return ShardRunner(
            ledger,
            lambda _: self.store,
            self.pipelines,
            self.settings,
            writer=self.writer,
            leases=self.leases,
            metrics=self.metrics,
            clock=self.clock,
        )

    def upkeep(self, store_for: Callable[[str], ObjectStore], clock: Clock) -> Upkeep:
        """The upkeep of another worker than the one that ends the jobs."""
        broker: Any = NoBroker()
        return Upkeep(self.ledger, self.settings, WORKER, self.leases, self.metrics, clock, broker, store_for)

    def submit(
        self,
        texts: Sequence[str],
        *,
        model: str = "fake",
        options: SubmitOptions = NO_OPTIONS,
        **spec: Any,
    ) -> Job:
        path = self.folder / f"{len(list(self.folder.glob('*.jsonl')))}.jsonl"
        lines = [
            {"example_id": f"item-{n}", "messages": [["user", "text", text]]} for n, text in enumerate(texts)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.submit_file(path, model=model, options=options, **spec)

    def submit_file(
        self,
        path: Path,
        *,
        model: str = "fake",
        options: SubmitOptions = NO_OPTIONS,
        lost: Sequence[str] = (),
        **spec: object,
    ) -> Job:
        """Submits a file; for an existing job, the inputs `lost` are written again."""
        job_spec = JobSpec(model=model, **spec)  # pyright: ignore[reportArgumentType]
        return submit(
            self.settings,
            self.ledger,
            self.store,
            str(path),
            job_spec,
            options=options,
            lost_inputs=lambda _: lost,
        ).job

    def claim_next(self) -> Lease:
        ticket = self.take_ticket()
        lease = self.ledger.claim(ticket, WORKER.id, self.settings.times.lease_seconds)
        assert lease is not None
        return lease

    def take_ticket(self, seconds: float = 240.0) -> Ticket:
        """The next shard that is due; waits for its backoff."""
        deadline = time.monotonic() + seconds
        while not (tickets := self.ledger.take_ready(1)):
            assert time.monotonic() < deadline, "no shard is due"
            time.sleep(0.02)
        return tickets[0]

    def run_next(self) -> ShardEnd:
        return self.runner.run(self.claim_next())

    def status(self, job: Job) -> JobStatus:
        return self.ledger.status(job.id)

    def items(self, job: Job) -> list[ItemRow]:
        return list(self.ledger.items(job.id))

    def audio(self) -> dict[str, bytes]:
        return {key: data for key, (data, _) in self.store.objects.items() if "/audio/" in key}

    def close(self) -> None:
        self.writer.close()
        self.pipelines.close()
        self.ledger.close()

    def _open(self, model: str, decodes: bool) -> Pipeline:
        self.opened.append(model)
        self.decodes.append(decodes)
        return self.pipeline


Build = Callable[..., Rig]


class Recording:
    """A ledger that counts commits and fails those it is told to."""

    def __init__(self, ledger: Ledger, failures: int = 0) -> None:
        self.ledger = ledger
        self.failures = failures
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.ledger, name)

    def commit(self, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
        self.sizes.append(len(outcomes))
        if self.failures:
            self.failures -= 1
            raise ServiceError(ErrorCode.LEDGER_UNREACHABLE, "The ledger is away.")
        return self.ledger.commit(ticket, outcomes)


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
