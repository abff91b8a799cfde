"""Decisions of people about items, on SQLite and on PostgreSQL: what they change, what they leave, and when they are
void."""

from __future__ import annotations

import threading

import msgspec
import pytest

from jobs.checks import PRESETS
from jobs.ledger import Ledger
from jobs.ledger.control import BEING_DELETED
from jobs.ledger.records import (
    QUARANTINE,
    Artifact,
    Decision,
    Done,
    Draw,
    Failed,
    ItemState,
    Job,
    JobSpec,
    JobState,
    Score,
)
from jobs.where import parse_where
from pipelines.errors import ErrorCode, NotFoundError, ServiceError
from tests.support.ledger_kit import assert_exact, done, execute, failed, lease_next, rows, states, submit

CHECKED = JobSpec("fake", quality=PRESETS["strict"])
WER = {"wer": Score(0.7, False, "other words"), "clipped": Score(0.0, True)}


def quarantined(index: int, sha256: str = "", draw: int = 0, meta: dict[str, object] | None = None) -> Failed:
    """An item whose two draws failed; the audio of the second one is in quarantine."""
    kept = Artifact(
        index,
        QUARANTINE,
        f"quarantine/{index}-{draw}",
        sha256 or f"bad-{index}",
        100,
        1500,
        24000,
        36000,
        1000 + draw + 1,
        meta=meta or {},
    )
    draws = tuple(
        Draw(number, 1000 + number, ErrorCode.QA_WER, False, 1500, WER) for number in (draw, draw + 1)
    )
    return Failed(index, ErrorCode.QA_WER, "Other words.", draws, (kept,), 5)


def job_of(ledger: Ledger, *outcomes: Done | Failed, shards: int = 1, end: bool = True) -> Job:
    """A job whose items have these outcomes, in one or more shards of equal size."""
    size = len(outcomes) // shards
    job = submit(ledger, [size] * shards, spec=CHECKED, max_attempts=1)
    for number in range(shards):
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, outcomes[size * number : size * (number + 1)])
        if end:
            ledger.finish_shard(lease.ticket)
    return ledger.job(job.id)


def decisions(ledger: Ledger, job: Job) -> dict[str, tuple[bool, str, str]]:
    """Id -> the decision that counts."""
    found = {row.id: row.decision for row in ledger.items(job.id)}
    return {name: (one.accepted, one.person, one.reason) for name, one in found.items() if one is not None}


def snapshot(ledger: Ledger) -> list[list[tuple]]:
    """What decisions may change."""
    tables = {
        "jobs": "id",
        "shards": "job_id, no",
        "items": "idx",
        "artifacts": "idx, kind",
        "draws": "idx, draw",
    }
    tables |= {"scores": "idx", "decisions": "idx, no"}
    return [rows(ledger, f"SELECT * FROM {table} ORDER BY {order}") for table, order in tables.items()]


def test_an_accepted_item_is_one_that_passed(ledger: Ledger) -> None:
    job = job_of(ledger, done(0), quarantined(1))
    assert (job.state, states(ledger, job.id)) == (
        JobState.COMPLETED_WITH_ERRORS,
        [ItemState.DONE, ItemState.FAILED],
    )
    before = ledger.now()
    assert ledger.decide(job.id, ["e1"], Decision(True, "ada")) == 1
    assert_exact(ledger, job.id)
    job = ledger.job(job.id)
    assert (job.state, states(ledger, job.id)) == (JobState.COMPLETED, [ItemState.DONE, ItemState.DONE])
    (_, item) = ledger.items(job.id)
    assert item.artifact is not None
    assert (item.artifact.kind, item.artifact.key, item.artifact.sha256) == (
        "audio",
        "quarantine/1-0",
        "bad-1",
    )
    # Why it had failed stays known, but it is no error any more.
    assert (item.error_code, item.error_message) == (ErrorCode.QA_WER, "Other words.")
    assert ledger.error_counts(job.id) == {}
    assert item.decision is not None
    assert (item.decision.accepted, item.decision.person, item.decision.reason) == (True, "ada", "")
    assert before <= item.decision.decided_at <= ledger.now()
    # Filters see the scores of its draw, which is the kept one.
    assert [row.draw.kept for row in ledger.draws_of(job.id, [1])] == [False, True]
    assert [row.id for row in ledger.items(job.id, where=parse_where("wer > 0.6 and draw == 1"))] == ["e1"]
    status = ledger.status(job.id)
    assert (status.items.done, status.items.failed, status.decisions) == (2, 0, {"accepted": 1})
    # A retry of all failed items leaves it as it is.
    assert ledger.retry(job.id, None) == 0


