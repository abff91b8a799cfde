"""Scores of items as columns, and the filters that compare them.

A filter reads one table by its primary key, from the last item of a page on: that of the scores where
every item that matches has a row there, else that of the items. So pages come in the order of the input,
and none is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from jobs.checks import METERS, scores_with
from jobs.ledger import schema
from jobs.ledger.ingest import insert_missing
from jobs.ledger.mapping import number_of, read_job
from jobs.ledger.records import Draw, ItemState, Job, Score
from jobs.ledger.schema import SCORE_COLUMNS, item_is
from jobs.where import FACTS, OF_ALL_ITEMS, Comparison, Condition, FilteredOut, Where, no_such_score

_COLUMNS = tuple(column.name for column in schema.scores.columns)
_COLUMN_NAMES = frozenset(SCORE_COLUMNS)
#: Facts of the tables beside the scores.
_SECONDS, _ATTEMPTS = "seconds", "attempts"
_SAMPLED_ROWS = 1000

_encode = msgspec.json.Encoder().encode


def add_scores(connection: sa.Connection, job_no: int, draws: Iterable[tuple[int, Draw]]) -> None:
    """Adds the scores of the draws that are kept, of (index, draw); those that are there stay as they are,
    as draws do."""
    rows = [_row(job_no, index, draw) for index, draw in draws if draw.kept]
    insert_missing(connection, schema.scores, _COLUMNS, rows)


def _row(job_no: int, index: int, draw: Draw) -> tuple[Any, ...]:
    scores = draw.scores
    known = [_measured(scores[name]) if name in scores else None for name in SCORE_COLUMNS]
    if scores.keys() <= _COLUMN_NAMES:
        return job_no, index, draw.draw, *known, None
    values = {name: _measured(score) for name, score in scores.items() if name not in _COLUMN_NAMES}
    others = {name: value for name, value in values.items() if value is not None}
    return job_no, index, draw.draw, *known, _encode(others).decode() if others else None


def _measured(score: Score) -> float | None:
    return score.value if score.value is not None and math.isfinite(score.value) else None


class _Source(NamedTuple):
    """Tables to read, their keys, and what each name of a filter is there."""

    tables: sa.FromClause
    job_no: sa.ColumnElement[int]
    idx: sa.ColumnElement[int]
    values: Mapping[str, sa.ColumnElement[Any]]

    def true(self, condition: Condition) -> sa.ColumnElement[bool]:
        """A condition as SQL; it is NULL where it is neither true nor false."""
        if isinstance(condition, Comparison):
            return _compared(self.values[condition.name], condition)
        parts = [self.true(part) for part in condition.parts]
        return sa.and_(*parts) if condition.all else sa.or_(*parts)


def _compared(value: sa.ColumnElement[Any], comparison: Comparison) -> sa.ColumnElement[bool]:
    number = sa.literal(comparison.value, sa.Double)
    match comparison.operator:
        case "<":
            return value < number
        case "<=":
            return value <= number
        case ">":
            return value > number
        case ">=":
            return value >= number
        case "==":
            return value == number
        case _:
            return value != number


def _source(where: Where, items: sa.FromClause | None = None) -> _Source:
    """What a filter is read from. `items`: this table of items comes first, whatever the filter needs."""
    scores, audio = schema.scores.alias("measured"), schema.artifacts.alias("heard")
    measured = frozenset(where.names) - OF_ALL_ITEMS
    if items is None and where.needs_scores:
        first: sa.FromClause = scores
        beside: list[tuple[sa.FromClause, bool]] = [
            (items := schema.items.alias("tried"), _ATTEMPTS in where.names)
        ]
    else:
        first = items = schema.items.alias("tried") if items is None else items
        beside = [(scores, bool(measured))]
    tables = first
    for table, wanted in (*beside, (audio, _SECONDS in where.names)):
        if wanted:
            same = [table.c.job_no == first.c.job_no, table.c.idx == first.c.idx]
            tables = tables.outerjoin(
                table, sa.and_(*same, *([table.c.kind == "audio"] if table is audio else []))
            )
    # In this order a score that another package calls as a fact is called is the fact.
    values = {
        name: scores.c[name] if name in _COLUMN_NAMES else scores.c.others[name].as_float()
        for name in measured
    }
    # Exactly as items say it in Python.
    seconds = sa.cast(audio.c.samples, sa.Double) / audio.c.sample_rate
    values |= {_SECONDS: seconds, _ATTEMPTS: items.c.attempts, "draw": scores.c.draw}
    return _Source(tables, first.c.job_no, first.c.idx, values)


def matching_page(
    connection: sa.Connection,
    job: Job,
    where: Where,
    after: int,
    limit: int,
    *,
    dialogues: bool,
    conditions: sa.ColumnElement[bool] | None,
) -> list[int]:
    """The indexes of up to `limit` items above `after` that match, in order.

    `dialogues`: also the other items of their dialogues. `conditions`: what else is asked of the row in
    `items`.
    """
    dialogues = dialogues and job.speaks_turns
    number = number_of(job.id)
    if not dialogues and conditions is None:
        source = _source(where)
        query = sa.select(source.idx).select_from(source.tables)
        query = query.where(
            source.job_no == number, source.idx > after, source.true(where.condition)
        ).order_by(source.idx)
        return list(connection.scalars(query.limit(limit)))
    items = schema.items
    query = sa.select(items.c.idx).where(items.c.job_no == number, items.c.idx > after).order_by(items.c.idx)
    query = query.where(_matches(where, items, dialogues=dialogues))
    return list(connection.scalars((query if conditions is None else query.where(conditions)).limit(limit)))


def _matches(where: Where, items: sa.FromClause, *, dialogues: bool) -> sa.ColumnElement[bool]:
    """Whether a row of `items` matches, or with `dialogues` another item of its dialogue does."""
    source = _source(where, other := items.alias("other") if dialogues else schema.items.alias("same"))
    same = other.c.example_id == items.c.example_id if dialogues else other.c.idx == items.c.idx
    found = sa.select(sa.literal(1)).select_from(source.tables)
    return sa.exists(
        found.where(other.c.job_no == items.c.job_no, same, source.true(where.condition)).correlate(items)
    )


def filtered_out(
    connection: sa.Connection, job_id: str, where: Where, *, dialogues: bool = False
) -> list[FilteredOut]:
    """What a filter leaves out of the items that have audio, by condition, in its order; the database
    counts them."""
    job = read_job(connection, job_id)
    items, audio = schema.items, schema.artifacts.alias("audio")
    source = _source(where, items)
    first: list[tuple[sa.ColumnElement[bool], Any]] = []
    for number, condition in enumerate(where.conditions):
        true = source.true(condition)
        first += [(true.is_(None), 2 * number + 1), (sa.not_(true), 2 * number)]
    same = sa.and_(audio.c.job_no == items.c.job_no, audio.c.idx == items.c.idx, audio.c.kind == "audio")
    query = sa.select(sa.case(*first).label("first")).select_from(source.tables.join(audio, same))
    query = query.where(items.c.job_no == number_of(job.id), item_is(ItemState.DONE))
    if dialogues and job.speaks_turns:
        query = query.where(sa.not_(_matches(where, items, dialogues=True)))
    group = query.subquery().c.first
    # Sums and no GROUP BY, for which SQLite would hold a row of each item in memory.
    sums = [
        sa.func.coalesce(sa.func.sum(sa.case((group == number, 1), else_=0)), 0)
        for number in range(2 * len(where.conditions))
    ]
    counts = [int(count) for count in connection.execute(sa.select(*sums)).one()]
    found: list[FilteredOut] = []
    for number, condition in enumerate(where.conditions):
        unknown = counts[2 * number + 1]
        found.append(FilteredOut(str(condition), counts[2 * number] + unknown, unknown))
    return found


def check_names(connection: sa.Connection, job: Job, where: Where) -> None:
    """Raises `config.invalid` for a score that no item of the job has; while the job runs its checks may
    still measure theirs."""
    quality = None if job.state.final else job.spec.quality
    expected = set() if quality is None else scores_with(quality.meters)
    if quality is not None and any(meter not in METERS for meter in quality.meters):
        # What another package's meter measures is known when it has.
        return
    unknown = [
        name
        for name in where.names
        if name not in FACTS and name not in expected and not _is_measured(connection, job, name)
    ]
    if unknown:
        there = sorted(expected.union(_measured_names(connection, job)))
        raise no_such_score(
            job.id, unknown[0], there, () if job.spec.quality is None else job.spec.quality.meters
        )


def _is_measured(connection: sa.Connection, job: Job, name: str) -> bool:
    scores = schema.scores.c
    value = scores[name] if name in _COLUMN_NAMES else scores.others[name].as_float()
    query = sa.select(sa.literal(1)).where(scores.job_no == number_of(job.id), value.is_not(None)).limit(1)
    return connection.scalar(query) is not None


def _measured_names(connection: sa.Connection, job: Job) -> set[str]:
    """The scores of the job's first items."""
    columns = schema.scores.c
    query = (
        sa.select(schema.scores)
        .where(columns.job_no == number_of(job.id))
        .order_by(columns.idx)
        .limit(_SAMPLED_ROWS)
    )
    found: set[str] = set()
    for row in connection.execute(query).mappings():
        found.update(name for name in SCORE_COLUMNS if row[name] is not None)
        found.update(row["others"] or ())
    return found
