"""`nightjar show`: what a job is made with, as it was frozen at submit, and what made it."""

from __future__ import annotations

import shlex

import click
import msgspec

from jobs.cli.options import common_options, job_argument, read_ledger
from jobs.console import Output
from jobs.formatting import printable
from jobs.job_command import engines_of, job_command, unsaid
from jobs.ledger.status import find_job
from jobs.recent_jobs import keep_remembered, settings_for_job
from jobs.status import job_view
from pipelines.errors import NightjarError


@click.command()
@job_argument
@common_options
def show(job: str, home: str | None, output: Output) -> None:
    """Show what JOB is made with: its frozen spec, its input, its store, the versions that made it, and
    the command that makes it again.

    \b
    Examples:
      nightjar show JOB
      nightjar show JOB --json
    """
    from jobs.provenance import records
    from jobs.store import store_of

    settings = settings_for_job(job, home)
    found = read_ledger(settings, lambda reader: find_job(reader, job))
    keep_remembered(found.id, settings)
    try:
        made_with = records(store_of(found, settings.s3), found)
    except NightjarError as error:
        output.note(f"What made the job cannot be read: {printable(str(error))}")
        made_with = None
    home = str(settings.home.absolute()) if settings.database_url is None else None
    engines = engines_of(found, made_with or ())
    command, notes = job_command(found, home, engines), unsaid(found, home, engines)
    view = msgspec.to_builtins(job_view(found, made_with, command, notes))
    if output.as_json:
        output.data(view)
        return
    told = {*view, "input_uri", "input_sha256", "seeds"}
    made_by = [
        {name: part for name, part in record.items() if name not in told}
        for record in view["made_with"] or ()
    ]
    shown = {**view, "made_with": made_by, "command": shlex.join(command), "command_notes": None}
    output.record(shown)
    for note in notes:
        output.note(note)
    output.note("While this job exists the command finds it. Add --idempotency-key KEY to make another one.")
