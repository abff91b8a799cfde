"""`nightjar submit`: a file of dialogues becomes a job. Everything that could refuse is asked before anything is written."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click
import msgspec

from jobs.cli.context import PRIORITY, FiniteRange, common_options, label_option, labels_of
from jobs.cli.follow import Progress
from jobs.cli.output import FAILED, Output, printable
from jobs.cli.spec import check_source, lacking_meters, owner, resolve_spec, spec_options, take_spec
from jobs.formatting import bytes_text, counted, seconds_text
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.openai_batch import InputFormat
from jobs.settings import Settings, load_settings
from pipelines.errors import ErrorCode, InputError

#: Refused lines that a dry run shows.
SHOWN_LINES = 10


def job_options(function: Any) -> Any:
    """Options of a job beside its spec, handed over as keyword arguments that `submit_options` takes."""
    options = (
        click.option("--name", default="", help="Name for people."),
        label_option("A label, for `nightjar list --label`; may be given again."),
        click.option("--priority", default=0, show_default=True, type=PRIORITY, help="Higher runs first."),
        click.option(
            "--weight", default=1, show_default=True, type=click.IntRange(1, 1000), help="Share against jobs of the same priority."
        ),
        click.option("--on-error", type=click.Choice(["skip", "abort"]), default="skip", show_default=True, help="What a bad line does."),
        click.option("--idempotency-key", metavar="KEY", help="The same key is the same job. [default: the file and the spec]"),
        click.option("--max-attempts", default=3, show_default=True, type=click.IntRange(1, 100), help="Attempts of an item."),
        click.option("--max-in-flight", type=click.IntRange(min=1), help="Most shards of this job at once."),
        click.option("--error-budget", type=FiniteRange(0, 1), help="Share of failed items that pauses the job."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def submit_options(given: dict[str, Any]) -> Any:
    """The `SubmitOptions` of a command's keyword arguments."""
    from jobs.ingest import SubmitOptions

    labels = labels_of(given.pop("labels"))
    if given["idempotency_key"] is not None and not given["idempotency_key"].strip():
        raise click.UsageError("The idempotency key is empty.")
    return SubmitOptions(owner=owner(), labels=labels, **given)


@click.command()
@click.argument("source", metavar="INPUT")
@click.option("--dry-run", is_flag=True, help="Check the file and estimate the work; write nothing.")
@spec_options
@job_options
@common_options
def submit(source: str, dry_run: bool, home: str | None, as_json: bool, quiet: bool, **given: Any) -> int:
    """Submit INPUT (a path, `-` or `s3://…`; JSONL, also .gz or .zst) as a job and print its id.

    The same file with the same spec is the same job: submitting it again changes nothing. Exit code 1: lines were refused, the
    others are submitted.
    """
    output = Output(as_json=as_json, quiet=quiet)
    settings = load_settings(home=home)
    spec = resolve_spec(take_spec(given))
    if (lack := lacking_meters(spec)) is not None:
        # The worker may be another machine.
        fate = (
            "A worker that cannot fetch them waits"
            if lack.code is ErrorCode.MODEL_UNREACHABLE
            else "A worker without them refuses the items"
        )
        output.note(f"{lack.message} {fate}. {lack.advice}")
    check_source(source)
    if dry_run:
        return _dry_run(settings, source, spec, output, given["input_format"], abort=given["on_error"] == "abort")
    options = submit_options(given)

    from jobs import dispatch
    from jobs.ingest import submit as ingest
    from jobs.ledger import Ledger
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    with closing(Ledger.of(settings)) as ledger:
        if settings.database_url is None:
            ledger.migrate()
        ledger.check_schema()
        dispatch.check(settings)
        with Progress(quiet=quiet) as progress:
            result = ingest(settings, ledger, store, source, spec, options=options, progress=progress.reading)
        if not result.job.state.final:
            _nudge(ledger, settings)
    return _report(result, output)


def _nudge(ledger: Any, settings: Settings) -> None:
    """Hands out the first shards now, so that idle workers need not wait for their own look at the ledger."""
    from jobs.dispatch import Dispatcher

    Dispatcher(ledger, settings).run_once()


def _report(result: Any, output: Output) -> int:
    job = result.job
    if output.as_json:
        output.data(
            {
                "schema": "nightjar.submit/1",
                "job": job.id,
                "state": job.state.value,
                "created": result.created,
                "resumed": result.resumed,
                "items": job.total_items,
                "rejected_lines": job.rejected_lines,
            }
        )
    else:
        output.line(job.id)
    if not result.created and not result.resumed:
        output.note(f"This file was submitted before with the same spec; its job is {job.state.value}.")
    if job.state is JobState.FAILED:
        raise no_items(job)
    output.note(f"{counted(job.total_items, 'item')}, {counted(job.rejected_lines, 'line')} refused. {_next_step(job)}")
    return FAILED if job.rejected_lines else 0


def _next_step(job: Job) -> str:
    if job.state is JobState.CANCELLED:
        return "To make it again as another job, give an --idempotency-key of your own."
    return f"Look at it with: nightjar status {job.id}" if job.state.final else f"Follow it with: nightjar watch {job.id}"


def no_items(job: Job) -> InputError:
    """The error of a job that none of its input's lines became an item of."""
    if job.rejected_lines:
        return InputError(ErrorCode.INPUT_NO_ITEMS, f"Job {job.id} has no items.", f"See why with: nightjar errors {job.id}")
    return InputError(ErrorCode.INPUT_NO_ITEMS, "The input has no lines.", "Give a file with one dialogue a line.")


def _dry_run(settings: Settings, source: str, spec: JobSpec, output: Output, input_format: InputFormat, *, abort: bool) -> int:
    from jobs.ingest import dry_run
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    estimate = dry_run(settings, store, source, spec, input_format, abort=abort)
    rate, seconds = settings.price_per_gpu_hour, estimate.engine_seconds
    price = None if rate is None or seconds is None else seconds / 3600 * rate
    if output.as_json:
        output.data({"schema": "nightjar.estimate/1", **msgspec.to_builtins(estimate), "cost": price})
    else:
        output.line(f"items   {estimate.items}")
        output.line(f"audio   about {seconds_text(estimate.audio_seconds)}, {bytes_text(estimate.bytes)}")
        output.line(f"engine  about {seconds_text(estimate.engine_seconds)} on one worker")
        if price is not None:
            output.line(f"cost    about {price:.2f}")
        for code, count in estimate.rejected.items():
            output.line(f"refused {count} x {code.value}")
        for rejected in estimate.rejected_lines[:SHOWN_LINES]:
            output.line(f"  line {rejected.line}  {rejected.code.value}  {printable(rejected.message)}")
    if not estimate.items:
        raise InputError(ErrorCode.INPUT_NO_ITEMS, "No line of the input can become an item.", "Correct the lines and try again.")
    return FAILED if estimate.rejected else 0
