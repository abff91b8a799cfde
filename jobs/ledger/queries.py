"""Queries about items, shards and artifacts, for commands and reports. See `status` for the status of jobs.

A filter scans one table by its primary key: `scores` if every matching item has a row there, else `items`. So
pages are in input order without sorting.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jobs.checks import METERS, scores_with
from jobs.ledger.lifecycle import NUMBER
from jobs.ledger.records import (
    ITEM_STATE_NUMBERS,
    ITEM_STATES,
    SCORE_COLUMNS,
    Artifact,
    Decision,
    Draw,
    DrawRow,
    ItemRow,
    ItemState,
    Job,
    JobState,
    RejectedLine,
    clean,
)
from jobs.ledger.status import DECISIONS, jobs_by, no_such_job, read_job
from jobs.ledger.transaction import Transaction, literals, record
from jobs.own_files import recorded
from jobs.where import FACTS, OF_ALL_ITEMS, Comparison, Condition, FilteredOut, Where
from pipelines.errors import ErrorCode, invalid, nearest

PAGE_ROWS = 1000
#: If the index range of a page is at least this factor times its number of items, a statement lists the
#: indexes instead of the range.
_SPARSE = 3
#: The speed of a model is measured over this number of its newest jobs, if they have at least this much
#: audio.
_MEASURED_JOBS, _MEASURED_AUDIO_MS = 20, 600_000
#: Facts as SQL, with the same values as in Python.
_FACTS = {
    "seconds": "CAST(recorded.samples AS DOUBLE PRECISION) / recorded.sample_rate",
    "attempts": "<items>.attempts",
    "draw": "measured.draw",
}


def job_state(sql: Transaction, job_id: str) -> JobState:
    """The state of a job, without its spec, which may be large. Raises `NotFoundError`."""
    state = sql.value("SELECT state FROM jobs WHERE id = :job", job=job_id)
    if state is None:
        raise no_such_job(job_id)
    return JobState(state)


def measured_rtf(sql: Transaction, model: str) -> float | None:
    """RTF of a model: engine time over audio of its newest jobs. None: they have too little audio."""
    statement = f"""
    SELECT CAST(sum(engine_ms) AS DOUBLE PRECISION) / NULLIF(sum(audio_ms), 0), sum(audio_ms)
    FROM shards WHERE state = 'done' AND job_id IN (
        SELECT id FROM jobs WHERE spec ->> 'model' = :model ORDER BY no DESC LIMIT {_MEASURED_JOBS}
    )
    """
    ((rtf, audio_ms),) = sql.rows(statement, model=model)
    return None if (audio_ms or 0) < _MEASURED_AUDIO_MS else rtf


def store_identity(sql: Transaction, store_url: str) -> str | None:
    """The identity of the store at a URL, from its newest job that has one; None: unknown."""
    return sql.value(
        """
        SELECT store_identity FROM jobs WHERE store_url = :address AND store_identity IS NOT NULL
        ORDER BY no DESC LIMIT 1
        """,
        address=recorded(store_url, sql.place),
    )


def jobs_of_keys(sql: Transaction, first: str) -> list[Job]:
    """The jobs whose idempotency key is `first` or begins with `first/`, in the order in which they were
    submitted."""
    statement = """
    SELECT * FROM jobs WHERE idempotency_key = :key
    OR substr(idempotency_key, 1, length(:below)) = :below ORDER BY no
    """
    return list(jobs_by(sql, statement, key=first, below=f"{first}/"))


def jobs_of_input(sql: Transaction, input_sha256: str, spec_sha: str) -> list[Job]:
    """The jobs of one input and spec, the oldest first."""
    statement = "SELECT * FROM jobs WHERE input_sha256 = :input AND spec_sha = :spec ORDER BY no"
    return list(jobs_by(sql, statement, input=input_sha256, spec=spec_sha))


def items_page(
    sql: Transaction,
    job: Job,
    state: ItemState | None,
    codes: Collection[ErrorCode] | None,
    where: Where | None,
    dialogues: bool,
    after: int,
    limit: int,
) -> tuple[list[ItemRow], int | None]:
    """Up to `limit` items with an index above `after`, in index order. If the state of an item changes between
    pages, it may or may not be included. `dialogues`: `where` selects whole dialogues, those with a matching
    item.

    The second result is the argument `after` for the next page; None: this is the last page.
    """
    conditions = ""
    implied = where is not None and where.needs_scores and not dialogues
    if state is not None and not (implied and state is ItemState.DONE):
        conditions += f" AND items.state = {ITEM_STATE_NUMBERS[state]}"
    if codes is not None:
        conditions += f" AND items.error_code IN ({literals(*codes) or 'NULL'})"
    first = tables = "items"
    matches = conditions
    values: dict[str, object] = {}
    if where is not None:
        dialogues = dialogues and job.speaks_turns
        scans_items = dialogues or conditions
        source = _Source(sql, job, where, "other" if scans_items else "")
        values = source.values
        if scans_items:
            matches += f" AND {_matches(source, where, dialogues=dialogues)}"
        else:
            first = source.first
            tables = source.tables
            matches = f" AND {source.sql(where.condition)}"
    statement = f"""
    SELECT {first}.idx FROM {tables} WHERE {first}.job_no = {NUMBER} AND {first}.idx > :after{matches}
    ORDER BY {first}.idx LIMIT :limit
    """
    page = sql.column(statement, job=job.id, after=after, limit=limit, **values)
    return _rows_of(sql, job, page, conditions), page[-1] if len(page) == limit else None


def _rows_of(sql: Transaction, job: Job, page: list[int], conditions: str = "") -> list[ItemRow]:
    """The items with these indexes, which are in order."""
    if not page:
        return []
    on_page = set(page)
    speaks_turns = job.speaks_turns

    def on(column: str, shift: int = 0) -> str:
        # Each table needs the condition, because PostgreSQL would otherwise read all of its rows of the job
        # for each page. A range is faster than a list of nearly all indexes in it.
        if page[-1] - page[0] < _SPARSE * len(page):
            return f"{column} BETWEEN {page[0] + shift} AND {page[-1] + shift}"
        return f"{column} IN ({', '.join(str(index + shift) for index in page)})"

    # The items of a dialogue have consecutive indexes, so the next item shows whether the dialogue of an item
    # has several turns.
    items = f"""
    SELECT items.*, kind, key, sha256, bytes, duration_ms, sample_rate, samples, seed, meta, pack, pack_offset,
        items.turn > 0 OR COALESCE(following.turn, 0) > 0 AS several
    FROM items
    LEFT OUTER JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx
        AND artifacts.kind = '{job.spec.main_kind}' AND {on("artifacts.idx")}
    LEFT OUTER JOIN items AS following ON following.job_no = {NUMBER} AND following.idx = items.idx + 1
        AND {on("following.idx", 1)}
    WHERE items.job_no = {NUMBER} AND {on("items.idx")}{conditions} ORDER BY items.idx
    """
    statement = f"SELECT decisions.* {DECISIONS} AND decisions.idx BETWEEN :first AND :last"
    decided = {
        row.idx: record(Decision, row, accepted=bool(row.accepted))
        for row in sql.rows(statement, job=job.id, kinds=job.spec.audio_kinds, first=page[0], last=page[-1])
    }
    return [
        record(
            ItemRow,
            row,
            index=row.idx,
            state=ITEM_STATES[row.state],
            artifact=None if row.kind is None else record(Artifact, row, index=row.idx),
            several=bool(row.several),
            speaks_turns=speaks_turns,
            decision=decided.get(row.idx),
        )
        for row in sql.rows(items, job=job.id)
        if row.idx in on_page
    ]


def items_named(sql: Transaction, job: Job, ids: Collection[str]) -> list[ItemRow]:
    """The items with these ids, in index order; unknown ids are missing."""
    wanted = {clean(one) for one in ids}
    names = wanted | {one.rpartition(":turn")[0] for one in wanted}
    statement = f"SELECT idx FROM items WHERE job_no = {NUMBER} AND example_id IN (:names)"
    page = sorted(sql.column(statement, job=job.id, names=names))
    return [row for row in _rows_of(sql, job, page) if row.id in wanted]


#: The columns of `Artifact` without `meta`, which is large and slow to decode.
_ARTIFACT = ", ".join(
    "artifacts.idx" if name == "index" else name for name in Artifact.__struct_fields__[:-1]
)


def shard_audio(sql: Transaction, job_id: str, shard_no: int) -> list[Artifact]:
    """The audio of one shard's items in index order, or their codes in a job of codes alone; without `meta`."""
    statement = f"""
    SELECT {_ARTIFACT} FROM shards
    JOIN items ON items.job_no = shards.job_no AND items.idx BETWEEN first_index AND last_index AND items.shard_no = shards.no
    JOIN jobs ON jobs.id = shards.job_id
    JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx
        AND kind = CASE WHEN spec ->> 'output' = 'codes' THEN 'codes' ELSE 'audio' END
    WHERE shards.job_id = :job AND shards.no = :shard ORDER BY items.idx
    """
    return sql.rows(statement, Artifact, job=job_id, shard=shard_no)


