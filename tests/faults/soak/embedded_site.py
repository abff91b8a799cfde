"""`nightjar run` in a folder: its processes are killed, stopped and fooled, its folder goes away, and the
same command is given again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import redis

from jobs.layout import item_key
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState
from jobs.store import FolderStore
from jobs.store.base import ObjectStore
from pipelines.errors import NightjarError
from tests.faults.cluster import TIMING
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
from tests.faults.soak.voice import NAME, installed, paced
from tests.support.cli_kit import run_command

TIMES = {
    name: TIMING[name]
    for name in (
        "NIGHTJAR_TIMES__LEASE_SECONDS",
        "NIGHTJAR_TIMES__HEARTBEAT_SECONDS",
        "NIGHTJAR_TIMES__SHARD_ITEMS",
    )
}
#: For a run to end whose folder was renamed.
STOP_SECONDS = 60.0


class EmbeddedSite:
    """One folder, one command. Its engine takes `seconds` for an item while the faults last."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.job = ""
        self.ended: Mapping[str, Mapping[str, str]] = {}
        self.effects: Counter[str] = Counter()
        self.untold: list[str] = []
        self._folder = folder
        self._home = folder / "out"
        self._gate = folder / "gate"
        self._mark = Mark()
        self._stubs = Stubs(folder / "stubs")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        of_voice = installed(folder / "site") | paced(seconds, self._gate)
        self._environment = (
            clean
            | {"SPT_NOENV": "1", "XDG_STATE_HOME": str(folder / "state")}
            | TIMES
            | of_voice
            | self._mark.environment
        )
        self._run: subprocess.Popen[bytes] | None = None
        self._ledger: Ledger | None = None
        self._seen_done = 0

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(f"sqlite:///{self._database}")
        return self._ledger

    @property
    def store(self) -> ObjectStore:
        return FolderStore(self._home)

    @property
    def repaired_by_hand(self) -> bool:
        """A run looks itself for what is lost."""
        return False

    def begin(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        first = next(iter(texts))
        held = {**texts, first: f"{texts[first]} [[until:{self._gate}]]"}
        lines = (
            json.dumps({"example_id": name, "messages": [["user", "text", text]]})
            for name, text in held.items()
        )
        (self._folder / "in.jsonl").write_text("\n".join(lines) + "\n")
        self.mend()
        wait_until(lambda: self._database.exists() and self._jobs(), 240)
        (self.job,) = self._jobs()
        return held

    def faults(self) -> Mapping[str, Fault]:
        return {
            "command killed": lambda _: self._signal(self._command(), signal.SIGKILL),
            "command interrupted": lambda _: self._signal(self._command(), signal.SIGINT),
            "command ended": lambda _: self._signal(self._command(), signal.SIGTERM),
            "everything killed": lambda _: self._kill_all(),
            "worker killed": lambda _: self._signal(self._find("worker run", "celeryd"), signal.SIGKILL),
            "worker frozen": lambda chance: self._freeze(self._find("worker run", "celeryd"), 8.0),
            "engine killed": lambda _: self._signal(self._find("jobs.engine_process"), signal.SIGKILL),
            "engine frozen": self._freeze_engine,
            "broker killed": lambda _: self._signal(self._find("valkey-server"), signal.SIGKILL),
            "broker frozen": lambda chance: self._freeze(
                self._find("valkey-server"), chance.uniform(0.5, 3.0)
            ),
            "broker emptied": self._empty_broker,
            "command frozen": lambda chance: self._freeze(self._command(), 8.0),
            "empty files of a power cut": self._empty_files,
            "store unmounted": self._unmount,
            "bits of inputs flipped": self._flip_bits,
            "output folder renamed": self._rename,
            "ledger restored from a backup": self._restore_ledger,
            "store restored from a backup": self._restore_store,
        }

    def mend(self) -> None:
        if self._run is not None and self._run.poll() is not None:
            wait_until(lambda: not self._mark.processes(), 120)
        if self._run is None or self._run.poll() is not None:
            self._start()

    def wait_for_progress(self) -> None:
        wait_until(lambda: self._done() > self._seen_done or self._left() <= 1, 300, self.mend)
        self._seen_done = self._done()

    def let_go(self) -> None:
        self._gate.touch()

    def settle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.mend()
            assert self._run is not None
            with suppress(subprocess.TimeoutExpired):
                if self._run.wait(max(1.0, deadline - time.monotonic())) == 0:
                    return

    def verify(self, job: str) -> tuple[int, str]:
        arguments = ["verify", job, "--repair", "--sample", "0", "--out", str(self._home), "--json"]
        done = run_command(self._folder, arguments, self._environment)
        return done.returncode, done.stdout + done.stderr

    def left_behind(self) -> list[str]:
        hidden = [path for path in self._home.rglob(".*") if path.is_file() and ".nightjar" not in path.parts]
        state = [self._home / ".nightjar" / name for name in ("broker.json",)]
        return [f"process {pid}" for pid in self._mark.processes()] + [
            str(path) for path in [*hidden, *state] if path.exists()
        ]

    def outside(self) -> list[str]:
        ours = {
            "in.jsonl",
            "run.log",
            "gate",
            "site",
            "state",
            "stubs",
            "backup",
            "ledger.backup",
            self._home.name,
        }
        others = [
            path
            for path in self._folder.iterdir()
            if path.name not in ours and not path.name.startswith("crashed-")
        ]
        return self._stubs.files() + [str(path) for path in others]

    def end(self) -> None:
        self._kill_all()
        self._forget_ledger()

    @property
    def _database(self) -> Path:
        return self._home / ".nightjar" / "ledger.sqlite"

    def _start(self, **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "jobs",
            "run",
            "in.jsonl",
            "--model",
            NAME,
            "--out",
            self._home.name,
            "--set",
            "max_attempts=50",
        ]
        variables = self._environment | environment
        with (self._folder / "run.log").open("ab") as log:
            self._run = subprocess.Popen(
                command, cwd=self._folder, env=variables, stdout=log, stderr=log, start_new_session=True
            )

    def _jobs(self) -> list[str]:
        try:
            return [job.id for job in self.ledger.jobs(10)]
        except NightjarError:
            return []

    def _status(self) -> Any:
        try:
            return self.ledger.status(self.job)
        except NightjarError:
            return None

    def _done(self) -> int:
        status = self._status()
        return 0 if status is None else status.items.done

    def _left(self) -> int:
        status = self._status()
        return 1 << 62 if status is None else status.items.pending

    def _command(self) -> int:
        return 0 if self._run is None or self._run.poll() is not None else self._run.pid

    def _find(self, *words: str) -> int:
        """A process whose command line holds one of the words; 0: there is none now."""
        return next((pid for pid in self._mark.processes(*words) if pid != self._command()), 0)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if (
                pid == self._command()
                and number not in (signal.SIGSTOP, signal.SIGCONT)
                and self._run is not None
            ):
                self._run.wait()

    def _kill_all(self) -> None:
        # One that is about to start another is not killed in the same moment.
        while self._mark.processes():
            self._mark.signal(signal.SIGKILL)
            if self._run is not None:
                self._run.wait()
            time.sleep(0.05)

    def _forget_ledger(self) -> None:
        """Closes the soak's own connections: its next one is to the database that stands there then."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _freeze(self, pid: int, seconds: float) -> None:
        self._signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(pid, signal.SIGCONT)

    def _freeze_engine(self, chance: random.Random) -> None:
        """The engine of a run that calls an engine stuck soon. The held item fails in it, and goes on in
        the next run."""
        self._kill_all()
        self._start(SPEECH_WORKER__ITEM_TIMEOUT_SECONDS=str(STUCK_SECONDS), **paced(0.0, self._gate))
        wait_until(lambda: self._find("jobs.engine_process"), 60)
        time.sleep(chance.uniform(0.5, 2.0))
        frozen = self._find("jobs.engine_process")
        self._freeze(frozen, ENGINE_FROZEN_SECONDS)
        self._kill_all()

    def _empty_broker(self, chance: random.Random) -> None:
        with suppress(OSError, ValueError, KeyError, redis.RedisError):
            record = json.loads((self._home / ".nightjar" / "broker.json").read_text())
            redis.Redis.from_url(record["url"], socket_timeout=5).flushall()

    def _empty_files(self, chance: random.Random) -> None:
        """Files without content under the keys of items that are not done, as a file system may leave them
        after a power cut."""
        pending = [row for row in self.ledger.items(self.job) if row.state is ItemState.PENDING]
        for row in chance.sample(pending, min(5, len(pending))):
            path = self._home / item_key(self.job, "audio", row.index, row.example_id, "wav")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch()

    def _unmount(self, chance: random.Random) -> None:
        """The folder of everything is away for seconds, and an empty one in its place."""
        self._at_work()
        self._forget_ledger()
        with self._stubs.instead_of(self._home):
            time.sleep(chance.uniform(2.0, 6.0))

    def _flip_bits(self, chance: random.Random) -> None:
        self._at_work()
        self.effects["claims of flipped inputs"] += flip_inputs(self.ledger, self.job, self._home, chance)

    def _rename(self, chance: random.Random) -> None:
        """A person renames the folder under a run, which has to stop and say so; the next run is given the
        new name."""
        self._at_work()
        self._forget_ledger()
        old, log = self._home, self._folder / "run.log"
        said = log.stat().st_size
        self._home = self._folder / f"out-{self.effects['folder renamed'] + 1}"
        os.rename(old, self._home)
        self.effects["folder renamed"] += 1
        ended = wait_until(lambda: not self._command(), STOP_SECONDS)
        words = log.read_bytes()[said:].decode(errors="replace")
        if not ended or str(old) not in words or self._run is None or self._run.returncode in (None, 0):
            self.untold.append(
                f"a run did not end with a sentence about its folder {old}, which was renamed; it said {words[-300:]!r}"
            )
        self._kill_all()
        if old.exists():
            self._stubs.keep(old)

    def _restore_ledger(self, chance: random.Random) -> None:
        """A person puts back a copy of the database that is some items old, while nothing runs."""
        self._at_work()
        backup = self._folder / "ledger.backup"
        backup.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(self._database, timeout=60)) as live,
            closing(sqlite3.connect(backup)) as copy,
        ):
            live.backup(copy)
        done = self._more_done(chance)
        self._kill_all()
        self._forget_ledger()
        for end in ("", "-wal", "-shm", "-journal"):
            self._database.with_name(self._database.name + end).unlink(missing_ok=True)
        shutil.copyfile(backup, self._database)
        self._seen_done = self._done()
        self.effects["items forgotten by the ledger"] += max(0, done - self._seen_done)

    def _restore_store(self, chance: random.Random) -> None:
        """A person puts back a copy of the store that is some items old, while nothing runs."""
        self._at_work()
        backup = self._folder / "backup"
        copy_of(self._home, backup, but=".nightjar")
        before = self._done()
        done = self._more_done(chance)
        self._kill_all()
        for path in self._home.iterdir():
            if path.is_dir() and path.name != ".nightjar":
                shutil.rmtree(path)
            elif path.name != ".nightjar":
                path.unlink()
        for path in backup.iterdir():
            os.rename(path, self._home / path.name)
        self.effects["objects forgotten by the store"] += max(0, done - before)

    def _at_work(self) -> None:
        """Returns once the run makes items: one that only starts would begin anew in an empty folder, as
        it was told to."""
        before = self._done()
        wait_until(lambda: self._done() > before or self._left() <= 1, 120, self.mend)

    def _more_done(self, chance: random.Random) -> int:
        """How many items are done, after some more were."""
        before = self._done()
        wait_until(lambda: self._done() > before + chance.randrange(16) or self._left() <= 1, 15, self.mend)
        return self._done()
