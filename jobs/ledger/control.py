"""What users decide about jobs: pause, resume, cancel, retry, priority, delete; and the record of the
nights that ran."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.database import place
from jobs.ledger.lifecycle import end_attempt, ended_items, move_to, pause_job, update_job, update_shard
from jobs.ledger.location import located
from jobs.ledger.mapping import insert, items_of, lock_job, lock_known_job, number_of
from jobs.ledger.records import ItemState, JobState, ShardState
from jobs.ledger.schema import ITEM_STATE_NUMBERS, db_now, item_is, state_is
from jobs.ledger.states import BROKEN_ITEMS, DISPATCHED, OPEN_SHARDS, RETRYABLE_JOBS, AttemptOutcome
from pipelines.errors import ErrorCode, ServiceError

#: Shards that one transaction of a cancel or a retry changes.
SHARDS_AT_ONCE = 500


def pause(connection: sa.Connection, job_id: str) -> None:
    """Stops claims at once; workers give back what of their leases is not in the engine. Raises
    `ServiceError` with `ledger.state`."""
    job = lock_known_job(connection, job_id)
    if job["state"] != JobState.PAUSED:
        _require(job, "paused", *DISPATCHED)
        pause_job(connection, job_id, "paused by a person")


def resume(connection: sa.Connection, job_id: str) -> None:
    """Continues a paused job; its error budget starts anew. Raises `ServiceError` with `ledger.state`."""
    job = lock_known_job(connection, job_id)
    if JobState(job["state"]) in DISPATCHED:
        return
    _require(job, "resumed", JobState.PAUSED)
    done, failed = ended_items(connection, job_id)
    update_job(
        connection,
        job_id,
        state=(JobState.READY if job["started_at"] is None else JobState.RUNNING).value,
        state_reason="",
        paused_at=None,
        budget_from_done=done,
        budget_from_failed=failed,
    )


def begin_cancel(connection: sa.Connection, job_id: str) -> None:
    """From here on no claim, heartbeat or commit of the job is accepted; `cancel_some` ends its items."""
    job = lock_known_job(connection, job_id)
    if job["state"] in {JobState.CANCELLING.value, JobState.CANCELLED.value}:
        return
    _require(job, "cancelled", JobState.INGESTING, JobState.READY, JobState.RUNNING, JobState.PAUSED)
    update_job(
        connection,
        job_id,
        state=JobState.CANCELLING.value,
        state_reason="cancelled by a person",
        cancel_requested_at=db_now(),
    )


def cancel_some(connection: sa.Connection, job_id: str) -> bool:
    """Skips the open items of some shards of a cancelling job, and ends the job after the last; True while
    more are left."""
    job = lock_job(connection, job_id)
    if job is None or job["state"] != JobState.CANCELLING:
        return False
    columns = schema.shards.c
    query = sa.select(schema.shards).where(columns.job_id == job_id, state_is(columns.state, *OPEN_SHARDS))
    chunk = (
        connection.execute(query.order_by(columns.no).limit(SHARDS_AT_ONCE).with_for_update())
        .mappings()
        .all()
    )
    for shard in chunk:
        skipped = connection.execute(
            sa.update(schema.items)
            .where(items_of(shard), item_is(ItemState.PENDING))
            .values(state=ITEM_STATE_NUMBERS[ItemState.SKIPPED])
        ).rowcount
        if shard["state"] == ShardState.LEASED:
            end_attempt(connection, shard, AttemptOutcome.CANCELLED)
        move_to(
            connection, shard, ShardState.CANCELLED, n_skipped=columns.n_skipped + skipped, not_before=None
        )
    if len(chunk) == SHARDS_AT_ONCE:
        return True
    totals = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(columns.n_items), 0)).where(
        columns.job_id == job_id
    )
    shards, items = connection.execute(totals).one()
    update_job(
        connection,
        job_id,
        state=JobState.CANCELLED.value,
        finished_at=db_now(),
        total_shards=int(shards),
        total_items=int(items),
    )
    return False


def retry_some(
    connection: sa.Connection, job_id: str, codes: Collection[ErrorCode] | None, force: bool, after: int
) -> tuple[int, int | None]:
    """Opens failed and dead items with these codes (None: all) again, in some shards above `after`;
    hopeless ones only by force.

    Returns (items opened, the last shard looked at, or None after the last).
    """
    job = lock_known_job(connection, job_id)
    _require(job, "retried", *RETRYABLE_JOBS)
    columns, items = schema.shards.c, schema.items.c
    query = sa.select(schema.shards).where(columns.job_id == job_id, columns.no > after, columns.n_failed > 0)
    chunk = (
        connection.execute(query.order_by(columns.no).limit(SHARDS_AT_ONCE).with_for_update())
        .mappings()
        .all()
    )
    chosen = [code.value for code in (ErrorCode if codes is None else codes) if force or not code.hopeless]
    opened = 0
    for shard in chunk:
        broken = sa.and_(items_of(shard), item_is(*BROKEN_ITEMS), items.error_code.in_(chosen))
        reset = {
            "state": ITEM_STATE_NUMBERS[ItemState.PENDING],
            "attempts": 0,
            "error_code": None,
            "error_message": None,
        }
        count = connection.execute(sa.update(schema.items).where(broken).values(**reset)).rowcount
        if count:
            _reopen(connection, shard, count)
            opened += count
    if opened:
        # What failed before the last resume and is open again may fail again.
        update_job(connection, job_id, budget_from_failed=max(0, job["budget_from_failed"] - opened))
        if JobState(job["state"]).final:
            again = {"finished_at": None, "notify_attempts": 0, "notify_due_at": None}
            update_job(connection, job_id, state=JobState.RUNNING.value, state_reason="", **again)
    return opened, chunk[-1]["no"] if len(chunk) == SHARDS_AT_ONCE else None


def _reopen(connection: sa.Connection, shard: sa.RowMapping, count: int) -> None:
    values: dict[str, object] = {"n_failed": schema.shards.c.n_failed - count}
    if ShardState(shard["state"]) not in OPEN_SHARDS:
        move_to(connection, shard, ShardState.READY, attempts=0, outages=0, not_before=None, **values)
        return
    if shard["state"] == ShardState.LEASED:
        # Else the items that are open again would hide what this lease has ended.
        values["claimed_failed"] = schema.shards.c.claimed_failed - count
    update_shard(connection, shard, **values)


def wake(connection: sa.Connection, job_id: str) -> int:
    """Ends the backoff of a job's shards, because the user may have repaired what they wait for; returns
    how many run at once."""
    lock_known_job(connection, job_id)
    columns = schema.shards.c
    statement = sa.update(schema.shards).where(
        columns.job_id == job_id, state_is(columns.state, ShardState.READY), columns.not_before > 0
    )
    return connection.execute(statement.values(not_before=None)).rowcount


def check_writable(connection: sa.Connection, job_id: str) -> None:
    """Changes nothing; raises `ServiceError` where the ledger can be read but not written, as on a full
    disk."""
    update_job(connection, job_id, priority=schema.jobs.c.priority)


def set_priority(connection: sa.Connection, job_id: str, priority: int) -> None:
    """Sets the priority of a job; higher runs first."""
    lock_known_job(connection, job_id)
    update_job(connection, job_id, priority=priority)


def _require(job: sa.RowMapping, verb: str, *states: JobState) -> None:
    if JobState(job["state"]) not in states:
        raise ServiceError(
            ErrorCode.LEDGER_STATE, f"Job {job['id']} is {job['state']}, so it cannot be {verb}.", ""
        )


def schedule_ran(connection: sa.Connection, name: str, night: str) -> bool:
    """Records that a night ran; False if it was recorded before."""
    statement = (
        insert(connection, schema.schedules)
        .values(name=name, night=night, ran_at=db_now())
        .on_conflict_do_nothing()
    )
    return connection.execute(statement.returning(schema.schedules.c.name)).one_or_none() is not None


def schedule_forget(connection: sa.Connection, name: str, night: str) -> None:
    """Lets a night run again."""
    columns = schema.schedules.c
    connection.execute(sa.delete(schema.schedules).where(columns.name == name, columns.night == night))


def schedule_history(connection: sa.Connection, name: str) -> list[str]:
    """The nights that ran, in order."""
    columns = schema.schedules.c
    return list(
        connection.scalars(sa.select(columns.night).where(columns.name == name).order_by(columns.night))
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
_KEYS = ("job_no", "job_id")
#: Columns by whose ranges the rows of a job go.
_RANGES = ("idx", "shard_no", "line", "no")


class DeletedJob(NamedTuple):
    """A job that was deleted, or is being deleted."""

    id: str
    store_url: str
    store_identity: str | None
    deleted_at: float


def tables_of_jobs() -> list[sa.Table]:
    """Every table with rows of jobs, but the jobs' own; those that refer to others first."""
    return [
        table for table in reversed(schema.metadata.sorted_tables) if any(key in table.c for key in _KEYS)
    ]


