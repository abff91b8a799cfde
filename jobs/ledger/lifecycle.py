"""How shards and jobs end: closing leases, crashes and bisection, and completing a job exactly once.

Every function here expects the job's row and the shard's row to be locked by the caller, in this order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.database import base_backoff_seconds
from jobs.ledger.mapping import insert, items_of, lock_job, open_items
from jobs.ledger.records import ItemState, JobState, ShardState, clean
from jobs.ledger.schema import ITEM_STATE_NUMBERS, db_now, item_is, state_is
from jobs.ledger.states import (
    DISPATCHED,
    WORKING,
    AttemptOutcome,
    Verdict,
    after_crash,
    attempts_after_bisection,
    backoff_seconds,
    final_state,
    over_budget,
)
from pipelines.errors import ErrorCode

#: What a shard without a lease and without a message holds.
_UNHELD = {
    "worker_id": None,
    "lease_until": None,
    "heartbeat_at": None,
    "enqueued_epoch": None,
    "enqueued_at": None,
}
#: What a queued shard becomes whose message is void.
UNQUEUED = {"state": ShardState.READY.value, "enqueued_epoch": None, "enqueued_at": None}


_LOCKED_SHARD = (
    sa.select(schema.shards)
    .where(schema.shards.c.job_id == sa.bindparam("job_id"), schema.shards.c.no == sa.bindparam("shard_no"))
    .with_for_update()
)
_END_ATTEMPT = (
    sa.update(schema.attempts)
    .where(
        schema.attempts.c.job_id == sa.bindparam("of_job"),
        schema.attempts.c.shard_no == sa.bindparam("of_shard"),
        schema.attempts.c.epoch == sa.bindparam("of_epoch"),
    )
    .values(
        ended_at=sa.func.coalesce(sa.bindparam("at", type_=sa.Double), db_now()),
        **{
            name: sa.bindparam(name)
            for name in ("outcome", "n_ok", "n_failed", "error_code", "error_message")
        },
    )
)
#: One EXISTS for each state, so that each uses its partial index; in one statement, so that a shard that
#: changes its state meanwhile is in one of them.
_HAS_OPEN_SHARD = sa.select(
    sa.or_(
        *[
            sa.exists().where(
                schema.shards.c.job_id == sa.bindparam("job_id"), state_is(schema.shards.c.state, state)
            )
            for state in (ShardState.READY, ShardState.LEASED, ShardState.QUEUED)
        ]
    )
)


def lock_shard(connection: sa.Connection, job_id: str, shard_no: int) -> sa.RowMapping | None:
    """The row of a shard, locked until the end of the transaction."""
    return (
        connection.execute(_LOCKED_SHARD, {"job_id": job_id, "shard_no": shard_no}).mappings().one_or_none()
    )


def update_shard(connection: sa.Connection, shard: sa.RowMapping, **values: object) -> None:
    """Sets columns of a shard to values or to expressions."""
    plain = {name: value for name, value in values.items() if not isinstance(value, sa.ClauseElement)}
    statement = _set_columns(tuple(plain))
    if len(plain) < len(values):
        statement = statement.values({name: value for name, value in values.items() if name not in plain})
    connection.execute(statement, {"of_job": shard["job_id"], "of_shard": shard["no"], **plain})


def move_to(connection: sa.Connection, shard: sa.RowMapping, state: ShardState, **values: object) -> None:
    """Puts a shard into a state in which it has no lease and no message, and sets other columns with it."""
    update_shard(connection, shard, state=state.value, **values, **_UNHELD)


def update_job(connection: sa.Connection, job_id: str, **values: object) -> None:
    """Sets columns of a job to values or to expressions."""
    connection.execute(sa.update(schema.jobs).where(schema.jobs.c.id == job_id).values(**values))


def ended_items(connection: sa.Connection, job_id: str) -> tuple[int, int]:
    """(items done, items failed) of a job."""
    columns = schema.shards.c
    sums = sa.select(
        sa.func.coalesce(sa.func.sum(columns.n_done), 0), sa.func.coalesce(sa.func.sum(columns.n_failed), 0)
    )
    done, failed = connection.execute(sums.where(columns.job_id == job_id)).one()
    return int(done), int(failed)


@lru_cache(maxsize=64)
def _set_columns(names: tuple[str, ...]) -> sa.Update:
    columns = schema.shards.c
    return (
        sa.update(schema.shards)
        .where(columns.job_id == sa.bindparam("of_job"), columns.no == sa.bindparam("of_shard"))
        .values({name: sa.bindparam(name) for name in names})
    )


def next_attempt_at(connection: sa.Connection, attempts: int) -> sa.ColumnElement[float]:
    """When the next attempt is due: now and the backoff after `attempts`."""
    return db_now() + backoff_seconds(attempts, random.random(), base_backoff_seconds(connection))


def end_attempt(
    connection: sa.Connection,
    shard: sa.RowMapping,
    outcome: AttemptOutcome,
    code: ErrorCode | None = None,
    message: str | None = None,
) -> None:
    """Closes the row of the lease in `attempts`; a lease that ran out ended at that time, not when that is
    found."""
    connection.execute(
        _END_ATTEMPT,
        {
            "of_job": shard["job_id"],
            "of_shard": shard["no"],
            "of_epoch": shard["epoch"],
            # No lease ends before its last heartbeat.
            "at": max(shard["lease_until"], shard["heartbeat_at"])
            if outcome is AttemptOutcome.EXPIRED
            else None,
            "outcome": outcome.value,
            "n_ok": shard["n_done"] - shard["claimed_done"],
            "n_failed": max(0, shard["n_failed"] - shard["claimed_failed"]),
            "error_code": None if code is None else code.value,
            "error_message": None if message is None else clean(message),
        },
    )


def progressed(shard: sa.RowMapping) -> bool:
    """Whether items ended under the present lease."""
    return shard["n_done"] + shard["n_failed"] > shard["claimed_done"] + shard["claimed_failed"]


def crash(
    connection: sa.Connection, job: sa.RowMapping, shard: sa.RowMapping, code: ErrorCode, message: str
) -> Verdict:
    """Ends a lease that gave no outcome for its open items: another attempt, a bisection, or a single item
    that is dead."""
    still_open = open_items(shard)
    after = after_crash(still_open, shard["attempts"], job["max_attempts"], progressed(shard))
    if after.verdict is Verdict.RETRY:
        move_to(
            connection,
            shard,
            ShardState.READY,
            attempts=after.attempts,
            not_before=next_attempt_at(connection, after.attempts),
        )
    elif after.verdict is Verdict.BISECT:
        bisect(connection, job, shard)
    elif after.verdict is Verdict.MARK_DEAD:
        end_items(connection, shard, ItemState.DEAD, ErrorCode.POISON_WORKER_CRASH, message)
        move_to(connection, shard, ShardState.DEAD, attempts=after.attempts)
    else:
        move_to(connection, shard, ShardState.DONE, attempts=after.attempts)
    complete_if_over(connection, shard["job_id"])
    return after.verdict


def bisect(connection: sa.Connection, job: sa.RowMapping, shard: sa.RowMapping) -> None:
    """Moves the upper half of the open items to a new shard, which reads the same input object; the lower
    half stays."""
    items, columns = schema.items.c, schema.shards.c
    pending = list(
        connection.scalars(
            sa.select(items.idx).where(items_of(shard), item_is(ItemState.PENDING)).order_by(items.idx)
        )
    )
    upper = pending[len(pending) // 2 :]
    number = connection.scalar(
        sa.select(sa.func.max(columns.no) + 1).where(columns.job_id == shard["job_id"])
    )
    moved = connection.execute(
        sa.update(schema.items)
        .where(items_of(shard), items.idx >= upper[0], item_is(ItemState.PENDING))
        .values(shard_no=number)
    ).rowcount
    kept = len(pending) - moved
    upper_estimate = shard["estimated_ms"] * moved // max(1, shard["n_items"])
    connection.execute(
        sa.insert(schema.shards).values(
            job_id=shard["job_id"],
            job_no=shard["job_no"],
            no=number,
            first_index=upper[0],
            last_index=upper[-1],
            n_items=moved,
            estimated_ms=upper_estimate,
            # The epoch of an item rises, whichever shard the item is in.
            epoch=shard["epoch"],
            attempts=attempts_after_bisection(moved, job["max_attempts"]),
            not_before=next_attempt_at(connection, 1),
            input_key=shard["input_key"],
            input_sha256=shard["input_sha256"],
        )
    )
    move_to(
        connection,
        shard,
        ShardState.READY,
        n_items=shard["n_items"] - moved,
        estimated_ms=shard["estimated_ms"] - upper_estimate,
        attempts=attempts_after_bisection(kept, job["max_attempts"]),
        not_before=next_attempt_at(connection, 1),
    )
    update_job(connection, shard["job_id"], total_shards=schema.jobs.c.total_shards + 1)


def end_items(
    connection: sa.Connection, shard: sa.RowMapping, state: ItemState, code: ErrorCode, message: str
) -> int:
    """Ends every open item of a shard with one error, and counts them; returns how many."""
    items = schema.items.c
    pending = list(
        connection.scalars(sa.select(items.idx).where(items_of(shard), item_is(ItemState.PENDING)))
    )
    record_errors(connection, shard, [(index, code, message) for index in pending])
    ended = connection.execute(
        sa.update(schema.items)
        .where(items_of(shard), item_is(ItemState.PENDING))
        .values(
            state=ITEM_STATE_NUMBERS[state],
            error_code=code.value,
            error_message=clean(message),
            attempts=items.attempts + 1,
        )
    ).rowcount
    update_shard(connection, shard, n_failed=schema.shards.c.n_failed + ended)
    return ended


def record_errors(
    connection: sa.Connection, shard: sa.RowMapping, errors: Sequence[tuple[int, ErrorCode, str]]
) -> None:
    """Rows of `item_errors`: the last error of an item under a lease is the one that is kept."""
    if not errors:
        return
    statement = insert(connection, schema.item_errors).values(at=db_now())
    kept = {name: statement.excluded[name] for name in ("code", "message", "retryable", "at")}
    connection.execute(
        statement.on_conflict_do_update(index_elements=["job_no", "idx", "epoch"], set_=kept),
        [
            {
                "job_no": shard["job_no"],
                "idx": index,
                "epoch": shard["epoch"],
                "code": code.value,
                "message": clean(message),
                "retryable": code.retryable,
            }
            for index, code, message in errors
        ],
    )


def has_open_shards(connection: sa.Connection, job_id: str) -> bool:
    return bool(connection.scalar(_HAS_OPEN_SHARD, {"job_id": job_id}))


def complete_if_over(connection: sa.Connection, job_id: str) -> bool:
    """Completes a job whose shards have all ended. The lock on the job makes the last shard the only one
    to do so."""
    if has_open_shards(connection, job_id):
        return False
    jobs = schema.jobs.c
    _, failed = ended_items(connection, job_id)
    rejected = connection.scalar(sa.select(jobs.rejected_lines).where(jobs.id == job_id)) or 0
    statement = (
        sa.update(schema.jobs)
        .where(jobs.id == job_id, state_is(jobs.state, *WORKING))
        .values(state=final_state(failed, rejected).value, state_reason="", finished_at=db_now())
    )
    return connection.execute(statement).rowcount == 1


def judge_budget(connection: sa.Connection, job_id: str) -> None:
    """Pauses a job that fails too often. Runs after a commit, whose own transaction has locked a shard and
    must not lock the job."""
    job = lock_job(connection, job_id)
    if job is not None:
        pause_if_over_budget(connection, job)


def pause_if_over_budget(connection: sa.Connection, job: sa.RowMapping) -> None:
    """Pauses a job that fails too often."""
    reason = spent_budget(connection, job)
    if reason is not None:
        pause_job(connection, job["id"], reason)


def spent_budget(connection: sa.Connection, job: sa.RowMapping) -> str | None:
    """Why a job that is dispatched should pause, or None."""
    if job["error_budget"] is None or JobState(job["state"]) not in DISPATCHED:
        return None
    done, failed = ended_items(connection, job["id"])
    pending = max(0, job["total_items"] - done - failed)
    done, failed = max(0, done - job["budget_from_done"]), max(0, failed - job["budget_from_failed"])
    if not over_budget(job["error_budget"], done, failed, pending):
        return None
    return f"error budget: {failed} of {done + failed} items failed, more than {job['error_budget']:.1%}"


def pause_job(connection: sa.Connection, job_id: str, reason: str) -> None:
    """Pauses a job: its messages are void at once; its leases go on."""
    update_job(
        connection, job_id, state=JobState.PAUSED.value, state_reason=clean(reason), paused_at=db_now()
    )
    columns = schema.shards.c
    queued = sa.update(schema.shards).where(
        columns.job_id == job_id, state_is(columns.state, ShardState.QUEUED)
    )
    connection.execute(queued.values(**UNQUEUED))
