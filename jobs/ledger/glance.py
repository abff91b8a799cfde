"""A job's status by the bare driver, for `nightjar status`: SQLAlchemy would take longer to import than the whole command may.

Whatever is not plain (no such job, another schema, a database that is away) is left to `Ledger`, which has the right words for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from jobs.ledger.busy import LIVE_WORKERS, NOW, busy_spans
from jobs.ledger.database import located, place_of
from jobs.ledger.records import ItemCounts, Job, JobSpec, JobState, JobStatus, Outage, ShardSpread, ShardState
from jobs.ledger.states import OUTAGES
from pipelines.errors import ErrorCode

#: The schema these statements are for.
REVISION = "0006"
CONNECT_SECONDS = 5
BUSY_SECONDS = 30

_SUMS = ("n_items", "n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out")
_JOB_FIELDS = tuple(Job.__dataclass_fields__)
_JOB = f"SELECT {', '.join(_JOB_FIELDS)} FROM jobs WHERE id >= :low AND id < :high ORDER BY id LIMIT 2"  # noqa: S608 - names of ours
_ITEM_MS = "CASE WHEN n_done > 0 THEN 1.0 * engine_ms / (n_done + n_failed) END"
_SPREAD = f"count(NULLIF(n_done, 0)), sum({_ITEM_MS}), sum({_ITEM_MS} * {_ITEM_MS})"
_SHARDS = f"SELECT state, count(*), {_SPREAD}, {', '.join(f'sum({name})' for name in _SUMS)} FROM shards WHERE job_id = :job GROUP BY state"  # noqa: S608
_ERRORS = """
SELECT error_code, count(*) FROM items WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state IN (2, 3) GROUP BY error_code
UNION ALL SELECT code, count(*) FROM rejected_lines WHERE job_id = :job GROUP BY code
"""
_OUTAGE = """
SELECT error_code, error_message, ended_at FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
WHERE shards.job_id = :job AND shards.outages > 0 AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1
"""


def glance(url: str, prefix: str) -> tuple[JobStatus, dict[ErrorCode, int]] | None:
    """Status and error counts of the only job whose id begins with `prefix`, in one snapshot; None: ask `Ledger`."""
    wanted = prefix.strip().lower()
    if not (wanted.isascii() and wanted.isalnum()):
        return None
    scheme = url.partition(":")[0]
    try:
        if scheme == "sqlite":
            with closing(_sqlite(url)) as connection:
                return _read(connection.execute, "sqlite", wanted, place_of(_path(url)))
        if scheme in {"postgresql", "postgres"}:
            with _postgresql(url) as execute:
                return _read(execute, "postgresql", wanted, None)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        # Only what the drivers say; anything else is a bug of ours.
        if type(error).__module__.partition(".")[0] not in {"sqlite3", "psycopg"}:
            raise
    return None


def _sqlite(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(_path(url)))}?mode=rw", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    connection.execute("BEGIN")
    return connection


def _path(url: str) -> Path:
    return Path(unquote(url.partition(":///")[2].partition("?")[0])).absolute()


@contextmanager
def _postgresql(url: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(url, connect_timeout=CONNECT_SECONDS, application_name="nightjar") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield lambda statement, values=(): connection.execute(_with_percent_names(statement), values or None)


def _with_percent_names(statement: str) -> bytes:
    for name in ("low", "high", "job", "model"):
        statement = statement.replace(f":{name}", f"%({name})s")
    return statement.encode()


def _read(execute: Any, engine: str, wanted: str, place: Path | None) -> tuple[JobStatus, dict[ErrorCode, int]] | None:
    if execute("SELECT version_num FROM alembic_version").fetchall() != [(REVISION,)]:
        return None
    # Ids are lower-case letters and digits, all below "{".
    jobs = execute(_JOB, {"low": wanted, "high": wanted + "{"}).fetchall()
    if len(jobs) != 1:
        return None
    job = _job(dict(zip(_JOB_FIELDS, jobs[0])), place)
    (now,) = execute(f"SELECT {NOW[engine]}").fetchone()
    shards: dict[ShardState, int] = {}
    sums = dict.fromkeys(_SUMS, 0)
    spread = ShardSpread()
    for state, count, made, item_ms, item_ms_squared, *values in execute(_SHARDS, {"job": job.id}):
        shards[ShardState(state)] = count
        if state == ShardState.DONE:
            spread = ShardSpread(made, float(item_ms or 0), float(item_ms_squared or 0))
        for name, value in zip(_SUMS, values):
            sums[name] += int(value)
    counts = ItemCounts(*(sums[name] for name in _SUMS[:4]))
    errors: dict[ErrorCode, int] = {}
    if counts.failed or job.rejected_lines:
        for code, count in execute(_ERRORS, {"job": job.id}):
            errors[ErrorCode(code)] = errors.get(ErrorCode(code), 0) + count
    errors = dict(sorted(errors.items(), key=lambda pair: (-pair[1], pair[0])))
    outage = workers = None
    if not job.state.final:
        outage = _outage(execute(_OUTAGE, {"job": job.id}).fetchone())
        (workers,) = execute(LIVE_WORKERS[engine], {"model": job.spec.model}).fetchone()
    busy = sum(end - start for _, start, end in execute(busy_spans(engine, "= :job"), {"job": job.id}))
    times = sums["audio_ms"], sums["engine_ms"], sums["bytes_out"]
    return JobStatus(job, counts, shards, *times, float(now), outage, spread, busy, workers), errors


def _outage(row: tuple[Any, ...] | None) -> Outage | None:
    if row is None or row[0] not in OUTAGES:
        return None
    code, message, at = row
    return Outage(ErrorCode(code), message or "", at)


def _job(row: dict[str, Any], place: Path | None) -> Job:
    row["store_url"] = located(row["store_url"], place, row["id"])
    for name in ("spec", "labels"):
        if isinstance(row[name], str):
            row[name] = msgspec.json.decode(row[name])
    return Job(**{**row, "state": JobState(row["state"]), "spec": msgspec.convert(row["spec"], JobSpec)})
