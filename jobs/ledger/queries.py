"""What people and reports ask of the ledger. Status comes from shard counters, never from a scan of items."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.busy import LIVE_WORKERS, busy_spans
from jobs.ledger.mapping import item_from, job_from, no_such_job, number_of, read_job
from jobs.ledger.outcomes import draw_from
from jobs.ledger.records import (
    Artifact,
    DrawRow,
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


_STATE = sa.select(schema.jobs.c.state).where(schema.jobs.c.id == sa.bindparam("job_id"))


def now(connection: sa.Connection) -> float:
    return float(connection.scalar(sa.select(db_now())) or 0.0)


def job_state(connection: sa.Connection, job_id: str) -> JobState:
    """Raises `NotFoundError`."""
    state = connection.scalar(_STATE, {"job_id": job_id})
    if state is None:
        raise no_such_job(job_id)
    return JobState(state)


def find_job(connection: sa.Connection, prefix: str) -> Job:
    """The job with this id, or the only one whose id begins so. Raises `NotFoundError`."""
    jobs = schema.jobs.c
    wanted = prefix.strip().lower().replace("\x00", "")
    query = sa.select(schema.jobs).where(jobs.id.startswith(wanted, autoescape=True)).order_by(jobs.id).limit(2)
    rows = connection.execute(query).mappings().all() if wanted else []
    if len(rows) == 1:
        return job_from(connection, rows[0])
    if rows:
        raise NotFoundError(ErrorCode.LEDGER_NOT_FOUND, f"Several jobs begin with {wanted!r}.", "Give more of the id.")
    return read_job(connection, wanted)


def job_of_key(connection: sa.Connection, idempotency_key: str) -> Job | None:
    """The job that was submitted under a key."""
    row = connection.execute(sa.select(schema.jobs).where(schema.jobs.c.idempotency_key == idempotency_key)).mappings().one_or_none()
    return None if row is None else job_from(connection, row)


def keys_of_input(connection: sa.Connection, input_sha256: str, spec_sha: str) -> list[tuple[Job, str, str]]:
    """(job, its idempotency key, the address of its store as it is recorded) of the jobs of one input and spec."""
    columns = schema.jobs.c
    query = sa.select(schema.jobs).where(columns.input_sha256 == input_sha256, columns.spec_sha == spec_sha).order_by(columns.no)
    rows = connection.execute(query).mappings()
    return [(job_from(connection, row), row["idempotency_key"], row["store_url"]) for row in rows]


def jobs(connection: sa.Connection, limit: int, states: Collection[JobState] | None, labels: Mapping[str, str] | None = None) -> list[Job]:
    """The newest jobs first, of those with all of these labels."""
    columns = schema.jobs.c
    query = sa.select(schema.jobs).order_by(columns.created_at.desc(), columns.id.desc())
    if states is not None:
        query = query.where(columns.state.in_([state.value for state in states]))
    if not labels:
        return [job_from(connection, row) for row in connection.execute(query.limit(limit)).mappings()]
    # Compared here: a label's key may be any text, and the databases write paths into JSON in different ways.
    rows = (row for row in connection.execute(query).mappings() if labels.items() <= row["labels"].items())
    return [job_from(connection, row) for row in islice(rows, limit)]


def status(connection: sa.Connection, job_id: str) -> JobStatus:
    found = _statuses(connection, [read_job(connection, job_id)])[0]
    if found.job.state.final:
        return found
    workers = connection.scalar(sa.text(LIVE_WORKERS[connection.dialect.name]), {"model": found.job.spec.model})
    return replace(found, outage=last_outage(connection, job_id), workers=workers)


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


def statuses(
    connection: sa.Connection, limit: int, states: Collection[JobState] | None, labels: Mapping[str, str] | None
) -> list[JobStatus]:
    """Status of the newest jobs first, of those in these states with all of these labels."""
    return _statuses(connection, jobs(connection, limit, states, labels))


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
    busy = dict.fromkeys((job.id for job in found), 0.0)
    for job_id, spans in worked_on(connection, list(busy)).items():
        busy[job_id] = sum(end - start for start, end in spans)
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
            busy_seconds=busy[job.id],
        )
        for job in found
    ]


def worked_on(connection: sa.Connection, job_ids: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of every time in which shards of these jobs were leased, in order; only jobs that have some."""
    statement = sa.text(busy_spans(connection.dialect.name, "IN :jobs")).bindparams(sa.bindparam("jobs", expanding=True))
    found: dict[str, list[tuple[float, float]]] = {}
    for job_id, start, end in connection.execute(statement, {"jobs": list(job_ids)}):
        found.setdefault(job_id, []).append((start, end))
    return found


