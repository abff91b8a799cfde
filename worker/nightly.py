"""Nightly schedules: submits the file of each night once, and writes the datasets of the night's job."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from jobs.export import (
    ExportOptions,
    StoredJob,
    checked_format,
    export_jobs,
    find_format,
    own_output,
    parsed_options,
)
from jobs.formatting import counted, printable
from jobs.ingest import submit
from jobs.job_options import SubmitOptions, job_of
from jobs.layout import slug
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.recent_jobs import remember_if_embedded
from jobs.settings import Schedule, Settings
from jobs.source import open_source
from jobs.store import is_remote, open_store, store_of
from pipelines.errors import ConfigError, ErrorCode, InputError, NightjarError, ServiceError, invalid

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
#: Final states of a job after which its night counts as not run.
ENDED_BADLY = frozenset({JobState.FAILED, JobState.CANCELLED})
#: Error codes of a missing input file; other errors count as failures.
_MISSING = {ErrorCode.INPUT_UNREADABLE, ErrorCode.STORE_MISSING}
#: The name of the job's report among the export formats.
REPORT = "report"
#: A path needs an extension if it ends with a placeholder.
_OPEN_END = re.compile(r"(\{format\}|\{date\}|%[-_0^#]?[A-Za-z])\Z")


#: The outcome of a schedule's night: this run submitted it; it was submitted before; its file is missing, and it can be caught
#: up; or it was not submitted, or its job failed or was cancelled, and it remains due.
NightEnd = Literal["submitted", "ran", "missing", "failed"]


class Dataset(msgspec.Struct, frozen=True):
    """One export of a night."""

    format: str
    to: str
    items: int = 0
    #: Why the export was not written; None: it exists.
    reason: str | None = None


@dataclass(eq=False)
class Night:
    """A night of a schedule, with its outcome."""

    settings: Settings
    ledger: Ledger
    name: str
    night: date
    end: NightEnd = "ran"
    #: The night's newest job.
    job: Job | None = None
    #: Why the night failed, or why its datasets are missing.
    reason: str = ""
    code: ErrorCode | None = None
    done_items: int = 0
    #: Failed items of a completed job.
    failed_items: int = 0
    rejected_lines: int = 0
    #: The night's exports, if its job has ended.
    datasets: tuple[Dataset, ...] = ()

    def __post_init__(self) -> None:
        self.schedule = self.settings.schedules[self.name]
        self.day = self.night.isoformat()

    @property
    def job_id(self) -> str:
        return "" if self.job is None else self.job.id

    @property
    def state(self) -> JobState | None:
        return None if self.job is None else self.job.state

    def __str__(self) -> str:
        tail = "".join(f" {part}" for part in (self.job_id, self.code or "", self.reason) if part)
        lines = [f"{printable(self.name, 100)} {self.day} {self.end}{tail}"]
        if self.failed_items or self.rejected_lines:
            counts = (
                f"{counted(self.failed_items, 'item')} failed, {counted(self.rejected_lines, 'line')} refused"
            )
            lines.append(f"  {counts}; see why with: nightjar errors {self.job_id}")
        for one in self.datasets:
            written = (
                f"not written: {one.reason}" if one.reason else f"{one.to} ({counted(one.items, 'item')})"
            )
            lines.append(f"  {one.format} {written}")
        return "\n".join(lines)

    @property
    def bad(self) -> bool:
        """Whether the night is missing or failed, all its items failed, or a dataset was not written."""
        no_results = self.failed_items > 0 and self.done_items == 0
        return self.end in {"failed", "missing"} or no_results or any(one.reason for one in self.datasets)

    @property
    def unfinished(self) -> bool:
        """Whether its job has not ended."""
        return self.state is not None and not self.state.final

    @property
    def view(self) -> dict[str, Any]:
        """The night as JSON of the schema `nightjar.night/1`."""
        return {
            "schema": "nightjar.night/1",
            "schedule": self.name,
            "night": self.day,
            "end": self.end,
            "job": self.job_id or None,
            "state": self.state and self.state.value,
            "code": self.code and self.code.value,
            "reason": self.reason or None,
            "done_items": self.done_items,
            "failed_items": self.failed_items,
            "rejected_lines": self.rejected_lines,
            "datasets": msgspec.to_builtins(self.datasets),
        }

    def run(self, *, again: bool = False) -> None:
        """Submits the night, unless it ran. A night whose job failed or was cancelled is submitted again if its file
        has changed, or with `again`.

        The job is submitted before the night is recorded: after a crash in between, the next run finds the same job
        by its idempotency key. Raises `ServiceError`.
        """
        jobs = self.jobs()
        number = max(jobs, default=1)
        self.job = jobs.get(number)
        ran = self.day in self.ledger.schedule_history(self.name)
        if ran and self.state not in {*ENDED_BADLY, JobState.INGESTING}:
            return
        try:
            if self.job is not None and self.state in ENDED_BADLY:
                if not again:
                    with open_source(input_of(self.schedule, self.night), self.settings.s3) as opened:
                        again = opened.sha256 != self.job.input_sha256
                if again:
                    self.job = self._submit(number + 1)
            elif self.state in {None, JobState.INGESTING}:
                self.job = self._submit(number)
        except NightjarError as error:
            missing = isinstance(error, InputError) and error.code in _MISSING
            self._fail(error, "missing" if missing else "failed")
            return
        if not self._ended_badly():
            self.ledger.schedule_ran(self.name, self.day)
            self.end = "submitted"

    def jobs(self) -> dict[int, Job]:
        """The jobs of the night by number, from 1 and in order, without deleted jobs. All but the last one failed or
        were cancelled."""
        first = self._key(1)
        ends = [(job.idempotency_key.removeprefix(first), job) for job in self.ledger.jobs_of_keys(first)]
        return dict(sorted((int(end[1:] or 1), job) for end, job in ends if not end or end[1:].isdigit()))

    def conclude(self) -> bool:
        """Writes the datasets of a night whose job is completed. Returns whether the night is finished."""
        if self.job is None or self.end in {"missing", "failed"}:
            return True
        status = self.ledger.status(self.job.id)
        self.job = job = status.job
        if not job.state.final or self._ended_badly():
            return job.state.final
        # An existing dataset is kept, an interrupted one is continued, and one that an earlier job of the night wrote is
        # replaced. A failure does not affect other datasets, and foreign files are never changed.
        jobs = list(self.jobs().values())
        self.datasets = tuple([self._written(jobs, wanted) for wanted in self.schedule.exports])
        self.done_items = status.items.done
        self.failed_items = status.items.failed
        self.rejected_lines = job.rejected_lines
        return True

    def explain(self) -> None:
        """Sets the reason and advice for a job that has not ended."""
        self.job = job = self.ledger.job(self.job_id)
        why = f" ({job.state_reason})" if job.state_reason else ""
        resume = f"continue it with `nightjar resume {job.id}`, and " if job.state is JobState.PAUSED else ""
        datasets = " for its datasets" if self.schedule.exports else ""
        self.reason = f"its job is {job.state.value}{why}; {resume}run this again{datasets}"

    def _ended_badly(self) -> bool:
        """Whether the night's job failed or was cancelled; if so, sets the reason and advice."""
        if self.job is None or self.state not in ENDED_BADLY:
            return False
        advice = "Correct its file and run the night again, or use --again for the same file."
        if self.state is JobState.CANCELLED:
            self._fail(ServiceError(ErrorCode.LEDGER_STATE, f"Its job {self.job_id} was cancelled.", advice))
        else:
            lines = (
                "all of the file's lines were refused" if self.job.rejected_lines else "the file has no lines"
            )
            message = f"Its job {self.job_id} has no items: {lines}."
            advice = f"See why with `nightjar errors {self.job_id}`. {advice}"
            self._fail(InputError(ErrorCode.INPUT_NO_ITEMS, message, advice))
        return True

    def _fail(self, error: NightjarError, end: NightEnd = "failed") -> None:
        """Records a failure; a night that has not run remains due."""
        self.end = end
        self.reason = str(error)
        self.code = error.code
        log.error("night failed", schedule=self.name, night=self.day, error=self.reason)
        if self.state in ENDED_BADLY:
            self.ledger.schedule_forget(self.name, self.day)

    def _key(self, number: int) -> str:
        """The idempotency key of the night's job with this number, so that two processes submit only one job."""
        first = f"nightly/{self.name}/{self.day}"
        return first if number == 1 else f"{first}/{number}"

    def _submit(self, number: int) -> Job:
        """Submits the job with this number, or continues an interrupted submission, or finds the job. Raises
        `NightjarError`."""
        spec, options = _job(self.schedule)
        source = input_of(self.schedule, self.night)
        options = replace(
            options,
            name=f"{self.name} {self.day}",
            labels={**options.labels, "schedule": self.name, "night": self.day},
            idempotency_key=self._key(number),
        )
        store_url = self.schedule.store_url or self.settings.effective_store_url
        job = submit(
            self.settings, self.ledger, open_store(store_url, self.settings.s3), source, spec, options=options
        ).job
        remember_if_embedded(job.id, self.settings)
        return job

    def _written(self, jobs: Sequence[Job], format: str) -> Dataset:
        """Writes an export or report. A failure is only recorded in the result."""
        to = place_of(self.settings, self.name, format, self.night)
        ledger = self.ledger
        job = jobs[-1]
        own = {one.id for one in jobs}
        s3 = self.settings.s3
        try:
            store = store_of(job, s3)
            if format != REPORT:
                options = _options(format, self.schedule)
                made = export_jobs(
                    [StoredJob(ledger, store, job)], format, to, s3=s3, replaces=own, **options
                )
                return Dataset(format, to, made.items)
            from jobs.report import write_report

            report = write_report(
                ledger,
                store,
                job.id,
                Path(to),
                price_per_gpu_hour=self.settings.price_per_gpu_hour,
                open_file=lambda place: own_output(place, job.id, own),
            )
            return Dataset(format, to, report.measured)
        except NightjarError as error:
            reason = str(error)
        except Exception as error:
            reason = f"The export failed unexpectedly: {error!r}."
            log.exception("dataset not written", job=job.id, format=format, to=to)
        return Dataset(format, to, reason=reason)


