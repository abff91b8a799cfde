"""Repairs what crashes leave behind: expired leases, lost messages, stale workers, wrong times, unfinished
cancels, missing manifests; and tells which objects of the store nothing names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jobs.layout import draw_of, index_of, is_reference_key, job_prefix, lease_of_pack, shard_of_input
from jobs.ledger.control import cancel_some
from jobs.ledger.database import Database
from jobs.ledger.lifecycle import (
    NUMBER,
    UNQUEUED,
    complete_if_over,
    crash,
    end_attempt,
    has_open_shards,
    lock_job,
    lock_shard,
    pause_if_over_budget,
    spent_budget,
)
from jobs.ledger.queries import shard_inputs
from jobs.ledger.records import (
    CLOCK_SLACK_SECONDS,
    FINAL,
    MANIFEST_GRACE_SECONDS,
    MAX_BACKOFF_SECONDS,
    RETRYABLE_JOBS,
    WORKING,
    AttemptOutcome,
    ItemState,
    Job,
    ShardState,
    Verdict,
)
from jobs.ledger.schema import ITEM_STATES
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Row, Transaction, words
from jobs.ledger.workers import HEARD, lose_stale_workers
from jobs.times import LONGEST_LEASE_SECONDS
from pipelines.errors import ErrorCode

_AHEAD = f"<now> + {CLOCK_SLACK_SECONDS}"
#: Where rows may lie ahead, and what they become: as if their times had been written now. A worker that lives
#: keeps its lease, and a dead one's runs out in its time; a lease whose length makes no sense runs out at
#: once.
_REPAIRS = (
    (
        "shards",
        f"state = 'leased' AND heartbeat_at > {_AHEAD}",
        "lease_until = <now> + (lease_until - heartbeat_at), heartbeat_at = <now>",
    ),
    (
        "shards",
        f"state = 'leased' AND lease_until > {_AHEAD} + {LONGEST_LEASE_SECONDS}",
        "lease_until = <now>",
    ),
    ("shards", f"state = 'ready' AND not_before > {_AHEAD} + {MAX_BACKOFF_SECONDS}", "not_before = NULL"),
    ("shards", f"state = 'queued' AND enqueued_at > {_AHEAD}", "enqueued_at = <now>"),
    ("workers", f"{HEARD} AND heartbeat_at > {_AHEAD}", "heartbeat_at = <now>"),
)
#: Jobs that one pass of the reconciler names.
JOBS_AT_ONCE = 10
# Some jobs that ended a while ago and whose manifest is not recorded: others each time, so that none waits
# behind those that fail. A wrong clock may have ended a job in the future; it ended a while ago, too.
_WITHOUT_MANIFEST = f"""
SELECT id FROM jobs WHERE state IN ({words(*FINAL)})
AND (finished_at < <now> - {MANIFEST_GRACE_SECONDS} OR finished_at > {_AHEAD})
AND (manifest_finished_at IS NULL OR manifest_finished_at <> finished_at) ORDER BY random() LIMIT {JOBS_AT_ONCE}
"""
_EXPIRED = "state = 'leased' AND lease_until < <now>"
_LOST_MESSAGE = "state = 'queued' AND enqueued_at < <now> - :timeout"
_STALE_WORKER = f"{HEARD} AND heartbeat_at < <now> - :timeout"


def has_future_times(sql: Transaction) -> bool:
    """Whether a time lies further in the future than is possible."""
    return any(sql.row(f"SELECT 1 FROM {table} WHERE {ahead} LIMIT 1") for table, ahead, _ in _REPAIRS)


def correct_times(sql: Transaction) -> int:
    """Corrects times that lie too far in the future; returns the number of rows."""
    return sum(sql.change(f"UPDATE {table} SET {change} WHERE {ahead}") for table, ahead, change in _REPAIRS)


def note_manifest(sql: Transaction, job: Job) -> None:
    """Notes that the manifest of this end of a job is written, or that there is none to write; does nothing
    where the job continued meanwhile."""
    sql.change(
        "UPDATE jobs SET manifest_finished_at = finished_at WHERE id = :job AND finished_at = :finished_at",
        job=job.id,
        finished_at=job.finished_at,
    )


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What one pass of the reconciler repaired."""

    expired_leases: int = 0
    lost_messages: int = 0
    bisected_shards: int = 0
    dead_items: int = 0
    stale_workers: int = 0
    #: Rows with a time further ahead than possible: the database's clock was wrong, and is right again.
    times_ahead: int = 0
    #: Jobs that ended in this pass.
    ended_jobs: tuple[str, ...] = ()
    #: Some of the jobs that ended a while ago and have no manifest.
    without_manifest: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """What was repaired in the ledger, by kind."""
        return {
            name: value for name in self.__dataclass_fields__ if isinstance(value := getattr(self, name), int)
        }

    @property
    def changed(self) -> bool:
        return any(self.counts.values()) or bool(self.ended_jobs)


