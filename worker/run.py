"""Starts the long-lived processes: worker, beat and Flower."""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings

from jobs.settings import Settings
from pipelines.errors import ConfigError, ErrorCode


def run_worker(settings: Settings, model: str | None, parent_pid: int | None) -> int:
    """Works until a signal; returns the exit status. Raises `NightjarError` when the worker cannot start."""
    from celery.exceptions import CPendingDeprecationWarning
    from celery.platforms import SecurityWarning

    from worker import engine_pool
    from worker.celery_app import create_app
    from worker.runtime import WorkerOptions

    # Celery warns root of pickled messages; only JSON is accepted here.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # And of what becomes of tasks when a connection is lost, at each loss; that is set.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    engine_pool.configure(settings, WorkerOptions(model, parent_pid))
    worker = create_app(settings).Worker(
        pool_cls=engine_pool.EnginePool,
        concurrency=settings.worker.shards_in_flight,
        hostname=f"nightjar-{os.getpid()}@{socket.gethostname()}",
        loglevel=settings.log_level.upper(),
        quiet=True,
        # Workers owe each other nothing: the ledger knows who holds what.
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    failure = engine_pool.start_failure()
    if failure is not None:
        raise failure
    return int(worker.exitcode or 0)


def run_beat(settings: Settings) -> None:
    """Runs Celery beat with its file in the state folder."""
    from worker.celery_app import create_app

    settings.state_folder.mkdir(parents=True, exist_ok=True)
    app = create_app(settings)
    # Times of schedules are local times.
    app.conf.enable_utc = False
    beat = app.Beat(schedule=str(settings.state_folder / "beat"), loglevel=settings.log_level.upper(), quiet=True, redirect_stdouts=False)
    # Celery's own handler writes the file within the signal, and fails where beat is just opening it; leaving its loop writes it too.
    beat.install_sync_handler = lambda _: [signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGINT)]
    beat.run()


def _leave(*_: object) -> None:
    raise SystemExit(0)


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
    from worker.celery_app import create_app

    sys.argv[0] = "celery"
    create_app(settings).start(
        ["flower", f"--address={settings.flower.address}", f"--port={settings.flower.port}", "--read_only=True", "--max_tasks=100000"]
    )
