"""The worker processes that the ledger knows, and which shards go to the queue for them next: priority, then
weighted fair share, then first come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jobs.ledger.lifecycle import UNQUEUED, of_ticket
from jobs.ledger.records import (
    DISPATCHED,
    LIVE_SECONDS,
    LOST,
    OF_A_HOME,
    QUARANTINED,
    RETIRED,
    UP,
    Ticket,
    WorkerInfo,
    clean,
)
from jobs.ledger.transaction import Row, Transaction, columns_of, words
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
    _add(sql, info, "started_at", state=UP)


def _add(sql: Transaction, info: WorkerInfo, *changed: str, **more: str) -> None:
    """Adds a worker; of one that is there these columns change too."""
    row = {**columns_of(info), **{name: clean(value) for name, value in more.items()}}
    kept = ", ".join(f"{name} = excluded.{name}" for name in (*row, *changed, "heartbeat_at"))
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
    places: list[str] = []
    for one in quarantines:
        places.append(clean(f"{host}-{pid}-quarantine-{one.gpu or 'none'}"))
        info = WorkerInfo(places[-1], host, pid, one.gpu, ANY_MODEL, one.version, slots=0)
        _add(sql, info, state=QUARANTINED, state_reason=one.reason)
    statement = f"""
    UPDATE workers SET state = '{RETIRED}', heartbeat_at = <now>
    WHERE host = :host AND pid = :pid AND state = '{QUARANTINED}' AND NOT id IN (:places)
    """
    sql.change(statement, host=clean(host), pid=pid, places=places)


def others_may_run(sql: Transaction, job_id: str, worker_id: str) -> bool:
    """Whether a job that this worker cannot run may still be run by another one: items of it are done, or
    another live worker takes its model and did not refuse it the last time."""
    return bool(sql.value(_OTHERS_MAY_RUN, job=job_id, worker=worker_id))


def note_refusal(sql: Transaction, worker_id: str, reason: str) -> None:
    """Notes at a worker which job it cannot run, and why."""
    sql.change("UPDATE workers SET state_reason = :reason WHERE id = :id", id=worker_id, reason=clean(reason))


def lose_workers(sql: Transaction, host: str | None = None, pid: int | None = None) -> int:
    """Ends the leases of workers whose processes are known to be dead, of a home's own or of one, so that the
    next `reconcile` need not wait for their end; returns how many. If one lives after all, the epoch fences it."""
    of_home = f"substr(id, 1, {len(OF_A_HOME)}) = '{OF_A_HOME}'"
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


#: Shards to queue while no worker is up, so that the first one finds work at once.
WINDOW_WITHOUT_WORKERS = 4

#: Key of the PostgreSQL advisory lock that lets one dispatcher choose at a time.
_DISPATCH_LOCK = 0x6E6967687A

_SLOTS = f"""
SELECT model, CAST(sum(slots) AS BIGINT) FROM workers WHERE {_LIVE} AND state = '{UP}' GROUP BY model
"""
_OPEN_ITEMS = "n_items - n_done - n_failed - n_skipped"
_IS_READY = "shards.state = 'ready' AND (not_before IS NULL OR not_before <= <now>)"
#: The jobs that are handed out or have shards in flight, in their order. What is in flight are two statements,
#: each with its partial index.
_JOBS = f"""
WITH flying AS (
    SELECT job_id, {_OPEN_ITEMS} AS items FROM shards WHERE state = 'queued'
    UNION ALL SELECT job_id, {_OPEN_ITEMS} FROM shards WHERE state = 'leased'
), taken AS (
    SELECT job_id, count(*) AS n_shards, CAST(sum(items) AS BIGINT) AS n_items FROM flying GROUP BY job_id
)
SELECT id, spec ->> 'model', priority, weight, max_in_flight, COALESCE(n_shards, 0), COALESCE(n_items, 0),
    state IN ({words(*DISPATCHED)}) AND EXISTS (SELECT 1 FROM shards WHERE job_id = jobs.id AND {_IS_READY})
