"""User actions on jobs (pause, resume, cancel, retry, priority, delete), the record of nightly runs, and
reports of ended jobs to the operator's hook."""

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
    ITEM_STATE_NUMBERS,
    OPEN_SHARDS,
    RETRYABLE_JOBS,
    WORKING,
    AttemptOutcome,
    ItemState,
    JobState,
    ShardState,
)
from jobs.ledger.schema import ROWS_OF_JOBS
from jobs.ledger.transaction import Row, Transaction, literals
from jobs.own_files import located
from pipelines.errors import ErrorCode, ServiceError

#: Maximum number of shards changed by one transaction of a cancel or retry.
SHARDS_AT_ONCE = 500


def pause(sql: Transaction, job_id: str) -> None:
    """Pauses a job: claims stop at once, and workers give back items that are not in the engine. Raises
    `ServiceError` with `ledger.state`."""
    job = lock_known_job(sql, job_id, "paused", *WORKING)
    if job.state != JobState.PAUSED:
        pause_job(sql, job_id, "paused by a person")


def resume(sql: Transaction, job_id: str) -> None:
    """Resumes a paused job and resets its error budget. Raises `ServiceError` with `ledger.state`."""
    job = lock_known_job(sql, job_id, "resumed", *WORKING)
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
    """Starts a cancel: further claims, heartbeats and commits are refused. `cancel_some` ends the items."""
    over = (JobState.CANCELLING, JobState.CANCELLED)
    if lock_known_job(sql, job_id, "cancelled", JobState.INGESTING, *WORKING, *over).state not in over:
        update_job(sql, job_id, "state = 'cancelling', state_reason = 'cancelled by a person'")


