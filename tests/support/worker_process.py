"""Real worker processes with the fake engine, a ledger, a broker and a store, for tests of the whole path."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from msgspec import UNSET

from jobs.dispatch import Publisher, dispatch
from jobs.ingest import NO_OPTIONS, SubmitOptions, submit
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec
from jobs.ledger.status import JobStatus
from jobs.settings import Settings, load_settings
from jobs.store import open_store
from tests.support.fake_worker import register
from tests.support.forked import Forked, is_like_this_process

REPOSITORY = Path(__file__).parents[2]
Started = subprocess.Popen[bytes] | Forked

#: Settings of a worker that a test need not wait for. Leases are not short: they would end under a machine
#: that stands still.
QUICK = {
    "NIGHTJAR_TIMES__LEASE_SECONDS": "600",
    "NIGHTJAR_TIMES__HEARTBEAT_SECONDS": "0.5",
    "NIGHTJAR_TIMES__COMMIT_SECONDS": "0.2",
    "NIGHTJAR_TIMES__DISPATCH_SECONDS": "0.3",
    "NIGHTJAR_TIMES__RECONCILE_SECONDS": "0.5",
    "NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS": "3",
    "NIGHTJAR_TIMES__SHARD_ITEMS": "16",
    "SPEECH_LOG_FORMAT": "json",
}


class Site:
    """An installation in a folder. Worker processes that still run at the end are killed.

    What `held` makes of a text does not end before `let_go`.
    """

    def __init__(
        self, folder: Path, broker_url: str, database_url: str | None = None, **environment: str
    ) -> None:
        self.folder = folder
        self.environment = {
            **QUICK,
            "SPEECH_HOME": str(folder / "home"),
            "SPEECH_BROKER_URL": broker_url,
            **environment,
        }
        if database_url is not None:
            self.environment["SPEECH_DATABASE_URL"] = database_url
        self.settings = self._load()
        self.ledger = Ledger(self.settings.ledger_url)
        self.ledger.migrate()
        self.store = open_store(self.settings.effective_store_url, self.settings.s3)
        self.processes: list[Started] = []
        register()

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.ledger.close()

    def submit(
        self,
        texts: Sequence[str],
        *,
        model: str = "fake",
        options: SubmitOptions = NO_OPTIONS,
        pack: bool = False,
    ) -> Job:
        path = self.folder / f"{time.monotonic_ns()}.jsonl"
        lines = [
            {"example_id": f"item-{n}", "messages": [["user", "text", text]]} for n, text in enumerate(texts)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return submit(
            self.settings,
            self.ledger,
            self.store,
            str(path),
            JobSpec(model=model, pack=pack or UNSET),
            options=options,
        ).job

    def held(self, text: str) -> str:
        return f"{text} [[until:{self.folder / 'gate'}]]"

    def let_go(self) -> None:
        (self.folder / "gate").touch()

    def dispatch(self) -> int:
        return dispatch(self.ledger, self.settings)

    def worker(self, *arguments: str, engine: dict[str, float] | None = None, **environment: str) -> Started:
        """Starts `worker run` and returns at once."""
        variables = (
            os.environ
            | self.environment
            | {"NIGHTJAR_FAKE": json.dumps(engine or {}), "OMP_NUM_THREADS": "1"}
            | environment
        )
        process = start_python("tests.support.fake_worker", ["run", *arguments], variables, self.log)
        self.processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    def status(self, job: Job) -> JobStatus:
        return self.ledger.status(job.id)

    def wait_for(self, condition: Callable[[], object], seconds: float = 240.0) -> None:
        """Waits; fails with the end of the workers' log."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; the log ends with {self.log_text()[-4000:]}"
            time.sleep(0.05)

    def wait_until_final(self, job: Job, seconds: float = 240.0) -> JobStatus:
        self.wait_for(lambda: self.status(job).job.state.final, seconds)
        return self.status(job)

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def queue_depth(self) -> int:
        return Publisher(self.settings).queue_depth()

    def _load(self) -> Settings:
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            return load_settings()
        finally:
            for name in self.environment:
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


def start_python(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    new_session: bool = False,
) -> Started:
    """Starts `python -m` in the repository; what it prints is added to the log."""
    if is_like_this_process(environment, but_for_paths=True):
        return Forked(
            module,
            arguments,
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=new_session,
        )
    with log.open("ab") as file:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file, start_new_session=new_session
        )


@contextmanager
def closed_port() -> Iterator[int]:
    """A port where nothing listens, nor will while it is held."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def stop(process: Started, seconds: float = 240.0) -> int:
    """Asks a worker to drain and returns its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(seconds)
