"""`nightjar submit`: a file of dialogues becomes a job. Everything that could refuse is asked before
anything is written."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from jobs.cli.options import JobCommand, common_options, files, job_options
from jobs.console import FAILED, Output
from jobs.formatting import counted
from jobs.job_options import SubmitOptions
from jobs.ledger.records import JobSpec
from jobs.progress import Progress
from jobs.recent_jobs import settings_for_new_job
from jobs.settings import Settings
from jobs.source import no_records
from pipelines.errors import ErrorCode, InputError

#: Refused lines that a dry run shows.
SHOWN_LINES = 10


@click.command(cls=JobCommand)
@click.argument("source", metavar="INPUT", shell_complete=files)
@job_options
@common_options
def submit(
    source: str, spec: JobSpec, options: SubmitOptions, dry_run: bool, home: str | None, output: Output
) -> int:
    """Submit INPUT as a job and print the job's id.

    INPUT is a path, `-` for standard input, or s3://BUCKET/KEY, also .gz or .zst: dialogues (JSONL), chat
    messages, an OpenAI batch, text, CSV, TSV, Kaldi or Parquet. The same file with the same options is the
    same job: submitting it again changes nothing. Bad lines are refused and the other lines are submitted;
    the exit code is 1 then.

    \b
    Examples:
      nightjar submit dialogues.jsonl
      nightjar submit dialogues.jsonl --dry-run
      nightjar submit s3://bucket/dialogues.jsonl.zst --voice heart --label corpus=evening
    """
    settings = settings_for_new_job(home)
    from jobs.checks import lacking_meters
    from jobs.source import check_source
    from jobs.spec import resolve
    from jobs.voices import voice_folder

    resolved = resolve(spec, options.input_format, voice_folder(settings))
    if (lack := lacking_meters(spec.quality)) is not None:
        # The worker may be another machine.
        outcome = (
            "A worker that cannot download them waits"
            if lack.code is ErrorCode.MODEL_UNREACHABLE
            else "A worker without them refuses the items"
        )
        output.note(f"{lack.message} {outcome}. {lack.advice}")
    check_source(source)
    if dry_run:
        return dry_run_of(settings, source, resolved, output, abort=options.on_error == "abort")

    from jobs.ingest import submit_for_workers

    with Progress(quiet=output.quiet) as progress:
        result = submit_for_workers(settings, source, resolved, options, progress.reading)
    return _report(result, output)


def _report(result: Any, output: Output) -> int:
    from jobs.ingest import check_wanted

    job = result.job
    view = {"schema": "nightjar.submit/1", "job": job.id, "state": job.state.value, "created": result.created}
    view |= {"resumed": result.resumed, "items": job.total_items, "rejected_lines": job.rejected_lines}
    output.say(view, job.id)
    if not result.created and not result.resumed:
        output.note(f"This file was submitted before with the same spec; its job is {job.state.value}.")
    check_wanted(job)
    step = "Look at it with: nightjar status" if job.state.final else "Follow it with: nightjar watch"
    refused = f"{counted(job.rejected_lines, 'line')} refused"
    output.note(f"{counted(job.total_items, 'item')}, {refused}. {step} {job.id}")
    return FAILED if job.rejected_lines else 0


def dry_run_of(settings: Settings, source: str, spec: Any, output: Output, *, abort: bool) -> int:
    """Prints what a submit would make; the exit code of the command."""
    from jobs.estimate import dry_run
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    estimate = dry_run(settings, store, source, spec, abort=abort)
    refused = sum(estimate.rejected.values())
    rate, seconds = settings.price_per_gpu_hour, estimate.engine_seconds
    price = None if rate is None or seconds is None else seconds / 3600 * rate
    view = {"schema": "nightjar.estimate/1", **msgspec.to_builtins(estimate), "cost": price}
    if not output.as_json:
        view["rejected_lines"] = view["rejected_lines"][:SHOWN_LINES]
    output.record(view)
    if not estimate.items:
        if not refused:
            raise no_records()
        message = f"No line of the input can become an item: {counted(refused, 'line')} refused."
        raise InputError(ErrorCode.INPUT_NO_ITEMS, message, "Correct the input and try again.")
    return FAILED if estimate.rejected else 0
