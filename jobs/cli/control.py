"""`nightjar retry`, `pause`, `resume`, `cancel`, `priority` and `delete`: what a person decides about a
job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from jobs.cli.options import code_option, common_options, found_job, job_argument
from jobs.console import FAILED, Output
from jobs.formatting import bytes_text, counted, printable
from jobs.ledger.records import Job, JobState
from jobs.settings import Settings
from pipelines.errors import ConfigError, ErrorCode, NightjarError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.status import JobStatus

#: Deleted objects between two notes.
_NOTE_OBJECTS = 100_000


@click.command()
@job_argument
@code_option("Only items with this error code.")
@click.option("--force", is_flag=True, help="Also retry items whose input line is wrong (input.*).")
@common_options
def retry(job: str, codes: Sequence[str], force: bool, home: str | None, output: Output) -> None:
    """Run the failed items of JOB again.

    Finished items are kept. Items whose input line is wrong (input.*) stay failed, unless --force is given.

    \b
    Examples:
      nightjar retry JOB
      nightjar retry JOB --code synth.no_eos
    """
    wanted = [ErrorCode(code) for code in codes] or None
    with found_job(job, home) as (settings, ledger, found):
        count = ledger.retry(found.id, wanted, force=force)
        # What was opened is no longer among the failed items.
        failed = ledger.failed_counts(found.id)
        left = {
            code: number
            for code, number in failed.items()
            if code.hopeless and (wanted is None or code in wanted)
        }
        found = ledger.job(found.id)
    if output.as_json:
        view = {"schema": "nightjar.retry/1", "job": found.id, "state": found.state.value, "reopened": count}
        output.data({**view, "left": {code.value: number for code, number in left.items()}})
        return
    output.line(f"Opened {counted(count, 'item')} of {found.id} again.")
    if left:
        reasons = ", ".join(f"{number} x {code.value}" for code, number in left.items())
        output.note(
            f"Not retried, because their input lines are wrong: {reasons}. Correct and submit the lines, or use --force."
        )
    if count and settings.database_url is None:
        output.note(
            f"To run them, give the job's `nightjar run` command again, or start a worker for {settings.home}."
        )


@click.command()
@job_argument
@common_options
def pause(job: str, home: str | None, output: Output) -> None:
    """Pause JOB: no more shards are given to workers. Items in the engine finish.

    \b
    Examples:
      nightjar pause JOB
    """
    _change(job, home, output, lambda ledger, job_id: ledger.pause(job_id))


@click.command()
@job_argument
@common_options
def resume(job: str, home: str | None, output: Output) -> None:
    """Continue the paused JOB.

    \b
    Examples:
      nightjar resume JOB
    """
    _change(job, home, output, lambda ledger, job_id: ledger.resume(job_id))


@click.command()
@job_argument
@common_options
def cancel(job: str, home: str | None, output: Output) -> None:
    """Cancel JOB. Finished items are kept; the other items are skipped.

    \b
    Examples:
      nightjar cancel JOB
    """
    with found_job(job, home) as (settings, ledger, found):
        ledger.cancel(found.id)
        if ledger.job(found.id).state is JobState.CANCELLING:
            ledger.reconcile()
        ended = ledger.job(found.id)
        _print_state(output, ended)
        if ended.state.final:
            _put_manifest(settings, ledger, ended, output)
            _report_end(settings, ledger, output)


def _put_manifest(settings: Settings, ledger: Ledger, job: Job, output: Output) -> None:
    """Lists what the job has, as a worker does that ends one. The job is cancelled also where its store is
    away."""
    from jobs.export.manifest import put_manifest
    from jobs.store import store_of

    try:
        if ledger.status(job.id).items.done:
            put_manifest(ledger, store_of(job, settings.s3), job.id)
    except NightjarError as error:
        output.note(f"Its manifest was not written: {printable(str(error))} An export writes the same lines.")


def _report_end(settings: Settings, ledger: Ledger, output: Output) -> None:
    """Tells the operator's hook in a folder of `nightjar run`, which has no worker left to do it. Workers
    of a fleet do it themselves."""
    if settings.database_url is not None:
        return
    from jobs.notification import report_ends

    for one in report_ends(ledger, settings):
        if one.reason:
            output.note(
                f"The end of job {one.job_id} was not reported: {printable(one.reason)}. The next run in the folder tries again."
            )


# A level below zero is no option.
@click.command(context_settings={"ignore_unknown_options": True})
@job_argument
@click.argument("level", type=click.IntRange(-100, 100))
@common_options
def priority(job: str, level: int, home: str | None, output: Output) -> None:
    """Set the priority of JOB to LEVEL (-100 to 100). Jobs with a higher priority run first.

    The change also applies to shards that already wait.

    \b
    Examples:
      nightjar priority JOB 5
    """
    with found_job(job, home) as (_, ledger, found):
        ledger.set_priority(found.id, level)
    output.say(
        {"schema": "nightjar.priority/1", "job": found.id, "priority": level},
        f"{found.id} has priority {level}.",
    )


def _change(prefix: str, home: str | None, output: Output, change: Callable[[Ledger, str], object]) -> None:
    with found_job(prefix, home) as (_, ledger, found):
        change(ledger, found.id)
        _print_state(output, ledger.job(found.id))


def _print_state(output: Output, job: Job) -> None:
    output.say(
        {"schema": "nightjar.job_state/1", "job": job.id, "state": job.state.value},
        f"{job.id} is {job.state.value}.",
    )


@click.command()
@job_argument
@click.option("--dry-run", is_flag=True, help="Count what would be deleted, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@common_options
def delete(job: str, dry_run: bool, yes: bool, home: str | None, output: Output) -> int:
    """Delete JOB: its audio, inputs, packs, manifests and reference recordings in the store, and its rows
    in the ledger.

    The job must have ended; cancel it first if it has not. Exports and reports stay, but exports that name
    files in the store lose them. A deletion that is interrupted goes on when the command is given again.
    The same input can be submitted again as a new job.

    \b
    Examples:
      nightjar delete JOB --dry-run
      nightjar delete JOB
      nightjar delete JOB --yes
    """
    from jobs.delete import delete_job, measure_job
    from jobs.ledger.control import check_deletable
    from jobs.store import store_of

    with found_job(job, home) as (settings, ledger, found):
        store = store_of(found, settings.s3)
        if not dry_run:
            check_deletable(found.id, found.state)
            if not yes and not _confirmed(ledger.status(found.id)):
                output.note("Nothing was deleted.")
                return FAILED
        noted = 0

        def note(objects: int) -> None:
            nonlocal noted
            if objects // _NOTE_OBJECTS > noted:
                noted = objects // _NOTE_OBJECTS
                output.note(f"Deleted {objects} objects.")

        gone = measure_job(ledger, store, found.id) if dry_run else delete_job(ledger, store, found.id, note)
    if output.as_json:
        view = {"schema": "nightjar.delete/1", "job": gone.job_id, "deleted": not dry_run}
        output.data({**view, "items": gone.items, "objects": gone.objects, "bytes": gone.bytes})
        return 0
    what = f"{counted(gone.items, 'item')}, {counted(gone.objects, 'object')} of {bytes_text(gone.bytes)} in {printable(found.store_url)}"
    output.line(f"{'Would delete' if dry_run else 'Deleted'} {gone.job_id}: {what}.")
    if dry_run and not found.state.final:
        output.note(f"The job is {found.state.value}: cancel it before it is deleted.")
    return 0


def _confirmed(status: JobStatus) -> bool:
    """Asks on a terminal. Raises `config.invalid` where there is none."""
    job = status.job
    if not sys.stdin.isatty():
        raise ConfigError(
            ErrorCode.CONFIG_INVALID,
            "A deletion is confirmed on a terminal, and there is none.",
            "Give --yes.",
        )
    named = f" ({printable(job.name)})" if job.name else ""
    size = f"{counted(status.items.total, 'item')}, {status.audio_ms / 3_600_000:.2f} h of audio, {bytes_text(status.bytes_out)}"
    return click.confirm(f"Delete job {job.id}{named} with {size}? This cannot be undone.", err=True)