@dataclass(frozen=True, slots=True)
class _Findings:
    """What a read of the ledger, without any lock, finds to repair."""

    expired: list[tuple[str, int]]
    lost_messages: list[tuple[str, int]]
    stale_workers: bool
    cancelling: list[str]
    #: Jobs to be completed, or paused for their error budget.
    judged: list[str]
    times_ahead: bool
    without_manifest: list[str]


def reconcile(
    database: Database, queued_timeout_seconds: float, worker_timeout_seconds: float
) -> ReconcileReport:
    """One pass; any process may run it, also several at once. Writes only where there is something to
    repair."""
    found = database.read(_find, queued_timeout_seconds, worker_timeout_seconds)
    times_ahead = database.write(correct_times) if found.times_ahead else 0
    verdicts = Counter(database.write(_expire, job_id, no) for job_id, no in found.expired)
    lost = sum(
        database.write(_requeue, job_id, no, queued_timeout_seconds) for job_id, no in found.lost_messages
    )
    stale = database.write(lose_stale_workers, worker_timeout_seconds) if found.stale_workers else 0
    for job_id in found.cancelling:
        while database.write(cancel_some, job_id):
            pass
    for job_id in found.judged:
        database.write(_judge, job_id)
    touched = {job_id for job_id, _ in found.expired}.union(found.cancelling, found.judged)
    return ReconcileReport(
        expired_leases=verdicts.total() - verdicts[None],
        lost_messages=lost,
        bisected_shards=verdicts[Verdict.BISECT],
        dead_items=verdicts[Verdict.MARK_DEAD],
        stale_workers=stale,
        times_ahead=times_ahead,
        ended_jobs=tuple(sorted(job_id for job_id in touched if database.read(read_job, job_id).state.final)),
        without_manifest=tuple(found.without_manifest),
    )


def _find(sql: Transaction, queued_timeout_seconds: float, worker_timeout_seconds: float) -> _Findings:
    # Not sorted by SQL, which would walk the primary key instead of the small partial indexes.
    shards = "SELECT job_id, no FROM shards WHERE"
    working = sql.rows(f"SELECT * FROM jobs WHERE state IN ({words(*WORKING)}) ORDER BY id")
    return _Findings(
        expired=sorted(map(tuple, sql.rows(f"{shards} {_EXPIRED}"))),
        lost_messages=sorted(
            map(tuple, sql.rows(f"{shards} {_LOST_MESSAGE}", timeout=queued_timeout_seconds))
        ),
        stale_workers=bool(
            sql.row(f"SELECT 1 FROM workers WHERE {_STALE_WORKER} LIMIT 1", timeout=worker_timeout_seconds)
        ),
        cancelling=sql.column("SELECT id FROM jobs WHERE state = 'cancelling'"),
        judged=[job.id for job in working if spent_budget(sql, job) or not has_open_shards(sql, job.id)],
        times_ahead=has_future_times(sql),
        without_manifest=sql.column(_WITHOUT_MANIFEST),
    )


def _expire(sql: Transaction, job_id: str, shard_no: int) -> Verdict | None:
    """Ends a lease that ran out; None: it has not run out."""
    job = lock_job(sql, job_id)
    shard = lock_shard(sql, job_id, shard_no)
    if job is None or shard is None or job.state not in WORKING or shard.state != ShardState.LEASED:
        return None
    if shard.lease_until >= sql.now:
        return None
    message = f"The lease of worker {shard.worker_id} ran out: it died, hung, or lost the ledger."
    end_attempt(sql, shard, AttemptOutcome.EXPIRED, ErrorCode.WORKER_LOST, message)
    return crash(sql, job, shard, message)


