"""`nightjar run` in a folder of its own: its processes, its items, and a voice that takes time. Conftests
import the fixtures."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli_kit import JOBS, run_command
from tests.support.slow_voice import install

#: A run of the slow voice whose worker is given up after seconds.
SLOW = ("run", "in.jsonl", "--model", "slow")
WORDS = [
    "the early train",
    "crosses",
    "a quiet river",
    "while",
    "the baker",
    "opens",
    "his small shop",
    "and",
    "rain falls",
    "again",
]


def write_input(path: Path, lines: int, words: int = 8) -> Path:
    chooser = random.Random(lines)
    with path.open("w") as file:
        for number in range(lines):
            text = " ".join(chooser.choices(WORDS, k=words)).capitalize() + "."
            file.write(
                json.dumps({"example_id": f"line-{number}", "messages": [["user", "text", text]]}) + "\n"
            )
    return path


class Shell:
    """Runs `nightjar` in a folder of its own, and finds every process that came of it by a mark in its
    environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"NIGHTJAR_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        # Celery's titles of processes, where setproctitle is installed, would else be written over the mark.
        kept = {"SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        self.environment = clean | {name: value, "XDG_STATE_HOME": str(folder / "state")} | kept

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*JOBS, *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_command(self.folder, arguments, self.environment | environment)

    def processes(self, words: str = "") -> list[int]:
        """Ids of the live processes of this test whose command line holds `words`."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                marked = self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue
            if marked and words in command:
                found.append(int(entry.name))
        return found

    def items(self, home: str = "out") -> dict[str, dict[str, object]]:
        (job,) = (self.folder / home / "jobs").iterdir()
        listed = self.run("items", job.name, "--out", home, "--json")
        assert listed.returncode == 0, listed.stderr
        return {row["example_id"]: row for row in map(json.loads, listed.stdout.splitlines())}

    def hold(self, example_id: str) -> None:
        """An item of the input, to be made by the slow voice, lasts until `let_go`."""
        path = self.folder / "in.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["example_id"] == example_id:
                line["messages"][0][2] += f" [[until:{self.folder / 'state' / 'gate'}]]"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def let_go(self) -> None:
        gate = self.folder / "state" / "gate"
        # On a slow machine no run may have come so far that it made the folder.
        gate.parent.mkdir(exist_ok=True)
        gate.touch()

    def done(self, home: str = "out") -> int:
        return len(list((self.folder / home).glob("jobs/*/audio/*/*.wav")))


@pytest.fixture
def shell(tmp_path: Path):
    made = Shell(tmp_path)
    try:
        yield made
        until(lambda: not made.processes(), "processes are left")
    finally:
        for pid in made.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def slow(shell: Shell) -> Shell:
    """A shell of runs with `SLOW`, which take the time that their voice takes. No test of them could wait
    for the end of a lease."""
    times = {
        "NIGHTJAR_TIMES__LEASE_SECONDS": "3600",
        "NIGHTJAR_TIMES__HEARTBEAT_SECONDS": "1",
        "SPEECH_WORKER__DRAIN_SECONDS": "1",
    }
    shell.environment |= install(shell.folder / "site") | times
    return shell


@contextmanager
def listening_broker(home: Path) -> Iterator[None]:
    """What a home looks like while its broker runs. Its record is left, as after a kill."""
    state = home / ".nightjar"
    state.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nj-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/broker")
        listener.listen()
        (state / "broker.json").write_text(
            json.dumps({"url": f"redis+socket://{folder}/broker?virtual_host=0"})
        )
        yield


def until(condition: Callable[[], object], message: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)
