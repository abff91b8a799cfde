"""A shard that ends before its last item: a drain, a pause, an error budget that is spent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jobs.checks import quality_of
from jobs.ingest import SubmitOptions
from jobs.ledger import Ledger
from jobs.ledger.records import JobState, ShardState
from tests.support.fakes import FakePipeline
from tests.support.worker_rig import Build, Recording, wait_for
from worker.shard_run import ShardEnd


def test_a_drain_keeps_what_is_done_and_gives_the_rest_back(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shard_run.WRITING_SECONDS", 240.0)
    rig = build(pipeline=FakePipeline(slots=8), commit_seconds=600.0)
    job = rig.submit(["quick", "[[slow:6000]] late"])
    ends: list[ShardEnd] = []
    lease = rig.claim_next()
    thread = threading.Thread(target=lambda: ends.append(rig.runner.run(lease)))
    thread.start()
    wait_for(lambda: len(rig.audio()) == 1 and len(rig.pipeline.submitted) == 2)
    rig.leases.drain()
    thread.join(240)
    assert ends == ["released"]
    status = rig.status(job)
    assert (status.items.done, status.items.pending) == (1, 1)
    assert status.shards[ShardState.READY] == 1
    assert rig.claim_next().open_items.keys() == {1}


class Asked(Recording):
    """Says when a worker has heard twice that its job is paused: it has acted on the first answer by then."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.heard = 0

    def job_state(self, job_id: str) -> JobState:
        state = self.ledger.job_state(job_id)
        self.heard += state is JobState.PAUSED
        return state


def test_a_pause_gives_back_what_was_not_begun(build: Build, tmp_path: Path) -> None:
    rig = build(pipeline=FakePipeline(slots=1, waiting_room=1), commit_seconds=0.05)
    gate = tmp_path / "gate"
    texts = [f"[[until:{gate}]] {n}" for n in range(10)]
    texts[1] += " [[silent]]"
    job = rig.submit(texts, quality=quality_of("basic"))
    ledger, lease = Asked(rig.ledger), rig.claim_next()
    ends: list[ShardEnd] = []
    runner = rig.runner_on(ledger)  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=lambda: ends.append(runner.run(lease)))
    thread.start()
    # One runs, one waits for it, and one waits to be let in.
    wait_for(lambda: len(rig.pipeline.submitted) == 3)
    rig.ledger.pause(job.id)
    wait_for(lambda: ledger.heard > 1)
    gate.touch()
    thread.join(240)
    assert ends == ["released"]
    # The silent one is not drawn again now.
    assert len(rig.pipeline.submitted) == 3
    status = rig.status(job)
    assert (status.job.state, status.items.done, status.items.pending) == (JobState.PAUSED, 2, 8)
    rig.ledger.resume(job.id)
    again = rig.claim_next()
    assert again.open_items.keys() == {1, *range(3, 10)}
    assert {attempts for _, attempts in again.open_items.values()} == {0}
    assert rig.runner.run(again) == "finished"
    assert rig.status(job).items.done == 9


def test_a_job_that_is_paused_while_its_model_opens_is_not_begun(build: Build) -> None:
    rig = build()
    job = rig.submit(["text"])
    lease = rig.claim_next()
    rig.ledger.pause(job.id)
    assert rig.runner.run(lease) == "released"
    assert (rig.pipeline.submitted, rig.status(job).items.pending) == ([], 1)


def test_a_spent_error_budget_stops_the_shard_in_hand(build: Build, tmp_path: Path) -> None:
    rig = build(pipeline=FakePipeline(slots=1, waiting_room=1), commit_seconds=0.05)
    gate = tmp_path / "gate"
    job = rig.submit(
        [
            "[[refuse:input.too_long]] a",
            "[[refuse:input.too_long]] b",
            *[f"[[until:{gate}]] {n}" for n in range(8)],
        ],
        options=SubmitOptions(error_budget=0.1),
    )
    ledger = Asked(rig.ledger)
    lease = rig.claim_next()
    thread = threading.Thread(target=rig.runner_on(ledger).run, args=(lease,))  # pyright: ignore[reportArgumentType]
    thread.start()
    wait_for(lambda: ledger.heard > 1)
    gate.touch()
    thread.join(240)
    status = rig.status(job)
    assert (status.job.state, status.items.failed) == (JobState.PAUSED, 2)
    assert "2 of 2 items failed" in status.job.state_reason
    assert status.items.pending >= 5
    assert status.shards == {ShardState.READY: 1}
