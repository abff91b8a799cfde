"""Repairs what crashes leave behind: expired leases, lost messages, stale workers, wrong times, unfinished
cancels, missing manifests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from jobs.layout import draw_of, index_of, is_reference_key, job_prefix, lease_of_pack, shard_of_input
from jobs.ledger import schema
from jobs.ledger.control import cancel_some
from jobs.ledger.database import Database
from jobs.ledger.lifecycle import (
    UNQUEUED,
    complete_if_over,
    crash,
    end_attempt,
    has_open_shards,
    lock_shard,
    pause_if_over_budget,
    spent_budget,
)
from jobs.ledger.mapping import lock_job, read_job, read_row
from jobs.ledger.records import ItemState, JobState, ShardState
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import (
    CLOCK_SLACK_SECONDS,
    MANIFEST_GRACE_SECONDS,
    MAX_BACKOFF_SECONDS,
    RETRYABLE_JOBS,
    WORKING,
    AttemptOutcome,
    Verdict,
)
from jobs.ledger.workers import HEARD, stale_workers
from jobs.times import LONGEST_LEASE_SECONDS
from pipelines.errors import ErrorCode

_SHARDS, _WORKERS = schema.shards.c, schema.workers.c
_BEAT_AHEAD = sa.and_(
    state_is(_SHARDS.state, ShardState.LEASED), _SHARDS.heartbeat_at > db_now() + CLOCK_SLACK_SECONDS
)
_LEASE_AHEAD = sa.and_(
    state_is(_SHARDS.state, ShardState.LEASED),
    _SHARDS.lease_until > db_now() + LONGEST_LEASE_SECONDS + CLOCK_SLACK_SECONDS,
)
_WAIT_AHEAD = sa.and_(
    state_is(_SHARDS.state, ShardState.READY),
    _SHARDS.not_before > db_now() + MAX_BACKOFF_SECONDS + CLOCK_SLACK_SECONDS,
)
_MESSAGE_AHEAD = sa.and_(
    state_is(_SHARDS.state, ShardState.QUEUED), _SHARDS.enqueued_at > db_now() + CLOCK_SLACK_SECONDS
)
_WORKER_AHEAD = sa.and_(HEARD, _WORKERS.heartbeat_at > db_now() + CLOCK_SLACK_SECONDS)

#: Where rows may lie ahead, and what they become: as if their times had been written now. A worker that lives
#: keeps its lease, and a dead one's runs out in its time; a lease whose length makes no sense runs out at
#: once.
_REPAIRS = (
    (
        schema.shards,
        _BEAT_AHEAD,
        {"lease_until": db_now() + (_SHARDS.lease_until - _SHARDS.heartbeat_at), "heartbeat_at": db_now()},
    ),
    (schema.shards, _LEASE_AHEAD, {"lease_until": db_now()}),
    (schema.shards, _WAIT_AHEAD, {"not_before": None}),
    (schema.shards, _MESSAGE_AHEAD, {"enqueued_at": db_now()}),
    (schema.workers, _WORKER_AHEAD, {"heartbeat_at": db_now()}),
)


def has_future_times(connection: sa.Connection) -> bool:
    """Whether a time lies further in the future than is possible."""
    return any(connection.scalar(sa.select(sa.exists().where(ahead))) for _, ahead, _ in _REPAIRS)


def correct_times(connection: sa.Connection) -> int:
    """Corrects times that lie too far in the future; returns the number of rows."""
    return sum(
        connection.execute(sa.update(table).where(ahead).values(**values)).rowcount
        for table, ahead, values in _REPAIRS
    )


#: Jobs that one pass of the reconciler names.
JOBS_AT_ONCE = 10
_FINAL = tuple(state for state in JobState if state.final)


def without_manifest(connection: sa.Connection) -> list[str]:
    """Some jobs that ended a while ago and whose manifest is not recorded: others each time, so that none
    waits behind those that fail."""
    jobs = schema.jobs.c
    # A wrong clock may have ended a job in the future; it ended a while ago, too.
    ended = sa.or_(
        jobs.finished_at < db_now() - MANIFEST_GRACE_SECONDS,
        jobs.finished_at > db_now() + CLOCK_SLACK_SECONDS,
    )
    query = sa.select(jobs.id).where(
        state_is(jobs.state, *_FINAL),
        ended,
        sa.or_(jobs.manifest_finished_at.is_(None), jobs.manifest_finished_at != jobs.finished_at),
    )
    return list(connection.scalars(query.order_by(sa.func.random()).limit(JOBS_AT_ONCE)))


def note_manifest(connection: sa.Connection, job_id: str, finished_at: float | None) -> None:
    """Records that the manifest of this end of a job is written; does nothing where the job continued
    meanwhile."""
    jobs = schema.jobs.c
    statement = sa.update(schema.jobs).where(jobs.id == job_id, jobs.finished_at == finished_at)
    connection.execute(statement.values(manifest_finished_at=finished_at))


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What one pass of the reconciler repaired."""

    expired_leases: int = 0
    lost_messages: int = 0
    bisected_shards: int = 0
    dead_items: int = 0
    stale_workers: int = 0
    #: Rows with a time further ahead than possible: the database's clock was wrong, and is right again.
    times_ahead: int = 0
    #: Jobs that ended in this pass.
    ended_jobs: tuple[str, ...] = ()
    #: Some of the jobs that ended a while ago and have no manifest.
    without_manifest: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """What was repaired in the ledger, by kind."""
        return {
            name: value for name in self.__dataclass_fields__ if isinstance(value := getattr(self, name), int)
        }

    @property
    def changed(self) -> bool:
        return any(self.counts.values()) or bool(self.ended_jobs)