def check_deletable(job_id: str, state: JobState) -> None:
    """Raises `ServiceError` with `ledger.state` for a job that has not ended."""
    if not state.final:
        message = f"Job {job_id} is {state.value}, so it cannot be deleted."
        raise ServiceError(ErrorCode.LEDGER_STATE, message, f"Run `nightjar cancel {job_id}` first.")


def begin_delete(connection: sa.Connection, job_id: str) -> None:
    """Fences a job that has ended; again where that was done before. Raises `ServiceError` with
    `ledger.state`."""
    job = lock_known_job(connection, job_id)
    check_deletable(job_id, JobState(job["state"]))
    ended = job["finished_at"]
    update_job(
        connection,
        job_id,
        state=JobState.CANCELLED.value,
        state_reason=BEING_DELETED,
        idempotency_key=f"deleted/{job_id}",
        manifest_finished_at=ended,
        notified_finished_at=ended,
    )
    tombstone = insert(connection, schema.deleted_jobs).values(
        id=job_id, store_url=job["store_url"], store_identity=job["store_identity"], deleted_at=db_now()
    )
    connection.execute(tombstone.on_conflict_do_nothing(index_elements=["id"]))


def last_of(connection: sa.Connection, table: sa.Table, job_id: str) -> int:
    """The largest value of the column by which a table's rows of a job go; -1 without any."""
    largest = sa.select(sa.func.max(_range_of(table))).where(_of_job(table, job_id))
    found = connection.scalar(largest)
    return -1 if found is None else int(found)


