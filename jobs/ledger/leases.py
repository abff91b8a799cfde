"""Leases of shards: how workers claim, extend and end them, and commit outcomes under them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from jobs.ledger.lifecycle import (
    NUMBER,
    PENDING_OF,
    after_failure,
    complete_or_pause,
    crash,
    end_attempt,
    end_items,
    items_of,
    lock_lease,
    lock_shard,
    move_to,
    of_ticket,
    open_items,
    progressed,
    ready_after,
    record_errors,
    update_shard,
)
from jobs.ledger.records import (
    DISPATCHED,
    ITEM_STATE_NUMBERS,
    OUTAGES,
    SCHEMA_REVISION,
    SCORE_COLUMNS,
    WORKING,
    Artifact,
    CommitResult,
    Done,
    DrawRow,
    Failed,
    ItemState,
    JobState,
    Lease,
    Outcome,
    ShardState,
    Ticket,
    clean,
)
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Row, Transaction, literals
from jobs.ledger.workers import others_may_run
from pipelines.errors import ErrorCode, ServiceError

_QUEUED = """
shards.job_id = :job AND shards.no = :shard AND shards.epoch = :epoch AND shards.enqueued_epoch = :epoch
AND shards.state = 'queued'
"""
_STATE_OF_JOB = f"""
SELECT state, (SELECT version_num FROM alembic_version) AS revision FROM jobs
WHERE id = :job AND EXISTS (SELECT 1 FROM shards WHERE {_QUEUED})
"""
_BEGIN_JOB = """
UPDATE jobs SET state = 'running', started_at = COALESCE(started_at, <now>) WHERE id = :job AND state = 'ready'
"""
_TAKE = f"""
UPDATE shards SET state = 'leased', epoch = epoch + 1, worker_id = :worker, lease_until = <now> + :seconds,
    heartbeat_at = <now>, enqueued_epoch = NULL, enqueued_at = NULL, not_before = NULL,
    claimed_done = n_done, claimed_failed = n_failed
