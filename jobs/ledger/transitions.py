"""State transitions of items, shards and jobs, without SQL."""

from __future__ import annotations

from enum import StrEnum
from math import comb

from jobs.ledger.records import ItemState, JobState
from pipelines.errors import ErrorCode

#: From this number of ended items, their failure rate is compared with the error budget directly.
BUDGET_MIN_ITEMS = 100
#: With fewer, the budget counts as exceeded if the probability of that many failures, at the failure rate
#: that the budget allows, is less than this.
BUDGET_CHANCE = 0.001
MAX_BACKOFF_SECONDS = 300.0


class Verdict(StrEnum):
    """What to do with a shard whose lease crashed."""

    RETRY = "retry"
    BISECT = "bisect"
    #: Its only open item crashed its worker each time.
    MARK_DEAD = "mark_dead"
    #: No item is open.
    CLOSE = "close"


def after_crash(open_items: int, attempts: int, max_attempts: int, progressed: bool) -> tuple[Verdict, int]:
    """What to do after a crashed lease, and the new number of attempts. If items ended under the lease before
    it crashed, it counts as the first attempt."""
    attempts = 1 if progressed else attempts + 1
    if attempts < max_attempts:
        return Verdict.RETRY, attempts
    verdicts = {0: Verdict.CLOSE, 1: Verdict.MARK_DEAD}
    return verdicts.get(open_items, Verdict.BISECT), attempts


def attempts_after_bisection(open_items: int, max_attempts: int) -> int:
    """Attempts counted for a new half: a half with several items is split at its next crash; a single item
    gets all attempts."""
    return 0 if open_items == 1 else max_attempts - 1


def after_failure(attempts: int, max_attempts: int, code: ErrorCode) -> ItemState:
    """The state of an item after `attempts` failures."""
    return ItemState.PENDING if code.retryable and attempts < max_attempts else ItemState.FAILED


def backoff_seconds(attempts: int, jitter: float, base_seconds: float = 1.0) -> float:
    """Seconds to wait before attempt `attempts` + 1: `base_seconds` * 2^attempts up to 300, times 0.5 to 1
    by `jitter` in [0, 1)."""
    return min(MAX_BACKOFF_SECONDS, base_seconds * 2.0 ** min(attempts, 16)) * (0.5 + jitter / 2)


def over_budget(error_budget: float, done: int, failed: int, pending: int) -> bool:
    """Whether too many items have failed since the start or the last resume.

    This is so if the budget is exceeded even when all pending items succeed. Otherwise it depends on the
    ended items: for 100 or more on their failure rate, for fewer on the probability of that many failures at
    the failure rate that the budget allows.
    """
    ended = done + failed
    if not failed or failed / ended <= error_budget:
        return False
    if failed / (ended + pending) > error_budget or ended >= BUDGET_MIN_ITEMS:
        return True
    # The probability of at least `failed` failures among `ended` independent items (binomial).
    chances = (
        comb(ended, count) * error_budget**count * (1 - error_budget) ** (ended - count)
        for count in range(failed, ended + 1)
    )
    return sum(chances) < BUDGET_CHANCE


def final_state(failed: int, rejected_lines: int) -> JobState:
    """The final state of a job without open shards."""
    return JobState.COMPLETED_WITH_ERRORS if failed or rejected_lines else JobState.COMPLETED
