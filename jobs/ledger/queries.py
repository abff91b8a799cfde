"""What commands and reports ask of the ledger. For the status of jobs see `status`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.mapping import artifact_from, item_from, job_of, number_of
from jobs.ledger.outcomes import draw_from
from jobs.ledger.records import (
    Artifact,
    ArtifactFacts,
    DrawRow,
    ItemRow,
    ItemState,
    Job,
    JobState,
    RejectedLine,
    ShardAudio,
    ShardState,
)
from jobs.ledger.schema import db_now, item_is, state_is
from jobs.ledger.scores import matching_page
from jobs.ledger.status import no_such_job
from jobs.where import Where
from pipelines.errors import ErrorCode

PAGE_ROWS = 1000
#: Indexes between the first and the last item of a page, for each item, from which on the items are listed.
_SPARSE = 3
_SHARD_AUDIO = (
    sa.select(
        schema.items.c.idx,
        schema.items.c.example_id,
        *(
            schema.artifacts.c[name]
            for name in ("key", "sha256", "bytes", "sample_rate", "samples", "seed", "pack", "pack_offset")
        ),
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
    """The database's clock, UTC epoch seconds."""
    return float(connection.scalar(sa.select(db_now())) or 0.0)


def job_state(connection: sa.Connection, job_id: str) -> JobState:
    """The state of a job alone: what a worker asks often. Raises `NotFoundError`."""
    state = connection.scalar(_STATE, {"job_id": job_id})
    if state is None:
        raise no_such_job(job_id)
    return JobState(state)


#: Jobs of a model that tell its speed, the newest ones, and how much audio they must have made.
_MEASURED_JOBS, _MEASURED_AUDIO_MS = 20, 600_000


def measured_rtf(connection: sa.Connection, model: str) -> float | None:
    """RTF of a model on the workers that ran its newest jobs: their engine time over their audio. None:
    they made too little."""
    jobs, shards = schema.jobs.c, schema.shards.c
    newest = (
        sa.select(jobs.id)
        .where(jobs.spec["model"].as_string() == model)
        .order_by(jobs.no.desc())
        .limit(_MEASURED_JOBS)
    )
    sums = sa.select(sa.func.sum(shards.engine_ms), sa.func.sum(shards.audio_ms))
    ended = sums.where(
        shards.job_id.in_(list(connection.scalars(newest))), state_is(shards.state, ShardState.DONE)
    )
    engine_ms, audio_ms = connection.execute(ended).one()
    return None if (audio_ms or 0) < _MEASURED_AUDIO_MS else float(engine_ms) / float(audio_ms)


def job_of_key(connection: sa.Connection, idempotency_key: str) -> Job | None:
    """The job that was submitted under a key."""
    row = (
        connection.execute(sa.select(schema.jobs).where(schema.jobs.c.idempotency_key == idempotency_key))
        .mappings()
        .one_or_none()
    )
    return None if row is None else job_of(connection, row)


def store_identity(connection: sa.Connection, address: str) -> str | None:
    """By what the store at a recorded address was known to its newest job that says it; None: to none."""
    jobs = schema.jobs.c
    query = sa.select(jobs.store_identity).where(jobs.store_url == address, jobs.store_identity.is_not(None))
    return connection.scalar(query.order_by(jobs.no.desc()).limit(1))


def jobs_of_keys(connection: sa.Connection, first: str) -> list[tuple[str, Job]]:
    """(idempotency key, job) of the jobs that were submitted under a key, or under it and more behind a
    slash, in the order of submit."""
    key = schema.jobs.c.idempotency_key
    query = (
        sa.select(schema.jobs)
        .where((key == first) | key.startswith(f"{first}/", autoescape=True))
        .order_by(schema.jobs.c.no)
    )
    # The LIKE of SQLite knows no case.
    rows = [row for row in connection.execute(query).mappings() if row["idempotency_key"].startswith(first)]
    return [(row["idempotency_key"], job_of(connection, row)) for row in rows]


