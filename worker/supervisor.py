"""Supervision of workers: the loop that keeps a group of workers running, and a worker's reports to the supervisor
(the process that started it)."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from functools import cache

from jobs.formatting import redact
from jobs.worker_group import WorkerGroup, WorkerReport
from pipelines.child_process import has_parent, parent_channel
from pipelines.errors import ConfigError, ModelError
from pipelines.ipc import Channel

POLL_SECONDS = 0.2
_MAX_CHARACTERS = 2000


def run_group(group: WorkerGroup) -> int:
    """Keeps the workers running until a signal, or until all are quarantined. Returns the exit status: 0
    after a drain, 1 if a worker is quarantined."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda received, _: group.send_signal(received))
    group.release()
    group.start()
    while not group.has_ended:
        group.poll()
        time.sleep(POLL_SECONDS)
    # If all workers are quarantined, their last report remains in the ledger, which later counts the workers as lost.
    group.reports.close(all_ended=group.ending is not None)
    if not group.quarantined:
        return 0
    event = "no worker can work; the supervisor ends" if group.ending is None else "workers were quarantined"
    gpus, reasons = zip(*((member.plan.gpu, str(member)) for member in group.quarantined), strict=True)
    group.on_event("error", event, {"gpus": gpus, "reasons": reasons, "workers": len(group.members)})
    return 1


@cache
def _parent() -> Channel[bool] | None:
    """The channel to the supervisor, if there is one."""
    return parent_channel(bool) if has_parent() else None


def is_supervised() -> bool:
    """Whether the process that started this one restarts it when it ends."""
    return _parent() is not None


def wait_for_release() -> bool:
    """Waits until the supervisor permits work; False if the supervisor has ended. True without a supervisor."""
    if (parent := _parent()) is None:
        return True
    with suppress(EOFError, OSError):
        return parent.receive()
    return False


def report(message: WorkerReport) -> None:
    """Sends a report to the supervisor, if there is one."""
    if (parent := _parent()) is not None:
        with suppress(OSError):
            parent.send(message)


def report_end(reason: str) -> None:
    """Reports why this process ends."""
    report(WorkerReport(last_message=_plain(reason)))


def report_refusal(error: ConfigError | ModelError) -> None:
    """Reports that restarts cannot help, because a person must correct a setting or the model."""
    report(WorkerReport(refusal=type(error)(error.code, _plain(error.message), _plain(error.advice))))


def _plain(text: str) -> str:
    """The text on one line, without passwords."""
    return redact(" ".join(text.split()))[:_MAX_CHARACTERS]