def test_refusing_what_was_accepted_makes_it_failed_again(ledger: Ledger) -> None:
    job = job_of(ledger, done(0), quarantined(1))
    was = snapshot(ledger)
    ledger.decide(job.id, ["e1"], Decision(True, "ada"))
    ledger.decide(job.id, ["e1"], Decision(False, "ben", "It hums."))
    assert_exact(ledger, job.id)
    assert snapshot(ledger)[:-1] == was[:-1]
    assert decisions(ledger, job) == {"e1": (False, "ben", "It hums.")}
    # Both are in the ledger.
    kept = rows(ledger, "SELECT no, accepted, person, reason, sha256 FROM decisions ORDER BY no")
    assert [(*one[:1], bool(one[1]), *one[2:]) for one in kept] == [
        (1, True, "ada", "", "bad-1"),
        (2, False, "ben", "It hums.", "bad-1"),
    ]


def test_a_refused_item_that_passed_stays_done_and_is_counted(ledger: Ledger) -> None:
    job = job_of(ledger, done(0), done(1))
    ledger.decide(job.id, ["e0"], Decision(False, "ada", "Wrong\x00 name"))
    assert states(ledger, job.id) == [ItemState.DONE, ItemState.DONE]
    assert_exact(ledger, job.id)
    status = ledger.status(job.id)
    assert (status.job.state, status.items.done, status.decisions) == (JobState.COMPLETED, 2, {"refused": 1})
    assert decisions(ledger, job) == {"e0": (False, "ada", "Wrong\ufffd name")}
    assert [row.refused for row in ledger.items(job.id)] == [True, False]
    ledger.decide(job.id, ["e0", "e0"], Decision(True, "ada"))
    assert [row.refused for row in ledger.items(job.id)] == [False, False]


def test_a_redraw_makes_a_decision_void(ledger: Ledger) -> None:
    job = job_of(ledger, quarantined(0), quarantined(1), done(2))
    ledger.decide(job.id, ["e0", "e1"], Decision(False, "ada", "noise"))
    assert ledger.retry(job.id, None) == 2
    with pytest.raises(ServiceError, match=r"\(e0\) has not ended, so it cannot be accepted\. Leave it out"):
        ledger.decide(job.id, ["e0"], Decision(True, "ada"))
    lease = lease_next(ledger)
    # The second item gets the same audio again, so it is still refused.
    again = quarantined(1, "bad-1", draw=2)
    passed = msgspec.structs.replace(done(0), draws=(Draw(2, 7, None, True, 1500, {}),))
    ledger.commit(lease.ticket, [passed, again])
    ledger.finish_shard(lease.ticket)
    assert states(ledger, job.id) == [ItemState.DONE, ItemState.FAILED, ItemState.DONE]
    assert decisions(ledger, job) == {"e1": (False, "ada", "noise")}
    assert [row.refused for row in ledger.items(job.id)] == [False, True, False]
    assert ledger.status(job.id).decisions == {"refused": 1}
    assert_exact(ledger, job.id)


