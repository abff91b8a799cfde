"""From rows of the database to the records of the ledger, and the statements that several modules need."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.database import place
from jobs.ledger.records import Artifact, ItemRow, Job
from jobs.ledger.status import job_from, no_such_job
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

_JOB = sa.select(schema.jobs).where(schema.jobs.c.id == sa.bindparam("job_id"))
_LOCKED_JOB = _JOB.with_for_update()

_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def new_job_id() -> str:
    """A ULID in lower case: 26 characters that sort by the time they were made."""
    number = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows ON CONFLICT."""
    # A dialect takes time to import, so only the one in use is.
    if connection.dialect.name == "sqlite":
        from sqlalchemy.dialects.sqlite import insert as insert_into

        return insert_into(table)
    from sqlalchemy.dialects.postgresql import insert as insert_into_postgresql

    return insert_into_postgresql(table)


def job_of(connection: sa.Connection, row: sa.RowMapping) -> Job:
    """The job of a row of `jobs`."""
    return job_from({name: row[name] for name in Job.__dataclass_fields__}, place(connection))


def read_row(connection: sa.Connection, job_id: str) -> sa.RowMapping | None:
    """The row of a job, not locked."""
    return connection.execute(_JOB, {"job_id": job_id}).mappings().one_or_none()


def read_job(connection: sa.Connection, job_id: str) -> Job:
    """The job with this id. Raises `NotFoundError`."""
    row = read_row(connection, job_id)
    if row is None:
        raise no_such_job(job_id)
    return job_of(connection, row)


def lock_job(connection: sa.Connection, job_id: str) -> sa.RowMapping | None:
    """The row of a job, locked until the end of the transaction. Lock it before any of its shards;
    otherwise transactions deadlock."""
    return connection.execute(_LOCKED_JOB, {"job_id": job_id}).mappings().one_or_none()


def lock_known_job(connection: sa.Connection, job_id: str) -> sa.RowMapping:
    """As `lock_job`. Raises `NotFoundError`."""
    row = lock_job(connection, job_id)
    if row is None:
        raise no_such_job(job_id)
    return row


def number_of(job_id: str) -> sa.ScalarSelect[int]:
    """The number of a job, as a part of a statement."""
    return sa.select(schema.jobs.c.no).where(schema.jobs.c.id == job_id).scalar_subquery()


def open_items(row: sa.RowMapping) -> int:
    """Items of a shard that have not ended."""
    return row["n_items"] - row["n_done"] - row["n_failed"] - row["n_skipped"]


def items_of(shard: sa.RowMapping) -> sa.ColumnElement[bool]:
    """The items of a shard, by a range of the primary key."""
    items = schema.items.c
    return sa.and_(
        items.job_no == shard["job_no"],
        items.idx.between(shard["first_index"], shard["last_index"]),
        items.shard_no == shard["no"],
    )


def artifact_from(row: sa.RowMapping) -> Artifact:
    """The artifact of a row of `artifacts`."""
    values: dict[str, Any] = {name: row[name] for name in Artifact.__struct_fields__ if name != "index"}
    return Artifact(index=row["idx"], **values)


def item_from(row: sa.RowMapping, *, speaks_turns: bool) -> ItemRow:
    """The item of a row of `items` with the columns of its audio."""
    return ItemRow(
        index=row["idx"],
        example_id=row["example_id"],
        state=schema.ITEM_STATES[row["state"]],
        shard_no=row["shard_no"],
        attempts=row["attempts"],
        error_code=None if row["error_code"] is None else ErrorCode(row["error_code"]),
        error_message=row["error_message"],
        artifact=None if row["kind"] is None else artifact_from(row),
        turn=row["turn"],
        several=bool(row["several"]),
        speaks_turns=speaks_turns,
    )
