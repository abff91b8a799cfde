"""From the lines of an input file to a job that can be dispatched."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from jobs.ledger import schema
from jobs.ledger.database import place
from jobs.ledger.lifecycle import update_job
from jobs.ledger.location import recorded
from jobs.ledger.mapping import insert, job_of, lock_known_job, new_job_id, number_of, read_job
from jobs.ledger.records import KEPT_REJECTED_LINES, Job, JobState, NewJob, NewShard, RejectedLine, clean
from jobs.ledger.schema import db_now
from jobs.ledger.status import no_such_job
from pipelines.errors import ErrorCode, InputError, ServiceError

_UNIQUE_VIOLATION = "23505"


class DuplicateRowsError(Exception):
    """A row of a `bulk_copy` breaks a unique constraint; the transaction has to be rolled back."""


def insert_missing(
    connection: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> None:
    """Inserts `rows` as tuples of `columns`, in the driver's own types; rows whose key is there already
    are left as they are."""
    if rows:
        mark = "?" if connection.dialect.name == "sqlite" else "%s"
        values = ", ".join([mark] * len(columns))
        statement = (
            f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608 - names of ours
        )
        connection.exec_driver_sql(statement, rows)


def bulk_copy(
    connection: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: Collection[tuple[Any, ...]]
) -> None:
    """Inserts `rows` as tuples of `columns`: COPY on PostgreSQL, the driver's executemany on SQLite.

    Raises `DuplicateRowsError`.
    """
    if not rows:
        return
    names = ", ".join(columns)
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(columns))
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", list(rows))  # noqa: S608 - names of ours
            return
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except exc.IntegrityError as error:
        raise DuplicateRowsError from error
    except Exception as error:
        if getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION:
            raise DuplicateRowsError from error
        raise


#: Ids in one IN list.
_CHUNK = 5000
_INDEX_BITS = 40
# Half the time of a row at a time, and other threads run meanwhile: Python's driver lets go of its lock once
# a statement, not once a row. The keys are a shard's number and first index in one, the values its example
# ids.
_ITEMS_OF_JSON = f"""
INSERT INTO items (job_no, idx, example_id, shard_no)
SELECT ?, (CAST(shard.key AS INTEGER) & {2**_INDEX_BITS - 1}) + item.key, item.value, CAST(shard.key AS INTEGER) >> {_INDEX_BITS}
FROM json_each(?) AS shard, json_each(shard.value) AS item
"""  # noqa: S608 - numbers of ours
# The same for shards in which a dialogue has several items: rows of [index, example id, shard, turn].
_TURNS_OF_JSON = """
INSERT INTO items (job_no, idx, example_id, shard_no, turn)
SELECT ?, json_extract(item.value, '$[0]'), json_extract(item.value, '$[1]'), json_extract(item.value, '$[2]'),
    json_extract(item.value, '$[3]')
