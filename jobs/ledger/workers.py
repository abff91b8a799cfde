"""The worker processes that the ledger knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jobs.ledger.records import LIVE_SECONDS, LOST, QUARANTINED, RETIRED, UP, WorkerInfo, clean
from jobs.ledger.transaction import Transaction
from pipelines.errors import ErrorCode, NotFoundError, ServiceError

#: The model of a worker that serves whatever the jobs ask for.
ANY_MODEL = ""

#: Workers whose heartbeats are waited for.
HEARD = f"state NOT IN ('{RETIRED}', '{LOST}')"
_LIVE = f"{HEARD} AND heartbeat_at >= <now> - {LIVE_SECONDS}"
_OTHERS_MAY_RUN = f"""
SELECT EXISTS (SELECT 1 FROM shards WHERE job_id = :job AND n_done > 0) OR EXISTS (
    SELECT 1 FROM workers
    WHERE {_LIVE} AND state = '{UP}' AND id <> :worker
    AND model IN ('{ANY_MODEL}', (SELECT spec ->> 'model' FROM jobs WHERE id = :job)) AND id NOT IN (
        SELECT worker_id FROM attempts WHERE job_id = :job GROUP BY worker_id
        HAVING max(CASE WHEN outcome = 'refused' THEN started_at END) = max(started_at)
    )
)
"""


def register_worker(sql: Transaction, info: WorkerInfo) -> None:
    """Adds a worker. Raises `ServiceError` with `ledger.shared_sqlite` where a worker of another host uses
    the same SQLite file."""
    if sql.engine == "sqlite":
        statement = f"SELECT host FROM workers WHERE {_LIVE} AND host <> :host LIMIT 1"
        other = sql.value(statement, host=clean(info.host))
        if other is not None:
            raise ServiceError(
                ErrorCode.LEDGER_SHARED_SQLITE,
                f"This SQLite ledger is in use by a worker on host {other!r}, and SQLite cannot be shared between hosts.",
                "Use a PostgreSQL ledger for workers on several hosts.",
            )
    _add(sql, info, ["host", "pid", "gpu", "model", "version", "slots", "state", "started_at"], state=UP)


def _add(sql: Transaction, info: WorkerInfo, changed: Sequence[str], **more: str) -> None:
    """Adds a worker; of one that is there these columns change."""
    row = {
        name: clean(value) if isinstance(value, str) else value
        for name, value in (asdict(info) | more).items()
    }
    kept = ", ".join(f"{name} = excluded.{name}" for name in (*changed, "heartbeat_at"))
    conflict = f"ON CONFLICT (id) DO UPDATE SET {kept}"
    sql.insert("workers", [row], conflict, started_at="<now>", heartbeat_at="<now>")


def worker_heartbeat(sql: Transaction, worker_id: str, state: str = UP, slots: int | None = None) -> None:
    """A sign of life; `slots`: shards that the worker can use now, where that changes. Only workers in
    state `up` widen the window.

    Raises `NotFoundError` for a worker that never registered.
    """
    change = f"heartbeat_at = <now>, state = :state{'' if slots is None else ', slots = :slots'}"
    if not sql.change(f"UPDATE workers SET {change} WHERE id = :id", id=worker_id, state=state, slots=slots):
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Worker {clean(worker_id)!r} is not registered.",
            "Start the worker again.",
        )


def retire_worker(sql: Transaction, worker_id: str) -> None:
    """Marks a worker that gave back what it held and ends."""
    sql.change(f"UPDATE workers SET state = '{RETIRED}', heartbeat_at = <now> WHERE id = :id", id=worker_id)


def lose_stale_workers(sql: Transaction, timeout_seconds: float) -> int:
    """Marks workers without a heartbeat as lost; returns how many."""
    statement = f"UPDATE workers SET state = '{LOST}' WHERE {HEARD} AND heartbeat_at < <now> - :timeout"
    return sql.change(statement, timeout=timeout_seconds)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The place of a worker that keeps failing: a GPU, or the host where there is none."""

    gpu: str
    version: str
    reason: str


def report_quarantines(sql: Transaction, host: str, pid: int, quarantines: Sequence[Quarantine]) -> None:
    """A sign of life of a process that starts workers, with those that it has quarantined; others that it
    had are none any more."""
    process = {"host": clean(host), "pid": pid}
    over = set(
        sql.column(
            f"SELECT id FROM workers WHERE host = :host AND pid = :pid AND state = '{QUARANTINED}'", **process
        )
    )
    for one in quarantines:
        place = clean(f"{host}-{pid}-quarantine-{one.gpu or 'none'}")
        info = WorkerInfo(place, host, pid, one.gpu, ANY_MODEL, one.version, slots=0)
        _add(sql, info, ["state", "state_reason"], state=QUARANTINED, state_reason=one.reason)
        over.discard(place)
    for worker_id in over:
        retire_worker(sql, worker_id)


def others_may_run(sql: Transaction, job_id: str, worker_id: str) -> bool:
    """Whether a job that this worker cannot run may still be run by another one: items of it are done, or
    another live worker takes its model and did not refuse it the last time."""
    return bool(sql.value(_OTHERS_MAY_RUN, job=job_id, worker=worker_id))


def note_refusal(sql: Transaction, worker_id: str, reason: str) -> None:
    """Notes at a worker which job it cannot run, and why."""
    sql.change("UPDATE workers SET state_reason = :reason WHERE id = :id", id=worker_id, reason=clean(reason))


def lose_worker(sql: Transaction, host: str, pid: int) -> int:
    """Ends the leases of a worker whose process is known to be dead, so that the next `reconcile` need not
    wait for their end; returns how many. If the process lives after all, the epoch fences it."""
    process = {"host": clean(host), "pid": pid}
    ended = sql.change(
        """
        UPDATE shards SET lease_until = heartbeat_at WHERE state = 'leased'
        AND worker_id IN (SELECT id FROM workers WHERE host = :host AND pid = :pid)
        """,
        **process,
    )
    sql.change(
        f"UPDATE workers SET state = '{LOST}' WHERE host = :host AND pid = :pid AND state <> '{RETIRED}'",
        **process,
    )
    return ended


def live_slots(sql: Transaction) -> dict[str, int]:
    """Shards that the live workers can use, with those they have, by the model they are pinned to
    (`ANY_MODEL`: by none)."""
    statement = f"""
    SELECT model, CAST(sum(slots) AS BIGINT) AS slots FROM workers WHERE {_LIVE} AND state = '{UP}' GROUP BY model
    """
    return {row.model: row.slots for row in sql.rows(statement)}
