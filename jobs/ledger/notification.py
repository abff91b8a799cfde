"""Which ends of jobs have to be reported to the operator's hook: found, claimed by one sender, and noted.

An end is a job and its `finished_at`: a job that is retried ends again.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.records import JobState
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import CLOCK_SLACK_SECONDS

#: Older ends are not reported: nobody waits for those of before there was a hook.
OLDEST_END_SECONDS = 24 * 3600.0
#: Ends that one pass reports.
ENDS_AT_ONCE = 20
#: No try is planned later than this; a later time was written by a clock that went wrong.
_LATEST_TRY_SECONDS = 3600.0
_JOBS = schema.jobs.c
_UNREPORTED = sa.and_(
    state_is(_JOBS.state, *(state for state in JobState if state.final)),
    _JOBS.finished_at > db_now() - OLDEST_END_SECONDS,
    sa.or_(_JOBS.notified_finished_at.is_(None), _JOBS.notified_finished_at != _JOBS.finished_at),
    sa.or_(
        _JOBS.notify_due_at.is_(None),
        _JOBS.notify_due_at <= db_now(),
        _JOBS.notify_due_at > db_now() + _LATEST_TRY_SECONDS + CLOCK_SLACK_SECONDS,
    ),
)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """An end of a job that is to be reported."""

    job_id: str
    finished_at: float


def unreported_ends(connection: sa.Connection) -> list[JobEnd]:
    """Some ends that are due, the oldest first."""
    query = (
        sa.select(_JOBS.id, _JOBS.finished_at)
        .where(_UNREPORTED)
        .order_by(_JOBS.finished_at, _JOBS.id)
        .limit(ENDS_AT_ONCE)
    )
    return [JobEnd(job_id, finished_at) for job_id, finished_at in connection.execute(query)]


def claim_end(connection: sa.Connection, end: JobEnd, seconds: float) -> int | None:
    """Makes the caller the only one who reports an end, for some seconds: the number of the try; None
    where another one does."""
    statement = (
        sa.update(schema.jobs)
        .where(_is(end), _UNREPORTED)
        .values(notify_attempts=_JOBS.notify_attempts + 1, notify_due_at=db_now() + seconds)
        .returning(_JOBS.notify_attempts)
    )
    return connection.scalar(statement)


def note_reported(connection: sa.Connection, end: JobEnd) -> None:
    """Notes that an end was reported, or that nobody tries any more; does nothing where the job continued
    meanwhile."""
    connection.execute(sa.update(schema.jobs).where(_is(end)).values(notified_finished_at=end.finished_at))


def put_off(connection: sa.Connection, end: JobEnd, seconds: float) -> None:
    """Plans the next try for an end that could not be reported."""
    connection.execute(sa.update(schema.jobs).where(_is(end)).values(notify_due_at=db_now() + seconds))


def _is(end: JobEnd) -> sa.ColumnElement[bool]:
    return sa.and_(_JOBS.id == end.job_id, _JOBS.finished_at == end.finished_at)
