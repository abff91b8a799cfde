"""Which shards go to the queue next: priority, then weighted fair share, then first come."""

from __future__ import annotations

from collections.abc import Sequence
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
    weight: int
    in_flight: _InFlight
    max_in_flight: int | None
    #: (shard_no, epoch, items), in order; None: not read yet.
    ready: list[tuple[int, int, int]] | None = None

    @property
    def share(self) -> float:
        """Of items, since shards differ in size."""
        return self.in_flight.items / self.weight

    @property
    def full(self) -> bool:
        return self.max_in_flight is not None and self.in_flight.shards >= self.max_in_flight


@dataclass(slots=True)
class _InFlight:
    """What is queued or leased of a job."""

    priority: int
    shards: int = 0
    #: Those that have not ended.
    items: int = 0


_OPEN_ITEMS = (
    schema.shards.c.n_items - schema.shards.c.n_done - schema.shards.c.n_failed - schema.shards.c.n_skipped
)
_IN_FLIGHT = [
    sa.select(schema.jobs.c.id, schema.jobs.c.priority, sa.func.count(), sa.func.sum(_OPEN_ITEMS))
    .where(state_is(schema.shards.c.state, state), schema.jobs.c.id == schema.shards.c.job_id)
    .group_by(schema.jobs.c.id, schema.jobs.c.priority)
    for state in (ShardState.QUEUED, ShardState.LEASED)
]
_IS_READY = sa.and_(
    state_is(schema.shards.c.state, ShardState.READY),
    sa.or_(schema.shards.c.not_before.is_(None), schema.shards.c.not_before <= db_now()),
)
_HIGHEST_READY = sa.select(sa.func.max(schema.jobs.c.priority)).where(
    state_is(schema.jobs.c.state, *DISPATCHED),
    sa.exists().where(schema.shards.c.job_id == schema.jobs.c.id, _IS_READY),
)
_MODEL = schema.jobs.c.spec["model"].as_string().label("model")
_MODELS = sa.select(schema.jobs.c.id, _MODEL).where(
    schema.jobs.c.id.in_(sa.bindparam("job_ids", expanding=True))
)
_CANDIDATES = (
    sa.select(
        schema.jobs.c.id, _MODEL, schema.jobs.c.priority, schema.jobs.c.weight, schema.jobs.c.max_in_flight
    )
    .where(state_is(schema.jobs.c.state, *DISPATCHED))
    .order_by(schema.jobs.c.priority.desc(), schema.jobs.c.created_at, schema.jobs.c.id)
)


class _Fleet:
    """What the live workers can take, by model, and what is in flight."""

    def __init__(self, connection: sa.Connection, window_factor: int) -> None:
        self._slots = live_slots(connection)
        self._window_factor = window_factor
        self.in_flight = _in_flight(connection)
        #: Of jobs with shards in flight, where every live worker serves one model only.
        self._models = _models(connection, list(self.in_flight)) if self.pinned else {}
        highest = _HIGHEST_READY.where(_MODEL.in_(list(self._slots))) if self.pinned else _HIGHEST_READY
        #: The highest priority of a job with ready shards that a worker serves; None: no job has any.
        self.highest_ready: int | None = connection.scalar(highest)

    @property
    def pinned(self) -> bool:
        """Whether every live worker serves one model only."""
        return bool(self._slots) and ANY_MODEL not in self._slots

    @property
    def window(self) -> int:
        return sum(self._slots.values()) * self._window_factor if self._slots else WINDOW_WITHOUT_WORKERS

    def serves(self, model: str) -> bool:
        return not self.pinned or model in self._slots

    def candidate(
        self, job_id: str, model: str, priority: int, weight: int, max_in_flight: int | None
    ) -> _Candidate:
        """A job whose model is served; what it gets counts as in flight."""
        if self.pinned:
            self._models[job_id] = model
        return _Candidate(
            job_id, model, weight, self.in_flight.setdefault(job_id, _InFlight(priority)), max_in_flight
        )

    def taken(self, priority: int | None) -> int:
        """Shards in flight of jobs with this priority or a higher one, whose models are served; None: of
        any priority."""
        return sum(
            in_flight.shards
            for job_id, in_flight in self.in_flight.items()
            if self.serves(self._models.get(job_id, ""))
            and (priority is None or in_flight.priority >= priority)
        )

    def rooms(self, priority: int) -> dict[str, int]:
        """Shards that jobs of this priority may still get of each pinned model: more would keep the window
        from the workers of other models."""
        if not self.pinned:
            return {}
        rooms = {model: slots * self._window_factor for model, slots in self._slots.items()}
        for job_id, in_flight in self.in_flight.items():
            if (model := self._models.get(job_id)) in rooms and in_flight.priority >= priority:
                rooms[model] -= in_flight.shards
        return rooms


