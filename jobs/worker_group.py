"""Worker processes side by side, one for each GPU: how each is started, when it is started again, and when
it is quarantined.

The ledger is told which workers of this process are quarantined, so that `nightjar workers` and
`nightjar status` show them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jobs import installed_version
from jobs.child_process import UpPipe, signal_group
from jobs.console import INVALID_INPUT
from jobs.formatting import seconds_text
from jobs.gpus import VISIBLE, Device, share_cores
from jobs.settings import Settings
from pipelines.errors import ConfigError, ErrorCode, NightjarError

FIRST_PAUSE_SECONDS = 0.5
#: A worker that ends so often in a row, with an exit status and before it came up, cannot start at all.
FAILED_STARTS = 3
#: A worker that ends so often in a row without a finished item. An item that kills its workers does so fewer
#: times before it is found.
CRASHES = 20
#: The same while other workers of this host finish items: then it is its GPU, not the job.
CRASHES_BESIDE_OTHERS = 5
#: A worker that lived so long starts its count again.
HEALTHY_SECONDS = 3600.0
LAST_PORT = 65535
#: Between two signs of life; a report without one for a minute counts as lost.
REPORT_SECONDS = 15.0
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How one worker is started. None: as its parent, on whatever the machine has."""

    device: Device | None = None
    cores: frozenset[int] | None = None
    metrics_port: int | None = None

    @property
    def name(self) -> str:
        """`The worker`, or `The worker of GPU 0`."""
        return "The worker" if self.device is None else f"The worker of GPU {self.device.name}"

    @property
    def gpu(self) -> str | None:
        return None if self.device is None else self.device.name

    @property
    def details(self) -> dict[str, object]:
        """GPU, cores and port for the log: those that are set."""
        cores = None if self.cores is None else core_text(self.cores)
        values = {"gpu": self.gpu, "cores": cores, "metrics_port": self.metrics_port}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of this worker's process, over those of its parent."""
        variables: dict[str, str] = {}
        if self.device is not None:
            # CUDA itself counts from the fastest GPU; people count as `nvidia-smi` does.
            variables |= {VISIBLE: self.device.name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if self.metrics_port is not None:
            variables["SPEECH_WORKER__METRICS_PORT"] = str(self.metrics_port)
        return variables


def plan_workers(settings: Settings, devices: Sequence[Device] | None) -> list[WorkerPlan]:
    """One worker for each device, or one as it is. Raises `config.invalid` where the ports of metrics end."""
    if devices is None:
        return [WorkerPlan()]
    shares = share_cores([device.bus_id for device in devices])
    first = settings.worker.metrics_port
    if first is not None and first + len(devices) - 1 > LAST_PORT:
        message = f"{len(devices)} workers need the ports of metrics {first} to {first + len(devices) - 1}, and {LAST_PORT} is the last one."
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, message, "Set SPEECH_WORKER__METRICS_PORT to a smaller port."
        )
    ports = [None if first is None else first + number for number in range(len(devices))]
    return [WorkerPlan(device, cores, port) for device, cores, port in zip(devices, shares, ports)]


@dataclass(slots=True)
class Member:
    """A worker process, or the time at which it will be started again."""

    plan: WorkerPlan
    pause_seconds: float
    process: subprocess.Popen[bytes] | None = None
    up: UpPipe | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    #: When it last finished items, and when its failures in a row began.
    finished_at: float = float("-inf")
    failing_since: float = 0.0
    crashes: int = 0
    failed_starts: int = 0
    #: The exit status of the process that ended last; negative: minus the signal.
    status: int = 0
    quarantined: bool = False
    #: Why it is quarantined, and what to do.
    reason: str = ""
    last_words: str = ""
    #: What it cannot open its model with, however often it is started.
    refusal: NightjarError | None = None

    def forgive(self, pause_seconds: float) -> None:
        self.crashes = self.failed_starts = 0
        self.pause_seconds = pause_seconds


