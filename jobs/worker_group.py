"""Worker processes side by side, one for each GPU: how each is started, when it is started again, and when
it is quarantined.

A worker says on its channel that it came up, that it finishes items, and why it ends. The ledger is told
which workers of this process are quarantined, so that `nightjar workers` and `nightjar status` show them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass

import msgspec

from jobs import installed_version
from jobs.console import INVALID_INPUT
from jobs.formatting import redact, seconds_text
from jobs.gpus import VISIBLE, Device, share_cores
from jobs.settings import Settings
from pipelines.child_process import Child, has_parent, how_it_ended, parent_channel, signal_group
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ConfigError, ModelError, NightjarError
from pipelines.ipc import Channel, ErrorRecord

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
#: Between two signs of life; a report without one for a minute counts as lost.
REPORT_SECONDS = 15.0
_CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.2
_MAX_WORDS = 2000


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker says to the process that started it."""

    up: bool = False
    #: It has finished items.
    finished: bool = False
    #: Why it ends, without the passwords of addresses.
    last_words: str = ""
    #: What it cannot open its model with, however often it is started.
    refusal: ErrorRecord | None = None


#: To the process that started this one, once this one has asked for it.
_parent: Channel[bool] | None = None


def is_watched() -> bool:
    """Whether the process that started this one starts it again when it ends."""
    global _parent
    if _parent is None and has_parent():
        _parent = parent_channel(bool)
    return _parent is not None


def wait_for_parent() -> bool:
    """Waits until the process that started this one lets it go on; False: that process is gone."""
    if not is_watched():
        return True
    assert _parent is not None
    with suppress(EOFError, OSError):
        return _parent.receive().message
    return False


def say(report: WorkerReport) -> None:
    """Tells the process that started this one; nothing where nobody asks."""
    if is_watched():
        assert _parent is not None
        with suppress(OSError):
            _parent.send(report)


def say_last_words(text: str) -> None:
    """Tells it why this process ends."""
    say(WorkerReport(last_words=_plain(text)))


def say_refused(error: ConfigError | ModelError) -> None:
    """Tells it that every start would end with this error: a person has to mend a setting or the model."""
    plain = type(error)(error.code, _plain(error.message), _plain(error.advice))
    say(WorkerReport(refusal=ErrorRecord.of(plain)))


def _plain(text: str) -> str:
    """On one line, without the passwords of addresses."""
    return redact(" ".join(text.split()))[:_MAX_WORDS]


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
        cores = None if self.cores is None else sorted(self.cores)
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
    """One worker for each device, or one as it is."""
    if devices is None:
        return [WorkerPlan()]
    shares = share_cores([device.bus_id for device in devices])
    first = settings.worker.metrics_port
    ports = [None if first is None else first + number for number in range(len(devices))]
    return [WorkerPlan(device, cores, port) for device, cores, port in zip(devices, shares, ports)]


@dataclass(slots=True)
class Member:
    """A worker process, or the time at which it will be started again."""

    plan: WorkerPlan
    pause_seconds: float
    child: Child[WorkerReport] | None = None
    #: What its process of now, or the last one, has said.
    came_up: bool = False
    last_words: str = ""
    refusal: NightjarError | None = None
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

    def forgive(self, pause_seconds: float) -> None:
        self.crashes = self.failed_starts = 0
        self.pause_seconds = pause_seconds

    def __str__(self) -> str:
        """How it ended, and what it said last."""
        if self.refusal is not None:
            return f"{self.plan.name} cannot open its model ({self.refusal.code.value}): {self.refusal}"
        said = f" It said: {self.last_words[:400]}" if self.last_words else ""
        times = f"{self.crashes} times in a row" if self.crashes > 1 else "again"
        return f"{self.plan.name} ended {how_it_ended(self.status)}, {times} without a finished item.{said}"


