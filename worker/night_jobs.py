"""The jobs of a schedule's night: one, and another where the one before failed or was cancelled and the night is run again."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import msgspec

from jobs.ledger.records import INPUT_FORMAT, Job, JobSpec, JobState
from jobs.quality import quality_of
from pipelines.errors import ErrorCode, InputError, NightjarError, ServiceError
from pipelines.request import Generation, SpokenRole

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Schedule, Settings
    from jobs.store.base import ObjectStore

#: A night whose job ended so has not run.
ENDED_BADLY = frozenset({JobState.FAILED, JobState.CANCELLED})


def input_of(schedule: Schedule, night: date) -> str:
    """The schedule's input with the night filled in: `{date}` is the ISO date, strftime codes work too."""
    return night.strftime(schedule.input.replace("{date}", "%Y-%m-%d"))


def night_jobs(ledger: Ledger, name: str, night: date) -> list[Job]:
    """The jobs that a night had, the newest last. All but the last failed or were cancelled."""
    found: list[Job] = []
    while (job := ledger.job_of_key(_key(name, night, len(found)))) is not None:
        found.append(job)
    return found


def submit_night(settings: Settings, ledger: Ledger, name: str, night: date, earlier: int) -> Job:
    """Submits a night that had `earlier` jobs, or goes on with its submit, or finds its job. Raises `NightjarError`."""
    from jobs.ingest import SubmitOptions, submit

    schedule = settings.schedules[name]
    options = SubmitOptions(
        name=f"{name} {night.isoformat()}",
        priority=schedule.priority,
        weight=schedule.weight,
        labels={"schedule": name, "night": night.isoformat()},
        on_error=schedule.on_error,
        input_format=schedule.input_format,
        idempotency_key=_key(name, night, earlier),
    )
    return submit(settings, ledger, _store(settings, schedule), input_of(schedule, night), _spec(schedule), options=options).job


def is_mended(settings: Settings, job: Job, name: str, night: date) -> bool:
    """Whether a night whose job ended badly can be another job now: its file or what is made of it has changed, or lines of the
    same file that were refused would be taken, since audio that they name is there now. A job that a person cancelled comes
    back for a change only. Raises `NightjarError`.
    """
    from jobs.ingest import dry_run
    from jobs.source import open_source
    from jobs.spec import frozen_spec, of_before, spec_sha
    from pipelines.registry import describe

    schedule = settings.schedules[name]
    spec, store, source = _spec(schedule), _store(settings, schedule), input_of(schedule, night)
    with open_source(source, settings.s3) as opened:
        input_sha256 = opened.sha256
    frozen = frozen_spec(spec, describe(spec.model))
    if schedule.speak is None and job.spec.speak is msgspec.UNSET:
        frozen = of_before(frozen)
    now = (input_sha256, spec_sha(frozen), store.url, schedule.input_format)
    if now != (job.input_sha256, job.spec_sha, job.store_url, job.labels.get(INPUT_FORMAT, "dialogues")):
        return True
    return job.state is JobState.FAILED and dry_run(settings, store, source, spec, schedule.input_format).items > 0


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


def _key(name: str, night: date, earlier: int) -> str:
    """The idempotency key of a night's job after `earlier` others: two processes that run the same night make one job."""
    first = f"nightly/{name}/{night.isoformat()}"
    return f"{first}/{earlier + 1}" if earlier else first


def _spec(schedule: Schedule) -> JobSpec:
    roles: dict[SpokenRole, Generation] = {role: Generation(voice=voice) for role, voice in schedule.voice_of.items()}
    return JobSpec(
        model=schedule.model,
        generation=Generation(voice=schedule.voice, language=schedule.language, instruct=schedule.instruct, roles=roles or None),
        seed=schedule.seed,
        format=schedule.format,
        quality=quality_of(schedule.qa, schedule.qa_config),
        speak=msgspec.UNSET if schedule.speak is None else schedule.speak,
    )


def _store(settings: Settings, schedule: Schedule) -> ObjectStore:
    from jobs.store import open_store

    return open_store(schedule.store_url or settings.effective_store_url, settings.s3)
