"""The status of jobs, from shard counters and never from a scan of items: the one way to read it, in plain
SQL.

`Ledger` runs these statements on its own connection. `nightjar status` and `nightjar list` run them by the
bare driver, since the import of SQLAlchemy takes longer than the whole command should.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from jobs.ledger.location import killed_workers, located, own_ledger, place_of
from jobs.ledger.records import SCHEMA_REVISION, Job, JobSpec, JobState, ShardState, clean
from jobs.ledger.states import LIVE_SECONDS, LOST, OUTAGES, QUARANTINED, RETIRED, AttemptOutcome
from pipelines.errors import ErrorCode, NotFoundError

CONNECT_SECONDS = 5
BUSY_SECONDS = 30
#: A longer pause between two leases is a gap in which nobody worked; a shorter one is the time to hand out
#: work.
GAP_SECONDS = 10.0

#: UTC epoch seconds by each engine's clock.
NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)",
}

T = TypeVar("T")
_SUMS = ("n_items", "n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out")
_JOBS = f"SELECT {', '.join(Job.__dataclass_fields__)} FROM jobs"  # noqa: S608 - names of ours
#: Engine time of one item of a shard, see `ShardSpread`.
_ITEM_MS = "CASE WHEN n_done > 0 THEN 1.0 * engine_ms / (n_done + n_failed) END"
_SHARDS = f"""
SELECT job_id, state, count(*), count(NULLIF(n_done, 0)), sum({_ITEM_MS}), sum({_ITEM_MS} * {_ITEM_MS}),
    {", ".join(f"sum({name})" for name in _SUMS)}
