"""What people ask of the ledger. Status comes from shard counters, never from a scan of items."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.records import (
    ItemCounts,
    ItemRow,
    ItemState,
    Job,
    JobState,
    JobStatus,
    MadeAudio,
    Outage,
    RejectedLine,
    ShardSpread,
    ShardState,
)
from jobs.ledger.rows import item_from, job_from, number_of, read_job
from jobs.ledger.schema import db_now, item_is
from jobs.ledger.states import BROKEN_ITEMS, OUTAGES
from pipelines.errors import ErrorCode, NotFoundError

PAGE_ROWS = 1000
_SUMS = ("n_items", "n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out")

#: Engine time of one item of a shard, see `records.ShardSpread`.
_ITEM_MS = sa.case(
    (
        schema.shards.c.n_done > 0,
        sa.cast(schema.shards.c.engine_ms, sa.Double) / (schema.shards.c.n_done + schema.shards.c.n_failed),
    )
)

_SHARD_AUDIO = (
    sa.select(
        schema.items.c.idx,
        schema.items.c.example_id,
        *(schema.artifacts.c[name] for name in ("key", "sha256", "bytes", "sample_rate", "samples", "seed")),
    )
    .select_from(
        schema.shards.join(
            schema.items,
            sa.and_(
                schema.items.c.job_no == schema.shards.c.job_no,
                schema.items.c.idx.between(schema.shards.c.first_index, schema.shards.c.last_index),
                schema.items.c.shard_no == schema.shards.c.no,
            ),
        ).join(
            schema.artifacts,
            sa.and_(
                schema.artifacts.c.job_no == schema.items.c.job_no,
                schema.artifacts.c.idx == schema.items.c.idx,
                schema.artifacts.c.kind == "audio",
            ),
        )
    )
    .where(schema.shards.c.job_id == sa.bindparam("job_id"), schema.shards.c.no == sa.bindparam("shard_no"))
    .order_by(schema.items.c.idx)
)


def now(connection: sa.Connection) -> float:
    return float(connection.scalar(sa.select(db_now())) or 0.0)


def find_job(connection: sa.Connection, prefix: str) -> Job:
    """The job with this id, or the only one whose id begins so. Raises `NotFoundError`."""
    jobs = schema.jobs.c
    wanted = prefix.strip().lower().replace("\x00", "")
    query = sa.select(schema.jobs).where(jobs.id.startswith(wanted, autoescape=True)).order_by(jobs.id).limit(2)
    rows = connection.execute(query).mappings().all() if wanted else []
    if len(rows) == 1:
        return job_from(rows[0])
    if rows:
        raise NotFoundError(ErrorCode.LEDGER_NOT_FOUND, f"Several jobs begin with {wanted!r}.", "Give more of the id.")
    return read_job(connection, wanted)


def job_of_key(connection: sa.Connection, idempotency_key: str) -> Job | None:
    """The job that was submitted under a key."""
    row = connection.execute(sa.select(schema.jobs).where(schema.jobs.c.idempotency_key == idempotency_key)).mappings().one_or_none()
    return None if row is None else job_from(row)


def jobs(connection: sa.Connection, limit: int, states: Collection[JobState] | None) -> list[Job]:
    """The newest jobs first."""
    columns = schema.jobs.c
    query = sa.select(schema.jobs).order_by(columns.created_at.desc(), columns.id.desc()).limit(limit)
    if states is not None:
        query = query.where(columns.state.in_([state.value for state in states]))
    return [job_from(row) for row in connection.execute(query).mappings()]


def status(connection: sa.Connection, job_id: str) -> JobStatus:
    found = _statuses(connection, [read_job(connection, job_id)])[0]
    return found if found.job.state.final else replace(found, outage=last_outage(connection, job_id))


_LAST_OUTAGE = (
    sa.select(schema.attempts.c.error_code, schema.attempts.c.error_message, schema.attempts.c.ended_at)
    .join(
        schema.shards,
        sa.and_(schema.shards.c.job_id == schema.attempts.c.job_id, schema.shards.c.no == schema.attempts.c.shard_no),
    )
    .where(
        schema.shards.c.job_id == sa.bindparam("job_id"),
        schema.shards.c.outages > 0,
        schema.attempts.c.ended_at.is_not(None),
    )
    .order_by(schema.attempts.c.ended_at.desc())
    .limit(1)
)


def last_outage(connection: sa.Connection, job_id: str) -> Outage | None:
    """What the shards that wait for a service met last; None where none waits for one."""
    row = connection.execute(_LAST_OUTAGE, {"job_id": job_id}).one_or_none()
    if row is None or row.error_code is None or ErrorCode(row.error_code) not in OUTAGES:
        return None
    return Outage(ErrorCode(row.error_code), row.error_message or "", row.ended_at)


def statuses(connection: sa.Connection, limit: int) -> list[JobStatus]:
    """Status of the newest jobs first."""
    return _statuses(connection, jobs(connection, limit, None))


def _statuses(connection: sa.Connection, found: Sequence[Job]) -> list[JobStatus]:
    columns = schema.shards.c
    query = (
        sa.select(
            columns.job_id,
            columns.state,
            sa.func.count().label("shards"),
            sa.func.count(sa.func.nullif(columns.n_done, 0)).label("made"),
            sa.func.sum(_ITEM_MS).label("item_ms"),
            sa.func.sum(_ITEM_MS * _ITEM_MS).label("item_ms_squared"),
            *(sa.func.sum(columns[name]).label(name) for name in _SUMS),
        )
        .where(columns.job_id.in_([job.id for job in found]))
        .group_by(columns.job_id, columns.state)
    )
    at = now(connection)
    shards: dict[str, dict[ShardState, int]] = {job.id: {} for job in found}
    spreads: dict[str, ShardSpread] = {}
    sums: dict[str, dict[str, int]] = {job.id: dict.fromkeys(_SUMS, 0) for job in found}
    for row in connection.execute(query).mappings():
        shards[row["job_id"]][ShardState(row["state"])] = row["shards"]
        if row["state"] == ShardState.DONE:
            spreads[row["job_id"]] = ShardSpread(row["made"], float(row["item_ms"] or 0), float(row["item_ms_squared"] or 0))
        for name in _SUMS:
            sums[row["job_id"]][name] += int(row[name])
    return [
        JobStatus(
            job=job,
            items=ItemCounts(*(sums[job.id][name] for name in ("n_items", "n_done", "n_failed", "n_skipped"))),
            shards=shards[job.id],
            audio_ms=sums[job.id]["audio_ms"],
            engine_ms=sums[job.id]["engine_ms"],
            bytes_out=sums[job.id]["bytes_out"],
            now=at,
            spread=spreads.get(job.id, ShardSpread()),
        )
        for job in found
    ]


def items_page(
    connection: sa.Connection, job_id: str, state: ItemState | None, codes: Collection[ErrorCode] | None, after: int, limit: int
) -> list[ItemRow]:
    """Up to `limit` items with an index above `after`, in index order."""
    items = schema.items.c
    query = _with_audio().where(items.job_no == number_of(job_id), items.idx > after).order_by(items.idx).limit(limit)
    if state is not None:
        query = query.where(item_is(state))
    if codes is not None:
        query = query.where(items.error_code.in_([code.value for code in codes]))
    return [item_from(row) for row in connection.execute(query).mappings()]


def shard_audio(connection: sa.Connection, job_id: str, shard_no: int) -> list[MadeAudio]:
    """The audio of one shard's items in index order."""
    rows = connection.execute(_SHARD_AUDIO, {"job_id": job_id, "shard_no": shard_no})
    return [MadeAudio(*values) for values in cast("Sequence[tuple[Any, ...]]", rows.all())]


