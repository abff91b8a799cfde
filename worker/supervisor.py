"""A parent process that runs one worker process per GPU, forwards signals and restarts workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import structlog

from jobs.child_process import UpPipe, pinned_to
from jobs.settings import Settings
from jobs.worker_group import QuarantineReports, WorkerGroup, WorkerPlan

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.2


class Supervisor:
    """Starts `command` once for each plan and keeps it running until a signal. A worker that keeps failing
    is quarantined alone."""

    def __init__(
        self,
        command: Sequence[str],
        plans: Sequence[WorkerPlan],
        longest_pause_seconds: float = 10.0,
        quarantine_seconds: float = 600.0,
        settings: Settings | None = None,
    ) -> None:
        """`settings`: of the ledger that is told which workers are quarantined; None: none is."""
        self._reports = None if settings is None else QuarantineReports(settings)
        self._command = [*command, "--parent-pid", str(os.getpid())]
        self._group = WorkerGroup(
            plans,
            self._start,
            longest_pause_seconds=longest_pause_seconds,
            quarantine_seconds=quarantine_seconds,
            on_event=lambda level, event, details: getattr(log, level)(event, **details),
        )

    def run(self) -> int:
        """Works until a signal, or until every worker is quarantined; the exit status: 0 after a drain, 1
        when a worker is quarantined."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda received, _: self._group.send(received))
        self._group.start()
        while not self._group.over:
            self._group.tend()
            if self._reports is not None:
                self._reports.tend(self._group.quarantined)
            time.sleep(POLL_SECONDS)
        if self._reports is not None:
            # Where all are quarantined the report stays, and is shown as lost.
            self._reports.close(over=self._group.ending is not None)
        quarantined = self._group.quarantined
        if not quarantined:
            return 0
        gpus = [member.plan.gpu for member in quarantined]
        if self._group.ending is None:
            reasons = [self._group.sentence(member) for member in quarantined]
            log.error("no worker can work; the supervisor ends", gpus=gpus, reasons=reasons)
        else:
            log.error("workers were quarantined", gpus=gpus, workers=len(self._group.members))
        return 1

    def _start(self, plan: WorkerPlan, up: UpPipe) -> subprocess.Popen[bytes]:
        environment = os.environ | plan.environment | up.environment
        pin = pinned_to(plan.cores)
        return subprocess.Popen(
            self._command, env=environment, start_new_session=True, pass_fds=up.pass_fds, preexec_fn=pin
        )


def supervise(arguments: Sequence[str], plans: Sequence[WorkerPlan], settings: Settings) -> int:
    """Runs this program's `run ARGUMENTS` once for each plan."""
    flags = ["-P"] if sys.flags.safe_path else []
    spec = sys.modules["__main__"].__spec__
    program = "worker" if spec is None else spec.name.removesuffix(".__main__")
    command = [sys.executable, *flags, "-m", program, "run", *arguments]
    return Supervisor(
        command, plans, settings.times.restart_seconds, settings.times.quarantine_seconds, settings
    ).run()
