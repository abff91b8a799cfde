"""The end of shards and jobs: closing of leases, crashes and bisection, completion of a job exactly once.

The transitions of states come first, without SQL. Functions that change rows require that the caller has
locked the rows of the job and the shard, in this order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb
from typing import Literal

from jobs.ledger.records import (
    DISPATCHED,
    ITEM_STATE_NUMBERS,
    OPEN_SHARDS,
    WORKING,
    AttemptOutcome,
    ItemState,
    JobState,
    ShardState,
    Ticket,
    clean,
)
from jobs.ledger.status import no_such_job
from jobs.ledger.transaction import Row, Transaction
from pipelines.errors import ErrorCode, ServiceError

#: The number of a job, as a subquery.
NUMBER = "(SELECT no FROM jobs WHERE id = :job)"
#: Condition for the items of a shard, a range of the primary key, with the parameters of `items_of`.
ITEMS_OF = "job_no = :job_no AND idx BETWEEN :first AND :last AND shard_no = :shard"
#: Condition for the items of a shard that have not ended.
PENDING_OF = f"{ITEMS_OF} AND state = {ITEM_STATE_NUMBERS[ItemState.PENDING]}"
#: Assignments that make a queued shard ready, so that its message becomes invalid.
UNQUEUED = "state = 'ready', enqueued_epoch = NULL, enqueued_at = NULL"

#: From this number of ended items, their failure rate is compared with the error budget directly.
BUDGET_MIN_ITEMS = 100
#: With fewer, the budget counts as exceeded if the probability of that many failures, at the failure rate
#: that the budget allows, is less than this.
BUDGET_CHANCE = 0.001
MAX_BACKOFF_SECONDS = 300.0


#: What to do with a shard whose lease crashed; its only open item has crashed its worker each time (`mark_dead`), or no
#: item is open (`close`).
AfterCrash = Literal["retry", "bisect", "mark_dead", "close"]


def after_crash(
    open_items: int, attempts: int, max_attempts: int, progressed: bool
) -> tuple[AfterCrash, int]:
    """What to do after a crashed lease, and the new number of attempts. If items ended under the lease before
    it crashed, it counts as the first attempt."""
    attempts = 1 if progressed else attempts + 1
    if attempts < max_attempts:
        return "retry", attempts
    return "close" if not open_items else "mark_dead" if open_items == 1 else "bisect", attempts


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


def lock_job(sql: Transaction, job_id: str) -> Row | None:
    """The row of a job, locked until the end of the transaction. To avoid deadlocks, lock it before its
    shards."""
    return sql.row("SELECT * FROM jobs WHERE id = :job FOR UPDATE", job=job_id)


def lock_known_job(sql: Transaction, job_id: str, verb: str = "", *states: JobState) -> Row:
    """As `lock_job`. Raises `NotFoundError`, and `ServiceError` with `ledger.state` if the job is in none of
    the given states and so cannot be, for example, "paused" (`verb`)."""
    job = lock_job(sql, job_id)
    if job is None:
        raise no_such_job(job_id)
    if states and job.state not in states:
        raise ServiceError(
            ErrorCode.LEDGER_STATE,
            f"Job {job.id} is {job.state}, so it cannot be {verb}.",
            f"See it with `nightjar status {job.id}`.",
        )
    return job


def lock_shard(sql: Transaction, job_id: str, shard_no: int) -> Row | None:
    """The row of a shard, with `max_attempts` of its job, locked until the end of the transaction."""
    statement = """
    SELECT shards.*, jobs.max_attempts FROM shards JOIN jobs ON jobs.id = shards.job_id
    WHERE shards.job_id = :job AND shards.no = :shard FOR UPDATE OF shards
    """
    return sql.row(statement, job=job_id, shard=shard_no)


def lock_lease(sql: Transaction, ticket: Ticket) -> Row | None:
    """Locks the job and the shard of a lease; returns the row of the shard. None: the lease was lost."""
    job = lock_job(sql, ticket.job_id)
    if job is None or job.state not in WORKING:
        return None
    shard = lock_shard(sql, ticket.job_id, ticket.shard_no)
    if shard is None or shard.epoch != ticket.epoch or shard.state != ShardState.LEASED:
        return None
    return shard


def of_ticket(ticket: Ticket) -> dict[str, object]:
    """The parameters of a statement about a shard at an epoch."""
    return {"job": ticket.job_id, "shard": ticket.shard_no, "epoch": ticket.epoch}


def items_of(shard: Row) -> dict[str, object]:
    """The parameters of `ITEMS_OF`."""
    return {"job_no": shard.job_no, "first": shard.first_index, "last": shard.last_index, "shard": shard.no}


def open_items(shard: Row) -> int:
    """Number of items of a shard that have not ended."""
    return shard.n_items - shard.n_done - shard.n_failed - shard.n_skipped


def update_job(sql: Transaction, job_id: str, change: str, **values: object) -> None:
    """Sets columns of a job, whose id is `:job`."""
    sql.change(f"UPDATE jobs SET {change} WHERE id = :job", job=job_id, **values)


def update_shard(sql: Transaction, shard: Row, change: str, **values: object) -> None:
    """Sets columns of a shard."""
    sql.change(
        f"UPDATE shards SET {change} WHERE job_id = :of_job AND no = :of_shard",
        of_job=shard.job_id,
        of_shard=shard.no,
        **values,
    )


def move_to(sql: Transaction, shard: Row, state: ShardState, change: str = "", **values: object) -> None:
    """Moves a shard to a state in which it has neither a lease nor a message. `change` sets other columns."""
    unheld = (
        "worker_id = NULL, lease_until = NULL, heartbeat_at = NULL, enqueued_epoch = NULL, enqueued_at = NULL"
    )
    changes = ", ".join(filter(None, ("state = :to_state", unheld, change)))
    update_shard(sql, shard, changes, to_state=state, **values)


def ready_after(sql: Transaction, shard: Row, attempts_made: int, change: str, **values: object) -> None:
    """Makes a shard ready for its next attempt, after the backoff for `attempts_made`."""
    move_to(
        sql,
        shard,
        ShardState.READY,
        f"not_before = <now> + :pause, {change}",
        pause=backoff_seconds(attempts_made, random.random(), sql.backoff_seconds),
        **values,
    )


def ended_items(sql: Transaction, job_id: str) -> tuple[int, int]:
    """(items done, items failed) of a job."""
    statement = """
    SELECT CAST(COALESCE(sum(n_done), 0) AS BIGINT), CAST(COALESCE(sum(n_failed), 0) AS BIGINT)
    FROM shards WHERE job_id = :job
    """
    return sql.rows(statement, job=job_id)[0]


def end_attempt(
    sql: Transaction,
    shard: Row,
    outcome: AttemptOutcome,
    code: ErrorCode | None = None,
    message: str | None = None,
) -> None:
    """Ends the row of a lease in `attempts`. An expired lease ends at its expiry, not at the time of this
    call."""
    # A lease does not end before its last heartbeat.
    statement = """
    UPDATE attempts SET outcome = :outcome, error_code = :code, error_message = :message, (ended_at, n_ok, n_failed) = (
        SELECT CASE WHEN :expired = 0 THEN <now> WHEN heartbeat_at > lease_until THEN heartbeat_at ELSE lease_until END,
            n_done - claimed_done, CASE WHEN shards.n_failed > claimed_failed THEN shards.n_failed - claimed_failed ELSE 0 END
        FROM shards WHERE job_id = :job AND no = :shard
    )
    WHERE job_id = :job AND shard_no = :shard AND epoch = :epoch
    """
    sql.change(
        statement,
        job=shard.job_id,
        shard=shard.no,
        epoch=shard.epoch,
        outcome=outcome,
        expired=int(outcome == "expired"),
        code=code,
        message=None if message is None else clean(message),
    )


def progressed(shard: Row) -> bool:
    """Whether any items ended under the present lease."""
    return shard.n_done + shard.n_failed > shard.claimed_done + shard.claimed_failed


def crash(sql: Transaction, shard: Row, message: str) -> AfterCrash:
    """Handles a lease that ended without outcomes for its pending items: another attempt, a bisection, or a
    dead item. The caller completes the job if that was its last open shard."""
    verdict, attempts = after_crash(open_items(shard), shard.attempts, shard.max_attempts, progressed(shard))
    change = "attempts = :attempts"
    if verdict == "retry":
        ready_after(sql, shard, attempts, change, attempts=attempts)
    elif verdict == "bisect":
        bisect(sql, shard)
    else:
        dead = verdict == "mark_dead"
        if dead:
            end_items(sql, shard, ItemState.DEAD, ErrorCode.POISON_WORKER_CRASH, message)
        move_to(sql, shard, ShardState.DEAD if dead else ShardState.DONE, change, attempts=attempts)
    return verdict


def bisect(sql: Transaction, shard: Row) -> None:
    """Moves the upper half of the pending items to a new shard with the same input object."""
    pending = sql.column(f"SELECT idx FROM items WHERE {PENDING_OF} ORDER BY idx", **items_of(shard))
    upper = pending[len(pending) // 2 :]
    kept = len(pending) - len(upper)
    number = sql.value("SELECT max(no) + 1 FROM shards WHERE job_id = :job", job=shard.job_id)
    sql.change(
        f"UPDATE items SET shard_no = :number WHERE {PENDING_OF}",
        number=number,
        **items_of(shard) | {"first": upper[0]},
    )
    estimate = shard.estimated_ms * len(upper) // max(1, shard.n_items)
    # The new shard keeps the epoch, so that the epoch of each item only increases.
    half = """
    INSERT INTO shards (job_id, job_no, no, first_index, last_index, n_items, estimated_ms, epoch, attempts,
        input_key, input_sha256, not_before)
    SELECT job_id, job_no, :number, :first, :last, :moved, :estimate, epoch, :attempts, input_key, input_sha256, <now> + :pause
    FROM shards WHERE job_id = :job AND no = :shard
    """
    sql.change(
        half,
        job=shard.job_id,
        shard=shard.no,
        number=number,
        first=upper[0],
        last=upper[-1],
        moved=len(upper),
        estimate=estimate,
        attempts=attempts_after_bisection(len(upper), shard.max_attempts),
        pause=backoff_seconds(1, random.random(), sql.backoff_seconds),
    )
    ready_after(
        sql,
        shard,
        1,
        "n_items = n_items - :moved, estimated_ms = estimated_ms - :estimate, attempts = :attempts",
        moved=len(upper),
        estimate=estimate,
        attempts=attempts_after_bisection(kept, shard.max_attempts),
    )
    update_job(sql, shard.job_id, "total_shards = total_shards + 1")


def end_items(sql: Transaction, shard: Row, state: ItemState, code: ErrorCode, message: str) -> None:
    """Ends all pending items of a shard with one error, and counts them."""
    pending = sql.column(f"SELECT idx FROM items WHERE {PENDING_OF}", **items_of(shard))
    record_errors(sql, shard, [(index, code, message) for index in pending])
    change = "state = :to_state, error_code = :code, error_message = :message, attempts = attempts + 1"
    ended = sql.change(
        f"UPDATE items SET {change} WHERE {PENDING_OF}",
        to_state=ITEM_STATE_NUMBERS[state],
        code=code,
        message=clean(message),
        **items_of(shard),
    )
    update_shard(sql, shard, "n_failed = n_failed + :ended", ended=ended)


def record_errors(sql: Transaction, shard: Row, errors: Sequence[tuple[int, ErrorCode, str]]) -> None:
    """Inserts rows of `item_errors`, which keep the last error of an item under each lease."""
    rows = [
        {
            "job_no": shard.job_no,
            "idx": index,
            "epoch": shard.epoch,
            "code": code.value,
            "message": clean(message),
            "retryable": code.retryable,
        }
        for index, code, message in errors
    ]
    conflict = """
    ON CONFLICT (job_no, idx, epoch)
    DO UPDATE SET code = excluded.code, message = excluded.message, retryable = excluded.retryable, at = excluded.at
    """
    sql.insert("item_errors", rows, conflict, at="<now>")


def has_open_shards(sql: Transaction, job_id: str) -> bool:
    # One EXISTS for each state uses the partial indexes; one statement does not miss a shard whose state
    # changes meanwhile.
    some = " OR ".join(
        f"EXISTS (SELECT 1 FROM shards WHERE job_id = :job AND state = '{state}')" for state in OPEN_SHARDS
    )
    return bool(sql.value(f"SELECT {some}", job=job_id))


def complete_or_pause(sql: Transaction, job_id: str) -> None:
    """Completes a job whose shards have all ended, exactly once thanks to the lock on the job, or pauses one
    that is over its error budget. Must not run in the transaction of a commit, which has locked a shard and
    must not lock the job after it."""
    job = lock_job(sql, job_id)
    if job is None or job.state not in WORKING:
        return
    if not has_open_shards(sql, job_id):
        state = final_state(ended_items(sql, job_id)[1], job.rejected_lines)
        update_job(sql, job_id, "state = :state, state_reason = '', finished_at = <now>", state=state)
        return
    reason = spent_budget(sql, job)
    if reason is not None:
        pause_job(sql, job_id, reason)


def spent_budget(sql: Transaction, job: Row) -> str | None:
    """The reason to pause a dispatched job that is over its error budget, or None."""
    if job.error_budget is None or job.state not in DISPATCHED:
        return None
    done, failed = ended_items(sql, job.id)
    pending = max(0, job.total_items - done - failed)
    done = max(0, done - job.budget_from_done)
    failed = max(0, failed - job.budget_from_failed)
    if not over_budget(job.error_budget, done, failed, pending):
        return None
    return f"error budget: {failed} of {done + failed} items failed, more than {job.error_budget:.1%}"


def pause_job(sql: Transaction, job_id: str, reason: str) -> None:
    """Pauses a job: its messages become invalid at once; its leases continue."""
    update_job(sql, job_id, "state = 'paused', state_reason = :reason", reason=clean(reason))
    sql.change(f"UPDATE shards SET {UNQUEUED} WHERE job_id = :job AND state = 'queued'", job=job_id)