def items_page(
    connection: sa.Connection, job: Job, state: ItemState | None, codes: Collection[ErrorCode] | None, after: int, limit: int
) -> list[ItemRow]:
    """Up to `limit` items with an index above `after`, in index order."""
    items = schema.items.c
    query = _with_audio().where(items.job_no == number_of(job.id), items.idx > after).order_by(items.idx).limit(limit)
    if state is not None:
        query = query.where(item_is(state))
    if codes is not None:
        query = query.where(items.error_code.in_([code.value for code in codes]))
    return [item_from(row, speaks_turns=job.speaks_turns) for row in connection.execute(query).mappings()]


def shard_audio(connection: sa.Connection, job_id: str, shard_no: int) -> list[MadeAudio]:
    """The audio of one shard's items in index order."""
    rows = connection.execute(_SHARD_AUDIO, {"job_id": job_id, "shard_no": shard_no})
    return [MadeAudio(*values) for values in cast("Sequence[tuple[Any, ...]]", rows.all())]


def artifacts_page(connection: sa.Connection, job_id: str, kind: str, after: int, limit: int) -> list[tuple[int, str, str, int]]:
    """(index, key, SHA-256, bytes) of up to `limit` artifacts of a kind with an index above `after`, in index order."""
    artifacts = schema.artifacts.c
    query = sa.select(artifacts.idx, artifacts.key, artifacts.sha256, artifacts.bytes).where(
        artifacts.job_no == number_of(job_id), artifacts.idx > after, artifacts.kind == kind
    )
    rows = connection.execute(query.order_by(artifacts.idx).limit(limit))
    return [(index, key, sha256, size) for index, key, sha256, size in rows]


def shard_inputs(connection: sa.Connection, job_id: str) -> dict[int, tuple[str, str]]:
    """Key and SHA-256 of the input object of each shard."""
    columns = schema.shards.c
    rows = connection.execute(sa.select(columns.no, columns.input_key, columns.input_sha256).where(columns.job_id == job_id))
    return {no: (key, sha256) for no, key, sha256 in rows}


def _with_audio() -> sa.Select[tuple[object, ...]]:
    items, artifacts = schema.items.c, schema.artifacts.c
    audio = sa.and_(artifacts.job_no == items.job_no, artifacts.idx == items.idx, artifacts.kind == "audio")
    wanted = [column for column in artifacts if column.name not in {"job_no", "idx", "epoch", "worker_id"}]
    following = schema.items.alias("following")
    # The items of a dialogue have indexes that follow one another.
    more = sa.exists().where(following.c.job_no == items.job_no, following.c.idx == items.idx + 1, following.c.turn > 0)
    several = sa.or_(items.turn > 0, more).label("several")
    return sa.select(schema.items, *wanted, several).select_from(schema.items.outerjoin(schema.artifacts, audio))


def error_counts(connection: sa.Connection, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items and rejected lines by code, the most frequent first."""
    rejected = schema.rejected_lines.c
    counts = failed_counts(connection, job_id)
    query = sa.select(rejected.code, sa.func.count()).where(rejected.job_id == job_id).group_by(rejected.code)
    for code, count in connection.execute(query):
        counts[ErrorCode(code)] = counts.get(ErrorCode(code), 0) + count
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def failed_counts(connection: sa.Connection, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items by code."""
    items = schema.items.c
    query = sa.select(items.error_code, sa.func.count()).where(items.job_no == number_of(job_id), item_is(*BROKEN_ITEMS))
    return {ErrorCode(code): count for code, count in connection.execute(query.group_by(items.error_code))}


def rejected_page(connection: sa.Connection, job_id: str, after: int, limit: int) -> list[RejectedLine]:
    columns = schema.rejected_lines.c
    query = sa.select(columns.line, columns.code, columns.message, columns.example_id)
    query = query.where(columns.job_id == job_id, columns.line > after).order_by(columns.line).limit(limit)
    return [RejectedLine(line, ErrorCode(code), message, example_id) for line, code, message, example_id in connection.execute(query)]


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
