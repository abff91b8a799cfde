"""`jobs status`, `list`, `items`, `errors`: what the ledger knows, for a person or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import click

from jobs.cli.context import common_options, found_job, job_argument, price_option, reading_ledger
from jobs.cli.output import Output, bytes_text, counted, printable, seconds_text
from jobs.homes import settings_for_job
from jobs.ledger.glance import glance
from jobs.ledger.records import ItemState, JobState, JobStatus
from jobs.settings import Settings, load_settings
from jobs.status import (
    cost,
    cost_at_end,
    elapsed_seconds,
    eta_error_seconds,
    eta_seconds,
    item_error_view,
    item_view,
    items_per_second,
    line_error_view,
    real_time_factor,
    status_view,
    utc,
)
from pipelines.errors import ErrorCode, NotFoundError

code_choice = click.Choice([code.value for code in ErrorCode])


@click.command()
@job_argument
@price_option
@common_options
def status(job: str, price: float | None, home: str | None, as_json: bool, quiet: bool) -> None:
    """Show how far JOB (an id or a prefix of one) is, how fast, and what it costs."""
    output = Output(as_json=as_json, quiet=quiet)
    settings = settings_for_job(job, home)
    price = settings.price_per_gpu_hour if price is None else price
    state, errors = _status_and_errors(settings, job)
    if as_json:
        output.data(status_view(state, price, errors))
        return
    for line in status_lines(state, price):
        output.line(line)
    for code, count in errors.items():
        output.line(f"  {count} x {code.value}")
    if errors:
        output.note(f"See them with: jobs errors {state.job.id}")


def _status_and_errors(settings: Settings, prefix: str) -> tuple[JobStatus, dict[ErrorCode, int]]:
    if (seen := glance(settings.ledger_url, prefix)) is not None:
        return seen
    with reading_ledger(settings) as ledger:
        found = ledger.find_job(prefix)
        return ledger.status(found.id), ledger.error_counts(found.id)


def status_lines(state: JobStatus, price_per_gpu_hour: float | None = None) -> list[str]:
    """A job's status in a few lines for a person."""
    job, items = state.job, state.items
    reason = f" ({printable(job.state_reason)})" if job.state_reason else ""
    named = f"  {printable(job.name)}" if job.name else ""
    lines = [f"{job.id}  {click.style(job.state.value, bold=True)}{reason}{named}"]
    counts = f"items   {items.done} done, {items.failed} failed, {items.pending} pending, {items.total} in all"
    lines.append(counts + (f", {items.skipped} skipped" if items.skipped else ""))
    if state.outage is not None:
        lines.append(f"waits   {state.outage.code.value}: {printable(state.outage.message)}")
    if job.rejected_lines:
        lines.append(f"input   {counted(job.rejected_lines, 'line')} refused")
    factor = real_time_factor(state)
    speed = f", {factor:.1f} x real time" if factor else ""
    lines.append(f"audio   {_hours(state.audio_ms / 1000)}{speed}, {bytes_text(state.bytes_out)}")
    pace = f"time    {seconds_text(elapsed_seconds(state))}, {items_per_second(state):.2f} items/s"
    if not job.state.final and (eta := eta_seconds(state)) is not None:
        error = eta_error_seconds(state)
        pace += f", {seconds_text(eta)} to go{'' if error is None else f' (± {seconds_text(error)})'}"
    lines.append(pace)
    lines.append(f"gpu     {_hours(state.engine_ms / 1000)} of engine time")
    price = cost(state, price_per_gpu_hour)
    if price is not None:
        at_end = None if state.job.state.final else cost_at_end(state, price_per_gpu_hour)
        ahead = "" if at_end is None else f", about {at_end:.2f} at the end"
        lines.append(f"cost    {price:.2f}{ahead}, at {price_per_gpu_hour:g} a GPU hour")
    return lines


def _hours(seconds: float) -> str:
    """`41 s`, and with the hours from ten minutes on: `20 min 5 s (0.33 h)`."""
    return seconds_text(seconds) + (f" ({seconds / 3600:.2f} h)" if seconds >= 600 else "")


