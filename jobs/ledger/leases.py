"""A worker's right to a shard: claimed, kept by heartbeats, and ended by the worker."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.ledger.lifecycle import (
    PENDING_OF,
    complete_if_over,
    crash,
    end_attempt,
    end_items,
    items_of,
    lock_job,
    lock_shard,
    move_to,
    of_ticket,
    open_items,
    pause_if_over_budget,
    progressed,
    ready_after,
    update_shard,
)
from jobs.ledger.records import (
    DISPATCHED,
    OUTAGES,
    SCHEMA_REVISION,
    WORKING,
    AttemptOutcome,
    ItemState,
    JobState,
    Lease,
    ShardState,
    Ticket,
    last_attempt,
)
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Row, Transaction, words
from jobs.ledger.workers import note_refusal, others_may_run
from pipelines.errors import ErrorCode, ServiceError

_QUEUED = """
shards.job_id = :job AND shards.no = :shard AND shards.epoch = :epoch AND shards.enqueued_epoch = :epoch
AND shards.state = 'queued'
"""
_STATE_OF_JOB = f"""
SELECT state, (SELECT version_num FROM alembic_version) AS revision FROM jobs
WHERE id = :job AND EXISTS (SELECT 1 FROM shards WHERE {_QUEUED})
"""
_BEGIN_JOB = """
UPDATE jobs SET state = 'running', started_at = COALESCE(started_at, <now>) WHERE id = :job AND state = 'ready'
"""
_TAKE = f"""
UPDATE shards SET state = 'leased', epoch = epoch + 1, worker_id = :worker, lease_until = <now> + :seconds,
    heartbeat_at = <now>, enqueued_epoch = NULL, enqueued_at = NULL, not_before = NULL,
    claimed_done = n_done, claimed_failed = n_failed
