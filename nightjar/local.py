"""A job that runs here while the program goes on: the run of `nightjar run`, in a thread of its own."""

from __future__ import annotations

import signal
import sys
import threading

from jobs.console import Interrupted, Stop
from jobs.ledger.records import Job
from jobs.local_run import LocalRun, run_locally
from jobs.progress import Progress

_LOOK_SECONDS = 0.2


class _Notes(Progress):
    """What a run says; how far it is the job itself knows."""

    def __init__(self, *, silent: bool) -> None:
        super().__init__(quiet=True)
        self._silent = silent

    def say(self, text: str) -> None:
        if not self._silent:
            print(text, file=sys.stderr)


class LocalThread(threading.Thread):
    """Runs one job. The kernel ends its workers with this thread, so that it lives until they have ended.

    A program that ends waits for it; one that ends by an error, such as Ctrl-C, and one that a person
    types in, stop the run, which the same call goes on with.
    """

    def __init__(self, run: LocalRun, *, quiet: bool) -> None:
        super().__init__(name="nightjar-run", daemon=False)
        self._run = run
        self._notes = _Notes(silent=quiet)
        self._known = threading.Event()
        self._asked = Stop()
        #: The job, once its input is read.
        self.job: Job | None = None
        self.stopped = False
        self.error: BaseException | None = None
        #: Whether the program has seen how it ended.
        self.seen = False

    def until_submitted(self) -> Job:
        """Starts, and waits until the job is in the ledger. Raises what kept it from getting there."""
        self.start()
        # Functions of `atexit` are called too late: thread pools, which a run needs, are closed before.
        threading._register_atexit(self.end_with_program)  # pyright: ignore
        try:
            while not self._known.wait(_LOOK_SECONDS):
                pass
        except BaseException:
            self.stop()
            raise
        if self.job is None:
            self.join()
            self.seen = True
            raise self.error or KeyboardInterrupt
        return self.job

    def stop(self) -> None:
        """Stops the run and waits for it: items in the engine have some seconds to finish. A second
        interrupt ends it at once."""
        self._asked.number = signal.SIGINT
        try:
            while self.is_alive():
                self.join(_LOOK_SECONDS)
        except BaseException:
            self._asked.kill()
            raise

    def end_with_program(self) -> None:
        """Waits for the run, or stops it; says why it failed where nobody asked."""
        typed = hasattr(sys, "ps1") or "IPython" in sys.modules
        if typed or getattr(sys, "last_type", None) is not None:
            self._asked.number = signal.SIGINT
        try:
            self.join()
        except KeyboardInterrupt:
            self.stop()
        if self.error is not None and not self.seen:
            print(f"Job {self.job.id if self.job else ''} has not ended: {self.error}", file=sys.stderr)

    def run(self) -> None:
        try:
            run_locally(self._run, self._notes, self._asked, self._submitted)
        except Interrupted:
            self.stopped = True
        except BaseException as error:  # noqa: BLE001 - raised again where the job is waited for
            self.error = error
        finally:
            self._known.set()

    def _submitted(self, job: Job) -> None:
        self.job = job
        self._known.set()
