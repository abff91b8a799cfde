"""Reports ended jobs to the operator: runs a command, the hook, with the job's status on its standard input.

The command is set by the installation, never by a job. Each end is reported at least once, by one process at
a time: it is claimed in the ledger before the hook runs, and recorded there after the hook has accepted it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from jobs.formatting import printable, redact
from jobs.ledger import Ledger
from jobs.ledger.control import JobEnd
from jobs.ledger.lifecycle import backoff_seconds
from jobs.ledger.status import status_and_errors
from jobs.settings import NotifySettings, Settings
from jobs.status import status_view
from pipelines.child_process import signal_group
from pipelines.errors import NotFoundError

#: Time after the time limit of the hook, until another process may report the same end.
_CLAIM_SLACK_SECONDS = 30.0
#: Maximum number of tries to report the end of a job.
MAX_ATTEMPTS = 20
FIRST_PAUSE_SECONDS = 5.0
_SHOWN_BYTES = 400


class Reported(NamedTuple):
    """The result of one try to report the end of a job."""

    job_id: str
    attempt: int
    #: Why the hook did not accept the report; empty if it did.
    reason: str = ""
    #: Seconds until the next try; None: there is no further try.
    again_seconds: float | None = None


def report_ends(ledger: Ledger, settings: Settings, *, again_seconds: float | None = None) -> list[Reported]:
    """Reports the ends of jobs whose reports are due, if a hook is set. `again_seconds`: time until a failed
    report is retried; None: growing pauses up to 300 s. Raises `ServiceError` if the ledger cannot be
    reached."""
    if not settings.notify.command:
        return []
    found = (_report(ledger, settings, end, again_seconds) for end in ledger.unreported_ends())
    return [one for one in found if one is not None]


def say_ends(ledger: Ledger, settings: Settings, say: Callable[[str], object]) -> None:
    """Reports ends of jobs in a home, where no worker does so; `say` is called with the failures. A failing hook does not
    fail the command, and the next one tries again."""
    for one in report_ends(ledger, settings, again_seconds=0.0):
        if one.reason:
            again = "" if one.again_seconds is None else " The next run in this folder retries it."
            say(f"The end of job {one.job_id} was not reported: {printable(one.reason)}.{again}")


def _report(ledger: Ledger, settings: Settings, end: JobEnd, again_seconds: float | None) -> Reported | None:
    notify = settings.notify
    attempt = ledger.claim_end(end, notify.timeout_seconds + _CLAIM_SLACK_SECONDS)
    if attempt is None:
        return None
    try:
        status, errors = ledger.read(status_and_errors, end.job_id)
    except NotFoundError:
        return None
    if status.job.finished_at != end.finished_at:
        # The job was retried meanwhile, so this is no longer its end.
        return None
    view = status_view(status, settings.price_per_gpu_hour, errors)
    # A hook can recognize repeated reports by `end`, which is the same for each try.
    reason = run_hook(notify, {**view, "end": f"{end.job_id}/{end.finished_at:.3f}"})
    if not reason or attempt >= MAX_ATTEMPTS:
        again_seconds = None
    elif again_seconds is None:
        again_seconds = backoff_seconds(attempt - 1, random.random(), FIRST_PAUSE_SECONDS)
    ledger.note_report(end, again_seconds)
    return Reported(end.job_id, attempt, reason, again_seconds)


def run_hook(notify: NotifySettings, view: Mapping[str, Any]) -> str:
    """Runs the command with a view as its input. Returns why it failed, without secrets; empty if it did not."""
    variables = {"NIGHTJAR_JOB": view["job"], "NIGHTJAR_STATE": view["state"], "NIGHTJAR_END": view["end"]}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(msgspec.json.encode(view))
        given.seek(0)
        try:
            process = subprocess.Popen(
                notify.command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            return f"the command {notify.command[0]!r} cannot be started: {error.strerror}"
        try:
            status = process.wait(notify.timeout_seconds)
        except subprocess.TimeoutExpired:
            # The group includes the child processes of the command.
            signal_group(process, signal.SIGKILL)
            process.wait()
            return f"the command did not end within {notify.timeout_seconds:g} s"
        if not status:
            return ""
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        words = redact(errors.read().decode(errors="replace").strip())
        return f"the command ended with status {status}{f': {words}' if words else ''}"