WHERE {_QUEUED} AND EXISTS (SELECT 1 FROM jobs WHERE id = :job AND state = 'running')
RETURNING *
"""
_EXTEND = f"""
UPDATE shards SET lease_until = <now> + :seconds, heartbeat_at = <now>
WHERE job_id = :job AND no = :shard AND epoch = :epoch AND worker_id = :worker AND state = 'leased'
AND EXISTS (SELECT 1 FROM jobs WHERE id = :job AND state IN ({literals(*WORKING)}))
"""
_LAST_ATTEMPTS = f"""
SELECT shards.attempts, jobs.max_attempts FROM shards JOIN jobs ON jobs.id = shards.job_id
WHERE {_QUEUED} AND shards.epoch > 0
"""
_RECORDED_ERRORS = """
SELECT 1 FROM item_errors WHERE job_no = :job_no AND idx BETWEEN :first AND :last AND epoch = :epoch LIMIT 1
"""
_PENDING, _DONE = ITEM_STATE_NUMBERS[ItemState.PENDING], ITEM_STATE_NUMBERS[ItemState.DONE]
_LEASED = f"""
SELECT shards.*, jobs.max_attempts, jobs.error_budget, <now> AS made_at
FROM shards JOIN jobs ON jobs.id = shards.job_id
WHERE shards.job_id = :job AND shards.no = :shard AND shards.epoch = :epoch AND shards.state = 'leased'
AND jobs.state IN ({literals(*WORKING)}) FOR UPDATE OF shards
"""
_COUNT = """
n_done = n_done + :n_done, n_failed = n_failed + :n_failed, audio_ms = audio_ms + :audio_ms,
engine_ms = engine_ms + :engine_ms, energy_mj = energy_mj + :energy_mj, bytes_out = bytes_out + :bytes_out
"""
#: Condition for the pending items of a shard among `:indexes`.
_OPEN = f"job_no = :job_no AND idx IN (:indexes) AND shard_no = :shard AND state = {_PENDING}"
#: An item ends once; later commits change nothing.
_KEPT = "ON CONFLICT DO NOTHING"


def should_run_alone(sql: Transaction, ticket: Ticket) -> bool:
    """Whether a shard should run alone, because its next crash would split it or fail its only item."""
    row = sql.row(_LAST_ATTEMPTS, **of_ticket(ticket))
    return row is not None and row.attempts + 1 >= row.max_attempts


def claim(sql: Transaction, ticket: Ticket, worker_id: str, lease_seconds: float) -> Lease | None:
    """Claims a queued shard by compare-and-set on state and epoch.

    None: the message can be dropped, because it is old or a duplicate, or the job does not run. Raises
    `ServiceError` with `ledger.schema` if the ledger was upgraded since the worker started.
    """
    job = sql.row(_STATE_OF_JOB, **of_ticket(ticket))
    if job is not None and job.revision != SCHEMA_REVISION:
        raise ServiceError(
            ErrorCode.LEDGER_SCHEMA,
            f"The ledger was changed to another version after this worker started ({job.revision}; this is {SCHEMA_REVISION}).",
            "Start a worker of that version.",
        )
    if job is None or job.state not in DISPATCHED:
        return None
    if job.state == JobState.READY:
        sql.change(_BEGIN_JOB, job=ticket.job_id)
    shard = sql.row(_TAKE, **of_ticket(ticket), worker=worker_id, seconds=lease_seconds)
    if shard is None:
        return None
    attempt = """
    INSERT INTO attempts (job_id, shard_no, epoch, worker_id, started_at) VALUES (:job, :shard, :epoch, :worker, <now>)
    """
    sql.change(attempt, job=shard.job_id, shard=shard.no, epoch=shard.epoch, worker=worker_id)
    rows = sql.rows(
        f"SELECT idx, example_id, attempts FROM items WHERE {PENDING_OF} ORDER BY idx", **items_of(shard)
    )
    pending = {index: (example_id, attempts) for index, example_id, attempts in rows}
    job = read_job(sql, shard.job_id)
    return Lease(job, shard.no, shard.epoch, worker_id, shard.input_key, shard.input_sha256, pending)


def heartbeat(
    sql: Transaction, worker_id: str, tickets: Sequence[Ticket], lease_seconds: float
) -> set[Ticket]:
    """Extends the worker's leases. Returns the lost ones, whose work must stop: the lease has ended, or the
    job was cancelled."""
    # Sorted, so that two heartbeats cannot deadlock.
    return {
        ticket
        for ticket in sorted(tickets)
        if not sql.change(_EXTEND, **of_ticket(ticket), worker=worker_id, seconds=lease_seconds)
    }


def finish_shard(
    sql: Transaction, ticket: Ticket, manifest_key: str | None = None, manifest_sha256: str | None = None
) -> bool:
    """Ends a lease: the shard is done, or its pending items wait for another attempt. False: the lease was
    lost."""
    shard = lock_lease(sql, ticket)
    if shard is None:
        return False
    if manifest_key is not None:
        update_shard(
            sql,
            shard,
            "manifest_key = :key, manifest_sha256 = :sha256",
            key=manifest_key,
            sha256=manifest_sha256,
        )
    if open_items(shard) == 0:
        end_attempt(sql, shard, "done")
        move_to(sql, shard, ShardState.DONE, "attempts = 0, outages = 0")
    elif progressed(shard) or sql.value(_RECORDED_ERRORS, **items_of(shard), epoch=shard.epoch):
        end_attempt(sql, shard, "partial")
        tries = sql.value(f"SELECT max(attempts) FROM items WHERE {PENDING_OF}", **items_of(shard))
        ready_after(sql, shard, tries or 0, "attempts = 0, outages = 0")
    else:
        message = "The worker ended the shard without an outcome for any of its open items."
        end_attempt(sql, shard, "failed", ErrorCode.WORKER_CRASH, message)
        crash(sql, shard, message)
    complete_or_pause(sql, ticket.job_id)
    return True


def release(sql: Transaction, ticket: Ticket, reason: str) -> bool:
    """Gives a shard back at once, without counting an attempt, because the worker drains or the job was
    paused. False: the lease was lost."""
    shard = lock_lease(sql, ticket)
    if shard is None:
        return False
    if open_items(shard) == 0:
        return finish_shard(sql, ticket)
    end_attempt(sql, shard, "released", None, reason)
    attempts = 0 if progressed(shard) else shard.attempts
    move_to(sql, shard, ShardState.READY, "attempts = :attempts, not_before = NULL", attempts=attempts)
    return True


def refuse(sql: Transaction, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """Gives back a shard that this worker cannot run but another one may, without counting an attempt.
    False: no other worker may run it, or the lease was lost."""
    shard = lock_lease(sql, ticket)
    if shard is None or not others_may_run(sql, ticket.job_id, shard.worker_id):
        return False
    reason = clean(f"It cannot run job {ticket.job_id} ({code.value}): {message}")
    sql.change("UPDATE workers SET state_reason = :reason WHERE id = :id", id=shard.worker_id, reason=reason)
    end_attempt(sql, shard, "refused", code, message)
    move_to(sql, shard, ShardState.READY, "not_before = NULL")
    return True


def fail_shard(sql: Transaction, ticket: Ticket, code: ErrorCode, message: str) -> bool:
    """Ends a lease after an error of the whole shard rather than of single items. False: the lease was lost.

    An outage of a service costs only time; another retryable code counts as a crash; any other code fails
    the pending items.
    """
    shard = lock_lease(sql, ticket)
    if shard is None:
        return False
    end_attempt(sql, shard, "failed", code, message)
    if code in OUTAGES:
        outages, attempts = (1, 0) if progressed(shard) else (shard.outages + 1, shard.attempts)
        change = "attempts = :attempts, outages = :outages"
        ready_after(sql, shard, outages, change, attempts=attempts, outages=outages)
    elif code.retryable:
        crash(sql, shard, message)
    else:
        end_items(sql, shard, ItemState.FAILED, code, message)
        move_to(sql, shard, ShardState.DONE)
    complete_or_pause(sql, ticket.job_id)
    return True


def commit(sql: Transaction, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
    """Writes outcomes of pending items in one transaction, or nothing if the lease is lost.

    Idempotent: an item ends once, and a lease counts only one failure of it.
    """
    shard = sql.row(_LEASED, **of_ticket(ticket))
    if shard is None:
        return CommitResult(0, lost=True)
    indexes = [outcome.index for outcome in outcomes]
    statement = f"SELECT idx, attempts FROM items WHERE {_OPEN}"
    # Pending items: index -> attempts so far.
    attempts = dict(sql.rows(statement, job_no=shard.job_no, shard=shard.no, indexes=indexes))
    first: dict[int, Outcome] = {}
    for outcome in outcomes:
        if outcome.index in attempts:
            first.setdefault(outcome.index, outcome)
    done = [outcome for outcome in first.values() if isinstance(outcome, Done)]
    failed = [outcome for outcome in first.values() if isinstance(outcome, Failed)]
    n_done = 0
    if done:
        _add_made(sql, shard, done)
        change = f"state = {_DONE}, attempts = attempts + 1, error_code = NULL, error_message = NULL"
        ended = [one.index for one in done]
        update = f"UPDATE items SET {change} WHERE {_OPEN}"
        n_done = sql.change(update, job_no=shard.job_no, shard=shard.no, indexes=ended)
    changed, broken = _commit_failed(sql, shard, failed, attempts) if failed else ([], [])
    made = [artifact for outcome in done for artifact in outcome.artifacts]
    update_shard(
        sql,
        shard,
        _COUNT,
        n_done=n_done,
        n_failed=len(broken),
        audio_ms=sum(artifact.duration_ms for artifact in made),
        engine_ms=sum(outcome.engine_ms for outcome in (*done, *changed)),
        energy_mj=sum(outcome.energy_mj for outcome in (*done, *changed)),
        bytes_out=sum(artifact.bytes for artifact in made),
    )
    return CommitResult(n_done + len(changed), failed=0 if shard.error_budget is None else len(broken))


def add_draws(sql: Transaction, job_no: int, made: Sequence[DrawRow]) -> None:
    """Inserts draws, and the scores of the kept ones."""
    rows = [{"job_no": job_no, "idx": one.index, **msgspec.to_builtins(one.draw)} for one in made]
    sql.insert("draws", rows, _KEPT)
    add_scores(sql, job_no, made)


def add_scores(sql: Transaction, job_no: int, made: Iterable[DrawRow]) -> None:
    """Inserts the scores of the kept ones of some draws."""
    scores: list[dict[str, object]] = []
    for one in made:
        draw = one.draw
        if not draw.kept:
            continue
        measured = {
            name: score.value
            for name, score in draw.scores.items()
            if score.value is not None and math.isfinite(score.value)
        }
        known = {name: measured.pop(name, None) for name in SCORE_COLUMNS}
        others = msgspec.json.encode(measured).decode() if measured else None
        scores.append({"job_no": job_no, "idx": one.index, "draw": draw.draw, **known, "others": others})
    sql.insert("scores", scores, _KEPT)


def _add_made(sql: Transaction, shard: Row, made: Sequence[Outcome]) -> None:
    """Inserts the artifacts, draws and scores of items. First deletes the artifacts of reopened items, which are of earlier
    draws; the sweep deletes their objects."""
    redrawn = [one.index for one in made if one.draws and one.draws[0].draw]
    if redrawn:
        sql.change(
            "DELETE FROM artifacts WHERE job_no = :job_no AND idx IN (:indexes)",
            job_no=shard.job_no,
            indexes=redrawn,
        )
    lease = {name: getattr(shard, name) for name in ("job_no", "epoch", "worker_id", "made_at")}
    artifacts: list[dict[str, object]] = []
    for artifact in (artifact for one in made for artifact in one.artifacts):
        columns = msgspec.structs.asdict(artifact)
        artifacts.append({**lease, "idx": columns.pop("index"), **columns})
    sql.insert("artifacts", artifacts, _KEPT)
    add_draws(sql, shard.job_no, [DrawRow(one.index, draw) for one in made for draw in one.draws])


def _commit_failed(
    sql: Transaction, shard: Row, failed: list[Failed], attempts: dict[int, int]
) -> tuple[list[Failed], list[Failed]]:
    """Records failures. Returns those that were not recorded before, and those of them that are permanent."""
    # Items whose failure under this lease was recorded before.
    recorded = set(
        sql.column(
            "SELECT idx FROM item_errors WHERE job_no = :job_no AND idx IN (:indexes) AND epoch = :epoch",
            job_no=shard.job_no,
            indexes=[outcome.index for outcome in failed],
            epoch=shard.epoch,
        )
    )
    changed: list[Failed] = []
    ended: list[Failed] = []
    for outcome in failed:
        tries = attempts[outcome.index] + (outcome.index not in recorded)
        state = after_failure(tries, shard.max_attempts, outcome.code)
        if state is ItemState.PENDING and outcome.index in recorded:
            continue
        changed.append(outcome)
        if state is not ItemState.PENDING:
            ended.append(outcome)
        sql.change(
            f"""
            UPDATE items SET state = :state, attempts = :tries, error_code = :code, error_message = :message
            WHERE job_no = :job_no AND idx = :index AND state = {_PENDING}
            """,
            state=ITEM_STATE_NUMBERS[state],
            tries=tries,
            code=outcome.code,
            message=clean(outcome.message),
            job_no=shard.job_no,
            index=outcome.index,
        )
    record_errors(sql, shard, [(outcome.index, outcome.code, outcome.message) for outcome in changed])
    _add_made(sql, shard, [outcome for outcome in ended if outcome.draws])
    return changed, ended


def replace_artifact(sql: Transaction, job_id: str, artifact: Artifact, sha256: str) -> bool:
    """Replaces an artifact whose hash is still `sha256` by a repaired one, which keeps its decisions, and updates the
    counters of its shard. False: it has another hash."""
    key = {"job": job_id, "index": artifact.index}
    of_item = f"job_no = {NUMBER} AND idx = :index"
    shard = lock_shard(sql, job_id, sql.value(f"SELECT shard_no FROM items WHERE {of_item}", **key))
    if shard is None:
        return False
    of_artifact = f"{of_item} AND kind = :kind"
    before = sql.row(
        f"SELECT bytes, duration_ms FROM artifacts WHERE {of_artifact} AND sha256 = :sha256",
        **key,
        kind=artifact.kind,
        sha256=sha256,
    )
    if before is None:
        return False
    columns = msgspec.structs.asdict(artifact)
    columns["meta"] = msgspec.json.encode(artifact.meta).decode()
    change = ", ".join(f"{name} = :{name}" for name in columns if name != "index")
    sql.change(f"UPDATE artifacts SET {change} WHERE {of_artifact}", **columns, job=job_id)
    sql.change(
        f"UPDATE decisions SET sha256 = :made WHERE {of_item} AND sha256 = :sha256",
        **key,
        made=artifact.sha256,
        sha256=sha256,
    )
    # The artifacts of failed items are not counted.
    if sql.value(f"SELECT 1 FROM items WHERE {of_item} AND state = {_DONE}", **key):
        update_shard(
            sql,
            shard,
            "audio_ms = audio_ms + :audio_ms, bytes_out = bytes_out + :bytes",
            audio_ms=artifact.duration_ms - before.duration_ms,
            bytes=artifact.bytes - before.bytes,
        )
    return True


def set_shard_manifest(sql: Transaction, job_id: str, shard_no: int, key: str, sha256: str) -> None:
    """Records the manifest of an ended shard."""
    sql.change(
        """
        UPDATE shards SET manifest_key = :key, manifest_sha256 = :sha256
        WHERE job_id = :job AND no = :shard AND state = 'done'
        """,
        job=job_id,
        shard=shard_no,
        key=key,
        sha256=sha256,
    )
