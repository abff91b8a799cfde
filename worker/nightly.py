"""Nightly schedules: the file of a night becomes a job, once, and the job its datasets."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog

from jobs.dialogue import clean
from jobs.formatting import counted
from jobs.job_options import SubmitOptions, job_of
from jobs.ledger.records import INPUT_FORMAT, Job, JobSpec, JobState
from jobs.recent_jobs import remember_if_embedded
from pipelines.errors import ConfigError, ErrorCode, InputError, NightjarError, ServiceError
from worker.datasets import Dataset, check_exports, write_datasets

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Schedule, Settings
    from jobs.store.base import ObjectStore


#: A night whose job ended so has not run.
ENDED_BADLY = frozenset({JobState.FAILED, JobState.CANCELLED})


def input_of(schedule: Schedule, night: date) -> str:
    """The schedule's input with the night filled in: `{date}` is the ISO date, strftime codes work too."""
    return night.strftime(schedule.input.replace("{date}", "%Y-%m-%d"))


def night_jobs(ledger: Ledger, name: str, night: date) -> dict[int, Job]:
    """The jobs of a night that were not deleted, by number from 1, the newest last. All but the last failed or were cancelled."""
    first = _key(name, night, 1)
    ends = [(key.removeprefix(first), job) for key, job in ledger.jobs_of_keys(first)]
    return dict(sorted((int(end[1:] or 1), job) for end, job in ends if not end or end[1:].isdigit()))


def submit_night(settings: Settings, ledger: Ledger, name: str, night: date, number: int) -> Job:
    """Submits the job of a night with this number, or goes on with its submit, or finds it. Raises `NightjarError`."""
    from jobs.ingest import submit

    schedule = settings.schedules[name]
    spec, options = _job(schedule)
    options = replace(
        options,
        name=f"{name} {night.isoformat()}",
        labels={**options.labels, "schedule": name, "night": night.isoformat()},
        idempotency_key=_key(name, night, number),
    )
    job = submit(settings, ledger, _store(settings, schedule), input_of(schedule, night), spec, options=options).job
    remember_if_embedded(job.id, settings)
    return job


def is_mended(settings: Settings, job: Job, name: str, night: date) -> bool:
    """Whether a night whose job ended badly can be another job now: its file or what is made of it has changed, or lines of the
    same file that were refused would be taken, since audio that they name is there now. A job that a person cancelled comes
    back for a change only. Raises `NightjarError`.
    """
    from jobs.ingest import dry_run
    from jobs.source import open_source
    from jobs.spec import resolve, spec_sha
    from jobs.voices import voice_folder

    schedule = settings.schedules[name]
    (spec, options), store, source = _job(schedule), _store(settings, schedule), input_of(schedule, night)
    with open_source(source, settings.s3) as opened:
        place = (opened.sha256, store.url, options.input_format)
        if place != (job.input_sha256, job.store_url, job.labels.get(INPUT_FORMAT, "dialogues")):
            return True
        resolved = resolve(spec, options.input_format, voice_folder(settings)).of_input(opened)
    if job.spec_sha != spec_sha(resolved.spec):
        return True
    return job.state is JobState.FAILED and dry_run(settings, store, source, spec, options.input_format).items > 0


def bad_end(job: Job) -> NightjarError:
    """Why a night's job that failed or was cancelled made nothing, and what a person does."""
    if job.state is JobState.CANCELLED:
        return ServiceError(
            ErrorCode.LEDGER_STATE,
            f"Its job {job.id} was cancelled.",
            "Run the night again with another file in the place of this one, or with --again to make this one after all.",
        )
    if job.rejected_lines:
        message = f"Its job {job.id} has no items: all of the file's lines were refused."
        return InputError(
            ErrorCode.INPUT_NO_ITEMS, message, f"See why with `nightjar errors {job.id}`, mend the file and run the night again."
        )
    return InputError(ErrorCode.INPUT_NO_ITEMS, "Its file has no lines.", "Put a file with dialogues there and run the night again.")


def _key(name: str, night: date, number: int) -> str:
    """The idempotency key of a night's job of this number: two processes that run the same night make one job."""
    first = f"nightly/{name}/{night.isoformat()}"
    return first if number == 1 else f"{first}/{number}"


def _job(schedule: Schedule) -> tuple[JobSpec, SubmitOptions]:
    return job_of({"input_format": "dialogues", **schedule.options})


def _store(settings: Settings, schedule: Schedule) -> ObjectStore:
    from jobs.store import open_store

    return open_store(schedule.store_url or settings.effective_store_url, settings.s3)


log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
#: A file of a night that is not there. What else is wrong with it counts as a failure.
_MISSING = {ErrorCode.INPUT_UNREADABLE, ErrorCode.STORE_MISSING}


