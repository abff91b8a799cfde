"""What becomes of items, shards and jobs, without a database."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs.ledger.records import ItemState, JobState
from jobs.ledger.states import (
    AfterCrash,
    Verdict,
    after_crash,
    after_failure,
    attempts_after_bisection,
    backoff_seconds,
    final_state,
    over_budget,
)
from pipelines.errors import ErrorCode


def test_a_crash_costs_an_attempt() -> None:
    assert after_crash(open_items=8, attempts=0, max_attempts=3, progressed=False) == AfterCrash(Verdict.RETRY, 1)
    assert after_crash(open_items=8, attempts=1, max_attempts=3, progressed=False) == AfterCrash(Verdict.RETRY, 2)


def test_progress_starts_the_count_of_attempts_anew() -> None:
    assert after_crash(open_items=8, attempts=2, max_attempts=3, progressed=True) == AfterCrash(Verdict.RETRY, 1)


@pytest.mark.parametrize(("open_items", "verdict"), [(8, Verdict.BISECT), (2, Verdict.BISECT), (1, Verdict.BURY), (0, Verdict.CLOSE)])
def test_the_last_attempt_decides_by_what_is_open(open_items: int, verdict: Verdict) -> None:
    assert after_crash(open_items, attempts=2, max_attempts=3, progressed=False).verdict is verdict


def test_poison_is_found_by_halving() -> None:
    """A shard of 256 with one poisoned item ends after so many crashes, and only the single item had all its attempts alone."""
    open_items, attempts, crashes = 256, 0, 0
    while True:
        crashes += 1
        after = after_crash(open_items, attempts, 3, progressed=False)
        attempts = after.attempts
        if after.verdict is Verdict.BURY:
            break
        if after.verdict is Verdict.BISECT:
            open_items //= 2
            attempts = attempts_after_bisection(open_items, 3)
    assert open_items == 1
    assert crashes == 3 + 7 + 3


def test_only_retryable_failures_wait_for_another_attempt() -> None:
    assert after_failure(1, 3, ErrorCode.SYNTH_OOM) is ItemState.PENDING
    assert after_failure(3, 3, ErrorCode.SYNTH_OOM) is ItemState.FAILED
    assert after_failure(1, 3, ErrorCode.SYNTH_NO_EOS) is ItemState.FAILED


def test_backoff_doubles_up_to_a_limit_and_is_jittered() -> None:
    assert [backoff_seconds(n, 1.0) for n in (0, 1, 2, 3)] == [1.0, 2.0, 4.0, 8.0]
    assert backoff_seconds(3, 0.0) == 4.0
    assert backoff_seconds(10_000, 1.0) == 300.0


def test_the_error_budget_waits_for_a_hundred_items() -> None:
    assert not over_budget(0.1, done=0, failed=99)
    assert over_budget(0.1, done=89, failed=11)
    assert not over_budget(0.1, done=90, failed=10)
    assert not over_budget(None, done=0, failed=1000)


def test_a_job_ends_with_errors_when_a_line_or_an_item_is_missing() -> None:
    assert final_state(0, 0) is JobState.COMPLETED
    assert final_state(1, 0) is JobState.COMPLETED_WITH_ERRORS
    assert final_state(0, 1) is JobState.COMPLETED_WITH_ERRORS


FIRST_USE = """
import sys, threading, msgspec
sys.setswitchinterval(1e-6)
from jobs.ledger.records import JobSpec, Score
start = threading.Barrier(8)
def read():
    start.wait()
    for _ in range(50):
        msgspec.convert({"model": "m", "generation": {"seed": 1}, "quality": {"draws": 2}}, JobSpec)
        msgspec.convert({"wer": [0.5, None, ""]}, dict[str, Score])
threads = [threading.Thread(target=read) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_many_threads_may_be_the_first_to_read_a_job() -> None:
    """Without what `jobs.ledger.records` does at its import, about every second of these processes is ended by SIGSEGV."""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
