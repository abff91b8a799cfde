"""Jobs as a whole: their creation from the lines of an input, user actions (pause, resume, cancel, retry,
priority, delete), the record of nightly runs, and reports of ended jobs to the operator's hook."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy.exc import IntegrityError

from jobs.ledger.lifecycle import (
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
)
from jobs.ledger.records import (
    BROKEN_ITEMS,
    CLOCK_SLACK_SECONDS,
    DISPATCHED,
    FINAL,
    ITEM_STATE_NUMBERS,
    KEPT_REJECTED_LINES,
    OPEN_SHARDS,
    RETRYABLE_JOBS,
    WORKING,
    ItemState,
    Job,
    JobState,
    NewJob,
    NewShard,
    RejectedLine,
    ShardState,
    clean,
    no_such_job,
)
from jobs.ledger.schema import ROWS_OF_JOBS
from jobs.ledger.status import jobs_by, read_job
from jobs.ledger.transaction import Transaction, columns_of, literals
from jobs.own_files import located, recorded
from pipelines.errors import ErrorCode, InputError, ServiceError

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_UNIQUE_VIOLATION = "23505"
#: `:rows` is JSON: shard -> index -> example id. One statement takes half the time of an INSERT per row, and
#: other threads can run meanwhile.
_ADD_ITEMS = """
INSERT INTO items (job_no, idx, example_id, shard_no, turn)
SELECT :job_no, CAST(item.key AS INTEGER), item.value, CAST(shard.key AS INTEGER), :turn
FROM json_each(:rows) AS shard, json_each(shard.value) AS item
"""
#: Maximum number of shards changed by one transaction of a cancel or retry.
SHARDS_AT_ONCE = 500


class DuplicateExamples(InputError):  # noqa: N818 - named by the contract
    """Example ids that occur more than once in the job; nothing of the batch was written."""

    def __init__(self, example_ids: Sequence[str]) -> None:
        self.example_ids = tuple(example_ids)
        super().__init__(
            ErrorCode.INPUT_DUPLICATE_ID,
            f"{len(self.example_ids)} example_id values occur more than once in the input, such as {clean(self.example_ids[0])[:100]!r}.",
            "Give every line its own example_id.",
        )


def begin_job(sql: Transaction, new: NewJob) -> Job:
    """The job with this idempotency key: an existing one in any state, or a new one in state `ingesting`."""
    # The id is a ULID in lowercase: 26 characters that sort by time.
    number = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    row = {
        **columns_of(new),
        "id": "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5)),
        "state": JobState.INGESTING.value,
        "store_url": recorded(new.store_url, sql.place),
    }
    sql.insert("jobs", [row], "ON CONFLICT (idempotency_key) DO NOTHING", created_at="<now>")
    return next(jobs_by(sql, "SELECT * FROM jobs WHERE idempotency_key = :key", key=row["idempotency_key"]))


def stage(
    sql: Transaction,
    job_id: str,
    shards: Sequence[NewShard],
    rejected: Sequence[RejectedLine],
    lines_read: int,
) -> bool:
    """Adds shards with their items, and rejected lines, to an ingesting job. False: these lines were staged
    before.

    `lines_read` counts from the start of the input. All rejected lines are counted, but only the first
    `KEPT_REJECTED_LINES` of the job are stored: a small archive can contain a billion. After a lost
    connection the same batch can be staged again.
    """
    job = lock_known_job(sql, job_id, "added to", JobState.INGESTING)
    if job.lines_read >= lines_read:
        return False
    if any("\x00" in example_id for shard in shards for _, example_id in shard.items):
        raise InputError(
            ErrorCode.INPUT_BAD_LINE, "An example_id contains a NUL character.", "Remove it from the input."
        )
    _add_items(sql, job.no, shards)
    rows = [
        {
            "job_id": job_id,
            "job_no": job.no,
            "no": shard.no,
            "first_index": shard.items[0][0],
            "last_index": shard.items[-1][0],
            "n_items": len(shard.items),
            "input_key": shard.input_key,
            "input_sha256": shard.input_sha256,
            "estimated_ms": shard.estimated_ms,
        }
        for shard in shards
        if shard.items
    ]
    sql.insert("shards", rows)
    kept = rejected[: max(0, KEPT_REJECTED_LINES - job.rejected_lines)]
    sql.insert("rejected_lines", [{"job_id": job_id, **columns_of(line)} for line in kept])
    update_job(
        sql,
        job_id,
        "lines_read = :lines_read, rejected_lines = rejected_lines + :rejected",
        lines_read=lines_read,
        rejected=len(rejected),
    )
    return True


def _add_items(sql: Transaction, job_no: int, shards: Sequence[NewShard]) -> None:
    """Inserts the items. Raises `IntegrityError` if an example id or an index exists already."""
    if sql.engine == "postgresql":
        # COPY takes half the time of any INSERT.
        statement = "COPY items (job_no, idx, example_id, shard_no, turn) FROM STDIN"
        try:
            driver = sql.connection.connection.driver_connection
            with driver.cursor() as cursor, cursor.copy(statement) as copy:
                for shard in shards:
                    for index, example_id in shard.items:
                        copy.write_row((job_no, index, example_id, shard.no, shard.turns.get(index, 0)))
        except Exception as error:
            # COPY uses psycopg directly, so SQLAlchemy does not wrap its errors.
            if getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION:
                raise IntegrityError(statement, None, error) from error
            raise
        return
    by_turn: dict[int, dict[int, dict[int, str]]] = {}
    for shard in shards:
        for index, example_id in shard.items:
            by_turn.setdefault(shard.turns.get(index, 0), {}).setdefault(shard.no, {})[index] = example_id
    for turn, rows in by_turn.items():
        sql.change(_ADD_ITEMS, job_no=job_no, turn=turn, rows=msgspec.json.encode(rows).decode())


def duplicates(sql: Transaction, job_id: str, shards: Sequence[NewShard]) -> list[str]:
    """The example ids of `shards` that occur twice or are already in the job, in input order."""
    # The items of a dialogue share its id, so only the first one is compared.
    ids = [example_id for shard in shards for index, example_id in shard.items if index not in shard.turns]
    found = {example_id for example_id, count in Counter(ids).items() if count > 1}
    statement = f"SELECT example_id FROM items WHERE job_no = {NUMBER} AND example_id IN (:ids)"
    found.update(sql.column(statement, job=job_id, ids=ids))
    return list(dict.fromkeys(example_id for example_id in ids if example_id in found))


def seal_job(sql: Transaction, job_id: str) -> Job:
    """Sets the totals of an ingesting job and makes it ready, or failed (`input.no_items`) if it has no
    items."""
    if lock_known_job(sql, job_id).state == JobState.INGESTING:
        update_job(sql, job_id, f"state = 'ready', {TOTALS}")
        failed = "state = 'failed', state_reason = :reason, finished_at = <now>"
        sql.change(
            f"UPDATE jobs SET {failed} WHERE id = :job AND total_items = 0",
            job=job_id,
            reason=ErrorCode.INPUT_NO_ITEMS,
        )
    return read_job(sql, job_id)


def abandon_job(sql: Transaction, job_id: str) -> None:
    """Deletes all rows of an ingesting job."""
    job = lock_known_job(sql, job_id, "abandoned", JobState.INGESTING)
    sql.change("DELETE FROM items WHERE job_no = :job_no", job_no=job.no)
    for table in ("rejected_lines", "shards"):
        sql.change(f"DELETE FROM {table} WHERE job_id = :job", job=job_id)
    sql.change("DELETE FROM jobs WHERE id = :job", job=job_id)


def staged_shards(sql: Transaction, job_id: str) -> tuple[int, int, int]:
    """The committed numbers (shards, items, lines_read), from which an interrupted ingest continues."""
    # One statement, because another process may stage more between two statements.
    row = sql.row(
        """
        SELECT count(shards.no), CAST(COALESCE(sum(n_items), 0) AS BIGINT), lines_read
        FROM jobs LEFT JOIN shards ON shards.job_id = jobs.id WHERE jobs.id = :job GROUP BY jobs.id, lines_read
        """,
        job=job_id,
    )
    if row is None:
        raise no_such_job(job_id)
    return row


def pause(sql: Transaction, job_id: str) -> None:
    """Pauses a job: claims stop at once, and workers give back items that are not in the engine. Raises
    `ServiceError` with `ledger.state`."""
    if lock_known_job(sql, job_id, "paused", *WORKING).state != JobState.PAUSED:
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
        skipped = sql.change(
            f"UPDATE items SET state = {ITEM_STATE_NUMBERS[ItemState.SKIPPED]} WHERE {PENDING_OF}",
            **items_of(shard),
        )
        if shard.state == ShardState.LEASED:
            end_attempt(sql, shard, "cancelled")
        change = "n_skipped = n_skipped + :skipped, not_before = NULL"
        move_to(sql, shard, ShardState.CANCELLED, change, skipped=skipped)
    if len(chunk) == SHARDS_AT_ONCE:
        return True
    update_job(sql, job_id, f"state = 'cancelled', finished_at = <now>, {TOTALS}")
    return False


#: Assignments that set the totals of a job from its shards.
TOTALS = """
total_shards = (SELECT count(*) FROM shards WHERE job_id = :job),
total_items = (SELECT COALESCE(sum(n_items), 0) FROM shards WHERE job_id = :job)
"""


#: Failed items of some shards with some error codes.
_BROKEN = f"""
job_no = (SELECT no FROM jobs WHERE id = :job) AND shard_no IN (:shards) AND error_code IN (:codes)
AND state IN ({", ".join(str(ITEM_STATE_NUMBERS[state]) for state in BROKEN_ITEMS)})
"""
#: A shard that has not ended keeps its lease, whose progress the reopened items must not hide.
_REOPEN_SHARDS = f"""
UPDATE shards SET n_failed = n_failed - items, claimed_failed = claimed_failed - CASE WHEN open THEN items ELSE 0 END,
    state = CASE WHEN open THEN state ELSE 'ready' END, attempts = CASE WHEN open THEN attempts ELSE 0 END,
    outages = CASE WHEN open THEN outages ELSE 0 END, not_before = CASE WHEN open THEN not_before END