class NightEnd(StrEnum):
    """What became of a schedule's night."""

    SUBMITTED = "submitted"
    #: It was submitted before.
    RAN = "ran"
    #: Its file is not there; the night can be caught up.
    MISSING = "missing"
    #: It was not submitted, or its job failed or was cancelled; the night stays due.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Night:
    """A schedule's night and what became of it."""

    schedule: str
    night: date
    end: NightEnd
    job_id: str = ""
    #: State of its job.
    state: JobState | None = None
    #: Why it failed, or why its datasets are not there yet.
    reason: str = ""
    code: ErrorCode | None = None
    done_items: int = 0
    #: What is wrong in a job that ended well.
    failed_items: int = 0
    rejected_lines: int = 0
    #: What was exported of it, where its job has ended.
    datasets: tuple[Dataset, ...] = ()

    def __str__(self) -> str:
        code = self.code.value if self.code else ""
        tail = " ".join(part for part in (self.job_id, code, self.reason) if part)
        lines = [f"{clean(self.schedule, 100)} {self.night.isoformat()} {self.end.value}{f' {tail}' if tail else ''}"]
        if self.failed_items or self.rejected_lines:
            counts = f"{counted(self.failed_items, 'item')} failed, {counted(self.rejected_lines, 'line')} refused"
            lines.append(f"  {counts}; see why with: nightjar errors {self.job_id}")
        for one in self.datasets:
            written = f"{one.to} ({counted(one.items, 'item')})"
            lines.append(f"  {one.format} {f'not written: {one.reason}' if one.reason else written}")
        return "\n".join(lines)

    @property
    def empty(self) -> bool:
        """Whether its job has ended and every item failed."""
        return self.failed_items > 0 and self.done_items == 0

    @property
    def view(self) -> dict[str, Any]:
        """`nightjar.night/1`."""
        return {
            "schema": "nightjar.night/1",
            "schedule": self.schedule,
            "night": self.night.isoformat(),
            "end": self.end.value,
            "job": self.job_id or None,
            "state": self.state.value if self.state else None,
            "code": self.code.value if self.code else None,
            "reason": self.reason or None,
            "done_items": self.done_items,
            "failed_items": self.failed_items,
            "rejected_lines": self.rejected_lines,
            "datasets": [{"format": one.format, "to": one.to, "items": one.items, "reason": one.reason or None} for one in self.datasets],
        }


@dataclass(frozen=True, slots=True)
class NightlyReport:
    """All nights of a run."""

    nights: Sequence[Night]

    @property
    def failed(self) -> bool:
        """Whether a night is missing or failed, made nothing, or lacks a dataset."""
        return any(
            night.end in {NightEnd.FAILED, NightEnd.MISSING} or night.empty or any(one.reason for one in night.datasets)
            for night in self.nights
        )

    @property
    def unfinished(self) -> bool:
        """Whether a night's job has not ended."""
        return any(night.state is not None and not night.state.final for night in self.nights)


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
    again: bool = False,
    now: datetime | None = None,
) -> NightlyReport:
    """Submits a night, and up to `catch_up` earlier ones that did not run, of every schedule (or of those named), and writes
    the datasets of those whose jobs have ended, or end within `wait_seconds`. `again`: also the same file of a night whose
    job failed or was cancelled.

    Raises `ConfigError` for a date or a schedule that does not exist and for exports that cannot be, and `ServiceError`.
    """
    from jobs.ledger import Ledger

    try:
        last = date.fromisoformat(night) if night else last_night(now)
    except ValueError:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"{night!r} is not a date.", "Write it as YYYY-MM-DD.") from None
    if unknown := set(names) - settings.schedules.keys():
        known = ", ".join(sorted(settings.schedules)) or "none"
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"There is no schedule {sorted(unknown)[0]!r}.", f"Schedules are: {known}.")
    if not settings.schedules:
        # A command of cron in another folder would do nothing every night.
        advice = "Write one as `[schedules.NAME]` into nightjar.toml of the working directory, or name its file with SPEECH_CONFIG."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "No schedule is set.", advice)
    check_exports(settings, names or settings.schedules)
    ledger = Ledger.of(settings)
    try:
        ledger.check_schema()
        dates = [last - timedelta(days=days) for days in range(catch_up, -1, -1)]
        chosen = [name for name in settings.schedules if not names or name in names]
        nights = [run_night(settings, ledger, name, one, again=again) for name in chosen for one in dates]
        return NightlyReport(_to_their_ends(settings, ledger, nights, time.monotonic() + wait_seconds))
    finally:
        ledger.close()