def test_a_repair_with_other_bytes_keeps_the_decision(ledger: Ledger) -> None:
    job = job_of(ledger, quarantined(0), quarantined(1), done(2))
    ledger.decide(job.id, ["e0"], Decision(True, "ada"))
    ledger.decide(job.id, ["e1", "e2"], Decision(False, "ada", "noise"))
    for index, kind in enumerate(("audio", QUARANTINE, "audio")):
        (artifact,) = ledger.artifacts_of(job.id, kind, [index]).values()
        # The bytes of audio in quarantine are not counted.
        made = msgspec.structs.replace(
            artifact, sha256=f"mended-{index}", bytes=150 if kind == QUARANTINE else 100
        )
        assert ledger.replace_artifact(job.id, made, artifact.sha256)
    assert decisions(ledger, job) == {
        "e0": (True, "ada", ""),
        "e1": (False, "ada", "noise"),
        "e2": (False, "ada", "noise"),
    }
    assert_exact(ledger, job.id)


def test_nothing_is_written_if_one_of_the_items_cannot_be_decided(ledger: Ledger) -> None:
    part = quarantined(2, meta={"part": 1})
    job = job_of(ledger, done(0), quarantined(1), part, failed(3, ErrorCode.SYNTH_NAN), end=False)
    pending = submit(ledger)
    was = snapshot(ledger)
    refused = [
        (job, ["e1", "e4", "e0:turn0", "x\x00y"], NotFoundError, "no item 'e4', 'e0:turn0', 'x.*y'"),
        (job, ["e1", "e2"], ServiceError, r"\(e2\) has audio of one part of its text only"),
        (job, ["e1", "e3"], ServiceError, r"\(e3\) has no audio, so it cannot be accepted"),
        (pending, ["e0"], ServiceError, r"\(e0\) has not ended, so it cannot be accepted"),
    ]
    for where, ids, kind, message in refused:
        with pytest.raises(kind, match=message):
            ledger.decide(where.id, ids, Decision(True, "ada"))
    with pytest.raises(ServiceError, match=r"\(e1\) has other audio now"):
        ledger.decide(job.id, ["e1"], Decision(True, "ada"), "bad-0")
    with pytest.raises(NotFoundError):
        ledger.decide("0" * 26, ["e1"], Decision(True, "ada"))
    assert snapshot(ledger) == was
    # One that cannot be accepted can be refused.
    assert ledger.decide(job.id, ["e3", "e2"], Decision(False, "ada")) == 2
    assert ledger.decide(job.id, ["e1"], Decision(True, "ada"), "bad-1") == 1
    assert ledger.decide(job.id, [], Decision(True, "ada")) == 0


def test_decisions_in_a_running_job_keep_its_counters_and_its_budget(ledger: Ledger) -> None:
    outcomes = [quarantined(index) for index in range(8)]
    job = submit(ledger, (4, 4, 2), spec=CHECKED, max_attempts=1, error_budget=0.5)
    first, second = lease_next(ledger), lease_next(ledger)
    ledger.commit(first.ticket, outcomes[:3])
    ledger.commit(second.ticket, outcomes[4:6])
    assert ledger.decide(job.id, ["e0", "e1", "e2", "e4", "e5"], Decision(True, "ada")) == 5
    assert_exact(ledger, job.id)
    # A lease that crashes after its items were accepted has made progress, and none that it did not make.
    assert ledger.release(first.ticket, "drains")
    ledger.commit(second.ticket, [done(6), done(7)])
    assert ledger.finish_shard(second.ticket)
    assert ledger.job(job.id).state is JobState.RUNNING
    made = rows(
        ledger, "SELECT shard_no, n_ok, n_failed FROM attempts WHERE ended_at IS NOT NULL ORDER BY shard_no"
    )
    assert made == [(0, 0, 3), (1, 2, 2)]
    ledger.decide(job.id, ["e0", "e4"], Decision(False, "ada"))
    assert_exact(ledger, job.id)
    budgets = "SELECT budget_from_done, budget_from_failed FROM jobs"
    ledger.pause(job.id)
    ledger.resume(job.id)
    assert rows(ledger, budgets) == [(5, 2)]
    ledger.decide(job.id, ["e0", "e4"], Decision(True, "ada"))
    assert rows(ledger, budgets) == [(7, 0)]
    ledger.decide(job.id, ["e0", "e4"], Decision(False, "ada"))
    assert rows(ledger, budgets) == [(5, 2)]


