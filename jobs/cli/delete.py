"""`nightjar delete`: a job's rows and objects, after a question."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from jobs.cli.context import common_options, found_job, job_argument
from jobs.console import FAILED, Output
from jobs.formatting import bytes_text, counted, printable
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from jobs.ledger.status import JobStatus

#: Deleted objects between two notes.
_NOTE_OBJECTS = 100_000


@click.command()
@job_argument
@click.option("--dry-run", is_flag=True, help="Count what would be deleted, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@common_options
def delete(job: str, dry_run: bool, yes: bool, home: str | None, output: Output) -> int:
    """Delete JOB: its audio, inputs, packs, manifests and reference recordings in the store, and its rows in the ledger.

    The job must have ended; cancel it first if it has not. Exports and reports stay, but exports that name files in the store lose them.
    A deletion that is interrupted goes on when the command is given again. The same input can be submitted again as a new job.

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
        raise ConfigError(ErrorCode.CONFIG_INVALID, "A deletion is confirmed on a terminal, and there is none.", "Give --yes.")
    named = f" ({printable(job.name)})" if job.name else ""
    size = f"{counted(status.items.total, 'item')}, {status.audio_ms / 3_600_000:.2f} h of audio, {bytes_text(status.bytes_out)}"
    return click.confirm(f"Delete job {job.id}{named} with {size}? This cannot be undone.", err=True)