@dataclass(frozen=True, slots=True)
class _Findings:
    """What a read of the ledger, without any lock, finds to repair."""

    expired: list[tuple[str, int]]
    lost_messages: list[tuple[str, int]]
    stale_workers: int
    cancelling: list[str]
    #: Jobs to be completed, or paused for their error budget.
    judged: list[str]
    times_ahead: bool
    without_manifest: list[str]


def reconcile(
    database: Database, queued_timeout_seconds: float, worker_timeout_seconds: float
) -> ReconcileReport:
    """One pass; any process may run it, also several at once. Writes only where there is something to
    repair."""
    found = database.read(_find, queued_timeout_seconds, worker_timeout_seconds)
    times_ahead = database.write(correct_times) if found.times_ahead else 0
    verdicts = Counter(database.write(_expire, job_id, no) for job_id, no in found.expired)
    lost = sum(
        database.write(_requeue, job_id, no, queued_timeout_seconds) for job_id, no in found.lost_messages
    )
    stale = database.write(stale_workers, worker_timeout_seconds) if found.stale_workers else 0
    for job_id in found.cancelling:
        while database.write(cancel_some, job_id):
            pass
    for job_id in found.judged:
        database.write(_judge, job_id)
    touched = {job_id for job_id, _ in found.expired}.union(found.cancelling, found.judged)
    return ReconcileReport(
        expired_leases=verdicts.total() - verdicts[None],
        lost_messages=lost,
        bisected_shards=verdicts[Verdict.BISECT],
        dead_items=verdicts[Verdict.MARK_DEAD],
        stale_workers=stale,
        times_ahead=times_ahead,
        ended_jobs=tuple(sorted(job_id for job_id in touched if database.read(read_job, job_id).state.final)),
        without_manifest=tuple(found.without_manifest),
    )