FROM shards WHERE job_id IN (<jobs>) GROUP BY job_id, state
"""  # noqa: S608 - names of ours
_FAILED = """
SELECT error_code, count(*) FROM items WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state IN (2, 3) GROUP BY error_code
"""
_REJECTED = "SELECT code, count(*) FROM rejected_lines WHERE job_id = :job GROUP BY code"
_OUTAGE = """
SELECT error_code, error_message, ended_at FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
WHERE shards.job_id = :job AND shards.outages > 0 AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1
"""
#: Workers that live and take shards of :model, of any state but those that have ended; without those that
#: refused :job the last time.
_LIVE_WORKERS = f"""
SELECT host, pid, state FROM workers
WHERE state NOT IN ('{RETIRED}', '{LOST}') AND heartbeat_at >= <now> - {LIVE_SECONDS} AND (model = '' OR model = :model)
AND id NOT IN (
    SELECT worker_id FROM attempts WHERE job_id = :job GROUP BY worker_id
    HAVING max(CASE WHEN outcome = '{AttemptOutcome.REFUSED}' THEN started_at END) = max(started_at)
)
"""  # noqa: S608 - words of ours
#: A lease that runs counts up to now, or to where it ran out.
_BUSY = f"""
WITH leases AS (
    SELECT attempts.job_id, started_at AS began,
        CASE WHEN ended_at IS NOT NULL THEN ended_at WHEN lease_until < <now> THEN lease_until ELSE <now> END AS ended
    FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
    WHERE attempts.job_id IN (<jobs>)
), marked AS (
    SELECT job_id, began, ended, CASE WHEN began <= max(ended) OVER (
        PARTITION BY job_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) + {GAP_SECONDS} THEN 0 ELSE 1 END AS fresh
    FROM leases
), numbered AS (
    SELECT job_id, began, ended, sum(fresh) OVER (
        PARTITION BY job_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS span
    FROM marked
)
SELECT job_id, min(began), max(ended) FROM numbered GROUP BY job_id, span ORDER BY job_id, min(began)
"""  # noqa: S608 - numbers of ours

#: What a worker did lately is what its leases made that ended in these seconds, or have not ended.
RECENT_SECONDS = 600.0
#: Workers that were lost before are shown only with those that retired.
LOST_SECONDS = 24 * 3600.0

_COLUMNS = (
    "id",
    "host",
    "pid",
    "gpu",
    "model",
    "version",
    "slots",
    "state",
    "state_reason",
    "started_at",
    "heartbeat_at",
)
_WORKERS = f"SELECT {', '.join(_COLUMNS)} FROM workers"  # noqa: S608 - names of ours
_PRESENT = f"""
WHERE state NOT IN ('{RETIRED}', '{LOST}') OR (state = '{LOST}' AND heartbeat_at >= <now> - {LOST_SECONDS})
"""
_HELD = """
SELECT shards.worker_id, jobs.id, jobs.name, shards.no, shards.n_items, shards.n_done, shards.n_failed, shards.claimed_done,
    shards.claimed_failed, shards.audio_ms, attempts.started_at
FROM shards
JOIN jobs ON jobs.id = shards.job_id
JOIN attempts ON attempts.job_id = shards.job_id AND attempts.shard_no = shards.no AND attempts.epoch = shards.epoch
WHERE shards.state = 'leased' ORDER BY attempts.started_at, jobs.id, shards.no
"""
_ENDED = f"""
SELECT attempts.worker_id, attempts.started_at, attempts.ended_at, attempts.n_ok, attempts.n_failed, shards.audio_ms, shards.n_done
FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
WHERE attempts.ended_at >= <now> - {RECENT_SECONDS}
"""  # noqa: S608 - numbers of ours


@dataclass(frozen=True, slots=True)
class ItemCounts:
    total: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def pending(self) -> int:
        return self.total - self.done - self.failed - self.skipped


@dataclass(frozen=True, slots=True)
class Outage:
    """Why the last lease of a waiting shard ended: a service that was down, full or forbidden."""

    code: ErrorCode
    message: str
    #: When that lease ended, by the ledger's clock.
    at: float


@dataclass(frozen=True, slots=True)
class ShardSpread:
    """How much the shards that ended differ in engine time: what an ETA's error is made of."""

    #: Shards that ended and made speech.
    shards: int = 0
    #: Sum over them of the engine time of one item that ended, in milliseconds, and the sum of its squares.
    item_ms: float = 0.0
    item_ms_squared: float = 0.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job with its sums, all from shard counters."""

    job: Job
    items: ItemCounts
    shards: Mapping[ShardState, int]
    audio_ms: int
    engine_ms: int
    bytes_out: int
    #: Ledger's clock at the time of reading.
    now: float
    #: Why open shards wait, if they do.
    outage: Outage | None = None
    spread: ShardSpread = ShardSpread()
    #: Time in which shards were leased; None: that from the first claim to the end, or to now.
    busy_seconds: float | None = None
    #: Live workers that take shards of the job's model; None: nobody looked.
    workers: int | None = None
    #: Of those that would live, how many are quarantined; None: nobody looked.
    quarantined_workers: int | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """A transaction that reads."""

    #: Runs a statement with parameters by name (`:name`).
    execute: Callable[[str, Mapping[str, object]], Any]
    #: `sqlite` or `postgresql`.
    engine: str
    #: The folder that the ledger records stores relative to; None for a ledger that is no file.
    place: Path | None

    @property
    def now(self) -> float:
        """The database's clock."""
        return float(self.execute(f"SELECT {NOW[self.engine]}", {}).fetchone()[0])


def with_percent_names(statement: str) -> str:
    """A statement with `%(name)s` in the place of `:name`, as psycopg wants it."""
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def read_with_driver(url: str, work: Callable[[Reader], T]) -> T | None:
    """What `work` reads by the bare driver, in one snapshot.

    None where it cannot be read so: another schema, a database that is away, a driver that is missing.
    `Ledger` then raises the error that says why.
    """
    scheme = url.partition(":")[0]
    opened = {"sqlite": _sqlite, "postgresql": _postgresql, "postgres": _postgresql}.get(scheme)
    if opened is None:
        return None
    try:
        with opened(url) as reader:
            if reader.execute("SELECT version_num FROM alembic_version", {}).fetchall() != [
                (SCHEMA_REVISION,)
            ]:
                return None
            return work(reader)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        # Only what the drivers say; anything else is a bug of ours.
        if type(error).__module__.partition(".")[0] not in {"sqlite3", "psycopg"}:
            raise
    return None


@contextmanager
def _sqlite(url: str) -> Iterator[Reader]:
    path = Path(unquote(url.partition(":///")[2].partition("?")[0])).absolute()
    uri = f"file:{quote(str(own_ledger(path)))}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        yield Reader(connection.execute, "sqlite", place_of(path))


@contextmanager
def _postgresql(url: str) -> Iterator[Reader]:
    import psycopg

    with psycopg.connect(url, connect_timeout=CONNECT_SECONDS, application_name="nightjar") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield Reader(
            lambda statement, values: connection.execute(with_percent_names(statement).encode(), values),
            "postgresql",
            None,
        )


def find_job(reader: Reader, prefix: str) -> Job:
    """The job with this id, or the only one whose id begins so. Raises `NotFoundError`."""
    wanted = prefix.strip().lower().replace("\x00", "")
    rows = reader.execute(
        f"{_JOBS} WHERE substr(id, 1, length(:wanted)) = :wanted ORDER BY id LIMIT 2",
        {"wanted": clean(wanted)},
    )
    found = rows.fetchall() if wanted else []
    if not found:
        raise no_such_job(wanted)
    if len(found) > 1:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND, f"Several jobs begin with {wanted!r}.", "Give more of the id."
        )
    return _job(reader, found[0])


