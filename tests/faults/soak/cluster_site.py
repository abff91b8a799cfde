"""An installation of services: Valkey, PostgreSQL, a folder or SeaweedFS behind a proxy, and workers under
a supervisor."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import redis
import sqlalchemy as sa

from jobs.dispatch import KEY_PREFIX, QUEUE, Publisher, make_celery
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, Ticket
from jobs.store import open_store
from jobs.store.base import ObjectStore
from pipelines.registry import register_pipeline
from tests.faults.cluster import REPOSITORY, Cluster, patiently
from tests.faults.soak import voice
from tests.faults.soak.site import (
    ENGINE_FROZEN_SECONDS,
    STUCK_SECONDS,
    Fault,
    Mark,
    Stubs,
    copy_of,
    flip_inputs,
    wait_until,
)
from tests.support.cli_kit import run_command
from tests.support.s3_proxy import FORGOTTEN
from tests.support.services import Postgres, Service, children
from worker.garbage import sweep

#: Longer than a lease of the cluster.
FROZEN_SECONDS = 8.0
#: For how long the store has no bucket, or none of its objects.
FORGOTTEN_SECONDS = 2.5
#: Of a job that ends before the faults begin.
EARLY_ITEMS = 100
#: Messages that are none of ours, as another program or a broken client may leave them.
MALFORMED = (
    b"not json",
    b"[]",
    b"{}",
    b'{"body": "e30=", "headers": {}, "properties": null}',
    b'{"properties": {"delivery_tag": 1}}',
)


class ClusterSite:
    """Two workers under one supervisor. `layout` is `folder` or `s3`. Engines take `seconds` for an item
    while the faults last."""

    def __init__(self, folder: Path, postgres: Postgres, layout: str, seconds: float) -> None:
        self.job = ""
        self.ended: Mapping[str, Mapping[str, str]] = {}
        self.effects: Counter[str] = Counter()
        self.untold: list[str] = []
        self._mark = Mark()
        self._stubs = Stubs(folder / "stubs")
        environment = (
            voice.installed(folder / "site") | voice.paced(seconds, folder / "gate") | self._mark.environment
        )
        self._cluster = Cluster(
            folder, postgres, environment, workers=0, store="proxied" if layout == "s3" else layout
        )
        register_pipeline(voice.NAME, voice.describe(), voice.load)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._seen_done = 0
        self._store_restored = False
        self.mend()

    @property
    def ledger(self) -> Ledger:
        return self._cluster.ledger

    @property
    def store(self) -> ObjectStore:
        return self._cluster.store

    def begin(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        early = {f"early-{number}": f"Sentence {number} of the evening." for number in range(EARLY_ITEMS)}
        self._cluster.let_go()
        ended = self._cluster.submit(early, model=voice.NAME)
        self._cluster.wait(ended, seconds=240)
        self._cluster.gate.unlink()
        self.ended = {ended: early}
        first = next(iter(texts))
        held = {**texts, first: self._cluster.held(texts[first])}
        self.job = self._cluster.submit(held, max_attempts=50, model=voice.NAME)
        return held

    def faults(self) -> Mapping[str, Fault]:
        kinds: dict[str, Fault] = {
            "worker killed": lambda chance: self._signal(chance.choice(self._workers()), signal.SIGKILL),
            "worker drained": lambda chance: self._signal(chance.choice(self._workers()), signal.SIGTERM),
            "worker frozen": self._freeze,
            "engine killed": lambda chance: self._signal(chance.choice(self._engines()), signal.SIGKILL),
            "engine frozen": self._freeze_engine,
            "supervisor killed": lambda _: self._signal(self._supervisor_pid(), signal.SIGKILL),
            "worker with a wrong clock": self._wrong_clock,
            "broker killed": lambda chance: self._bounce(self._cluster.valkey, chance.uniform(0.0, 2.0)),
            "broker frozen": lambda chance: self._pause(self._cluster.valkey, chance.uniform(0.5, 3.0)),
            "broker emptied": lambda _: self._broker.flushall(),
            "broker read-only": self._read_only,
            "messages malformed": self._malformed,
            "messages repeated": self._repeat,
            "shutdown by remote control": lambda _: make_celery(self._cluster.settings).control.shutdown(),
            "database killed": lambda chance: self._bounce(self._cluster.postgres, chance.uniform(0.0, 2.0)),
            "database away and a worker killed": self._database_away,
            "database connections ended": self._end_connections,
            "database clock jumped": self._clock_jump,
            "job paused": self._pause_job,
            "sweep that deletes": self._sweep,
        }
        kinds["ledger restored from a backup"] = self._restore_ledger
        kinds["store restored from a backup"] = self._restore_store
        if self._cluster.seaweedfs is not None:
            store = self._cluster.seaweedfs
            kinds["store killed"] = lambda chance: self._bounce(store, chance.uniform(0.0, 2.0))
            kinds["store answers 404"] = self._forget_objects
            kinds["bit of an input flipped"] = self._flip_bit
        else:
            kinds["store unmounted"] = self._unmount
            kinds["bits of inputs flipped"] = self._flip_bits
            kinds["empty files of a power cut"] = self._empty_files
        return kinds

    def mend(self) -> None:
        if self._supervisor is None or self._supervisor.poll() is not None:
            log = (self._cluster.folder / "workers.log").open("ab")
            command = [sys.executable, "-m", "tests.support.fake_worker", "run", "--gpu", "0,1"]
            self._supervisor = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self._cluster.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            log.close()

    def wait_for_progress(self) -> None:
        self._until(lambda: self._done() > self._seen_done or self._left() <= 1, 300)
        self._seen_done = self._done()

    def let_go(self) -> None:
        self._cluster.let_go()
        if (proxy := self._cluster.proxy) is not None:
            proxy.flip_next(None)
            self.effects |= Counter({"requests answered 404": proxy.refused, "bits flipped": proxy.flipped})

    def settle(self, seconds: float) -> None:
        self.mend()
        self._until(
            lambda: (status := self._cluster.status(self.job)) is not None and status.job.state.final, seconds
        )
        # What the last worker leaves for the others to do is done by then.
        self._until(lambda: self.store.head(f"jobs/{self.job}/manifest.jsonl") is not None, 60)
        self._signal(self._supervisor_pid(), signal.SIGTERM)
        wait_until(lambda: not self._ours(), 60)

    @property
    def repaired_by_hand(self) -> bool:
        return self._store_restored

    def verify(self, job: str) -> tuple[int, str]:
        arguments = ["verify", job, "--repair", "--sample", "0", "--json"]
        done = run_command(self._cluster.folder, arguments, self._cluster.environment())
        return done.returncode, done.stdout + done.stderr

    def left_behind(self) -> list[str]:
        left = [f"process {pid}" for pid in self._ours()]
        if self._cluster.seaweedfs is None:
            left += [str(path) for path in self._cluster.objects.rglob(".*") if path.is_file()]
        return left

    def outside(self) -> list[str]:
        return self._stubs.files()

    def end(self) -> None:
        self._kill_ours()
        self._cluster.end()

    @property
    def _broker(self) -> redis.Redis:
        return redis.Redis(port=self._cluster.valkey.port, socket_timeout=10)

    def _done(self) -> int:
        status = self._cluster.status(self.job)
        return 0 if status is None else status.items.done

    def _left(self) -> int:
        status = self._cluster.status(self.job)
        return 1 << 62 if status is None else status.items.pending

    def _supervisor_pid(self) -> int:
        assert self._supervisor is not None
        return self._supervisor.pid

    def _workers(self) -> list[int]:
        """The workers that run, or the supervisor where none does."""
        return children(self._supervisor_pid()) or [self._supervisor_pid()]

    def _engines(self) -> list[int]:
        """The engines that run, or the workers where none does."""
        return self._mark.processes("jobs.engine_process") or self._workers()

    def _ours(self) -> list[int]:
        return self._mark.processes()

    def _kill_ours(self) -> None:
        # One that is about to start another is not killed in the same moment.
        while self._ours():
            self._mark.signal(signal.SIGKILL)
            if self._supervisor is not None:
                self._supervisor.wait()
            time.sleep(0.05)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if pid == self._supervisor_pid() and number is signal.SIGKILL and self._supervisor is not None:
            self._supervisor.wait()

    def _freeze(self, chance: random.Random) -> None:
        pid = chance.choice(self._workers())
        self._signal(pid, signal.SIGSTOP)
        time.sleep(FROZEN_SECONDS)
        self._signal(pid, signal.SIGCONT)

    def _freeze_engine(self, chance: random.Random) -> None:
        """The engine of another worker, which calls an engine stuck soon and works beside the others; then
        the worker is killed."""
        quick = voice.paced(0.0, self._cluster.gate)
        self._cluster.start_worker(9, SPEECH_WORKER__ITEM_TIMEOUT_SECONDS=str(STUCK_SECONDS), **quick)
        worker = self._cluster.workers[9].pid
        wait_until(lambda: self._engines_of(worker), 30)
        time.sleep(chance.uniform(0.5, 2.0))
        frozen = self._engines_of(worker)
        for number, seconds in ((signal.SIGSTOP, ENGINE_FROZEN_SECONDS), (signal.SIGCONT, 1.0)):
            for engine in frozen:
                self._signal(engine, number)
            time.sleep(seconds)
        self._cluster.end_worker(9)

    def _engines_of(self, worker: int) -> list[int]:
        return [pid for pid in self._mark.processes("jobs.engine_process") if pid in children(worker)]

    def _wrong_clock(self, chance: random.Random) -> None:
        """Another worker whose wall clock is two hours off works beside the others, and is killed."""
        self._cluster.start_worker(9, NIGHTJAR_CLOCK_SKEW=chance.choice(["-7200", "7200"]))
        time.sleep(6.0)
        self._cluster.end_worker(9)

    def _bounce(self, service: Service, away_seconds: float) -> None:
        service.kill()
        time.sleep(away_seconds)
        service.start()

    def _pause(self, service: Service, seconds: float) -> None:
        service.pause()
        time.sleep(seconds)
        service.unpause()

    def _read_only(self, chance: random.Random) -> None:
        """The broker becomes the replica of a server that is not there, and takes no writes."""
        self._broker.replicaof("127.0.0.1", "9")
        time.sleep(chance.uniform(0.5, 3.0))
        self._broker.replicaof("NO", "ONE")

    def _malformed(self, chance: random.Random) -> None:
        for text in MALFORMED:
            self._broker.lpush(f"{KEY_PREFIX}{QUEUE}", text)

    def _repeat(self, chance: random.Random) -> None:
        shards = self.ledger.job(self.job).total_shards
        Publisher(self._cluster.settings).publish(
            [Ticket(self.job, shard, epoch) for shard in range(shards) for epoch in range(3)]
        )

    def _database_away(self, chance: random.Random) -> None:
        """Long enough for a worker that is started again and again to find no database each time."""
        self._cluster.postgres.kill()
        self._signal(chance.choice(self._workers()), signal.SIGKILL)
        time.sleep(16.0)
        self._cluster.postgres.start()

    def _end_connections(self, chance: random.Random) -> None:
        self._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    def _clock_jump(self, chance: random.Random) -> None:
        """What a database clock leaves that was a day ahead for a moment, when a worker claimed a shard
        and then died."""
        self._execute(
            "UPDATE shards SET lease_until = lease_until + 86400, heartbeat_at = heartbeat_at + 86400 WHERE state = 'leased'"
        )
        self._execute("UPDATE shards SET enqueued_at = enqueued_at + 86400 WHERE state = 'queued'")
        self._execute(
            "UPDATE shards SET not_before = not_before + 86400 WHERE state = 'ready' AND not_before IS NOT NULL"
        )
        self._signal(chance.choice(self._workers()), signal.SIGKILL)

    def _pause_job(self, chance: random.Random) -> None:
        self.ledger.pause(self.job)
        time.sleep(chance.uniform(0.5, 2.0))
        self.ledger.resume(self.job)

    def _sweep(self, chance: random.Random) -> None:
        """Looks for what nothing names in every job that has ended, however lately, and deletes it."""
        sweep(self.ledger, lambda url: open_store(url, self._cluster.settings.s3), 0.0, delete=True)

    def _empty_files(self, chance: random.Random) -> None:
        """Files without content under the keys of items that are not done, as a file system may leave them
        after a power cut."""
        from jobs.layout import item_key

        pending = [row for row in self.ledger.items(self.job) if row.state is ItemState.PENDING]
        for row in chance.sample(pending, min(5, len(pending))):
            path = self._cluster.objects / item_key(self.job, "audio", row.index, row.example_id, "wav")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch()

    def _unmount(self, chance: random.Random) -> None:
        """The store's folder is away for seconds, and an empty one in its place."""
        self._at_work()
        with self._stubs.instead_of(self._cluster.objects):
            time.sleep(chance.uniform(2.0, 6.0))

    def _flip_bits(self, chance: random.Random) -> None:
        self._at_work()
        self.effects["claims of flipped inputs"] += flip_inputs(
            self.ledger, self.job, self._cluster.objects, chance
        )

    def _forget_objects(self, chance: random.Random) -> None:
        assert self._cluster.proxy is not None
        self._at_work()
        self._cluster.proxy.forget(chance.choice(sorted(FORGOTTEN)), FORGOTTEN_SECONDS)
        time.sleep(FORGOTTEN_SECONDS)

    def _flip_bit(self, chance: random.Random) -> None:
        assert self._cluster.proxy is not None
        self._cluster.proxy.flip_next(f"/jobs/{self.job}/input/")

    def _restore_ledger(self, chance: random.Random) -> None:
        """A person puts back a copy of the database that is some items old, while no worker runs."""
        name, backup = self._cluster.database_url.rpartition("/")[2], self._cluster.folder / "ledger.backup"
        self._cluster.postgres.dump(name, backup)
        done = self._more_done(chance)
        self._kill_ours()
        self._cluster.postgres.restore(name, backup)
        self._seen_done = patiently(lambda: self.ledger.status(self.job)).items.done
        self.effects["items forgotten by the ledger"] += max(0, done - self._seen_done)

    def _restore_store(self, chance: random.Random) -> None:
        """A person puts back a copy of the store that is some items old, while no worker runs; in a
        bucket, what is newer is deleted.

        The copy is older than the end of the first job, of which it has the inputs.
        """
        self._store_restored = True
        before = self._done()
        if self._cluster.seaweedfs is None:
            backup = self._cluster.folder / "backup"
            copy_of(self._cluster.objects, backup)
            done = self._more_done(chance)
            self._kill_ours()
            shutil.rmtree(self._cluster.objects)
            os.rename(backup, self._cluster.objects)
            newer: list[str] = []
        else:
            kept = {info.key for info in patiently(lambda: list(self.store.list("jobs/")))}
            done = self._more_done(chance)
            self._kill_ours()
            newer = [
                info.key for info in patiently(lambda: list(self.store.list("jobs/"))) if info.key not in kept
            ]
        for job in self.ended:
            newer += [
                info.key
                for info in patiently(lambda job=job: list(self.store.list(f"jobs/{job}/")))
                if "/input/" not in info.key
            ]
        for first in range(0, len(newer), 1000):
            patiently(lambda first=first: self.store.delete_many(newer[first : first + 1000]))
        self.effects["objects forgotten by the store"] += max(0, done - before)

    def _at_work(self) -> None:
        """Returns once workers make items, which those that only start do not."""
        before = self._done()
        wait_until(lambda: self._done() > before or self._left() <= 1, 60, self.mend)

    def _more_done(self, chance: random.Random) -> int:
        """How many items are done, after some more were."""
        before = self._done()
        wait_until(lambda: self._done() > before + chance.randrange(16) or self._left() <= 1, 15, self.mend)
        return self._done()

    def _execute(self, statement: str) -> None:
        with self.ledger.engine.begin() as connection:
            connection.execute(sa.text(statement))

    def _until(self, condition: Callable[[], object], seconds: float) -> None:
        wait_until(condition, seconds, self.mend)
