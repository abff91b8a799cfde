"""The commands about jobs: `nightjar status`, `watch`, `wait`, `list`, `show`, `items`, `errors`, `retry`, `pause`,
`resume`, `cancel`, `priority` and `delete`."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import click
import msgspec

from jobs.cli.options import (
    EnumChoice,
    code_option,
    common_options,
    job_argument,
    of_job,
    pairs,
    price_option,
    read_ledger,
    where_option,
)
from jobs.console import CANCELLED, FAILED, SHOWN_ENTRIES, TIMEOUT, FiniteRange, Output, flag, option
from jobs.formatting import bytes_text, counted, printable
from jobs.ledger.records import KEPT_REJECTED_LINES, ItemState, JobState, RejectedLine
from jobs.ledger.status import JobStatus, newest_jobs, status_and_errors, statuses_of
from jobs.own_files import embedded_broker_url
from jobs.progress import Progress
from jobs.recent_jobs import (
    FoundJob,
    homes_of,
    out_option,
    reading_ledger,
    remember_moved,
    settings_for_job,
    settings_of_places,
)
from jobs.settings import Settings, sqlite_path
from jobs.status import (
    NO_WORKER,
    error_view,
    item_view,
    job_view,
    labels_text,
    measured_text,
    optional_view,
    status_lines,
    status_view,
    utc,
    waits_for_workers,
)
from pipelines.errors import ErrorCode, NightjarError, NotFoundError, invalid

if TYPE_CHECKING:
    from jobs.shard_file import ShardLines
    from jobs.where import Where

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
    print_status(state, price, no_worker(settings))
    for code, count in errors.items():
        click.echo(f"  {count} x {code.value}")
    if errors:
        output.note(
            f"See them with: nightjar errors {state.job.id}{out_option(state.job.id, sqlite_path(settings.ledger_url))}"
        )


def print_status(status: JobStatus, price: float | None, waits: str = NO_WORKER) -> None:
    """Prints a job's status as text; `waits`: the message if no worker is live."""
    click.echo("\n".join(status_lines(status, price, waits, lambda text: click.style(text, bold=True))))


def no_worker(settings: Settings) -> str:
    """The message for a job without a live worker. A run has workers only for the jobs of its own ledger."""
    own_ledger = sqlite_path(settings.ledger_url) == settings.state_folder / "ledger.sqlite"
    return STARTING if own_ledger and embedded_broker_url(settings.state_folder) is not None else NO_WORKER


