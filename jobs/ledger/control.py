"""What users decide about jobs: pause, resume, cancel, retry, priority, delete; the record of the nights
that ran; and which ends of jobs have to be reported to the operator's hook."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jobs.ledger.lifecycle import (
    ITEMS_OF,
    NUMBER,
    PENDING_OF,
    end_attempt,
    ended_items,
    items_of,
    lock_job,
    lock_known_job,
    move_to,
    pause_job,
    update_job,
    update_shard,
)
from jobs.ledger.records import (
    BROKEN_ITEMS,
    CLOCK_SLACK_SECONDS,
    DISPATCHED,
    FINAL,
    OPEN_SHARDS,
    RETRYABLE_JOBS,
    WORKING,
    AttemptOutcome,
    ItemState,
    JobState,
    ShardState,
)
from jobs.ledger.schema import ITEM_STATE_NUMBERS, ROWS_OF_JOBS
from jobs.ledger.transaction import Row, Transaction, words
from jobs.own_files import located
from pipelines.errors import ErrorCode, ServiceError

#: Shards that one transaction of a cancel or a retry changes.
SHARDS_AT_ONCE = 500


def pause(sql: Transaction, job_id: str) -> None:
    """Stops claims at once; workers give back what of their leases is not in the engine. Raises
    `ServiceError` with `ledger.state`."""
    job = lock_known_job(sql, job_id, "paused", *DISPATCHED, JobState.PAUSED)
    if job.state != JobState.PAUSED:
        pause_job(sql, job_id, "paused by a person")


def resume(sql: Transaction, job_id: str) -> None:
    """Continues a paused job; its error budget starts anew. Raises `ServiceError` with `ledger.state`."""
    job = lock_known_job(sql, job_id, "resumed", *DISPATCHED, JobState.PAUSED)
    if job.state in DISPATCHED:
        return
    done, failed = ended_items(sql, job_id)
    update_job(
        sql,
        job_id,
        "state = :state, state_reason = '', budget_from_done = :done, budget_from_failed = :failed",
        state=JobState.READY if job.started_at is None else JobState.RUNNING,
        done=done,
        failed=failed,
    )


def begin_cancel(sql: Transaction, job_id: str) -> None:
    """From here on no claim, heartbeat or commit of the job is accepted; `cancel_some` ends its items."""
    over = (JobState.CANCELLING, JobState.CANCELLED)
    if lock_known_job(sql, job_id, "cancelled", JobState.INGESTING, *WORKING, *over).state not in over:
        update_job(sql, job_id, "state = 'cancelling', state_reason = 'cancelled by a person'")


def cancel_some(sql: Transaction, job_id: str) -> bool:
    """Skips the open items of some shards of a cancelling job, and ends the job after the last; True while
    more are left."""
    job = lock_job(sql, job_id)
    if job is None or job.state != JobState.CANCELLING:
        return False
    statement = f"""
    SELECT * FROM shards WHERE job_id = :job AND state IN ({words(*OPEN_SHARDS)})
    ORDER BY no LIMIT {SHARDS_AT_ONCE} FOR UPDATE
    """
    chunk = sql.rows(statement, job=job_id)
    for shard in chunk:
        skip = f"UPDATE items SET state = {ITEM_STATE_NUMBERS[ItemState.SKIPPED]} WHERE {PENDING_OF}"
        skipped = sql.change(skip, **items_of(shard))
        if shard.state == ShardState.LEASED:
            end_attempt(sql, shard, AttemptOutcome.CANCELLED)
        change = "n_skipped = n_skipped + :skipped, not_before = NULL"
        move_to(sql, shard, ShardState.CANCELLED, change, skipped=skipped)
    if len(chunk) == SHARDS_AT_ONCE:
        return True
    update_job(sql, job_id, f"state = 'cancelled', finished_at = <now>, {TOTALS}", job=job_id)
    return False


#: Sets the totals of a job to what its shards hold.
TOTALS = """
total_shards = (SELECT count(*) FROM shards WHERE job_id = :job),
total_items = (SELECT COALESCE(sum(n_items), 0) FROM shards WHERE job_id = :job)
"""


def retry_some(
    sql: Transaction, job_id: str, codes: Collection[ErrorCode] | None, force: bool, after: int
) -> tuple[int, int | None]:
    """Opens failed and dead items with these codes (None: all) again, in some shards above `after`;
    hopeless ones only by force.

    Returns (items opened, the last shard looked at, or None after the last).
    """
    job = lock_known_job(sql, job_id, "retried", *RETRYABLE_JOBS)
    statement = f"""
    SELECT * FROM shards WHERE job_id = :job AND no > :after AND n_failed > 0
    ORDER BY no LIMIT {SHARDS_AT_ONCE} FOR UPDATE
    """
    chunk = sql.rows(statement, job=job_id, after=after)
    chosen = [code for code in (ErrorCode if codes is None else codes) if force or not code.hopeless]
    broken = ", ".join(str(ITEM_STATE_NUMBERS[state]) for state in BROKEN_ITEMS)
    reopen = f"""
    UPDATE items SET state = {ITEM_STATE_NUMBERS[ItemState.PENDING]}, attempts = 0, error_code = NULL, error_message = NULL
    WHERE {ITEMS_OF} AND state IN ({broken}) AND error_code IN ({words(*chosen) or "NULL"})
    """
    opened = 0
    for shard in chunk:
        count = sql.change(reopen, **items_of(shard))
        if count:
            _reopen(sql, shard, count)
            opened += count
    if opened:
        # What failed before the last resume and is open again may fail again.
        left = max(0, job.budget_from_failed - opened)
        update_job(sql, job_id, "budget_from_failed = :left", left=left)
        if job.state in FINAL:
            again = "finished_at = NULL, notify_attempts = 0, notify_due_at = NULL"
            update_job(sql, job_id, f"state = 'running', state_reason = '', {again}")
    return opened, chunk[-1].no if len(chunk) == SHARDS_AT_ONCE else None


def _reopen(sql: Transaction, shard: Row, count: int) -> None:
    change = "n_failed = n_failed - :count"
    if shard.state not in OPEN_SHARDS:
        change += ", attempts = 0, outages = 0, not_before = NULL"
        move_to(sql, shard, ShardState.READY, change, count=count)
        return
    if shard.state == ShardState.LEASED:
        # Else the items that are open again would hide what this lease has ended.
        change += ", claimed_failed = claimed_failed - :count"
    update_shard(sql, shard, change, count=count)


def wake(sql: Transaction, job_id: str) -> int:
    """Ends the backoff of a job's shards, because the user may have repaired what they wait for; returns
    how many run at once."""
    lock_known_job(sql, job_id)
    statement = (
        "UPDATE shards SET not_before = NULL WHERE job_id = :job AND state = 'ready' AND not_before > 0"
    )
    return sql.change(statement, job=job_id)


def check_writable(sql: Transaction, job_id: str) -> None:
    """Changes nothing; raises `ServiceError` where the ledger can be read but not written, as on a full
    disk."""
    update_job(sql, job_id, "priority = priority")


def set_priority(sql: Transaction, job_id: str, priority: int) -> None:
    """Sets the priority of a job; higher runs first."""
    lock_known_job(sql, job_id)
    update_job(sql, job_id, "priority = :priority", priority=priority)


def schedule_ran(sql: Transaction, name: str, night: str) -> bool:
    """Records that a night ran; False if it was recorded before."""
    return (
        sql.insert("schedules", [{"name": name, "night": night}], "ON CONFLICT DO NOTHING", ran_at="<now>")
        == 1
    )


def schedule_forget(sql: Transaction, name: str, night: str) -> None:
    """Lets a night run again."""
    sql.change("DELETE FROM schedules WHERE name = :name AND night = :night", name=name, night=night)


def schedule_history(sql: Transaction, name: str) -> list[str]:
    """The nights that ran, in order."""
    return sql.column("SELECT night FROM schedules WHERE name = :name ORDER BY night", name=name)


# Reports of ends. An end is a job and its `finished_at`: a job that is retried ends again.

#: Older ends are not reported: nobody waits for those of before there was a hook.
OLDEST_END_SECONDS = 24 * 3600.0
#: Ends that one pass reports.
ENDS_AT_ONCE = 20
#: No try is planned later than this; a later time was written by a clock that went wrong.
_LATEST_TRY_SECONDS = 3600.0
_UNREPORTED = f"""
state IN ({words(*FINAL)}) AND finished_at > <now> - {OLDEST_END_SECONDS}
AND (notified_finished_at IS NULL OR notified_finished_at <> finished_at)
AND (notify_due_at IS NULL OR notify_due_at <= <now> OR notify_due_at > <now> + {_LATEST_TRY_SECONDS + CLOCK_SLACK_SECONDS})
"""
_OF_END = "id = :job_id AND finished_at = :finished_at"


class JobEnd(NamedTuple):
    """An end of a job that is to be reported."""

    job_id: str
    finished_at: float


def unreported_ends(sql: Transaction) -> list[JobEnd]:
    """Some ends that are due, the oldest first."""
    statement = f"""
    SELECT id, finished_at FROM jobs WHERE {_UNREPORTED} ORDER BY finished_at, id LIMIT {ENDS_AT_ONCE}
    """
    return [JobEnd(*row) for row in sql.rows(statement)]


def claim_end(sql: Transaction, end: JobEnd, seconds: float) -> int | None:
    """Makes the caller the only one who reports an end, for some seconds: the number of the try; None
    where another one does."""
    statement = f"""
    UPDATE jobs SET notify_attempts = notify_attempts + 1, notify_due_at = <now> + :seconds
    WHERE {_OF_END} AND {_UNREPORTED} RETURNING notify_attempts
    """
    return sql.value(statement, **end._asdict(), seconds=seconds)


def note_reported(sql: Transaction, end: JobEnd) -> None:
    """Notes that an end was reported, or that nobody tries any more; does nothing where the job continued
    meanwhile."""
    sql.change(f"UPDATE jobs SET notified_finished_at = finished_at WHERE {_OF_END}", **end._asdict())


def put_off(sql: Transaction, end: JobEnd, seconds: float) -> None:
    """Plans the next try for an end that could not be reported."""
    sql.change(
        f"UPDATE jobs SET notify_due_at = <now> + :seconds WHERE {_OF_END}", **end._asdict(), seconds=seconds
    )


# Deletion: a job is fenced first, then its rows go by ranges, a transaction each, and its own row last. Only
# a job that has ended is deleted. It becomes `cancelled`, which no retry opens again: a worker that lost its
# lease finds no shard that it could commit to, and a submit under its idempotency key makes another job. Its
# id stays in `deleted_jobs`, so that the sweep finds what such a worker still stores.

#: Why a job is cancelled that is being deleted.
BEING_DELETED = "being deleted"
#: Values of the column by which rows go that one transaction covers: a fraction of a second, and no lock but
#: those of its rows.
ROWS_AT_ONCE = 10_000


class DeletedJob(NamedTuple):
    """A job that was deleted, or is being deleted."""

    id: str
    store_url: str
    store_identity: str | None
    deleted_at: float


def check_deletable(job_id: str, state: JobState) -> None:
    """Raises `ServiceError` with `ledger.state` for a job that has not ended."""
    if not state.final:
        message = f"Job {job_id} is {state.value}, so it cannot be deleted."
        raise ServiceError(ErrorCode.LEDGER_STATE, message, f"Run `nightjar cancel {job_id}` first.")


def begin_delete(sql: Transaction, job_id: str) -> None:
    """Fences a job that has ended; again where that was done before. Raises `ServiceError` with
    `ledger.state`."""
    job = lock_known_job(sql, job_id)
    check_deletable(job_id, JobState(job.state))
    ended = "manifest_finished_at = finished_at, notified_finished_at = finished_at"
    update_job(
        sql,
        job_id,
        f"state = 'cancelled', state_reason = '{BEING_DELETED}', idempotency_key = :key, {ended}",
        key=f"deleted/{job_id}",
    )
    tombstone = {"id": job_id, "store_url": job.store_url, "store_identity": job.store_identity}
    sql.insert("deleted_jobs", [tombstone], "ON CONFLICT DO NOTHING", deleted_at="<now>")


def last_of(sql: Transaction, table: str, job_id: str) -> int:
    """The largest value of the column by which a table's rows of a job go; -1 without any."""
    column, of_job = _range_of(table)
    return sql.value(f"SELECT COALESCE(max({column}), -1) FROM {table} WHERE {of_job}", job=job_id)


