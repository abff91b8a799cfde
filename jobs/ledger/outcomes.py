"""Commits of finished items: fenced by the epoch, counted exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.ingest import insert_missing
from jobs.ledger.lifecycle import lock_shard, record_errors, update_shard
from jobs.ledger.mapping import number_of
from jobs.ledger.records import (
    QUARANTINE,
    Artifact,
    CommitResult,
    Done,
    Draw,
    DrawRow,
    Failed,
    ItemState,
    Outcome,
    Score,
    ShardState,
    Ticket,
    clean,
)
from jobs.ledger.schema import ITEM_STATE_NUMBERS, db_now, item_is, state_is
from jobs.ledger.scores import add_scores
from jobs.ledger.states import WORKING, after_failure
from pipelines.errors import ErrorCode

_COLUMNS = tuple(column.name for column in schema.draws.columns)
_encode = msgspec.json.Encoder().encode


def add_draws(connection: sa.Connection, job_no: int, draws: Iterable[tuple[int, Draw]]) -> None:
    """Adds (index, draw); those that are there stay as they are."""
    rows: list[tuple[Any, ...]] = [
        (
            job_no,
            index,
            draw.draw,
            draw.seed,
            None if draw.code is None else draw.code.value,
            draw.kept,
            draw.duration_ms,
            _encode(draw.scores).decode(),
        )
        for index, draw in draws
    ]
    insert_missing(connection, schema.draws, _COLUMNS, rows)


def draws_page(connection: sa.Connection, job_id: str, after: int, limit: int) -> list[DrawRow]:
    """The draws of up to `limit` items with an index above `after`, in order of index and draw."""
    columns = schema.draws.c
    of_job = columns.job_no == number_of(job_id)
    indexes = (
        sa.select(columns.idx)
        .where(of_job, columns.idx > after)
        .distinct()
        .order_by(columns.idx)
        .limit(limit)
    )
    last = sa.select(sa.func.max(indexes.subquery().c.idx)).scalar_subquery()
    query = (
        sa.select(schema.draws)
        .where(of_job, columns.idx > after, columns.idx <= last)
        .order_by(columns.idx, columns.draw)
    )
    return [draw_from(row) for row in connection.execute(query).mappings()]


def drawn_before(connection: sa.Connection, job_id: str, first: int, last: int) -> dict[int, int]:
    """Index -> number of draws of the items from `first` to `last` that have some: those that
    `nightjar retry` opened again."""
    columns = schema.draws.c
    query = (
        sa.select(columns.idx, (sa.func.max(columns.draw) + 1).label("drawn"))
        .where(columns.job_no == number_of(job_id), columns.idx.between(first, last))
        .group_by(columns.idx)
    )
    return {row.idx: row.drawn for row in connection.execute(query)}


def draw_from(row: sa.RowMapping) -> DrawRow:
    """A row of `draws` as a record."""
    code = None if row["code"] is None else ErrorCode(row["code"])
    scores = msgspec.convert(row["scores"], dict[str, Score])
    return DrawRow(
        row["idx"], Draw(row["draw"], row["seed"], code, bool(row["kept"]), row["duration_ms"], scores)
    )


_PENDING, _DONE = ITEM_STATE_NUMBERS[ItemState.PENDING], ITEM_STATE_NUMBERS[ItemState.DONE]

# Made once: for the few rows of a commit, building a statement takes longer than running it.
_LEASED = (
    sa.select(schema.shards, schema.jobs.c.max_attempts, schema.jobs.c.error_budget, db_now().label("now"))
    .join(schema.jobs, schema.jobs.c.id == schema.shards.c.job_id)
    .where(
        schema.shards.c.job_id == sa.bindparam("job_id"),
        schema.shards.c.no == sa.bindparam("shard_no"),
        schema.shards.c.epoch == sa.bindparam("epoch"),
        state_is(schema.shards.c.state, ShardState.LEASED),
        state_is(schema.jobs.c.state, *WORKING),
    )
    .with_for_update(of=schema.shards)
)
_COUNTED = ("n_done", "n_failed", "audio_ms", "engine_ms", "bytes_out")
_COUNT = (
    sa.update(schema.shards)
    .where(schema.shards.c.job_id == sa.bindparam("of_job"), schema.shards.c.no == sa.bindparam("of_shard"))
    .values({name: schema.shards.c[name] + sa.bindparam(f"more_{name}") for name in _COUNTED})
)
_ARTIFACT_COLUMNS = tuple(column.name for column in schema.artifacts.columns)


def commit(connection: sa.Connection, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
    """Writes outcomes of open items in one transaction; nothing where the lease is lost.

    Committing twice changes nothing more: an item ends once, and fails a maximum of once under one lease.
    """
    lease = {"job_id": ticket.job_id, "shard_no": ticket.shard_no, "epoch": ticket.epoch}
    shard = connection.execute(_LEASED, lease).mappings().one_or_none()
    if shard is None:
        return CommitResult(0, lost=True)
    attempts = _open_items(connection, shard, [outcome.index for outcome in outcomes])
    first: dict[int, Outcome] = {}
    for outcome in outcomes:
        if outcome.index in attempts:
            first.setdefault(outcome.index, outcome)
    done = [outcome for outcome in first.values() if isinstance(outcome, Done)]
    failed = [outcome for outcome in first.values() if isinstance(outcome, Failed)]
    n_done = _commit_done(connection, shard, done)
    n_failed, n_waiting, failed_ms = (
        _commit_failed(connection, shard, failed, attempts) if failed else (0, 0, 0)
    )
    more = {
        "n_done": n_done,
        "n_failed": n_failed,
        "audio_ms": sum(
            [
                artifact.duration_ms
                for outcome in done
                for artifact in outcome.artifacts
                if artifact.kind == "audio"
            ]
        ),
        "engine_ms": sum([outcome.engine_ms for outcome in done]) + failed_ms,
        "bytes_out": sum([artifact.bytes for outcome in done for artifact in outcome.artifacts]),
    }
    of = {"of_job": ticket.job_id, "of_shard": ticket.shard_no}
    connection.execute(_COUNT, {**of, **{f"more_{name}": count for name, count in more.items()}})
    return CommitResult(
        n_done + n_failed + n_waiting, failed=n_failed if shard["error_budget"] is not None else 0
    )


def _open_items(connection: sa.Connection, shard: sa.RowMapping, indexes: list[int]) -> dict[int, int]:
    """Open items among `indexes`: index -> attempts so far."""
    if not indexes:
        return {}
    statement = f"SELECT idx, attempts FROM items WHERE {_pending(shard, indexes)}"  # noqa: S608 - numbers of ours
    return {row.idx: row.attempts for row in connection.exec_driver_sql(statement)}


def _commit_done(connection: sa.Connection, shard: sa.RowMapping, done: list[Done]) -> int:
    if not done:
        return 0
    if again := [outcome.index for outcome in done if outcome.draws and outcome.draws[0].draw]:
        _forget_quarantined(connection, shard, again)
    _add_artifacts(connection, shard, [artifact for outcome in done for artifact in outcome.artifacts])
    draws = [(outcome.index, draw) for outcome in done for draw in outcome.draws]
    add_draws(connection, shard["job_no"], draws)
    add_scores(connection, shard["job_no"], draws)
    ended = _pending(shard, [outcome.index for outcome in done])
    change = f"state = {_DONE}, attempts = attempts + 1, error_code = NULL, error_message = NULL"
    return connection.exec_driver_sql(f"UPDATE items SET {change} WHERE {ended}").rowcount  # noqa: S608 - numbers of ours


def _add_artifacts(connection: sa.Connection, shard: sa.RowMapping, artifacts: list[Artifact]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            shard["job_no"],
            artifact.index,
            artifact.kind,
            artifact.key,
            artifact.sha256,
            artifact.bytes,
            artifact.duration_ms,
            artifact.sample_rate,
            artifact.samples,
            artifact.seed,
            shard["epoch"],
            shard["worker_id"],
            msgspec.json.encode(artifact.meta).decode() if artifact.meta else "{}",
            shard["now"],
            artifact.pack,
            artifact.pack_offset,
        )
        for artifact in artifacts
    ]
    insert_missing(connection, schema.artifacts, _ARTIFACT_COLUMNS, rows)


def _forget_quarantined(connection: sa.Connection, shard: sa.RowMapping, indexes: list[int]) -> None:
    """Forgets what earlier draws of these items left in quarantine; the sweep removes the objects."""
    artifacts = schema.artifacts.c
    of_items = (artifacts.job_no == shard["job_no"], artifacts.idx.in_(indexes), artifacts.kind == QUARANTINE)
    connection.execute(sa.delete(schema.artifacts).where(*of_items))


def _pending(shard: sa.RowMapping, indexes: Iterable[int]) -> str:
    """SQL for the open items of a shard among `indexes`."""
    # As text: binding hundreds of numbers one by one takes more time than the rest of a commit.
    numbers = ", ".join([str(int(index)) for index in indexes])
    return f"job_no = {shard['job_no']:d} AND idx IN ({numbers}) AND shard_no = {shard['no']:d} AND state = {_PENDING}"


def _commit_failed(
    connection: sa.Connection, shard: sa.RowMapping, failed: list[Failed], attempts: dict[int, int]
) -> tuple[int, int, int]:
    """(items that failed for good, items that wait for another attempt, engine milliseconds of what was
    not recorded before)."""
    recorded = _recorded_before(connection, shard, [outcome.index for outcome in failed])
    ended = waiting = engine_ms = 0
    errors = []
    refused: list[Failed] = []
    for outcome in failed:
        tries = attempts[outcome.index] + (outcome.index not in recorded)
        state = after_failure(tries, shard["max_attempts"], outcome.code)
        if state is ItemState.PENDING and outcome.index in recorded:
            continue
        engine_ms += outcome.engine_ms
        errors.append((outcome.index, outcome.code, outcome.message))
        items = schema.items.c
        changed = connection.execute(
            sa.update(schema.items)
            .where(items.job_no == shard["job_no"], items.idx == outcome.index, item_is(ItemState.PENDING))
            .values(
                state=ITEM_STATE_NUMBERS[state],
                attempts=tries,
                error_code=outcome.code.value,
                error_message=clean(outcome.message),
            )
        ).rowcount
        if state is ItemState.PENDING:
            waiting += changed
        else:
            ended += changed
            if outcome.draws:
                refused.append(outcome)
    record_errors(connection, shard, errors)
    if refused:
        _forget_quarantined(connection, shard, [outcome.index for outcome in refused])
        _add_artifacts(connection, shard, [artifact for outcome in refused for artifact in outcome.artifacts])
        add_draws(
            connection,
            shard["job_no"],
            [(outcome.index, draw) for outcome in refused for draw in outcome.draws],
        )
    return ended, waiting, engine_ms


def _recorded_before(connection: sa.Connection, shard: sa.RowMapping, indexes: list[int]) -> set[int]:
    """Items whose failure under this lease is recorded already."""
    if not indexes:
        return set()
    errors = schema.item_errors.c
    query = sa.select(errors.idx).where(
        errors.job_no == shard["job_no"], errors.idx.in_(indexes), errors.epoch == shard["epoch"]
    )
    return set(connection.scalars(query))


_REPLACED = ("sha256", "bytes", "duration_ms", "sample_rate", "samples", "pack", "pack_offset")


def replace_artifact(connection: sa.Connection, job_id: str, artifact: Artifact, sha256: str) -> bool:
    """Puts what was made again into the place of an artifact whose hash is still `sha256`, and counts it
    in its shard."""
    items, artifacts = schema.items.c, schema.artifacts.c
    shard_no = connection.scalar(
        sa.select(items.shard_no).where(items.job_no == number_of(job_id), items.idx == artifact.index)
    )
    shard = None if shard_no is None else lock_shard(connection, job_id, shard_no)
    if shard is None:
        return False
    of_artifact = (
        artifacts.job_no == shard["job_no"],
        artifacts.idx == artifact.index,
        artifacts.kind == artifact.kind,
    )
    known = sa.select(artifacts.bytes, artifacts.duration_ms).where(*of_artifact, artifacts.sha256 == sha256)
    before = connection.execute(known).one_or_none()
    if before is None:
        return False
    changed = {name: getattr(artifact, name) for name in _REPLACED}
    meta = msgspec.to_builtins(artifact.meta)
    connection.execute(sa.update(schema.artifacts).where(*of_artifact).values(**changed, meta=meta))
    if artifact.kind != QUARANTINE:
        audio_ms = artifact.duration_ms - before.duration_ms if artifact.kind == "audio" else 0
        update_shard(
            connection,
            shard,
            audio_ms=shard["audio_ms"] + audio_ms,
            bytes_out=shard["bytes_out"] + artifact.bytes - before.bytes,
        )
    return True


def set_shard_manifest(connection: sa.Connection, job_id: str, shard_no: int, key: str, sha256: str) -> None:
    """Names the manifest of a shard that has ended."""
    columns = schema.shards.c
    ended = (columns.job_id == job_id, columns.no == shard_no, state_is(columns.state, ShardState.DONE))
    connection.execute(
        sa.update(schema.shards).where(*ended).values(manifest_key=key, manifest_sha256=sha256)
    )
