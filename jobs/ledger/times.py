"""Times that lie further ahead than possible, left behind by a database clock that jumped forward and came back."""

from __future__ import annotations

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.records import ShardState
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import CLOCK_SLACK_SECONDS, MAX_BACKOFF_SECONDS
from jobs.ledger.workers import HEARD
from jobs.settings import LONGEST_LEASE_SECONDS

_SHARDS, _WORKERS = schema.shards.c, schema.workers.c
_BEAT_AHEAD = sa.and_(state_is(_SHARDS.state, ShardState.LEASED), _SHARDS.heartbeat_at > db_now() + CLOCK_SLACK_SECONDS)
_LEASE_AHEAD = sa.and_(
    state_is(_SHARDS.state, ShardState.LEASED), _SHARDS.lease_until > db_now() + LONGEST_LEASE_SECONDS + CLOCK_SLACK_SECONDS
)
_WAIT_AHEAD = sa.and_(state_is(_SHARDS.state, ShardState.READY), _SHARDS.not_before > db_now() + MAX_BACKOFF_SECONDS + CLOCK_SLACK_SECONDS)
_MESSAGE_AHEAD = sa.and_(state_is(_SHARDS.state, ShardState.QUEUED), _SHARDS.enqueued_at > db_now() + CLOCK_SLACK_SECONDS)
_WORKER_AHEAD = sa.and_(HEARD, _WORKERS.heartbeat_at > db_now() + CLOCK_SLACK_SECONDS)

#: Where rows may lie ahead, and what they become: as if their times had been written now. A worker that lives keeps its lease, and a
#: dead one's runs out in its time; a lease whose length makes no sense runs out at once.
_REPAIRS = (
    (schema.shards, _BEAT_AHEAD, {"lease_until": db_now() + (_SHARDS.lease_until - _SHARDS.heartbeat_at), "heartbeat_at": db_now()}),
    (schema.shards, _LEASE_AHEAD, {"lease_until": db_now()}),
    (schema.shards, _WAIT_AHEAD, {"not_before": None}),
    (schema.shards, _MESSAGE_AHEAD, {"enqueued_at": db_now()}),
    (schema.workers, _WORKER_AHEAD, {"heartbeat_at": db_now()}),
)


def any_ahead(connection: sa.Connection) -> bool:
    """Whether some time lies further ahead than possible."""
    return any(connection.scalar(sa.select(sa.exists().where(ahead))) for _, ahead, _ in _REPAIRS)


def bring_back(connection: sa.Connection) -> int:
    """Brings such times back; returns how many rows."""
    return sum(connection.execute(sa.update(table).where(ahead).values(**values)).rowcount for table, ahead, values in _REPAIRS)
