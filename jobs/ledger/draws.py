"""What the quality checks said: a row for each draw of an item that ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.bulk import add_missing
from jobs.ledger.records import Draw, DrawRow, Score
from jobs.ledger.rows import number_of
from pipelines.errors import ErrorCode

_COLUMNS = tuple(column.name for column in schema.draws.columns)
_encode = msgspec.json.Encoder().encode


def add_draws(connection: sa.Connection, job_no: int, draws: Iterable[tuple[int, Draw]]) -> None:
    """Adds (index, draw); those that are there stay as they are."""
    rows: list[tuple[Any, ...]] = [
        (
            job_no,
            index,
            draw.draw,
            draw.seed,
            None if draw.code is None else draw.code.value,
            draw.kept,
            draw.duration_ms,
            _encode(draw.scores).decode(),
        )
        for index, draw in draws
    ]
    add_missing(connection, schema.draws, _COLUMNS, rows)


def draws_page(connection: sa.Connection, job_id: str, after: int, limit: int) -> list[DrawRow]:
    """The draws of up to `limit` items with an index above `after`, in order of index and draw."""
    columns = schema.draws.c
    of_job = columns.job_no == number_of(job_id)
    indexes = sa.select(columns.idx).where(of_job, columns.idx > after).distinct().order_by(columns.idx).limit(limit)
    last = sa.select(sa.func.max(indexes.subquery().c.idx)).scalar_subquery()
    query = sa.select(schema.draws).where(of_job, columns.idx > after, columns.idx <= last).order_by(columns.idx, columns.draw)
    return [draw_from(row) for row in connection.execute(query).mappings()]


def drawn_before(connection: sa.Connection, job_id: str, first: int, last: int) -> dict[int, int]:
    """Index -> number of draws of the items from `first` to `last` that have some: those that `nightjar retry` opened again."""
    columns = schema.draws.c
    query = (
        sa.select(columns.idx, (sa.func.max(columns.draw) + 1).label("drawn"))
        .where(columns.job_no == number_of(job_id), columns.idx.between(first, last))
        .group_by(columns.idx)
    )
    return {row.idx: row.drawn for row in connection.execute(query)}


def draw_from(row: sa.RowMapping) -> DrawRow:
    """A row of `draws` as a record."""
    code = None if row["code"] is None else ErrorCode(row["code"])
    scores = msgspec.convert(row["scores"], dict[str, Score])
    return DrawRow(row["idx"], Draw(row["draw"], row["seed"], code, bool(row["kept"]), row["duration_ms"], scores))
