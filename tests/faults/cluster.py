"""A production in small: Valkey, PostgreSQL, SeaweedFS and worker processes with a fake engine, all of
which may be killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from msgspec import UNSET

from jobs.ingest import SubmitOptions, submit
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, Job, JobSpec, JobState
from jobs.ledger.status import JobStatus
from jobs.packs import read_artifact
from jobs.settings import load_settings
from jobs.spec import item_seed
from jobs.store import open_store
from pipelines.audio import encode
from pipelines.errors import NightjarError
from tests.support.fake_worker import register
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.s3_proxy import S3Proxy
from tests.support.services import Postgres, SeaweedFS, Valkey
from tests.support.worker_process import Started, start_python

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]

#: Leases are short enough that a killed worker's shards are taken over within seconds.
TIMING = {
    "NIGHTJAR_TIMES__LEASE_SECONDS": "6",
    "NIGHTJAR_TIMES__HEARTBEAT_SECONDS": "1.5",
    "NIGHTJAR_TIMES__SHARDS_IN_FLIGHT": "2",
    "SPEECH_WORKER__DRAIN_SECONDS": "20",
    "NIGHTJAR_TIMES__DISPATCH_SECONDS": "0.5",
    "NIGHTJAR_TIMES__RECONCILE_SECONDS": "1",
    "NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS": "6",
    "NIGHTJAR_TIMES__SHARD_ITEMS": "64",
}

#: Leases and drains that no machine outlasts by standing still for a while.
PATIENCE = {"NIGHTJAR_TIMES__LEASE_SECONDS": "600", "SPEECH_WORKER__DRAIN_SECONDS": "600"}

#: A request takes as long as a real engine's short sentence on a busy GPU.
ENGINE = {"seconds": 0.05, "slots": 16}


class Cluster:
    """Starts everything; `end` stops everything. Workers come back by themselves after `kill_worker`.

    What `held` makes of a text does not end before `let_go`. `timing` goes over `TIMING`. `store` is `s3`,
    `folder`, or `proxied` for an S3 server behind `proxy`. A server that is given runs already, and goes
    on after `end`.
    """

    def __init__(
        self,
        folder: Path,
        postgres: Postgres,
        timing: Mapping[str, str] | None = None,
        *,
        workers: int = 2,
        store: str = "s3",
        valkey: Valkey | None = None,
        seaweedfs: SeaweedFS | None = None,
    ) -> None:
        self.folder = folder
        self.timing = TIMING | dict(timing or {})
        self.gate = folder / "gate"
        self.postgres = postgres
        self.valkey = valkey or Valkey(folder / "valkey")
        self.seaweedfs = seaweedfs or (None if store == "folder" else SeaweedFS(folder / "seaweedfs"))
        self.services = [service for service in (self.valkey, self.seaweedfs) if service is not None]
        self._own_services = [service for service in self.services if service not in (valkey, seaweedfs)]
        for service in self._own_services:
            service.start()
        self.proxy = (
            S3Proxy(self.seaweedfs.endpoint) if self.seaweedfs is not None and store == "proxied" else None
        )
        self.database_url = postgres.create_database(f"faults_{uuid.uuid4().hex[:12]}")
        #: Of the store in a folder.
        self.objects = folder / "objects"
        self.store_url = self.objects.as_uri()
        if self.seaweedfs is not None:
            self.store_url = f"s3://{self.seaweedfs.create_bucket(f'faults-{uuid.uuid4().hex[:12]}')}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment().items():
                patch.setenv(name, value)
            self.settings = load_settings()
        self.store = open_store(self.store_url, self.settings.s3)
        self.ledger = Ledger(self.database_url)
        self.ledger.migrate()
        self.workers: dict[int, Started] = {}
        for number in range(workers):
            self.start_worker(number)

    def environment(self) -> dict[str, str]:
        """The settings that every process of this cluster gets."""
        return {
            **os.environ,
            "SPEECH_DATABASE_URL": self.database_url,
            "SPEECH_BROKER_URL": self.valkey.url,
            "SPEECH_STORE_URL": self.store_url,
            "SPEECH_LOG_FORMAT": "json",
            "NIGHTJAR_FAKE": json.dumps(ENGINE),
            **(self.seaweedfs.environment() if self.seaweedfs is not None else {}),
            **({"SPEECH_S3__ENDPOINT_URL": self.proxy.endpoint} if self.proxy is not None else {}),
            **self.timing,
        }

    def start_worker(self, number: int, **environment: str) -> None:
        log, variables = self.folder / f"worker-{number}.log", {**self.environment(), **environment}
        self.workers[number] = start_python(
            "tests.support.fake_worker", ["run"], variables, log, new_session=True
        )

    def signal_worker(self, number: int, sent: signal.Signals) -> None:
        os.killpg(self.workers[number].pid, sent)

    def kill_worker(self, number: int) -> None:
        """SIGKILL, then a new process in its place, as a supervisor would start it."""
        process = self.workers[number]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.start_worker(number)

    def end_worker(self, number: int) -> None:
        """SIGKILL, and no other process in its place."""
        self.signal_worker(number, signal.SIGKILL)
        self.workers[number].wait()

    def held(self, text: str) -> str:
        return f"{text} [[until:{self.gate}]]"

    def let_go(self) -> None:
        self.gate.touch()

    def submit(
        self, texts: dict[str, str], *, max_attempts: int = 3, pack: bool = False, model: str = "fake"
    ) -> str:
        """Submits one dialogue a text, for the fake engine unless another one is named; the job id."""
        path = self.folder / f"{uuid.uuid4().hex}.jsonl"
        lines = (
            json.dumps({"example_id": name, "messages": [["user", "text", text]]})
            for name, text in texts.items()
        )
        path.write_text("\n".join(lines) + "\n")
        register()
        options = SubmitOptions(max_attempts=max_attempts)
        return submit(
            self.settings,
            self.ledger,
            self.store,
            str(path),
            JobSpec(model=model, pack=pack or UNSET),
            options=options,
        ).job.id

    def status(self, job: str) -> JobStatus | None:
        """The job's status, or None while the database is down."""
        try:
            return self.ledger.status(job)
        except NightjarError:
            return None

    def wait_for_done(self, job: str, items: int, *, seconds: float = 240) -> None:
        """Waits until that many items are done."""
        deadline = time.monotonic() + seconds
        while (status := self.status(job)) is None or status.items.done < items:
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def attempts(self, job: str) -> Counter[str]:
        """How the leases of a job ended: outcome -> count."""
        query = "SELECT outcome, count(*) FROM attempts WHERE job_id = :job GROUP BY outcome"
        return Counter(dict(self._rows(query, job=job)))

    def idle_transactions(self) -> int:
        """Transactions that wait for the next word of whoever began them."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
        ((count,),) = self._rows(query)
        return count

    def leases(self, job: str) -> int:
        """The job's shards that a worker holds."""
        query = "SELECT count(*) FROM shards WHERE job_id = :job AND state = 'leased'"
        ((count,),) = self._rows(query, job=job)
        return count

    def _rows(self, query: str, **values: str) -> list[tuple[Any, ...]]:
        engine = sa.create_engine(self.database_url.replace("postgresql://", "postgresql+psycopg://"))
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(sa.text(query), values)]
        finally:
            engine.dispose()

    def wait(self, job: str, *, seconds: float) -> JobStatus:
        """Waits for a final state; fails with the workers' last words."""
        deadline = time.monotonic() + seconds
        status = None
        while time.monotonic() < deadline:
            status = self.status(job) or status
            if status is not None and status.job.state.final:
                return status
            time.sleep(0.2)
        tails = "\n".join(
            path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("worker-*.log"))
        )
        raise AssertionError(f"Job {job} did not end in {seconds} s: {status}\n{tails}")

    def end(self) -> None:
        for process in self.workers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.ledger.close()
        if self.proxy is not None:
            self.proxy.close()
        for service in self._own_services:
            service.stop()


