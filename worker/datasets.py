"""The datasets of a night: what its schedule exports once the night's job has ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from jobs.artifacts import slug
from jobs.ledger.records import Job, JobState
from pipelines.errors import ConfigError, ErrorCode, NightjarError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Schedule, Settings

log = structlog.get_logger(__name__)

#: Stands among the formats for the job's report.
REPORT = "report"
_ENDED_WELL = {JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS}


@dataclass(frozen=True, slots=True)
class Dataset:
    """One export of a night."""

    format: str
    to: str
    items: int = 0
    #: Why it was not written; empty: it stands.
    reason: str = ""


def place_of(settings: Settings, name: str, schedule: Schedule, format: str, night: date) -> str:
    """Where a night's export of a format goes."""
    from jobs.export.export import ERRORS, LINE_FORMATS

    if schedule.export_to is not None:
        return night.strftime(schedule.export_to.replace("{format}", format).replace("{date}", "%Y-%m-%d"))
    one_file = format == ERRORS or (format in LINE_FORMATS and schedule.splits is None)
    extension = ".html" if format == REPORT else ".jsonl" if one_file else ""
    return str(settings.home.absolute() / "datasets" / slug(name) / night.isoformat() / f"{format}{extension}")


def check_exports(name: str, schedule: Schedule) -> None:
    """Raises `config.invalid` for exports that could not be written, before a night's work rather than after it."""
    from jobs.export import FORMATS, parse_splits

    known = (*FORMATS, REPORT)
    for wanted in schedule.exports:
        if wanted not in known:
            reason = f"The schedule {name!r} exports {wanted[:40]!r}, which is no format."
            raise ConfigError(ErrorCode.CONFIG_INVALID, reason, f"Use: {', '.join(known)}.")
    if schedule.splits is not None:
        parse_splits(schedule.splits)
    to = schedule.export_to
    if to is not None and "{format}" not in to and len(schedule.exports) > 1:
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, f"The schedule {name!r} has several exports and one place.", "Put `{format}` into `export_to`."
        )
    if to is not None and "{date}" not in to and "%" not in to and schedule.exports:
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, f"The exports of {name!r} have one place for all nights.", "Put `{date}` into `export_to`."
        )


def write_datasets(settings: Settings, ledger: Ledger, name: str, night: date, job: Job) -> tuple[Dataset, ...]:
    """Writes the exports of a night whose job has ended. One that stands is left as it is, one that was stopped goes on; one
    that fails keeps no other from being written."""
    schedule = settings.schedules[name]
    if job.state not in _ENDED_WELL:
        return ()
    places = [(wanted, place_of(settings, name, schedule, wanted, night)) for wanted in schedule.exports]
    return tuple([_written(settings, ledger, schedule, job, wanted, to) for wanted, to in places])


def _written(settings: Settings, ledger: Ledger, schedule: Schedule, job: Job, format: str, to: str) -> Dataset:
    try:
        items = _write(settings, ledger, schedule, job, format, to)
    except NightjarError as error:
        log.error("dataset not written", job=job.id, format=format, to=to, code=error.code.value, error=str(error))
        return Dataset(format, to, reason=str(error))
    log.info("dataset written", job=job.id, format=format, to=to, items=items)
    return Dataset(format, to, items)


def _write(settings: Settings, ledger: Ledger, schedule: Schedule, job: Job, format: str, to: str) -> int:
    from jobs.export import export, parse_splits
    from jobs.store import open_store

    store = open_store(job.store_url, settings.s3)
    if format == REPORT:
        from jobs.report import ReportOptions, write_report

        if to.startswith("s3://"):
            raise ConfigError(
                ErrorCode.CONFIG_INVALID, "A report is one local file.", "Let `export_to` name a folder, or leave `report` out."
            )
        return write_report(ledger, store, job.id, Path(to), ReportOptions(price_per_gpu_hour=settings.price_per_gpu_hour)).measured
    splits = parse_splits(schedule.splits) if schedule.splits and not format.endswith("-errors") else None
    return export(ledger, store, job.id, format, to, splits=splits, s3=settings.s3).items