def jobs_of_input(connection: sa.Connection, input_sha256: str, spec_sha: str) -> list[Job]:
    """The jobs of one input and spec, the oldest first."""
    columns = schema.jobs.c
    query = (
        sa.select(schema.jobs)
        .where(columns.input_sha256 == input_sha256, columns.spec_sha == spec_sha)
        .order_by(columns.no)
    )
    return [job_of(connection, row) for row in connection.execute(query).mappings()]


class Wanted(NamedTuple):
    """Which items of a job are read."""

    state: ItemState | None = None
    codes: Collection[ErrorCode] | None = None
    where: Where | None = None
    #: With `where`: also the other items of the dialogues of those that match.
    dialogues: bool = False


class ItemsPage(NamedTuple):
    """Items in index order."""

    items: list[ItemRow]
    #: Where the next page begins; None: there is none. Items whose state changes while the page is read may
    #: be missing, or more.
    after: int | None


def items_page(connection: sa.Connection, job: Job, wanted: Wanted, after: int, limit: int) -> ItemsPage:
    """Up to `limit` items with an index above `after`."""
    items, number = schema.items.c, number_of(job.id)
    conditions: list[sa.ColumnElement[bool]] = []
    implied = wanted.where is not None and wanted.where.needs_scores and not wanted.dialogues
    if wanted.state is not None and not (implied and wanted.state is ItemState.DONE):
        conditions.append(item_is(wanted.state))
    if wanted.codes is not None:
        conditions.append(items.error_code.in_([code.value for code in wanted.codes]))
    if wanted.where is None:
        query = sa.select(items.idx).where(items.job_no == number, items.idx > after, *conditions)
        page = list(connection.scalars(query.order_by(items.idx).limit(limit)))
    else:
        rest = sa.and_(*conditions) if conditions else None
        page = matching_page(
            connection, job, wanted.where, after, limit, dialogues=wanted.dialogues, conditions=rest
        )
    if not page:
        return ItemsPage([], None)
    # To list nearly all indexes between two takes longer than to read all rows between them.
    listed = page[-1] - page[0] >= _SPARSE * len(page)
    query = _with_audio(page, number, listed=listed).where(items.job_no == number, *conditions)
    rows, on_page = connection.execute(query.order_by(items.idx)).mappings(), set(page)
    found = [item_from(row, speaks_turns=job.speaks_turns) for row in rows if row["idx"] in on_page]
    return ItemsPage(found, page[-1] if len(page) == limit else None)


def shard_audio(connection: sa.Connection, job_id: str, shard_no: int) -> list[ShardAudio]:
    """The audio of one shard's items in index order, for its manifest."""
    rows = connection.execute(_SHARD_AUDIO, {"job_id": job_id, "shard_no": shard_no})
    return [ShardAudio(*values) for values in cast("Sequence[tuple[Any, ...]]", rows.all())]


def artifacts_page(
    connection: sa.Connection, job_id: str, after: int, limit: int, kind: str
) -> list[ArtifactFacts]:
    """Up to `limit` artifacts of a kind with an index above `after`, in index order."""
    artifacts = schema.artifacts.c
    columns = [artifacts[name] for name in ("idx", *ArtifactFacts.__struct_fields__[1:])]
    query = sa.select(*columns).where(
        artifacts.job_no == number_of(job_id), artifacts.idx > after, artifacts.kind == kind
    )
    rows = connection.execute(query.order_by(artifacts.idx).limit(limit))
    return [ArtifactFacts(*values) for values in cast("Sequence[tuple[Any, ...]]", rows.all())]


def packs(connection: sa.Connection, job_id: str) -> set[str]:
    """The keys of the packs that artifacts of a job are in."""
    artifacts = schema.artifacts.c
    query = (
        sa.select(artifacts.pack)
        .where(artifacts.job_no == number_of(job_id), artifacts.pack.is_not(None))
        .distinct()
    )
    return set(connection.scalars(query))


