"""What commands and reports ask of the ledger about items, shards and what was made. For the status of jobs
see `status`.

A filter reads one table by its primary key, from the last item of a page on: that of the scores where
every item that matches has a row there, else that of the items. So pages come in the order of the input,
and none is sorted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jobs.checks import METERS, scores_with
from jobs.ledger.lifecycle import NUMBER
from jobs.ledger.records import (
    Artifact,
    ArtifactFacts,
    Draw,
    DrawRow,
    ItemRow,
    ItemState,
    Job,
    JobState,
    RejectedLine,
    ShardAudio,
    no_such_job,
)
from jobs.ledger.schema import ITEM_STATE_NUMBERS, ITEM_STATES, SCORE_COLUMNS
from jobs.ledger.status import job_of, read_job
from jobs.ledger.transaction import Row, Transaction, record, words
from jobs.where import FACTS, OF_ALL_ITEMS, Comparison, Condition, FilteredOut, Where, no_such_score
from pipelines.errors import ErrorCode

PAGE_ROWS = 1000
#: Indexes between the first and the last item of a page, for each item, from which on the items are listed.
_SPARSE = 3
#: Jobs of a model that tell its speed, the newest ones, and how much audio they must have made.
_MEASURED_JOBS, _MEASURED_AUDIO_MS = 20, 600_000
#: What facts are in the tables, exactly as items say them in Python.
_FACTS = {
    "seconds": "CAST(heard.samples AS DOUBLE PRECISION) / heard.sample_rate",
    "attempts": "<items>.attempts",
    "draw": "measured.draw",
}


def now(sql: Transaction) -> float:
    """The database's clock, UTC epoch seconds."""
    return sql.now


def job_state(sql: Transaction, job_id: str) -> JobState:
    """The state of a job alone: what a worker asks often. Raises `NotFoundError`."""
    state = sql.value("SELECT state FROM jobs WHERE id = :job", job=job_id)
    if state is None:
        raise no_such_job(job_id)
    return JobState(state)


def measured_rtf(sql: Transaction, model: str) -> float | None:
    """RTF of a model on the workers that ran its newest jobs: their engine time over their audio. None:
    they made too little."""
    statement = f"""
    SELECT CAST(sum(engine_ms) AS DOUBLE PRECISION) / NULLIF(sum(audio_ms), 0), sum(audio_ms)
    FROM shards WHERE state = 'done' AND job_id IN (
        SELECT id FROM jobs WHERE spec ->> 'model' = :model ORDER BY no DESC LIMIT {_MEASURED_JOBS}
    )
    """
    ((rtf, audio_ms),) = sql.rows(statement, model=model)
    return None if (audio_ms or 0) < _MEASURED_AUDIO_MS else rtf


def store_identity(sql: Transaction, address: str) -> str | None:
    """By what the store at a recorded address was known to its newest job that says it; None: to none."""
    return sql.value(
        """
        SELECT store_identity FROM jobs WHERE store_url = :address AND store_identity IS NOT NULL
        ORDER BY no DESC LIMIT 1
        """,
        address=address,
    )


def jobs_of_keys(sql: Transaction, first: str) -> list[Job]:
    """The jobs that were submitted under a key, or under it and more behind a slash, in the order of submit."""
    statement = """
    SELECT * FROM jobs WHERE idempotency_key = :key
    OR substr(idempotency_key, 1, length(:below)) = :below ORDER BY no
    """
    rows = sql.rows(statement, key=first, below=f"{first}/")
    return [job_of(sql, row) for row in rows]


def jobs_of_input(sql: Transaction, input_sha256: str, spec_sha: str) -> list[Job]:
    """The jobs of one input and spec, the oldest first."""
    statement = "SELECT * FROM jobs WHERE input_sha256 = :input AND spec_sha = :spec ORDER BY no"
    return [job_of(sql, row) for row in sql.rows(statement, input=input_sha256, spec=spec_sha)]


class Wanted(NamedTuple):
    """Which items of a job are read."""

    state: ItemState | None = None
    codes: Collection[ErrorCode] | None = None
    where: Where | None = None
    #: With `where`: also the other items of the dialogues of those that match.
    dialogues: bool = False


class ItemsPage(NamedTuple):
    """Items in index order."""

    items: list[ItemRow]
    #: Where the next page begins; None: there is none. Items whose state changes while the page is read may
    #: be missing, or more.
    after: int | None


