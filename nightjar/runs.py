"""Jobs from Python: `run` runs a job on this machine, `submit` submits one to running workers, `find_job` and
`find_jobs` find earlier ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec

from jobs.checks import missing_meters
from jobs.console import Output
from jobs.embedded import embedded_settings
from jobs.gpus import choose_gpus
from jobs.ingest import check_has_work, submit_for_workers
from jobs.job_options import JobOptions, SubmitOptions, checked_options, job_of, user_name
from jobs.ledger.records import Reading
from jobs.local_run import run_locally
from jobs.recent_jobs import JobChoice, chosen_jobs, settings_for_new_job
from jobs.settings import Settings, load_settings
from jobs.source import check_source
from jobs.spec import ResolvedSpec, resolve_for
from jobs.store import is_remote
from nightjar.inputs import written_input
from nightjar.job import Job
from nightjar.local_thread import LocalThread
from nightjar.voice import PATH, check_type
from pipelines.errors import ErrorCode, InputError


def run(
    source: str | Path | Iterable[Any],
    *,
    out: str | Path = "out",
    gpu: str | int | None = None,
    quiet: bool = False,
    **options: Unpack[JobOptions],
) -> Job:
    """Runs a job of an input on this machine, in the folder `out`, without other services.

    `source` is a file as for `nightjar run`, or an iterable of records: texts, dialogues or rows (mappings), the
    rows of a `datasets.Dataset`, or supervisions or cuts of Lhotse. Returns after the input was read; the job
    runs in the background, and the program waits for the job before it ends. The same call resumes an
    interrupted job. `gpu`: the GPUs, such as `0,1` or `all`; each gets one worker.

    Raises `NightjarError` with the same code, message and advice as the command line.
    """
    if gpu is not None:
        check_type("gpu", gpu, (str, int), 'an index, "0,1" or "all"')
    settings = embedded_settings(load_settings(home=_home(out)))
    say = Output(quiet=quiet).note
    path, resolved, submitted, settings = _read(source, options, settings, say)
    if (error := missing_meters(resolved.spec.quality, say)) is not None:
        raise error
    devices = None if gpu is None else choose_gpus(str(gpu))
    thread = LocalThread(partial(run_locally, settings, path, resolved, submitted, devices), quiet=quiet)
    return Job(thread.until_submitted().id, settings, thread, quiet=quiet)


def submit(
    source: str | Path | Iterable[Any],
    *,
    out: str | Path | None = None,
    quiet: bool = False,
    **options: Unpack[JobOptions],
) -> Job:
    """Submits a job to running workers, as `nightjar submit` does, with the ledger, the broker and the store of
    the settings.

    The same input with the same options gives the same job. Raises `NightjarError`.
    """
    settings = settings_for_new_job(_home(out))
    path, resolved, submitted, settings = _read(source, options, settings, Output(quiet=quiet).note)
    job = submit_for_workers(settings, path, resolved, submitted).job
    check_has_work(job)
    return Job(job.id, settings, quiet=quiet)


def find_job(job: str, *, out: str | Path | None = None) -> Job:
    """The job whose id is or begins with `job`. `out`: the output folder of a local job, needed only if the job
    is not in the user's list of recent jobs.

    Raises `NotFoundError`.
    """
    check_type("job", job, str, "the id of a job, or the beginning of one")
    with chosen_jobs([job], _home(out)) as (found,):
        return Job(found.id, found.settings)


def find_jobs(
    *,
    name: str | None = None,
    schedule: str | None = None,
    since: str | date | None = None,
    until: str | date | None = None,
    out: str | Path | None = None,
) -> list[Job]:
    """The jobs with a name (or a pattern such as `books-*`), of a schedule, and of the days from `since` to
    `until`: of their night, or of their submission in UTC. The oldest first, without failed and cancelled ones.

    `out`: the output folder of local jobs, needed only if they are not in the user's list of recent jobs.
    Raises `NotFoundError` if there is none.
    """
    days = (None if day is None else str(day) for day in (since, until))
    with chosen_jobs((), _home(out), JobChoice(name, schedule, *days)) as found:
        return [Job(one.id, one.settings) for one in found]


def _home(out: str | Path | None) -> str | None:
    check_type("out", out, (*PATH, type(None)), "a folder")
    return None if out is None else str(out)


def _read(
    source: str | Path | Iterable[Any], options: JobOptions, settings: Settings, say: Callable[[str], None]
) -> tuple[str, ResolvedSpec, SubmitOptions, Settings]:
    """Checks an input. Returns its file, and the spec, the options and the settings of its job."""
    spec, submitted = job_of(checked_options(options), user_name())
    if isinstance(source, str | Path):
        place = str(source)
        if place != "-" and not is_remote(place) and not os.path.lexists(place):
            raise InputError(
                ErrorCode.INPUT_UNREADABLE,
                f"There is no file {place[:300]!r}.",
                f"Check the path. To speak a text, put it into a list: nightjar.run([{place[:40]!r}]). For a dataset of Hugging Face, give what `datasets.load_dataset` returns.",
            )
        path = check_source(place)
    else:
        path = str(written_input(source, spec, settings.state_folder, say))
        reading = msgspec.structs.replace(spec.reading or Reading(), columns=None, voices=None)
        # `written_input` has already written the voice of each speaker into the lines.
        pool = msgspec.structs.replace(spec.pool, by_speaker=False) if spec.pool else spec.pool
        spec = msgspec.structs.replace(spec, reading=reading, pool=pool)
        settings = settings.model_copy(update={"audio_roots": (*settings.audio_roots, Path.cwd())})
    return path, resolve_for(settings, spec, submitted), submitted, settings
