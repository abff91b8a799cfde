"""`nightjar items` and `errors`: what became of each line of a job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click

from jobs.cli.options import code_option, common_options, found_job, job_argument, where_option
from jobs.console import Output
from jobs.formatting import printable
from jobs.ledger.records import KEPT_REJECTED_LINES, ItemState, Job
from jobs.settings import Settings
from jobs.status import item_error_view, item_view, line_error_view
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.shard_file import ItemLines


@click.command()
@job_argument
@click.option(
    "--state", type=click.Choice([state.value for state in ItemState]), help="Only items in this state."
)
@code_option("Only items with this error code.")
@where_option
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
def errors(
    job: str, by: str | None, codes: Sequence[str], limit: int | None, home: str | None, output: Output
) -> None:
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
                output.say(
                    {"schema": "nightjar.error_count/1", "job": found.id, "code": code.value, "count": count},
                    f"{count}\t{code.value}",
                )
            return
        lines = _lines(settings, ledger, found)
        refused = (
            line_error_view(found.id, line)
            for line in ledger.rejected_lines(found.id)
            if wanted is None or line.code in wanted
        )
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
            output.note(
                f"Of the {found.rejected_lines:,} refused lines the first {KEPT_REJECTED_LINES:,} are kept."
            )
        if not shown and not output.as_json:
            output.note("No errors.")
