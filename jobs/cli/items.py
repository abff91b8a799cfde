"""`nightjar items` and `errors`."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

import click

from jobs.cli.options import code_option, of_job, where_option
from jobs.console import Output
from jobs.formatting import printable
from jobs.ledger.records import KEPT_REJECTED_LINES, ItemState, Job
from jobs.settings import Settings
from jobs.status import item_error_view, item_view, line_error_view
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.shard_file import RawLine, ShardLines
    from jobs.where import Where

limit_option = click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), help="Maximum number of rows."
)


@click.command()
@click.option(
    "--state", type=click.Choice([state.value for state in ItemState]), help="Only items in this state."
)
@code_option("Only items with this error code.")
@where_option
@click.option("--after", default=-1, type=int, metavar="INDEX", help="Start after this item index.")
@limit_option
@of_job
def items(
    settings: Settings,
    ledger: Ledger,
    job: Job,
    output: Output,
    state: str | None,
    codes: list[ErrorCode] | None,
    where: Where | None,
    after: int,
    limit: int | None,
) -> None:
    """List the items of JOB in input order, with their audio files.

    \b
    Examples:
      nightjar items JOB --state failed
      nightjar items JOB --where 'wer > 0.3 or seconds < 0.5'
      nightjar items JOB --json --limit 10
    """
    lines = _lines(settings, ledger, job)
    in_state = ItemState(state) if state else None
    if not output.as_json:
        output.line(click.style("INDEX\tLINE\tSTATE\tSECONDS\tEXAMPLE\tKEY OR ERROR", bold=True))
    for item in ledger.items(job.id, state=in_state, codes=codes, after=after, limit=limit, where=where):
        line, audio = lines.number_of(item), item.artifact
        seconds = f"{audio.duration_ms / 1000:.2f}" if audio else ""
        last = audio.key if audio else (item.error_code or "")
        row = (item.index, "" if line is None else line, item.state.value, seconds, printable(item.id), last)
        output.result("\t".join(map(str, row)), item_view(job.id, item, line))
    _note_unknown(lines, output)


def _lines(settings: Settings, ledger: Ledger, job: Job) -> ShardLines[RawLine]:
    # Imported late, because `errors --by code` needs no store.
    from jobs.shard_file import ShardLines, read_raw_shard
    from jobs.store import open_store

    return ShardLines(ledger, open_store(job.store_url, settings.s3), job.id, read_raw_shard)


def _note_unknown(lines: ShardLines[RawLine], output: Output) -> None:
    if lines.failure is not None:
        output.note(f"The input lines of some items cannot be shown: {printable(str(lines.failure))}")


@click.command()
@click.option("--by", type=click.Choice(["code"]), help="Print the number of errors per code.")
@code_option("Only errors with this code.")
@limit_option
@of_job
def errors(
    settings: Settings,
    ledger: Ledger,
    job: Job,
    output: Output,
    by: str | None,
    codes: list[ErrorCode] | None,
    limit: int | None,
) -> None:
    """List the refused input lines (the first 10,000) and the failed items of JOB.

    \b
    Examples:
      nightjar errors JOB
      nightjar errors JOB --by code
    """
    if by:
        for code, count in ledger.error_counts(job.id).items():
            if codes is None or code in codes:
                text = f"{count}\t{code.value}"
                output.result(text, "nightjar.error_count/1", job=job.id, code=code, count=count)
        return
    lines = _lines(settings, ledger, job)
    refused = (line for line in ledger.rejected_lines(job.id) if codes is None or line.code in codes)
    ended = (ItemState.FAILED, ItemState.DEAD)
    failed = (item for state in ended for item in ledger.items(job.id, state=state, codes=codes))
    views = chain(
        (line_error_view(job.id, line) for line in refused),
        (item_error_view(job.id, item, lines.number_of(item)) for item in failed),
    )
    shown = False
    for view in islice(views, limit):
        shown = True
        where = f"item {view['index']}" if view["line"] is None else f"line {view['line']}"
        words = (view["code"], printable(view["id"] or ""), printable(view["message"] or ""))
        output.result("\t".join((where, *words)), view)
    _note_unknown(lines, output)
    if job.rejected_lines > KEPT_REJECTED_LINES:
        output.note(
            f"{job.rejected_lines:,} lines were refused; only the first {KEPT_REJECTED_LINES:,} are kept."
        )
    if not shown:
        output.note("No errors.")
