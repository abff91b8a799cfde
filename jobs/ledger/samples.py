"""What a report asks of the ledger: how the leases went over time, and draws and artifacts of a few chosen items."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.draws import draw_from
from jobs.ledger.records import Artifact, DrawRow
from jobs.ledger.rows import number_of
from jobs.ledger.views import now


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease of a shard, with what it made. Times are UTC epoch seconds of the ledger's clock."""

    shard_no: int
    epoch: int
    started_at: float
    #: Now, for one that runs.
    ended_at: float
    done: int
    failed: int
    #: Speech of its items: the shard's, shared out by items.
    audio_ms: float


@dataclass(frozen=True, slots=True)
class Commit:
    """What was committed at one time."""

    #: None: before the ledger kept it.
    at: float | None
    done: int
    audio_ms: float


def attempts_page(connection: sa.Connection, job_id: str, after: tuple[int, int], limit: int) -> list[Attempt]:
    """Up to `limit` attempts after (shard, epoch), in this order."""
    attempts, shards = schema.attempts.c, schema.shards.c
    query = (
        sa.select(
            attempts.shard_no,
            attempts.epoch,
            attempts.started_at,
            sa.func.coalesce(attempts.ended_at, now(connection)),
            attempts.n_ok,
            attempts.n_failed,
            sa.case((shards.n_done > 0, sa.cast(shards.audio_ms, sa.Double) / shards.n_done * attempts.n_ok), else_=0.0),
        )
        .join(schema.shards, sa.and_(shards.job_id == attempts.job_id, shards.no == attempts.shard_no))
        .where(attempts.job_id == job_id, sa.tuple_(attempts.shard_no, attempts.epoch) > after)
        .order_by(attempts.shard_no, attempts.epoch)
        .limit(limit)
    )
    return [Attempt(*row) for row in connection.execute(query)]


def commits(connection: sa.Connection, job_id: str) -> list[Commit]:
    """Everything that was made, by the time it was committed. For small jobs: it reads every item's audio."""
    columns = schema.artifacts.c
    query = (
        sa.select(columns.made_at, sa.func.count(), sa.func.sum(columns.duration_ms))
        .where(columns.job_no == number_of(job_id), columns.kind == "audio")
        .group_by(columns.made_at)
        .order_by(columns.made_at)
    )
    return [Commit(at, done, float(audio_ms)) for at, done, audio_ms in connection.execute(query)]


def draws_of(connection: sa.Connection, job_id: str, indexes: Collection[int]) -> list[DrawRow]:
    """The draws of these items, in order of index and draw."""
    columns = schema.draws.c
    query = sa.select(schema.draws).where(columns.job_no == number_of(job_id), columns.idx.in_(indexes))
    return [draw_from(row) for row in connection.execute(query.order_by(columns.idx, columns.draw)).mappings()]


def artifacts_of(connection: sa.Connection, job_id: str, kind: str, indexes: Collection[int]) -> dict[int, Artifact]:
    """Index -> artifact of one kind, of those of these items that have one."""
    columns = schema.artifacts.c
    query = sa.select(schema.artifacts).where(columns.job_no == number_of(job_id), columns.kind == kind, columns.idx.in_(indexes))
    return {row["idx"]: _artifact(row) for row in connection.execute(query).mappings()}


def _artifact(row: sa.RowMapping) -> Artifact:
    values: dict[str, Any] = {name: row[name] for name in Artifact.__struct_fields__ if name != "index"}
    return Artifact(index=row["idx"], **values)
