"""A group of worker processes, one per GPU: start, restart and quarantine.

A worker reports on its channel when it is up, when it has finished items, and why it ends. Quarantined workers
are recorded in the ledger, so that `nightjar workers` and `nightjar status` show them.
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
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import NamedTuple

import msgspec

from jobs import installed_version
from jobs.console import INVALID_INPUT
from jobs.formatting import seconds_text
from jobs.gpus import VISIBLE, Device, share_cores
from jobs.settings import Settings
from pipelines.child_process import Child, exit_description, signal_group
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import NightjarError

#: A worker counts as unable to start once it has ended this many times in a row, with an exit status, before
#: it was up.
FAILED_STARTS = 3
#: Number of consecutive ends without a finished item, after which a worker is quarantined. An item that
#: crashes its workers is detected after fewer ends.
CRASHES = 20
#: Number of such ends after which a worker is quarantined if other workers of this host finish items
#: meanwhile. The cause is then the GPU, not the job.
CRASHES_BESIDE_OTHERS = 5
#: Run time after which earlier failures are forgotten.
HEALTHY_SECONDS = 3600.0
#: Interval of the reports of quarantines to the ledger, which counts only quarantines reported in the last
#: minute.
REPORT_SECONDS = 15.0
_CLOSE_SECONDS = 5.0


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a worker to its supervisor."""

    up: bool = False
    #: Whether it has finished items.
    finished: bool = False
    #: Why it ends, without passwords.
    last_message: str = ""
    #: Why it cannot open its model, if a restart would not help.
    refusal: NightjarError | None = None


