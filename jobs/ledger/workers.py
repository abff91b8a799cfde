"""The registered worker processes, and the choice of the next shards to queue: by priority, then weighted
fair share, then age of the job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jobs.ledger.lifecycle import UNQUEUED, of_ticket
from jobs.ledger.records import (
    DISPATCHED,
    HOME_WORKER_PREFIX,
    LIVE_SECONDS,
    LOST,
    QUARANTINED,
    RETIRED,
    UP,
    Ticket,
    WorkerInfo,
    clean,
)
from jobs.ledger.transaction import Row, Transaction, columns_of, literals
from pipelines.errors import ErrorCode, NotFoundError, ServiceError

#: Model of a worker that serves every model.
ANY_MODEL = ""

#: Workers that have not ended.
ACTIVE = f"state NOT IN ('{RETIRED}', '{LOST}')"
_LIVE = f"{ACTIVE} AND heartbeat_at >= <now> - {LIVE_SECONDS}"
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
    """Adds a worker. Raises `ServiceError` with `ledger.shared_sqlite` if a worker on another host uses the
    same SQLite file."""
    if sql.engine == "sqlite":
        other = sql.value(
            f"SELECT host FROM workers WHERE {_LIVE} AND host <> :host LIMIT 1", host=clean(info.host)
        )
        if other is not None:
            raise ServiceError(
                ErrorCode.LEDGER_SHARED_SQLITE,
                f"This SQLite ledger is in use by a worker on host {other!r}, and SQLite cannot be shared between hosts.",
                "Use a PostgreSQL ledger for workers on several hosts.",
            )
    _add(sql, info, "started_at", state=UP)


def _add(sql: Transaction, info: WorkerInfo, *changed: str, **more: str) -> None:
    """Adds or updates a worker; `changed`: columns that are also updated."""
    row = {**columns_of(info), **{name: clean(value) for name, value in more.items()}}
    kept = ", ".join(f"{name} = excluded.{name}" for name in (*row, *changed, "heartbeat_at"))
    sql.insert(
        "workers", [row], f"ON CONFLICT (id) DO UPDATE SET {kept}", started_at="<now>", heartbeat_at="<now>"
    )


def worker_heartbeat(sql: Transaction, worker_id: str, state: str = UP, slots: int | None = None) -> None:
    """Records a heartbeat. `slots`: number of shards that the worker can use, if it changed. Only workers in
    state `up` enlarge the dispatch window.

    Raises `NotFoundError` for a worker that is not registered.
    """
    change = f"heartbeat_at = <now>, state = :state{'' if slots is None else ', slots = :slots'}"
    if not sql.change(f"UPDATE workers SET {change} WHERE id = :id", id=worker_id, state=state, slots=slots):
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Worker {clean(worker_id)!r} is not registered.",
            "Start the worker again.",
        )


def retire_worker(sql: Transaction, worker_id: str) -> None:
    """Marks a worker as ended; it holds no leases any more."""
    sql.change(f"UPDATE workers SET state = '{RETIRED}', heartbeat_at = <now> WHERE id = :id", id=worker_id)


def report_quarantines(
    sql: Transaction, host: str, pid: int, version: str, reasons: Mapping[str, str]
) -> None:
    """Records the workers that a supervisor has quarantined, and ends its earlier quarantines. `reasons`: GPU
    (empty without one) -> reason."""
    places: list[str] = []
    for gpu, reason in reasons.items():
        places.append(clean(f"{host}-{pid}-quarantine-{gpu or 'none'}"))
        info = WorkerInfo(places[-1], host, pid, gpu, ANY_MODEL, version, slots=0)
        _add(sql, info, state=QUARANTINED, state_reason=reason)
    statement = f"""
    UPDATE workers SET state = '{RETIRED}', heartbeat_at = <now>
    WHERE host = :host AND pid = :pid AND state = '{QUARANTINED}' AND NOT id IN (:places)
    """
    sql.change(statement, host=clean(host), pid=pid, places=places)


def others_may_run(sql: Transaction, job_id: str, worker_id: str) -> bool:
    """Whether another worker may run a job: some of its items are done, or there is another live worker that
    serves its model and did not refuse the job at its last attempt."""
    return bool(sql.value(_OTHERS_MAY_RUN, job=job_id, worker=worker_id))


def end_dead_workers(sql: Transaction, host: str | None = None, pid: int | None = None) -> int:
    """Ends the leases of dead worker processes, either all workers of homes or one process, so that the next
    `reconcile` need not wait for their expiry; returns their number. If such a worker is alive after all, the
    epoch fences it."""
    of_home = f"substr(id, 1, {len(HOME_WORKER_PREFIX)}) = '{HOME_WORKER_PREFIX}'"
    dead = f"state <> '{RETIRED}' AND {of_home if host is None else 'host = :host AND pid = :pid'}"
    process = {} if host is None else {"host": clean(host), "pid": pid}
    ended = sql.change(
        f"""
        UPDATE shards SET lease_until = heartbeat_at WHERE state = 'leased'
        AND worker_id IN (SELECT id FROM workers WHERE {dead})
        """,
        **process,
    )
    sql.change(f"UPDATE workers SET state = '{LOST}' WHERE {dead}", **process)
    return ended


#: Shards to queue while no worker is up, so that the first worker has work at once.
WINDOW_WITHOUT_WORKERS = 4

#: Key of the PostgreSQL advisory lock of dispatchers.
_DISPATCH_LOCK = 0x6E6967687A

_SLOTS = f"""
SELECT model, CAST(sum(slots) AS BIGINT) FROM workers WHERE {_LIVE} AND state = '{UP}' GROUP BY model
"""
_OPEN_ITEMS = "n_items - n_done - n_failed - n_skipped"
_IS_READY = "shards.state = 'ready' AND (not_before IS NULL OR not_before <= <now>)"
#: The jobs that are dispatched or have shards in flight, in dispatch order. Queued and leased shards are read
#: by one SELECT each, so that each uses its partial index.
_JOBS = f"""
WITH in_flight AS (
    SELECT job_id, {_OPEN_ITEMS} AS items FROM shards WHERE state = 'queued'
    UNION ALL SELECT job_id, {_OPEN_ITEMS} FROM shards WHERE state = 'leased'
), taken AS (
    SELECT job_id, count(*) AS n_shards, CAST(sum(items) AS BIGINT) AS n_items FROM in_flight GROUP BY job_id
)
SELECT id, spec ->> 'model', priority, weight, max_in_flight, COALESCE(n_shards, 0), COALESCE(n_items, 0),
    state IN ({literals(*DISPATCHED)}) AND EXISTS (SELECT 1 FROM shards WHERE job_id = jobs.id AND {_IS_READY})