def delete_range(connection: sa.Connection, table: sa.Table, job_id: str, first: int) -> int:
    """Deletes the next rows of a job that is being deleted, from `first` on; how many there were."""
    column = _range_of(table)
    statement = sa.delete(table).where(_of_job(table, job_id), column >= first, column < first + ROWS_AT_ONCE)
    return connection.execute(statement).rowcount


def end_delete(connection: sa.Connection, job_id: str) -> None:
    """Removes the row of a job that has no others left."""
    jobs, deleted = schema.jobs.c, schema.deleted_jobs.c
    connection.execute(
        sa.delete(schema.jobs).where(jobs.id == job_id, sa.exists().where(deleted.id == jobs.id))
    )


def deleted_jobs(connection: sa.Connection) -> list[DeletedJob]:
    """The jobs that were deleted and are remembered, the oldest first."""
    columns, folder = schema.deleted_jobs.c, place(connection)
    query = sa.select(columns.id, columns.store_url, columns.store_identity, columns.deleted_at)
    rows = connection.execute(query.order_by(columns.deleted_at, columns.id))
    return [DeletedJob(job_id, located(store_url, folder), *others) for job_id, store_url, *others in rows]


def forget_deleted(connection: sa.Connection, job_id: str) -> None:
    """Forgets a job that was deleted; one that is still being deleted stays."""
    columns = schema.deleted_jobs.c
    statement = sa.delete(schema.deleted_jobs).where(
        columns.id == job_id, ~sa.exists().where(schema.jobs.c.id == columns.id)
    )
    connection.execute(statement)


def _range_of(table: sa.Table) -> sa.Column[int]:
    return next(table.c[name] for name in _RANGES if name in table.c)


def _of_job(table: sa.Table, job_id: str) -> sa.ColumnElement[bool]:
    """The rows of a job. Its number is looked up in the same statement: SQLite gives the number of a row
    that is gone to a new job."""
    fenced = sa.exists().where(schema.deleted_jobs.c.id == job_id)
    if "job_no" in table.primary_key.columns:
        return sa.and_(table.c.job_no == number_of(job_id), fenced)
    return sa.and_(table.c.job_id == job_id, fenced)