@click.command("list")
@click.option("--state", "states", multiple=True, type=click.Choice([state.value for state in JobState]), help="Only jobs in this state.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Most jobs that are listed.")
@common_options
def list_jobs(states: Sequence[str], limit: int, home: str | None, as_json: bool, quiet: bool) -> None:
    """List jobs, newest first."""
    output = Output(as_json=as_json, quiet=quiet)
    settings = load_settings(home=home)
    try:
        with reading_ledger(settings) as ledger:
            if states:
                found = [ledger.status(job.id) for job in ledger.jobs(limit=limit, states=[JobState(state) for state in states])]
            else:
                found = ledger.statuses(limit)
    except NotFoundError as error:
        output.note(f"No jobs: {error}")
        return
    if as_json:
        for state in found:
            output.data(status_view(state, settings.price_per_gpu_hour))
        return
    if not found:
        output.note("No jobs.")
        return
    rows = [
        (s.job.id, s.job.state.value, s.items.total, s.items.done, s.items.failed, s.job.spec.model, utc(s.job.created_at), s.job.name)
        for s in found
    ]
    output.table(("JOB", "STATE", "ITEMS", "DONE", "FAILED", "MODEL", "CREATED", "NAME"), rows)


@click.command()
@job_argument
@click.option("--state", type=click.Choice([state.value for state in ItemState]), help="Only items in this state.")
@click.option("--code", "codes", multiple=True, type=code_choice, metavar="CODE", help="Only items that ended with this error.")
@click.option("--after", default=-1, type=int, metavar="INDEX", help="Begin after this index.")
@click.option("--limit", type=click.IntRange(min=1), help="Most items that are listed.")
@common_options
def items(
    job: str, state: str | None, codes: Sequence[str], after: int, limit: int | None, home: str | None, as_json: bool, quiet: bool
) -> None:
    """List JOB's items in the order of the input, with their audio."""
    output = Output(as_json=as_json, quiet=quiet)
    with found_job(job, home) as (_, ledger, found):
        wanted = [ErrorCode(code) for code in codes] or None
        rows = ledger.items(found.id, state=ItemState(state) if state else None, codes=wanted, after=after, limit=limit)
        if not as_json:
            output.line(click.style("INDEX\tSTATE\tSECONDS\tEXAMPLE\tKEY OR ERROR", bold=True))
        for item in rows:
            if as_json:
                output.data(item_view(found.id, item))
                continue
            audio = item.artifact
            seconds = f"{audio.duration_ms / 1000:.2f}" if audio else ""
            last = audio.key if audio else (item.error_code or "")
            output.line(f"{item.index}\t{item.state.value}\t{seconds}\t{printable(item.example_id)}\t{last}")


@click.command()
@job_argument
@click.option("--by", type=click.Choice(["code"]), help="Count instead of listing.")
@click.option("--code", "codes", multiple=True, type=code_choice, metavar="CODE", help="Only errors with this code.")
@click.option("--limit", type=click.IntRange(min=1), help="Most errors that are listed.")
@common_options
def errors(job: str, by: str | None, codes: Sequence[str], limit: int | None, home: str | None, as_json: bool, quiet: bool) -> None:
    """List the lines of JOB's input that were refused and the items that failed."""
    output = Output(as_json=as_json, quiet=quiet)
    wanted = {ErrorCode(code) for code in codes} or None
    with found_job(job, home) as (_, ledger, found):
        if by:
            counts = ledger.error_counts(found.id)
            for code, count in sorted(counts.items(), key=lambda pair: -pair[1]):
                if wanted is not None and code not in wanted:
                    continue
                if as_json:
                    output.data({"schema": "nightjar.error_count/1", "job": found.id, "code": code.value, "count": count})
                else:
                    output.line(f"{count}\t{code.value}")
            return
        lines = (line_error_view(found.id, line) for line in ledger.rejected_lines(found.id) if wanted is None or line.code in wanted)
        ended = (ItemState.FAILED, ItemState.DEAD)
        failed = (item_error_view(found.id, item) for state in ended for item in ledger.items(found.id, state=state, codes=wanted))
        shown = 0
        for view in islice((view for views in (lines, failed) for view in views), limit):
            shown += 1
            if as_json:
                output.data(view)
                continue
            where = f"line {view['line']}" if view["kind"] == "line" else f"item {view['index']}"
            output.line(f"{where}\t{view['code']}\t{printable(view['example_id'] or '')}\t{printable(view['message'] or '')}")
        if not shown and not as_json:
            output.note("No errors.")
