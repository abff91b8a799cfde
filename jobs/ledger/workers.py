"""The worker processes that the ledger knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.mapping import insert
from jobs.ledger.records import ShardState, WorkerInfo, clean
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import LIVE_SECONDS, LOST, QUARANTINED, RETIRED, UP, AttemptOutcome
from pipelines.errors import ErrorCode, NotFoundError, ServiceError

#: The model of a worker that serves whatever the jobs ask for.
ANY_MODEL = ""

#: Workers whose heartbeats are waited for.
HEARD = schema.workers.c.state.not_in([RETIRED, LOST])


def _live(seconds: float) -> sa.ColumnElement[bool]:
    columns = schema.workers.c
    return sa.and_(HEARD, columns.heartbeat_at >= db_now() - seconds)


_LIVE_SLOTS = (
    sa.select(schema.workers.c.model, sa.func.sum(schema.workers.c.slots))
    .where(_live(LIVE_SECONDS), schema.workers.c.state == UP)
    .group_by(schema.workers.c.model)
)


def register_worker(connection: sa.Connection, info: WorkerInfo) -> None:
    """Adds a worker. Raises `ServiceError` with `ledger.shared_sqlite` where a worker of another host uses
    the same SQLite file."""
    columns = schema.workers.c
    if connection.dialect.name == "sqlite":
        other = connection.scalar(
            sa.select(columns.host).where(_live(LIVE_SECONDS), columns.host != clean(info.host)).limit(1)
        )
        if other is not None:
            raise ServiceError(
                ErrorCode.LEDGER_SHARED_SQLITE,
                f"This SQLite ledger is in use by a worker on host {other!r}, and SQLite cannot be shared between hosts.",
                "Use a PostgreSQL ledger for workers on several hosts.",
            )
    values = {
        "host": clean(info.host),
        "pid": info.pid,
        "gpu": clean(info.gpu),
        "model": clean(info.model),
        "version": clean(info.version),
        "slots": info.slots,
        "state": UP,
        "started_at": db_now(),
        "heartbeat_at": db_now(),
    }
    statement = insert(connection, schema.workers).values(id=info.id, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def worker_heartbeat(
    connection: sa.Connection, worker_id: str, state: str = UP, slots: int | None = None
) -> None:
    """A sign of life; `slots`: shards that the worker can use now, where that changes. Only workers in
    state `up` widen the window.

    Raises `NotFoundError` for a worker that never registered.
    """
    values: dict[str, object] = {"heartbeat_at": db_now(), "state": state}
    if slots is not None:
        values["slots"] = slots
    statement = sa.update(schema.workers).where(schema.workers.c.id == worker_id).values(values)
    if connection.execute(statement).rowcount == 0:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Worker {clean(worker_id)!r} is not registered.",
            "Start the worker again.",
        )


def retire_worker(connection: sa.Connection, worker_id: str) -> None:
    """Marks a worker that gave back what it held and ends."""
    connection.execute(
        sa.update(schema.workers)
        .where(schema.workers.c.id == worker_id)
        .values(state=RETIRED, heartbeat_at=db_now())
    )


def stale_workers(connection: sa.Connection, timeout_seconds: float) -> int:
    """Marks workers without a heartbeat as lost; returns how many."""
    columns = schema.workers.c
    statement = (
        sa.update(schema.workers)
        .where(HEARD, columns.heartbeat_at < db_now() - timeout_seconds)
        .values(state=LOST)
    )
    return connection.execute(statement).rowcount


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The place of a worker that keeps failing: a GPU, or the host where there is none."""

    gpu: str
    version: str
    reason: str


def report_quarantines(
    connection: sa.Connection, host: str, pid: int, quarantines: Sequence[Quarantine]
) -> None:
    """A sign of life of a process that starts workers, with those that it has quarantined; others that it
    had are none any more."""
    columns = schema.workers.c
    ids: list[str] = []
    for one in quarantines:
        ids.append(clean(f"{host}-{pid}-quarantine-{one.gpu or 'none'}"))
        facts = {
            "host": clean(host),
            "pid": pid,
            "gpu": clean(one.gpu),
            "model": ANY_MODEL,
            "version": clean(one.version),
            "slots": 0,
        }
        now = {"state": QUARANTINED, "state_reason": clean(one.reason), "heartbeat_at": db_now()}
        statement = insert(connection, schema.workers).values(id=ids[-1], started_at=db_now(), **facts, **now)
        connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=now))
    over = (
        columns.host == clean(host),
        columns.pid == pid,
        columns.state == QUARANTINED,
        columns.id.not_in(ids),
    )
    connection.execute(sa.update(schema.workers).where(*over).values(state=RETIRED, heartbeat_at=db_now()))


def others_may_run(connection: sa.Connection, job_id: str, worker_id: str) -> bool:
    """Whether a job that this worker cannot run may still be run by another one: items of it are done, or
    another live worker takes its model and did not refuse it the last time."""
    jobs, shards, attempts, columns = schema.jobs.c, schema.shards.c, schema.attempts.c, schema.workers.c
    refused_at = sa.func.max(sa.case((attempts.outcome == AttemptOutcome.REFUSED.value, attempts.started_at)))
    refused = sa.select(attempts.worker_id).where(attempts.job_id == job_id).group_by(attempts.worker_id)
    model = sa.select(jobs.spec["model"].as_string()).where(jobs.id == job_id).scalar_subquery()
    another = sa.exists().where(
        _live(LIVE_SECONDS),
        columns.state == UP,
        columns.id != worker_id,
        columns.model.in_([ANY_MODEL, model]),
        columns.id.not_in(refused.having(refused_at == sa.func.max(attempts.started_at))),
    )
    return bool(
        connection.scalar(
            sa.select(sa.or_(sa.exists().where(shards.job_id == job_id, shards.n_done > 0), another))
        )
    )


def note_refusal(connection: sa.Connection, worker_id: str, reason: str) -> None:
    """Notes at a worker which job it cannot run, and why."""
    connection.execute(
        sa.update(schema.workers).where(schema.workers.c.id == worker_id).values(state_reason=clean(reason))
    )


def lose_worker(connection: sa.Connection, host: str, pid: int) -> int:
    """Ends the leases of a worker whose process is known to be dead, so that the next `reconcile` need not
    wait for their end; returns how many. If the process lives after all, the epoch fences it."""
    workers, shards = schema.workers.c, schema.shards.c
    of_process = (workers.host == clean(host), workers.pid == pid)
    ids = sa.select(workers.id).where(*of_process)
    held = (state_is(shards.state, ShardState.LEASED), shards.worker_id.in_(ids))
    ended = connection.execute(
        sa.update(schema.shards).where(*held).values(lease_until=shards.heartbeat_at)
    ).rowcount
    connection.execute(
        sa.update(schema.workers).where(*of_process, workers.state != RETIRED).values(state=LOST)
    )
    return ended


def live_slots(connection: sa.Connection) -> dict[str, int]:
    """Shards that the live workers can use, with those they have, by the model they are pinned to
    (`ANY_MODEL`: by none)."""
    return {model: int(slots) for model, slots in connection.execute(_LIVE_SLOTS)}
