"""Reports the ends of jobs to the operator: a command, the hook, gets the job's view on its standard input.

It comes from the settings of the installation and never from a job. Each end is reported at least once, by
one sender at a time: it is claimed in the ledger first, and noted there after the hook has taken it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.formatting import redact
from jobs.ledger.control import JobEnd
from jobs.ledger.records import backoff_seconds
from jobs.ledger.status import status_and_errors
from jobs.status import status_view
from pipelines.child_process import signal_group
from pipelines.errors import NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import NotifySettings, Settings

#: Over the time that the hook may take, before another sender counts this one as dead.
_CLAIM_SLACK_SECONDS = 30.0
#: Tries to report one end.
MAX_ATTEMPTS = 20
FIRST_PAUSE_SECONDS = 5.0
_SHOWN_BYTES = 400


class HookError(Exception):
    """A hook did not take an end; its message says why, without secrets."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What became of one try to report an end."""

    job_id: str
    attempt: int
    #: Why the hook did not take it; empty: it did.
    reason: str = ""
    #: Seconds to the next try; None: there is none.
    again_seconds: float | None = None


def report_ends(ledger: Ledger, settings: Settings, *, again_seconds: float | None = None) -> list[Reported]:
    """Reports the ends that are due, if the settings name a hook. `again_seconds`: until the next try of
    one that fails; None: growing pauses up to 300 s. Raises `ServiceError` where the ledger cannot be
    reached."""
    if not settings.notify.command:
        return []
    found = (_report(ledger, settings, end, again_seconds) for end in ledger.unreported_ends())
    return [one for one in found if one is not None]


def _report(ledger: Ledger, settings: Settings, end: JobEnd, again_seconds: float | None) -> Reported | None:
    notify = settings.notify
    attempt = ledger.claim_end(end, notify.timeout_seconds + _CLAIM_SLACK_SECONDS)
    if attempt is None:
        return None
    try:
        status, errors = ledger.read(lambda reader: status_and_errors(reader, end.job_id))
    except NotFoundError:
        return None
    if status.job.finished_at != end.finished_at:
        # It is retried meanwhile, and its next end is another one.
        return None
    view = status_view(status, settings.price_per_gpu_hour, errors)
    reason = ""
    try:
        # The same for each try to report this end.
        run_hook(notify, {**view, "end": f"{end.job_id}/{end.finished_at:.3f}"})
    except HookError as error:
        reason = str(error)
        if attempt < MAX_ATTEMPTS:
            if again_seconds is None:
                again_seconds = backoff_seconds(attempt - 1, random.random(), FIRST_PAUSE_SECONDS)
            ledger.postpone_report(end, again_seconds)
            return Reported(end.job_id, attempt, reason, again_seconds)
    ledger.note_reported(end)
    return Reported(end.job_id, attempt, reason)


def run_hook(notify: NotifySettings, view: Mapping[str, Any]) -> None:
    """Hands a view to the command. Raises `HookError` where it does not take it."""
    variables = {"NIGHTJAR_JOB": view["job"], "NIGHTJAR_STATE": view["state"], "NIGHTJAR_END": view["end"]}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as given:
        given.write(msgspec.json.encode(view))
        given.seek(0)
        try:
            process = subprocess.Popen(
                notify.command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | variables,
                start_new_session=True,
            )
        except OSError as error:
            raise HookError(
                f"the command {notify.command[0]!r} cannot be started: {error.strerror}"
            ) from error
        try:
            status = process.wait(notify.timeout_seconds)
        except subprocess.TimeoutExpired:
            # Also what the command itself started.
            signal_group(process, signal.SIGKILL)
            process.wait()
            raise HookError(f"the command did not end within {notify.timeout_seconds:g} s") from None
        if status:
            said.seek(max(0, said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            words = redact(said.read().decode(errors="replace").strip())
            raise HookError(f"the command ended with status {status}{f': {words}' if words else ''}")
