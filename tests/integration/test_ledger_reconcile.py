"""What the reconciler finds in the ledger and puts right, on SQLite and on PostgreSQL."""

from __future__ import annotations

from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, JobState
from pipelines.errors import ErrorCode
from tests.ledger_kit import (
    LEASE_SECONDS,
    assert_exact,
    done,
    execute,
    expire,
    failed,
    lease_next,
    outcomes_of_attempts,
    rows,
    states,
    submit,
    wake,
    worker,
)


class TestReconcile:
    def test_an_expired_lease_is_tried_again_with_backoff(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        expire(ledger, lease_next(ledger))
        report = ledger.reconcile()
        assert (report.expired_leases, report.changed) == (1, True)
        assert not ledger.reconcile().changed
        assert ledger.take_ready(1) == []
        assert rows(ledger, "SELECT state, attempts, not_before IS NULL FROM shards") in ([("ready", 1, 0)], [("ready", 1, False)])
        assert outcomes_of_attempts(ledger, job.id) == [(0, 1, "expired", 0, 0)]

    def test_a_poisoned_item_dies_and_all_others_are_made(self, ledger: Ledger) -> None:
        poison, job = 5, submit(ledger, (8,))
        crashes = 0
        while not ledger.job(job.id).state.final:
            lease = lease_next(ledger)
            if poison in lease.open_items:
                crashes += 1
                expire(ledger, lease)
                ledger.reconcile()
            else:
                ledger.commit(lease.ticket, [done(index) for index in lease.open_items])
                assert ledger.finish_shard(lease.ticket)
            assert_exact(ledger, job.id)
        assert states(ledger, job.id) == [ItemState.DEAD if index == poison else ItemState.DONE for index in range(8)]
        assert ledger.error_counts(job.id) == {ErrorCode.POISON_WORKER_CRASH: 1}
        assert crashes == 3 + 2 + 3
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert rows(ledger, "SELECT DISTINCT input_key FROM shards") == [("input/0",)]
        status = ledger.status(job.id)
        assert status.job.total_shards == sum(status.shards.values()) == 4
        assert status.items.total == 8

    def test_a_shard_is_on_trial_before_a_crash_that_would_be_judged(self, ledger: Ledger) -> None:
        submit(ledger, (4,))
        trials = []
        for _ in range(4):
            wake(ledger)
            for ticket in ledger.take_ready(10):
                trials.append((ticket.epoch, ledger.on_trial(ticket)))
                lease = ledger.claim(ticket, "w1", LEASE_SECONDS)
                assert lease is not None
                assert not ledger.on_trial(ticket)
                expire(ledger, lease)
            ledger.reconcile()
        assert trials == [(0, False), (1, False), (2, True), (3, True), (3, True)]

    def test_progress_keeps_a_shard_whole(self, ledger: Ledger) -> None:
        job = submit(ledger, (6,), max_attempts=2)
        for index in range(5):
            lease = lease_next(ledger)
            ledger.commit(lease.ticket, [done(index)])
            expire(ledger, lease)
            assert ledger.reconcile().bisected_shards == 0
        assert ledger.status(job.id).items.done == 5

    def test_an_engine_that_fails_whole_shards_is_bisected_like_a_crash(self, ledger: Ledger) -> None:
        submit(ledger, (2,), max_attempts=1)
        assert ledger.fail_shard(lease_next(ledger).ticket, ErrorCode.SYNTH_ENGINE, "broken")
        assert rows(ledger, "SELECT shard_no, count(*) FROM items GROUP BY shard_no ORDER BY shard_no") == [(0, 1), (1, 1)]

    def test_a_lost_message_is_queued_again(self, ledger: Ledger) -> None:
        submit(ledger)
        (ticket,) = ledger.take_ready(1)
        assert ledger.reconcile().lost_messages == 0
        execute(ledger, "UPDATE shards SET enqueued_at = 1")
        assert ledger.reconcile(queued_timeout_seconds=600).lost_messages == 1
        assert ledger.take_ready(1) == [ticket]

    def test_silent_workers_are_lost_until_they_speak_again(self, ledger: Ledger) -> None:
        ledger.register_worker(worker("a"))
        execute(ledger, "UPDATE workers SET heartbeat_at = 1")
        assert ledger.reconcile().stale_workers == 1
        assert ledger.reconcile().stale_workers == 0
        assert [row.state for row in ledger.workers()] == ["lost"]
        ledger.worker_heartbeat("a")
        assert [row.state for row in ledger.workers()] == ["up"]

    def test_a_cancel_that_broke_off_is_brought_to_its_end(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        execute(ledger, "UPDATE jobs SET state = 'cancelling'")
        ledger.reconcile()
        assert ledger.job(job.id).state is JobState.CANCELLED
        assert_exact(ledger, job.id)

    def test_the_error_budget_pauses_the_job_with_a_reason(self, ledger: Ledger) -> None:
        job = submit(ledger, (60, 60, 60), error_budget=0.2)
        for first in (0, 60):
            lease = lease_next(ledger)
            ledger.commit(lease.ticket, [failed(i) if i % 2 else done(i) for i in range(first, first + 60)])
            assert ledger.job(job.id).state is JobState.RUNNING
            ledger.finish_shard(lease.ticket)
        paused = ledger.job(job.id)
        assert paused.state is JobState.PAUSED
        assert "60 of 120" in paused.state_reason
        ledger.resume(job.id)
        ledger.reconcile()
        assert ledger.job(job.id).state is JobState.RUNNING