FROM jobs LEFT JOIN taken ON taken.job_id = jobs.id
WHERE state IN ({literals(*DISPATCHED)}) OR taken.job_id IS NOT NULL ORDER BY priority DESC, created_at, id
"""
_READY = f"""
SELECT no, epoch, {_OPEN_ITEMS} AS items FROM shards WHERE job_id = :job AND {_IS_READY}
ORDER BY no LIMIT :limit FOR UPDATE SKIP LOCKED
"""


@dataclass(slots=True)
class _Job:
    """A job with shards in flight or to dispatch."""

    id: str
    model: str
    priority: int
    weight: int
    max_in_flight: int | None
    #: Number of queued and leased shards, and of their pending items.
    shards: int
    items: int
    has_ready: bool
    #: Its ready shards, in order; None: not yet read.
    ready: list[Row] | None = None

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.shards >= self.max_in_flight


class _Fleet(NamedTuple):
    """The jobs whose models live workers serve, and the capacity of these workers."""

    #: The highest priority first.
    jobs: list[_Job]
    #: Maximum number of shards in flight.
    window: int
    #: The same for each pinned model, so that one model does not fill the window. Empty if a live worker serves
    #: all models, or no worker is live.
    limits: dict[str, int]
    #: Number of shards in flight. Jobs whose priority is lower than that of a job with ready shards do not
    #: count.
    in_flight: int


def _fleet(sql: Transaction, window_factor: int) -> _Fleet:
    # Model to which workers are pinned, or `ANY_MODEL` -> shards that these workers can use in total.
    slots = dict(sql.rows(_SLOTS))
    limits = {} if ANY_MODEL in slots else {name: n * window_factor for name, n in slots.items()}
    window = sum(slots.values()) * window_factor if slots else WINDOW_WITHOUT_WORKERS
    jobs = [job for job in sql.rows(_JOBS, _Job) if not limits or job.model in limits]
    first = max((job.priority for job in jobs if job.has_ready), default=-math.inf)
    return _Fleet(jobs, window, limits, sum(job.shards for job in jobs if job.priority >= first))


def free_window(sql: Transaction, window_factor: int = 2) -> int:
    """The number of shards to queue: `window_factor` times the slots of live workers, minus shards in flight.

    Shards of models without a worker do not count, nor do shards whose priority is lower than that of a ready
    shard.
    """
    fleet = _fleet(sql, window_factor)
    return max(0, fleet.window - fleet.in_flight)


def take_ready(sql: Transaction, limit: int, window_factor: int = 2) -> list[Ticket]:
    """Moves up to `limit` shards from ready to queued and returns the tickets to publish.

    Order: priority, then the smallest share of items in flight by weight, then the older job. Jobs of the
    highest priority with ready shards may use the whole window; other jobs get the part that shards in flight
    of higher priorities leave free. If every live worker is pinned to a model, only jobs of these models get
    shards, and each model only the window of its own workers.
    """
    if sql.engine == "postgresql":
        sql.value(f"SELECT pg_advisory_xact_lock({_DISPATCH_LOCK})")
    fleet = _fleet(sql, window_factor)
    tickets: list[Ticket] = []
    # The parts of the window, and of each pinned model's, that this and lower priorities may use.
    free = limit + fleet.in_flight
    remaining = fleet.limits
    for _, level in groupby(fleet.jobs, key=lambda job: job.priority):
        jobs = list(level)
        free -= sum(job.shards for job in jobs)
        for job in jobs if remaining else ():
            remaining[job.model] -= job.shards
        ready = [job for job in jobs if job.has_ready]
        shared = _share_out(sql, ready, min(limit - len(tickets), free), remaining)
        free -= len(shared)
        tickets += shared
    for ticket in tickets:
        # The rows were locked and ready in this transaction.
        sql.change(
            """
            UPDATE shards SET state = 'queued', enqueued_epoch = epoch, enqueued_at = <now>
            WHERE job_id = :job AND no = :shard
            """,
            **of_ticket(ticket),
        )
    return tickets


def give_back(sql: Transaction, tickets: Sequence[Ticket]) -> int:
    """Makes shards whose tickets could not be published ready again. Returns the number that were still
    queued."""
    statement = f"""
    UPDATE shards SET {UNQUEUED}
    WHERE job_id = :job AND no = :shard AND enqueued_epoch = :epoch AND state = 'queued'
    """
    return sum(sql.change(statement, **of_ticket(ticket)) for ticket in sorted(tickets))


def _share_out(sql: Transaction, jobs: list[_Job], limit: int, remaining: dict[str, int]) -> list[Ticket]:
    """Gives one shard at a time to the job with the smallest share, its pending items in flight divided by its
    weight; if shares are equal, to the older job. Shards are not counted, because they differ in size.

    `remaining` limits the shards of its models. It and `jobs` are updated.
    """
    tickets: list[Ticket] = []
    while jobs and len(tickets) < limit:
        job = min(jobs, key=lambda job: job.items / job.weight)
        if job.ready is None and not job.full:
            # The shared lock prevents a pause or cancel between this check and the change of the shards.
            state = sql.value("SELECT state FROM jobs WHERE id = :job FOR SHARE", job=job.id)
            left = limit - len(tickets)
            job.ready = sql.rows(_READY, job=job.id, limit=left) if state in DISPATCHED else []
        if job.full or not job.ready or remaining.get(job.model, 1) <= 0:
            jobs.remove(job)
            continue
        shard = job.ready.pop(0)
        tickets.append(Ticket(job.id, shard.no, shard.epoch, job.priority))
        job.shards += 1
        job.items += shard.items
        if job.model in remaining:
            remaining[job.model] -= 1
    return tickets
