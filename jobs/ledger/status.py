"""The status of jobs and workers, from shard counters without scanning items."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from msgspec import UNSET

from jobs.checks import ALIGNER, CHECKS, METERED, Quality
from jobs.ledger.records import (
    HOME_WORKER_PREFIX,
    LIVE_SECONDS,
    LOST,
    OUTAGES,
    QUARANTINED,
    RETIRED,
    SCORE_COLUMNS,
    Job,
    JobState,
    ShardState,
    WorkerInfo,
    clean,
    no_such_job,
)
from jobs.ledger.transaction import Transaction, literals, record
from jobs.own_files import located, was_killed
from pipelines.errors import ErrorCode, NotFoundError

#: Minimum pause between two leases that counts as idle time; dispatch causes shorter pauses.
GAP_SECONDS = 10.0

#: Mean engine time per item of a shard, see `ShardSpread`.
_ITEM_MS = "CASE WHEN n_done > 0 THEN 1.0 * engine_ms / (n_done + n_failed) END"
_SUMS = ("n_items", "n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out", "energy_mj")
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
SELECT error_code, count(*) FROM items
WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state IN (2, 3) GROUP BY error_code
"""
_REJECTED = "SELECT code, count(*) FROM rejected_lines WHERE job_id = :job GROUP BY code"
#: The valid decisions about items of :job: the last one of each, if it is about the present audio, whose kind is one of
#: :kinds.
DECISIONS = """
FROM decisions LEFT JOIN artifacts ON artifacts.job_no = decisions.job_no AND artifacts.idx = decisions.idx AND kind IN (:kinds)
WHERE decisions.job_no = (SELECT no FROM jobs WHERE id = :job) AND decisions.sha256 = COALESCE(artifacts.sha256, '')
AND decisions.no = (
    SELECT max(later.no) FROM decisions AS later WHERE later.job_no = decisions.job_no AND later.idx = decisions.idx
)
"""
#: Live workers, including quarantined ones, that serve :model. Those that refused :job at their last attempt
#: are left out.
_LIVE_WORKERS = f"""
SELECT id, state FROM workers
WHERE state NOT IN ('{RETIRED}', '{LOST}') AND heartbeat_at >= <now> - {LIVE_SECONDS} AND (model = '' OR model = :model)
AND id NOT IN (
    SELECT worker_id FROM attempts WHERE job_id = :job GROUP BY worker_id
    HAVING max(CASE WHEN outcome = 'refused' THEN started_at END) = max(started_at)
)
"""
#: A running lease counts until now or its expiry.
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

#: Recent work of a worker is that of its running leases and of those that ended within this time.
RECENT_SECONDS = 600.0
#: Workers that were lost longer ago are only shown on request.
LOST_SECONDS = 24 * 3600.0

_PRESENT = f"""
WHERE state NOT IN ('{RETIRED}', '{LOST}') OR (state = '{LOST}' AND heartbeat_at >= <now> - {LOST_SECONDS})
"""
_HELD = """
SELECT shards.worker_id, jobs.id AS job, jobs.name AS job_name, shards.no AS shard, n_items AS items,
    n_done + shards.n_failed AS ended_items, attempts.started_at AS claimed_at
FROM shards
JOIN jobs ON jobs.id = shards.job_id
JOIN attempts ON attempts.job_id = shards.job_id AND attempts.shard_no = shards.no AND attempts.epoch = shards.epoch
WHERE shards.state = 'leased' ORDER BY attempts.started_at, jobs.id, shards.no
"""
#: The ledger counts audio per shard; a lease gets a share in proportion to its items. Overlapping times count
#: once.
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


class ItemCounts(NamedTuple):
    total: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0

    @property
    def ended(self) -> int:
        """The items that workers are done with."""
        return self.done + self.failed

    @property
    def pending(self) -> int:
        return self.total - self.ended - self.skipped


@dataclass(frozen=True, slots=True)
class Outage:
    """The service failure (down, full or forbidden) that ended the last lease of a waiting shard."""

    code: ErrorCode
    message: str
    #: End of that lease, by the ledger's clock.
    at: float


