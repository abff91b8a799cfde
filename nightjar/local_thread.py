"""The thread of this program that runs a job on this machine."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

from jobs.console import Interrupted, Stop
from jobs.ledger.records import Job as JobRecord
from jobs.progress import Progress

_WAIT_SECONDS = 0.2


class LocalThread(threading.Thread):
    """Runs one job. The operating system kills the workers when this thread ends, so the thread waits for them.

    A program waits for the run before it ends. After an error, such as Ctrl-C, or in an interactive session
    the run is stopped instead; the same call resumes it.
    """

    def __init__(
        self, run: Callable[[Progress, Stop, Callable[[JobRecord], None]], object], *, quiet: bool
    ) -> None:
        """`run`: `jobs.local_run.run_locally` with its first arguments."""
        super().__init__(name="nightjar-run", daemon=False)
        self._run = run
        # The job itself shows the progress.
        self._notes = Progress(quiet=quiet, only_notes=True)
        self._job_known = threading.Event()
        self._stop_request = Stop()
        #: The job, once the run has submitted it.
        self.job: JobRecord | None = None
        self.stopped = False
        self.error: BaseException | None = None
        #: Whether `error` was raised in the program.
        self.error_raised = False

    def until_submitted(self) -> JobRecord:
        """Starts the run, and waits until the job is in the ledger. Raises the error if that fails."""
        self.start()
        # `atexit` would call the function too late: thread pools, which a run needs, are closed earlier.
        threading._register_atexit(self.end_with_program)  # pyright: ignore
        try:
            while not self._job_known.wait(_WAIT_SECONDS):
                pass
        except BaseException:
            self.stop()
            raise
        if self.job is None:
            self.join()
            self.error_raised = True
            raise self.error or KeyboardInterrupt
        return self.job

    def stop(self) -> None:
        """Stops the run and waits for its end. Running items have some seconds to finish; a second interrupt
        ends them at once."""
        self._stop_request.number = signal.SIGINT
        try:
            while self.is_alive():
                self.join(_WAIT_SECONDS)
        except BaseException:
            self._stop_request.kill()
            raise

    def end_with_program(self) -> None:
        """Called when the program ends: waits for the run, or stops it after an error or in an interactive session.
        Prints the run's error if it was not raised in the program."""
        interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
        if interactive or getattr(sys, "last_type", None) is not None:
            self._stop_request.number = signal.SIGINT
        try:
            self.join()
        except KeyboardInterrupt:
            self.stop()
        if self.error is not None and not self.error_raised:
            print(f"Job {self.job.id if self.job else ''} has not ended: {self.error}", file=sys.stderr)

    def run(self) -> None:
        try:
            self._run(self._notes, self._stop_request, self._submitted)
        except Interrupted:
            self.stopped = True
        except BaseException as error:  # noqa: BLE001 - raised again by the job's methods
            self.error = error
        finally:
            self._job_known.set()

    def _submitted(self, job: JobRecord) -> None:
        self.job = job
        self._job_known.set()
