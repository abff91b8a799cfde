"""What the reconciler finds in the ledger and puts right, on SQLite and on PostgreSQL."""

from __future__ import annotations

from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, Job, JobState, ShardState
from pipelines.errors import ErrorCode
from tests.support.ledger_kit import (
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
        assert rows(ledger, "SELECT state, attempts, not_before IS NULL FROM shards") in (
            [("ready", 1, 0)],
            [("ready", 1, False)],
        )
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
        assert states(ledger, job.id) == [
            ItemState.DEAD if index == poison else ItemState.DONE for index in range(8)
        ]
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
                trials.append((ticket.epoch, ledger.should_run_alone(ticket)))
                lease = ledger.claim(ticket, "w1", LEASE_SECONDS)
                assert lease is not None
                assert not ledger.should_run_alone(ticket)
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
        assert rows(ledger, "SELECT shard_no, count(*) FROM items GROUP BY shard_no ORDER BY shard_no") == [
            (0, 1),
            (1, 1),
        ]

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
        assert [row.state for row in ledger.worker_statuses(include_ended=True)] == ["lost"]
        ledger.worker_heartbeat("a")
        assert [row.state for row in ledger.worker_statuses(include_ended=True)] == ["up"]

    def test_a_cancel_that_broke_off_is_brought_to_its_end(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        execute(ledger, "UPDATE jobs SET state = 'cancelling'")
        ledger.reconcile()
        assert ledger.job(job.id).state is JobState.CANCELLED
        assert_exact(ledger, job.id)

    def test_the_error_budget_pauses_the_job_with_a_reason(self, ledger: Ledger) -> None:
        job = submit(ledger, (60, 60, 60), error_budget=0.2)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(i) if i % 4 == 0 else done(i) for i in range(20)])
        assert ledger.job(job.id).state is JobState.RUNNING
        # The lease goes on, and the commit alone spends the budget.
        ledger.commit(lease.ticket, [failed(i) for i in range(20, 40)])
        paused = ledger.job(job.id)
        assert paused.state is JobState.PAUSED
        assert "25 of 40" in paused.state_reason
        ledger.resume(job.id)
        ledger.reconcile()
        assert ledger.job(job.id).state is JobState.RUNNING

    def test_a_small_job_pauses_once_it_cannot_keep_its_budget(self, ledger: Ledger) -> None:
        job = submit(ledger, (10,), error_budget=0.2)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(0), failed(1)])
        assert ledger.job(job.id).state is JobState.RUNNING
        ledger.commit(lease.ticket, [failed(2)])
        assert ledger.job(job.id).state is JobState.PAUSED
        ledger.resume(job.id)
        # Seven items are left: of them one may fail.
        ledger.commit(lease.ticket, [failed(3)])
        assert ledger.job(job.id).state is JobState.RUNNING
        ledger.retry(job.id, None)
        # What is open again counts as any other item.
        ledger.commit(lease.ticket, [done(4), done(5)])
        assert ledger.job(job.id).state is JobState.RUNNING


