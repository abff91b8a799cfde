"""`nightjar run` in a folder: its command, worker and broker are killed, stopped and fooled, and the same command is given again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from jobs.layout import audio_key
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState
from jobs.store import FolderStore
from jobs.store.base import ObjectStore
from pipelines.errors import NightjarError
from pipelines.registry import ENTRY_POINT_GROUP, ModelCard
from pipelines.request import Pipeline
from tests.faults.cluster import ENGINE, REPOSITORY, TIMING
from tests.faults.soak.site import Fault
from tests.support.fakes import SAMPLE_RATE, FakePipeline

TIMES = {name: TIMING[name] for name in ("SPEECH_WORKER__LEASE_SECONDS", "SPEECH_WORKER__HEARTBEAT_SECONDS", "SPEECH_SHARD__MAX_ITEMS")}


def describe() -> ModelCard:
    return ModelCard("tormented", "fake", "cpu", SAMPLE_RATE, FakePipeline().capabilities, "1", seconds_per_character=0.01, rtf=0.01)


def load(**_: object) -> Pipeline:
    return FakePipeline("tormented", **ENGINE)


class EmbeddedSite:
    """One folder, one command."""

    def __init__(self, folder: Path) -> None:
        self.job = ""
        self.ended: Mapping[str, Mapping[str, str]] = {}
        self._folder = folder
        self._home = folder / "out"
        self._gate = folder / "gate"
        self._mark = f"NIGHTJAR_CHAOS_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        self._environment = clean | {name: value, "SPT_NOENV": "1", "XDG_STATE_HOME": str(folder / "state"), **TIMES, **self._install()}
        self._run: subprocess.Popen[bytes] | None = None
        self._ledger: Ledger | None = None
        self._seen_done = 0

    def _install(self) -> dict[str, str]:
        """What pip would write of a package with this voice, and the variables under which a process has it."""
        info = self._folder / "site" / "tormented_voice-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tormented-voice\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntormented = {__name__}\n")
        return {"PYTHONPATH": f"{info.parent}:{REPOSITORY}"}

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger.open(f"sqlite:///{self._home}/.nightjar/ledger.sqlite")
        return self._ledger

    @property
    def store(self) -> ObjectStore:
        return FolderStore(self._home)

    def begin(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        first = next(iter(texts))
        held = {**texts, first: f"{texts[first]} [[until:{self._gate}]]"}
        lines = (json.dumps({"example_id": name, "messages": [["user", "text", text]]}) for name, text in held.items())
        (self._folder / "in.jsonl").write_text("\n".join(lines) + "\n")
        self.mend()
        self._until(lambda: (self._home / ".nightjar" / "ledger.sqlite").exists() and self._jobs(), 240)
        (self.job,) = self._jobs()
        return held

    def faults(self) -> Mapping[str, Fault]:
        return {
            "command killed": lambda _: self._signal(self._command(), signal.SIGKILL),
            "command interrupted": lambda _: self._signal(self._command(), signal.SIGINT),
            "command ended": lambda _: self._signal(self._command(), signal.SIGTERM),
            "everything killed": lambda _: self._signal_all(signal.SIGKILL),
            "worker killed": lambda _: self._signal(self._find("worker run", "celeryd"), signal.SIGKILL),
            "worker frozen": lambda chance: self._freeze(self._find("worker run", "celeryd"), 8.0),
            "broker killed": lambda _: self._signal(self._find("valkey-server"), signal.SIGKILL),
            "broker frozen": lambda chance: self._freeze(self._find("valkey-server"), chance.uniform(0.5, 3.0)),
            "broker emptied": self._empty_broker,
            "command frozen": lambda chance: self._freeze(self._command(), 8.0),
            "empty files of a power cut": self._empty_files,
        }

    def mend(self) -> None:
        if self._run is not None and self._run.poll() is not None:
            self._until(lambda: not self._processes(), 120)
        if self._run is None or self._run.poll() is not None:
            log = (self._folder / "run.log").open("ab")
            command = [sys.executable, "-m", "jobs", "run", "in.jsonl", "--model", "tormented", "--out", "out", "--max-attempts", "50"]
            self._run = subprocess.Popen(command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True)
            log.close()

    def wait_for_progress(self) -> None:
        self._until(lambda: self._done() > self._seen_done or self._left() <= 1, 300)
        self._seen_done = self._done()

    def let_go(self) -> None:
        self._gate.touch()

    def settle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.mend()
            assert self._run is not None
            if self._run.wait() == 0:
                return

    def left_behind(self) -> list[str]:
        hidden = [path for path in self._home.rglob(".*") if path.is_file() and ".nightjar" not in path.parts]
        state = [self._home / ".nightjar" / name for name in ("broker.json",)]
        return [f"process {pid}" for pid in self._processes()] + [str(path) for path in [*hidden, *state] if path.exists()]

    def end(self) -> None:
        self._signal_all(signal.SIGKILL)
        if self._run is not None:
            self._run.wait()
        if self._ledger is not None:
            self._ledger.close()

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
        return 1 << 62 if status is None else status.items.total - status.items.done

    def _command(self) -> int:
        return 0 if self._run is None or self._run.poll() is not None else self._run.pid

    def _processes(self, *words: str) -> list[int]:
        """Ids of the live processes that came of the command; with words, those whose command line holds one of them."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit() or self._mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not words or any(word in line for word in words):
                    found.append(int(entry.name))
        return found

    def _find(self, *words: str) -> int:
        """A process whose command line holds one of the words; 0: there is none now."""
        return next((pid for pid in self._processes(*words) if pid != self._command()), 0)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if pid == self._command() and number not in (signal.SIGSTOP, signal.SIGCONT) and self._run is not None:
                self._run.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if self._run is not None:
            self._run.wait()

    def _freeze(self, pid: int, seconds: float) -> None:
        self._signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(pid, signal.SIGCONT)

    def _empty_broker(self, chance: random.Random) -> None:
        with suppress(OSError, ValueError, KeyError, redis.RedisError):
            record = json.loads((self._home / ".nightjar" / "broker.json").read_text())
            redis.Redis.from_url(record["url"], socket_timeout=5).flushall()

    def _empty_files(self, chance: random.Random) -> None:
        """Files without content under the keys of items that are not done, as a file system may leave them after a power cut."""
        pending = [row for row in self.ledger.items(self.job) if row.state is ItemState.PENDING]
        for row in chance.sample(pending, min(5, len(pending))):
            path = self._home / audio_key(self.job, row.index, row.example_id, "wav")
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.touch()

    def _until(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.2)