def _find(
    connection: sa.Connection, queued_timeout_seconds: float, worker_timeout_seconds: float
) -> _Findings:
    jobs, columns, workers = schema.jobs.c, schema.shards.c, schema.workers.c
    # Not sorted by SQL, which would walk the primary key instead of the small partial indexes.
    shards = sa.select(columns.job_id, columns.no)
    expired = connection.execute(
        shards.where(state_is(columns.state, ShardState.LEASED), columns.lease_until < db_now())
    )
    lost = connection.execute(
        shards.where(
            state_is(columns.state, ShardState.QUEUED),
            columns.enqueued_at < db_now() - queued_timeout_seconds,
        )
    )
    stale = sa.select(sa.func.count()).where(HEARD, workers.heartbeat_at < db_now() - worker_timeout_seconds)
    working = (
        connection.execute(sa.select(schema.jobs).where(state_is(jobs.state, *WORKING)).order_by(jobs.id))
        .mappings()
        .all()
    )
    return _Findings(
        expired=sorted((job_id, no) for job_id, no in expired),
        lost_messages=sorted((job_id, no) for job_id, no in lost),
        stale_workers=connection.scalar(stale) or 0,
        cancelling=list(
            connection.scalars(sa.select(jobs.id).where(state_is(jobs.state, JobState.CANCELLING)))
        ),
        judged=[
            job["id"]
            for job in working
            if spent_budget(connection, job) or not has_open_shards(connection, job["id"])
        ],
        times_ahead=has_future_times(connection),
        without_manifest=without_manifest(connection),
    )


def _expire(connection: sa.Connection, job_id: str, shard_no: int) -> Verdict | None:
    """Ends a lease that ran out; None: it has not run out."""
    job = lock_job(connection, job_id)
    shard = lock_shard(connection, job_id, shard_no)
    if (
        job is None
        or shard is None
        or JobState(job["state"]) not in WORKING
        or shard["state"] != ShardState.LEASED
    ):
        return None
    if shard["lease_until"] >= (connection.scalar(sa.select(db_now())) or 0.0):
        return None
    message = f"The lease of worker {shard['worker_id']} ran out: it died, hung, or lost the ledger."
    end_attempt(connection, shard, AttemptOutcome.EXPIRED, ErrorCode.WORKER_LOST, message)
    return crash(connection, job, shard, ErrorCode.WORKER_LOST, message)


def _requeue(connection: sa.Connection, job_id: str, shard_no: int, timeout_seconds: float) -> int:
    """A shard whose message was lost becomes ready; a message that turns up later is dropped or does no
    harm."""
    columns = schema.shards.c
    statement = (
        sa.update(schema.shards)
        .where(
            columns.job_id == job_id,
            columns.no == shard_no,
            state_is(columns.state, ShardState.QUEUED),
            columns.enqueued_at < db_now() - timeout_seconds,
        )
        .values(**UNQUEUED)
    )
    return connection.execute(statement).rowcount


def _judge(connection: sa.Connection, job_id: str) -> None:
    job = lock_job(connection, job_id)
    if job is not None and JobState(job["state"]) in WORKING and not complete_if_over(connection, job_id):
        pause_if_over_budget(connection, job)


#: Longer than a store with all its tries takes to delete an object or to give up.
LONGEST_DELETE_SECONDS = 600
#: Input objects by (key, SHA-256).
Inputs = frozenset[tuple[str, str]]


def is_orphan(
    connection: sa.Connection, job_id: str, key: str, ended_before: float, read: Inputs = frozenset()
) -> bool:
    """Whether a job that ended before that time wrote `key`, and nothing names it or may still come to
    name it.

    `read`: the inputs in which no line names the key, where it is one of reference audio.
    """
    return _is_orphan(connection, read_row(connection, job_id), key, ended_before, read)


def delete_orphan(
    connection: sa.Connection,
    job_id: str,
    key: str,
    ended_before: float,
    delete: Callable[[], None],
    read: Inputs = frozenset(),
) -> bool:
    """Calls `delete` while the job's row is locked, so that no retry begins meanwhile, if `key` is an
    orphan then."""
    if connection.dialect.name == "postgresql":
        # A store may take its time to delete, and until it has, the lock must hold; only a retry of this job
        # waits for it.
        connection.execute(
            sa.text(f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_DELETE_SECONDS * 1000}")
        )
    if not _is_orphan(connection, lock_job(connection, job_id), key, ended_before, read):
        return False
    delete()
    return True


