"""Which shards go to the queue next: priority, then weighted fair share, then first come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.lifecycle import UNQUEUED
from jobs.ledger.records import JobState, ShardState, Ticket
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import DISPATCHED
from jobs.ledger.workers import ANY_MODEL, live_slots

#: Shards to queue while no worker is up, so that the first one finds work at once.
WINDOW_WITHOUT_WORKERS = 4

#: Key of the PostgreSQL advisory lock that lets one dispatcher choose at a time.
_DISPATCH_LOCK = 0x6E6967687A


@dataclass(slots=True)
class _Candidate:
    """A job that may get its next shard queued."""

    job_id: str
    model: str
    priority: int
    weight: int
    in_flight: int
    max_in_flight: int | None
    #: (shard_no, epoch), in order; None: not read yet.
    ready: list[tuple[int, int]] | None = None

    @property
    def share(self) -> float:
        return self.in_flight / self.weight

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight >= self.max_in_flight


_IN_FLIGHT = [
    sa.select(schema.shards.c.job_id, sa.func.count()).where(state_is(schema.shards.c.state, state)).group_by(schema.shards.c.job_id)
    for state in (ShardState.QUEUED, ShardState.LEASED)
]
_MODEL = schema.jobs.c.spec["model"].as_string().label("model")
_MODELS = sa.select(schema.jobs.c.id, _MODEL).where(schema.jobs.c.id.in_(sa.bindparam("job_ids", expanding=True)))
_CANDIDATES = (
    sa.select(schema.jobs.c.id, _MODEL, schema.jobs.c.priority, schema.jobs.c.weight, schema.jobs.c.max_in_flight)
    .where(state_is(schema.jobs.c.state, *DISPATCHED))
    .order_by(schema.jobs.c.priority.desc(), schema.jobs.c.created_at, schema.jobs.c.id)
)


class _Fleet:
    """What the live workers can take, by model."""

    def __init__(self, connection: sa.Connection, window_factor: int) -> None:
        self._slots = live_slots(connection)
        self._window_factor = window_factor
        self.in_flight = _in_flight(connection)

    @property
    def pinned(self) -> bool:
        """Whether every live worker serves one model only."""
        return bool(self._slots) and ANY_MODEL not in self._slots

    @property
    def window(self) -> int:
        return sum(self._slots.values()) * self._window_factor if self._slots else WINDOW_WITHOUT_WORKERS

    def serves(self, model: str) -> bool:
        return not self.pinned or model in self._slots

    def rooms(self, models: Mapping[str, str]) -> dict[str, int]:
        """Shards that each pinned model may still get: more would keep the window from the workers of other models."""
        if not self.pinned:
            return {}
        rooms = {model: slots * self._window_factor for model, slots in self._slots.items()}
        for job_id, count in self.in_flight.items():
            if (model := models.get(job_id)) in rooms:
                rooms[model] -= count
        return rooms


def free_window(connection: sa.Connection, window_factor: int = 2) -> int:
    """How many more shards to queue: `window_factor` a slot of live workers, less those queued or leased.

    What waits for a model that nobody serves takes no room.
    """
    fleet = _Fleet(connection, window_factor)
    models = _models(connection, fleet) if fleet.pinned else {}
    taken = sum(count for job_id, count in fleet.in_flight.items() if fleet.serves(models.get(job_id, "")))
    return max(0, fleet.window - taken)


def take_ready(connection: sa.Connection, limit: int, window_factor: int = 2) -> list[Ticket]:
    """Moves up to `limit` shards from ready to queued and returns the tickets to publish.

    Order: priority, then the least share of in-flight shards by weight, then the older job. Where every live worker is
    pinned to a model, only jobs of these models get some, and each model no more than its own workers' window.
    """
    if limit <= 0:
        return []
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_DISPATCH_LOCK)))
    fleet = _Fleet(connection, window_factor)
    rooms = fleet.rooms(_models(connection, fleet)) if fleet.pinned else {}
    tickets: list[Ticket] = []
    for level in _candidates_by_priority(connection, fleet):
        tickets += _share_out(connection, level, limit - len(tickets), rooms)
        if len(tickets) == limit:
            break
    _mark_queued(connection, tickets)
    return tickets


def give_back(connection: sa.Connection, tickets: Sequence[Ticket]) -> int:
    """Makes tickets that could not be published ready again; returns how many were still queued."""
    columns = schema.shards.c
    returned = 0
    for ticket in sorted(tickets, key=lambda ticket: (ticket.job_id, ticket.shard_no)):
        returned += connection.execute(
            sa.update(schema.shards)
            .where(
                columns.job_id == ticket.job_id,
                columns.no == ticket.shard_no,
                columns.enqueued_epoch == ticket.epoch,
                state_is(columns.state, ShardState.QUEUED),
            )
            .values(**UNQUEUED)
        ).rowcount
    return returned


def _in_flight(connection: sa.Connection) -> dict[str, int]:
    """Shards queued or leased, by job."""
    counts: dict[str, int] = {}
    for query in _IN_FLIGHT:
        for job_id, count in connection.execute(query):
            counts[job_id] = counts.get(job_id, 0) + count
    return counts


def _models(connection: sa.Connection, fleet: _Fleet) -> dict[str, str]:
    """The models of the jobs that have shards in flight."""
    return {row.id: row.model for row in connection.execute(_MODELS, {"job_ids": list(fleet.in_flight)})}


def _candidates_by_priority(connection: sa.Connection, fleet: _Fleet) -> list[list[_Candidate]]:
    levels: dict[int, list[_Candidate]] = {}
    for job_id, model, priority, weight, max_in_flight in connection.execute(_CANDIDATES):
        if fleet.serves(model):
            candidate = _Candidate(job_id, model, priority, weight, fleet.in_flight.get(job_id, 0), max_in_flight)
            levels.setdefault(priority, []).append(candidate)
    return list(levels.values())


def _share_out(connection: sa.Connection, candidates: list[_Candidate], limit: int, rooms: dict[str, int]) -> list[Ticket]:
    """Gives one shard after the other to the job with the least share; ties go to the older job.

    `rooms` bounds what models that stand in it may get, and is brought up to date.
    """
    tickets: list[Ticket] = []
    waiting = [candidate for candidate in candidates if not candidate.full]
    while waiting and len(tickets) < limit:
        candidate = min(waiting, key=lambda candidate: candidate.share)
        if candidate.ready is None:
            candidate.ready = _ready_shards(connection, candidate.job_id, limit - len(tickets))
        if not candidate.ready or rooms.get(candidate.model, 1) <= 0:
            waiting.remove(candidate)
            continue
        shard_no, epoch = candidate.ready.pop(0)
        tickets.append(Ticket(candidate.job_id, shard_no, epoch, candidate.priority))
        candidate.in_flight += 1
        if candidate.model in rooms:
            rooms[candidate.model] -= 1
        if candidate.full:
            waiting.remove(candidate)
    return tickets


# The shared lock keeps a pause or a cancel from slipping in between the look at the job and the change of its shards.
_LOCKED_STATE = sa.select(schema.jobs.c.state).where(schema.jobs.c.id == sa.bindparam("job_id")).with_for_update(read=True)
_READY = (
    sa.select(schema.shards.c.no, schema.shards.c.epoch)
    .where(
        schema.shards.c.job_id == sa.bindparam("job_id"),
        state_is(schema.shards.c.state, ShardState.READY),
        sa.or_(schema.shards.c.not_before.is_(None), schema.shards.c.not_before <= db_now()),
    )
    .order_by(schema.shards.c.no)
    .limit(sa.bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_QUEUE = (
    sa.update(schema.shards)
    .where(schema.shards.c.job_id == sa.bindparam("ticket_job"), schema.shards.c.no == sa.bindparam("ticket_shard"))
    .values(state=ShardState.QUEUED.value, enqueued_epoch=schema.shards.c.epoch, enqueued_at=db_now())
)


def _ready_shards(connection: sa.Connection, job_id: str, limit: int) -> list[tuple[int, int]]:
    state = connection.scalar(_LOCKED_STATE, {"job_id": job_id})
    if state is None or JobState(state) not in DISPATCHED:
        return []
    return [(no, epoch) for no, epoch in connection.execute(_READY, {"job_id": job_id, "limit": limit})]


def _mark_queued(connection: sa.Connection, tickets: list[Ticket]) -> None:
    """The rows are locked and were seen ready in this transaction."""
    if tickets:
        connection.execute(_QUEUE, [{"ticket_job": ticket.job_id, "ticket_shard": ticket.shard_no} for ticket in tickets])