FROM jobs LEFT JOIN taken ON taken.job_id = jobs.id
WHERE state IN ({words(*DISPATCHED)}) OR taken.job_id IS NOT NULL ORDER BY priority DESC, created_at, id
"""
_READY = f"""
SELECT no, epoch, {_OPEN_ITEMS} AS items FROM shards WHERE job_id = :job AND {_IS_READY}
ORDER BY no LIMIT :limit FOR UPDATE SKIP LOCKED
"""


@dataclass(slots=True)
class _Job:
    """A job that has shards in flight, or may get its next one queued."""

    id: str
    model: str
    priority: int
    weight: int
    max_in_flight: int | None
    #: What is queued or leased: shards, and those of their items that have not ended.
    shards: int
    items: int
    has_ready: bool
    #: Its ready shards, in order; None: not read yet.
    ready: list[Row] | None = None

    @property
    def share(self) -> float:
        """Of items, since shards differ in size."""
        return self.items / self.weight

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.shards >= self.max_in_flight


class _Fleet:
    """What the live workers can take, by model, and the jobs whose models are served."""

    def __init__(self, sql: Transaction, window_factor: int) -> None:
        #: Shards that the live workers can use, with those they have, by the model they are pinned to
        #: (`ANY_MODEL`: by none).
        slots = dict(sql.rows(_SLOTS))
        #: The shards that may be in flight of each pinned model: more would keep the window from the workers
        #: of other models. Empty where a live worker serves all models, or none lives.
        self._rooms = {} if ANY_MODEL in slots else {name: n * window_factor for name, n in slots.items()}
        self.window = sum(slots.values()) * window_factor if slots else WINDOW_WITHOUT_WORKERS
        found = (_Job(*row) for row in sql.rows(_JOBS))
        #: By priority, the highest first.
        self.jobs = [job for job in found if not self._rooms or job.model in self._rooms]

    @property
    def in_flight(self) -> int:
        """Shards in flight of jobs whose priority is no lower than that of every job with ready shards."""
        return self.taken(max((job.priority for job in self.jobs if job.has_ready), default=-math.inf))

    def taken(self, priority: float) -> int:
        """Shards in flight of jobs with this priority or a higher one."""
        return sum(job.shards for job in self.jobs if job.priority >= priority)

    def rooms(self, priority: int) -> dict[str, int]:
        """Shards that jobs of this priority may still get of each pinned model."""
        rooms = dict(self._rooms)
        for job in self.jobs if rooms else ():
            if job.priority >= priority:
                rooms[job.model] -= job.shards
        return rooms


def free_window(sql: Transaction, window_factor: int = 2) -> int:
    """How many more shards to queue: `window_factor` a slot of live workers, less those queued or leased.

    What waits for a model that nobody serves takes no room, nor do jobs of a lower priority than one with
    ready shards.
    """
    fleet = _Fleet(sql, window_factor)
    return max(0, fleet.window - fleet.in_flight)


def take_ready(sql: Transaction, limit: int, window_factor: int = 2) -> list[Ticket]:
    """Moves up to `limit` shards from ready to queued and returns the tickets to publish.

    Order: priority, then the least share of in-flight items by weight, then the older job. Jobs of the
    highest priority that has ready shards may get all; others what is left beside the shards that are in
    flight of jobs between. Where every live worker is pinned to a model, only jobs of these models get
    some, and each model no more than its own workers' window.
    """
    if limit <= 0:
        return []
    if sql.engine == "postgresql":
        sql.value(f"SELECT pg_advisory_xact_lock({_DISPATCH_LOCK})")
    fleet = _Fleet(sql, window_factor)
    tickets: list[Ticket] = []
    window = limit + fleet.in_flight
    ready = (job for job in fleet.jobs if job.has_ready)
    for priority, level in groupby(ready, key=lambda job: job.priority):
        room = min(limit - len(tickets), window - fleet.taken(priority))
        tickets += _share_out(sql, list(level), room, fleet.rooms(priority))
    for ticket in tickets:
        # The rows are locked and were seen ready in this transaction.
        sql.change(
            """
            UPDATE shards SET state = 'queued', enqueued_epoch = epoch, enqueued_at = <now>
            WHERE job_id = :job AND no = :shard
            """,
            **of_ticket(ticket),
        )
    return tickets


def give_back(sql: Transaction, tickets: Sequence[Ticket]) -> int:
    """Makes tickets that could not be published ready again; returns how many were still queued."""
    statement = f"""
    UPDATE shards SET {UNQUEUED}
    WHERE job_id = :job AND no = :shard AND enqueued_epoch = :epoch AND state = 'queued'
    """
    in_order = sorted(tickets, key=lambda ticket: (ticket.job_id, ticket.shard_no))
    return sum(sql.change(statement, **of_ticket(ticket)) for ticket in in_order)


def _share_out(sql: Transaction, jobs: list[_Job], limit: int, rooms: dict[str, int]) -> list[Ticket]:
    """Gives one shard after the other to the job with the least share; ties go to the older job.

    `rooms` bounds what models that stand in it may get, and is brought up to date.
    """
    tickets: list[Ticket] = []
    waiting = [job for job in jobs if not job.full]
    while waiting and len(tickets) < limit:
        job = min(waiting, key=lambda job: job.share)
        if job.ready is None:
            job.ready = _ready_shards(sql, job.id, limit - len(tickets))
        if not job.ready or rooms.get(job.model, 1) <= 0:
            waiting.remove(job)
            continue
        shard = job.ready.pop(0)
        tickets.append(Ticket(job.id, shard.no, shard.epoch, job.priority))
        job.shards += 1
        job.items += shard.items
        if job.model in rooms:
            rooms[job.model] -= 1
        if job.full:
            waiting.remove(job)
    return tickets


def _ready_shards(sql: Transaction, job_id: str, limit: int) -> list[Row]:
    # The shared lock keeps a pause or a cancel from slipping in between the look at the job and the change of
    # its shards.
    state = sql.value("SELECT state FROM jobs WHERE id = :job FOR SHARE", job=job_id)
    return sql.rows(_READY, job=job_id, limit=limit) if state in DISPATCHED else []
