"""Repairs after crashes: expired leases, lost messages, stale workers, wrong times, unfinished cancels,
missing manifests. Also decides which stored objects are orphans."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from jobs.layout import draw_of, index_of, is_reference_key, job_prefix, lease_of_pack, shard_of_input
from jobs.ledger.control import cancel_some
from jobs.ledger.database import Database
from jobs.ledger.lifecycle import (
    MAX_BACKOFF_SECONDS,
    UNQUEUED,
    AfterCrash,
    complete_or_pause,
    crash,
    end_attempt,
    has_open_shards,
    lock_job,
    lock_lease,
    of_ticket,
    spent_budget,
    update_job,
)
from jobs.ledger.queries import job_state, shard_inputs
from jobs.ledger.records import (
    CLOCK_SLACK_SECONDS,
    FINAL,
    ITEM_STATES,
    LOST,
    MANIFEST_GRACE_SECONDS,
    RETRYABLE_JOBS,
    WORKING,
    ItemState,
    Job,
    Ticket,
)
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Row, Transaction, literals
from jobs.ledger.workers import ACTIVE
from jobs.times import LONGEST_LEASE_SECONDS
from pipelines.errors import ErrorCode

_AHEAD = f"<now> + {CLOCK_SLACK_SECONDS}"
#: (table, condition for times that are too far in the future, change). The changes replace such times by
#: those that would be written now: a live worker keeps its lease, and the lease of a dead worker expires as
#: usual. A lease of impossible length expires at once.
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
    ("workers", f"{ACTIVE} AND heartbeat_at > {_AHEAD}", "heartbeat_at = <now>"),
)
#: The same for workers without recent heartbeats.
_STALE_WORKERS = (("workers", f"{ACTIVE} AND heartbeat_at < <now> - :timeout", f"state = '{LOST}'"),)
#: Maximum number of jobs without a manifest that one pass reports.
JOBS_AT_ONCE = 10
_OLD_MANIFEST = f"""
SELECT id FROM jobs WHERE state IN ({literals(*FINAL)}) AND (manifest_finished_at IS NULL OR manifest_finished_at <> finished_at)
"""
# Jobs that ended some time ago (or, by a wrong clock, in the future) and whose manifest is not recorded. They
# are chosen at random, so that jobs whose manifest fails do not block others.
_WITHOUT_MANIFEST = f"""
{_OLD_MANIFEST} AND (finished_at < <now> - {MANIFEST_GRACE_SECONDS} OR finished_at > {_AHEAD})
ORDER BY random() LIMIT {JOBS_AT_ONCE}
"""
_EXPIRED = "state = 'leased' AND lease_until < <now>"
_LOST_MESSAGE = "state = 'queued' AND enqueued_at < <now> - :timeout"


def _change_rows(database: Database, changes: tuple[tuple[str, str, str], ...], **values: object) -> int:
    """Changes rows as in `_REPAIRS`; returns their number. Takes the write lock only if rows match."""
    return sum(
        database.write(Transaction.change, f"UPDATE {table} SET {change} WHERE {wrong}", **values)
        for table, wrong, change in changes
        if database.read(Transaction.row, f"SELECT 1 FROM {table} WHERE {wrong} LIMIT 1", **values)
    )


def needs_manifest(sql: Transaction, job_id: str) -> bool:
    """Whether a job has ended and its newest manifest is missing or old."""
    return sql.row(f"{_OLD_MANIFEST} AND id = :job", job=job_id) is not None


def begin_manifest(sql: Transaction, job_id: str) -> float:
    """Records that a manifest is being written. Returns the mark for `note_manifest`, which no time equals."""
    mark = -random.random()
    update_job(sql, job_id, "manifest_finished_at = :mark", mark=mark)
    return mark


def note_manifest(sql: Transaction, job: Job, mark: float) -> None:
    """Records that the manifest of an ended job is written or not needed; does nothing if the job was
    reopened after `job` was read, or needs another manifest since `begin_manifest`."""
    sql.change(
        "UPDATE jobs SET manifest_finished_at = finished_at WHERE id = :job AND finished_at = :finished_at AND manifest_finished_at = :mark",
        job=job.id,
        finished_at=job.finished_at,
        mark=mark,
    )


class ReconcileReport(NamedTuple):
    """The repairs of one pass."""

    expired_leases: int = 0
    lost_messages: int = 0
    bisected_shards: int = 0
    dead_items: int = 0
    stale_workers: int = 0
    #: Rows with a time too far in the future, because the database's clock was wrong.
    times_ahead: int = 0
    #: Jobs that ended in this pass.
    ended_jobs: tuple[str, ...] = ()
    #: Some of the ended jobs without a manifest.
    without_manifest: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of repairs by kind."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, int)}

    @property
    def changed(self) -> bool:
        return any(self.counts.values()) or bool(self.ended_jobs)


def reconcile(
    database: Database, queued_timeout_seconds: float = 600, worker_timeout_seconds: float = 60
) -> ReconcileReport:
    """Repairs expired leases, lost messages, stale workers, wrong times and unfinished cancels. Ends or pauses
    jobs that their last worker should have ended or paused. One transaction per repair.

    Any number of processes may make such a pass at once. Takes write locks only if there is something to
    repair."""
    expired = database.read(_shards_that, _EXPIRED)
    times_ahead = _change_rows(database, _REPAIRS)
    verdicts = Counter(database.write(_expire, lease) for lease in expired)
    # If a lost message arrives later, it is dropped or harmless.
    requeue = f"UPDATE shards SET {UNQUEUED} WHERE job_id = :job AND no = :shard AND {_LOST_MESSAGE}"
    lost = sum(
        database.write(Transaction.change, requeue, **of_ticket(ticket), timeout=queued_timeout_seconds)
        for ticket in database.read(_shards_that, _LOST_MESSAGE, queued_timeout_seconds)
    )
    stale = _change_rows(database, _STALE_WORKERS, timeout=worker_timeout_seconds)
    cancelling, ending, without_manifest = database.read(_jobs_to_end)
    for job_id in cancelling:
        while database.write(cancel_some, job_id):
            pass
    for job_id in ending:
        database.write(complete_or_pause, job_id)
    touched = {lease.job_id for lease in expired}.union(cancelling, ending)
    return ReconcileReport(
        expired_leases=verdicts.total() - verdicts[None],
        lost_messages=lost,
        bisected_shards=verdicts["bisect"],
        dead_items=verdicts["mark_dead"],
        stale_workers=stale,
        times_ahead=times_ahead,
        ended_jobs=tuple(sorted(job_id for job_id in touched if database.read(job_state, job_id).final)),
        without_manifest=tuple(without_manifest),
    )


def _shards_that(sql: Transaction, condition: str, timeout_seconds: float = 0.0) -> list[Ticket]:
    """The shards that match a condition, in order."""
    # Sorting by SQL would scan the primary key instead of the small partial index.
    statement = f"SELECT job_id, no, epoch FROM shards WHERE {condition}"
    return sorted(sql.rows(statement, Ticket, timeout=timeout_seconds))


def _jobs_to_end(sql: Transaction) -> tuple[list[str], list[str], list[str]]:
    """Three lists of jobs: those that are cancelling, those that may be complete or over budget, and those
    without a manifest."""
    working = sql.rows(f"SELECT * FROM jobs WHERE state IN ({literals(*WORKING)}) ORDER BY id")
    return (
        sql.column("SELECT id FROM jobs WHERE state = 'cancelling'"),
        [job.id for job in working if spent_budget(sql, job) or not has_open_shards(sql, job.id)],
        sql.column(_WITHOUT_MANIFEST),
    )


def _expire(sql: Transaction, ticket: Ticket) -> AfterCrash | None:
    """Ends an expired lease; None: it has not expired."""
    shard = lock_lease(sql, ticket)
    if shard is None or shard.lease_until >= sql.now:
        return None
    message = f"The lease of worker {shard.worker_id} expired: it died, hung, or lost the ledger."
    end_attempt(sql, shard, "expired", ErrorCode.WORKER_LOST, message)
    return crash(sql, shard, message)


#: Time limit for the deletion of one object. Any store has deleted it or given up before, with all retries.
LONGEST_DELETE_SECONDS = 600
#: The shard of a lease, unless an artifact refers to the pack.
_UNREFERENCED_PACK = """
SELECT 1 FROM shards WHERE job_id = :job AND no = :shard AND epoch >= :epoch
AND NOT EXISTS (SELECT 1 FROM artifacts WHERE artifacts.job_no = shards.job_no AND pack = :key)
"""
#: Input objects as (key, SHA-256).
Inputs = frozenset[tuple[str, str]]


def is_orphan(sql: Transaction, job_id: str, key: str, ended_before: float, read: Inputs) -> bool:
    """Whether an object is an orphan: it belongs to a job that ended before `ended_before`, and nothing
    refers to it or may refer to it later.

    `read`: for reference audio, the inputs that were searched and do not refer to it.
    """
    job = lock_job(sql, job_id)
    if job is None or job.state not in FINAL or job.finished_at is None or job.finished_at > ended_before:
        return False
    kind = key.removeprefix(job_prefix(job.id)).partition("/")[0]
    if kind == "input":
        # An interrupted ingest may leave an input that its shard does not read.
        inputs = shard_inputs(sql, job.id)
        return shard_of_input(key, job.id) in inputs and key not in {named for named, _ in inputs.values()}
    if kind == "references":
        return is_reference_key(key, job.id) and read == frozenset(shard_inputs(sql, job.id).values())
    if kind == "packs":
        # Only commits under the lease that wrote a pack can refer to it. One artifact keeps the whole pack.
        lease = lease_of_pack(key, job.id)
        return (
            lease is not None
            and sql.row(_UNREFERENCED_PACK, job=job.id, shard=lease[0], epoch=lease[1], key=key) is not None
        )
    return _is_unreferenced(sql, job, kind, key)


def delete_orphan(
    sql: Transaction,
    job_id: str,
    key: str,
    ended_before: float,
    delete: Callable[[], None],
    read: Inputs = frozenset(),
) -> bool:
    """Calls `delete` if `key` is an orphan, with the job's row locked so that no retry starts meanwhile."""
    if sql.engine == "postgresql":
        # The lock must be held until the store has deleted the object; only a retry of this job waits for it.
        sql.change(f"SET LOCAL idle_in_transaction_session_timeout = {LONGEST_DELETE_SECONDS * 1000}")
    if not is_orphan(sql, job_id, key, ended_before, read):
        return False
    delete()
    return True


def _is_unreferenced(sql: Transaction, job: Row, kind: str, key: str) -> bool:
    """Whether a key belongs to an item, but no artifact refers to it, and no retry of the item can use it.

    A retry of a failed item may use objects that it finds, except objects of draws that are recorded as
    rejected.
    """
    index = index_of(key)
    of_item = "job_no = :job_no AND idx = :index"
    values = {"job_no": job.no, "index": index}
    named = f"EXISTS (SELECT 1 FROM artifacts WHERE {of_item} AND key = :key) AS named"
    item = sql.row(f"SELECT example_id, state, {named} FROM items WHERE {of_item}", **values, key=key)
    if index is None or item is None or item.named:
        return False
    draw = draw_of(key, job.id, kind, index, item.example_id, read_job(sql, job.id).spec.extension(kind))
    if draw is None:
        return False
    if ITEM_STATES[item.state] in (ItemState.DONE, ItemState.SKIPPED) or job.state not in RETRYABLE_JOBS:
        return True
    return sql.row(f"SELECT 1 FROM draws WHERE {of_item} AND draw = :draw", **values, draw=draw) is not None
