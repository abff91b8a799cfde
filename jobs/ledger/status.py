"""The status of jobs and workers, from shard counters and never from a scan of items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from jobs.ledger.records import (
    LIVE_SECONDS,
    LOST,
    OF_A_HOME,
    OUTAGES,
    QUARANTINED,
    RETIRED,
    Job,
    JobState,
    ShardState,
    WorkerInfo,
    clean,
    no_such_job,
)
from jobs.ledger.transaction import Row, Transaction, record, words
from jobs.own_files import located, was_killed
from pipelines.errors import ErrorCode, NotFoundError

#: A longer pause between two leases is a gap in which nobody worked; a shorter one is the time to hand out
#: work.
GAP_SECONDS = 10.0

#: Engine time of one item of a shard, see `ShardSpread`.
_ITEM_MS = "CASE WHEN n_done > 0 THEN 1.0 * engine_ms / (n_done + n_failed) END"
_SUMS = ("n_items", "n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out")
_SHARDS = f"""
SELECT job_id, state, count(*) AS shards, count(NULLIF(n_done, 0)) AS made,
    CAST(sum({_ITEM_MS}) AS DOUBLE PRECISION) AS item_ms, CAST(sum({_ITEM_MS} * {_ITEM_MS}) AS DOUBLE PRECISION) AS item_ms_squared,
    {", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in _SUMS)}
FROM shards WHERE job_id IN (:jobs) GROUP BY job_id, state
"""
_OUTAGE = """
SELECT error_code AS code, COALESCE(error_message, '') AS message, ended_at AS at
FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
WHERE shards.job_id = :job AND shards.outages > 0 AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1
"""
_FAILED = """
SELECT error_code AS code, count(*) AS lines FROM items
WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state IN (2, 3) GROUP BY error_code
"""
_REJECTED = "SELECT code, count(*) AS lines FROM rejected_lines WHERE job_id = :job GROUP BY code"
#: Workers that live and take shards of :model, of any state but those that have ended; without those that
#: refused :job the last time.
_LIVE_WORKERS = f"""
SELECT id, state FROM workers
WHERE state NOT IN ('{RETIRED}', '{LOST}') AND heartbeat_at >= <now> - {LIVE_SECONDS} AND (model = '' OR model = :model)
AND id NOT IN (
    SELECT worker_id FROM attempts WHERE job_id = :job GROUP BY worker_id
    HAVING max(CASE WHEN outcome = 'refused' THEN started_at END) = max(started_at)
)
"""
#: A lease that runs counts up to now, or to where it ran out.
_BUSY = f"""
WITH leases AS (
    SELECT attempts.job_id, started_at AS began,
        CASE WHEN ended_at IS NOT NULL THEN ended_at WHEN lease_until < <now> THEN lease_until ELSE <now> END AS ended
    FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
    WHERE attempts.job_id IN (:jobs)
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
"""

#: What a worker did lately is what its leases made that ended in these seconds, or have not ended.
RECENT_SECONDS = 600.0
#: Workers that were lost before are shown only with those that retired.
LOST_SECONDS = 24 * 3600.0

_PRESENT = f"""
WHERE state NOT IN ('{RETIRED}', '{LOST}') OR (state = '{LOST}' AND heartbeat_at >= <now> - {LOST_SECONDS})
"""
_HELD = """
SELECT shards.worker_id, jobs.id AS job_id, jobs.name AS job_name, shards.no AS shard_no, n_items AS items,
    n_done + shards.n_failed AS ended_items, attempts.started_at AS claimed_at
FROM shards
JOIN jobs ON jobs.id = shards.job_id
JOIN attempts ON attempts.job_id = shards.job_id AND attempts.shard_no = shards.no AND attempts.epoch = shards.epoch
WHERE shards.state = 'leased' ORDER BY attempts.started_at, jobs.id, shards.no
"""
#: Of the audio of a shard a lease has its part by items, since the ledger counts audio by shard. Times that
#: overlap count once.
_RECENT = f"""
WITH leases AS (
    SELECT attempts.worker_id, n_done, audio_ms, started_at, ended_at, n_ok AS done, attempts.n_failed AS failed
    FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
    WHERE ended_at >= <now> - {RECENT_SECONDS}
    UNION ALL
    SELECT shards.worker_id, n_done, audio_ms, started_at, CAST(:now AS DOUBLE PRECISION), n_done - claimed_done, shards.n_failed - claimed_failed
    FROM shards
    JOIN attempts ON attempts.job_id = shards.job_id AND attempts.shard_no = shards.no AND attempts.epoch = shards.epoch
    WHERE shards.state = 'leased'
), followed AS (
    SELECT worker_id, n_done, audio_ms, started_at, ended_at, done, failed, max(ended_at) OVER (
        PARTITION BY worker_id ORDER BY started_at, ended_at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS busy_until
    FROM leases
), spans AS (
    SELECT worker_id, n_done, audio_ms, ended_at, done, failed,
        CASE WHEN busy_until > started_at THEN busy_until ELSE started_at END AS began
    FROM followed
)
SELECT worker_id, CAST(sum(done) AS BIGINT) AS items_done,
    CAST(sum(CASE WHEN failed > 0 THEN failed ELSE 0 END) AS BIGINT) AS items_failed,
    sum(CASE WHEN n_done > 0 THEN CAST(audio_ms AS DOUBLE PRECISION) * done / n_done ELSE 0.0 END) / 1000 AS audio_seconds,
    sum(CASE WHEN ended_at > began THEN ended_at - began ELSE 0.0 END) AS busy_seconds
FROM spans GROUP BY worker_id
"""


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


def job_of(sql: Transaction, row: Row) -> Job:
    """The job of a row of `jobs`."""
    return record(Job, row, store_url=located(row.store_url, sql.place))


def find_job(sql: Transaction, prefix: str) -> Job:
    """The job with this id, or the only one whose id begins so. Raises `NotFoundError`."""
    wanted = clean(prefix.strip().lower().replace("\x00", ""))
    statement = "SELECT * FROM jobs WHERE substr(id, 1, length(:wanted)) = :wanted ORDER BY id LIMIT 2"
    found = sql.rows(statement, wanted=wanted) if wanted else []
    if not found:
        raise no_such_job(wanted)
    if len(found) > 1:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Several jobs begin with {wanted!r}.",
            "Give more characters of the id.",
        )
    return job_of(sql, found[0])


def read_job(sql: Transaction, job_id: str) -> Job:
    """The job with this id. Raises `NotFoundError`."""
    row = sql.row("SELECT * FROM jobs WHERE id = :job", job=job_id)
    if row is None:
        raise no_such_job(job_id)
    return job_of(sql, row)


def newest_jobs(
    sql: Transaction,
    limit: int = 50,
    states: Collection[JobState] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Job]:
    """The newest jobs first, of those in these states (None: any) with all of these labels."""
    where = "" if states is None else f"WHERE state IN ({words(*states) or 'NULL'})"
    # Labels are compared here: a label's key may be any text, and the databases write paths into JSON in
    # different ways.
    end = "" if labels else f"LIMIT {limit:d}"
    rows = sql.rows(f"SELECT * FROM jobs {where} ORDER BY created_at DESC, id DESC {end}")
    found = (job_of(sql, row) for row in rows)
    return list(islice((job for job in found if not labels or labels.items() <= job.labels.items()), limit))


def status_and_errors(sql: Transaction, prefix: str) -> tuple[JobStatus, dict[ErrorCode, int]]:
    """Status and error counts of the job with this id, or the only one whose id begins so. Raises
    `NotFoundError`."""
    job = find_job(sql, prefix)
    return status_of(sql, job), error_counts(sql, job.id)


def status_of(sql: Transaction, job: Job) -> JobStatus:
    """The status of a job, with what it waits for."""
    (status,) = statuses_of(sql, [job])
    if job.state.final:
        return status
    killed = was_killed(sql.place)
    live = sql.rows(_LIVE_WORKERS, model=job.spec.model, job=job.id)
    states = [row.state for row in live if not (killed and row.id.startswith(OF_A_HOME))]
    quarantined = states.count(QUARANTINED)
    outage = sql.row(_OUTAGE, job=job.id)
    return replace(
        status,
        outage=record(Outage, outage) if outage is not None and outage.code in OUTAGES else None,
        workers=len(states) - quarantined,
        quarantined_workers=quarantined,
    )


def statuses_of(sql: Transaction, found: Sequence[Job]) -> list[JobStatus]:
    """The statuses of these jobs, without what they wait for."""
    now, busy = sql.now, worked_on(sql, [job.id for job in found])
    shards: dict[str, list[Row]] = {job.id: [] for job in found}
    for row in sql.rows(_SHARDS, jobs=list(shards)):
        shards[row.job_id].append(row)
    return [_status(job, shards[job.id], busy.get(job.id, []), now) for job in found]


def _status(job: Job, by_state: Sequence[Row], busy: Sequence[tuple[float, float]], now: float) -> JobStatus:
    def total(name: str) -> int:
        return sum(getattr(row, name) for row in by_state)

    made = [
        ShardSpread(row.made, row.item_ms or 0.0, row.item_ms_squared or 0.0)
        for row in by_state
        if row.state == ShardState.DONE
    ]
    return JobStatus(
        job=job,
        items=ItemCounts(total("n_items"), total("n_done"), total("n_failed"), total("n_skipped")),
        shards={ShardState(row.state): row.shards for row in by_state},
        audio_ms=total("audio_ms"),
        engine_ms=total("engine_ms"),
        bytes_out=total("bytes_out"),
        now=now,
        spread=made[0] if made else ShardSpread(),
        busy_seconds=sum(end - start for start, end in busy),
    )


def worked_on(sql: Transaction, job_ids: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of every time in which shards of these jobs were leased, in order; only jobs that have
    some.

    Times that overlap or lie no more than `GAP_SECONDS` apart are one.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for job_id, start, end in sql.rows(_BUSY, jobs=list(job_ids)):
        found.setdefault(job_id, []).append((start, end))
    return found


def error_counts(sql: Transaction, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items and rejected lines by code, the most frequent first."""
    counts = Counter(failed_counts(sql, job_id))
    counts.update({ErrorCode(row.code): row.lines for row in sql.rows(_REJECTED, job=job_id)})
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def failed_counts(sql: Transaction, job_id: str) -> dict[ErrorCode, int]:
    """Failed and dead items alone by code. Raises `NotFoundError`."""
    read_job(sql, job_id)
    return {ErrorCode(row.code): row.lines for row in sql.rows(_FAILED, job=job_id)}


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
class WorkerStatus(WorkerInfo):
    """A worker process, or a GPU whose worker is quarantined, with what it does."""

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


def worker_statuses(sql: Transaction, *, everyone: bool = False) -> list[WorkerStatus]:
    """The workers, the newest first; `everyone`: also those that retired, and those that were lost more
    than a day ago."""
    now, killed = sql.now, was_killed(sql.place)
    held: dict[str, list[HeldShard]] = {}
    for row in sql.rows(_HELD):
        held.setdefault(row.worker_id, []).append(record(HeldShard, row))
    recent = {row.worker_id: record(RecentWork, row) for row in sql.rows(_RECENT, now=now)}
    found: list[WorkerStatus] = []
    for row in sql.rows(f"SELECT * FROM workers {'' if everyone else _PRESENT} ORDER BY started_at DESC, id"):
        silent_seconds = max(0.0, now - row.heartbeat_at)
        # The next pass of a reconciler says so too; there may be no worker left that makes one.
        gone = (killed and row.id.startswith(OF_A_HOME)) or silent_seconds > LIVE_SECONDS
        found.append(
            record(
                WorkerStatus,
                row,
                state=LOST if gone and row.state != RETIRED else row.state,
                silent_seconds=silent_seconds,
                held=held.get(row.id, []),
                recent=recent.get(row.id, RecentWork()),
            )
        )
    return found
