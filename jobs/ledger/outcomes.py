"""Commits of finished items: fenced by the epoch, counted exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from jobs.ledger.lifecycle import NUMBER, lock_shard, of_ticket, record_errors, update_shard
from jobs.ledger.records import (
    QUARANTINE,
    WORKING,
    Artifact,
    CommitResult,
    Done,
    Draw,
    Failed,
    ItemState,
    Outcome,
    Ticket,
    after_failure,
    clean,
)
from jobs.ledger.schema import ITEM_STATE_NUMBERS, SCORE_COLUMNS
from jobs.ledger.transaction import Row, Transaction, words

_PENDING, _DONE = ITEM_STATE_NUMBERS[ItemState.PENDING], ITEM_STATE_NUMBERS[ItemState.DONE]
_LEASED = f"""
SELECT shards.*, jobs.max_attempts, jobs.error_budget, <now> AS made_at
FROM shards JOIN jobs ON jobs.id = shards.job_id
WHERE shards.job_id = :job AND shards.no = :shard AND shards.epoch = :epoch AND shards.state = 'leased'
AND jobs.state IN ({words(*WORKING)}) FOR UPDATE OF shards
"""
_COUNTERS = ("n_done", "n_failed", "audio_ms", "engine_ms", "bytes_out")
_COUNT = ", ".join(f"{name} = {name} + :{name}" for name in _COUNTERS)
#: The open items of a shard among some.
_OPEN = f"job_no = :job_no AND idx IN (:indexes) AND shard_no = :shard AND state = {_PENDING}"
#: An item ends once, whoever commits it again.
_KEPT = "ON CONFLICT DO NOTHING"


def commit(sql: Transaction, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
    """Writes outcomes of open items in one transaction; nothing where the lease is lost.

    Committing twice changes nothing more: an item ends once, and fails a maximum of once under one lease.
    """
    shard = sql.row(_LEASED, **of_ticket(ticket))
    if shard is None:
        return CommitResult(0, lost=True)
    attempts = _open_items(sql, shard, [outcome.index for outcome in outcomes])
    first: dict[int, Outcome] = {}
    for outcome in outcomes:
        if outcome.index in attempts:
            first.setdefault(outcome.index, outcome)
    done = [outcome for outcome in first.values() if isinstance(outcome, Done)]
    failed = [outcome for outcome in first.values() if isinstance(outcome, Failed)]
    n_done = _commit_done(sql, shard, done)
    n_failed, n_waiting, failed_ms = _commit_failed(sql, shard, failed, attempts) if failed else (0, 0, 0)
    made = [artifact for outcome in done for artifact in outcome.artifacts]
    update_shard(
        sql,
        shard,
        _COUNT,
        n_done=n_done,
        n_failed=n_failed,
        audio_ms=sum([artifact.duration_ms for artifact in made if artifact.kind == "audio"]),
        engine_ms=sum([outcome.engine_ms for outcome in done]) + failed_ms,
        bytes_out=sum([artifact.bytes for artifact in made]),
    )
    failed_for_good = n_failed if shard.error_budget is not None else 0
    return CommitResult(n_done + n_failed + n_waiting, failed=failed_for_good)


def _open_items(sql: Transaction, shard: Row, indexes: list[int]) -> dict[int, int]:
    """Open items among `indexes`: index -> attempts so far."""
    statement = f"SELECT idx, attempts FROM items WHERE {_OPEN}"
    return dict(sql.rows(statement, job_no=shard.job_no, shard=shard.no, indexes=indexes))


def _commit_done(sql: Transaction, shard: Row, done: list[Done]) -> int:
    if not done:
        return 0
    _add_made(sql, shard, done, again=[one for one in done if one.draws and one.draws[0].draw])
    kept = [(one.index, draw) for one in done for draw in one.draws if draw.kept]
    sql.insert("scores", [_scores(shard.job_no, index, draw) for index, draw in kept], _KEPT)
    statement = f"""
    UPDATE items SET state = {_DONE}, attempts = attempts + 1, error_code = NULL, error_message = NULL WHERE {_OPEN}
    """
    indexes = [one.index for one in done]
    return sql.change(statement, job_no=shard.job_no, shard=shard.no, indexes=indexes)


def _add_made(sql: Transaction, shard: Row, made: Sequence[Outcome], again: Sequence[Outcome]) -> None:
    """Adds the artifacts and the draws of items. Of those that are made `again` it forgets what earlier
    draws left in quarantine; the sweep removes the objects."""
    if again:
        sql.change(
            f"DELETE FROM artifacts WHERE job_no = :job_no AND idx IN (:indexes) AND kind = '{QUARANTINE}'",
            job_no=shard.job_no,
            indexes=[one.index for one in again],
        )
    lease = {name: getattr(shard, name) for name in ("job_no", "epoch", "worker_id", "made_at")}
    artifacts = [{**lease, **_columns(artifact)} for one in made for artifact in one.artifacts]
    sql.insert("artifacts", artifacts, _KEPT)
    draws = [
        {"job_no": shard.job_no, "idx": one.index, **msgspec.to_builtins(draw), "scores": _json(draw.scores)}
        for one in made
        for draw in one.draws
    ]
    sql.insert("draws", draws, _KEPT)


def _columns(artifact: Artifact) -> dict[str, object]:
    """An artifact as columns of `artifacts`."""
    values = msgspec.structs.asdict(artifact)
    return {"idx": values.pop("index"), **values, "meta": _json(artifact.meta)}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _scores(job_no: int, index: int, draw: Draw) -> dict[str, object]:
    """A row of `scores`: what was measured of the draw that is kept."""
    measured = {
        name: score.value
        for name, score in draw.scores.items()
        if score.value is not None and math.isfinite(score.value)
    }
    known = {name: measured.pop(name, None) for name in SCORE_COLUMNS}
    others = _json(measured) if measured else None
    return {"job_no": job_no, "idx": index, "draw": draw.draw, **known, "others": others}


def _commit_failed(
    sql: Transaction, shard: Row, failed: list[Failed], attempts: dict[int, int]
) -> tuple[int, int, int]:
    """(items that failed for good, items that wait for another attempt, engine milliseconds of what was
    not recorded before)."""
    # Items whose failure under this lease is recorded already.
    recorded = set(
        sql.column(
            "SELECT idx FROM item_errors WHERE job_no = :job_no AND idx IN (:indexes) AND epoch = :epoch",
            job_no=shard.job_no,
            indexes=[outcome.index for outcome in failed],
            epoch=shard.epoch,
        )
    )
    changed: list[tuple[Failed, ItemState]] = []
    for outcome in failed:
        tries = attempts[outcome.index] + (outcome.index not in recorded)
        state = after_failure(tries, shard.max_attempts, outcome.code)
        if state is ItemState.PENDING and outcome.index in recorded:
            continue
        changed.append((outcome, state))
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
    record_errors(sql, shard, [(outcome.index, outcome.code, outcome.message) for outcome, _ in changed])
    ended = [outcome for outcome, state in changed if state is not ItemState.PENDING]
    refused = [outcome for outcome in ended if outcome.draws]
    _add_made(sql, shard, refused, again=refused)
    return len(ended), len(changed) - len(ended), sum(outcome.engine_ms for outcome, _ in changed)


def replace_artifact(sql: Transaction, job_id: str, artifact: Artifact, sha256: str) -> bool:
    """Puts what was made again into the place of an artifact whose hash is still `sha256`, and counts it
    in its shard."""
    key = {"job": job_id, "index": artifact.index}
    shard_no = sql.value(f"SELECT shard_no FROM items WHERE job_no = {NUMBER} AND idx = :index", **key)
    shard = None if shard_no is None else lock_shard(sql, job_id, shard_no)
    if shard is None:
        return False
    of_artifact = f"job_no = {NUMBER} AND idx = :index AND kind = :kind"
    before = sql.row(
        f"SELECT bytes, duration_ms FROM artifacts WHERE {of_artifact} AND sha256 = :sha256",
        **key,
        kind=artifact.kind,
        sha256=sha256,
    )
    if before is None:
        return False
    replaced = ("sha256", "bytes", "duration_ms", "sample_rate", "samples", "pack", "pack_offset", "meta")
    change = ", ".join(f"{name} = :{name}" for name in replaced)
    sql.change(f"UPDATE artifacts SET {change} WHERE {of_artifact}", **_columns(artifact) | key)
    if artifact.kind != QUARANTINE:
        update_shard(
            sql,
            shard,
            "audio_ms = audio_ms + :audio_ms, bytes_out = bytes_out + :bytes",
            audio_ms=artifact.duration_ms - before.duration_ms if artifact.kind == "audio" else 0,
            bytes=artifact.bytes - before.bytes,
        )
    return True


def set_shard_manifest(sql: Transaction, job_id: str, shard_no: int, key: str, sha256: str) -> None:
    """Names the manifest of a shard that has ended."""
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