class TestTimesAhead:
    """The database's clock was a day ahead while these times were written, and is right again."""

    def test_a_dead_workers_lease_runs_out_in_its_time_and_a_living_ones_goes_on(
        self, ledger: Ledger
    ) -> None:
        job = submit(ledger, (1, 1))
        dead, alive = lease_next(ledger), lease_next(ledger, "w2")
        jump(ledger, "shards", "lease_until", "heartbeat_at")
        report = ledger.reconcile()
        assert (report.times_ahead, report.expired_leases, report.changed) == (2, 0, True)
        assert ledger.reconcile().times_ahead == 0
        now = ledger.now()
        assert all(
            beat <= now and until <= now + LEASE_SECONDS
            for beat, until in rows(ledger, "SELECT heartbeat_at, lease_until FROM shards")
        )
        assert ledger.heartbeat("w2", [alive.ticket], LEASE_SECONDS) == set()
        pass_time(ledger, "shards", LEASE_SECONDS + 1, "lease_until", "heartbeat_at")
        assert ledger.heartbeat("w2", [alive.ticket], LEASE_SECONDS) == set()
        assert ledger.reconcile().expired_leases == 1
        assert ledger.finish_shard(dead.ticket) is False
        assert ledger.status(job.id).shards[ShardState.LEASED] == 1

    def test_a_lease_longer_than_any_ends(self, ledger: Ledger) -> None:
        submit(ledger)
        lease_next(ledger)
        jump(ledger, "shards", "lease_until")
        assert ledger.reconcile().times_ahead == 1
        pass_time(ledger, "shards", 1, "lease_until")
        assert ledger.reconcile().expired_leases == 1

    def test_a_shard_that_waits_for_tomorrow_is_ready(self, ledger: Ledger) -> None:
        submit(ledger)
        ledger.fail_shard(lease_next(ledger).ticket, ErrorCode.STORE_UNREACHABLE, "away")
        assert ledger.reconcile().times_ahead == 0
        jump(ledger, "shards", "not_before")
        assert ledger.reconcile().times_ahead == 1
        assert len(ledger.take_ready(1)) == 1

    def test_a_message_of_tomorrow_is_waited_for_as_if_it_were_new(self, ledger: Ledger) -> None:
        submit(ledger)
        (ticket,) = ledger.take_ready(1)
        jump(ledger, "shards", "enqueued_at")
        report = ledger.reconcile(queued_timeout_seconds=600)
        assert (report.times_ahead, report.lost_messages) == (1, 0)
        pass_time(ledger, "shards", 601, "enqueued_at")
        assert ledger.reconcile(queued_timeout_seconds=600).lost_messages == 1
        assert ledger.take_ready(1) == [ticket]

    def test_a_worker_of_tomorrow_is_lost_in_its_time(self, ledger: Ledger) -> None:
        ledger.register_worker(worker("a", slots=3))
        jump(ledger, "workers", "heartbeat_at")
        report = ledger.reconcile(worker_timeout_seconds=60)
        assert (report.times_ahead, report.stale_workers) == (1, 0)
        pass_time(ledger, "workers", 61, "heartbeat_at")
        assert ledger.reconcile(worker_timeout_seconds=60).stale_workers == 1
        assert ledger.reconcile().times_ahead == 0


def jump(ledger: Ledger, table: str, *columns: str) -> None:
    pass_time(ledger, table, -86_400, *columns)


def pass_time(ledger: Ledger, table: str, seconds: float, *columns: str) -> None:
    """Makes the times of a table so much older."""
    changes = ", ".join(f"{column} = {column} - :seconds" for column in columns)
    execute(ledger, f"UPDATE {table} SET {changes}", seconds=seconds)


class TestManifests:
    def ended(self, ledger: Ledger) -> Job:
        job = submit(ledger, (1,))
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(0)])
        ledger.finish_shard(lease.ticket)
        return ledger.job(job.id)

    def test_a_job_that_ended_without_its_manifest_is_named_until_it_is_noted(self, ledger: Ledger) -> None:
        job = self.ended(ledger)
        assert ledger.reconcile().without_manifest == ()
        pass_time(ledger, "jobs", 61, "finished_at")
        for _ in range(2):
            report = ledger.reconcile()
            assert (report.without_manifest, report.changed) == ((job.id,), False)
        ledger.note_manifest(ledger.job(job.id), ledger.begin_manifest(job.id))
        assert ledger.reconcile().without_manifest == ()

    def test_what_is_noted_of_an_earlier_end_says_nothing_of_the_next(self, ledger: Ledger) -> None:
        job = self.ended(ledger)
        ledger.note_manifest(job, ledger.begin_manifest(job.id))
        pass_time(ledger, "jobs", 61, "finished_at")
        assert ledger.reconcile().without_manifest == (job.id,)
        ledger.note_manifest(job, ledger.begin_manifest(job.id))
        assert ledger.reconcile().without_manifest == (job.id,)

    def test_jobs_that_run_are_not_named(self, ledger: Ledger) -> None:
        job = self.ended(ledger)
        submit(ledger)
        pass_time(ledger, "jobs", 61, "finished_at", "created_at")
        assert ledger.reconcile().without_manifest == (job.id,)

    def test_an_end_of_tomorrow_counts_too(self, ledger: Ledger) -> None:
        job = self.ended(ledger)
        jump(ledger, "jobs", "finished_at")
        assert ledger.reconcile().without_manifest == (job.id,)
