"""A worker's right to a shard: claimed, kept by heartbeats, and ended by the worker."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.lifecycle import (
    complete_if_over,
    crash,
    end_attempt,
    end_items,
    lock_shard,
    move_to,
    next_attempt_at,
    pause_if_over_budget,
    progressed,
    update_shard,
)
from jobs.ledger.mapping import items_of, lock_job, open_items, read_job
from jobs.ledger.records import SCHEMA_REVISION, ItemState, JobState, Lease, ShardState, Ticket
from jobs.ledger.schema import db_now, item_is, state_is
from jobs.ledger.states import DISPATCHED, OUTAGES, WORKING, AttemptOutcome, last_attempt
from jobs.ledger.workers import note_refusal, others_may_run
from pipelines.errors import ErrorCode, ServiceError

_CURRENT = sa.and_(
    schema.shards.c.job_id == sa.bindparam("of_job"),
    schema.shards.c.no == sa.bindparam("of_shard"),
    schema.shards.c.epoch == sa.bindparam("of_epoch"),
    schema.shards.c.enqueued_epoch == sa.bindparam("of_epoch"),
    state_is(schema.shards.c.state, ShardState.QUEUED),
)
_STATE_OF_JOB = sa.select(
    schema.jobs.c.state, sa.select(schema.version.c.version_num).scalar_subquery().label("revision")
).where(schema.jobs.c.id == sa.bindparam("of_job"), sa.exists().where(_CURRENT))
_TAKE = (
    sa.update(schema.shards)
    .where(
        _CURRENT,
        sa.exists().where(
            schema.jobs.c.id == sa.bindparam("of_job"), state_is(schema.jobs.c.state, JobState.RUNNING)
        ),
    )
    .values(
        state=ShardState.LEASED.value,
        epoch=schema.shards.c.epoch + 1,
        worker_id=sa.bindparam("worker"),
        lease_until=db_now() + sa.bindparam("lease_seconds", type_=sa.Double),
        heartbeat_at=db_now(),
        enqueued_epoch=None,
        enqueued_at=None,
        not_before=None,
        claimed_done=schema.shards.c.n_done,
        claimed_failed=schema.shards.c.n_failed,
    )
    .returning(*schema.shards.c)
)
_ON_TRIAL = sa.select(schema.shards.c.attempts, schema.jobs.c.max_attempts).where(
    _CURRENT, schema.shards.c.epoch > 0, schema.jobs.c.id == schema.shards.c.job_id
)
_BEGIN_ATTEMPT = sa.insert(schema.attempts).values(started_at=db_now())
_OPEN_ITEMS = (
    sa.select(schema.items.c.idx, schema.items.c.example_id, schema.items.c.attempts)
    .where(
        schema.items.c.job_no == sa.bindparam("job_no"),
        schema.items.c.idx.between(sa.bindparam("first_index"), sa.bindparam("last_index")),
        schema.items.c.shard_no == sa.bindparam("shard_no"),
        item_is(ItemState.PENDING),
    )
    .order_by(schema.items.c.idx)
)


def on_trial(connection: sa.Connection, ticket: Ticket) -> bool:
    """Whether the next crash of this shard splits it or ends its item: it should run with no other shard
    beside it."""
    of = {"of_job": ticket.job_id, "of_shard": ticket.shard_no, "of_epoch": ticket.epoch}
    row = connection.execute(_ON_TRIAL, of).one_or_none()
    return row is not None and last_attempt(row.attempts, row.max_attempts)


def claim(connection: sa.Connection, ticket: Ticket, worker_id: str, lease_seconds: float) -> Lease | None:
    """The lease on a queued shard, by compare-and-set on state and epoch.

    None: the message is old, a duplicate, or its job does not run, so drop it. Raises `ServiceError` with
    `ledger.schema` where the ledger was upgraded since the worker began: what it would write may lack what
    others look for.
    """
    of = {"of_job": ticket.job_id, "of_shard": ticket.shard_no, "of_epoch": ticket.epoch}
    row = connection.execute(_STATE_OF_JOB, of).one_or_none()
    if row is not None and row.revision != SCHEMA_REVISION:
        message = f"The ledger has the tables of another version since this worker began ({row.revision}; this is {SCHEMA_REVISION})."
        raise ServiceError(
            ErrorCode.LEDGER_SCHEMA, message, "Start a worker of the version that upgraded it."
        )
    if row is None or JobState(row.state) not in DISPATCHED:
        return None
    if row.state == JobState.READY:
        jobs = schema.jobs.c
        connection.execute(
            sa.update(schema.jobs)
            .where(jobs.id == ticket.job_id, state_is(jobs.state, JobState.READY))
            .values(state=JobState.RUNNING.value, started_at=sa.func.coalesce(jobs.started_at, db_now()))
        )
    shard = (
        connection.execute(_TAKE, {**of, "worker": worker_id, "lease_seconds": lease_seconds})
        .mappings()
        .one_or_none()
    )
    if shard is None:
        return None
    attempt = {
        "job_id": ticket.job_id,
        "shard_no": ticket.shard_no,
        "epoch": shard["epoch"],
        "worker_id": worker_id,
    }
    connection.execute(_BEGIN_ATTEMPT, attempt)
    return _lease(connection, shard)


def _lease(connection: sa.Connection, shard: sa.RowMapping) -> Lease:
    among = {name: shard[name] for name in ("job_no", "first_index", "last_index")}
    rows = connection.execute(_OPEN_ITEMS, {**among, "shard_no": shard["no"]})
    return Lease(
        job=read_job(connection, shard["job_id"]),
        shard_no=shard["no"],
        epoch=shard["epoch"],
        worker_id=shard["worker_id"],
        input_key=shard["input_key"],
        input_sha256=shard["input_sha256"],
        open_items={index: (example_id, attempts) for index, example_id, attempts in rows},
    )


def heartbeat(
    connection: sa.Connection, worker_id: str, tickets: Sequence[Ticket], lease_seconds: float
) -> set[Ticket]:
    """Extends the worker's leases and returns those that are lost (taken over, or the job was cancelled):
    stop their work."""
    if not tickets:
        return set()
    jobs, columns = schema.jobs.c, schema.shards.c
    key = sa.tuple_(columns.job_id, columns.no, columns.epoch)
    held = sa.and_(
        key.in_([(ticket.job_id, ticket.shard_no, ticket.epoch) for ticket in tickets]),
        columns.worker_id == worker_id,
        state_is(columns.state, ShardState.LEASED),
        columns.job_id.in_(sa.select(jobs.id).where(state_is(jobs.state, *WORKING))),
    )
    if connection.dialect.name == "postgresql":
        # An UPDATE locks its rows in no order; locked in order first, it cannot meet another one crosswise.
        connection.execute(
            sa.select(columns.no).where(held).order_by(columns.job_id, columns.no).with_for_update()
        )
    statement = (
        sa.update(schema.shards)
        .where(held)
        .values(lease_until=db_now() + lease_seconds, heartbeat_at=db_now())
        .returning(columns.job_id, columns.no, columns.epoch)
    )
    kept = {Ticket(job_id, no, epoch) for job_id, no, epoch in connection.execute(statement)}
    return set(tickets) - kept


def finish_shard(
    connection: sa.Connection,
    ticket: Ticket,
    manifest_key: str | None = None,
    manifest_sha256: str | None = None,
) -> bool:
    """Ends a lease: the shard is done, or its open items wait for another attempt. False: the lease was
    lost."""
    held = _lock_held(connection, ticket)
    if held is None:
        return False
    job, shard = held
    if manifest_key is not None:
        update_shard(connection, shard, manifest_key=manifest_key, manifest_sha256=manifest_sha256)
    if open_items(shard) == 0:
        end_attempt(connection, shard, AttemptOutcome.DONE)
        move_to(connection, shard, ShardState.DONE, attempts=0, outages=0)
        if complete_if_over(connection, ticket.job_id):
            return True
    elif progressed(shard) or _recorded_errors(connection, shard):
        end_attempt(connection, shard, AttemptOutcome.PARTIAL)
        items = schema.items.c
        tries = (
            connection.scalar(
                sa.select(sa.func.max(items.attempts)).where(items_of(shard), item_is(ItemState.PENDING))
            )
            or 0
        )
        move_to(
            connection,
            shard,
            ShardState.READY,
            attempts=0,
            outages=0,
            not_before=next_attempt_at(connection, tries),
        )
    else:
        message = "The worker ended the shard without an outcome for any of its open items."
        end_attempt(connection, shard, AttemptOutcome.FAILED, ErrorCode.WORKER_CRASH, message)
        crash(connection, job, shard, ErrorCode.WORKER_CRASH, message)
    if shard["n_failed"] > shard["claimed_failed"]:
        pause_if_over_budget(connection, job)
    return True


def release(connection: sa.Connection, ticket: Ticket, reason: str) -> bool:
    """Gives a shard back at once, for a worker that drains: counts as no attempt. False: the lease was
    lost."""
    held = _lock_held(connection, ticket)
    if held is None:
        return False
    job, shard = held
    end_attempt(connection, shard, AttemptOutcome.RELEASED, None, reason)
    attempts = 0 if progressed(shard) else shard["attempts"]
    if open_items(shard) == 0:
        move_to(connection, shard, ShardState.DONE, attempts=0, outages=0)
        complete_if_over(connection, job["id"])
    else:
        move_to(connection, shard, ShardState.READY, attempts=attempts, not_before=None)
    return True


def refuse(connection: sa.Connection, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """Gives back a shard that this worker cannot run and another one may: counts as no attempt. False: no
    other one may, or the lease was lost."""
    held = _lock_held(connection, ticket)
    if held is None or not others_may_run(connection, ticket.job_id, held[1]["worker_id"]):
        return False
    _, shard = held
    note_refusal(
        connection, shard["worker_id"], f"It cannot run job {ticket.job_id} ({code.value}): {message}"
    )
    end_attempt(connection, shard, AttemptOutcome.REFUSED, code, message)
    move_to(connection, shard, ShardState.READY, not_before=None)
    return True


def fail_shard(connection: sa.Connection, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """The shard as a whole could not run. False: the lease was lost.

    A service that is down costs only time; another retryable code counts like a crash; any other ends the
    open items.
    """
    held = _lock_held(connection, ticket)
    if held is None:
        return False
    job, shard = held
    end_attempt(connection, shard, AttemptOutcome.FAILED, code, message)
    if code in OUTAGES:
        outages = 1 if progressed(shard) else shard["outages"] + 1
        attempts = 0 if progressed(shard) else shard["attempts"]
        move_to(
            connection,
            shard,
            ShardState.READY,
            attempts=attempts,
            outages=outages,
            not_before=next_attempt_at(connection, outages),
        )
    elif code.retryable:
        crash(connection, job, shard, code, message)
    else:
        end_items(connection, shard, ItemState.FAILED, code, message)
        move_to(connection, shard, ShardState.DONE)
        if complete_if_over(connection, ticket.job_id):
            return True
    pause_if_over_budget(connection, job)
    return True


def _lock_held(connection: sa.Connection, ticket: Ticket) -> tuple[sa.RowMapping, sa.RowMapping] | None:
    """The rows of the job and of the shard under this lease, locked in this order; None: the lease was
    lost."""
    job = lock_job(connection, ticket.job_id)
    if job is None or JobState(job["state"]) not in WORKING:
        return None
    shard = lock_shard(connection, ticket.job_id, ticket.shard_no)
    if shard is None or shard["epoch"] != ticket.epoch or shard["state"] != ShardState.LEASED:
        return None
    return job, shard


def _recorded_errors(connection: sa.Connection, shard: sa.RowMapping) -> bool:
    errors = schema.item_errors.c
    query = sa.exists().where(
        errors.job_no == shard["job_no"],
        errors.idx.between(shard["first_index"], shard["last_index"]),
        errors.epoch == shard["epoch"],
    )
    return bool(connection.scalar(sa.select(query)))