def artifacts_page(connection: sa.Connection, job_id: str, kind: str, after: int, limit: int) -> list[tuple[int, str, str]]:
    """(index, key, SHA-256) of up to `limit` artifacts of a kind with an index above `after`, in index order."""
    artifacts = schema.artifacts.c
    query = sa.select(artifacts.idx, artifacts.key, artifacts.sha256).where(
        artifacts.job_no == number_of(job_id), artifacts.idx > after, artifacts.kind == kind
    )
    return [(index, key, sha256) for index, key, sha256 in connection.execute(query.order_by(artifacts.idx).limit(limit))]


def shard_inputs(connection: sa.Connection, job_id: str) -> dict[int, tuple[str, str]]:
    """Key and SHA-256 of the input object of each shard."""
    columns = schema.shards.c
    rows = connection.execute(sa.select(columns.no, columns.input_key, columns.input_sha256).where(columns.job_id == job_id))
    return {no: (key, sha256) for no, key, sha256 in rows}


def _with_audio() -> sa.Select[tuple[object, ...]]:
    items, artifacts = schema.items.c, schema.artifacts.c
    audio = sa.and_(artifacts.job_no == items.job_no, artifacts.idx == items.idx, artifacts.kind == "audio")
    wanted = [column for column in artifacts if column.name not in {"job_no", "idx", "epoch", "worker_id"}]
    return sa.select(schema.items, *wanted).select_from(schema.items.outerjoin(schema.artifacts, audio))


def error_counts(connection: sa.Connection, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items and rejected lines by code, the most frequent first."""
    items, rejected = schema.items.c, schema.rejected_lines.c
    counts: dict[ErrorCode, int] = {}
    for query in (
        sa.select(items.error_code, sa.func.count())
        .where(items.job_no == number_of(job_id), item_is(*BROKEN_ITEMS))
        .group_by(items.error_code),
        sa.select(rejected.code, sa.func.count()).where(rejected.job_id == job_id).group_by(rejected.code),
    ):
        for code, count in connection.execute(query):
            counts[ErrorCode(code)] = counts.get(ErrorCode(code), 0) + count
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def rejected_page(connection: sa.Connection, job_id: str, after: int, limit: int) -> list[RejectedLine]:
    columns = schema.rejected_lines.c
    query = sa.select(columns.line, columns.code, columns.message, columns.example_id)
    query = query.where(columns.job_id == job_id, columns.line > after).order_by(columns.line).limit(limit)
    return [RejectedLine(line, ErrorCode(code), message, example_id) for line, code, message, example_id in connection.execute(query)]
