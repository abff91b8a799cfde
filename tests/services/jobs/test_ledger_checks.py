"""Verdicts of checks that run after their job, on SQLite and on PostgreSQL."""

from __future__ import annotations

import time

import msgspec
import pytest

from jobs.checks import PRESETS
from jobs.export.items import columns_of
from jobs.ledger import Ledger
from jobs.ledger.decisions import Verdict
from jobs.ledger.records import (
    QUARANTINE,
    Decision,
    Draw,
    Failed,
    ItemState,
    Job,
    JobSpec,
    JobState,
    Score,
)
from jobs.ledger.status import MeasuredItems
from jobs.where import parse_where
from pipelines.errors import ConfigError, ErrorCode, NotFoundError, ServiceError
from tests.support.ledger_kit import assert_exact, done, lease_next, states, submit

GOOD = {"ended": Score(1.0, True), "wer": Score(0.1, True, 'said "so"'), "align": Score(-1.5)}
BAD = {"ended": Score(1.0, True), "silence": Score(0.9, False, "silero")}


def job_of(ledger: Ledger, items: int, shards: int = 1, end: bool = True) -> Job:
    """A job without checks whose items are done."""
    job = submit(ledger, [items // shards] * shards, spec=JobSpec("fake"), max_attempts=1)
    for number in range(shards):
        lease, size = lease_next(ledger), items // shards
        ledger.commit(lease.ticket, [done(index) for index in range(size * number, size * (number + 1))])
        if end:
            ledger.finish_shard(lease.ticket)
    return ledger.job(job.id)


def verdict(ledger: Ledger, job: Job, index: int, code: ErrorCode | None = None) -> Verdict:
    audio = ledger.artifacts_of(job.id, "audio", [index])[index]
    scores = GOOD if code is None else BAD
    before = next((row.draw for row in ledger.draws_of(job.id, [index]) if row.draw.kept), None)
    draw = Draw(0, audio.seed, code, code is None, 1500, scores)
    return audio, before, draw, "" if code is None else "Too silent."


def test_verdicts_change_states_counters_scores_and_no_audio(ledger: Ledger) -> None:
    job = job_of(ledger, 6, shards=2)
    before = {one.index: one for one in ledger.artifacts(job.id, "audio")}
    verdicts = [
        verdict(ledger, job, index, ErrorCode.QA_SILENCE if index in (1, 4) else None) for index in range(5)
    ]
    ledger.commit_checks(job, verdicts)
    assert_exact(ledger, job.id)
    assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
    assert [number for number, state in enumerate(states(ledger, job.id)) if state is ItemState.FAILED] == [
        1,
        4,
    ]
    kept = {one.index: one for one in ledger.artifacts(job.id, QUARANTINE)}
    assert {index: one.key for index, one in kept.items()} == {index: before[index].key for index in (1, 4)}
    assert ledger.error_counts(job.id) == {ErrorCode.QA_SILENCE: 2}
    assert [row.error_message for row in ledger.items(job.id)] == [
        None,
        "Too silent.",
        None,
        None,
        "Too silent.",
        None,
    ]
    status = ledger.status(job.id)
    assert (status.items.done, status.items.failed) == (4, 2)
    assert (status.audio_ms, status.bytes_out) == (4 * 1500, 4 * 100)
    assert status.measured == MeasuredItems(5, 2, 2)
    assert [row.index for row in ledger.items(job.id, where=parse_where("wer < 0.2 and align < 0"))] == [
        0,
        2,
        3,
    ]
    assert ledger.measured_scores(job.id) == {"ended", "wer", "align"}
    assert columns_of((ledger, job), metadata={}).scores == ("ended", "wer", "align")
    with pytest.raises(ConfigError):
        list(ledger.items(job.id, where=parse_where("distillmos > 1")))
    # A second check of an item takes the place of the first one. One of other audio or other scores is left out.
    audio, before_it, draw, _ = verdict(ledger, job, 0)
    second = msgspec.structs.replace(draw, scores={"distillmos": Score(3.0)})
    ledger.commit_checks(job, [(audio, before_it, second, "")])
    ledger.commit_checks(job, [(msgspec.structs.replace(audio, sha256="other"), second, draw, "")])
    ledger.commit_checks(job, [(audio, before_it, draw, "")])
    assert [row.draw.scores for row in ledger.draws_of(job.id, [0])] == [{"distillmos": Score(3.0)}]
    # What a check failed, a person can accept.
    ledger.decide(job.id, ["e1"], Decision(True, "ada"))
    assert_exact(ledger, job.id)
    assert states(ledger, job.id)[1] is ItemState.DONE
    assert ledger.status(job.id).measured.still_failed == 1


def test_one_check_has_a_shard_at_a_time(ledger: Ledger) -> None:
    job = job_of(ledger, 2, shards=2)
    assert ledger.take_for_check(job.id, 0, "a", 60.0)
    assert not ledger.take_for_check(job.id, 0, "b", 60.0)
    assert ledger.take_for_check(job.id, 1, "b", 60.0)
    # Its checker takes it for longer, gives it back, or is away for too long.
    assert ledger.take_for_check(job.id, 0, "a", 0.2)
    time.sleep(0.3)
    assert ledger.take_for_check(job.id, 0, "b", 0.0)
    time.sleep(0.01)
    assert ledger.take_for_check(job.id, 0, "a", 60.0)
    # A retry does not wait for it.
    ledger.commit_checks(job, [verdict(ledger, job, 0, ErrorCode.QA_SILENCE)])
    assert ledger.retry(job.id, None) == 1
    assert not ledger.take_for_check(job.id, 0, "a", 60.0)
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [done(0)])
    ledger.finish_shard(lease.ticket)
    assert ledger.take_for_check(job.id, 0, "c", 60.0)
    assert_exact(ledger, job.id)


def test_a_job_that_runs_or_is_gone_gets_no_verdicts(ledger: Ledger) -> None:
    job = job_of(ledger, 2, end=False)
    verdicts = [verdict(ledger, job, 0, ErrorCode.QA_SILENCE)]
    with pytest.raises(ServiceError, match="running") as caught:
        ledger.commit_checks(job, verdicts)
    assert caught.value.code is ErrorCode.LEDGER_STATE
    assert states(ledger, job.id) == [ItemState.DONE] * 2
    ended = job_of(ledger, 2)
    ledger.commit_checks(ended, [verdict(ledger, ended, 0, ErrorCode.QA_SILENCE)])
    assert ledger.retry(ended.id, None) == 1
    with pytest.raises(ServiceError, match="running"):
        ledger.commit_checks(ended, [verdict(ledger, ended, 1)])
    lease = lease_next(ledger)
    ledger.commit(lease.ticket, [Failed(0, ErrorCode.QA_WER, "Again.")])
    ledger.finish_shard(lease.ticket)
    last = verdict(ledger, ended, 1)
    ledger.begin_delete(ended.id)
    with pytest.raises(ServiceError, match="cancelled"):
        ledger.commit_checks(ended, [last])
    ledger.delete_rows(ended.id)
    with pytest.raises(NotFoundError):
        ledger.commit_checks(ended, [last])


@pytest.mark.parametrize("timestamps", [False, True])
def test_the_aligner_of_times_measures_no_sample(ledger: Ledger, timestamps: bool) -> None:
    spec = JobSpec("fake", quality=PRESETS["strict"], timestamps=timestamps or msgspec.UNSET)
    job = submit(ledger, [2], spec=spec)
    lease = lease_next(ledger)
    for index, scores in enumerate((GOOD, {"align": Score(-1.0)})):
        one = done(index)
        draws = (Draw(0, 7, None, True, 1500, scores),)
        ledger.commit(lease.ticket, [msgspec.structs.replace(one, draws=draws)])
    ledger.finish_shard(lease.ticket)
    assert ledger.status(job.id).measured.items == (1 if timestamps else 2)
