"""The way that a job takes, as a user types it: `nightjar run` into a folder."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process_use import ProcessUse

_COMMITS = "SELECT made_at, count(*), sum(duration_ms) / 1000.0 FROM artifacts WHERE kind = 'audio' GROUP BY made_at ORDER BY made_at"
_FAILED = "SELECT count(*) FROM items WHERE state IN (2, 3)"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Ran:
    """What is asked for: a file, a new folder, a model, the checks, the GPUs, the processes' environment and the longest time."""

    source: Path
    folder: Path
    model: str
    qa: str
    gpus: int
    environment: dict[str, str]
    most_seconds: float

    @property
    def job_options(self) -> list[str]:
        return ["--model", self.model, "--voice", "ryan", "--language", "english", "--qa", self.qa, "--json"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. One that was interrupted at its longest time still has its commits."""

    status: int
    seconds: float
    #: From the start of the command to the first audio file in the store.
    first_audio_seconds: float | None
    #: (Unix time, items, seconds of audio) of each commit.
    commits: list[tuple[float, int, float]]
    failed: int
    use: ProcessUse
    #: Lines of the worker's log that say how it runs.
    said: list[str]


class FirstFile:
    """Notes when the first audio file of a store in a folder is there."""

    def __init__(self, home: Path) -> None:
        self._home, self._done = home, threading.Event()
        self.at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="first-file", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        self._done.set()
        self._thread.join()
        return self.at

    def _watch(self) -> None:
        while self.at is None and not self._done.wait(_POLL_SECONDS):
            if any(self._home.glob("jobs/*/audio/*/*.wav")):
                self.at = time.perf_counter()


def command(*words: str) -> list[str]:
    """`nightjar ...` of the packages in PYTHONPATH: the working directory must not shadow them."""
    return [sys.executable, "-P", "-m", "jobs", *words]


def run_into_folder(asked: Ran) -> Finished:
    """`nightjar run` with no other setting; its ledger is a SQLite file in the folder."""
    home = asked.folder / "out"
    words = ["run", str(asked.source), "--out", str(home), *asked.job_options]
    if asked.gpus > 1:
        words += ["--gpu", ",".join(map(str, range(asked.gpus)))]
    began = time.perf_counter()
    with (asked.folder / "stdout").open("wb") as out, (asked.folder / "stderr").open("wb") as error:
        process = subprocess.Popen(command(*words), cwd=asked.folder, env=asked.environment, stdout=out, stderr=error)
    first, use = FirstFile(home), ProcessUse([process.pid])
    try:
        status = process.wait(asked.most_seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        status = process.wait()
    seconds = time.perf_counter() - began
    use.stop()
    first_at = first.stop()
    log, ledger = home / ".nightjar" / "worker.log", home / ".nightjar" / "ledger.sqlite"
    commits: list[tuple[float, int, float]] = []
    failed = 0
    if ledger.is_file():
        with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
            commits = connection.execute(_COMMITS).fetchall()
            failed = connection.execute(_FAILED).fetchone()[0]
    if not commits:
        said = (asked.folder / "stderr").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"`nightjar run` ended with status {status} and made nothing: {said}\n{tail(log)}")
    first_seconds = None if first_at is None else first_at - began
    return Finished(status, seconds, first_seconds, commits, failed, use, start_lines(log))


def tail(log: Path, characters: int = 3000) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-characters:] if log.is_file() else ""


def start_lines(log: Path) -> list[str]:
    """What a worker says of itself before its first shard, and its warnings."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    words = ("worker up", "model ready", "engine", "warning", "error")
    return [line[:400] for line in lines if any(word in line for word in words)][:12]