def artifacts_page(sql: Transaction, job_id: str, after: int, limit: int, kind: str) -> list[Artifact]:
    """Up to `limit` artifacts of a kind with an index above `after`, in index order, without `meta`."""
    statement = f"""
    SELECT {_ARTIFACT} FROM artifacts
    WHERE job_no = {NUMBER} AND idx > :after AND kind = :kind ORDER BY idx LIMIT :limit
    """
    return sql.rows(statement, Artifact, job=job_id, after=after, limit=limit, kind=kind)


def artifacts_of(sql: Transaction, job_id: str, kind: str, indexes: Collection[int]) -> dict[int, Artifact]:
    """Index -> artifact of one kind; items without such an artifact are missing."""
    rows = sql.rows(
        f"SELECT * FROM artifacts WHERE job_no = {NUMBER} AND kind = :kind AND idx IN (:indexes)",
        job=job_id,
        kind=kind,
        indexes=list(indexes),
    )
    return {row.idx: record(Artifact, row, index=row.idx) for row in rows}


def packs(sql: Transaction, job_id: str) -> set[str]:
    """The keys of the packs with artifacts of a job."""
    return set(
        sql.column(
            f"SELECT DISTINCT pack FROM artifacts WHERE job_no = {NUMBER} AND pack IS NOT NULL", job=job_id
        )
    )


