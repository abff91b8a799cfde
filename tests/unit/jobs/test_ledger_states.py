"""What becomes of items, shards and jobs, without a database."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from jobs.ledger.lifecycle import (
    AfterCrash,
    after_crash,
    after_failure,
    attempts_after_bisection,
    backoff_seconds,
    final_state,
    over_budget,
)
from jobs.ledger.records import ItemState, JobState
from pipelines.errors import ErrorCode


def test_a_crash_costs_an_attempt() -> None:
    assert after_crash(open_items=8, attempts=0, max_attempts=3, progressed=False) == ("retry", 1)
    assert after_crash(open_items=8, attempts=1, max_attempts=3, progressed=False) == ("retry", 2)


def test_progress_starts_the_count_of_attempts_anew() -> None:
    assert after_crash(open_items=8, attempts=2, max_attempts=3, progressed=True) == ("retry", 1)


@pytest.mark.parametrize(
    ("open_items", "verdict"),
    [(8, "bisect"), (2, "bisect"), (1, "mark_dead"), (0, "close")],
)
def test_the_last_attempt_decides_by_what_is_open(open_items: int, verdict: AfterCrash) -> None:
    assert after_crash(open_items, attempts=2, max_attempts=3, progressed=False)[0] == verdict


def test_poison_is_found_by_halving() -> None:
    """A shard of 256 with one poisoned item ends after so many crashes, and only the single item had all
    its attempts alone."""
    open_items, attempts, crashes = 256, 0, 0
    while True:
        crashes += 1
        verdict, attempts = after_crash(open_items, attempts, 3, progressed=False)
        if verdict == "mark_dead":
            break
        if verdict == "bisect":
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


def test_the_error_budget_compares_shares_from_a_hundred_items_on() -> None:
    assert over_budget(0.1, done=89, failed=11, pending=10_000)
    assert not over_budget(0.1, done=90, failed=10, pending=10_000)
    assert over_budget(0.5, done=0, failed=100, pending=10_000)


def test_of_fewer_items_the_budget_is_spent_by_what_chance_does_not_explain() -> None:
    assert [over_budget(0.05, 0, failed, 10_000) for failed in (1, 2, 3)] == [False, False, True]
    assert [over_budget(0.05, 20, failed, 10_000) for failed in (2, 6, 7)] == [False, False, True]
    # Of a thousand jobs that keep their budget nearly none is stopped before its hundredth item.
    chooser, stopped = random.Random(7), 0
    for _ in range(1000):
        failed = 0
        for ended in range(1, 100):
            failed += chooser.random() < 0.05
            if over_budget(0.05, ended - failed, failed, 10_000):
                stopped += 1
                break
    assert stopped <= 10


def test_a_small_job_spends_its_budget_when_it_cannot_keep_it() -> None:
    assert not over_budget(0.1, done=0, failed=3, pending=27)
    assert over_budget(0.1, done=15, failed=4, pending=11)
    assert over_budget(0.0, done=0, failed=1, pending=5)
    assert not over_budget(1.0, done=0, failed=5, pending=0)


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
    """Without what `jobs.ledger.records` does at its import, about every second of these processes is
    ended by SIGSEGV."""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
