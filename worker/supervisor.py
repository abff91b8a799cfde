"""A parent process that runs one worker process per GPU, forwards signals and restarts workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from jobs.child_process import UpPipe

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.5
#: A worker that lived so long starts its pauses anew.
HEALTHY_SECONDS = 300.0
#: A worker that ends so often in a row, with an exit status and before it came up, cannot start at all.
FAILED_STARTS = 3


@dataclass(slots=True)
class Child:
    """A worker process, or the time at which it will be started again."""

    gpu: str | None
    process: subprocess.Popen[bytes] | None = None
    up: UpPipe | None = None
    started_at: float = 0.0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    restart_at: float = 0.0
    failed_starts: int = 0

    @property
    def given_up(self) -> bool:
        return self.failed_starts >= FAILED_STARTS


class Supervisor:
    """Starts `command` once for each GPU (None: without one) and keeps it running until a signal.

    What dies is started again after a pause that doubles up to `longest_pause_seconds`. A worker that cannot start is given up
    alone: the others go on.
    """

    def __init__(self, command: Sequence[str], gpus: Sequence[str | None], longest_pause_seconds: float = 10.0) -> None:
        self._longest_pause_seconds = longest_pause_seconds
        self._command = [*command, "--parent-pid", str(os.getpid())]
        self._children = [Child(gpu) for gpu in gpus]
        #: The signal that ends it all, once it came.
        self._ending: int | None = None

    def run(self) -> int:
        """Works until a signal, or until every worker was given up; the exit status: 0 after a drain, 1 when a worker was given up."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._pass_on)
        for child in self._children:
            if self._ending is None:
                self._start(child)
        while not self._over:
            for child in self._children:
                self._look_after(child)
            time.sleep(POLL_SECONDS)
        given_up = [child.gpu for child in self._children if child.given_up]
        if given_up:
            log.error("workers could not start", gpus=given_up, workers=len(self._children))
        return 1 if given_up else 0

    @property
    def _over(self) -> bool:
        return all(child.process is None and (child.given_up or self._ending is not None) for child in self._children)

    def _start(self, child: Child) -> None:
        up = child.up = UpPipe()
        environment = dict(os.environ) | up.environment
        if child.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = child.gpu
        child.process = subprocess.Popen(self._command, env=environment, start_new_session=True, pass_fds=up.pass_fds)
        up.started()
        child.started_at = time.monotonic()
        if self._ending is not None:
            # The signal came before there was a process to pass it on to.
            child.process.send_signal(self._ending)

    def _look_after(self, child: Child) -> None:
        now = time.monotonic()
        if child.process is None:
            if self._ending is None and not child.given_up and now >= child.restart_at:
                self._start(child)
            return
        status = child.process.poll()
        if status is None:
            return
        child.process = None
        came_up = child.up is not None and child.up.close()
        if self._ending is not None:
            return
        healthy = now - child.started_at >= HEALTHY_SECONDS
        pause_seconds = FIRST_PAUSE_SECONDS if healthy else child.pause_seconds * 2
        child.pause_seconds = min(pause_seconds, self._longest_pause_seconds)
        child.failed_starts = child.failed_starts + 1 if status > 0 and not came_up else 0
        child.restart_at = now + child.pause_seconds
        if child.given_up:
            log.error("worker cannot start and is given up; the others continue", gpu=child.gpu, status=status, starts=child.failed_starts)
        else:
            log.warning("worker ended", gpu=child.gpu, status=status, came_up=came_up, restart_seconds=child.pause_seconds)

    def _pass_on(self, number: int, *_: object) -> None:
        self._ending = number
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)


def supervise(
    arguments: Sequence[str],
    gpus: Sequence[str | None],
    longest_pause_seconds: float = 10.0,
    run: Callable[[Supervisor], int] = Supervisor.run,
) -> int:
    """Runs this program's `run ARGUMENTS` once for each GPU."""
    flags = ["-P"] if sys.flags.safe_path else []
    spec = sys.modules["__main__"].__spec__
    program = "worker" if spec is None else spec.name.removesuffix(".__main__")
    return run(Supervisor([sys.executable, *flags, "-m", program, "run", *arguments], gpus, longest_pause_seconds))