@click.command("list")
@click.option("--state", "states", multiple=True, type=EnumChoice(JobState), help="Only jobs in this state.")
@option(
    "--label",
    "KEY=VALUE",
    "Only jobs with this label. Can be given more than once; a job must have all of them.",
    name="labels",
    multiple=True,
)
@option("--limit", "N", "Maximum number of jobs.", default=50, type=click.IntRange(min=1))
@common_options
def list(  # noqa: A001 - the name of the command
    states: Sequence[JobState], labels: Sequence[str], limit: int, home: str | None, output: Output
) -> None:
    """List jobs, newest first. If neither --out nor a setting names a ledger, list the jobs of all folders
    that you have used.

    \b
    Examples:
      nightjar list --state running
      nightjar list --label corpus=evening --json
      nightjar list --out out
    """
    places = settings_of_places("", home)
    wanted = pairs(labels, "KEY=VALUE")
    found: dict[str, tuple[JobStatus, Settings]] = {}
    for settings in places:
        try:
            of_place = read_ledger(
                settings,
                lambda reader: statuses_of(reader, newest_jobs(reader, limit, states or None, wanted)),
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
    job = status.job
    items = status.items
    counts = (job.id, job.state, items.total, items.done, items.failed)
    about = (job.spec.model, utc(job.created_at), job.name, labels_text(job.labels))
    return (*counts, *about, str(settings.home))


POLL_SECONDS = 0.5


def until_end(
    read: Callable[[], JobStatus], progress: Progress, settings: Settings, timeout_seconds: float = math.inf
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
    if not state.final:
        return TIMEOUT
    return {JobState.COMPLETED: 0, JobState.CANCELLED: CANCELLED}.get(state, FAILED)


@click.command()
@option(
    "--timeout",
    "SECONDS",
    "Maximum seconds to wait. [default: no limit]",
    name="timeout_seconds",
    type=FiniteRange(min=0),
)
@of_job
def wait(found: FoundJob, output: Output, timeout_seconds: float | None) -> int:
    """Wait until JOB ends.

    Exit codes: 0 completed; 1 completed with errors, or failed; 6 cancelled; 7 timeout.

    \b
    Examples:
      nightjar wait JOB --timeout 3600
    """
    limit = math.inf if timeout_seconds is None else timeout_seconds
    with Progress(quiet=output.quiet) as progress:
        status = until_end(lambda: found.ledger.status(found.id), progress, found.settings, limit)
    if output.as_json:
        output.data(status_view(status, found.settings.price_per_gpu_hour))
    else:
        measured = f" {measured_text(status.measured)}." if status.measured.items else ""
        output.note(f"{found.id} is {status.job.state.value}.{measured}")
    return exit_code_of(status.job.state)


@click.command()
@of_job
def watch(found: FoundJob, output: Output) -> int:
    """Show the progress of JOB until it ends, then its status.

    With --json, print the status as one line at each change. Exit codes are those of `nightjar wait`.

    \b
    Examples:
      nightjar watch JOB
    """
    last = None
    price = found.settings.price_per_gpu_hour

    def read() -> JobStatus:
        nonlocal last
        status = found.ledger.status(found.id)
        counts = (status.job.state, status.items, status.workers)
        if output.as_json and counts != last:
            output.data(status_view(status, price))
            sys.stdout.flush()
        last = counts
        return status

    with Progress(quiet=output.quiet or output.as_json) as progress:
        status = until_end(read, progress, found.settings)
    if not output.as_json:
        print_status(status, price)
    return exit_code_of(status.job.state)


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
    from jobs.job_options import job_command
    from jobs.provenance import read_records
    from jobs.store import store_of

    settings = settings_for_job(job, home)
    state, _ = read_ledger(settings, lambda reader: status_and_errors(reader, job))
    found = state.job
    remember_moved(found.id, settings)
    try:
        made_with = read_records(store_of(found, settings.s3), found)
    except NightjarError as error:
        output.note(f"The versions that made the job cannot be read: {printable(str(error))}")
        made_with = None
    home = str(settings.home.absolute()) if settings.database_url is None else None
    command, notes = job_command(found, home, made_with or ())
    view = msgspec.to_builtins(job_view(found, made_with, command, notes))
    view |= optional_view(state)
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
    if found.spec.pool and len(found.spec.pool.weights) > SHOWN_ENTRIES:
        at = command.index("--voices") + 1
        shown["command"] = shlex.join([*command[:at], "VOICES", *command[at + 1 :]])
    output.record(shown)
    for note in notes:
        output.note(note)
    output.note("While this job exists, the command finds it again. --idempotency-key KEY makes a new job.")


limit_option = option("--limit", "N", "Maximum number of rows.", type=click.IntRange(min=1))


@click.command()
@click.option("--state", type=EnumChoice(ItemState), help="Only items in this state.")
@code_option("Only items with this error code.")
@where_option
@option("--after", "INDEX", "Start after this item index.", default=-1, show_default=False, type=int)
@limit_option
@of_job
def items(
    found: FoundJob,
    output: Output,
    state: ItemState | None,
    codes: Sequence[ErrorCode] | None,
    where: Where | None,
    after: int,
    limit: int | None,
) -> None:
    """List the items of JOB in input order, with their audio files.

    \b
    Examples:
      nightjar items JOB --state failed
      nightjar items JOB --where 'wer > 0.3 or seconds < 0.5'
      nightjar items JOB --json --limit 10
    """
    lines = _lines(found)
    if not output.as_json:
        click.echo(click.style("INDEX\tLINE\tSTATE\tSECONDS\tEXAMPLE\tKEY OR ERROR", bold=True))
    for item in found.ledger.items(found.id, state=state, codes=codes, after=after, limit=limit, where=where):
        line = lines.number_of(item)
        audio = item.artifact
        seconds = audio and f"{audio.duration_ms / 1000:.2f}"
        result = audio.key if audio else item.error_code
        cells = (item.index, line, item.state, seconds, item.id, result, item.decision)
        output.row(cells, item_view(found.id, item, line))
    _note_unknown(lines, output)


def _lines(found: FoundJob) -> ShardLines:
    # Imported late, because `errors --by code` needs no store.
    from jobs.shard_file import ShardLines
    from jobs.store import open_store

    return ShardLines(found.ledger, open_store(found.job.store_url, found.settings.s3), found.id)


def _note_unknown(lines: ShardLines, output: Output) -> None:
    if lines.failure is not None:
        output.note(f"The input lines of some items cannot be shown: {printable(str(lines.failure))}")


@click.command()
@click.option("--by", type=click.Choice(["code"]), help="Print the number of errors per code.")
@code_option("Only errors with this code.")
@limit_option
@of_job
def errors(
    found: FoundJob, output: Output, by: str | None, codes: Sequence[ErrorCode] | None, limit: int | None
) -> None:
    """List the refused input lines (the first 10,000) and the failed items of JOB.

    \b
    Examples:
      nightjar errors JOB
      nightjar errors JOB --by code
    """
    if by:
        for code, count in found.ledger.error_counts(found.id).items():
            if codes is None or code in codes:
                output.row((count, code), "nightjar.error_count/1", job=found.id, code=code, count=count)
        return
    lines = _lines(found)
    ledger = found.ledger
    refused = (line for line in ledger.rejected_lines(found.id) if codes is None or line.code in codes)
    shown = False
    for failed in islice(chain(refused, ledger.broken_items(found.id, codes)), limit):
        shown = True
        line = failed.line if isinstance(failed, RejectedLine) else lines.number_of(failed)
        view = error_view(found.id, failed, line)
        where = f"item {view['index']}" if line is None else f"line {line}"
        output.row((where, view["code"], view["id"], view["message"]), view)
    _note_unknown(lines, output)
    if found.job.rejected_lines > KEPT_REJECTED_LINES:
        output.note(
            f"{found.job.rejected_lines:,} lines were refused; only the first {KEPT_REJECTED_LINES:,} are kept."
        )
    if not shown:
        output.note("No errors.")


@click.command()
@code_option("Only items with this error code.")
@flag("--force", "Also retry items whose input line is wrong (input.*).")
@of_job
def retry(found: FoundJob, output: Output, codes: Sequence[ErrorCode] | None, force: bool) -> None:
    """Run the failed items of JOB again.

    Finished items are kept. Items whose input line is wrong (input.*) stay failed, unless --force is given.

    \b
    Examples:
      nightjar retry JOB
      nightjar retry JOB --code synth.no_eos
    """
    ledger = found.ledger
    count = ledger.retry(found.id, codes, force=force)
    # Reopened items are no longer among the failed ones.
    failed = ledger.failed_counts(found.id).items()
    left = {code: number for code, number in failed if code.permanent and (codes is None or code in codes)}
    output.result(
        f"Reopened {counted(count, 'item')} of {found.id}.",
        "nightjar.retry/1",
        job=found.id,
        state=ledger.job(found.id).state,
        reopened=count,
        left=left,
    )
    if left:
        reasons = ", ".join(f"{number} x {code.value}" for code, number in left.items())
        output.note(
            f"Not retried, because the input lines are wrong: {reasons}. Correct and submit the lines, or use --force."
        )
    if count and found.settings.database_url is None:
        output.note(
            f"To run them, repeat the job's `nightjar run` command, or start a worker for {found.settings.home}."
        )


@click.command()
@of_job
def pause(found: FoundJob, output: Output) -> None:
    """Pause JOB: workers get no more shards. Items that are being synthesized finish.

    \b
    Examples:
      nightjar pause JOB
    """
    found.ledger.pause(found.id)
    _print_state(output, found)


@click.command()
@of_job
def resume(found: FoundJob, output: Output) -> None:
    """Continue the paused JOB.

    \b
    Examples:
      nightjar resume JOB
    """
    found.ledger.resume(found.id)
    _print_state(output, found)


def _print_state(output: Output, found: FoundJob) -> JobState:
    """Prints the current state of the job, and returns it."""
    state = found.ledger.job(found.id).state
    output.result(f"{found.id} is {state.value}.", "nightjar.job_state/1", job=found.id, state=state)
    return state


@click.command()
@of_job
def cancel(found: FoundJob, output: Output) -> None:
    """Cancel JOB. Finished items are kept; the other items are skipped.

    \b
    Examples:
      nightjar cancel JOB
    """
    ledger = found.ledger
    ledger.cancel(found.id)
    if ledger.job(found.id).state is JobState.CANCELLING:
        ledger.reconcile()
    if _print_state(output, found).final:
        _finish(found, output)


def _finish(found: FoundJob, output: Output) -> None:
    """Writes the manifest, as the worker that ends a job does; if the store is unreachable, the job is cancelled
    anyway. Runs the operator's hook if the job is in a folder of `nightjar run`, where no worker is left to run it;
    other jobs are reported by workers."""
    from jobs.notification import say_ends

    try:
        found.renew_manifest()
    except NightjarError as error:
        output.note(
            f"The manifest was not written: {printable(str(error))} An export in the format `manifest` lists the same items."
        )
    if found.settings.database_url is None:
        say_ends(found.ledger, found.settings, output.note)


# Otherwise a negative level would be read as an option.
@click.command(context_settings={"ignore_unknown_options": True})
@of_job
@click.argument("level", type=click.IntRange(-100, 100))
def priority(found: FoundJob, output: Output, level: int) -> None:
    """Set the priority of JOB to LEVEL (-100 to 100). Jobs with a higher priority run first.

    The change also applies to waiting shards.

    \b
    Examples:
      nightjar priority JOB 5
    """
    found.ledger.set_priority(found.id, level)
    output.result(f"{found.id} has priority {level}.", "nightjar.priority/1", job=found.id, priority=level)


@click.command()
@flag("--dry-run", "Count what would be deleted, and delete nothing.")
@flag("--yes", "Do not ask for confirmation.", "-y")
@of_job
def delete(found: FoundJob, output: Output, dry_run: bool, yes: bool) -> int:
    """Delete JOB: its audio, inputs, packs, manifests and reference recordings in the store, and its rows
    in the ledger.

    The job must have ended; cancel a running job first. Exports and reports are kept, but not the files in
    the store that they refer to. Repeat the command to continue an interrupted deletion. The same input can
    be submitted again as a new job.

    \b
    Examples:
      nightjar delete JOB --dry-run
      nightjar delete JOB
      nightjar delete JOB --yes
    """
    from jobs.delete import delete_job, measure_job
    from jobs.ledger.control import check_deletable

    job = found.job
    store = found.store
    if not dry_run:
        check_deletable(job.id, job.state)
        if not yes and not _confirmed(found.ledger.status(job.id)):
            output.note("Nothing was deleted.")
            return FAILED

    gone = (measure_job if dry_run else delete_job)(found.ledger, store, job.id)
    objects = f"{counted(gone.objects, 'object')} of {bytes_text(gone.bytes)} in {printable(job.store_url)}"
    output.result(
        f"{'Would delete' if dry_run else 'Deleted'} {job.id}: {counted(gone.items, 'item')}, {objects}.",
        "nightjar.delete/1",
        job=job.id,
        deleted=not dry_run,
        items=gone.items,
        objects=gone.objects,
        bytes=gone.bytes,
    )
    if dry_run and not job.state.final:
        output.note(f"The job is {job.state.value}: cancel it first.")
    return 0


def _confirmed(status: JobStatus) -> bool:
    """Asks for confirmation. Raises `config.invalid` without a terminal."""
    job = status.job
    if not sys.stdin.isatty():
        raise invalid("A deletion must be confirmed on a terminal, and there is none.", "Give --yes.")
    named = f" ({printable(job.name)})" if job.name else ""
    size = f"{counted(status.items.total, 'item')}, {status.audio_ms / 3_600_000:.2f} h of audio, {bytes_text(status.bytes_out)}"
    return click.confirm(f"Delete job {job.id}{named} with {size}? This cannot be undone.", err=True)
