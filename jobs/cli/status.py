"""`nightjar status`, `list`, `wait`, `watch` and `show`."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from jobs.cli.options import common_options, job_argument, of_job, pairs, price_option, read_ledger
from jobs.console import CANCELLED, FAILED, TIMEOUT, FiniteRange, Output
from jobs.formatting import printable
from jobs.ledger.records import Job, JobState
from jobs.ledger.status import JobStatus, find_job, newest_jobs, status_and_errors, statuses_of
from jobs.own_files import embedded_broker_url
from jobs.progress import Progress
from jobs.recent_jobs import (
    homes_of,
    out_option,
    reading_ledger,
    remember_moved,
    settings_for_job,
    settings_of_places,
)
from jobs.settings import Settings, sqlite_path
from jobs.status import NO_WORKER, job_view, labels_text, status_lines, status_view, utc, waits_for_workers
from pipelines.errors import NightjarError, NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

STARTING = "the worker of this folder's `nightjar run` or `nightjar dev` is starting"


@click.command()
@job_argument
@price_option
@common_options
def status(job: str, price: float | None, home: str | None, output: Output) -> None:
    """Show the progress, speed and cost of JOB (an id, or the first characters of one).

    \b
    Examples:
      nightjar status JOB
      nightjar status JOB --price 2.80 --json
    """
    settings = settings_for_job(job, home)
    price = settings.price_per_gpu_hour if price is None else price
    state, errors = read_ledger(settings, lambda reader: status_and_errors(reader, job))
    remember_moved(state.job.id, settings)
    if output.as_json:
        output.data(status_view(state, price, errors))
        return
    print_status(output, state, price, no_worker(settings))
    for code, count in errors.items():
        output.line(f"  {count} x {code.value}")
    if errors:
        output.note(
            f"See them with: nightjar errors {state.job.id}{out_option(state.job.id, sqlite_path(settings.ledger_url))}"
        )


def print_status(output: Output, status: JobStatus, price: float | None, waits: str = NO_WORKER) -> None:
    """Prints a job's status as text; `waits`: the message if no worker is live."""
    for line in status_lines(status, price, waits, lambda text: click.style(text, bold=True)):
        output.line(line)


def no_worker(settings: Settings) -> str:
    """The message for a job without a live worker. A run has workers only for the jobs of its own ledger."""
    own_ledger = sqlite_path(settings.ledger_url) == settings.state_folder / "ledger.sqlite"
    return STARTING if own_ledger and embedded_broker_url(settings.state_folder) is not None else NO_WORKER


@click.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in JobState]),
    help="Only jobs in this state.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only jobs with this label. Can be given more than once; a job must have all of them.",
)
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of jobs.",
)
@common_options
def list(  # noqa: A001 - the name of the command
    states: Sequence[str], labels: Sequence[str], limit: int, home: str | None, output: Output
) -> None:
    """List jobs, newest first. If neither --out nor a setting names a ledger, list the jobs of all folders
    that you have used.

    \b
    Examples:
      nightjar list --state running
      nightjar list --label corpus=evening --json
      nightjar list --out out
    """
    places, wanted = settings_of_places("", home), pairs(labels, "KEY=VALUE")
    in_states = [JobState(state) for state in states] or None
    found: dict[str, tuple[JobStatus, Settings]] = {}
    for settings in places:
        try:
            of_place = read_ledger(
                settings, lambda reader: statuses_of(reader, newest_jobs(reader, limit, in_states, wanted))
            )
        except NotFoundError as error:
            output.note(f"No jobs: {error}")
            return
        except NightjarError as error:
            if len(places) == 1:
                raise
            output.note(f"The jobs of {settings.home} cannot be listed: {error}")
            continue
        for state in of_place:
            # A copied folder has the same jobs; the original takes precedence.
            if state.job.id not in found or settings.home in homes_of(state.job.id):
                found[state.job.id] = (state, settings)
    newest = sorted(found.values(), key=lambda pair: (pair[0].job.created_at, pair[0].job.id), reverse=True)
    header = ("JOB", "STATE", "ITEMS", "DONE", "FAILED", "MODEL", "CREATED", "NAME", "LABELS")
    output.records(
        (*header, "FOLDER") if len(places) > 1 else header,
        ((status_view(s, one.price_per_gpu_hour), _row(s, one)) for s, one in newest[:limit]),
        "No jobs.",
    )


def _row(status: JobStatus, settings: Settings) -> tuple[object, ...]:
    job, items = status.job, status.items
    counts = (job.id, job.state.value, items.total, items.done, items.failed)
    about = (job.spec.model, utc(job.created_at), job.name, labels_text(job.labels))
    return (*counts, *about, str(settings.home))


POLL_SECONDS = 0.5

EXIT_BY_STATE = {JobState.COMPLETED: 0, JobState.CANCELLED: CANCELLED}


