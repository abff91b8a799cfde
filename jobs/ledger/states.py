"""What becomes of items, shards and jobs: pure decisions, apart from SQL."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import comb

from jobs.ledger.records import ItemState, JobState, ShardState
from pipelines.errors import ErrorCode

#: Jobs whose leases are valid: outcomes are taken.
WORKING = (JobState.READY, JobState.RUNNING, JobState.PAUSED)
#: Jobs whose shards are handed out.
DISPATCHED = (JobState.READY, JobState.RUNNING)
#: Jobs whose failed items can be opened again.
RETRYABLE_JOBS = (*WORKING, JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS)
#: Shards that still have to end.
OPEN_SHARDS = (ShardState.READY, ShardState.QUEUED, ShardState.LEASED)
#: Items that ended with an error.
BROKEN_ITEMS = (ItemState.FAILED, ItemState.DEAD)

#: From this number of ended items, their share of failures is compared with the error budget as it is.
BUDGET_MIN_ITEMS = 100
#: With fewer, the budget is spent when a job within its budget would have that many failures in one of a
#: thousand cases.
BUDGET_CHANCE = 0.001
MAX_BACKOFF_SECONDS = 300.0
#: How far a time of the ledger may lie ahead of its clock: one statement reads the clock a moment before
#: another writes.
CLOCK_SLACK_SECONDS = 10.0
#: How long the worker that ended a job may take to write its manifest.
MANIFEST_GRACE_SECONDS = 60.0

#: A service was down or refused: says nothing about the shard, so it spends no attempt.
OUTAGES = frozenset(
    {
        ErrorCode.STORE_UNREACHABLE,
        ErrorCode.STORE_FULL,
        ErrorCode.STORE_FORBIDDEN,
        ErrorCode.LEDGER_UNREACHABLE,
        ErrorCode.BROKER_UNREACHABLE,
        ErrorCode.MODEL_UNREACHABLE,
    }
)

#: What is wrong with one worker, its settings or its copy of a model: another worker may run the shard.
WORKER_FAULTS = frozenset(
    {
        ErrorCode.CONFIG_INVALID,
        ErrorCode.CONFIG_MISSING_LIBRARY,
        ErrorCode.MODEL_UNKNOWN,
        ErrorCode.MODEL_BAD_CHECKPOINT,
        ErrorCode.MODEL_MISSING_EXTRA,
    }
)

#: States of a worker process: it works; it gave back what it held and ended; its heartbeats stopped.
UP, RETIRED, LOST = "up", "retired", "lost"
#: State of the place of a worker that keeps failing, reported by the process that starts it.
QUARANTINED = "quarantined"
#: A worker whose last heartbeat is older is not counted as live.
LIVE_SECONDS = 60.0

#: Outages that end a lease at once: a person has to repair them, and other jobs may need the worker until
#: then.
LASTING_OUTAGES = frozenset({ErrorCode.STORE_FULL, ErrorCode.STORE_FORBIDDEN})


class AttemptOutcome(StrEnum):
    """How a lease ended."""

    #: Every item of the shard has ended.
    DONE = "done"
    #: Ended well with items that wait for another attempt.
    PARTIAL = "partial"
    #: Given back by a draining worker.
    RELEASED = "released"
    #: Given back by a worker that cannot run it, while another one may.
    REFUSED = "refused"
    #: The worker reported that the shard as a whole failed.
    FAILED = "failed"
    #: The lease ran out: the worker died, hung, or lost the ledger.
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """What to do with a shard whose lease crashed."""

    RETRY = "retry"
    BISECT = "bisect"
    #: Its only open item killed its workers each time: the item dies.
    MARK_DEAD = "mark_dead"
    #: Nothing is open any more.
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class AfterCrash:
    verdict: Verdict
    attempts: int


def after_crash(open_items: int, attempts: int, max_attempts: int, progressed: bool) -> AfterCrash:
    """Judges a crashed lease. A lease that ended items before it crashed starts the count of attempts
    anew."""
    attempts = 1 if progressed else attempts + 1
    if attempts < max_attempts:
        return AfterCrash(Verdict.RETRY, attempts)
    if open_items == 0:
        return AfterCrash(Verdict.CLOSE, attempts)
    if open_items == 1:
        return AfterCrash(Verdict.MARK_DEAD, attempts)
    return AfterCrash(Verdict.BISECT, attempts)


def last_attempt(attempts: int, max_attempts: int) -> bool:
    """Whether a crash of the attempt after `attempts` others is judged, rather than tried again."""
    return attempts + 1 >= max_attempts


def attempts_after_bisection(open_items: int, max_attempts: int) -> int:
    """Attempts that a half starts with: a half of several items splits at its next crash; a single item
    gets all its attempts alone."""
    return 0 if open_items == 1 else max_attempts - 1


def after_failure(attempts: int, max_attempts: int, code: ErrorCode) -> ItemState:
    """The state of an item after its failure number `attempts`."""
    return ItemState.PENDING if code.retryable and attempts < max_attempts else ItemState.FAILED


def backoff_seconds(attempts: int, jitter: float, base_seconds: float = 1.0) -> float:
    """Seconds to wait before attempt `attempts` + 1: `base_seconds` * 2^attempts up to 300, times 0.5 to 1
    by `jitter` in [0, 1)."""
    return min(MAX_BACKOFF_SECONDS, base_seconds * 2.0 ** min(attempts, 16)) * (0.5 + jitter / 2)


def over_budget(error_budget: float | None, done: int, failed: int, pending: int) -> bool:
    """Whether a job has failed too often since its start or its last resume.

    It has when it cannot end within its budget any more, even if all pending items succeed. Before that,
    the ended items count: a hundred and more by their share of failures, fewer by the probability of that
    many failures at the budget's rate.
    """
    ended = done + failed
    if error_budget is None or not failed or failed / ended <= error_budget:
        return False
    if failed / (ended + pending) > error_budget or ended >= BUDGET_MIN_ITEMS:
        return True
    return _chance(failed, ended, error_budget) < BUDGET_CHANCE


def _chance(failed: int, ended: int, rate: float) -> float:
    """The probability of `failed` failures or more among `ended` items that fail at this rate, each for
    itself (binomial)."""
    return sum(
        comb(ended, count) * rate**count * (1 - rate) ** (ended - count) for count in range(failed, ended + 1)
    )


def final_state(failed: int, rejected_lines: int) -> JobState:
    """The state of a job none of whose shards is open."""
    return JobState.COMPLETED_WITH_ERRORS if failed or rejected_lines else JobState.COMPLETED