class WorkerPlan(NamedTuple):
    """How one worker is started. Fields that are None: as its parent, on any device."""

    device: Device | None = None
    cores: frozenset[int] | None = None
    metrics_port: int | None = None

    @property
    def name(self) -> str:
        """The worker's name in messages: `The worker`, or `The worker of GPU 0`."""
        return "The worker" if self.gpu is None else f"The worker of GPU {self.gpu}"

    @property
    def gpu(self) -> str | None:
        return None if self.device is None else self.device.name

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the worker, in addition to those of its parent."""
        variables: dict[str, str] = {}
        if self.device is not None:
            # With this order CUDA numbers GPUs as `nvidia-smi` does; its default order begins with the
            # fastest GPU.
            variables |= {VISIBLE: self.device.name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if self.metrics_port is not None:
            variables["SPEECH_WORKER__METRICS_PORT"] = str(self.metrics_port)
        return variables


def plan_workers(settings: Settings, devices: Sequence[Device] | None) -> list[WorkerPlan]:
    """One worker for each device, or one without a choice of device."""
    if devices is None:
        return [WorkerPlan()]
    first = settings.worker.metrics_port
    ports = repeat(None) if first is None else count(first)
    return list(map(WorkerPlan, devices, share_cores([device.bus_id for device in devices]), ports))


@dataclass(slots=True)
class Member:
    """A worker of the group: its process or the time of its restart, and its failures."""

    plan: WorkerPlan
    child: Child[WorkerReport] | None = None
    #: What its current or last process has reported.
    came_up: bool = False
    last_message: str = ""
    refusal: NightjarError | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    #: Time of its last finished items, and of the first of its consecutive failures.
    finished_at: float = float("-inf")
    failing_since: float = 0.0
    crashes: int = 0
    failed_starts: int = 0
    #: Exit status of its last process; negative: minus the signal.
    status: int = 0
    quarantined: bool = False
    #: Why it is quarantined, with advice.
    reason: str = ""

    def __str__(self) -> str:
        """A sentence that says how the worker ended, with its last message."""
        if self.refusal is not None:
            return f"{self.plan.name} cannot open its model ({self.refusal.code.value}): {self.refusal}"
        words = f" Its last message: {self.last_message[:400]}" if self.last_message else ""
        times = f"{self.crashes} times in a row" if self.crashes > 1 else "again"
        return (
            f"{self.plan.name} ended {exit_description(self.status)}, {times} without a finished item.{words}"
        )


@dataclass(eq=False)
class WorkerGroup:
    """Starts a worker for each plan, and restarts workers that end, until it receives a signal. Quarantined
    workers are reported to the ledger.

    The pause before a restart doubles up to a maximum. A worker that keeps failing without finishing an item,
    or cannot open its model with its settings, is quarantined: from then on it is restarted only after the
    quarantine time. Its quarantine ends when it finishes an item. The other workers continue.
    """

    settings: Settings
    plans: Sequence[WorkerPlan]
    start_child: Callable[[WorkerPlan], Child[WorkerReport]]
    #: First and longest pause before a restart, in seconds.
    pauses: tuple[float, float]
    #: Reads the last output of a worker that ended without a last message.
    last_line: Callable[[], str] = lambda: ""
    #: Writes a log entry: level, event, details.
    on_event: Callable[[str, str, dict[str, object]], None] = lambda level, event, details: None
    #: The signal that ends the group, once received.
    ending: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.members = [Member(plan) for plan in self.plans]
        self._held = True
        self.reports = QuarantineReports(self.settings)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [member.child.process for member in self.members if member.child is not None]

    @property
    def quarantined(self) -> list[Member]:
        return [member for member in self.members if member.quarantined]

    @property
    def has_ended(self) -> bool:
        """Whether no worker runs and none is about to start: all have ended after a signal, or are
        quarantined."""
        return not self.processes and (self.ending is not None or len(self.quarantined) == len(self.members))

    def start(self) -> None:
        """Starts the workers, which wait for `release` before they work."""
        for member in self.members:
            if self.ending is None:
                self._start(member)

    def release(self) -> None:
        """Lets the workers work, including those started later."""
        self._held = False
        for member in self.members:
            if member.child is not None:
                _release(member.child)

    def poll(self) -> list[tuple[Member, int]]:
        """Receives reports, restarts workers whose pause is over, and reports quarantines; to be called
        often. Returns the workers that ended since the last call, with their process ids."""
        ended: list[tuple[Member, int]] = []
        now = time.monotonic()
        for member in self.members:
            child = member.child
            if child is None:
                if self.ending is None and now >= member.restart_at:
                    self._start(member)
                continue
            alive = child.alive
            self._receive(member, child)
            if not alive:
                self._ended(member, child, now)
                ended.append((member, child.pid))
        self.reports.poll(self.quarantined)
        return ended

    def send_signal(self, number: int) -> None:
        """Forwards a signal that ends the workers; none is restarted."""
        self.ending = number
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _start(self, member: Member) -> None:
        member.came_up = False
        member.last_message = ""
        member.refusal = None
        child = member.child = self.start_child(member.plan)
        if not self._held:
            _release(child)
        member.started_at = time.monotonic()
        plan = member.plan
        cores = plan.cores and sorted(plan.cores)
        details = {"pid": child.pid, "gpu": plan.gpu, "cores": cores, "metrics_port": plan.metrics_port}
        known = {name: value for name, value in details.items() if value is not None}
        self.on_event("info", "worker started", known)
        if self.ending is not None:
            # The signal arrived before the process existed, so it is sent now.
            child.process.send_signal(self.ending)

    def _receive(self, member: Member, child: Child[WorkerReport]) -> None:
        """Processes the reports received so far."""
        with suppress(EOFError, OSError, msgspec.MsgspecError):
            while True:
                report = child.channel.receive(0)
                member.came_up |= report.up
                member.last_message = report.last_message or member.last_message
                member.refusal = report.refusal or member.refusal
                if report.finished:
                    self.finished(member, time.monotonic())

    def finished(self, member: Member, now: float) -> None:
        """Records that a worker has finished items, which ends its quarantine."""
        member.finished_at = now
        member.crashes = member.failed_starts = 0
        if member.quarantined:
            member.quarantined = False
            self.on_event(
                "warning", "worker finishes items again and is out of quarantine", {"gpu": member.plan.gpu}
            )

    def _ended(self, member: Member, child: Child[WorkerReport], now: float) -> None:
        member.child = None
        member.status = child.process.returncode
        child.channel.close()
        # The worker's child processes may still hold GPU memory.
        signal_group(child.process, signal.SIGKILL)
        if self.ending is not None:
            return
        if now - member.started_at >= HEALTHY_SECONDS:
            member.crashes = member.failed_starts = 0
        if not member.crashes:
            member.failing_since = now
        member.last_message = member.last_message or self.last_line()
        member.crashes += 1
        # Invalid settings may show only when the first model is opened.
        never_worked = member.status == INVALID_INPUT or (member.status > 0 and not member.came_up)
        member.failed_starts = member.failed_starts + 1 if never_worked else 0
        works_elsewhere = any(
            other.finished_at >= member.failing_since
            for other in self.members
            if other is not member and not other.quarantined
        )
        crashes = CRASHES_BESIDE_OTHERS if works_elsewhere else CRASHES
        has_failed = member.failed_starts >= FAILED_STARTS or member.crashes >= crashes
        if member.quarantined or member.refusal is not None or has_failed:
            self._quarantine(member, now)
            return
        first, longest = self.pauses
        pause_seconds = min(first * 2**member.crashes, longest)
        member.restart_at = now + pause_seconds
        self.on_event(
            "warning",
            "worker ended",
            {
                "gpu": member.plan.gpu,
                "status": member.status,
                "came_up": member.came_up,
                "restart_seconds": round(pause_seconds, 2),
                "last_message": member.last_message,
            },
        )

    def _quarantine(self, member: Member, now: float) -> None:
        member.quarantined = True
        seconds = self.settings.times.quarantine_seconds
        member.restart_at = now + seconds
        gpu = member.plan.gpu
        advice = "" if member.refusal is not None else " See its last message and its log."
        if advice and gpu is not None:
            advice += f" If `nvidia-smi` reports an error of GPU {gpu}, reset the GPU or restart the host. Until then, omit it from --gpu."
        member.reason = f"{member} It is quarantined and restarted every {seconds_text(seconds)}.{advice}"
        details = {"status": member.status, "retry_seconds": seconds}
        self.on_event("error", "worker quarantined", {"gpu": gpu, **details, "reason": member.reason})


def _release(child: Child[WorkerReport]) -> None:
    with suppress(OSError):
        child.channel.send(True)


class QuarantineReports:
    """Reports quarantines to the ledger on a separate thread, so that an unreachable ledger delays nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = DaemonThreads(1, "quarantines")
        self._reporting: Future[None] | None = None
        self._reported: dict[str, str] = {}
        self._due_at = 0.0

    def poll(self, quarantined: Sequence[Member]) -> None:
        """Reports the workers that are quarantined now if they changed or a report is due; to be called
        often."""
        found = {member.plan.gpu or "": member.reason for member in quarantined}
        is_reporting = self._reporting is not None and not self._reporting.done()
        is_due = found != self._reported or (found and time.monotonic() >= self._due_at)
        if is_due and not is_reporting:
            self._due_at = time.monotonic() + REPORT_SECONDS
            self._report(found)

    def close(self, *, all_ended: bool) -> None:
        """Ends the reports. `all_ended`: the workers were stopped, so their quarantines end; otherwise the
        last report remains."""
        if self._reporting is None:
            return
        if all_ended:
            self._report({})
        wait([self._reporting], _CLOSE_SECONDS)

    def _report(self, found: dict[str, str]) -> None:
        self._reported = found
        self._reporting = self._threads.submit(self._write, found)

    def _write(self, found: dict[str, str]) -> None:
        # Imported only if there is something to report.
        from jobs.ledger import Ledger

        # An error is ignored: the log has the reasons too, and the next report repeats this one.
        with suppress(NightjarError), closing(Ledger.of(self._settings)) as ledger:
            ledger.report_quarantines(
                socket.gethostname(), os.getpid(), installed_version() or "unknown", found
            )
