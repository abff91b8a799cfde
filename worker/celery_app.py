"""Celery in a worker: the app with its task, the pool that owns the engine, and how worker and Flower start."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import warnings
from typing import Any

import structlog
from celery import Celery, signals
from celery.concurrency.thread import TaskPool
from celery.exceptions import CPendingDeprecationWarning, Reject
from celery.platforms import SecurityWarning
from celery.worker import state as celery_state

from jobs.child_process import say_last_words
from jobs.dispatch import RUN_SHARD, make_celery
from jobs.ledger.records import Ticket
from jobs.logs import setup_logging
from jobs.settings import Settings, load_settings
from pipelines.errors import ConfigError, ErrorCode, NightjarError
from pipelines.interpreter import collect_seldom
from worker.admission import MAX_SHARDS
from worker.consumer import ShardTask
from worker.runtime import Handling, Runtime, WorkerOptions

log = structlog.get_logger(__name__)

_lock = threading.Lock()
#: What the pool of this process is built from; None: the settings of the environment.
_configured: tuple[Settings, WorkerOptions] | None = None
_runtime: Runtime | None = None
#: Why the pool could not start.
_failure: NightjarError | None = None


def runtime() -> Runtime:
    """The runtime of this process. Raises `RuntimeError` outside a running worker."""
    if _runtime is None:
        raise RuntimeError("No worker runs in this process.")
    return _runtime


class EnginePool(TaskPool):
    """Threads around one `Runtime`, one for each shard in flight. A thread begins when it is first needed.

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
            collect_seldom()
        except NightjarError as error:
            # Celery would log a traceback; whoever started the worker tells the person.
            _failure = error
            raise SystemExit(1) from error
        except Exception as error:
            # Celery logs the traceback and ends with a status.
            say_last_words(f"{type(error).__name__}: {error}")
            raise

    def on_apply(self, target: Any, args: Any = None, *arguments: Any, **options: Any) -> Any:
        result = super().on_apply(target, args, *arguments, **options)
        if _runtime is not None and args and args[0] == RUN_SHARD:
            demand = _runtime.demand
            demand.taken()
            result.f.add_done_callback(lambda _: demand.ended())
        return result

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


def create_app(settings: Settings) -> Celery:
    """The app with its task."""
    app = make_celery(settings)
    app.conf.worker_consumer = "worker.consumer:SteadyConsumer"
    app.task(name=RUN_SHARD, base=ShardTask)(run_shard)
    app.finalize()
    return app


def run_shard(job: str, shard: int, epoch: int) -> str:
    """Runs one shard. The message goes back to the queue when this worker leaves it to another one."""
    handling = runtime().handle(Ticket(job, shard, epoch))
    if handling is Handling.REFUSED:
        raise Reject(requeue=True)
    return handling.value


def run_worker(settings: Settings, options: WorkerOptions) -> int:
    """Works until a signal; returns the exit status. Raises `NightjarError` when the worker cannot start."""
    global _configured
    # Celery warns root of pickled messages; only JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # And of what becomes of tasks when a connection is lost, at each loss; that is set.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    _configured = (settings, options)
    worker = create_app(settings).Worker(
        pool_cls=EnginePool,
        concurrency=settings.times.shards_in_flight or MAX_SHARDS,
        hostname=f"nightjar-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level.upper(),
        quiet=True,
        # Workers owe each other nothing: the ledger knows who holds what.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    failure = _failure or (None if _runtime is None else _runtime.failure)
    if failure is not None:
        raise failure
    return int(worker.exitcode or 0)


def run_flower(settings: Settings) -> None:
    """Becomes Flower. Raises `config.invalid` without credentials, for the dashboard shows every job."""
    auth = "" if settings.flower.basic_auth is None else settings.flower.basic_auth.get_secret_value()
    # Flower takes several, with commas between them, and would let in whoever leaves both fields of a lone colon empty.
    if not all(user.strip() and password.strip() for user, _, password in (one.partition(":") for one in auth.split(","))):
        raise ConfigError(
            ErrorCode.CONFIG_INVALID,
            "Flower does not start without a user and a password.",
            "Set SPEECH_FLOWER__BASIC_AUTH to user:password, neither of them empty or with a comma.",
        )
    # By environment, not by arguments: those are readable by every user of the machine.
    os.environ["FLOWER_BASIC_AUTH"] = auth
    sys.argv[0] = "celery"
    create_app(settings).start(
        ["flower", f"--address={settings.flower.address}", f"--port={settings.flower.port}", "--read_only=True", "--max_tasks=100000"]
    )


@signals.setup_logging.connect(weak=False)
def _log_as_we_do(**_: object) -> None:
    """Celery logs through the same structlog as everything else."""
    settings = load_settings()
    setup_logging(settings.log_level, settings.log_format)


app = create_app(load_settings())