def shard_inputs(sql: Transaction, job_id: str) -> dict[int, tuple[str, str]]:
    """Key and SHA-256 of the input object of each shard; the two halves of a bisected shard share one."""
    rows = sql.rows("SELECT no, input_key, input_sha256 FROM shards WHERE job_id = :job", job=job_id)
    return {no: (key, sha256) for no, key, sha256 in rows}


class ShardEnds(NamedTuple):
    """Number of ended items of a shard, and the bounds of its indexes."""

    no: int
    first_index: int
    last_index: int
    ended: int


def shard_ends(sql: Transaction, job_id: str) -> list[ShardEnds]:
    """The shards of a job with ended items, by number."""
    statement = """
    SELECT no, first_index, last_index, n_done + n_failed + n_skipped FROM shards
    WHERE job_id = :job AND n_done + n_failed + n_skipped > 0 ORDER BY no
    """
    return sql.rows(statement, ShardEnds, job=job_id)


def rejected_page(sql: Transaction, job_id: str, after: int, limit: int) -> list[RejectedLine]:
    """Up to `limit` rejected lines above `after`, in order. Raises `NotFoundError`."""
    read_job(sql, job_id)
    statement = (
        "SELECT * FROM rejected_lines WHERE job_id = :job AND line > :after ORDER BY line LIMIT :limit"
    )
    return [record(RejectedLine, row) for row in sql.rows(statement, job=job_id, after=after, limit=limit)]


class Attempt(NamedTuple):
    """One lease of a shard with its results. Times are UTC epoch seconds of the ledger's clock."""

    shard_no: int
    epoch: int
    started_at: float
    #: For a running lease, the time of the query.
    ended_at: float
    done: int
    failed: int
    #: Its share of the shard's audio, in proportion to its done items.
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
    return sql.rows(statement, Attempt, job=job_id, after=after, limit=limit)


def draws_page(sql: Transaction, job_id: str, after: int, limit: int) -> list[DrawRow]:
    """The draws of up to `limit` items with an index above `after`, in order of index and draw."""
    statement = f"""
    SELECT DISTINCT idx FROM draws WHERE job_no = {NUMBER} AND idx > :after ORDER BY idx LIMIT :limit
    """
    return draws_of(sql, job_id, sql.column(statement, job=job_id, after=after, limit=limit))


def draws_of(sql: Transaction, job_id: str, indexes: Collection[int]) -> list[DrawRow]:
    """The draws of these items, in order of index and draw."""
    rows = sql.rows(
        f"SELECT * FROM draws WHERE job_no = {NUMBER} AND idx IN (:indexes) ORDER BY idx, draw",
        job=job_id,
        indexes=list(indexes),
    )
    return [DrawRow(row.idx, record(Draw, row, kept=bool(row.kept))) for row in rows]


def kept_draws(sql: Transaction, job_id: str, indexes: Collection[int]) -> dict[int, Draw]:
    """Index -> the draw that made the audio of an item, in a job with checks."""
    return {row.index: row.draw for row in draws_of(sql, job_id, indexes) if row.draw.kept}


def drawn_before(sql: Transaction, job_id: str, first: int, last: int) -> dict[int, int]:
    """Index -> number of recorded draws, for items from `first` to `last` that `nightjar retry`
    reopened."""
    statement = f"""
    SELECT idx, max(draw) + 1 AS drawn FROM draws
    WHERE job_no = {NUMBER} AND idx BETWEEN :first AND :last GROUP BY idx
    """
    return dict(sql.rows(statement, job=job_id, first=first, last=last))