def free_window(connection: sa.Connection, window_factor: int = 2) -> int:
    """How many more shards to queue: `window_factor` a slot of live workers, less those queued or leased.

    What waits for a model that nobody serves takes no room, nor do jobs of a lower priority than one with
    ready shards.
    """
    fleet = _Fleet(connection, window_factor)
    return max(0, fleet.window - fleet.taken(fleet.highest_ready))


def take_ready(connection: sa.Connection, limit: int, window_factor: int = 2) -> list[Ticket]:
    """Moves up to `limit` shards from ready to queued and returns the tickets to publish.

    Order: priority, then the least share of in-flight items by weight, then the older job. Jobs of the
    highest priority that has ready shards may get all; others what is left beside the shards that are in
    flight of jobs between. Where every live worker is pinned to a model, only jobs of these models get
    some, and each model no more than its own workers' window.
    """
    if limit <= 0:
        return []
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_DISPATCH_LOCK)))
    fleet = _Fleet(connection, window_factor)
    tickets: list[Ticket] = []
    window = limit + fleet.taken(fleet.highest_ready)
    for level in _candidates_by_priority(connection, fleet):
        priority = level[0].in_flight.priority
        tickets += _share_out(
            connection,
            level,
            min(limit - len(tickets), window - fleet.taken(priority)),
            fleet.rooms(priority),
        )
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


def _in_flight(connection: sa.Connection) -> dict[str, _InFlight]:
    """What is queued or leased, by job."""
    found: dict[str, _InFlight] = {}
    for query in _IN_FLIGHT:
        for job_id, priority, shards, items in connection.execute(query):
            one = found.setdefault(job_id, _InFlight(priority))
            one.shards += shards
            one.items += int(items)
    return found


def _models(connection: sa.Connection, job_ids: list[str]) -> dict[str, str]:
    return {row.id: row.model for row in connection.execute(_MODELS, {"job_ids": job_ids})}


def _candidates_by_priority(connection: sa.Connection, fleet: _Fleet) -> list[list[_Candidate]]:
    levels: dict[int, list[_Candidate]] = {}
    for job_id, model, priority, weight, max_in_flight in connection.execute(_CANDIDATES):
        if fleet.serves(model):
            levels.setdefault(priority, []).append(
                fleet.candidate(job_id, model, priority, weight, max_in_flight)
            )
    return list(levels.values())


def _share_out(
    connection: sa.Connection, candidates: list[_Candidate], limit: int, rooms: dict[str, int]
) -> list[Ticket]:
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
        shard_no, epoch, items = candidate.ready.pop(0)
        tickets.append(Ticket(candidate.job_id, shard_no, epoch, candidate.in_flight.priority))
        candidate.in_flight.shards += 1
        candidate.in_flight.items += items
        if candidate.model in rooms:
            rooms[candidate.model] -= 1
        if candidate.full:
            waiting.remove(candidate)
    return tickets


# The shared lock keeps a pause or a cancel from slipping in between the look at the job and the change of its
# shards.
_LOCKED_STATE = (
    sa.select(schema.jobs.c.state)
    .where(schema.jobs.c.id == sa.bindparam("job_id"))
    .with_for_update(read=True)
)
_READY = (
    sa.select(schema.shards.c.no, schema.shards.c.epoch, _OPEN_ITEMS)
    .where(schema.shards.c.job_id == sa.bindparam("job_id"), _IS_READY)
    .order_by(schema.shards.c.no)
    .limit(sa.bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_QUEUE = (
    sa.update(schema.shards)
    .where(
        schema.shards.c.job_id == sa.bindparam("ticket_job"),
        schema.shards.c.no == sa.bindparam("ticket_shard"),
    )
    .values(state=ShardState.QUEUED.value, enqueued_epoch=schema.shards.c.epoch, enqueued_at=db_now())
)


def _ready_shards(connection: sa.Connection, job_id: str, limit: int) -> list[tuple[int, int, int]]:
    state = connection.scalar(_LOCKED_STATE, {"job_id": job_id})
    if state is None or JobState(state) not in DISPATCHED:
        return []
    return [
        (no, epoch, items)
        for no, epoch, items in connection.execute(_READY, {"job_id": job_id, "limit": limit})
    ]


def _mark_queued(connection: sa.Connection, tickets: list[Ticket]) -> None:
    """The rows are locked and were seen ready in this transaction."""
    if tickets:
        connection.execute(
            _QUEUE, [{"ticket_job": ticket.job_id, "ticket_shard": ticket.shard_no} for ticket in tickets]
        )
