"""`nightjar workers`: who works, on what, since when, and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import click

from jobs.cli.context import common_options, read_ledger
from jobs.console import Output
from jobs.formatting import printable, seconds_text
from jobs.ledger.status import RECENT_SECONDS, WorkerStatus, worker_statuses
from jobs.recent_jobs import settings_for_new_job
from jobs.status import utc, worker_view
from pipelines.errors import NotFoundError

#: Characters of a job's id in the table.
_ID_CHARACTERS = 10
_HEADER = ("HOST", "PID", "GPU", "MODEL", "STATE", "SINCE", "HEARTBEAT", "SHARD", "ITEMS", "RTFX", "VERSION")


@click.command()
@click.option("--all", "everyone", is_flag=True, help="Also workers that ended, and those that were lost more than a day ago.")
@common_options
def workers(everyone: bool, home: str | None, output: Output) -> None:
    """List the workers: where each runs, its state, the shards that it holds, and the items and the speed of its last 10 minutes.

    A worker is `up`, `draining` (it takes no more shards), `quarantined` (it keeps failing) or `lost` (no heartbeat for a minute).

    \b
    Examples:
      nightjar workers
      nightjar workers --all --json
    """
    settings = settings_for_new_job(home)
    try:
        found = read_ledger(settings, partial(worker_statuses, everyone=everyone))
    except NotFoundError as error:
        output.note(f"No workers: {error}")
        return
    if output.as_json:
        for worker in found:
            output.data(worker_view(worker))
        return
    if not found:
        output.note("No workers. Start one with `nightjar worker`.")
        return
    output.table(_HEADER, [_row(worker) for worker in found])
    for worker in found:
        if worker.state_reason:
            output.line(f"{worker.host} {f'GPU {worker.gpu} ' if worker.gpu else ''}{worker.state}: {printable(worker.state_reason)}")
    output.note(_counts(found))


def _row(worker: WorkerStatus) -> Sequence[object]:
    recent, held = worker.recent, worker.held
    doing = "" if not held else f"{held[0].job_id[:_ID_CHARACTERS]}/{held[0].shard_no} {held[0].ended_items}/{held[0].items}"
    more = f" +{len(held) - 1}" if len(held) > 1 else ""
    failed = f" ({recent.items_failed} failed)" if recent.items_failed else ""
    return (
        *(worker.host, worker.pid, worker.gpu, worker.model or "any", worker.state, utc(worker.started_at)),
        *(f"{seconds_text(worker.silent_seconds)} ago", doing + more, f"{recent.items_done}{failed}"),
        *("" if recent.rtfx is None else f"{recent.rtfx:.1f}", worker.version),
    )


def _counts(found: Sequence[WorkerStatus]) -> str:
    counts = Counter(worker.state for worker in found)
    return f"{', '.join(f'{count} {state}' for state, count in counts.items())}. Items and RTFX: last {RECENT_SECONDS / 60:.0f} minutes."
