"""`nightjar status`, `list`, `items`, `errors`: what the ledger knows, for a person or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import click

from jobs.cli.context import F, common_options, found_job, job_argument, label_option, labels_of, price_option, read_ledger, where_option
from jobs.console import Output
from jobs.formatting import bytes_text, counted, printable, seconds_text
from jobs.ledger.location import embedded_broker_url
from jobs.ledger.records import KEPT_REJECTED_LINES, ItemState, Job, JobState
from jobs.ledger.status import GAP_SECONDS, JobStatus, newest_statuses, status_and_errors
from jobs.recent_jobs import homes_of, keep_remembered, out_words, places_of, settings_for_job
from jobs.settings import Settings, sqlite_path
from jobs.status import (
    busy_seconds,
    cost,
    cost_at_end,
    elapsed_seconds,
    eta_error_seconds,
    eta_seconds,
    item_error_view,
    item_view,
    items_per_second,
    lacks_workers,
    line_error_view,
    rtfx,
    status_view,
    utc,
)
from pipelines.errors import ErrorCode, NightjarError, NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.shard_file import ItemLines

T = TypeVar("T")

#: What `status`, `watch` and `wait` say of a job that waits for a worker.
NO_WORKER = (
    "no live worker takes this job (see `nightjar workers`); start one with `nightjar worker` or `nightjar dev`, "
    "or give its `nightjar run` again"
)
STARTING = "the worker of this folder's `nightjar run` or `nightjar dev` is starting"

_codes = click.Choice([code.value for code in ErrorCode])


def code_option(text: str) -> Callable[[F], F]:
    """`--code`, which can be given more than once, as `codes`."""
    return click.option("--code", "codes", multiple=True, type=_codes, metavar="CODE", help=text)


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
    keep_remembered(state.job.id, settings)
    if output.as_json:
        output.data(status_view(state, price, errors))
        return
    for line in status_lines(state, price, no_worker(settings)):
        output.line(line)
    for code, count in errors.items():
        output.line(f"  {count} x {code.value}")
    if errors:
        output.note(f"See them with: nightjar errors {state.job.id}{out_words(state.job.id, sqlite_path(settings.ledger_url))}")


def no_worker(settings: Settings) -> str:
    """What is said of a job for which no worker lives. A run has workers for the jobs of its own ledger alone."""
    own_ledger = sqlite_path(settings.ledger_url) == settings.state_folder / "ledger.sqlite"
    return STARTING if own_ledger and embedded_broker_url(settings.state_folder) is not None else NO_WORKER


def status_lines(state: JobStatus, price_per_gpu_hour: float | None = None, waits: str = NO_WORKER) -> list[str]:
    """A job's status in a few lines for a person; `waits`: what is said where no worker lives."""
    job, items = state.job, state.items
    reason = f" ({printable(job.state_reason)})" if job.state_reason else ""
    named = f"  {printable(job.name)}" if job.name else ""
    lines = [f"{job.id}  {click.style(job.state.value, bold=True)}{reason}{named}"]
    if job.labels:
        lines.append(f"labels  {printable(_labels_text(job.labels))}")
    counts = f"items   {items.done} done, {items.failed} failed, {items.pending} pending, {items.total} in all"
    lines.append(counts + (f", {items.skipped} skipped" if items.skipped else ""))
    if state.quarantined_workers:
        lines.append(f"workers {state.workers} live, {state.quarantined_workers} quarantined (`nightjar workers` says why)")
    if state.outage is not None:
        lines.append(f"waits   {state.outage.code.value}: {printable(state.outage.message)}")
    if lacks_workers(state):
        lines.append(f"waits   {waits}")
    if job.rejected_lines:
        lines.append(f"input   {counted(job.rejected_lines, 'line')} refused")
    speed = f", RTFx {factor:.1f}" if (factor := rtfx(state)) else ""
    lines.append(f"audio   {_hours(state.audio_ms / 1000)}{speed}, {bytes_text(state.bytes_out)}")
    elapsed, busy = elapsed_seconds(state), busy_seconds(state)
    idle = f" of work in {seconds_text(elapsed)}" if elapsed - busy > GAP_SECONDS else ""
    pace = f"time    {seconds_text(busy if idle else elapsed)}{idle}, {items_per_second(state):.2f} items/s"
    if not job.state.final and (eta := eta_seconds(state)) is not None:
        error = eta_error_seconds(state)
        pace += f", {seconds_text(eta)} to go{'' if error is None else f' (± {seconds_text(error)})'}"
    lines.append(pace)
    lines.append(f"engine  {_hours(state.engine_ms / 1000)} busy")
    price = cost(state, price_per_gpu_hour)
    if price is not None:
        at_end = None if state.job.state.final else cost_at_end(state, price_per_gpu_hour)
        ahead = "" if at_end is None else f", about {at_end:.2f} at the end"
        lines.append(f"cost    {price:.2f}{ahead}, at {price_per_gpu_hour:g} an engine hour")
    return lines