class ShardSpread(NamedTuple):
    """Variation of the engine time of done shards, for the error of an ETA."""

    #: Number of done shards with audio.
    shards: int = 0
    #: Sum over these shards of the mean engine time per ended item in milliseconds, and the sum of its squares.
    item_ms: float = 0.0
    item_ms_squared: float = 0.0


class MeasuredItems(NamedTuple):
    """The items that meters have measured."""

    items: int = 0
    #: Those of them of which a measured draw failed. Items that are not measured keep such a draw.
    failed: int = 0
    #: Those of `failed` that no other draw and no decision has mended.
    still_failed: int = 0
    #: See `Quality.max_failure_rate`.
    max_failure_rate: float | None = None

    @property
    def failure_rate(self) -> float:
        return self.failed / max(1, self.items)

    @property
    def interval(self) -> list[float]:
        """The 95 % confidence interval of the failure rate (Wilson, 1927)."""
        z2 = 1.959964**2
        spread = math.sqrt(z2 * (self.failed * (1 - self.failure_rate) + z2 / 4))
        return [(self.failed + z2 / 2 + side * spread) / (self.items + z2) for side in (-1, 1)]

    @property
    def above(self) -> bool:
        """Whether the failure rate is above its maximum."""
        return self.max_failure_rate is not None and self.failure_rate > self.max_failure_rate


class JobStatus(NamedTuple):
    """A job with the sums of its shard counters."""

    job: Job
    items: ItemCounts
    shards: Mapping[ShardState, int]
    audio_ms: int
    engine_ms: int
    bytes_out: int
    #: The ledger's clock at the time of reading.
    now: float
    #: The failure of a service that makes shards wait, if there is one.
    outage: Outage | None = None
    spread: ShardSpread = ShardSpread()
    #: Time in which shards were leased, without pauses and the time between the job's end and a retry.
    busy_seconds: float = 0.0
    #: Live workers that serve the job's model; None: not counted.
    workers: int | None = None
    #: Quarantined workers that serve the job's model; None: not counted.
    quarantined_workers: int | None = None
    #: Not counted in lists of jobs, and while the job is followed.
    measured: MeasuredItems = MeasuredItems()
    #: Energy of the GPUs in millijoules; 0: unknown.
    energy_mj: int = 0
    #: `accepted` and `refused` -> number of items, if people decided about any; not counted in lists of jobs.
    decisions: Mapping[str, int] = {}


def jobs_by(sql: Transaction, statement: str, **values: object) -> Iterator[Job]:
    """The rows of `jobs` that a statement finds, as records."""
    for row in sql.rows(statement, **values):
        yield record(Job, row, store_url=located(row.store_url, sql.place))


def find_job(sql: Transaction, prefix: str) -> Job:
    """The job with this id or unique prefix of an id. Raises `NotFoundError`."""
    wanted = clean(prefix.strip().lower().replace("\x00", ""))
    statement = "SELECT * FROM jobs WHERE substr(id, 1, length(:wanted)) = :wanted ORDER BY id LIMIT 2"
    found = list(jobs_by(sql, statement, wanted=wanted)) if wanted else []
    if not found:
        raise no_such_job(wanted)
    if len(found) > 1:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Several job ids begin with {wanted!r}.",
            "Enter more characters of the id.",
        )
    return found[0]


def read_job(sql: Transaction, job_id: str) -> Job:
    """The job with this id. Raises `NotFoundError`."""
    for job in jobs_by(sql, "SELECT * FROM jobs WHERE id = :job", job=job_id):
        return job
    raise no_such_job(job_id)


def newest_jobs(
    sql: Transaction,
    limit: int = 50,
    states: Collection[JobState] | None = None,
    labels: Mapping[str, str] | None = None,
) -> list[Job]:
    """Jobs in these states (None: any) with all of these labels, the newest first."""
    where = "" if states is None else f"WHERE state IN ({literals(*states) or 'NULL'})"
    # Labels are compared here, because a key may be any text and the databases have different JSON paths.
    end = "" if labels else f"LIMIT {limit:d}"
    found = jobs_by(sql, f"SELECT * FROM jobs {where} ORDER BY created_at DESC, id DESC {end}")
    return list(islice((job for job in found if not labels or labels.items() <= job.labels.items()), limit))