def cancel_some(sql: Transaction, job_id: str) -> bool:
    """Skips the pending items of some shards of a cancelling job, and ends the job after the last one.
    Returns whether shards are left."""
    job = lock_job(sql, job_id)
    if job is None or job.state != JobState.CANCELLING:
        return False
    statement = f"""
    SELECT * FROM shards WHERE job_id = :job AND state IN ({literals(*OPEN_SHARDS)})
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


#: Assignments that set the totals of a job from its shards.
TOTALS = """
total_shards = (SELECT count(*) FROM shards WHERE job_id = :job),
total_items = (SELECT COALESCE(sum(n_items), 0) FROM shards WHERE job_id = :job)
"""


def retry_some(
    sql: Transaction, job_id: str, codes: Collection[ErrorCode] | None, force: bool, after: int
) -> tuple[int, int | None]:
    """Reopens failed and dead items with these codes (None: all) in the next shards after number `after`.
    Items with a permanent error are reopened only with `force`.

    Returns (number of items, number of the last shard of this call; None: no shards are left).
    """
    job = lock_known_job(sql, job_id, "retried", *RETRYABLE_JOBS)
    statement = f"""
    SELECT * FROM shards WHERE job_id = :job AND no > :after AND n_failed > 0
    ORDER BY no LIMIT {SHARDS_AT_ONCE} FOR UPDATE
    """
    chunk = sql.rows(statement, job=job_id, after=after)
    chosen = [code for code in (ErrorCode if codes is None else codes) if force or not code.permanent]
    broken = ", ".join(str(ITEM_STATE_NUMBERS[state]) for state in BROKEN_ITEMS)
    reopen = f"""
    UPDATE items SET state = {ITEM_STATE_NUMBERS[ItemState.PENDING]}, attempts = 0, error_code = NULL, error_message = NULL
    WHERE {ITEMS_OF} AND state IN ({broken}) AND error_code IN ({literals(*chosen) or "NULL"})
    """
    opened = 0
    for shard in chunk:
        count = sql.change(reopen, **items_of(shard))
        if count:
            _reopen(sql, shard, count)
            opened += count
    if opened:
        # Reopened items may have failed before the last resume. If they fail again, they must count.
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
        # Otherwise the reopened items would hide the progress of this lease.
        change += ", claimed_failed = claimed_failed - :count"
    update_shard(sql, shard, change, count=count)


def wake(sql: Transaction, job_id: str) -> int:
    """Ends the backoff of a job's shards, because the user may have repaired the cause. Returns their
    number."""
    lock_known_job(sql, job_id)
    statement = (
        "UPDATE shards SET not_before = NULL WHERE job_id = :job AND state = 'ready' AND not_before > 0"
    )
    return sql.change(statement, job=job_id)


def set_priority(sql: Transaction, job_id: str, priority: int) -> None:
    """Sets the priority of a job; higher runs first."""
    lock_known_job(sql, job_id)
    update_job(sql, job_id, "priority = :priority", priority=priority)


def schedule_ran(sql: Transaction, name: str, night: str) -> bool:
    """Records that all inputs of a night were submitted. False: it was recorded before."""
    return (
        sql.insert("schedules", [{"name": name, "night": night}], "ON CONFLICT DO NOTHING", ran_at="<now>")
        == 1
    )


def schedule_forget(sql: Transaction, name: str, night: str) -> None:
    """Removes the record of a night, so that it can run again."""
    sql.change("DELETE FROM schedules WHERE name = :name AND night = :night", name=name, night=night)


def schedule_history(sql: Transaction, name: str) -> list[str]:
    """The nights that ran, in order."""
    return sql.column("SELECT night FROM schedules WHERE name = :name ORDER BY night", name=name)


# Reports of job ends. An end is identified by the job and its `finished_at`, because a retried job ends
# again.

#: Ends that are older than this are not reported, such as those from before the hook was set.
OLDEST_END_SECONDS = 24 * 3600.0
#: Maximum number of ends reported by one pass.
ENDS_AT_ONCE = 20
#: If the next try is further in the future than this, the clock was wrong when it was scheduled: it is due at
#: once.
_LATEST_TRY_SECONDS = 3600.0
_UNREPORTED = f"""
state IN ({literals(*FINAL)}) AND finished_at > <now> - {OLDEST_END_SECONDS}
AND (notified_finished_at IS NULL OR notified_finished_at <> finished_at)
AND (notify_due_at IS NULL OR notify_due_at <= <now> OR notify_due_at > <now> + {_LATEST_TRY_SECONDS + CLOCK_SLACK_SECONDS})
"""
_OF_END = "id = :job_id AND finished_at = :finished_at"


class JobEnd(NamedTuple):
    """The end of a job, to be reported."""

    job_id: str
    finished_at: float


def unreported_ends(sql: Transaction) -> list[JobEnd]:
    """Up to `ENDS_AT_ONCE` ends whose report is due, the oldest first."""
    statement = f"""
    SELECT id, finished_at FROM jobs WHERE {_UNREPORTED} ORDER BY finished_at, id LIMIT {ENDS_AT_ONCE}
    """
    return [JobEnd(*row) for row in sql.rows(statement)]


def claim_end(sql: Transaction, end: JobEnd, seconds: float) -> int | None:
    """Reserves the report of an end for the caller for some seconds. Returns the number of the try, or None
    if another process reports it."""
    statement = f"""
    UPDATE jobs SET notify_attempts = notify_attempts + 1, notify_due_at = <now> + :seconds
    WHERE {_OF_END} AND {_UNREPORTED} RETURNING notify_attempts
    """
    return sql.value(statement, **end._asdict(), seconds=seconds)


def note_reported(sql: Transaction, end: JobEnd) -> None:
    """Records that an end was reported, or that its report was given up; does nothing if the job was reopened
    meanwhile."""
    sql.change(f"UPDATE jobs SET notified_finished_at = finished_at WHERE {_OF_END}", **end._asdict())


def postpone_report(sql: Transaction, end: JobEnd, seconds: float) -> None:
    """Schedules the next try of a report that failed."""
    sql.change(
        f"UPDATE jobs SET notify_due_at = <now> + :seconds WHERE {_OF_END}", **end._asdict(), seconds=seconds
    )


# Deletion of an ended job: first the job is fenced, then its rows are deleted in ranges, one transaction each,
# and its own row last. It becomes `cancelled`, which cannot be retried, so workers that lost their lease cannot
# commit; a submit with the same idempotency key creates another job. Its id stays in `deleted_jobs`, so that
# the sweep finds objects that such workers still store.

#: `state_reason` of a job that is being deleted.
BEING_DELETED = "being deleted"
#: Width of the index range that one transaction deletes. This takes a fraction of a second and locks only
#: these rows.
ROWS_AT_ONCE = 10_000


class DeletedJob(NamedTuple):
    """A job that was deleted, or is being deleted."""

    id: str
    store_url: str
    store_identity: str | None
    deleted_at: float


def check_deletable(job_id: str, state: JobState) -> None:
    """Raises `ServiceError` with `ledger.state` unless the job has ended."""
    if not state.final:
        message = f"Job {job_id} is {state.value}, so it cannot be deleted."
        raise ServiceError(ErrorCode.LEDGER_STATE, message, f"Run `nightjar cancel {job_id}` first.")


def begin_delete(sql: Transaction, job_id: str) -> None:
    """Fences an ended job; can be repeated. Raises `ServiceError` with `ledger.state`."""
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


def delete_some(sql: Transaction, job_id: str) -> bool:
    """Deletes some rows of a job that is being deleted, or its own row if no others are left. Returns whether
    it may have more rows."""
    for table, column in ROWS_OF_JOBS.items():
        # The job's number is looked up in the same statement, because SQLite may give the number of a deleted
        # job to a new one.
        of_job = f"job_no = {NUMBER}" if column == "idx" else "job_id = :job"
        of_job += " AND EXISTS (SELECT 1 FROM deleted_jobs WHERE id = :job)"
        end = f"(SELECT min({column}) FROM {table} WHERE {of_job}) + {ROWS_AT_ONCE}"
        if sql.change(f"DELETE FROM {table} WHERE {of_job} AND {column} < {end}", job=job_id):
            return True
    sql.change("DELETE FROM jobs WHERE id = :job AND id IN (SELECT id FROM deleted_jobs)", job=job_id)
    return False


def deleted_jobs(sql: Transaction) -> list[DeletedJob]:
    """The deleted jobs that the ledger still records, the oldest deletion first."""
    rows = sql.rows("SELECT * FROM deleted_jobs ORDER BY deleted_at, id")
    return [
        DeletedJob(row.id, located(row.store_url, sql.place), row.store_identity, row.deleted_at)
        for row in rows
    ]


def forget_deleted(sql: Transaction, job_id: str) -> None:
    """Removes the record of a deleted job, unless the job is still being deleted."""
    sql.change("DELETE FROM deleted_jobs WHERE id = :job AND id NOT IN (SELECT id FROM jobs)", job=job_id)