def _hours(seconds: float) -> str:
    """`41 s`, and with the hours from ten minutes on: `20 min 5 s (0.33 h)`."""
    return seconds_text(seconds) + (f" ({seconds / 3600:.2f} h)" if seconds >= 600 else "")


@click.command("list")
@click.option("--state", "states", multiple=True, type=click.Choice([state.value for state in JobState]), help="Only jobs in this state.")
@label_option("Only jobs with this label. If given more than once, only jobs with all of them.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), metavar="N", help="Maximum number of jobs.")
@common_options
def list_jobs(states: Sequence[str], labels: Sequence[str], limit: int, home: str | None, output: Output) -> None:
    """List jobs, newest first: of the ledger that is set, or of all folders whose jobs `nightjar status` finds.

    \b
    Examples:
      nightjar list --state running
      nightjar list --label corpus=evening --json
      nightjar list --out out
    """
    places, wanted = places_of("", home), labels_of(labels)
    in_states = [JobState(state) for state in states] or None
    found: dict[str, tuple[JobStatus, Settings]] = {}
    for settings in places:
        try:
            of_place = read_ledger(settings, lambda reader: newest_statuses(reader, limit, in_states, wanted))
        except NotFoundError as error:
            output.note(f"No jobs: {error}")
            return
        except NightjarError as error:
            if len(places) == 1:
                raise
            output.note(f"The jobs of {settings.home} cannot be listed: {error}")
            continue
        for state in of_place:
            # A copy of a folder has the same jobs.
            if state.job.id not in found or settings.home in homes_of(state.job.id):
                found[state.job.id] = (state, settings)
    newest = sorted(found.values(), key=lambda pair: (pair[0].job.created_at, pair[0].job.id), reverse=True)[:limit]
    if output.as_json:
        for state, settings in newest:
            output.data(status_view(state, settings.price_per_gpu_hour))
        return
    if not newest:
        output.note("No jobs.")
        return
    rows = [
        (
            *(s.job.id, s.job.state.value, s.items.total, s.items.done, s.items.failed, s.job.spec.model, utc(s.job.created_at)),
            *(s.job.name, _labels_text(s.job.labels)),
            *([str(settings.home)] if len(places) > 1 else []),
        )
        for s, settings in newest
    ]
    header = ("JOB", "STATE", "ITEMS", "DONE", "FAILED", "MODEL", "CREATED", "NAME", "LABELS")
    output.table((*header, "FOLDER") if len(places) > 1 else header, rows)


def _labels_text(labels: Mapping[str, str]) -> str:
    """`corpus=evening, owner=night`, in the order of the keys."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


@click.command()
@job_argument
@click.option("--state", type=click.Choice([state.value for state in ItemState]), help="Only items in this state.")
@code_option("Only items with this error code.")
@where_option("Only items whose scores, seconds, draw and attempts are so, for example 'wer < 0.1 and distillmos > 3.5'.")
@click.option("--after", default=-1, type=int, metavar="INDEX", help="Start after this item index.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Maximum number of items.")
@common_options
def items(
    job: str,
    state: str | None,
    codes: Sequence[str],
    where: str | None,
    after: int,
    limit: int | None,
    home: str | None,
    output: Output,
) -> None:
    """List the items of JOB in input order, with their audio files.

    \b
    Examples:
      nightjar items JOB --state failed
      nightjar items JOB --where 'wer > 0.3 or seconds < 0.5'
      nightjar items JOB --json --limit 10
    """
    from jobs.where import parse_where

    condition = None if where is None else parse_where(where)
    with found_job(job, home) as (settings, ledger, found):
        lines = _lines(settings, ledger, found)
        wanted = [ErrorCode(code) for code in codes] or None
        in_state = ItemState(state) if state else None
        rows = ledger.items(found.id, state=in_state, codes=wanted, after=after, limit=limit, where=condition)
        if not output.as_json:
            output.line(click.style("INDEX\tLINE\tSTATE\tSECONDS\tEXAMPLE\tKEY OR ERROR", bold=True))
        for item in rows:
            line = lines.line_of(item)
            if output.as_json:
                output.data(item_view(found.id, item, line))
                continue
            audio = item.artifact
            seconds = f"{audio.duration_ms / 1000:.2f}" if audio else ""
            last = audio.key if audio else (item.error_code or "")
            place = f"{item.index}\t{'' if line is None else line}"
            output.line(f"{place}\t{item.state.value}\t{seconds}\t{printable(item.id)}\t{last}")
        _note_unknown(lines, output)


def _lines(settings: Settings, ledger: Ledger, job: Job) -> ItemLines:
    # Other commands of this module pay for no store.
    from jobs.shard_file import ItemLines
    from jobs.store import open_store

    return ItemLines(ledger, open_store(job.store_url, settings.s3), job.id)


def _note_unknown(lines: ItemLines, output: Output) -> None:
    if lines.failure is not None:
        output.note(f"The input lines of some items cannot be shown: {printable(str(lines.failure))}")


@click.command()
@job_argument
@click.option("--by", type=click.Choice(["code"]), help="Count errors by code.")
@code_option("Only errors with this code.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Maximum number of errors.")
@common_options
def errors(job: str, by: str | None, codes: Sequence[str], limit: int | None, home: str | None, output: Output) -> None:
    """List the refused input lines (the first 10,000) and the failed items of JOB.

    \b
    Examples:
      nightjar errors JOB
      nightjar errors JOB --by code
    """
    wanted = {ErrorCode(code) for code in codes} or None
    with found_job(job, home) as (settings, ledger, found):
        if by:
            counts = ledger.error_counts(found.id)
            for code, count in sorted(counts.items(), key=lambda pair: -pair[1]):
                if wanted is not None and code not in wanted:
                    continue
                if output.as_json:
                    output.data({"schema": "nightjar.error_count/1", "job": found.id, "code": code.value, "count": count})
                else:
                    output.line(f"{count}\t{code.value}")
            return
        lines = _lines(settings, ledger, found)
        refused = (line_error_view(found.id, line) for line in ledger.rejected_lines(found.id) if wanted is None or line.code in wanted)
        ended = (ItemState.FAILED, ItemState.DEAD)
        broken = (item for state in ended for item in ledger.items(found.id, state=state, codes=wanted))
        failed = (item_error_view(found.id, item, lines.line_of(item)) for item in broken)
        shown = 0
        for view in islice((view for views in (refused, failed) for view in views), limit):
            shown += 1
            if output.as_json:
                output.data(view)
                continue
            where = f"item {view['index']}" if view["line"] is None else f"line {view['line']}"
            what = f"{view['code']}\t{printable(view['id'] or '')}\t{printable(view['message'] or '')}"
            output.line(f"{where}\t{what}")
        _note_unknown(lines, output)
        if found.rejected_lines > KEPT_REJECTED_LINES:
            output.note(f"Of the {found.rejected_lines:,} refused lines the first {KEPT_REJECTED_LINES:,} are kept.")
        if not shown and not output.as_json:
            output.note("No errors.")