def read_job(reader: Reader, job_id: str) -> Job:
    """The job with this id. Raises `NotFoundError`."""
    row = reader.execute(f"{_JOBS} WHERE id = :job", {"job": job_id}).fetchone()
    if row is None:
        raise no_such_job(job_id)
    return _job(reader, row)


def no_such_job(job_id: str) -> NotFoundError:
    """The error for an id that no job has."""
    return NotFoundError(
        ErrorCode.LEDGER_NOT_FOUND,
        f"There is no job {clean(job_id)!r}.",
        "`nightjar list` shows the jobs of this ledger.",
    )


def newest_jobs(
    reader: Reader,
    limit: int = 50,
    states: Collection[JobState] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Job]:
    """The newest jobs first, of those in these states (None: any) with all of these labels."""
    where = (
        ""
        if states is None
        else f" WHERE state IN ({', '.join(repr(state.value) for state in states) or 'NULL'})"
    )
    rows = reader.execute(
        f"{_JOBS}{where} ORDER BY created_at DESC, id DESC" + ("" if labels else f" LIMIT {limit:d}"), {}
    )
    # Labels are compared here: a label's key may be any text, and the databases write paths into JSON in
    # different ways.
    found = (
        job
        for job in (_job(reader, row) for row in rows)
        if not labels or labels.items() <= job.labels.items()
    )
    return list(islice(found, limit))


def _job(reader: Reader, row: Sequence[Any]) -> Job:
    values: dict[str, Any] = dict(zip(Job.__dataclass_fields__, row, strict=True))
    for name in ("spec", "labels"):
        if isinstance(values[name], str):
            values[name] = msgspec.json.decode(values[name])
    return job_from(values, reader.place)


def job_from(row: Mapping[str, Any], place: Path | None) -> Job:
    """The job with the values of its fields as `jobs` holds them, in a ledger that records stores relative
    to `place`."""
    values = dict(row)
    values["store_url"] = located(row["store_url"], place)
    values["state"] = JobState(row["state"])
    values["spec"] = msgspec.convert(row["spec"], JobSpec)
    return Job(**values)


def status_and_errors(reader: Reader, prefix: str) -> tuple[JobStatus, dict[ErrorCode, int]]:
    """Status and error counts of the job with this id, or the only one whose id begins so. Raises
    `NotFoundError`."""
    job = find_job(reader, prefix)
    return status_of(reader, job), error_counts(reader, job.id)


def status_of(reader: Reader, job: Job) -> JobStatus:
    """The status of a job, with what it waits for."""
    (status,) = statuses_of(reader, [job])
    if job.state.final:
        return status
    asked = {"model": job.spec.model, "job": job.id}
    killed = killed_workers(reader.place)
    heard = reader.execute(_LIVE_WORKERS.replace("<now>", NOW[reader.engine]), asked).fetchall()
    states = [state for host, pid, state in heard if (host, pid) not in killed]
    quarantined = states.count(QUARANTINED)
    return replace(
        status,
        outage=_last_outage(reader, job.id),
        workers=len(states) - quarantined,
        quarantined_workers=quarantined,
    )


