"""The thread that runs a job for a program: errors that are raised or printed once, and interrupts of the program."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from jobs.console import Stop
from jobs.ledger.records import Job
from nightjar.local_thread import LocalThread
from pipelines.errors import ErrorCode, ServiceError

JOB = cast(Job, type("Job", (), {"id": "job-1"})())
FAILURE = ServiceError(ErrorCode.LEDGER_STATE, "The disk is full.", "Make room.")

Submitted = Callable[[Job], None]


def started(run: Callable[[Any, Stop, Submitted], None]) -> LocalThread:
    return LocalThread(run, quiet=True)


def fails_later(_progress: object, _stop: Stop, submitted: Submitted) -> None:
    submitted(JOB)
    raise FAILURE


def fails_at_once(_progress: object, _stop: Stop, _submitted: Submitted) -> None:
    raise FAILURE


def interrupted_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that Ctrl-C interrupts the first time."""
    left = [KeyboardInterrupt()]

    def called(*given: Any) -> Any:
        if left:
            raise left.pop()
        return call(*given)

    return called


def test_an_error_that_no_one_asked_for_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    thread = started(fails_later)
    assert thread.until_submitted() is JOB
    thread.end_with_program()
    assert capsys.readouterr().err == f"Job job-1 has not ended: {FAILURE}\n"
    # The end of these tests would print it again.
    thread.error = None


def test_an_error_that_was_raised_is_not_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    thread = started(fails_at_once)
    with pytest.raises(ServiceError, match="disk is full"):
        thread.until_submitted()
    thread.end_with_program()
    assert capsys.readouterr().err == ""


def test_an_interrupt_before_the_job_is_known_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int | None]()

    def run(_progress: object, stop: Stop, _submitted: Submitted) -> None:
        deadline = time.monotonic() + 60
        while stop.number is None and time.monotonic() < deadline:
            time.sleep(0.01)
        asked.append(stop.number)

    thread = started(run)
    monkeypatch.setattr(thread._job_known, "wait", interrupted_once(thread._job_known.wait))
    with pytest.raises(KeyboardInterrupt):
        thread.until_submitted()
    assert asked == [signal.SIGINT]
    assert not thread.is_alive()


def test_a_second_interrupt_ends_the_processes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()

    def run(_progress: object, stop: Stop, submitted: Submitted) -> None:
        stop.kill = killed.set
        submitted(JOB)
        killed.wait(60)

    thread = started(run)
    thread.until_submitted()
    monkeypatch.setattr(thread, "join", interrupted_once(thread.join))
    with pytest.raises(KeyboardInterrupt):
        thread.stop()
    assert killed.is_set()
    thread.join()
