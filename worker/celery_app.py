"""The Celery app: its tasks and its timetable."""

from __future__ import annotations

from typing import Any

from celery import Celery, signals
from celery.exceptions import Reject
from celery.schedules import crontab

from jobs.dispatch import RUN_NIGHTLY, RUN_SHARD, RUN_SWEEP, make_celery
from jobs.ledger.records import Ticket
from jobs.logs import setup_logging
from jobs.settings import Settings, load_settings
from worker.consumer import ShardTask
from worker.engine_pool import runtime
from worker.runtime import Handling

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
