"""A job that runs here while the program goes on: the run of `nightjar run`, in a thread of its own."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jobs.console import Interrupted
from jobs.embedded import EmbeddedHome
from jobs.ledger.records import Job
from jobs.ledger.status import JobStatus
from jobs.local_run import LocalRun, RunResult, run_locally
from nightjar.advice import advise, in_python
from pipelines.errors import NightjarError

if TYPE_CHECKING:
    from jobs.ingest import IngestProgress

_LOOK_SECONDS = 0.2


def _at_end(call: Callable[[], None]) -> None:
    """Calls when the main thread has ended. A function of `atexit` comes too late: thread pools are closed
    before, and a run needs them."""
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(call)


class LocalThread(threading.Thread):
    """Runs one job. The kernel ends its workers with this thread, so that it lives until they have ended.

    A program that ends waits for it; one that ends by an error, such as Ctrl-C, and one that a person
    types in, stop the run, which the same call goes on with.
    """

    def __init__(self, run: LocalRun, *, quiet: bool) -> None:
        super().__init__(name="nightjar-run", daemon=False)
        self._run = run
        self._quiet = quiet
        self._known = threading.Event()
        self._stopping = threading.Event()
        self._embedded: EmbeddedHome | None = None
        #: The job, once its input is read; how far that is; how far the job is.
        self.job: Job | None = None
        self.read: IngestProgress | None = None
        self.status: JobStatus | None = None
        self.result: RunResult | None = None
        self.stopped = False
        self.error: BaseException | None = None
        #: Whether the program has seen how it ended.
        self.seen = False

    def until_submitted(self) -> Job:
        """Starts, and waits until the job is in the ledger. Raises what kept it from getting there."""
        self.start()
        _at_end(self.end_with_program)
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
        self._stopping.set()
        try:
            while self.is_alive():
                self.join(_LOOK_SECONDS)
        except BaseException:
            if self._embedded is not None:
                self._embedded.kill()
            raise

    def end_with_program(self) -> None:
        """Waits for the run, or stops it; says why it failed where nobody asked."""
        typed = hasattr(sys, "ps1") or "IPython" in sys.modules
        if typed or getattr(sys, "last_type", None) is not None:
            self._stopping.set()
        try:
            self.join()
        except KeyboardInterrupt:
            self.stop()
        if self.error is not None and not self.seen:
            print(f"Job {self.job.id if self.job else ''} has not ended: {self.error}", file=sys.stderr)

    def run(self) -> None:
        try:
            self.result = run_locally(self._run, self)
        except Interrupted:
            self.stopped = True
        except BaseException as error:  # noqa: BLE001 - raised again where the job is waited for
            self.error = advise(error) if isinstance(error, NightjarError) else error
        finally:
            self._known.set()

    def began(self, embedded: EmbeddedHome) -> None:
        self._embedded = embedded

    def say(self, text: str) -> None:
        if not self._quiet:
            print(in_python(text), file=sys.stderr)

    def reading(self, ingest: IngestProgress) -> None:
        self.read = ingest
        self.check()

    def submitted(self, job: Job, *, created: bool) -> None:
        self.job = job
        self._known.set()

    def update(self, status: JobStatus) -> None:
        self.status = status

    def check(self) -> None:
        """Raises `Interrupted` when the run was asked to stop."""
        if self._stopping.is_set():
            raise Interrupted(signal.SIGINT)

    def ending(self) -> None:
        """Nothing is to be told."""
