"""`nightjar wait` and `nightjar watch`: to a job's end, and how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from jobs.cli.context import common_options, found_job, job_argument
from jobs.cli.show import no_worker, status_lines
from jobs.console import CANCELLED, FAILED, TIMEOUT, FiniteRange, Output
from jobs.ledger.records import JobState
from jobs.ledger.status import JobStatus
from jobs.progress import Progress
from jobs.status import lacks_workers, status_view

if TYPE_CHECKING:
    from jobs.settings import Settings

POLL_SECONDS = 0.5

EXIT_BY_STATE = {JobState.COMPLETED: 0, JobState.CANCELLED: CANCELLED}


def until_end(read: Callable[[], JobStatus], progress: Progress, settings: Settings, timeout_seconds: float | None = None) -> JobStatus:
    """Reads a job's status until it is final or the time is over; the last status. Says when no live worker takes the job."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    said = ""
    while True:
        status = read()
        progress.update(status)
        waits = no_worker(settings) if lacks_workers(status) else ""
        if waits and waits != said:
            progress.say(waits[0].upper() + waits[1:] + ".")
        said = waits
        if status.job.state.final or (deadline is not None and time.monotonic() >= deadline):
            return status
        time.sleep(POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))


def exit_code_of(state: JobState) -> int:
    """The exit code of `nightjar wait`: 0 completed, 1 with errors or failed, 6 cancelled, 7 not ended."""
    return EXIT_BY_STATE.get(state, FAILED) if state.final else TIMEOUT


@click.command()
@job_argument
@click.option(
    "--timeout", "timeout_seconds", type=FiniteRange(min=0), metavar="SECONDS", help="Maximum seconds to wait. [default: no limit]"
)
@common_options
def wait(job: str, timeout_seconds: float | None, home: str | None, output: Output) -> int:
    """Wait until JOB ends.

    Exit codes: 0 completed; 1 completed with errors, or failed; 6 cancelled; 7 timeout.

    \b
    Examples:
      nightjar wait JOB --timeout 3600
    """
    with found_job(job, home) as (settings, ledger, found), Progress(quiet=output.quiet) as progress:
        status = until_end(lambda: ledger.status(found.id), progress, settings, timeout_seconds)
    if output.as_json:
        output.data(status_view(status, settings.price_per_gpu_hour))
    else:
        output.note(f"{found.id} is {status.job.state.value}.")
    return exit_code_of(status.job.state)


@click.command()
@job_argument
@common_options
def watch(job: str, home: str | None, output: Output) -> int:
    """Show the progress of JOB until it ends, then its status.

    With --json, print one status per line at each change. Exit codes are those of `nightjar wait`.

    \b
    Examples:
      nightjar watch JOB
    """
    last = None
    with found_job(job, home) as (settings, ledger, found), Progress(quiet=output.quiet or output.as_json) as progress:

        def read() -> JobStatus:
            nonlocal last
            status = ledger.status(found.id)
            counts = (status.job.state, status.items, status.workers)
            if output.as_json and counts != last:
                output.data(status_view(status, settings.price_per_gpu_hour))
                sys.stdout.flush()
            last = counts
            return status

        status = until_end(read, progress, settings)
    if not output.as_json:
        for line in status_lines(status, settings.price_per_gpu_hour):
            output.line(line)
    return exit_code_of(status.job.state)
