"""Which nights ran, so that none runs twice."""

from __future__ import annotations

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.rows import insert
from jobs.ledger.schema import db_now


def schedule_ran(connection: sa.Connection, name: str, night: str) -> bool:
    """Records a night; False if it was recorded before."""
    statement = insert(connection, schema.schedules).values(name=name, night=night, ran_at=db_now()).on_conflict_do_nothing()
    return connection.execute(statement.returning(schema.schedules.c.name)).one_or_none() is not None


def schedule_forget(connection: sa.Connection, name: str, night: str) -> None:
    columns = schema.schedules.c
    connection.execute(sa.delete(schema.schedules).where(columns.name == name, columns.night == night))


def schedule_history(connection: sa.Connection, name: str) -> list[str]:
    columns = schema.schedules.c
    return list(connection.scalars(sa.select(columns.night).where(columns.name == name).order_by(columns.night)))