class WorkerGroup:
    """Starts a worker for each plan and starts those that end again, until `stop` or a signal.

    A worker that dies is started again after a pause that doubles up to `longest_pause_seconds`. One that
    fails again and again without a finished item, or cannot open its model with its settings, is
    quarantined: it is started every `quarantine_seconds` only, until it finishes an item, while the others
    go on. `start` starts the process of a plan; `words` knows what a worker said that did not say it on
    its channel; `on_event` gets what a log would: level, event, details.
    """

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        start: Callable[[WorkerPlan], Child[WorkerReport]],
        *,
        longest_pause_seconds: float,
        quarantine_seconds: float,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        words: Callable[[], str] = lambda: "",
        on_event: Callable[[str, str, dict[str, object]], None] = lambda level, event, details: None,
    ) -> None:
        self.members = [Member(plan, first_pause_seconds) for plan in plans]
        self._start_child = start
        self._pauses = (first_pause_seconds, longest_pause_seconds)
        self._quarantine_seconds = quarantine_seconds
        self._words = words
        self._on_event = on_event
        self._held = True
        #: The signal that ends it all, once it came.
        self.ending: int | None = None

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [member.child.process for member in self.members if member.child is not None]

    @property
    def quarantined(self) -> list[Member]:
        return [member for member in self.members if member.quarantined]

    @property
    def over(self) -> bool:
        """Whether no worker runs, nor will soon: all ended after a signal, or all are quarantined."""
        return not self.processes and (self.ending is not None or len(self.quarantined) == len(self.members))

    def start(self) -> None:
        """Starts the workers, which wait for `let_go` before they work."""
        for member in self.members:
            if self.ending is None:
                self._start(member)

    def let_go(self) -> None:
        """Lets the workers work, and each that is started later."""
        self._held = False
        for member in self.members:
            if member.child is not None:
                _let_go(member.child)

    def tend(self) -> list[tuple[Member, int]]:
        """Hears what the workers say, and starts those again that ended and whose pause is over; to be
        called often. Returns those that ended since the last call, each with its process id."""
        ended: list[tuple[Member, int]] = []
        now = time.monotonic()
        for member in self.members:
            child = member.child
            if child is None:
                if self.ending is None and now >= member.restart_at:
                    self._start(member)
                continue
            alive = child.alive
            self._hear(member, child)
            if not alive:
                self._ended(member, child, now)
                ended.append((member, child.pid))
        return ended

    def send(self, number: int) -> None:
        """Passes on a signal that ends the workers: none is started again."""
        self.ending = number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self, settings: Settings) -> int:
        """Keeps the workers running until a signal, or until every one is quarantined; the exit status: 0
        after a drain, 1 when a worker is quarantined. `settings`: of the ledger that is told of those."""
        reports = QuarantineReports(settings)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda received, _: self.send(received))
        self.let_go()
        self.start()
        while not self.over:
            self.tend()
            reports.tend(self.quarantined)
            time.sleep(POLL_SECONDS)
        # Where all are quarantined the report stays, and is shown as lost.
        reports.close(over=self.ending is not None)
        if not self.quarantined:
            return 0
        what = (
            "no worker can work; the supervisor ends" if self.ending is None else "workers were quarantined"
        )
        gpus, reasons = zip(*((member.plan.gpu, str(member)) for member in self.quarantined), strict=True)
        self._on_event("error", what, {"gpus": gpus, "reasons": reasons, "workers": len(self.members)})
        return 1

    def _start(self, member: Member) -> None:
        member.came_up, member.last_words, member.refusal = False, "", None
        child = member.child = self._start_child(member.plan)
        if not self._held:
            _let_go(child)
        member.started_at = time.monotonic()
        self._on_event("info", "worker started", {"pid": child.pid, **member.plan.details})
        if self.ending is not None:
            # The signal came before there was a process to pass it on to.
            child.process.send_signal(self.ending)

    def _hear(self, member: Member, child: Child[WorkerReport]) -> None:
        """Takes in what it has said by now."""
        with suppress(EOFError, OSError, msgspec.MsgspecError):
            while True:
                said = child.channel.receive(0).message
                member.came_up |= said.up
                member.last_words = said.last_words or member.last_words
                if said.refusal is not None:
                    member.refusal = said.refusal.error
                if said.finished:
                    self.finished(member, time.monotonic())

    def finished(self, member: Member, now: float) -> None:
        """It has finished items."""
        member.finished_at = now
        member.forgive(self._pauses[0])
        if member.quarantined:
            member.quarantined = False
            self._on_event(
                "warning", "worker finishes items again and is out of quarantine", {"gpu": member.plan.gpu}
            )

    def _ended(self, member: Member, child: Child[WorkerReport], now: float) -> None:
        member.child, member.status = None, child.process.returncode
        child.channel.close()
        # What it started may hold the GPU's memory still.
        signal_group(child.process, signal.SIGKILL)
        if self.ending is not None:
            return
        if now - member.started_at >= HEALTHY_SECONDS:
            member.forgive(self._pauses[0])
        if not member.crashes:
            member.failing_since = now
        member.last_words = member.last_words or self._words()
        member.crashes += 1
        # A worker whose settings cannot be used may find that out when it opens its first model.
        never_worked = member.status == INVALID_INPUT or (member.status > 0 and not member.came_up)
        member.failed_starts = member.failed_starts + 1 if never_worked else 0
        if member.quarantined or self._is_hopeless(member):
            self._quarantine(member, now)
            return
        member.pause_seconds = min(member.pause_seconds * 2, self._pauses[1])
        member.restart_at = now + member.pause_seconds
        details = {
            "status": member.status,
            "came_up": member.came_up,
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
        member.reason = f"{member} {again}{advice}"
        details = {"status": member.status, "retry_seconds": self._quarantine_seconds}
        self._on_event("error", "worker quarantined", {"gpu": gpu, **details, "reason": member.reason})


def _let_go(child: Child[WorkerReport]) -> None:
    with suppress(OSError):
        child.channel.send(True)


class QuarantineReports:
    """Reports to the ledger on a thread of its own: a ledger that is away must not hold up the workers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = DaemonThreads(1, "quarantines")
        self._reporting: Future[None] | None = None
        self._reported: dict[str, str] = {}
        self._due_at = float("inf")

    def tend(self, quarantined: Sequence[Member]) -> None:
        """Notes who is quarantined now; to be called often."""
        found = {member.plan.gpu or "": member.reason for member in quarantined}
        under_way = self._reporting is not None and not self._reporting.done()
        if under_way or (found == self._reported and time.monotonic() < self._due_at):
            return
        self._due_at = time.monotonic() + REPORT_SECONDS if found else float("inf")
        self._report(found)

    def close(self, *, over: bool) -> None:
        """Ends the reports. `over`: the workers are ended, so none is quarantined any more; else what was
        said last stays."""
        if self._reporting is None:
            return
        if over:
            self._report({})
        wait([self._reporting], _CLOSE_SECONDS)

    def _report(self, found: dict[str, str]) -> None:
        self._reported = found
        self._reporting = self._threads.submit(_report, self._settings, found)


def _report(settings: Settings, found: dict[str, str]) -> None:
    # Only a process that has somebody to report pays for the ledger.
    from jobs.ledger import Ledger

    # The log says the same, and the next report has all that this one has.
    with suppress(NightjarError), closing(Ledger.of(settings)) as ledger:
        ledger.report_quarantines(socket.gethostname(), os.getpid(), installed_version(), found)