class WorkerGroup:
    """Starts a worker for each plan and starts those that end again, until `stop` or a signal.

    A worker that dies is started again after a pause that doubles up to `longest_pause_seconds`. One that
    fails again and again without a finished item, or cannot open its model with its settings, is
    quarantined: it is started every `quarantine_seconds` only, until it finishes an item, while the others
    go on. `start` starts the process of a plan; `words` knows what a worker said that did not say it to
    its parent; `on_event` gets what a log would: level, event, details.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        start: Callable[[WorkerPlan, UpPipe], subprocess.Popen[bytes]],
        *,
        longest_pause_seconds: float,
        quarantine_seconds: float,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        words: Callable[[], str] = lambda: "",
        on_event: Callable[[str, str, dict[str, object]], None] = lambda level, event, details: None,
        on_end: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
        on_quarantine: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.members = [Member(plan, first_pause_seconds) for plan in plans]
        self._start_process = start
        self._pauses = (first_pause_seconds, longest_pause_seconds)
        self._quarantine_seconds = quarantine_seconds
        self._words = words
        self._on_event = on_event
        self._on_end = on_end
        self._on_quarantine = on_quarantine
        #: The signal that ends it all, once it came.
        self.ending: int | None = None

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [member.process for member in self.members if member.process is not None]

    @property
    def quarantined(self) -> list[Member]:
        return [member for member in self.members if member.quarantined]

    @property
    def over(self) -> bool:
        """Whether no worker runs, nor will soon: all ended after a signal, or all are quarantined."""
        return not self.processes and (self.ending is not None or len(self.quarantined) == len(self.members))

    def start(self) -> None:
        for member in self.members:
            if self.ending is None:
                self._start(member)

    def tend(self) -> None:
        """Hears what the workers say, and starts those again that ended and whose pause is over; to be
        called often."""
        for member in self.members:
            self._look_after(member)

    def send(self, number: int) -> None:
        """Passes on a signal that ends the workers: none is started again."""
        self.ending = number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def sentence(self, member: Member) -> str:
        """How a worker ended, and what it said last."""
        if member.refusal is not None:
            return f"{member.plan.name} cannot open its model ({member.refusal.code.value}): {member.refusal}"
        said = f" It said: {member.last_words[:400]}" if member.last_words else ""
        times = f"{member.crashes} times in a row" if member.crashes > 1 else "again"
        return f"{member.plan.name} ended {_how(member)}, {times} without a finished item.{said}"

    def _start(self, member: Member) -> None:
        up = member.up = UpPipe()
        member.process = self._start_process(member.plan, up)
        up.started()
        member.started_at = time.monotonic()
        self._on_event("info", "worker started", {"pid": member.process.pid, **member.plan.details})
        if self.ending is not None:
            # The signal came before there was a process to pass it on to.
            member.process.send_signal(self.ending)

    def _look_after(self, member: Member) -> None:
        now = time.monotonic()
        if member.process is None:
            if self.ending is None and now >= member.restart_at:
                self._start(member)
            return
        if member.up is not None and member.up.read():
            self._finished(member, now)
        if member.process.poll() is not None:
            self._ended(member, member.process, now)

    def _finished(self, member: Member, now: float) -> None:
        member.finished_at = now
        member.forgive(self._pauses[0])
        if member.quarantined:
            member.quarantined = False
            self._on_event(
                "warning", "worker finishes items again and is out of quarantine", {"gpu": member.plan.gpu}
            )

    def _ended(self, member: Member, process: subprocess.Popen[bytes], now: float) -> None:
        member.process = None
        assert member.up is not None
        came_up = member.up.close()
        # What it started may hold the GPU's memory still.
        signal_group(process, signal.SIGKILL)
        self._on_end(process)
        if self.ending is not None:
            return
        if now - member.started_at >= HEALTHY_SECONDS:
            member.forgive(self._pauses[0])
        if not member.crashes:
            member.failing_since = now
        member.status = process.returncode
        member.last_words = member.up.last_words or self._words()
        member.refusal = member.up.refusal
        member.crashes += 1
        # A worker whose settings cannot be used may find that out when it opens its first model.
        never_worked = process.returncode == INVALID_INPUT or (process.returncode > 0 and not came_up)
        member.failed_starts = member.failed_starts + 1 if never_worked else 0
        if member.quarantined or self._is_hopeless(member):
            self._quarantine(member, now)
            return
        member.pause_seconds = min(member.pause_seconds * 2, self._pauses[1])
        member.restart_at = now + member.pause_seconds
        details = {
            "status": member.status,
            "came_up": came_up,
            "restart_seconds": round(member.pause_seconds, 2),
        }
        self._on_event(
            "warning", "worker ended", {"gpu": member.plan.gpu, **details, "last_words": member.last_words}
        )

    def _is_hopeless(self, member: Member) -> bool:
        if member.refusal is not None or member.failed_starts >= FAILED_STARTS or member.crashes >= CRASHES:
            return True
        others = [other for other in self.members if other is not member and not other.quarantined]
        return member.crashes >= CRASHES_BESIDE_OTHERS and any(
            other.finished_at >= member.failing_since for other in others
        )

    def _quarantine(self, member: Member, now: float) -> None:
        member.quarantined = True
        member.restart_at = now + self._quarantine_seconds
        again = f"It is quarantined: it is started again every {seconds_text(self._quarantine_seconds)}."
        gpu = member.plan.gpu
        advice = "" if member.refusal is not None else " See its last words and its log."
        if advice and gpu is not None:
            advice += f" If `nvidia-smi` reports an error of GPU {gpu}, reset the GPU or restart the host; until then, leave it out of --gpu."
        sentence = member.reason = f"{self.sentence(member)} {again}{advice}"
        details = {"status": member.status, "retry_seconds": self._quarantine_seconds, "reason": sentence}
        self._on_event("error", "worker quarantined", {"gpu": gpu, **details})
        self._on_quarantine(sentence)


def core_text(cores: frozenset[int]) -> str:
    """`0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _how(member: Member) -> str:
    if member.status >= 0:
        return f"with status {member.status}"
    try:
        return f"by signal {-member.status} ({signal.Signals(-member.status).name})"
    except ValueError:
        return f"by signal {-member.status}"


class QuarantineReports:
    """Reports in a thread of its own, which begins with the first quarantine: a ledger that is away must
    not hold up the workers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Event()
        self._quarantines: tuple[tuple[str, str], ...] = ()
        self._closed = False
        self._thread: threading.Thread | None = None

    def tend(self, quarantined: Sequence[Member]) -> None:
        """Notes who is quarantined now; to be called often."""
        found = tuple((member.plan.gpu or "", member.reason) for member in quarantined)
        if found == self._quarantines:
            return
        self._quarantines = found
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quarantines", daemon=True)
            self._thread.start()

    def close(self, *, over: bool) -> None:
        """Ends the reports. `over`: the workers are ended, so none is quarantined any more; else what was
        said last stays."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if over:
            self._quarantines = ()
        self._closed = True
        self._changed.set()
        thread.join(_CLOSE_SECONDS)
        self._closed = False

    def _run(self) -> None:
        # Only a process that has somebody to report pays for the ledger.
        from jobs.ledger import Ledger
        from jobs.ledger.workers import Quarantine

        ledger, host, version = Ledger.of(self._settings), socket.gethostname(), installed_version()
        while True:
            self._changed.clear()
            last = self._closed
            reports = [Quarantine(gpu, version, reason) for gpu, reason in self._quarantines]
            # The log says the same, and the next report has all that this one has.
            with suppress(NightjarError):
                ledger.report_quarantines(host, os.getpid(), reports)
            if last:
                break
            self._changed.wait(REPORT_SECONDS)
        ledger.close()
