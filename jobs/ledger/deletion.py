"""How a job's rows go: it is fenced first, then its rows go by ranges, a transaction each, and its own row last.

Only a job that has ended is deleted. It becomes `cancelled`, which no retry opens again: a worker that lost its lease finds no shard that
it could commit to, and a submit under its idempotency key makes another job. Its id stays in `deleted_jobs`, so that the sweep finds what
such a worker still stores.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.database import place
from jobs.ledger.lifecycle import update_job
from jobs.ledger.location import located
from jobs.ledger.mapping import insert, lock_known_job, number_of
from jobs.ledger.records import JobState
from jobs.ledger.schema import db_now
from pipelines.errors import ErrorCode, ServiceError

#: Why a job is cancelled that is being deleted.
BEING_DELETED = "being deleted"
#: Values of the column by which rows go that one transaction covers: a fraction of a second, and no lock but those of its rows.
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
    return [table for table in reversed(schema.metadata.sorted_tables) if any(key in table.c for key in _KEYS)]


def check_deletable(job_id: str, state: JobState) -> None:
    """Raises `ServiceError` with `ledger.state` for a job that has not ended."""
    if not state.final:
        message = f"Job {job_id} is {state.value}, so it cannot be deleted."
        raise ServiceError(ErrorCode.LEDGER_STATE, message, f"Run `nightjar cancel {job_id}` first.")


def begin_delete(connection: sa.Connection, job_id: str) -> None:
    """Fences a job that has ended; again where that was done before. Raises `ServiceError` with `ledger.state`."""
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
    connection.execute(sa.delete(schema.jobs).where(jobs.id == job_id, sa.exists().where(deleted.id == jobs.id)))


def deleted_jobs(connection: sa.Connection) -> list[DeletedJob]:
    """The jobs that were deleted and are remembered, the oldest first."""
    columns, folder = schema.deleted_jobs.c, place(connection)
    query = sa.select(columns.id, columns.store_url, columns.store_identity, columns.deleted_at)
    rows = connection.execute(query.order_by(columns.deleted_at, columns.id))
    return [DeletedJob(job_id, located(store_url, folder), *others) for job_id, store_url, *others in rows]


def forget_deleted(connection: sa.Connection, job_id: str) -> None:
    """Forgets a job that was deleted; one that is still being deleted stays."""
    columns = schema.deleted_jobs.c
    statement = sa.delete(schema.deleted_jobs).where(columns.id == job_id, ~sa.exists().where(schema.jobs.c.id == columns.id))
    connection.execute(statement)


def _range_of(table: sa.Table) -> sa.Column[int]:
    return next(table.c[name] for name in _RANGES if name in table.c)


def _of_job(table: sa.Table, job_id: str) -> sa.ColumnElement[bool]:
    """The rows of a job. Its number is looked up in the same statement: SQLite gives the number of a row that is gone to a new job."""
    fenced = sa.exists().where(schema.deleted_jobs.c.id == job_id)
    if "job_no" in table.primary_key.columns:
        return sa.and_(table.c.job_no == number_of(job_id), fenced)
    return sa.and_(table.c.job_id == job_id, fenced)