class Chaos(threading.Thread):
    """Kills parts of a cluster at moments drawn from a seed, until told to stop or there were many kills.

    After a few kills it lets the job make some progress: on a slow machine nothing comes up between two of
    them otherwise. What the cluster holds is let go once there were enough kills, so that no job ends
    before.
    """

    ENOUGH_KILLS = 4
    MOST_KILLS = 15
    KILLS_WITHOUT_PROGRESS = 3

    def __init__(self, cluster: Cluster, job: str, seed: int) -> None:
        super().__init__(name=f"chaos-{seed}")
        self.cluster = cluster
        self.job = job
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._halt = threading.Event()

    def run(self) -> None:
        try:
            while not self._halt.wait(self.random.uniform(0.5, 3.0)):
                victim = self.random.choice(["worker", "worker", "broker", "database", "store"])
                self._kill(victim)
                self.kills[victim] += 1
                count = sum(self.kills.values())
                if self.enough:
                    self.cluster.let_go()
                if count == self.MOST_KILLS:
                    return
                if count % self.KILLS_WITHOUT_PROGRESS == 0:
                    self._let_work()
        except BaseException as error:  # noqa: BLE001 - re-raised by `halt` in the test's own thread
            self.error = error

    @property
    def enough(self) -> bool:
        return self.kills["worker"] >= 1 and sum(self.kills.values()) >= self.ENOUGH_KILLS

    def _let_work(self) -> None:
        """Waits until more items are done than before, or none is left but the one that may be held."""
        before: int | None = None
        while not self._halt.wait(0.1):
            status = self.cluster.status(self.job)
            if status is None:
                continue
            if status.items.pending <= 1 or (before is not None and status.items.done > before):
                return
            before = status.items.done if before is None else before

    def _kill(self, victim: str) -> None:
        if victim == "worker":
            self.cluster.kill_worker(self.random.choice(sorted(self.cluster.workers)))
            return
        service = {
            "broker": self.cluster.valkey,
            "database": self.cluster.postgres,
            "store": self.cluster.services[-1],
        }[victim]
        service.kill()
        time.sleep(self.random.uniform(0.0, 1.5))
        service.start()

    def halt(self) -> None:
        self._halt.set()
        self.join()
        if self.error is not None:
            raise self.error