def newest_statuses(
    reader: Reader,
    limit: int = 50,
    states: Collection[JobState] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[JobStatus]:
    """Status of the newest jobs first, of those in these states (None: any) with all of these labels."""
    return statuses_of(reader, newest_jobs(reader, limit, states, labels))


def statuses_of(reader: Reader, found: Sequence[Job]) -> list[JobStatus]:
    """The statuses of these jobs, without what they wait for."""
    now, busy = reader.now, worked_on(reader, [job.id for job in found])
    shards: dict[str, dict[ShardState, int]] = {job.id: {} for job in found}
    spreads: dict[str, ShardSpread] = {}
    sums: dict[str, dict[str, int]] = {job.id: dict.fromkeys(_SUMS, 0) for job in found}
    for job_id, state, count, made, item_ms, item_ms_squared, *values in _of_jobs(
        reader, _SHARDS, list(shards)
    ):
        shards[job_id][ShardState(state)] = count
        if state == ShardState.DONE:
            spreads[job_id] = ShardSpread(made, float(item_ms or 0), float(item_ms_squared or 0))
        for name, value in zip(_SUMS, values, strict=True):
            sums[job_id][name] += int(value)
    return [
        JobStatus(
            job=job,
            items=ItemCounts(
                *(sums[job.id][name] for name in ("n_items", "n_done", "n_failed", "n_skipped"))
            ),
            shards=shards[job.id],
            audio_ms=sums[job.id]["audio_ms"],
            engine_ms=sums[job.id]["engine_ms"],
            bytes_out=sums[job.id]["bytes_out"],
            now=now,
            spread=spreads.get(job.id, ShardSpread()),
            busy_seconds=sum(end - start for start, end in busy.get(job.id, [])),
        )
        for job in found
    ]


def worked_on(reader: Reader, job_ids: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of every time in which shards of these jobs were leased, in order; only jobs that have
    some.

    Times that overlap or lie no more than `GAP_SECONDS` apart are one.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for job_id, start, end in _of_jobs(reader, _BUSY.replace("<now>", NOW[reader.engine]), job_ids):
        found.setdefault(job_id, []).append((start, end))
    return found


def _of_jobs(reader: Reader, statement: str, job_ids: Sequence[str]) -> list[tuple[Any, ...]]:
    """The rows of a statement that says `<jobs>` for a list of ids."""
    ids = {f"job{number}": job_id for number, job_id in enumerate(job_ids)}
    marks = ", ".join(f":{name}" for name in ids)
    return reader.execute(statement.replace("<jobs>", marks), ids).fetchall() if ids else []


def _last_outage(reader: Reader, job_id: str) -> Outage | None:
    """The last outage of the shards that wait for a service; None where no shard waits for one."""
    row = reader.execute(_OUTAGE, {"job": job_id}).fetchone()
    if row is None or row[0] not in OUTAGES:
        return None
    code, message, at = row
    return Outage(ErrorCode(code), message or "", at)


def error_counts(reader: Reader, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items and rejected lines by code, the most frequent first."""
    counts = failed_counts(reader, job_id)
    for code, count in reader.execute(_REJECTED, {"job": job_id}):
        counts[ErrorCode(code)] = counts.get(ErrorCode(code), 0) + count
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def failed_counts(reader: Reader, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items alone by code. Raises `NotFoundError`."""
    if reader.execute("SELECT 1 FROM jobs WHERE id = :job", {"job": job_id}).fetchone() is None:
        raise no_such_job(job_id)
    return {ErrorCode(code): count for code, count in reader.execute(_FAILED, {"job": job_id})}


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard in flight in a worker."""

    job_id: str
    job_name: str
    shard_no: int
    items: int
    #: Of its items, also those that ended under earlier leases.
    ended_items: int
    claimed_at: float


@dataclass(frozen=True, slots=True)
class RecentWork:
    """What a worker made under the leases that ended lately and those that it has."""

    items_done: int = 0
    items_failed: int = 0
    audio_seconds: float = 0.0
    #: Time in which it held at least one of these leases.
    busy_seconds: float = 0.0

    @property
    def rtfx(self) -> float | None:
        """Audio seconds in a second in which it held a shard; None before there are any."""
        return self.audio_seconds / self.busy_seconds if self.audio_seconds and self.busy_seconds else None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker process, or a GPU whose worker is quarantined, with what it does."""

    id: str
    host: str
    pid: int
    gpu: str
    #: The only model that it serves; empty: whatever the jobs ask for.
    model: str
    version: str
    slots: int
    #: `up`, `draining`, `quarantined`, `lost` or `retired`.
    state: str
    #: Why it is quarantined, or which job it cannot run and why.
    state_reason: str
    started_at: float
    heartbeat_at: float
    #: Since the last heartbeat, by the ledger's clock.
    silent_seconds: float
    held: tuple[HeldShard, ...]
    recent: RecentWork


@dataclass(slots=True)
class _Leases:
    """What is known of a worker's leases."""

    done: int = 0
    failed: int = 0
    audio_ms: float = 0.0
    times: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    held: list[HeldShard] = field(default_factory=list[HeldShard])

    def add(self, started_at: float, ended_at: float, done: int, failed: int, audio_ms: float) -> None:
        self.done, self.failed, self.audio_ms = (
            self.done + done,
            self.failed + failed,
            self.audio_ms + audio_ms,
        )
        self.times.append((started_at, ended_at))


def worker_statuses(reader: Reader, *, everyone: bool = False) -> list[WorkerStatus]:
    """The workers, the newest first; `everyone`: also those that retired, and those that were lost more
    than a day ago."""
    now, clock = reader.now, NOW[reader.engine]
    leases: dict[str, _Leases] = {}
    for worker_id, started_at, ended_at, done, failed, audio_ms, made in reader.execute(
        _ENDED.replace("<now>", clock), {}
    ).fetchall():
        leases.setdefault(worker_id, _Leases()).add(
            started_at, ended_at, done, failed, _share(audio_ms, done, made)
        )
    for (
        worker_id,
        job_id,
        name,
        no,
        items,
        made,
        failed,
        before,
        failed_before,
        audio_ms,
        since,
    ) in reader.execute(_HELD, {}).fetchall():
        of_worker = leases.setdefault(worker_id, _Leases())
        of_worker.add(
            since, now, made - before, max(0, failed - failed_before), _share(audio_ms, made - before, made)
        )
        of_worker.held.append(HeldShard(job_id, name, no, items, made + failed, since))
    where = "" if everyone else _PRESENT.replace("<now>", clock)
    rows = reader.execute(f"{_WORKERS} {where} ORDER BY started_at DESC, id", {}).fetchall()
    killed = killed_workers(reader.place)
    return [_status(row, now, leases.get(row[0], _Leases()), killed) for row in rows]


def _status(
    row: Sequence[Any], now: float, leases: _Leases, killed: Sequence[tuple[str, int]]
) -> WorkerStatus:
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    values["silent_seconds"] = max(0.0, now - values["heartbeat_at"])
    is_gone = values["silent_seconds"] > LIVE_SECONDS or (values["host"], values["pid"]) in killed
    if is_gone and values["state"] != RETIRED:
        # The next pass of a reconciler says so too; there may be no worker left that makes one.
        values["state"] = LOST
    recent = RecentWork(leases.done, leases.failed, leases.audio_ms / 1000, _covered(leases.times))
    return WorkerStatus(**values, held=tuple(leases.held), recent=recent)


def _share(audio_ms: int, done: int, made: int) -> float:
    """A lease's part of the audio of its shard, by items: the ledger counts audio by shard."""
    return audio_ms * done / made if made else 0.0


def _covered(times: list[tuple[float, float]]) -> float:
    """Seconds that at least one of these times covers."""
    covered, end = 0.0, float("-inf")
    for begin, until in sorted(times):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered
