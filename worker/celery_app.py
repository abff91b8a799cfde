"""Celery in a worker: the app, the pool that owns the engine, and the acknowledgement of messages."""

from __future__ import annotations

import signal
import threading
from typing import Any

import structlog
from celery import Celery, Task, signals
from celery.concurrency.thread import TaskPool
from celery.exceptions import Reject
from celery.schedules import crontab
from celery.worker import state as celery_state
from celery.worker.request import Request

from jobs.dispatch import RUN_NIGHTLY, RUN_SHARD, RUN_SWEEP, make_celery
from jobs.ledger.records import Ticket
from jobs.logs import setup_logging
from jobs.settings import Settings, load_settings
from pipelines.errors import NightjarError
from worker.runtime import Runtime, WorkerOptions

log = structlog.get_logger(__name__)


class _AckLog:
    """Takes kombu's complaint about an acknowledgement that failed: one line, for the ledger knows that the shard ran."""

    def critical(self, message: str, *arguments: object, exc_info: object = None) -> None:
        log.warning("message not acknowledged", reason=message % arguments)


class ShardRequest(Request):
    """A request whose late acknowledgement may fail.

    A connection that kombu closed after an error has no client any more, so that acknowledging over it is an
    AttributeError; Celery takes that for a fault of its own and ends the worker. A message that is delivered again for
    want of an acknowledgement is dropped at its claim.
    """

    def acknowledge(self) -> None:
        if not self.acknowledged:
            self._on_ack(_AckLog(), self._errors())
            self.acknowledged = True

    def reject(self, requeue: bool = False) -> None:
        if not self.acknowledged:
            self._on_reject(_AckLog(), self._errors(), requeue)
            self.acknowledged = True
            self.send_event("task-rejected", requeue=requeue)

    def _errors(self) -> tuple[type[BaseException], ...]:
        errors: Any = self._connection_errors
        return (*errors, AttributeError)


class ShardTask(Task):
    """The base of tasks that are acknowledged late."""

    Request = ShardRequest


_lock = threading.Lock()
_configured: tuple[Settings, WorkerOptions] | None = None
_runtime: Runtime | None = None
_failure: NightjarError | None = None


def configure(settings: Settings, options: WorkerOptions) -> None:
    """What the pool of this process will be built from; without it, the settings of the environment."""
    global _configured
    _configured = (settings, options)


def runtime() -> Runtime:
    """The runtime of this process. Raises `RuntimeError` outside a running worker."""
    if _runtime is None:
        raise RuntimeError("No worker runs in this process.")
    return _runtime


def start_failure() -> NightjarError | None:
    """Why the pool could not start, if so."""
    return _failure


class EnginePool(TaskPool):
    """Threads, one for each shard in flight, around one `Runtime`.

    A bootstep would be stopped while tasks still run, since Celery stops steps before the pool drains; so the pool itself
    holds the engine. CUDA is never forked over, because threads share the process.
    """

    def on_start(self) -> None:
        global _runtime, _failure
        super().on_start()
        settings, options = _configured or (load_settings(), WorkerOptions())
        _runtime = Runtime(settings, options)
        _install_signals(_runtime)
        try:
            _runtime.start()
        except NightjarError as error:
            # Celery would log a traceback; whoever started the worker tells the person.
            _failure = error
            raise SystemExit(1) from error

    def on_stop(self) -> None:
        """Drains, then closes the engine. Celery may call it twice on its way down."""
        if _runtime is not None:
            with _lock:
                if not _runtime.draining:
                    _runtime.drain()
        super().on_stop()
        if _runtime is not None:
            _runtime.stop()

    def on_terminate(self) -> None:
        if _runtime is not None:
            _runtime.hurry()
        self.on_stop()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Threads cannot be killed: every shard in flight is given back instead (celery#10490 is a traceback here)."""
        if _runtime is not None:
            _runtime.hurry()


def _install_signals(runtime: Runtime) -> None:
    """SIGTERM and SIGINT drain, a second one hurries; SIGQUIT hurries. All end with status 0.

    Replaces Celery's handlers: its cold shutdown cancels tasks of pools that cannot, and waits out its whole time
    (celery#9505).
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def drain(*_: object) -> None:
        celery_state.should_stop = 0
        runtime.drain()

    def hurry(*_: object) -> None:
        celery_state.should_stop = 0
        runtime.hurry()

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    signal.signal(signal.SIGQUIT, hurry)


EXPIRES_SECONDS = 3600


def create_app(settings: Settings) -> Celery:
    """The app with its tasks and its beat schedule."""
    app = make_celery(settings)
    app.conf.beat_schedule = beat_schedule(settings)
    app.conf.worker_consumer = "worker.consumer:SteadyConsumer"
    app.task(name=RUN_SHARD, base=ShardTask)(run_shard)
    app.task(name=RUN_NIGHTLY, base=ShardTask)(run_nightly)
    app.task(name=RUN_SWEEP, base=ShardTask)(run_sweep)
    app.finalize()
    return app


def run_shard(job: str, shard: int, epoch: int) -> str:
    """Runs one shard. The message goes back to the queue when this worker leaves it to another one."""
    from worker.runtime import Handling

    handling = runtime().handle(Ticket(job, shard, epoch))
    if handling is Handling.REFUSED:
        raise Reject(requeue=True)
    return handling.value


def beat_schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every nightly schedule at its time, and the sweep once a day if wanted. Messages that nobody took by the next hour are void."""
    entries: dict[str, dict[str, Any]] = {
        f"nightly-{name}": {
            "task": RUN_NIGHTLY,
            "schedule": crontab(minute=schedule.minute, hour=schedule.hour),
            "kwargs": {"schedule": name},
            "options": {"expires": EXPIRES_SECONDS},
        }
        for name, schedule in settings.schedules.items()
    }
    if settings.sweep.daily:
        entries["sweep"] = {"task": RUN_SWEEP, "schedule": crontab(minute=30, hour=5), "options": {"expires": EXPIRES_SECONDS}}
    return entries


def run_nightly(schedule: str) -> str:
    """Submits the last night of a schedule, unless it ran."""
    from worker.nightly import run_schedule

    return run_schedule(runtime().settings, runtime().ledger, schedule)


def run_sweep() -> int:
    """Counts orphans of ended jobs, and deletes them if the settings say so; returns how many."""
    from worker.garbage import sweep

    settings = runtime().settings.sweep
    return sweep(runtime().ledger, runtime().store_for, settings.grace_hours * 3600, delete=settings.delete).orphans


@signals.setup_logging.connect(weak=False)
def _log_as_we_do(**_: object) -> None:
    """Celery logs through the same structlog as everything else."""
    settings = load_settings()
    setup_logging(settings.log_level, settings.log_format)


app = create_app(load_settings())