class _Source:
    """The joined tables of a filter, and the parameters of its conditions."""

    def __init__(self, sql: Transaction, job: Job, where: Where, items: str = "") -> None:
        """`items`: alias of the table of items if it must be the first one."""
        names = frozenset(where.names)
        self.first = items or ("measured" if where.needs_scores else "item")
        self._items = items or "item"
        self._engine = sql.engine
        self.values: dict[str, object] = {}
        tables = {
            self._items: ("items", "attempts" in names),
            "measured": ("scores", bool(names - OF_ALL_ITEMS)),
            "recorded": ("artifacts", "seconds" in names),
        }
        self.tables = f"{tables.pop(self.first)[0]} AS {self.first}"
        for name, (table, wanted) in tables.items():
            if wanted:
                same = f"{name}.job_no = {self.first}.job_no AND {name}.idx = {self.first}.idx"
                audio = f" AND recorded.kind = '{job.spec.main_kind}'" if name == "recorded" else ""
                self.tables += f" LEFT JOIN {table} AS {name} ON {same}{audio}"

    def sql(self, condition: Condition) -> str:
        """A condition as SQL, which is NULL if a value is missing."""
        if isinstance(condition, Comparison):
            operator = "=" if condition.operator == "==" else condition.operator
            return f"{self.value(condition.name)} {operator} {self._parameter(condition.value)}"
        parts = (" AND " if condition.all else " OR ").join(self.sql(part) for part in condition.parts)
        return f"({parts})"

    def value(self, name: str) -> str:
        # A fact takes precedence over a score of the same name.
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


def _matches(source: _Source, where: Where, *, dialogues: bool) -> str:
    """The SQL condition that is true if a row of `items` matches the filter, or with `dialogues` if any item
    of its dialogue does."""
    same = "other.example_id = items.example_id" if dialogues else "other.idx = items.idx"
    return f"""
    EXISTS (SELECT 1 FROM {source.tables} WHERE other.job_no = items.job_no AND {same} AND {source.sql(where.condition)})
    """


def filtered_out(
    sql: Transaction, job_id: str, where: Where, *, dialogues: bool = False
) -> list[FilteredOut]:
    """The numbers of items with audio that a filter excludes, per condition, in the order of the conditions.
    An item counts for the first condition that is not true for it."""
    job = read_job(sql, job_id)
    source = _Source(sql, job, where, "items")
    cases = ""
    for number, condition in enumerate(where.conditions):
        true = source.sql(condition)
        cases += f" WHEN ({true}) IS NULL THEN {2 * number + 1} WHEN NOT ({true}) THEN {2 * number}"
    left = ""
    if dialogues and job.speaks_turns:
        other = _Source(sql, job, where, "other")
        other.values = source.values
        left = f" AND NOT {_matches(other, where, dialogues=True)}"
    # Sums instead of GROUP BY, for which SQLite would hold a row per item in memory.
    sums = ", ".join(
        f"CAST(COALESCE(sum(CASE WHEN reason = {number} THEN 1 ELSE 0 END), 0) AS BIGINT)"
        for number in range(2 * len(where.conditions))
    )
    statement = f"""
    SELECT {sums} FROM (
        SELECT CASE {cases} END AS reason FROM {source.tables}
        JOIN artifacts AS audio ON audio.job_no = items.job_no AND audio.idx = items.idx
            AND audio.kind = '{job.spec.main_kind}'
        WHERE items.job_no = {NUMBER} AND items.state = {ITEM_STATE_NUMBERS[ItemState.DONE]}{left}
    ) AS reasons
    """
    (counts,) = sql.rows(statement, job=job.id, **source.values)
    return [
        FilteredOut(str(condition), counts[2 * number] + counts[2 * number + 1], counts[2 * number + 1])
        for number, condition in enumerate(where.conditions)
    ]


def measured_scores(sql: Transaction, job_id: str) -> set[str]:
    """The scores that done items of a job have, also those of later checks."""
    of_job = f"FROM scores WHERE job_no = {NUMBER}"
    some = [
        f"SELECT '{name}' WHERE EXISTS (SELECT 1 {of_job} AND {name} IS NOT NULL)" for name in SCORE_COLUMNS
    ]
    others = f"SELECT json_object_keys(others) {of_job}"
    if sql.engine == "sqlite":
        others = f"SELECT key FROM scores, json_each(others) WHERE job_no = {NUMBER}"
    return set(sql.column(" UNION ".join([*some, others]), job=job_id))


def check_names(job: Job, where: Where, measured: Collection[str]) -> None:
    """Raises `config.invalid` for scores that the job's checks do not measure, and that are not among `measured`."""
    quality = job.spec.quality
    known = {*measured} | (set() if quality is None else scores_with(quality.meters))
    if quality is not None and any(meter not in METERS for meter in quality.meters):
        # The names of the scores of other packages' meters are not known in advance.
        return
    for name in where.names:
        if name not in FACTS and name not in known:
            there = [*sorted(known), *FACTS]
            raise invalid(
                f"No item of job {job.id} has the score {name[:80]!r}.",
                f"{nearest(name, there)}Use one of: {', '.join(there)}. Checks measure others (docs/quality.md).",
            )