def run_night(settings: Settings, ledger: Ledger, name: str, night: date, *, again: bool = False) -> Night:
    """Submits one night of one schedule, unless it ran. A night whose job failed or was cancelled has not: it is submitted
    once more where that can end otherwise, or with `again`.

    The job is submitted first and the night recorded then: a crash between makes the next run find the same job by its
    idempotency key. Raises `ServiceError`.
    """
    jobs = night_jobs(ledger, name, night)
    number = max(jobs, default=1)
    last = jobs.get(number)
    recorded = night.isoformat() in ledger.schedule_history(name)
    if last is None and recorded:
        return Night(name, night, NightEnd.RAN)
    try:
        if last is not None and last.state in ENDED_BADLY:
            if not again and not is_mended(settings, last, name, night):
                return _failed(ledger, Night(name, night, NightEnd.FAILED, last.id, last.state), bad_end(last))
            last = submit_night(settings, ledger, name, night, number + 1)
        elif last is None or last.state is JobState.INGESTING:
            last = submit_night(settings, ledger, name, night, number)
        elif recorded:
            return Night(name, night, NightEnd.RAN, last.id, last.state)
    except NightjarError as error:
        end = NightEnd.MISSING if isinstance(error, InputError) and error.code in _MISSING else NightEnd.FAILED
        return _failed(ledger, Night(name, night, end, last.id if last else "", last.state if last else None), _explained(error, last))
    if last.state in ENDED_BADLY:
        return _failed(ledger, Night(name, night, NightEnd.FAILED, last.id, last.state), bad_end(last))
    ledger.schedule_ran(name, night.isoformat())
    log.info("night submitted", schedule=name, night=night.isoformat(), job=last.id)
    return Night(name, night, NightEnd.SUBMITTED, last.id, last.state)


def _explained(error: NightjarError, job: Job | None) -> NightjarError:
    """The error of a submit; that of a night whose file was changed after its first submit was stopped says how to go on."""
    if job is None or job.state is not JobState.INGESTING or error.code is not ErrorCode.LEDGER_STATE:
        return error
    message = f"Its job {job.id} was made from another file or other settings, and its submit was stopped."
    return ServiceError(error.code, message, f"Run the night again after `nightjar cancel {job.id}`.")


def _failed(ledger: Ledger, night: Night, error: NightjarError) -> Night:
    """The night as one that has not run: it stays due."""
    day, job = night.night.isoformat(), night.job_id or None
    log.error("night failed", schedule=night.schedule, night=day, job=job, code=error.code.value, error=str(error))
    if night.state in ENDED_BADLY:
        ledger.schedule_forget(night.schedule, day)
    return replace(night, reason=str(error), code=error.code)


def _to_their_ends(settings: Settings, ledger: Ledger, nights: Sequence[Night], deadline: float) -> list[Night]:
    """The nights with the ends of their jobs and their datasets, in the order in which they come; as they are where the time is
    over before."""
    ended: dict[int, Night] = {}
    while True:
        for place, night in enumerate(nights):
            if place not in ended and (end := _patient(settings, ledger, night, deadline)) is not None:
                ended[place] = end
        if len(ended) == len(nights) or time.monotonic() >= deadline:
            return [ended[place] if place in ended else _unfinished(settings, ledger, night) for place, night in enumerate(nights)]
        time.sleep(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))


def _patient(settings: Settings, ledger: Ledger, night: Night, deadline: float) -> Night | None:
    """As `_at_its_end`, but a ledger that is away for a while does not end hours of waiting."""
    try:
        return _at_its_end(settings, ledger, night)
    except ServiceError as error:
        if not error.code.retryable or time.monotonic() >= deadline:
            raise
        log.warning("still waiting", schedule=night.schedule, job=night.job_id, code=error.code.value, error=str(error))
        return None


def _at_its_end(settings: Settings, ledger: Ledger, night: Night) -> Night | None:
    """The night once its job has ended; None before."""
    if not night.job_id or night.end not in {NightEnd.SUBMITTED, NightEnd.RAN}:
        return night
    status = ledger.status(night.job_id)
    night = replace(night, state=status.job.state)
    if not status.job.state.final:
        return None
    if status.job.state in ENDED_BADLY:
        return _failed(ledger, replace(night, end=NightEnd.FAILED), bad_end(status.job))
    jobs = list(night_jobs(ledger, night.schedule, night.night).values())
    datasets = write_datasets(settings, ledger, night.schedule, night.night, jobs)
    return replace(
        night, done_items=status.items.done, failed_items=status.items.failed, rejected_lines=status.job.rejected_lines, datasets=datasets
    )


def _unfinished(settings: Settings, ledger: Ledger, night: Night) -> Night:
    job = ledger.job(night.job_id)
    datasets = " for its datasets" if settings.schedules[night.schedule].exports else ""
    if job.state is JobState.PAUSED:
        why = f" ({job.state_reason})" if job.state_reason else ""
        reason = f"its job is paused{why}; continue it with `nightjar resume {job.id}`, and run this again{datasets}"
    else:
        reason = f"its job is {job.state.value}; run this again{datasets}" if datasets else f"its job is {job.state.value}"
    return replace(night, state=job.state, reason=reason)