def _requeue(sql: Transaction, job_id: str, shard_no: int, timeout_seconds: float) -> int:
    """A shard whose message was lost becomes ready; a message that turns up later is dropped or does no
    harm."""
    statement = f"UPDATE shards SET {UNQUEUED} WHERE job_id = :job AND no = :shard AND {_LOST_MESSAGE}"
    return sql.change(statement, job=job_id, shard=shard_no, timeout=timeout_seconds)


def _judge(sql: Transaction, job_id: str) -> None:
    job = lock_job(sql, job_id)
    if job is not None and job.state in WORKING and not complete_if_over(sql, job_id):
        pause_if_over_budget(sql, job)


#: Longer than a store with all its tries takes to delete an object or to give up.
LONGEST_DELETE_SECONDS = 600
#: Input objects by (key, SHA-256).
Inputs = frozenset[tuple[str, str]]


def is_orphan(
    sql: Transaction, job_id: str, key: str, ended_before: float, read: Inputs = frozenset()
) -> bool:
    """Whether a job that ended before that time wrote `key`, and nothing names it or may still come to
    name it.

    `read`: the inputs in which no line names the key, where it is one of reference audio.
    """
    job = lock_job(sql, job_id)
    if job is None or job.state not in FINAL or job.finished_at is None or job.finished_at > ended_before:
        return False
    kind = key.removeprefix(job_prefix(job.id)).partition("/")[0]
    if kind == "input":
        # Of one of the job's shards, left by an ingest that was broken off, which no shard reads.
        inputs = shard_inputs(sql, job.id)
        return shard_of_input(key, job.id) in inputs and key not in {named for named, _ in inputs.values()}
    if kind == "references":
        return is_reference_key(key, job.id) and read == frozenset(shard_inputs(sql, job.id).values())
    if kind == "packs":
        return _is_unnamed_pack(sql, job, key)
    return _is_unnamed(sql, job, kind, key)


def delete_orphan(
    sql: Transaction,
    job_id: str,
    key: str,
    ended_before: float,
    delete: Callable[[], None],
    read: Inputs = frozenset(),
) -> bool:
    """Calls `delete` while the job's row is locked, so that no retry begins meanwhile, if `key` is an
    orphan then."""
    if sql.engine == "postgresql":
        # A store may take its time to delete, and until it has, the lock must hold; only a retry of this job
        # waits for it.
        sql.change(f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_DELETE_SECONDS * 1000}")
    if not is_orphan(sql, job_id, key, ended_before, read):
        return False
    delete()
    return True


def _is_unnamed(sql: Transaction, job: Row, kind: str, key: str) -> bool:
    """A key of an item that has ended, and that no artifact of the item has.

    An item that failed may be tried again, maybe by a ledger that is newer than this one: of its objects
    only those of draws that are recorded as refused are of no use.
    """
    index = index_of(key)
    of_item = "job_no = :job_no AND idx = :index"
    values = {"job_no": job.no, "index": index}
    item = sql.row(f"SELECT example_id, state FROM items WHERE {of_item}", **values)
    if index is None or item is None:
        return False
    suffix = "txt" if kind == "text" else read_job(sql, job.id).spec.format
    draw = draw_of(key, job.id, kind, index, item.example_id, suffix)
    if draw is None or sql.row(f"SELECT 1 FROM artifacts WHERE {of_item} AND key = :key", **values, key=key):
        return False
    if ITEM_STATES[item.state] in (ItemState.DONE, ItemState.SKIPPED) or job.state not in RETRYABLE_JOBS:
        return True
    return sql.row(f"SELECT 1 FROM draws WHERE {of_item} AND draw = :draw", **values, draw=draw) is not None


def _is_unnamed_pack(sql: Transaction, job: Row, key: str) -> bool:
    """The key of a pack that holds no artifact, of a lease that this ledger knows. What is in it was never
    committed, and is never adopted; one item that is in it keeps a whole pack."""
    lease = lease_of_pack(key, job.id)
    if lease is None:
        return False
    shard_no, epoch = lease
    last_epoch = sql.value(
        "SELECT epoch FROM shards WHERE job_id = :job AND no = :shard", job=job.id, shard=shard_no
    )
    if last_epoch is None or epoch > last_epoch:
        return False
    named = sql.row(
        f"SELECT 1 FROM artifacts WHERE job_no = {NUMBER} AND pack = :key LIMIT 1", job=job.id, key=key
    )
    return named is None
