"""`nightjar retry`, `pause`, `resume`, `cancel`, `priority` and `delete`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from jobs.cli.options import code_option, of_job
from jobs.console import FAILED, Output
from jobs.formatting import bytes_text, counted, printable
from jobs.ledger.records import Job, JobState
from jobs.settings import Settings
from pipelines.errors import ErrorCode, NightjarError, invalid

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.status import JobStatus


@click.command()
@code_option("Only items with this error code.")
@click.option("--force", is_flag=True, help="Also retry items whose input line is wrong (input.*).")
@of_job
def retry(
    settings: Settings, ledger: Ledger, job: Job, output: Output, codes: list[ErrorCode] | None, force: bool
) -> None:
    """Run the failed items of JOB again.

    Finished items are kept. Items whose input line is wrong (input.*) stay failed, unless --force is given.

    \b
    Examples:
      nightjar retry JOB
      nightjar retry JOB --code synth.no_eos
    """
    count = ledger.retry(job.id, codes, force=force)
    # Reopened items are no longer among the failed ones.
    failed = ledger.failed_counts(job.id).items()
    left = {code: number for code, number in failed if code.permanent and (codes is None or code in codes)}
    text, state = f"Reopened {counted(count, 'item')} of {job.id}.", ledger.job(job.id).state
    output.result(text, "nightjar.retry/1", job=job.id, state=state, reopened=count, left=left)
    if left:
        reasons = ", ".join(f"{number} x {code.value}" for code, number in left.items())
        output.note(
            f"Not retried, because the input lines are wrong: {reasons}. Correct and submit the lines, or use --force."
        )
    if count and settings.database_url is None:
        output.note(
            f"To run them, repeat the job's `nightjar run` command, or start a worker for {settings.home}."
        )


@click.command()
@of_job
def pause(_: Settings, ledger: Ledger, job: Job, output: Output) -> None:
    """Pause JOB: workers get no more shards. Items that are being synthesized finish.

    \b
    Examples:
      nightjar pause JOB
    """
    ledger.pause(job.id)
    _print_state(output, ledger, job)


@click.command()
@of_job
def resume(_: Settings, ledger: Ledger, job: Job, output: Output) -> None:
    """Continue the paused JOB.

    \b
    Examples:
      nightjar resume JOB
    """
    ledger.resume(job.id)
    _print_state(output, ledger, job)


def _print_state(output: Output, ledger: Ledger, job: Job) -> Job:
    """Prints the state of the job, and returns the job."""
    now = ledger.job(job.id)
    text = f"{now.id} is {now.state.value}."
    output.result(text, "nightjar.job_state/1", job=now.id, state=now.state.value)
    return now


@click.command()
@of_job
def cancel(settings: Settings, ledger: Ledger, job: Job, output: Output) -> None:
    """Cancel JOB. Finished items are kept; the other items are skipped.

    \b
    Examples:
      nightjar cancel JOB
    """
    ledger.cancel(job.id)
    if ledger.job(job.id).state is JobState.CANCELLING:
        ledger.reconcile()
    ended = _print_state(output, ledger, job)
    if ended.state.final:
        _put_manifest(settings, ledger, ended, output)
        _report_end(settings, ledger, output)


def _put_manifest(settings: Settings, ledger: Ledger, job: Job, output: Output) -> None:
    """Writes the manifest, as the worker that ends a job does. If the store is unreachable, the job is
    cancelled anyway."""
    from jobs.export.manifest import put_manifest
    from jobs.store import store_of

    try:
        if ledger.status(job.id).items.done:
            put_manifest(ledger, store_of(job, settings.s3), job.id)
    except NightjarError as error:
        output.note(
            f"The manifest was not written: {printable(str(error))} An export in the format `manifest` lists the same items."
        )


def _report_end(settings: Settings, ledger: Ledger, output: Output) -> None:
    """Runs the operator's hook if the job is in a folder of `nightjar run`, where no worker is left to run
    it. Other jobs are reported by workers."""
    if settings.database_url is not None:
        return
    from jobs.notification import report_ends

    for one in report_ends(ledger, settings):
        if one.reason:
            output.note(
                f"The end of job {one.job_id} was not reported: {printable(one.reason)}. The next run in the folder tries again."
            )


# Otherwise a negative level would be read as an option.
@click.command(context_settings={"ignore_unknown_options": True})
@of_job
@click.argument("level", type=click.IntRange(-100, 100))
def priority(_: Settings, ledger: Ledger, job: Job, output: Output, level: int) -> None:
    """Set the priority of JOB to LEVEL (-100 to 100). Jobs with a higher priority run first.

    The change also applies to waiting shards.

    \b
    Examples:
      nightjar priority JOB 5
    """
    ledger.set_priority(job.id, level)
    output.result(f"{job.id} has priority {level}.", "nightjar.priority/1", job=job.id, priority=level)


@click.command()
@click.option("--dry-run", is_flag=True, help="Count what would be deleted, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@of_job
def delete(settings: Settings, ledger: Ledger, job: Job, output: Output, dry_run: bool, yes: bool) -> int:
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
    from jobs.store import store_of

    store = store_of(job, settings.s3)
    if not dry_run:
        check_deletable(job.id, job.state)
        if not yes and not _confirmed(ledger.status(job.id)):
            output.note("Nothing was deleted.")
            return FAILED

    gone = (measure_job if dry_run else delete_job)(ledger, store, job.id)
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
