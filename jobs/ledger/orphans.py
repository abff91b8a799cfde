"""Whether the ledger has no use for an object of a job that has ended: the question before it is deleted."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from jobs.artifacts import draw_of, index_of, is_reference_key, job_prefix, shard_of_input
from jobs.ledger import schema
from jobs.ledger.records import ItemState, JobState
from jobs.ledger.rows import lock_job, read_row
from jobs.ledger.states import RETRYABLE_JOBS

#: Longer than a store with all its tries takes to delete an object or to give up.
LONGEST_DELETE_SECONDS = 600
#: Input objects by (key, SHA-256).
Inputs = frozenset[tuple[str, str]]


def is_orphan(connection: sa.Connection, job_id: str, key: str, ended_before: float, read: Inputs) -> bool:
    """Whether a job that ended before that time wrote `key`, and nothing names it or may still come to name it.

    `read`: the inputs in which no line names the key, where it is one of reference audio.
    """
    return _is_orphan(connection, read_row(connection, job_id), key, ended_before, read)


def delete_orphan(connection: sa.Connection, job_id: str, key: str, ended_before: float, read: Inputs, delete: Callable[[], None]) -> bool:
    """Calls `delete` while the job's row is locked, so that no retry begins meanwhile, if `key` is an orphan then."""
    if connection.dialect.name == "postgresql":
        # A store may take its time to delete, and until it has, the lock must hold; only a retry of this job waits for it.
        connection.execute(sa.text(f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_DELETE_SECONDS * 1000}"))
    if not _is_orphan(connection, lock_job(connection, job_id), key, ended_before, read):
        return False
    delete()
    return True


def _is_orphan(connection: sa.Connection, job: sa.RowMapping | None, key: str, ended_before: float, read: Inputs) -> bool:
    if job is None or not JobState(job["state"]).final or job["finished_at"] is None or job["finished_at"] > ended_before:
        return False
    kind = key.removeprefix(job_prefix(job["id"])).partition("/")[0]
    if kind == "input":
        return _is_unread_input(connection, job["id"], key)
    if kind == "references":
        return is_reference_key(key, job["id"]) and read == _inputs(connection, job["id"])
    return _is_unnamed(connection, job, kind, key)


def _is_unnamed(connection: sa.Connection, job: sa.RowMapping, kind: str, key: str) -> bool:
    """A key of an item that has ended, and that no artifact of the item has.

    An item that failed may be tried again, maybe by a ledger that is newer than this one: of its objects only those of draws
    that are recorded as refused are of no use.
    """
    index, items, artifacts, draws = index_of(key), schema.items.c, schema.artifacts.c, schema.draws.c
    item = connection.execute(sa.select(items.example_id, items.state).where(items.job_no == job["no"], items.idx == index)).one_or_none()
    if index is None or item is None:
        return False
    draw = draw_of(key, job["id"], kind, index, item.example_id, "txt" if kind == "text" else job["spec"].get("format", "wav"))
    if draw is None:
        return False
    named = sa.exists().where(artifacts.job_no == job["no"], artifacts.idx == index, artifacts.key == key)
    if connection.scalar(sa.select(named)):
        return False
    if schema.ITEM_STATES[item.state] in (ItemState.DONE, ItemState.SKIPPED) or JobState(job["state"]) not in RETRYABLE_JOBS:
        return True
    return bool(connection.scalar(sa.select(sa.exists().where(draws.job_no == job["no"], draws.idx == index, draws.draw == draw))))


def _is_unread_input(connection: sa.Connection, job_id: str, key: str) -> bool:
    """The key of an input of one of the job's shards, left by an ingest that was broken off, which no shard reads."""
    shard_no, columns = shard_of_input(key, job_id), schema.shards.c
    rows = connection.execute(sa.select(columns.no, columns.input_key).where(columns.job_id == job_id)).all()
    return shard_no in {row.no for row in rows} and key not in {row.input_key for row in rows}


def _inputs(connection: sa.Connection, job_id: str) -> Inputs:
    columns = schema.shards.c
    rows = connection.execute(sa.select(columns.input_key, columns.input_sha256).where(columns.job_id == job_id))
    return frozenset((key, sha256) for key, sha256 in rows)