def patiently(call: Callable[[], T], seconds: float = 120) -> T:
    """The result of a call to a service that may have come back just now, and may not be all there yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except NightjarError as error:
            if not error.code.retryable or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def message_seed(job: Job, example_id: str) -> int:
    """The seed of the speech of a dialogue that is one user message."""
    return item_seed(job.spec.seed, example_id, message_index=0)


def assert_exactly_once(cluster: Cluster, job: str, texts: dict[str, str]) -> None:
    """Every item once: one done row, one artifact row, one object or member of a pack with the right
    bytes; counters exact; nothing more, but for packs that a worker put before it was killed."""
    status = patiently(lambda: cluster.ledger.status(job))
    assert status.job.state == JobState.COMPLETED
    assert (status.items.total, status.items.done, status.items.failed, status.items.skipped) == (
        len(texts),
        len(texts),
        0,
        0,
    )
    rows = list(cluster.ledger.items(job))
    assert [row.index for row in rows] == list(range(len(texts)))
    assert {row.example_id for row in rows} == set(texts)
    assert {row.state for row in rows} == {ItemState.DONE}
    artifacts = {row.artifact.key: (row, row.artifact) for row in rows if row.artifact is not None}
    assert len(artifacts) == len(texts)
    loose = {key for key, (_, artifact) in artifacts.items() if artifact.pack is None}
    assert len(loose) == (0 if status.job.spec.pack is True else len(texts))
    assert {info.key for info in patiently(lambda: list(cluster.store.list(f"jobs/{job}/audio/")))} == loose
    for key, (row, artifact) in artifacts.items():
        expected = encode(
            sine(texts[row.example_id], message_seed(status.job, row.example_id)), SAMPLE_RATE, "wav"
        )
        assert patiently(partial(read_artifact, cluster.store, artifact)) == expected, key
        assert artifact.sha256 == hashlib.sha256(expected).hexdigest()
        assert artifact.bytes == len(expected)
    assert status.audio_ms == sum(artifact.duration_ms for _, artifact in artifacts.values())
    assert status.bytes_out == sum(artifact.bytes for _, artifact in artifacts.values())
