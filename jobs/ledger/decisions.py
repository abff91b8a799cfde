"""What people decide about the audio of items, and the verdicts of checks that run after a job.

Accepting a failed item makes it a done one: the audio in quarantine becomes its audio, and the draw that made it is the
kept one. Refusing that audio later makes the item failed again. A refused item that passed stays done.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobs.ledger.control import BEING_DELETED
from jobs.ledger.leases import add_draws, add_scores
from jobs.ledger.lifecycle import ended_items, final_state, lock_known_job, update_job
from jobs.ledger.queries import PAGE_ROWS, artifacts_of, draws_of, items_named, kept_draws
from jobs.ledger.records import Artifact, Decision, Draw, DrawRow, Job, JobState, clean, no_such_job
from jobs.ledger.status import read_job
from jobs.ledger.transaction import Transaction
from pipelines.errors import ErrorCode, NotFoundError, ServiceError

#: Of checks: the audio that was measured, its draw as it was before and with the new scores, and why the item fails
#: unless the draw is kept.
Verdict = tuple[Artifact, Draw | None, Draw, str]
#: Takes an ended shard for a check, or takes it longer. `heartbeat_at` is then the end of this right.
_TAKE_SHARD = """
UPDATE shards SET worker_id = :checker, heartbeat_at = <now> + :seconds
WHERE job_id = :job AND no = :shard AND state IN ('done', 'dead') AND (worker_id = :checker OR COALESCE(heartbeat_at, 0) < <now>)
"""
_LOCK = "SELECT no FROM shards WHERE job_id = :job AND no IN (:shards) ORDER BY no FOR UPDATE"
_OF_ITEMS = "job_no = :job_no AND idx IN (:indexes)"
#: The items with the audio that a person hears.
_HEARD = """
FROM items LEFT JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx AND kind IN (:kinds)
WHERE items.job_no = :job_no AND items.idx IN (:indexes)
"""
#: Of each item: why the decision is not possible, and whether its state changes. States are `ITEM_STATES`; an item that
#: passed has no error.
_FOUND = f"""
SELECT items.idx, 'Item ' || items.idx || ' (' || example_id || ') ' || CASE
        WHEN state NOT IN (1, 2, 3) THEN 'has not ended'
        WHEN CAST(:heard AS TEXT) <> COALESCE(sha256, '') THEN 'has other audio now'
        WHEN :accepted AND state <> 1 AND sha256 IS NULL THEN 'has no audio'
        WHEN :accepted AND CAST(meta AS TEXT) LIKE '%%"part":%%' THEN 'has audio of one part of its text only'
    END || CASE WHEN :accepted THEN ', so it cannot be accepted.' ELSE ', so it cannot be refused.' END AS problem, error_code IS NOT NULL AND (state = 1) <> :accepted AS moves
{_HEARD} ORDER BY items.idx
"""
_KIND = "CASE WHEN :accepted THEN :main ELSE 'quarantine' END"
_SIGN = "CASE WHEN :accepted THEN 1 ELSE -1 END"
#: Changes of the items that become done, or failed again.
_MOVES = (
    f"UPDATE items SET state = CASE WHEN :accepted THEN 1 ELSE 2 END WHERE {_OF_ITEMS}",
    f"UPDATE artifacts SET kind = {_KIND} WHERE {_OF_ITEMS} AND kind IN (:kinds)",
    f"""
    UPDATE draws SET kept = :accepted WHERE {_OF_ITEMS} AND seed = (
        SELECT seed FROM artifacts WHERE artifacts.job_no = draws.job_no AND artifacts.idx = draws.idx AND kind IN (:kinds)
    )
    """,
    f"DELETE FROM scores WHERE {_OF_ITEMS}",
    f"""
    UPDATE shards SET n_done = n_done + {_SIGN} * items, claimed_done = claimed_done + {_SIGN} * items,
        n_failed = n_failed - {_SIGN} * items, claimed_failed = claimed_failed - {_SIGN} * items,
        audio_ms = audio_ms + {_SIGN} * total_ms, bytes_out = bytes_out + {_SIGN} * total_bytes
    FROM (
        SELECT shard_no, count(DISTINCT items.idx) AS items, sum(duration_ms) AS total_ms, sum(bytes) AS total_bytes
        FROM items JOIN artifacts ON artifacts.job_no = items.job_no AND artifacts.idx = items.idx
        WHERE items.job_no = :job_no AND items.idx IN (:indexes) GROUP BY shard_no
    ) AS moved WHERE shards.job_id = :job AND shards.no = moved.shard_no
    """,
)
_ADD = f"""
INSERT INTO decisions (job_no, idx, no, accepted, person, decided_at, reason, sha256)
SELECT items.job_no, items.idx, 1 + COALESCE(
        (SELECT max(no) FROM decisions WHERE decisions.job_no = items.job_no AND decisions.idx = items.idx), 0
    ), :accepted, CAST(:person AS TEXT), <now>, CAST(:reason AS TEXT), COALESCE(sha256, '')
{_HEARD}
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
    manifest. `heard`: the SHA-256 of the audio; None: not compared.

    Raises `NotFoundError` with the unknown ids, and `ServiceError` with `ledger.state` for an item that has not ended,
    has other audio, or is to be accepted without audio of its whole text; nothing is written then.
    """
    known = lock_known_job(sql, job_id)
    job = read_job(sql, job_id)
    wanted = list(dict.fromkeys(ids))
    if known.state_reason == BEING_DELETED:
        raise no_such_job(job_id)
    pages = (wanted[at : at + PAGE_ROWS] for at in range(0, len(wanted), PAGE_ROWS))
    items = {row.id: row for page in pages for row in items_named(sql, job, page)}
    if unknown := [one for one in wanted if one not in items]:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Job {job_id} has no item {clean(', '.join(map(repr, unknown)))}.",
            f"`nightjar items {job_id} --json` shows the id of each item.",
        )
    sql.rows(_LOCK, job=job_id, shards={row.shard_no for row in items.values()})
    indexes = [row.index for row in items.values()]
    values = {
        "job_no": known.no,
        "kinds": job.spec.audio_kinds,
        "indexes": indexes,
        "accepted": decision.accepted,
    }
    found = sql.rows(_FOUND, **values, heard=heard)
    for row in found:
        if row.problem:
            raise ServiceError(
                ErrorCode.LEDGER_STATE,
                row.problem,
                f"Leave it out; `nightjar items {job_id}` shows each item.",
            )
    moved = [row.idx for row in found if row.moves]
    _move(sql, job, known.no, moved, decision.accepted)
    add_scores(sql, known.no, draws_of(sql, job_id, moved))
    sql.change(_ADD, **values, person=clean(decision.person), reason=clean(decision.reason))
    state = known.state
    count = len(moved) if decision.accepted else -len(moved)
    if state in (JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS):
        state = final_state(ended_items(sql, job_id)[1], known.rejected_lines)
    update_job(sql, job_id, _CHANGE, state=state, count=count)
    return len(indexes)


def _move(sql: Transaction, job: Job, job_no: int, moved: list[int], accepted: bool) -> None:
    """Makes items done, or failed again."""
    values = {"job": job.id, "job_no": job_no, "kinds": job.spec.audio_kinds, "main": job.spec.main_kind}
    for statement in _MOVES:
        sql.change(statement, **values, indexes=moved, accepted=accepted)


def take_for_check(sql: Transaction, job_id: str, shard_no: int, checker: str, seconds: float) -> bool:
    """Takes an ended shard, so that no other check measures it meanwhile, or takes it for longer; 0 seconds give it back.
    Returns whether it is free or taken by this checker."""
    values = {"job": job_id, "shard": shard_no, "checker": checker, "seconds": seconds}
    return bool(sql.change(_TAKE_SHARD, **values))


def commit_checks(sql: Transaction, job: Job, verdicts: Iterable[Verdict]) -> None:
    """Writes verdicts of checks that ran after their job had completed. Items that have other audio or other scores now
    are left out. The audio of failed items moves to quarantine, and the job then needs another manifest.

    Raises `ServiceError` with `ledger.state` if the job has not completed, because workers may have its items.
    """
    failed = JobState.COMPLETED_WITH_ERRORS
    job_no = lock_known_job(sql, job.id, "checked", JobState.COMPLETED, failed).no
    made = {verdict[0].index: verdict for verdict in verdicts}
    values = {"job_no": job_no, "indexes": list(made)}
    sql.rows(_LOCK, job=job.id, shards=sql.column(f"SELECT shard_no FROM items WHERE {_OF_ITEMS}", **values))
    kept = kept_draws(sql, job.id, made)
    audio = {
        index: (one.sha256, kept.get(index))
        for index, one in artifacts_of(sql, job.id, job.spec.main_kind, made).items()
    }
    found = [index for index, known in audio.items() if known == (made[index][0].sha256, made[index][1])]
    items = {"job_no": job_no, "indexes": found}
    for rows in ("draws WHERE kept AND", "scores WHERE"):
        sql.change(f"DELETE FROM {rows} {_OF_ITEMS}", **items)
    add_draws(sql, job_no, [DrawRow(index, made[index][2]) for index in found])
    moved = [index for index in found if not made[index][2].kept]
    for index in moved:
        *_, draw, message = made[index]
        change = f"UPDATE items SET error_code = :code, error_message = :message WHERE {_OF_ITEMS}"
        sql.change(change, job_no=job_no, indexes=[index], code=draw.code, message=clean(message))
    if moved:
        _move(sql, job, job_no, moved, accepted=False)
        update_job(sql, job.id, "state = :state, manifest_finished_at = NULL", state=failed)
