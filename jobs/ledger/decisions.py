"""What people decide about the audio of items.

Accepting a failed item makes it a done one: the audio in quarantine becomes its audio, and the draw that made it is the
kept one. Refusing that audio later makes the item failed again. A refused item that passed stays done.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobs.ledger.control import BEING_DELETED
from jobs.ledger.leases import add_scores
from jobs.ledger.lifecycle import ended_items, lock_known_job, update_job
from jobs.ledger.queries import PAGE_ROWS, artifacts_of, draws_of, items_named
from jobs.ledger.records import (
    BROKEN_ITEMS,
    ITEM_STATE_NUMBERS,
    Artifact,
    Decision,
    ItemRow,
    ItemState,
    JobState,
    clean,
    final_state,
    no_such_job,
)
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Transaction
from pipelines.errors import ErrorCode, NotFoundError, ServiceError

_LOCK = "SELECT no FROM shards WHERE job_id = :job AND no IN (:shards) ORDER BY no FOR UPDATE"
_OF_ITEMS = "job_no = :job_no AND idx IN (:indexes)"
#: Changes of the items that become done, or failed again.
_MOVES = (
    f"UPDATE items SET state = :state WHERE {_OF_ITEMS}",
    f"UPDATE artifacts SET kind = :after WHERE {_OF_ITEMS} AND kind = :before",
    f"""
    UPDATE draws SET kept = :accepted WHERE {_OF_ITEMS} AND seed = (
        SELECT seed FROM artifacts WHERE artifacts.job_no = draws.job_no AND artifacts.idx = draws.idx AND kind = :after
    )
    """,
    f"DELETE FROM scores WHERE {_OF_ITEMS}",
    """
    UPDATE shards SET n_done = n_done + :sign * items, claimed_done = claimed_done + :sign * items,
        n_failed = n_failed - :sign * items, claimed_failed = claimed_failed - :sign * items,
        audio_ms = audio_ms + :sign * total_ms, bytes_out = bytes_out + :sign * total_bytes
    FROM (
        SELECT shard_no, count(DISTINCT items.idx) AS items, sum(duration_ms) AS total_ms, sum(bytes) AS total_bytes
        FROM items JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx
        WHERE items.job_no = :job_no AND items.idx IN (:indexes) GROUP BY shard_no
    ) AS moved WHERE shards.job_id = :job AND shards.no = moved.shard_no
    """,
)
_ADD = """
INSERT INTO decisions (job_no, idx, no, accepted, person, decided_at, reason, sha256)
SELECT items.job_no, items.idx, 1 + COALESCE(
        (SELECT max(no) FROM decisions WHERE decisions.job_no = items.job_no AND decisions.idx = items.idx), 0
    ), :accepted, CAST(:person AS TEXT), <now>, CAST(:reason AS TEXT), COALESCE(sha256, '')
FROM items LEFT JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx AND kind IN (:kinds)
WHERE items.job_no = :job_no AND items.idx IN (:indexes)
"""
#: The error budget goes by the checks, whatever people decide.
_CHANGE = """
state = :state, manifest_finished_at = NULL,
budget_from_done = budget_from_done + :count, budget_from_failed = budget_from_failed - :count
"""


def decide(
    sql: Transaction, job_id: str, ids: Iterable[str], decision: Decision, heard: str | None = None
) -> int:
    """Records a decision about the audio of items, by their ids; returns their number. The job then needs another
    manifest. `heard`: the SHA-256 of the audio.

    Raises `NotFoundError` with the unknown ids, and `ServiceError` with `ledger.state` for an item that has not ended,
    has other audio, or is to be accepted without audio of its whole text; nothing is written then.
    """
    accepted = decision.accepted
    known, job = lock_known_job(sql, job_id), read_job(sql, job_id)
    if known.state_reason == BEING_DELETED:
        raise no_such_job(job_id)
    wanted = list(dict.fromkeys(ids))
    pages = (wanted[at : at + PAGE_ROWS] for at in range(0, len(wanted), PAGE_ROWS))
    items = {row.id: row for page in pages for row in items_named(sql, job, page)}
    if unknown := [one for one in wanted if one not in items]:
        message = f"Job {job_id} has no item {clean(', '.join(map(repr, unknown)))}."
        advice = f"`nightjar items {job_id} --json` shows the id of each item."
        raise NotFoundError(ErrorCode.LEDGER_NOT_FOUND, message, advice)
    sql.rows(_LOCK, job=job_id, shards={row.shard_no for row in items.values()})
    kinds, indexes = job.spec.audio_kinds, [row.index for row in items.values()]
    quarantined, audio = (artifacts_of(sql, job_id, kind, indexes) for kind in kinds)
    for row in items.values():
        _check(row, audio.get(row.index, quarantined.get(row.index)), accepted, heard)
    # An item that passed has no error.
    moved = {
        row.index for row in items.values() if row.error_code and accepted != (row.state is ItemState.DONE)
    }
    before, after = kinds if accepted else reversed(kinds)
    sign, state = (1, ItemState.DONE) if accepted else (-1, ItemState.FAILED)
    values = {"job": job_id, "job_no": known.no, "accepted": accepted, "kinds": kinds}
    values |= {"before": before, "after": after, "sign": sign, "state": ITEM_STATE_NUMBERS[state]}
    for statement in _MOVES if moved else ():
        sql.change(statement, **values, indexes=moved)
    if accepted:
        draws = draws_of(sql, job_id, moved)
        add_scores(sql, known.no, ((one.index, one.draw) for one in draws if one.draw.kept))
    about = {"person": clean(decision.person), "reason": clean(decision.reason)}
    sql.change(_ADD, **values, **about, indexes=indexes)
    ended = known.state
    if ended in (JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS):
        ended = final_state(ended_items(sql, job_id)[1], known.rejected_lines)
    update_job(sql, job_id, _CHANGE, state=ended, count=sign * len(moved))
    return len(items)


def _check(row: ItemRow, audio: Artifact | None, accepted: bool, heard: str | None) -> None:
    """Raises `ServiceError` if the decision is not possible."""
    failed, reason = row.state in BROKEN_ITEMS, ""
    if not failed and row.state is not ItemState.DONE:
        reason = f"is {row.state.value}"
    elif heard is not None and heard != (audio.sha256 if audio else ""):
        reason = "has other audio now"
    elif accepted and failed and audio is None:
        reason = "has no audio"
    elif accepted and audio and "part" in audio.meta:
        reason = "has audio of one part of its text only"
    if reason:
        word = "accepted" if accepted else "refused"
        message = f"Item {clean(row.id)[:100]!r} {reason}, so it cannot be {word}."
        raise ServiceError(ErrorCode.LEDGER_STATE, message, "")