FROM (
    SELECT no AS number, state IN ({literals(*OPEN_SHARDS)}) AS open,
        (SELECT count(*) FROM items WHERE {_BROKEN} AND idx BETWEEN first_index AND last_index AND shard_no = shards.no) AS items
    FROM shards WHERE job_id = :job AND no IN (:shards)
) AS reopened WHERE job_id = :job AND no = number AND items > 0
"""
_REOPEN_ITEMS = f"""
UPDATE items SET state = {ITEM_STATE_NUMBERS[ItemState.PENDING]}, attempts = 0, error_code = NULL, error_message = NULL
WHERE {_BROKEN} AND idx BETWEEN (SELECT min(first_index) FROM shards WHERE job_id = :job AND no IN (:shards))
    AND (SELECT max(last_index) FROM shards WHERE job_id = :job AND no IN (:shards))
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
    SELECT no FROM shards WHERE job_id = :job AND no > :after AND n_failed > 0
    ORDER BY no LIMIT {SHARDS_AT_ONCE} FOR UPDATE
    """
    shards = sql.column(statement, job=job_id, after=after)
    chosen = [code for code in (ErrorCode if codes is None else codes) if force or not code.permanent]
    values = {"job": job_id, "shards": shards, "codes": chosen}
    sql.change(_REOPEN_SHARDS, **values)
    opened = sql.change(_REOPEN_ITEMS, **values)
    if opened:
        # Reopened items may have failed before the last resume. If they fail again, they must count.
        left = max(0, job.budget_from_failed - opened)
        update_job(sql, job_id, "budget_from_failed = :left", left=left)
        if job.state in FINAL:
            again = "finished_at = NULL, notify_attempts = 0, notify_due_at = NULL"
            update_job(sql, job_id, f"state = 'running', state_reason = '', {again}")
    return opened, shards[-1] if len(shards) == SHARDS_AT_ONCE else None


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
    return sql.rows(statement, JobEnd)


def claim_end(sql: Transaction, end: JobEnd, seconds: float) -> int | None:
    """Reserves the report of an end for the caller for some seconds. Returns the number of the try, or None
    if another process reports it."""
    statement = f"""
    UPDATE jobs SET notify_attempts = notify_attempts + 1, notify_due_at = <now> + :seconds
    WHERE {_OF_END} AND {_UNREPORTED} RETURNING notify_attempts
    """
    return sql.value(statement, **end._asdict(), seconds=seconds)


def note_report(sql: Transaction, end: JobEnd, again_seconds: float | None) -> None:
    """Schedules the next try of a report that failed; None: records that the end was reported, or that its report
    was given up. Does nothing if the job was reopened meanwhile."""
    change = "notify_due_at = <now> + :seconds"
    if again_seconds is None:
        change = "notified_finished_at = finished_at"
    sql.change(f"UPDATE jobs SET {change} WHERE {_OF_END}", **end._asdict(), seconds=again_seconds)


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
        raise ServiceError(
            ErrorCode.LEDGER_STATE,
            f"Job {job_id} is {state.value}, so it cannot be deleted.",
            f"Run `nightjar cancel {job_id}` first.",
        )


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
    return [DeletedJob(*row._replace(store_url=located(row.store_url, sql.place))) for row in rows]


def forget_deleted(sql: Transaction, job_id: str) -> None:
    """Removes the record of a deleted job, unless the job is still being deleted."""
    sql.change("DELETE FROM deleted_jobs WHERE id = :job AND id NOT IN (SELECT id FROM jobs)", job=job_id)