def status_and_errors(sql: Transaction, prefix: str) -> tuple[JobStatus, dict[ErrorCode, int]]:
    """Status and error counts of the job with this id or unique prefix of an id. Raises `NotFoundError`."""
    job_id = find_job(sql, prefix).id
    status = status_of(sql, job_id)
    return status._replace(measured=measured_items(sql, status.job)), error_counts(sql, job_id)


def status_of(sql: Transaction, job_id: str) -> JobStatus:
    """The status of a job, with its outage and workers. Raises `NotFoundError`."""
    job = read_job(sql, job_id)
    (status,) = statuses_of(sql, [job])
    counts = f"SELECT CASE WHEN accepted THEN 'accepted' ELSE 'refused' END, count(*) {DECISIONS} GROUP BY accepted ORDER BY 1"
    status = status._replace(decisions=dict(sql.rows(counts, job=job_id, kinds=job.spec.audio_kinds)))
    if job.state.final:
        return status._replace(measured=measured_items(sql, job))
    killed = was_killed(sql.place)
    live = sql.rows(_LIVE_WORKERS, model=job.spec.model, job=job.id)
    states = [row.state for row in live if not (killed and row.id.startswith(HOME_WORKER_PREFIX))]
    quarantined = states.count(QUARANTINED)
    outage = sql.row(_OUTAGE, job=job.id)
    return status._replace(
        outage=record(Outage, outage) if outage is not None and outage.code in OUTAGES else None,
        workers=len(states) - quarantined,
        quarantined_workers=quarantined,
    )


def measured_items(sql: Transaction, job: Job, checks: Quality | None = None) -> MeasuredItems:
    """The items of a job that meters have measured: those of `checks`, or those of its own checks."""
    quality = checks or job.spec.quality or Quality()
    # The aligner of a job with times of words measures all items.
    names = [name for name in METERED if name != ALIGNER or job.spec.timestamps is not True]
    names += quality.bounds.keys() - CHECKS.keys()
    likes = {f"like{number}": f'%"{name}":%' for number, name in enumerate(names)}
    likes["silero"] = '%,"silero"]%'
    tests = " OR ".join(f"CAST(scores AS TEXT) LIKE :{name}" for name in likes)
    if quality.vad == "silero" and not quality.meters:
        names.append("silence")
    columns = ", ".join(name for name in SCORE_COLUMNS if name in names)
    # Few draws are searched: those of items that failed, or whose kept draw may have been measured.
    statement = f"""
    SELECT count(DISTINCT idx), count(DISTINCT CASE WHEN code IS NOT NULL THEN idx END),
        count(DISTINCT CASE WHEN code IS NOT NULL AND EXISTS (
            SELECT 1 FROM items WHERE items.job_no = draws.job_no AND items.idx = draws.idx
            AND (state IN (2, 3) OR (kept AND error_code IS NULL))
        ) THEN idx END) FROM draws
    WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND idx IN (
        SELECT idx FROM scores WHERE job_no = (SELECT no FROM jobs WHERE id = :job)
        AND (COALESCE({columns}) IS NOT NULL OR {tests.replace("scores", "others")})
        UNION SELECT idx FROM items WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state IN (2, 3)
    ) AND ({tests})
    """
    (counts,) = sql.rows(statement, job=job.id, **likes)
    highest = quality.max_failure_rate
    return MeasuredItems(*counts, max_failure_rate=None if highest is UNSET else highest)


