"""Puts right what died in between: expired leases, lost messages, stale workers, wrong times, unfinished cancels, missing manifests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.endings import complete_if_over, crash, end_attempt, has_open_shards, lock_shard, pause_if_over_budget, spent_budget
from jobs.ledger.engine import Database
from jobs.ledger.manifests import without_manifest
from jobs.ledger.people import cancel_some
from jobs.ledger.records import JobState, ReconcileReport, ShardState
from jobs.ledger.rows import lock_job, read_job
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import WORKING, AttemptOutcome, Verdict
from jobs.ledger.times import any_ahead, bring_back
from jobs.ledger.workers import HEARD, stale_workers
from pipelines.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class _Damage:
    """What a look at the ledger, without any lock, finds to be put right."""

    expired: list[tuple[str, int]]
    lost_messages: list[tuple[str, int]]
    stale_workers: int
    cancelling: list[str]
    #: Jobs to be completed, or paused for their error budget.
    judged: list[str]
    times_ahead: bool
    without_manifest: list[str]


def reconcile(database: Database, queued_timeout_seconds: float, worker_timeout_seconds: float) -> ReconcileReport:
    """One pass; any process may run it, also several at once. Writes only where there is something to put right."""
    damage = database.read(_look, queued_timeout_seconds, worker_timeout_seconds)
    times_ahead = database.write(bring_back) if damage.times_ahead else 0
    verdicts = Counter(database.write(_expire, job_id, no) for job_id, no in damage.expired)
    lost = sum(database.write(_requeue, job_id, no, queued_timeout_seconds) for job_id, no in damage.lost_messages)
    stale = database.write(stale_workers, worker_timeout_seconds) if damage.stale_workers else 0
    for job_id in damage.cancelling:
        while database.write(cancel_some, job_id):
            pass
    for job_id in damage.judged:
        database.write(_judge, job_id)
    touched = {job_id for job_id, _ in damage.expired}.union(damage.cancelling, damage.judged)
    return ReconcileReport(
        expired_leases=verdicts.total() - verdicts[None],
        lost_messages=lost,
        bisected_shards=verdicts[Verdict.BISECT],
        dead_items=verdicts[Verdict.BURY],
        stale_workers=stale,
        times_ahead=times_ahead,
        ended_jobs=tuple(sorted(job_id for job_id in touched if database.read(read_job, job_id).state.final)),
        without_manifest=tuple(damage.without_manifest),
    )


def _look(connection: sa.Connection, queued_timeout_seconds: float, worker_timeout_seconds: float) -> _Damage:
    jobs, columns, workers = schema.jobs.c, schema.shards.c, schema.workers.c
    # Not sorted by SQL, which would walk the primary key instead of the small partial indexes.
    shards = sa.select(columns.job_id, columns.no)
    expired = connection.execute(shards.where(state_is(columns.state, ShardState.LEASED), columns.lease_until < db_now()))
    lost = connection.execute(
        shards.where(state_is(columns.state, ShardState.QUEUED), columns.enqueued_at < db_now() - queued_timeout_seconds)
    )
    stale = sa.select(sa.func.count()).where(HEARD, workers.heartbeat_at < db_now() - worker_timeout_seconds)
    working = connection.execute(sa.select(schema.jobs).where(state_is(jobs.state, *WORKING)).order_by(jobs.id)).mappings().all()
    return _Damage(
        expired=sorted((job_id, no) for job_id, no in expired),
        lost_messages=sorted((job_id, no) for job_id, no in lost),
        stale_workers=connection.scalar(stale) or 0,
        cancelling=list(connection.scalars(sa.select(jobs.id).where(state_is(jobs.state, JobState.CANCELLING)))),
        judged=[job["id"] for job in working if spent_budget(connection, job) or not has_open_shards(connection, job["id"])],
        times_ahead=any_ahead(connection),
        without_manifest=without_manifest(connection),
    )


def _expire(connection: sa.Connection, job_id: str, shard_no: int) -> Verdict | None:
    """Ends a lease that ran out; None: it did not, after all."""
    job = lock_job(connection, job_id)
    shard = lock_shard(connection, job_id, shard_no)
    if job is None or shard is None or JobState(job["state"]) not in WORKING or shard["state"] != ShardState.LEASED:
        return None
    if shard["lease_until"] >= (connection.scalar(sa.select(db_now())) or 0.0):
        return None
    message = f"The lease of worker {shard['worker_id']} ran out: it died, hung, or lost the ledger."
    end_attempt(connection, shard, AttemptOutcome.EXPIRED, ErrorCode.WORKER_LOST, message)
    return crash(connection, job, shard, ErrorCode.WORKER_LOST, message)


def _requeue(connection: sa.Connection, job_id: str, shard_no: int, timeout_seconds: float) -> int:
    """A shard whose message was lost becomes ready; a message that turns up later is dropped or does no harm."""
    columns = schema.shards.c
    statement = (
        sa.update(schema.shards)
        .where(
            columns.job_id == job_id,
            columns.no == shard_no,
            state_is(columns.state, ShardState.QUEUED),
            columns.enqueued_at < db_now() - timeout_seconds,
        )
        .values(state=ShardState.READY.value, enqueued_epoch=None, enqueued_at=None)
    )
    return connection.execute(statement).rowcount


def _judge(connection: sa.Connection, job_id: str) -> None:
    job = lock_job(connection, job_id)
    if job is not None and JobState(job["state"]) in WORKING and not complete_if_over(connection, job_id):
        pause_if_over_budget(connection, job)