def shard_inputs(connection: sa.Connection, job_id: str) -> dict[int, tuple[str, str]]:
    """Key and SHA-256 of the input object of each shard; the two halves of a bisected shard share one."""
    columns = schema.shards.c
    rows = connection.execute(
        sa.select(columns.no, columns.input_key, columns.input_sha256).where(columns.job_id == job_id)
    )
    return {no: (key, sha256) for no, key, sha256 in rows}


class ShardEnds(NamedTuple):
    """How many items of a shard have ended, and between which indexes they are."""

    no: int
    first_index: int
    last_index: int
    ended: int


def shard_ends(connection: sa.Connection, job_id: str) -> list[ShardEnds]:
    """Of the shards of a job some of whose items have ended, by number."""
    columns = schema.shards.c
    ended = columns.n_done + columns.n_failed + columns.n_skipped
    query = sa.select(columns.no, columns.first_index, columns.last_index, ended).where(
        columns.job_id == job_id, ended > 0
    )
    return [
        ShardEnds(*row)
        for row in cast("Sequence[tuple[Any, ...]]", connection.execute(query.order_by(columns.no)).all())
    ]


def _with_audio(
    page: list[int], number: sa.ScalarSelect[int], *, listed: bool
) -> sa.Select[tuple[object, ...]]:
    """The items of a page with their audio: those that are `listed` in it, else all from its first to its
    last."""

    def on_page(column: sa.ColumnElement[int], shift: int = 0) -> sa.ColumnElement[bool]:
        # Said of each table: PostgreSQL would read the whole job's rows of the others for each page.
        if not listed:
            return column.between(page[0] + shift, page[-1] + shift)
        return column.in_([index + shift for index in page])

    items, artifacts, following = schema.items.c, schema.artifacts.c, schema.items.alias("following")
    audio = sa.and_(
        artifacts.job_no == items.job_no,
        artifacts.idx == items.idx,
        artifacts.kind == "audio",
        on_page(artifacts.idx),
    )
    wanted = [column for column in artifacts if column.name not in {"job_no", "idx", "epoch", "worker_id"}]
    # The items of a dialogue have indexes that follow one another.
    next_one = sa.and_(
        following.c.job_no == number, following.c.idx == items.idx + 1, on_page(following.c.idx, 1)
    )
    several = sa.or_(items.turn > 0, sa.func.coalesce(following.c.turn, 0) > 0).label("several")
    tables = schema.items.outerjoin(schema.artifacts, audio).outerjoin(following, next_one)
    return sa.select(schema.items, *wanted, several).select_from(tables).where(on_page(items.idx))


def rejected_page(connection: sa.Connection, job_id: str, after: int, limit: int) -> list[RejectedLine]:
    columns = schema.rejected_lines.c
    query = sa.select(columns.line, columns.code, columns.message, columns.example_id)
    query = query.where(columns.job_id == job_id, columns.line > after).order_by(columns.line).limit(limit)
    return [
        RejectedLine(line, ErrorCode(code), message, example_id)
        for line, code, message, example_id in connection.execute(query)
    ]


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


def attempts_page(
    connection: sa.Connection, job_id: str, after: tuple[int, int], limit: int
) -> list[Attempt]:
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
            sa.case(
                (shards.n_done > 0, sa.cast(shards.audio_ms, sa.Double) / shards.n_done * attempts.n_ok),
                else_=0.0,
            ),
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
    return [
        draw_from(row) for row in connection.execute(query.order_by(columns.idx, columns.draw)).mappings()
    ]


def artifacts_of(
    connection: sa.Connection, job_id: str, kind: str, indexes: Collection[int]
) -> dict[int, Artifact]:
    """Index -> artifact of one kind, of those of these items that have one."""
    columns = schema.artifacts.c
    query = sa.select(schema.artifacts).where(
        columns.job_no == number_of(job_id), columns.kind == kind, columns.idx.in_(indexes)
    )
    return {row["idx"]: artifact_from(row) for row in connection.execute(query).mappings()}