def statuses_of(sql: Transaction, found: Sequence[Job]) -> list[JobStatus]:
    """The statuses of jobs, without outages and workers."""
    now = sql.now
    busy = busy_spans(sql, [job.id for job in found])
    shards = {job.id: [] for job in found}
    for row in sql.rows(_SHARDS, jobs=list(shards)):
        shards[row.job_id].append(row)
    statuses: list[JobStatus] = []
    for job in found:
        by_state = shards[job.id]
        sums = (sum(getattr(row, name) for row in by_state) for name in _SUMS)
        *counts, audio_ms, engine_ms, bytes_out, energy_mj = sums
        ended = (row for row in by_state if row.state == ShardState.DONE)
        spread = (ShardSpread(row.made, row.item_ms or 0.0, row.item_ms_squared or 0.0) for row in ended)
        status = JobStatus(
            job,
            ItemCounts(*counts),
            {ShardState(row.state): row.shards for row in by_state},
            audio_ms,
            engine_ms,
            bytes_out,
            now,
            spread=next(spread, ShardSpread()),
            energy_mj=energy_mj,
            busy_seconds=sum(end - start for start, end in busy.get(job.id, [])),
        )
        statuses.append(status)
    return statuses


def busy_spans(sql: Transaction, job_ids: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Job -> (start, end) of the times in which workers held its shards, in order, by the ledger's clock.

    Times that overlap or are less than `GAP_SECONDS` apart are merged. Jobs without leases are missing.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for job_id, start, end in sql.rows(_BUSY, jobs=list(job_ids)):
        found.setdefault(job_id, []).append((start, end))
    return found


def error_counts(sql: Transaction, job_id: str) -> dict[ErrorCode, int]:
    """Code -> number of failed and dead items and rejected lines, the most frequent code first."""
    counts = Counter(failed_counts(sql, job_id))
    counts.update({ErrorCode(code): lines for code, lines in sql.rows(_REJECTED, job=job_id)})
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def failed_counts(sql: Transaction, job_id: str) -> dict[ErrorCode, int]:
    """Code -> number of failed and dead items, without rejected lines. Raises `NotFoundError`."""
    read_job(sql, job_id)
    return {ErrorCode(code): items for code, items in sql.rows(_FAILED, job=job_id)}


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard that a worker holds."""

    job: str
    job_name: str
    shard: int
    items: int
    #: Number of ended items, including items that ended under earlier leases.
    ended_items: int
    claimed_at: float


@dataclass(frozen=True, slots=True)
class RecentWork:
    """Work of a worker under its running and recently ended leases."""

    items_done: int = 0
    items_failed: int = 0
    audio_seconds: float = 0.0
    #: Time in which the worker held at least one of these leases.
    busy_seconds: float = 0.0

    @property
    def rtfx(self) -> float | None:
        """Audio seconds per busy second; None without audio."""
        return self.audio_seconds / self.busy_seconds if self.audio_seconds and self.busy_seconds else None


@dataclass(frozen=True, slots=True)
class WorkerStatus(WorkerInfo):
    """A worker process, or a GPU whose worker is quarantined, with its work."""

    #: `up`, `draining`, `quarantined`, `lost` or `retired`.
    state: str
    #: Why it is quarantined, or which job it cannot run and why.
    state_reason: str
    started_at: float
    heartbeat_at: float
    #: Time since the last heartbeat, by the ledger's clock.
    silent_seconds: float
    held: tuple[HeldShard, ...]
    recent: RecentWork


def worker_statuses(sql: Transaction, *, include_ended: bool = False) -> list[WorkerStatus]:
    """The workers, the newest first. `include_ended`: also retired ones, and those lost more than a day
    ago."""
    now = sql.now
    killed = was_killed(sql.place)
    held: dict[str, list[HeldShard]] = {}
    for row in sql.rows(_HELD):
        held.setdefault(row.worker_id, []).append(record(HeldShard, row))
    recent = {row.worker_id: record(RecentWork, row) for row in sql.rows(_RECENT, now=now)}
    found: list[WorkerStatus] = []
    statement = f"SELECT * FROM workers {'' if include_ended else _PRESENT} ORDER BY started_at DESC, id"
    for row in sql.rows(statement):
        silent_seconds = max(0.0, now - row.heartbeat_at)
        # The next reconcile would mark it as lost, but there may be no worker left to run it.
        gone = (killed and row.id.startswith(HOME_WORKER_PREFIX)) or silent_seconds > LIVE_SECONDS
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
