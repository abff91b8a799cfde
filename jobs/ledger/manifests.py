"""Which jobs that have ended still lack their manifest."""

from __future__ import annotations

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.records import JobState
from jobs.ledger.schema import db_now, state_is
from jobs.ledger.states import CLOCK_SLACK_SECONDS, MANIFEST_GRACE_SECONDS

#: Jobs that one pass of the reconciler names.
JOBS_AT_ONCE = 10
_FINAL = tuple(state for state in JobState if state.final)


def without_manifest(connection: sa.Connection) -> list[str]:
    """Some jobs that ended a while ago and whose manifest of that end was not noted, the longest ended first."""
    jobs = schema.jobs.c
    # A job that a clock gone wrong ended tomorrow ended a while ago, too.
    ended = sa.or_(jobs.finished_at < db_now() - MANIFEST_GRACE_SECONDS, jobs.finished_at > db_now() + CLOCK_SLACK_SECONDS)
    query = sa.select(jobs.id).where(
        state_is(jobs.state, *_FINAL), ended, sa.or_(jobs.manifest_finished_at.is_(None), jobs.manifest_finished_at != jobs.finished_at)
    )
    return list(connection.scalars(query.order_by(jobs.finished_at, jobs.id).limit(JOBS_AT_ONCE)))


def note_manifest(connection: sa.Connection, job_id: str, finished_at: float | None) -> None:
    """Notes that nothing is left to write for this end of a job; does nothing where the job went on meanwhile."""
    jobs = schema.jobs.c
    statement = sa.update(schema.jobs).where(jobs.id == job_id, jobs.finished_at == finished_at)
    connection.execute(statement.values(manifest_finished_at=finished_at))