def _is_orphan(
    connection: sa.Connection, job: sa.RowMapping | None, key: str, ended_before: float, read: Inputs
) -> bool:
    if (
        job is None
        or not JobState(job["state"]).final
        or job["finished_at"] is None
        or job["finished_at"] > ended_before
    ):
        return False
    kind = key.removeprefix(job_prefix(job["id"])).partition("/")[0]
    if kind == "input":
        return _is_unread_input(connection, job["id"], key)
    if kind == "references":
        return is_reference_key(key, job["id"]) and read == _inputs(connection, job["id"])
    if kind == "packs":
        return _is_unnamed_pack(connection, job, key)
    return _is_unnamed(connection, job, kind, key)


def _is_unnamed(connection: sa.Connection, job: sa.RowMapping, kind: str, key: str) -> bool:
    """A key of an item that has ended, and that no artifact of the item has.

    An item that failed may be tried again, maybe by a ledger that is newer than this one: of its objects
    only those of draws that are recorded as refused are of no use.
    """
    index, items, artifacts, draws = index_of(key), schema.items.c, schema.artifacts.c, schema.draws.c
    item = connection.execute(
        sa.select(items.example_id, items.state).where(items.job_no == job["no"], items.idx == index)
    ).one_or_none()
    if index is None or item is None:
        return False
    draw = draw_of(
        key,
        job["id"],
        kind,
        index,
        item.example_id,
        "txt" if kind == "text" else job["spec"].get("format", "wav"),
    )
    if draw is None:
        return False
    named = sa.exists().where(artifacts.job_no == job["no"], artifacts.idx == index, artifacts.key == key)
    if connection.scalar(sa.select(named)):
        return False
    if (
        schema.ITEM_STATES[item.state] in (ItemState.DONE, ItemState.SKIPPED)
        or JobState(job["state"]) not in RETRYABLE_JOBS
    ):
        return True
    return bool(
        connection.scalar(
            sa.select(sa.exists().where(draws.job_no == job["no"], draws.idx == index, draws.draw == draw))
        )
    )


def _is_unnamed_pack(connection: sa.Connection, job: sa.RowMapping, key: str) -> bool:
    """The key of a pack that holds no artifact, of a lease that this ledger knows. What is in it was never
    committed, and is never adopted; one item that is in it keeps a whole pack."""
    lease, shards, artifacts = lease_of_pack(key, job["id"]), schema.shards.c, schema.artifacts.c
    if lease is None:
        return False
    shard_no, epoch = lease
    last_epoch = connection.scalar(
        sa.select(shards.epoch).where(shards.job_id == job["id"], shards.no == shard_no)
    )
    if last_epoch is None or epoch > last_epoch:
        return False
    return not connection.scalar(
        sa.select(sa.exists().where(artifacts.job_no == job["no"], artifacts.pack == key))
    )


def _is_unread_input(connection: sa.Connection, job_id: str, key: str) -> bool:
    """The key of an input of one of the job's shards, left by an ingest that was broken off, which no
    shard reads."""
    shard_no, columns = shard_of_input(key, job_id), schema.shards.c
    rows = connection.execute(sa.select(columns.no, columns.input_key).where(columns.job_id == job_id)).all()
    return shard_no in {row.no for row in rows} and key not in {row.input_key for row in rows}


def _inputs(connection: sa.Connection, job_id: str) -> Inputs:
    columns = schema.shards.c
    rows = connection.execute(
        sa.select(columns.input_key, columns.input_sha256).where(columns.job_id == job_id)
    )
    return frozenset((key, sha256) for key, sha256 in rows)