def test_many_people_decide_at_once(ledger: Ledger) -> None:
    job = job_of(ledger, *(quarantined(index) for index in range(12)), shards=3)
    errors: list[BaseException] = []

    def decide(person: str, accepted: bool) -> None:
        try:
            for index in range(12):
                ledger.decide(job.id, [f"e{index}"], Decision(accepted, person))
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    threads = [threading.Thread(target=decide, args=(f"p{n}", n % 2 == 0)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert_exact(ledger, job.id)
    assert rows(ledger, "SELECT count(*), max(no), count(DISTINCT idx) FROM decisions") == [(48, 4, 12)]
    accepted = [one for one, _, _ in decisions(ledger, job).values()]
    assert [state is ItemState.DONE for state in states(ledger, job.id)] == accepted


def test_the_manifest_of_an_ended_job_is_due_after_a_decision(ledger: Ledger) -> None:
    job = job_of(ledger, done(0), done(1))
    ledger.note_manifest(job, ledger.begin_manifest(job.id))
    assert not ledger.needs_manifest(job.id)
    execute(
        ledger, "UPDATE jobs SET finished_at = finished_at - 3600, manifest_finished_at = finished_at - 3600"
    )
    assert ledger.reconcile().without_manifest == ()
    ledger.decide(job.id, ["e0"], Decision(False, "ada"))
    assert ledger.reconcile().without_manifest == (job.id,)
    # One that is made while its manifest is being written is not in it.
    mark = ledger.begin_manifest(job.id)
    ledger.decide(job.id, ["e1"], Decision(False, "ada"))
    ledger.note_manifest(ledger.job(job.id), mark)
    assert ledger.needs_manifest(job.id)
    # Of two that write it at once, the second one has seen everything.
    first, second = ledger.begin_manifest(job.id), ledger.begin_manifest(job.id)
    ledger.note_manifest(ledger.job(job.id), first)
    assert ledger.needs_manifest(job.id)
    ledger.note_manifest(ledger.job(job.id), second)
    assert not ledger.needs_manifest(job.id)


def test_decisions_are_deleted_with_their_job(ledger: Ledger) -> None:
    job = job_of(ledger, done(0), quarantined(1))
    ledger.decide(job.id, ["e0"], Decision(False, "ada"))
    ledger.begin_delete(job.id)
    assert ledger.job(job.id).state_reason == BEING_DELETED
    with pytest.raises(NotFoundError):
        ledger.decide(job.id, ["e1"], Decision(True, "ada"))
    ledger.delete_rows(job.id)
    assert rows(ledger, "SELECT count(*) FROM decisions") == [(0,)]


def test_a_person_listens_to_codes_in_a_job_of_codes(ledger: Ledger) -> None:
    job = submit(
        ledger, (1,), spec=JobSpec("fake", quality=PRESETS["strict"], output="codes"), max_attempts=1
    )
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [quarantined(0)])
    ledger.finish_shard(lease.ticket)
    ledger.decide(job.id, ["e0"], Decision(True, "ada"))
    (item,) = ledger.items(job.id)
    assert item.artifact is not None
    assert (item.artifact.kind, item.state, item.refused) == ("codes", ItemState.DONE, False)
    ledger.decide(job.id, ["e0"], Decision(False, "ada"))
    (item,) = ledger.items(job.id)
    assert (item.artifact, item.state, item.refused) == (None, ItemState.FAILED, True)