FROM json_each(?) AS item
"""


class DuplicateExamples(InputError):  # noqa: N818 - the word of the contract
    """Example ids that occur in the job more than once; nothing of the batch was written."""

    def __init__(self, example_ids: Sequence[str]) -> None:
        self.example_ids = tuple(example_ids)
        super().__init__(
            ErrorCode.INPUT_DUPLICATE_ID,
            f"{len(self.example_ids)} example_id values stand in the input more than once, such as {clean(self.example_ids[0])[:100]!r}.",
            "Give every line an example_id of its own.",
        )

    def __reduce__(self) -> tuple[type[DuplicateExamples], tuple[tuple[str, ...]]]:  # type: ignore[override]
        return DuplicateExamples, (self.example_ids,)


def begin_job(connection: sa.Connection, new: NewJob) -> Job:
    """The job with this idempotency key: an old one in any state, or a new one in state ingesting."""
    statement = insert(connection, schema.jobs).values(
        id=new_job_id(),
        name=clean(new.name),
        state=JobState.INGESTING.value,
        spec=msgspec.to_builtins(new.spec),
        spec_sha=new.spec_sha,
        input_uri=clean(new.input_uri),
        input_sha256=new.input_sha256,
        idempotency_key=clean(new.idempotency_key),
        store_url=recorded(new.store_url, place(connection)),
        store_identity=new.store_identity,
        owner=clean(new.owner),
        priority=new.priority,
        weight=new.weight,
        max_attempts=new.max_attempts,
        max_in_flight=new.max_in_flight,
        error_budget=new.error_budget,
        labels=dict(new.labels),
        created_at=db_now(),
    )
    connection.execute(statement.on_conflict_do_nothing(index_elements=["idempotency_key"]))
    by_key = sa.select(schema.jobs).where(schema.jobs.c.idempotency_key == clean(new.idempotency_key))
    return job_of(connection, connection.execute(by_key).mappings().one())


def stage(
    connection: sa.Connection,
    job_id: str,
    shards: Sequence[NewShard],
    rejected: Sequence[RejectedLine],
    lines_read: int,
) -> bool:
    """Adds shards with their items, and lines that became none, to an ingesting job; False: these lines
    are there already.

    `lines_read` counts from the start of the input. Of the lines that became none all are counted and the
    first `KEPT_REJECTED_LINES` of the job are kept: a small archive can hold a billion. A caller that lost
    the connection may stage the same batch again.
    """
    job = _lock_ingesting(connection, job_id)
    if job["lines_read"] >= lines_read:
        return False
    job_no = job["no"]
    _refuse_nul(shards)
    _add_items(connection, job_no, shards)
    bulk_copy(
        connection,
        schema.shards,
        (
            "job_id",
            "job_no",
            "no",
            "first_index",
            "last_index",
            "n_items",
            "input_key",
            "input_sha256",
            "estimated_ms",
        ),
        [
            (
                job_id,
                job_no,
                s.no,
                s.items[0][0],
                s.items[-1][0],
                len(s.items),
                s.input_key,
                s.input_sha256,
                s.estimated_ms,
            )
            for s in shards
            if s.items
        ],
    )
    _add_rejected(connection, job_id, rejected[: max(0, KEPT_REJECTED_LINES - job["rejected_lines"])])
    update_job(
        connection, job_id, lines_read=lines_read, rejected_lines=schema.jobs.c.rejected_lines + len(rejected)
    )
    return True


def _add_items(connection: sa.Connection, job_no: int, shards: Sequence[NewShard]) -> None:
    """Raises `DuplicateRowsError`."""
    if connection.dialect.name != "sqlite" or any(
        len(s.items) != s.items[-1][0] - s.items[0][0] + 1 for s in shards if s.items
    ):
        rows = [
            (job_no, index, example_id, shard.no, turn)
            for shard in shards
            for index, example_id, turn in _numbered(shard)
        ]
        bulk_copy(connection, schema.items, ("job_no", "idx", "example_id", "shard_no", "turn"), rows)
        return
    plain = [shard for shard in shards if shard.items and not shard.turns]
    ids = {
        shard.no << _INDEX_BITS | shard.items[0][0]: [example_id for _, example_id in shard.items]
        for shard in plain
    }
    several = [
        (index, example_id, shard.no, turn)
        for shard in shards
        if shard.turns
        for index, example_id, turn in _numbered(shard)
    ]
    try:
        connection.exec_driver_sql(_ITEMS_OF_JSON, (job_no, msgspec.json.encode(ids).decode()))
        if several:
            connection.exec_driver_sql(_TURNS_OF_JSON, (job_no, msgspec.json.encode(several).decode()))
    except exc.IntegrityError as error:
        raise DuplicateRowsError from error


def _numbered(shard: NewShard) -> list[tuple[int, str, int]]:
    """(index, example_id, turn) of the items of a shard."""
    return [(index, example_id, shard.turns.get(index, 0)) for index, example_id in shard.items]


def duplicates(connection: sa.Connection, job_id: str, shards: Sequence[NewShard]) -> list[str]:
    """The example ids of `shards` that occur twice or are in the job already, in the order of the input."""
    seen: set[str] = set()
    twice: dict[str, None] = {}
    # The items of a dialogue share its id: its first one stands for it.
    ids = [example_id for shard in shards for index, example_id in shard.items if index not in shard.turns]
    for example_id in ids:
        if example_id in seen:
            twice[example_id] = None
        seen.add(example_id)
    items = schema.items.c
    known: set[str] = set()
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        known.update(
            connection.scalars(
                sa.select(items.example_id).where(
                    items.job_no == number_of(job_id), items.example_id.in_(chunk)
                )
            )
        )
    return list(
        dict.fromkeys([example_id for example_id in ids if example_id in known or example_id in twice])
    )


def seal_job(connection: sa.Connection, job_id: str) -> Job:
    """Sets the totals and makes an ingesting job ready, or failed (`input.no_items`) where it has no item."""
    if lock_known_job(connection, job_id)["state"] == JobState.INGESTING:
        shards, items = _totals(connection, job_id)
        empty = items == 0
        update_job(
            connection,
            job_id,
            state=(JobState.FAILED if empty else JobState.READY).value,
            state_reason=ErrorCode.INPUT_NO_ITEMS.value if empty else "",
            finished_at=db_now() if empty else None,
            total_shards=shards,
            total_items=items,
        )
    return read_job(connection, job_id)


def abandon_job(connection: sa.Connection, job_id: str) -> None:
    """Removes every row of a job that is still ingesting."""
    job = _lock_ingesting(connection, job_id)
    connection.execute(sa.delete(schema.items).where(schema.items.c.job_no == job["no"]))
    for table in (schema.rejected_lines, schema.shards):
        connection.execute(sa.delete(table).where(table.c.job_id == job_id))
    connection.execute(sa.delete(schema.jobs).where(schema.jobs.c.id == job_id))


def staged_shards(connection: sa.Connection, job_id: str) -> tuple[int, int, int]:
    """(shards, items, lines_read) that are committed: where a broken ingest continues."""
    job, shards = schema.jobs.c, schema.shards.c
    # One statement, because another process may stage between two.
    query = (
        sa.select(sa.func.count(shards.no), sa.func.coalesce(sa.func.sum(shards.n_items), 0), job.lines_read)
        .select_from(schema.jobs.outerjoin(schema.shards, shards.job_id == job.id))
        .where(job.id == job_id)
        .group_by(job.id, job.lines_read)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise no_such_job(job_id)
    return int(row[0]), int(row[1]), int(row[2])


def _lock_ingesting(connection: sa.Connection, job_id: str) -> sa.RowMapping:
    row = lock_known_job(connection, job_id)
    if row["state"] != JobState.INGESTING:
        raise ServiceError(
            ErrorCode.LEDGER_STATE,
            f"Job {job_id} is {row['state']}, so nothing can be added to it.",
            "Submit a new job.",
        )
    return row


def _refuse_nul(shards: Iterable[NewShard]) -> None:
    for shard in shards:
        if any("\x00" in example_id for _, example_id in shard.items):
            raise InputError(
                ErrorCode.INPUT_BAD_LINE, "An example_id holds a NUL character.", "Remove it from the input."
            )


def _add_rejected(connection: sa.Connection, job_id: str, rejected: Sequence[RejectedLine]) -> None:
    if not rejected:
        return
    rows = [
        {
            "job_id": job_id,
            "line": line.line,
            "code": line.code.value,
            "message": clean(line.message),
            "example_id": None if line.example_id is None else clean(line.example_id),
        }
        for line in rejected
    ]
    connection.execute(insert(connection, schema.rejected_lines), rows)


def _totals(connection: sa.Connection, job_id: str) -> tuple[int, int]:
    columns = schema.shards.c
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(columns.n_items), 0)).where(
        columns.job_id == job_id
    )
    shards, items = connection.execute(query).one()
    return int(shards), int(items)
