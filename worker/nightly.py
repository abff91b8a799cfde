"""Nightly schedules: the file of a night becomes a job, once, and the job its datasets."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog

from jobs.ledger.records import JobSpec
from jobs.quality import quality_of
from pipelines.errors import ConfigError, ErrorCode, InputError, NightjarError
from pipelines.request import Generation
from worker.datasets import Dataset, check_exports, write_datasets

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Schedule, Settings

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
#: A file of a night that is not there. What else is wrong with it counts as a failure.
_MISSING = {ErrorCode.INPUT_UNREADABLE, ErrorCode.STORE_MISSING}


class NightEnd(StrEnum):
    """What became of a schedule's night."""

    SUBMITTED = "submitted"
    #: It ran before.
    RAN = "ran"
    #: Its file is not there; the night can be caught up.
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Night:
    """A schedule's night and what became of it."""

    schedule: str
    night: date
    end: NightEnd
    job_id: str = ""
    reason: str = ""
    #: What was exported of it, where its job has ended.
    datasets: tuple[Dataset, ...] = ()

    def __str__(self) -> str:
        tail = " ".join(part for part in (self.job_id, self.reason) if part)
        lines = [f"{self.schedule} {self.night.isoformat()} {self.end.value}{f' {tail}' if tail else ''}"]
        lines += [f"  {one.format} {f'not written: {one.reason}' if one.reason else one.to}" for one in self.datasets]
        return "\n".join(lines)

    @property
    def view(self) -> dict[str, Any]:
        """`nightjar.night/1`."""
        return {
            "schema": "nightjar.night/1",
            "schedule": self.schedule,
            "night": self.night.isoformat(),
            "end": self.end.value,
            "job": self.job_id or None,
            "reason": self.reason or None,
            "datasets": [{"format": one.format, "to": one.to, "items": one.items, "reason": one.reason or None} for one in self.datasets],
        }


@dataclass(frozen=True, slots=True)
class NightlyReport:
    """All nights of a run."""

    nights: Sequence[Night]

    @property
    def failed(self) -> bool:
        datasets = (dataset for night in self.nights for dataset in night.datasets)
        return any(night.end in {NightEnd.FAILED, NightEnd.MISSING} for night in self.nights) or any(one.reason for one in datasets)


def input_of(schedule: Schedule, night: date) -> str:
    """The schedule's input with the night filled in: `{date}` is the ISO date, strftime codes work too."""
    return night.strftime(schedule.input.replace("{date}", "%Y-%m-%d"))


def last_night(now: datetime | None = None) -> date:
    """The night that a run without a date means: today's date where this process runs."""
    return (now or datetime.now().astimezone()).date()


def run_nights(
    settings: Settings,
    night: str | None,
    catch_up: int,
    names: Collection[str] = (),
    *,
    wait_seconds: float = 0.0,
    now: datetime | None = None,
) -> NightlyReport:
    """Submits a night, and up to `catch_up` earlier ones that did not run, of every schedule (or of those named), and writes
    the datasets of those whose jobs have ended, or end within `wait_seconds`.

    Raises `ConfigError` for a date or a schedule that does not exist, and `ServiceError`.
    """
    from jobs.ledger import Ledger

    try:
        last = date.fromisoformat(night) if night else last_night(now)
    except ValueError:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"{night!r} is no date.", "Write it as YYYY-MM-DD.") from None
    if unknown := set(names) - settings.schedules.keys():
        known = ", ".join(sorted(settings.schedules)) or "none"
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"There is no schedule {sorted(unknown)[0]!r}.", f"Schedules are: {known}.")
    ledger = Ledger.open(settings.ledger_url)
    try:
        ledger.check_schema()
        dates = [last - timedelta(days=days) for days in range(catch_up, -1, -1)]
        chosen = [name for name in settings.schedules if not names or name in names]
        for name in chosen:
            check_exports(name, settings.schedules[name])
        nights = [run_night(settings, ledger, name, one) for name in chosen for one in dates]
        deadline = time.monotonic() + wait_seconds
        return NightlyReport([_with_datasets(settings, ledger, one, deadline) for one in nights])
    finally:
        ledger.close()


def run_night(settings: Settings, ledger: Ledger, name: str, night: date) -> Night:
    """Submits one night of one schedule, unless it ran.

    The job is submitted first and the night recorded then: a crash between makes the next run find the same job by its
    idempotency key. Raises `ServiceError`.
    """
    schedule = settings.schedules[name]
    if night.isoformat() in ledger.schedule_history(name):
        return Night(name, night, NightEnd.RAN)
    try:
        job_id = _submit(settings, ledger, name, schedule, night)
    except InputError as error:
        end = NightEnd.MISSING if error.code in _MISSING else NightEnd.FAILED
        log.error("night not submitted", schedule=name, night=night.isoformat(), code=error.code.value, error=str(error))
        return Night(name, night, end, reason=str(error))
    except NightjarError as error:
        log.error("night not submitted", schedule=name, night=night.isoformat(), code=error.code.value, error=str(error))
        return Night(name, night, NightEnd.FAILED, reason=str(error))
    ledger.schedule_ran(name, night.isoformat())
    log.info("night submitted", schedule=name, night=night.isoformat(), job=job_id)
    return Night(name, night, NightEnd.SUBMITTED, job_id)


def _with_datasets(settings: Settings, ledger: Ledger, night: Night, deadline: float) -> Night:
    """The night with the datasets of its job, once that has ended; as it is where the time is over before."""
    if not settings.schedules[night.schedule].exports or night.end not in {NightEnd.SUBMITTED, NightEnd.RAN}:
        return night
    job = ledger.job_of_key(_key(night.schedule, night.night))
    while job is not None and not job.state.final and time.monotonic() < deadline:
        time.sleep(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
        job = ledger.job(job.id)
    if job is None:
        return night
    if not job.state.final:
        return replace(night, job_id=job.id, reason=night.reason or f"its job is {job.state.value}; run this again for its datasets")
    return replace(night, job_id=job.id, datasets=write_datasets(settings, ledger, night.schedule, night.night, job))


def _key(name: str, night: date) -> str:
    return f"nightly/{name}/{night.isoformat()}"


def run_schedule(settings: Settings, ledger: Ledger, name: str, now: datetime | None = None) -> str:
    """What Celery beat asks for: the last night of one schedule, as a line for people. Its datasets are `run_nights`' to write:
    an export must not hold up a worker."""
    return str(run_night(settings, ledger, name, last_night(now)))


def _submit(settings: Settings, ledger: Ledger, name: str, schedule: Schedule, night: date) -> str:
    from jobs.ingest import SubmitOptions, submit
    from jobs.store import open_store

    spec = JobSpec(
        model=schedule.model,
        generation=Generation(voice=schedule.voice, language=schedule.language, instruct=schedule.instruct),
        seed=schedule.seed,
        format=schedule.format,
        quality=quality_of(schedule.qa, schedule.qa_config),
    )
    options = SubmitOptions(
        name=f"{name} {night.isoformat()}",
        priority=schedule.priority,
        weight=schedule.weight,
        labels={"schedule": name, "night": night.isoformat()},
        on_error=schedule.on_error,
        input_format=schedule.input_format,
        idempotency_key=_key(name, night),
    )
    store = open_store(schedule.store_url or settings.effective_store_url, settings.s3)
    return submit(settings, ledger, store, input_of(schedule, night), spec, options=options).job.id