def delete_range(sql: Transaction, table: str, job_id: str, first: int) -> int:
    """Deletes the next rows of a job that is being deleted, from `first` on; how many there were."""
    column, of_job = _range_of(table)
    statement = f"DELETE FROM {table} WHERE {of_job} AND {column} >= :first AND {column} < :last"
    return sql.change(statement, job=job_id, first=first, last=first + ROWS_AT_ONCE)


def end_delete(sql: Transaction, job_id: str) -> None:
    """Removes the row of a job that has no others left."""
    sql.change("DELETE FROM jobs WHERE id = :job AND id IN (SELECT id FROM deleted_jobs)", job=job_id)


def deleted_jobs(sql: Transaction) -> list[DeletedJob]:
    """The jobs that were deleted and are remembered, the oldest first."""
    rows = sql.rows("SELECT * FROM deleted_jobs ORDER BY deleted_at, id")
    return [
        DeletedJob(row.id, located(row.store_url, sql.place), row.store_identity, row.deleted_at)
        for row in rows
    ]


def forget_deleted(sql: Transaction, job_id: str) -> None:
    """Forgets a job that was deleted; one that is still being deleted stays."""
    sql.change("DELETE FROM deleted_jobs WHERE id = :job AND id NOT IN (SELECT id FROM jobs)", job=job_id)


def _range_of(table: str) -> tuple[str, str]:
    """The column by whose ranges the rows of a job go, and the condition of its rows. Its number is looked
    up in the same statement: SQLite gives the number of a row that is gone to a new job."""
    column = ROWS_OF_JOBS[table]
    of_job = f"job_no = {NUMBER}" if column == "idx" else "job_id = :job"
    return column, f"{of_job} AND EXISTS (SELECT 1 FROM deleted_jobs WHERE id = :job)"
