"""Celery's pool of a worker, which owns the engine."""

from __future__ import annotations

import signal
import threading
from typing import Any

from celery.concurrency.thread import TaskPool
from celery.worker import state as celery_state

from jobs.settings import Settings, load_settings
from pipelines.errors import NightjarError
from worker.runtime import Runtime, WorkerOptions

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
