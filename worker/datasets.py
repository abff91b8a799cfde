"""The datasets of a night: what its schedule exports once the night's job has ended."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from jobs.job_options import job_of
from jobs.layout import slug
from jobs.ledger.records import Job
from jobs.store import is_remote
from pipelines.errors import ConfigError, ErrorCode, NightjarError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Schedule, Settings

log = structlog.get_logger(__name__)

#: Stands among the formats for the job's report.
REPORT = "report"
#: A place that ends so has no extension of its own.
_OPEN_END = re.compile(r"(\{format\}|\{date\}|%[-_0^#]?[A-Za-z])\Z")
#: Nights whose places are compared: those of a leap year and of one day more.
_COMPARED_NIGHTS = [date(2027, 12, 1) + timedelta(days=days) for days in range(367)]


@dataclass(frozen=True, slots=True)
class Dataset:
    """One export of a night."""

    format: str
    to: str
    items: int = 0
    #: Why it was not written; empty: it stands.
    reason: str = ""


def place_of(settings: Settings, name: str, schedule: Schedule, format: str, night: date) -> str:
    """Where a night's export of a format goes. A format that is one file gets its extension, unless the place has an end of its own."""
    extension = ".html" if format == REPORT else ".jsonl" if _is_one_file(format, schedule.splits) else ""
    if (to := schedule.export_to) is not None:
        end = extension if _OPEN_END.search(to) else ""
        return night.strftime(to.replace("{format}", format).replace("{date}", "%Y-%m-%d")) + end
    return str(settings.home.absolute() / "datasets" / slug(name) / night.isoformat() / f"{format}{extension}")


def _is_one_file(format: str, splits: str | None) -> bool:
    """Whether an export is one file. A format that is unknown here may be of a schedule that this process does not run."""
    from jobs.export import find_format

    try:
        return find_format(format).one_file(splits)
    except ConfigError:
        return False


def check_exports(settings: Settings, names: Collection[str]) -> None:
    """Raises `config.invalid` for exports of these schedules that could not be written, or that have one place with those of
    another schedule or one inside the other: before a night's work rather than after it."""
    for name in names:
        _check_formats(name, settings.schedules[name])
        _check_places(settings, name, settings.schedules[name])
    owners: list[tuple[str, str]] = []
    for name, schedule in settings.schedules.items():
        for wanted in schedule.exports:
            place = place_of(settings, name, schedule, wanted, _COMPARED_NIGHTS[0])
            place = place if is_remote(place) else os.path.abspath(place)
            for other, owner in owners:
                if owner != name and {owner, name} & set(names) and _meet(place, other):
                    reason = f"The schedules {owner!r} and {name!r} export to one place, or one into the other's."
                    raise ConfigError(ErrorCode.CONFIG_INVALID, reason, "Give each an `export_to` of its own.")
            owners.append((place, name))


def _meet(place: str, other: str) -> bool:
    """Whether two places are one, or one is in the other's folder. A prefix of a bucket holds others without harm."""
    if is_remote(place) or is_remote(other):
        return place == other
    return os.path.commonpath((place, other)) in (place, other)


def _check_formats(name: str, schedule: Schedule) -> None:
    from jobs.export import format_names, parse_splits

    known = (*format_names(), REPORT)
    for wanted in schedule.exports:
        if wanted not in known:
            reason = f"The schedule {name!r} exports {wanted[:40]!r}, which is not a format."
            raise ConfigError(ErrorCode.CONFIG_INVALID, reason, f"Use: {', '.join(known)}.")
    if schedule.splits is not None:
        parse_splits(schedule.splits)
    to = schedule.export_to
    if to is None or not schedule.exports:
        return
    if "{format}" not in to and len(schedule.exports) > 1:
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, f"The schedule {name!r} has several exports and one place.", "Put `{format}` into `export_to`."
        )
    dated = to.replace("{date}", "%Y-%m-%d")
    if len({night.strftime(dated) for night in _COMPARED_NIGHTS}) < len(_COMPARED_NIGHTS):
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, f"The exports of {name!r} have one place for several nights.", "Put `{date}` into `export_to`."
        )


def _check_places(settings: Settings, name: str, schedule: Schedule) -> None:
    """Raises `config.invalid` for formats that are never written to their places."""
    from jobs.export import find_format, parse_splits

    splits = parse_splits(schedule.splits) if schedule.splits is not None else None
    store_url = schedule.store_url or settings.effective_store_url
    spec, _ = job_of(schedule.options)
    for wanted in schedule.exports:
        to = place_of(settings, name, schedule, wanted, _COMPARED_NIGHTS[0])
        try:
            if wanted != REPORT:
                chosen = find_format(wanted)
                chosen.check(to, store_url, splits if chosen.splittable else None, packed=spec.pack is True, stored=spec.format)
            elif is_remote(to):
                raise ConfigError(ErrorCode.CONFIG_INVALID, "A report is one local file.")
        except ConfigError as error:
            reason = f"The schedule {name!r} cannot export {wanted}: {error.message}"
            raise ConfigError(error.code, reason, "Leave it out, or change `export_to` or the store.") from error


def write_datasets(settings: Settings, ledger: Ledger, name: str, night: date, jobs: Sequence[Job]) -> tuple[Dataset, ...]:
    """Writes the exports of a night whose last job has ended well. One that stands is left as it is, one that was stopped goes
    on, and one that a job of this night left before it went on is written anew; one that fails keeps no other from being
    written, and no file that is another's is touched."""
    schedule = settings.schedules[name]
    places = [(wanted, place_of(settings, name, schedule, wanted, night)) for wanted in schedule.exports]
    return tuple([_written(settings, ledger, schedule, jobs, wanted, to) for wanted, to in places])


def _written(settings: Settings, ledger: Ledger, schedule: Schedule, jobs: Sequence[Job], format: str, to: str) -> Dataset:
    job_id = jobs[-1].id
    try:
        items = _write(settings, ledger, schedule, jobs, format, to)
    except NightjarError as error:
        log.error("dataset not written", job=job_id, format=format, to=to, code=error.code.value, error=str(error))
        return Dataset(format, to, reason=str(error))
    except Exception as error:
        # One dataset keeps no other back, whatever is wrong with it.
        log.exception("dataset not written", job=job_id, format=format, to=to)
        return Dataset(format, to, reason=f"The export failed unexpectedly: {error!r}.")
    log.info("dataset complete", job=job_id, format=format, to=to, items=items)
    return Dataset(format, to, items)


def _write(settings: Settings, ledger: Ledger, schedule: Schedule, jobs: Sequence[Job], format: str, to: str) -> int:
    from jobs.export import export, find_format, own_output, parse_splits
    from jobs.store import store_of

    job = jobs[-1]
    own = {job.id for job in jobs}
    store = store_of(job, settings.s3)
    if format == REPORT:
        from jobs.report import ReportOptions, write_report

        options = ReportOptions(price_per_gpu_hour=settings.price_per_gpu_hour)
        return write_report(ledger, store, job.id, Path(to), options, lambda place: own_output(place, job.id, own)).measured
    splits = parse_splits(schedule.splits) if schedule.splits and find_format(format).splittable else None
    return export(ledger, store, job.id, format, to, splits=splits, s3=settings.s3, replaces=own).items