def until_end(
    read: Callable[[], JobStatus],
    progress: Progress,
    settings: Settings,
    timeout_seconds: float = math.inf,
) -> JobStatus:
    """Reads a job's status until it is final or the time is over, and returns it. Reports when no live worker
    takes the job."""
    deadline = time.monotonic() + timeout_seconds
    last = ""
    while True:
        status = read()
        progress.update(status)
        waits = no_worker(settings) if waits_for_workers(status) else ""
        if waits and waits != last:
            progress.say(waits[0].upper() + waits[1:] + ".")
        last = waits
        if status.job.state.final or time.monotonic() >= deadline:
            return status
        time.sleep(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))


def exit_code_of(state: JobState) -> int:
    """The exit code of `nightjar wait`: 0 completed, 1 completed with errors or failed, 6 cancelled, 7 not
    ended."""
    return EXIT_BY_STATE.get(state, FAILED) if state.final else TIMEOUT


@click.command()
@click.option(
    "--timeout",
    "timeout_seconds",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Maximum seconds to wait. [default: no limit]",
)
@of_job
def wait(settings: Settings, ledger: Ledger, job: Job, output: Output, timeout_seconds: float | None) -> int:
    """Wait until JOB ends.

    Exit codes: 0 completed; 1 completed with errors, or failed; 6 cancelled; 7 timeout.

    \b
    Examples:
      nightjar wait JOB --timeout 3600
    """
    limit = math.inf if timeout_seconds is None else timeout_seconds
    with Progress(quiet=output.quiet) as progress:
        status = until_end(lambda: ledger.status(job.id), progress, settings, limit)
    if output.as_json:
        output.data(status_view(status, settings.price_per_gpu_hour))
    else:
        output.note(f"{job.id} is {status.job.state.value}.")
    return exit_code_of(status.job.state)


@click.command()
@of_job
def watch(settings: Settings, ledger: Ledger, job: Job, output: Output) -> int:
    """Show the progress of JOB until it ends, then its status.

    With --json, print the status as one line at each change. Exit codes are those of `nightjar wait`.

    \b
    Examples:
      nightjar watch JOB
    """
    last = None

    def read() -> JobStatus:
        nonlocal last
        status = ledger.status(job.id)
        counts = (status.job.state, status.items, status.workers)
        if output.as_json and counts != last:
            output.data(status_view(status, settings.price_per_gpu_hour))
            sys.stdout.flush()
        last = counts
        return status

    with Progress(quiet=output.quiet or output.as_json) as progress:
        status = until_end(read, progress, settings)
    if not output.as_json:
        print_status(output, status, settings.price_per_gpu_hour)
    return exit_code_of(status.job.state)


#: A pool with more voices is counted by `nightjar show`.
_SHOWN_VOICES = 20


@click.command()
@job_argument
@common_options
def show(job: str, home: str | None, output: Output) -> None:
    """Show the frozen spec of JOB, its input and store, the versions of the software that made it, and the
    command that would make it again.

    \b
    Examples:
      nightjar show JOB
      nightjar show JOB --json
    """
    from jobs.job_command import engines_of, job_command, omitted_options
    from jobs.provenance import read_records
    from jobs.store import store_of

    settings = settings_for_job(job, home)
    found = read_ledger(settings, lambda reader: find_job(reader, job))
    remember_moved(found.id, settings)
    try:
        made_with = read_records(store_of(found, settings.s3), found)
    except NightjarError as error:
        output.note(f"The versions that made the job cannot be read: {printable(str(error))}")
        made_with = None
    home = str(settings.home.absolute()) if settings.database_url is None else None
    engines = engines_of(found, made_with or ())
    command, notes = job_command(found, home, engines), omitted_options(found, home, engines)
    view = msgspec.to_builtins(job_view(found, made_with, command, notes))
    if found.spec.pool:
        from jobs.export.items import minutes_by_voice

        try:
            with reading_ledger(settings) as ledger:
                view["minutes_by_voice"] = minutes_by_voice(ledger, store_of(found, settings.s3), found)
        except NightjarError as error:
            output.note(f"The minutes of each voice cannot be read: {printable(str(error))}")
            view["minutes_by_voice"] = None
    if output.as_json:
        output.data(view)
        return
    hidden = {*view, "input_uri", "input_sha256", "seeds"}
    made_by = [
        {name: part for name, part in record.items() if name not in hidden}
        for record in view["made_with"] or ()
    ]
    shown = {**view, "made_with": made_by, "command": shlex.join(command), "command_notes": None}
    if found.spec.pool and len(found.spec.pool.weights) > _SHOWN_VOICES:
        voices, recordings = len(found.spec.pool.weights), len(found.spec.stored_voices or ())
        spec = {**view["spec"], "stored_voices": f"{recordings:,} recordings, see --json"}
        spec["pool"] = {**spec["pool"], "weights": f"{voices:,} voices, see --json"}
        at = command.index("--voices") + 1
        shown |= {"spec": spec, "command": shlex.join([*command[:at], "VOICES", *command[at + 1 :]])}
    if found.spec.lexicon:
        words = f"{len(found.spec.lexicon):,} words, see --json"
        shown |= {"spec": {**shown["spec"], "lexicon": words}}
    output.record(shown)
    for note in notes:
        output.note(note)
    output.note(
        "While this job exists, the command only finds it again. Add --idempotency-key KEY to make a new job."
    )
