"""The commands that make speech: `nightjar run`, `submit`, `dev` and `nightly`. `run` and `submit` check everything
before they write anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from jobs.cli.jobs import exit_code_of, print_status
from jobs.cli.options import JobCommand, common_options, files, job_options, models, worker_command
from jobs.console import FAILED, Interrupted, Output, Signals, defer_sigint, flag, option
from jobs.embedded import EmbeddedHome, embedded_settings
from jobs.formatting import counted
from jobs.gpus import choose_gpus, count_gpus
from jobs.job_options import SubmitOptions
from jobs.ledger.records import JobSpec
from jobs.ledger.status import JobStatus
from jobs.progress import Progress
from jobs.recent_jobs import registered_dev, settings_for_new_job
from jobs.settings import Settings, load_settings
from jobs.source import check_source, empty_input
from jobs.status import status_view
from pipelines.errors import ErrorCode, InputError, invalid

#: Maximum number of refused lines that a dry run shows.
SHOWN_LINES = 10


@click.command(cls=JobCommand)
@click.argument("source", metavar="INPUT", shell_complete=files)
@option(
    "--gpu",
    "N,N...|all",
    "GPUs as `nvidia-smi` numbers them, for example 0,1, or `all`. Runs one worker per GPU. [default: one worker, on the first GPU "
    "that CUDA_VISIBLE_DEVICES allows]",
    name="gpus",
)
@job_options
@common_options
def run(
    source: str,
    gpus: str | None,
    spec: JobSpec,
    options: SubmitOptions,
    dry_run: bool,
    home: str | None,
    output: Output,
) -> int:
    """Synthesize INPUT into DIR and wait until it is done.

    INPUT is a path, s3://BUCKET/KEY, or `-` for standard input. It contains dialogues, chat messages or rows
    (JSONL), an OpenAI batch, text, CSV, TSV, Parquet, Arrow, Lhotse's cuts or Kaldi's text, and may be
    compressed (.gz, .zst). No other service is
    needed: the command starts and stops its own broker and worker. To continue after an interruption, repeat
    the command; finished items are kept.

    \b
    Examples:
      nightjar run dialogues.jsonl --out out
      nightjar run dialogues.jsonl --out out --speak all --format flac
      nightjar run sentences.csv --column text=sentence --sample 100
      nightjar run dialogues.jsonl --model qwen3-tts-0.6b-base --qa strict
      nightjar run dialogues.jsonl --model qwen3-tts-0.6b-base --gpu all
    """
    settings = embedded_settings(load_settings(home=home))
    devices = None if gpus is None else choose_gpus(gpus)
    with defer_sigint():
        from jobs.checks import missing_meters
        from jobs.local_run import run_locally
        from jobs.spec import resolve_for

    resolved = resolve_for(settings, spec, options)
    engine = settings.chosen_engine(resolved.card)
    alone = gpus is None and engine != "cpu" and not (engine == "vllm" and settings.vllm.tensor_parallel > 1)
    if alone and (count := count_gpus()) > 1:
        output.note(f"This run uses one of {count} GPUs. Give --gpu all to use all of them.")
    if (missing := missing_meters(spec.quality, output.note)) is not None:
        raise missing
    check_source(source)
    if dry_run:
        return dry_run_of(settings, source, resolved, options, output)

    with Signals().installed() as signals, Progress(quiet=output.quiet) as progress:
        status, places = run_locally(settings, source, resolved, options, devices, progress, signals)
    _summarize(status, settings, places, output)
    return exit_code_of(status.job.state)


def _summarize(status: JobStatus, settings: Settings, made: Mapping[str, str | None], output: Output) -> None:
    """Prints the status, and the paths of the results."""
    job = status.job
    if output.as_json:
        output.data({**status_view(status, settings.price_per_gpu_hour), "schema": "nightjar.run/1", **made})
        return
    if output.quiet:
        click.echo(job.id)
        return
    print_status(status, settings.price_per_gpu_hour)
    words = {"files": "audio", "codes": "codes", "texts": "text", "list": "manifest", "report": "report"}
    for word, kind in words.items():
        if (place := made.get(kind)) is not None:
            # Paths below the working directory are shown as relative ones.
            path = Path(place)
            near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else place
            click.echo(f"{word:<8}{near}")
    if status.items.failed or job.rejected_lines:
        click.echo(f"errors  nightjar errors {job.id}")


@click.command(cls=JobCommand)
@click.argument("source", metavar="INPUT", shell_complete=files)
@job_options
@common_options
def submit(
    source: str, spec: JobSpec, options: SubmitOptions, dry_run: bool, home: str | None, output: Output
) -> int:
    """Submit INPUT as a job and print the job's id.

    INPUT is a path, s3://BUCKET/KEY, or `-` for standard input. It contains dialogues, chat messages or rows
    (JSONL), an OpenAI batch, text, CSV, TSV, Parquet, Arrow, Lhotse's cuts or Kaldi's text, and may be
    compressed (.gz, .zst). The same file with
    the same options is the same job: submitting it again changes nothing. Bad lines are refused, and the
    other lines are submitted; the exit code is then 1.

    \b
    Examples:
      nightjar submit dialogues.jsonl
      nightjar submit dialogues.jsonl --dry-run
      nightjar submit s3://bucket/dialogues.jsonl.zst --voice heart --label corpus=evening
    """
    settings = settings_for_new_job(home)
    from jobs.checks import missing_meters
    from jobs.ingest import check_has_work, submit_for_workers
    from jobs.spec import resolve_for

    resolved = resolve_for(settings, spec, options)
    if (missing := missing_meters(spec.quality)) is not None:
        # The worker may run on another machine.
        outcome = (
            "A worker that cannot download them waits"
            if missing.code is ErrorCode.MODEL_UNREACHABLE
            else "A worker without them refuses the items"
        )
        output.note(f"{missing.message} {outcome}. {missing.advice}")
    check_source(source)
    if dry_run:
        return dry_run_of(settings, source, resolved, options, output)

    with Progress(quiet=output.quiet) as progress:
        result = submit_for_workers(settings, source, resolved, options, progress.reading)
    job = result.job
    output.result(
        job.id,
        "nightjar.submit/1",
        job=job.id,
        state=job.state,
        created=result.created,
        resumed=result.resumed,
        items=job.total_items,
        rejected_lines=job.rejected_lines,
    )
    if not result.created and not result.resumed:
        output.note(f"This file was submitted before with the same spec; its job is {job.state.value}.")
    check_has_work(job)
    step = "See it with: nightjar status" if job.state.final else "Follow it with: nightjar watch"
    output.note(
        f"{counted(job.total_items, 'item')}, {counted(job.rejected_lines, 'line')} refused. {step} {job.id}"
    )
    return FAILED if job.rejected_lines else 0


def dry_run_of(settings: Settings, source: str, spec: Any, options: SubmitOptions, output: Output) -> int:
    """Prints the estimate of a job, and returns the exit code of the command."""
    from jobs.ingest import dry_run
    from jobs.store import open_store

    estimate = dry_run(settings, open_store(settings.effective_store_url, settings.s3), source, spec, options)
    refused = sum(estimate.rejected.values())
    rate = settings.price_per_gpu_hour
    seconds = estimate.engine_seconds
    price = None if rate is None or seconds is None else seconds / 3600 * rate
    view = {"schema": "nightjar.estimate/1", **msgspec.to_builtins(estimate), "cost": price}
    if not output.as_json:
        view["rejected_lines"] = view["rejected_lines"][:SHOWN_LINES]
    output.record(view)
    if not estimate.items:
        if not refused:
            raise empty_input()
        raise InputError(
            ErrorCode.INPUT_NO_ITEMS,
            f"No line of the input can become an item: {counted(refused, 'line')} refused.",
            "Correct the input and try again.",
        )
    return FAILED if estimate.rejected else 0


@click.command()
@flag("--serve", "Also serve --model over HTTP, as `nightjar serve` does.", "serves")
@option(
    "--model",
    "MODEL",
    "Model of the server. Each job names its own model.",
    default="hibari",
    shell_complete=models,
)
@common_options
def dev(serves: bool, model: str, home: str | None, output: Output) -> int:
    """Run a small installation on this machine until Ctrl-C: broker, ledger, store and one worker, and with
    --serve a server.

    While it runs, `nightjar submit`, `status`, `watch` and `export` work in any folder without settings.
    Ctrl-C ends everything; unfinished jobs continue with the next `nightjar dev` in the same folder.

    \b
    Examples:
      nightjar dev
      nightjar dev --serve
    """
    settings = embedded_settings(load_settings(home=home))
    if settings.broker_url is not None:
        raise invalid(
            f"broker_url ({settings.origin('broker_url')}) names another broker, which `nightjar submit` would use.",
            "Unset SPEECH_BROKER_URL for both commands.",
        )
    with defer_sigint():
        from jobs.cli.models import check_extra
        from jobs.local_run import POLL_SECONDS
        from pipelines.registry import describe

    if serves:
        describe(model)
        check_extra()
    with Signals().installed() as signals, EmbeddedHome(settings) as embedded:
        signals.kill = embedded.kill
        try:
            embedded.ledger.migrate()
            embedded.prepare(None)
            embedded.start(output.note)
            url = f"http://{settings.serve.address}:{settings.serve.port}" if serves else None
            if serves:
                embedded.serve(model)
            with registered_dev(settings.home):
                _print_places(output, embedded, url)
                while True:
                    signals.check()
                    embedded.poll()
                    time.sleep(POLL_SECONDS)
        except Interrupted:
            embedded.drain(output.note)
    return 0


def _print_places(output: Output, embedded: EmbeddedHome, url: str | None) -> None:
    """Prints the paths of ledger, store and logs, and the server's address."""
    store = embedded.settings.effective_store_url
    logs = f"{embedded.worker_log}{'' if url is None else f', {embedded.server_log}'}"
    places = {"ledger": embedded.state / "ledger.sqlite", "store": store, "logs": logs, "server": url}
    text = "\n".join(f"{word:<8}{place}" for word, place in places.items() if place is not None)
    output.result(text, "nightjar.dev/1", home=str(embedded.home), store=store, server=url)
    sys.stdout.flush()
    output.note("Ready. In another terminal: nightjar submit FILE. Ctrl-C ends everything.")


nightly = worker_command("nightly", "nightly")