def items_page(sql: Transaction, job: Job, wanted: Wanted, after: int, limit: int) -> ItemsPage:
    """Up to `limit` items with an index above `after`."""
    conditions = ""
    implied = wanted.where is not None and wanted.where.needs_scores and not wanted.dialogues
    if wanted.state is not None and not (implied and wanted.state is ItemState.DONE):
        conditions += f" AND items.state = {ITEM_STATE_NUMBERS[wanted.state]}"
    if wanted.codes is not None:
        conditions += f" AND items.error_code IN ({words(*wanted.codes) or 'NULL'})"
    if wanted.where is None:
        statement = f"SELECT idx FROM items WHERE job_no = {NUMBER} AND idx > :after{conditions} ORDER BY idx LIMIT :limit"
        page = sql.column(statement, job=job.id, after=after, limit=limit)
    else:
        page = matching_page(
            sql, job, wanted.where, after, limit, dialogues=wanted.dialogues, conditions=conditions
        )
    if not page:
        return ItemsPage([], None)
    on_page = set(page)
    rows = sql.rows(_with_audio(page, conditions), job=job.id)
    found = [_item(row, speaks_turns=job.speaks_turns) for row in rows if row.idx in on_page]
    return ItemsPage(found, page[-1] if len(page) == limit else None)


def _with_audio(page: list[int], conditions: str) -> str:
    """The statement that reads the items of a page with their audio."""

    def on_page(column: str, shift: int = 0) -> str:
        # Said of each table: PostgreSQL would read the whole job's rows of the others for each page. To list
        # nearly all indexes between two takes longer than to read all rows between them.
        if page[-1] - page[0] < _SPARSE * len(page):
            return f"{column} BETWEEN {page[0] + shift} AND {page[-1] + shift}"
        return f"{column} IN ({', '.join(str(index + shift) for index in page)})"

    # The items of a dialogue have indexes that follow one another.
    return f"""
    SELECT items.*, kind, key, sha256, bytes, duration_ms, sample_rate, samples, seed, meta, pack, pack_offset,
        items.turn > 0 OR COALESCE(following.turn, 0) > 0 AS several
    FROM items
    LEFT OUTER JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx
        AND artifacts.kind = 'audio' AND {on_page("artifacts.idx")}
    LEFT OUTER JOIN items AS following ON following.job_no = {NUMBER} AND following.idx = items.idx + 1
        AND {on_page("following.idx", 1)}
    WHERE items.job_no = {NUMBER} AND {on_page("items.idx")}{conditions} ORDER BY items.idx
    """


def _item(row: Row, *, speaks_turns: bool) -> ItemRow:
    return record(
        ItemRow,
        row,
        index=row.idx,
        state=ITEM_STATES[row.state],
        artifact=None if row.kind is None else record(Artifact, row, index=row.idx),
        several=bool(row.several),
        speaks_turns=speaks_turns,
    )


def shard_audio(sql: Transaction, job_id: str, shard_no: int) -> list[ShardAudio]:
    """The audio of one shard's items in index order, for its manifest."""
    statement = """
    SELECT items.idx, example_id, key, sha256, bytes, sample_rate, samples, seed, pack, pack_offset
    FROM shards
    JOIN items ON items.job_no = shards.job_no AND items.idx BETWEEN first_index AND last_index AND items.shard_no = shards.no
    JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx AND kind = 'audio'
    WHERE shards.job_id = :job AND shards.no = :shard ORDER BY items.idx
    """
    return [ShardAudio(*row) for row in sql.rows(statement, job=job_id, shard=shard_no)]


def artifacts_page(sql: Transaction, job_id: str, after: int, limit: int, kind: str) -> list[ArtifactFacts]:
    """Up to `limit` artifacts of a kind with an index above `after`, in index order."""
    statement = f"""
    SELECT idx, key, sha256, bytes, pack, pack_offset FROM artifacts
    WHERE job_no = {NUMBER} AND idx > :after AND kind = :kind ORDER BY idx LIMIT :limit
    """
    return [
        ArtifactFacts(*row) for row in sql.rows(statement, job=job_id, after=after, limit=limit, kind=kind)
    ]


def artifacts_of(sql: Transaction, job_id: str, kind: str, indexes: Collection[int]) -> dict[int, Artifact]:
    """Index -> artifact of one kind, of those of these items that have one."""
    statement = f"SELECT * FROM artifacts WHERE job_no = {NUMBER} AND kind = :kind AND idx IN (:indexes)"
    rows = sql.rows(statement, job=job_id, kind=kind, indexes=list(indexes))
    return {row.idx: record(Artifact, row, index=row.idx) for row in rows}


def packs(sql: Transaction, job_id: str) -> set[str]:
    """The keys of the packs that artifacts of a job are in."""
    statement = f"SELECT DISTINCT pack FROM artifacts WHERE job_no = {NUMBER} AND pack IS NOT NULL"
    return set(sql.column(statement, job=job_id))


