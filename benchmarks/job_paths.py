"""The two ways of a job as a user types them: `nightjar run` into a folder; `nightjar submit` for a
`nightjar worker` with services."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.host_use import HostUse
from benchmarks.process_profile import profiles
from benchmarks.process_use import ProcessUse

if TYPE_CHECKING:
    from benchmarks.services import Services

_COMMITS = "SELECT made_at, count(*), sum(duration_ms) / 1000.0 FROM artifacts WHERE kind = 'audio' GROUP BY made_at ORDER BY made_at"
_FAILED = "SELECT count(*) FROM items WHERE state IN (2, 3)"
_REPEATED = "SELECT count(*) FROM draws WHERE draw > 0"
_OBJECTS = "SELECT idx, key, sha256 FROM artifacts WHERE kind = 'audio' ORDER BY idx"
_ATTEMPTS = "SELECT outcome, count(*) FROM attempts GROUP BY outcome"
_DONE = "SELECT count(*) FROM artifacts WHERE kind = 'audio'"
_ENDED = "SELECT 1 FROM jobs WHERE finished_at IS NOT NULL"
_POLL_SECONDS = 0.05
#: How long a command that is interrupted may take to end.
_DRAIN_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What is asked for: a file, a new folder, a model, the checks, the GPUs, the processes' environment
    and the longest time."""

    source: Path
    folder: Path
    model: str
    qa: str
    gpus: int
    environment: dict[str, str]
    most_seconds: float
    on_gpu: bool = True
    #: Seconds that the busiest processes are sampled, some time after the first audio; 0: not at all.
    profile_seconds: float = 0.0
    profile_after_seconds: float = 12.0
    #: Whether the voice is one of the planted ones, which have a speaker and a language.
    speaks: bool = True
    #: What the worker is given beside its GPUs.
    worker_options: tuple[str, ...] = ()
    #: Called again and again while a worker with services runs, with its process and the items that are done.
    look: Callable[[int, int], None] | None = None
    #: After the job's end the worker goes on until this says True of its log.
    until: Callable[[str], bool] | None = None

    @property
    def name(self) -> str:
        """Of its database and its prefix in the store."""
        return self.folder.name.replace("_", "x")

    @property
    def gpu_list(self) -> str:
        return ",".join(map(str, range(self.gpus)))

    def settle(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits until a job is at its full speed; whether its command has ended before."""
        until = time.monotonic() + self.profile_after_seconds
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.1)
        return process.poll() is not None

    @property
    def job_options(self) -> list[str]:
        spoken = ["--voice", "ryan", "--language", "english"] if self.speaks else []
        return ["--model", self.model, *spoken, "--qa", self.qa, "--json"]

    @property
    def gpu_options(self) -> list[str]:
        """On a CPU several workers have GPUs in name only."""
        return ["--gpu", self.gpu_list] if self.gpus > 1 or self.on_gpu else []


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. One that was interrupted at its longest time still has its commits."""

    status: int
    seconds: float
    #: From the start of the command to the first audio file in the store.
    first_audio_seconds: float | None
    made: Made
    use: ProcessUse
    host: HostUse
    #: What the services used.
    beside: ProcessUse | None
    #: Lines of the worker's log that say how it runs.
    said: list[str]
    profiles: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Made:
    """What a ledger says of its one job."""

    #: (Unix time, items, seconds of audio) of each commit.
    commits: list[tuple[float, int, float]]
    failed: int = 0
    #: Draws after an item's first.
    repeated_draws: int = 0
    #: Key and SHA-256 of each item's audio, by the item's number in the input.
    objects: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    #: Leases of shards by how they ended.
    attempts: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def read(cls, execute: Callable[[str], Any]) -> Made:
        """`execute`: runs a statement of SQL on a connection."""
        commits = [
            (float(at), int(items), float(seconds)) for at, items, seconds in execute(_COMMITS).fetchall()
        ]
        failed, repeated = (int(execute(text).fetchone()[0]) for text in (_FAILED, _REPEATED))
        objects = {int(index): (str(key), str(sha256)) for index, key, sha256 in execute(_OBJECTS).fetchall()}
        return cls(
            commits,
            failed,
            repeated,
            objects,
            {str(outcome): int(count) for outcome, count in execute(_ATTEMPTS).fetchall()},
        )


class FirstAudio:
    """Notes how many seconds after now `there` first says that a store has audio; then calls `then`."""

    def __init__(self, there: Callable[[], bool], then: Callable[[], None]) -> None:
        self._there, self._then, self._done = there, then, threading.Event()
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._watch, name="first-audio", daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        self._done.set()
        self._thread.join()
        return self._seconds

    def _watch(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            if self._there():
                self._seconds = time.perf_counter() - self._began
                self._then()
                return


def command(*words: str) -> list[str]:
    """`nightjar ...` of the packages in PYTHONPATH: the working directory must not shadow them."""
    return [sys.executable, "-P", "-m", "jobs", *words]


def run_into_folder(asked: Ran) -> Finished:
    """`nightjar run` with no other setting; its ledger is a SQLite file in the folder."""
    home = asked.folder / "out"
    words = [
        "run",
        str(asked.source),
        "--out",
        str(home),
        *asked.job_options,
        *(asked.gpu_options if asked.gpus > 1 else []),
    ]
    with Watched(
        asked, command(*words), asked.environment, lambda: any(home.glob("jobs/*/audio/*/*.wav"))
    ) as watched:
        status = watched.wait(asked.most_seconds)
    state = home / ".nightjar"
    ledger = state / "ledger.sqlite"
    made = Made([])
    if ledger.is_file():
        with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
            made = Made.read(connection.execute)
    return watched.finished(status, made, sorted(state.glob("worker*.log")))


def run_with_services(asked: Ran, services: Services) -> Finished:
    """`nightjar submit`, then `nightjar worker` until the job has ended; a database and a prefix of their
    own."""
    import psycopg

    from benchmarks.services import first_audio

    parts = services.new_job_parts(asked.name)
    environment = asked.environment | parts
    database = parts["SPEECH_DATABASE_URL"]
    for words in (["db", "upgrade"], ["submit", str(asked.source), *asked.job_options]):
        subprocess.run(
            command(*words), cwd=asked.folder, env=environment, check=True, stdout=subprocess.DEVNULL
        )
    words = ["worker", *asked.gpu_options, *asked.worker_options]
    beside = ProcessUse(services.pids)
    with (
        psycopg.connect(database, autocommit=True) as connection,
        Watched(asked, command(*words), environment, lambda: first_audio(services, parts)) as watched,
    ):
        ended = lambda: bool(connection.execute(_ENDED).fetchall())  # noqa: E731
        while watched.goes_on() and not ended():
            if asked.look is not None and (done := connection.execute(_DONE).fetchone()) is not None:
                asked.look(watched.process.pid, int(done[0]))
            time.sleep(0.25)
        watched.job_ended()
        while asked.until is not None and watched.goes_on() and not asked.until(watched.said):
            time.sleep(0.25)
        watched.process.terminate()
        status = watched.wait(60.0)
        beside.stop()
        made = Made.read(lambda text: connection.execute(text.encode()))
    return watched.finished(status, made, [asked.folder / "stderr"], beside)


class Watched:
    """A command that runs, what its processes use, and when its first audio is there."""

    def __init__(
        self, asked: Ran, words: list[str], environment: dict[str, str], there: Callable[[], bool]
    ) -> None:
        self._asked, self._began = asked, time.perf_counter()
        with (asked.folder / "stdout").open("wb") as out, (asked.folder / "stderr").open("wb") as error:
            self.process = subprocess.Popen(
                words, cwd=asked.folder, env=environment, stdout=out, stderr=error
            )
        self._until = self._began + asked.most_seconds
        self._seconds: float | None = None
        self._use, self._host = ProcessUse([self.process.pid]), HostUse()
        self._profiles: list[dict[str, Any]] = []
        self._first = FirstAudio(there, self._profile)

    def __enter__(self) -> Watched:
        return self

    @property
    def said(self) -> str:
        """What the command has written to standard error."""
        return (self._asked.folder / "stderr").read_text(encoding="utf-8", errors="replace")

    def goes_on(self) -> bool:
        """Whether the command runs and has time left."""
        return self.process.poll() is None and time.perf_counter() < self._until

    def job_ended(self) -> None:
        """The command's time is that until now, though it runs on."""
        self._seconds = time.perf_counter() - self._began

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.wait(0.0)

    def wait(self, most_seconds: float) -> int:
        """The exit status; a command that takes longer is interrupted, and then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                status = self.process.wait(most_seconds)
                break
            except subprocess.TimeoutExpired:
                self.process.send_signal(number)
                most_seconds = _DRAIN_SECONDS
        else:
            status = self.process.wait()
        if self._seconds is None:
            self.job_ended()
        self._use.stop()
        self._host.stop()
        return status

    def finished(
        self, status: int, made: Made, logs: list[Path], beside: ProcessUse | None = None
    ) -> Finished:
        """What came of it. Raises `RuntimeError` with the last words of a command that made nothing."""
        first, lines = self._first.stop(), [line for log in logs for line in start_lines(log)]
        if not made.commits:
            said = "\n".join(
                log.read_text(encoding="utf-8", errors="replace")[-2000:]
                for log in (self._asked.folder / "stderr", *logs)
            )
            raise RuntimeError(f"The command ended with status {status} and made nothing: {said}")
        return Finished(
            status, self._seconds or 0.0, first, made, self._use, self._host, beside, lines, self._profiles
        )

    def _profile(self) -> None:
        if self._asked.profile_seconds and not self._asked.settle(self.process):
            self._profiles += profiles(self._use.busiest(2), self._asked.profile_seconds, self._asked.folder)


def start_lines(log: Path) -> list[str]:
    """What a worker says of itself before its first shard, and its warnings."""
    words = ("worker up", "model ready", "model open", "engine", "warning", "error")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:400] for line in lines if any(word in line for word in words)][:12]