def run_nights(
    settings: Settings,
    night: str | None,
    catch_up: int,
    names: Collection[str] = (),
    *,
    wait_seconds: float = 0.0,
    again: bool = False,
    now: datetime | None = None,
) -> list[Night]:
    """Submits a night, and those of the `catch_up` nights before it that did not run. Writes the datasets of jobs that
    end within `wait_seconds`. `names`: only these schedules; empty: all. `again`: also resubmits unchanged files of
    nights whose job failed or was cancelled.

    Raises `ConfigError` for an invalid date, an unknown schedule and impossible exports, and `ServiceError`.
    """
    try:
        last = date.fromisoformat(night) if night else (now or datetime.now().astimezone()).date()
    except ValueError:
        raise invalid(f"{night!r} is not a date.", "Write it as YYYY-MM-DD.") from None
    if unknown := set(names) - settings.schedules.keys():
        raise invalid(
            f"There is no schedule {min(unknown)!r}.",
            f"Schedules are: {', '.join(sorted(settings.schedules)) or 'none'}.",
        )
    if not settings.schedules:
        # Otherwise a cron command in the wrong folder would silently do nothing every night.
        raise invalid(
            "No schedule is set.",
            "Write `[schedules.NAME]` into nightjar.toml here, or name its file with SPEECH_CONFIG.",
        )
    check_exports(settings, names or settings.schedules)
    with closing(Ledger.of(settings)) as ledger:
        ledger.check_schema()
        dates = [last - timedelta(days=days) for days in range(catch_up, -1, -1)]
        chosen = [name for name in settings.schedules if not names or name in names]
        nights = [Night(settings, ledger, name, day) for name in chosen for day in dates]
        for one in nights:
            one.run(again=again)
        left, deadline = list(nights), time.monotonic() + wait_seconds
        while True:
            for one in list(left):
                try:
                    if one.conclude():
                        left.remove(one)
                except ServiceError as error:
                    # Temporary failures of the ledger are tolerated until the deadline.
                    if not error.code.retryable or time.monotonic() >= deadline:
                        raise
                    log.warning("still waiting", schedule=one.name, job=one.job_id, error=str(error))
            if not left or time.monotonic() >= deadline:
                break
            time.sleep(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
        for one in left:
            one.explain()
        return nights


def input_of(schedule: Schedule, night: date) -> str:
    """The schedule's input for a night: `{date}` is replaced by the ISO date, and strftime codes by their values."""
    return night.strftime(schedule.input.replace("{date}", "%Y-%m-%d"))


def _job(schedule: Schedule) -> tuple[JobSpec, SubmitOptions]:
    return job_of({"input_format": "dialogues", **schedule.options})


def place_of(settings: Settings, name: str, format: str, night: date) -> str:
    """The path of a night's export. If the format is one file and the path ends with a placeholder, the format's
    extension is added. Raises `config.invalid` for an unknown format."""
    schedule = settings.schedules[name]
    extension = ".html"
    if format != REPORT:
        extension = ".jsonl" if find_format(format).one_file(schedule.splits) else ""
    datasets = f"{settings.home.absolute()}/datasets".replace("%", "%%")
    to = schedule.export_to or f"{datasets}/{slug(name)}/{{date}}/{{format}}"
    place = night.strftime(to.replace("{format}", format).replace("{date}", "%Y-%m-%d"))
    return place + (extension if _OPEN_END.search(to) else "")


def _options(format: str, schedule: Schedule) -> dict[str, Any]:
    """The options of an export. Raises `config.invalid` for those that cannot be used."""
    tables = {name: value for name, value in schedule.export_options.items() if isinstance(value, dict)}
    if unused := sorted({*tables} - {*schedule.exports} | {*tables} & {REPORT}):
        raise invalid(f"`export_options` has a table for {unused[0]!r:.40}.", "Name its format in `exports`.")
    given = {name: value for name, value in schedule.export_options.items() if name not in tables}
    given |= tables.get(format, {})
    if "splits" in given:
        raise invalid("`export_options` has splits.", "Give `splits` to the schedule.")
    if schedule.splits and format != REPORT and find_format(format).failure_line is None:
        given["splits"] = schedule.splits
    return parsed_options(given)


def check_exports(settings: Settings, names: Collection[str]) -> None:
    """Raises `config.invalid` for unknown exports of these schedules, and for paths that cannot be written, before a
    night's work."""
    for name in names:
        schedule = settings.schedules[name]
        spec, _ = _job(schedule)
        store_url = schedule.store_url or settings.effective_store_url
        for wanted in schedule.exports:
            try:
                place = place_of(settings, name, wanted, date.today())
                options = ExportOptions(**_options(wanted, schedule))
                if wanted != REPORT:
                    checked_format(find_format(wanted), place, store_url, spec, options)
                elif is_remote(place):
                    raise invalid("A report is one local file.", "")
            except ConfigError as error:
                raise ConfigError(
                    error.code,
                    f"The schedule {name!r} cannot export {wanted[:40]}: {error.message}",
                    f"{error.advice} Omit it, or change `export_to` or the store.".lstrip(),
                ) from error