def shard_inputs(sql: Transaction, job_id: str) -> dict[int, tuple[str, str]]:
    """Key and SHA-256 of the input object of each shard; the two halves of a bisected shard share one."""
    rows = sql.rows("SELECT no, input_key, input_sha256 FROM shards WHERE job_id = :job", job=job_id)
    return {no: (key, sha256) for no, key, sha256 in rows}


class ShardEnds(NamedTuple):
    """How many items of a shard have ended, and between which indexes they are."""

    no: int
    first_index: int
    last_index: int
    ended: int


def shard_ends(sql: Transaction, job_id: str) -> list[ShardEnds]:
    """Of the shards of a job some of whose items have ended, by number."""
    statement = """
    SELECT no, first_index, last_index, n_done + n_failed + n_skipped FROM shards
    WHERE job_id = :job AND n_done + n_failed + n_skipped > 0 ORDER BY no
    """
    return [ShardEnds(*row) for row in sql.rows(statement, job=job_id)]


def rejected_page(sql: Transaction, job_id: str, after: int, limit: int) -> list[RejectedLine]:
    """Up to `limit` lines above `after`, in order. Raises `NotFoundError`."""
    read_job(sql, job_id)
    statement = (
        "SELECT * FROM rejected_lines WHERE job_id = :job AND line > :after ORDER BY line LIMIT :limit"
    )
    return [record(RejectedLine, row) for row in sql.rows(statement, job=job_id, after=after, limit=limit)]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lease of a shard, with what it made. Times are UTC epoch seconds of the ledger's clock."""

    shard_no: int
    epoch: int
    started_at: float
    #: Now, for one that runs.
    ended_at: float
    done: int
    failed: int
    #: Speech of its items: the shard's, shared out by items.
    audio_ms: float


def attempts_page(sql: Transaction, job_id: str, after: int, limit: int) -> list[Attempt]:
    """The attempts of up to `limit` shards above `after`, in order of shard and epoch."""
    statement = """
    SELECT shard_no, attempts.epoch, started_at, COALESCE(ended_at, <now>), n_ok, attempts.n_failed,
        CASE WHEN n_done > 0 THEN CAST(audio_ms AS DOUBLE PRECISION) / n_done * n_ok ELSE 0.0 END
    FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
    WHERE attempts.job_id = :job AND shard_no IN (
        SELECT DISTINCT shard_no FROM attempts WHERE job_id = :job AND shard_no > :after ORDER BY shard_no LIMIT :limit
    )
    ORDER BY shard_no, attempts.epoch
    """
    return [Attempt(*row) for row in sql.rows(statement, job=job_id, after=after, limit=limit)]


def draws_page(sql: Transaction, job_id: str, after: int, limit: int) -> list[DrawRow]:
    """The draws of up to `limit` items with an index above `after`, in order of index and draw."""
    statement = f"""
    SELECT DISTINCT idx FROM draws WHERE job_no = {NUMBER} AND idx > :after ORDER BY idx LIMIT :limit
    """
    return draws_of(sql, job_id, sql.column(statement, job=job_id, after=after, limit=limit))


def draws_of(sql: Transaction, job_id: str, indexes: Collection[int]) -> list[DrawRow]:
    """The draws of these items, in order of index and draw."""
    statement = f"SELECT * FROM draws WHERE job_no = {NUMBER} AND idx IN (:indexes) ORDER BY idx, draw"
    rows = sql.rows(statement, job=job_id, indexes=list(indexes))
    return [DrawRow(row.idx, record(Draw, row, kept=bool(row.kept))) for row in rows]


def drawn_before(sql: Transaction, job_id: str, first: int, last: int) -> dict[int, int]:
    """Index -> number of draws of the items from `first` to `last` that have some: those that
    `nightjar retry` opened again."""
    statement = f"""
    SELECT idx, max(draw) + 1 AS drawn FROM draws
    WHERE job_no = {NUMBER} AND idx BETWEEN :first AND :last GROUP BY idx
    """
    return {row.idx: row.drawn for row in sql.rows(statement, job=job_id, first=first, last=last)}


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
        if self._engine == "sqlite":
            path = self._parameter(f'$."{name}"')
            return f"CAST(json_extract(measured.others, {path}) AS DOUBLE PRECISION)"
        return f"CAST(measured.others ->> CAST({self._parameter(name)} AS TEXT) AS DOUBLE PRECISION)"

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


def check_names(job: Job, where: Where) -> None:
    """Raises `config.invalid` for a score that the job's checks do not measure."""
    quality = job.spec.quality
    there = set() if quality is None else scores_with(quality.meters)
    meters = () if quality is None else quality.meters
    if any(meter not in METERS for meter in meters):
        # What another package's meter measures is known when it has.
        return
    for name in where.names:
        if name not in FACTS and name not in there:
            raise no_such_score(job.id, name, sorted(there), meters)