WHERE {_QUEUED} AND EXISTS (SELECT 1 FROM jobs WHERE id = :job AND state = 'running')
RETURNING *
"""
_EXTEND = f"""
UPDATE shards SET lease_until = <now> + :seconds, heartbeat_at = <now>
WHERE job_id = :job AND no = :shard AND epoch = :epoch AND worker_id = :worker AND state = 'leased'
AND EXISTS (SELECT 1 FROM jobs WHERE id = :job AND state IN ({words(*WORKING)}))
"""
_ON_TRIAL = f"""
SELECT shards.attempts, jobs.max_attempts FROM shards JOIN jobs ON jobs.id = shards.job_id
WHERE {_QUEUED} AND shards.epoch > 0
"""
_RECORDED_ERRORS = """
SELECT 1 FROM item_errors WHERE job_no = :job_no AND idx BETWEEN :first AND :last AND epoch = :epoch LIMIT 1
"""


def on_trial(sql: Transaction, ticket: Ticket) -> bool:
    """Whether the next crash of this shard splits it or ends its item: it should run with no other shard
    beside it."""
    row = sql.row(_ON_TRIAL, **of_ticket(ticket))
    return row is not None and last_attempt(row.attempts, row.max_attempts)


def claim(sql: Transaction, ticket: Ticket, worker_id: str, lease_seconds: float) -> Lease | None:
    """The lease on a queued shard, by compare-and-set on state and epoch.

    None: the message is old, a duplicate, or its job does not run, so drop it. Raises `ServiceError` with
    `ledger.schema` where the ledger was upgraded since the worker began: what it would write may lack what
    others look for.
    """
    job = sql.row(_STATE_OF_JOB, **of_ticket(ticket))
    if job is not None and job.revision != SCHEMA_REVISION:
        raise ServiceError(
            ErrorCode.LEDGER_SCHEMA,
            f"The ledger has the tables of another version since this worker began ({job.revision}; this is {SCHEMA_REVISION}).",
            "Start a worker of the version that upgraded it.",
        )
    if job is None or job.state not in DISPATCHED:
        return None
    if job.state == JobState.READY:
        sql.change(_BEGIN_JOB, job=ticket.job_id)
    shard = sql.row(_TAKE, **of_ticket(ticket), worker=worker_id, seconds=lease_seconds)
    if shard is None:
        return None
    begun = """
    INSERT INTO attempts (job_id, shard_no, epoch, worker_id, started_at) VALUES (:job, :shard, :epoch, :worker, <now>)
    """
    sql.change(begun, job=shard.job_id, shard=shard.no, epoch=shard.epoch, worker=worker_id)
    statement = f"SELECT idx, example_id, attempts FROM items WHERE {PENDING_OF} ORDER BY idx"
    return Lease(
        job=read_job(sql, shard.job_id),
        shard_no=shard.no,
        epoch=shard.epoch,
        worker_id=worker_id,
        input_key=shard.input_key,
        input_sha256=shard.input_sha256,
        open_items={
            index: (example_id, attempts)
            for index, example_id, attempts in sql.rows(statement, **items_of(shard))
        },
    )


def heartbeat(
    sql: Transaction, worker_id: str, tickets: Sequence[Ticket], lease_seconds: float
) -> set[Ticket]:
    """Extends the worker's leases and returns those that are lost (taken over, or the job was cancelled):
    stop their work."""
    # In order, so that no two heartbeats lock their rows crosswise.
    return {
        ticket
        for ticket in sorted(tickets, key=lambda ticket: (ticket.job_id, ticket.shard_no))
        if not sql.change(_EXTEND, **of_ticket(ticket), worker=worker_id, seconds=lease_seconds)
    }


def finish_shard(
    sql: Transaction, ticket: Ticket, manifest_key: str | None = None, manifest_sha256: str | None = None
) -> bool:
    """Ends a lease: the shard is done, or its open items wait for another attempt. False: the lease was
    lost."""
    held = _lock_held(sql, ticket)
    if held is None:
        return False
    job, shard = held
    if manifest_key is not None:
        update_shard(
            sql,
            shard,
            "manifest_key = :key, manifest_sha256 = :sha256",
            key=manifest_key,
            sha256=manifest_sha256,
        )
    if open_items(shard) == 0:
        end_attempt(sql, shard, AttemptOutcome.DONE)
        move_to(sql, shard, ShardState.DONE, "attempts = 0, outages = 0")
        if complete_if_over(sql, ticket.job_id):
            return True
    elif progressed(shard) or sql.value(_RECORDED_ERRORS, **items_of(shard), epoch=shard.epoch):
        end_attempt(sql, shard, AttemptOutcome.PARTIAL)
        tries = sql.value(f"SELECT max(attempts) FROM items WHERE {PENDING_OF}", **items_of(shard))
        ready_after(sql, shard, tries or 0, "attempts = 0, outages = 0")
    else:
        message = "The worker ended the shard without an outcome for any of its open items."
        end_attempt(sql, shard, AttemptOutcome.FAILED, ErrorCode.WORKER_CRASH, message)
        crash(sql, job, shard, message)
    if shard.n_failed > shard.claimed_failed:
        pause_if_over_budget(sql, job)
    return True


def release(sql: Transaction, ticket: Ticket, reason: str) -> bool:
    """Gives a shard back at once, for a worker that drains: counts as no attempt. False: the lease was
    lost."""
    held = _lock_held(sql, ticket)
    if held is None:
        return False
    job, shard = held
    end_attempt(sql, shard, AttemptOutcome.RELEASED, None, reason)
    if open_items(shard) == 0:
        move_to(sql, shard, ShardState.DONE, "attempts = 0, outages = 0")
        complete_if_over(sql, job.id)
    else:
        attempts = 0 if progressed(shard) else shard.attempts
        move_to(sql, shard, ShardState.READY, "attempts = :attempts, not_before = NULL", attempts=attempts)
    return True


def refuse(sql: Transaction, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """Gives back a shard that this worker cannot run and another one may: counts as no attempt. False: no
    other one may, or the lease was lost."""
    held = _lock_held(sql, ticket)
    if held is None or not others_may_run(sql, ticket.job_id, held[1].worker_id):
        return False
    _, shard = held
    note_refusal(sql, shard.worker_id, f"It cannot run job {ticket.job_id} ({code.value}): {message}")
    end_attempt(sql, shard, AttemptOutcome.REFUSED, code, message)
    move_to(sql, shard, ShardState.READY, "not_before = NULL")
    return True


def fail_shard(sql: Transaction, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """The shard as a whole could not run. False: the lease was lost.

    A service that is down costs only time; another retryable code counts like a crash; any other ends the
    open items.
    """
    held = _lock_held(sql, ticket)
    if held is None:
        return False
    job, shard = held
    end_attempt(sql, shard, AttemptOutcome.FAILED, code, message)
    if code in OUTAGES:
        outages, attempts = (1, 0) if progressed(shard) else (shard.outages + 1, shard.attempts)
        change = "attempts = :attempts, outages = :outages"
        ready_after(sql, shard, outages, change, attempts=attempts, outages=outages)
    elif code.retryable:
        crash(sql, job, shard, message)
    else:
        end_items(sql, shard, ItemState.FAILED, code, message)
        move_to(sql, shard, ShardState.DONE)
        if complete_if_over(sql, ticket.job_id):
            return True
    pause_if_over_budget(sql, job)
    return True


def _lock_held(sql: Transaction, ticket: Ticket) -> tuple[Row, Row] | None:
    """The rows of the job and of the shard under this lease, locked in this order; None: the lease was
    lost."""
    job = lock_job(sql, ticket.job_id)
    if job is None or job.state not in WORKING:
        return None
    shard = lock_shard(sql, ticket.job_id, ticket.shard_no)
    if shard is None or shard.epoch != ticket.epoch or shard.state != ShardState.LEASED:
        return None
    return job, shard
