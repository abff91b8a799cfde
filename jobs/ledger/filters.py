"""Filters of items as SQL, by their scores and facts.

A filter reads one table by its primary key, from the last item of a page on: that of the scores where
every item that matches has a row there, else that of the items. So pages come in the order of the input,
and none is sorted.
"""

from __future__ import annotations

from jobs.checks import METERS, scores_with
from jobs.ledger.lifecycle import NUMBER
from jobs.ledger.records import ItemState, Job
from jobs.ledger.schema import ITEM_STATE_NUMBERS, SCORE_COLUMNS
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Transaction, decoded
from jobs.where import FACTS, OF_ALL_ITEMS, Comparison, Condition, FilteredOut, Where, no_such_score

_SAMPLED_ROWS = 1000
#: What facts are in the tables, exactly as items say them in Python.
_FACTS = {
    "seconds": "CAST(heard.samples AS DOUBLE PRECISION) / heard.sample_rate",
    "attempts": "<items>.attempts",
    "draw": "measured.draw",
}


class _Source:
    """Tables to read, and the parameters of what is asked of them."""

    def __init__(self, sql: Transaction, where: Where, items: str = "") -> None:
        """`items`: the name of a table of items, which comes first, whatever the filter needs."""
        names = frozenset(where.names)
        self.first = items or ("measured" if where.needs_scores else "tried")
        self._items = items or "tried"
        self._engine = sql.engine
        self.values: dict[str, object] = {}
        tables = {
            self._items: ("items", "attempts" in names),
            "measured": ("scores", bool(names - OF_ALL_ITEMS)),
            "heard": ("artifacts", "seconds" in names),
        }
        self.tables = f"{tables.pop(self.first)[0]} AS {self.first}"
        for name, (table, wanted) in tables.items():
            if wanted:
                same = f"{name}.job_no = {self.first}.job_no AND {name}.idx = {self.first}.idx"
                audio = " AND heard.kind = 'audio'" if name == "heard" else ""
                self.tables += f" LEFT JOIN {table} AS {name} ON {same}{audio}"

    def true(self, condition: Condition) -> str:
        """A condition as SQL; it is NULL where it is neither true nor false."""
        if isinstance(condition, Comparison):
            operator = "=" if condition.operator == "==" else condition.operator
            return f"{self.value(condition.name)} {operator} {self._parameter(condition.value)}"
        parts = (" AND " if condition.all else " OR ").join(self.true(part) for part in condition.parts)
        return f"({parts})"

    def value(self, name: str) -> str:
        # A score that another package calls as a fact is called is the fact.
        if name in _FACTS:
            return _FACTS[name].replace("<items>", self._items)
        if name in SCORE_COLUMNS:
            return f"measured.{name}"
        path = f'$."{name}"' if self._engine == "sqlite" else name
        return f"CAST(measured.others ->> CAST({self._parameter(path)} AS TEXT) AS DOUBLE PRECISION)"

    def _parameter(self, value: object) -> str:
        name = f"value{len(self.values)}"
        self.values[name] = value
        return f":{name}"


def matching_page(
    sql: Transaction, job: Job, where: Where, after: int, limit: int, *, dialogues: bool, conditions: str
) -> list[int]:
    """The indexes of up to `limit` items above `after` that match, in order.

    `dialogues`: also the other items of their dialogues. `conditions`: what else is asked of the row in
    `items`.
    """
    dialogues = dialogues and job.speaks_turns
    if dialogues or conditions:
        source = _Source(sql, where, "other")
        first, tables, true = "items", "items", _matches(source, where, dialogues=dialogues) + conditions
    else:
        source = _Source(sql, where)
        first, tables, true = source.first, source.tables, source.true(where.condition)
    statement = f"""
    SELECT {first}.idx FROM {tables} WHERE {first}.job_no = {NUMBER} AND {first}.idx > :after AND {true}
    ORDER BY {first}.idx LIMIT :limit
    """
    return sql.column(statement, job=job.id, after=after, limit=limit, **source.values)


def _matches(source: _Source, where: Where, *, dialogues: bool) -> str:
    """Whether a row of `items` matches, or with `dialogues` another item of its dialogue does."""
    same = "other.example_id = items.example_id" if dialogues else "other.idx = items.idx"
    return f"""
    EXISTS (SELECT 1 FROM {source.tables} WHERE other.job_no = items.job_no AND {same} AND {source.true(where.condition)})
    """


def filtered_out(
    sql: Transaction, job_id: str, where: Where, *, dialogues: bool = False
) -> list[FilteredOut]:
    """What a filter leaves out of the items that have audio, by condition, in its order; the database
    counts them."""
    job = read_job(sql, job_id)
    source = _Source(sql, where, "items")
    cases = ""
    for number, condition in enumerate(where.conditions):
        true = source.true(condition)
        cases += f" WHEN ({true}) IS NULL THEN {2 * number + 1} WHEN NOT ({true}) THEN {2 * number}"
    left = ""
    if dialogues and job.speaks_turns:
        other = _Source(sql, where, "other")
        other.values = source.values
        left = f" AND NOT {_matches(other, where, dialogues=True)}"
    # Sums and no GROUP BY, for which SQLite would hold a row of each item in memory.
    sums = ", ".join(
        f"CAST(COALESCE(sum(CASE WHEN reason = {number} THEN 1 ELSE 0 END), 0) AS BIGINT)"
        for number in range(2 * len(where.conditions))
    )
    statement = f"""
    SELECT {sums} FROM (
        SELECT CASE {cases} END AS reason FROM {source.tables}
        JOIN artifacts AS audio ON audio.job_no = items.job_no AND audio.idx = items.idx AND audio.kind = 'audio'
        WHERE items.job_no = {NUMBER} AND items.state = {ITEM_STATE_NUMBERS[ItemState.DONE]}{left}
    ) AS reasons
    """
    (counts,) = sql.rows(statement, job=job.id, **source.values)
    return [
        FilteredOut(str(condition), counts[2 * number] + counts[2 * number + 1], counts[2 * number + 1])
        for number, condition in enumerate(where.conditions)
    ]


def check_names(sql: Transaction, job: Job, where: Where) -> None:
    """Raises `config.invalid` for a score that no item of the job has; while the job runs its checks may
    still measure theirs."""
    quality = None if job.state.final else job.spec.quality
    expected = set() if quality is None else scores_with(quality.meters)
    if quality is not None and any(meter not in METERS for meter in quality.meters):
        # What another package's meter measures is known when it has.
        return
    for name in where.names:
        if name not in FACTS and name not in expected and not _is_measured(sql, job, where, name):
            there = sorted(expected.union(_measured_names(sql, job)))
            meters = () if job.spec.quality is None else job.spec.quality.meters
            raise no_such_score(job.id, name, there, meters)


def _is_measured(sql: Transaction, job: Job, where: Where, name: str) -> bool:
    source = _Source(sql, where)
    statement = f"SELECT 1 FROM scores AS measured WHERE job_no = {NUMBER} AND {source.value(name)} IS NOT NULL LIMIT 1"
    return sql.row(statement, job=job.id, **source.values) is not None


def _measured_names(sql: Transaction, job: Job) -> set[str]:
    """The scores of the job's first items."""
    statement = f"SELECT * FROM scores WHERE job_no = {NUMBER} ORDER BY idx LIMIT {_SAMPLED_ROWS}"
    found: set[str] = set()
    for row in sql.rows(statement, job=job.id):
        found.update(name for name in SCORE_COLUMNS if getattr(row, name) is not None)
        found.update(decoded(row.others) or ())
    return found
