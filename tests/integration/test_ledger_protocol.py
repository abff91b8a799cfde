"""The protocol of the ledger, the same on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.ledger import DuplicateExamples, Ledger
from jobs.ledger.records import CommitResult, ItemState, JobSpec, JobState, NewShard, RejectedLine, ShardState, Ticket
from pipelines.errors import ErrorCode, InputError, ServiceError
from tests.ledger_kit import (
    LEASE_SECONDS,
    assert_exact,
    done,
    execute,
    expire,
    failed,
    lease_next,
    new_job,
    rows,
    shards_of,
    submit,
    wake,
    worker,
)


def states(ledger: Ledger, job_id: str) -> list[ItemState]:
    return [item.state for item in ledger.items(job_id)]


def outcomes_of_attempts(ledger: Ledger, job_id: str) -> list[tuple]:
    return rows(
        ledger, "SELECT shard_no, epoch, outcome, n_ok, n_failed FROM attempts WHERE job_id = :job ORDER BY epoch, shard_no", job=job_id
    )


class TestIngest:
    def test_the_same_key_is_the_same_job(self, ledger: Ledger) -> None:
        new = new_job(name="night", labels={"team": "voice"}, error_budget=0.5, max_in_flight=2)
        job = ledger.begin_job(new)
        assert ledger.begin_job(new) == job
        assert (job.state, job.name, job.labels, job.spec) == (JobState.INGESTING, "night", {"team": "voice"}, new.spec)
        ledger.seal_job(job.id)
        assert ledger.begin_job(new).id == job.id

    def test_staged_shards_wait_until_the_job_is_sealed(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, shards_of((2, 1)), [RejectedLine(2, ErrorCode.INPUT_BAD_JSON, "No JSON.\x00", "x\x00y")], 4)
        assert ledger.staged_shards(job.id) == (2, 3, 4)
        assert ledger.take_ready(10) == []
        sealed = ledger.seal_job(job.id)
        assert (sealed.state, sealed.total_items, sealed.total_shards) == (JobState.READY, 3, 2)
        assert (sealed.rejected_lines, sealed.lines_read) == (1, 4)
        assert ledger.seal_job(job.id) == sealed
        assert [line.line for line in ledger.rejected_lines(job.id)] == [2]
        assert len(ledger.take_ready(10)) == 2

    def test_staging_a_batch_again_changes_nothing(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        batch = (shards_of((2,)), [RejectedLine(3, ErrorCode.INPUT_BAD_ROLE, "m")], 3)
        ledger.stage(job.id, *batch)
        ledger.stage(job.id, *batch)
        assert ledger.staged_shards(job.id) == (1, 2, 3)
        assert ledger.job(job.id).rejected_lines == 1

    def test_duplicates_are_named_and_nothing_of_the_batch_is_written(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, [NewShard(0, ((0, "a"), (1, "b")), "k", "s", 1)], [], 2)
        with pytest.raises(DuplicateExamples) as caught:
            ledger.stage(job.id, [NewShard(1, ((2, "c"), (3, "b"), (4, "d"), (5, "d")), "k1", "s1", 1)], [], 6)
        assert caught.value.example_ids == ("b", "d")
        assert caught.value.code is ErrorCode.INPUT_DUPLICATE_ID
        assert ledger.staged_shards(job.id) == (1, 2, 2)

    def test_example_ids_are_data(self, ledger: Ledger) -> None:
        names = ["../../x", "a\tb", "line\nbreak", "back\\slash", "'; DROP TABLE jobs; --", "\\N", "\\.", "ü" * 300, "日本", ""]
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, [NewShard(0, tuple(enumerate(names)), "k", "s", 1)], [], len(names))
        assert [item.example_id for item in ledger.items(job.id)] == names
        with pytest.raises(InputError):
            ledger.stage(job.id, [NewShard(1, ((10, "nul\x00"),), "k1", "s1", 1)], [], 11)

    def test_a_job_without_items_fails(self, ledger: Ledger) -> None:
        job = ledger.seal_job(ledger.begin_job(new_job()).id)
        assert (job.state, job.state_reason) == (JobState.FAILED, "input.no_items")

    def test_an_abandoned_job_leaves_no_row(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, shards_of((2,)), [RejectedLine(1, ErrorCode.INPUT_BAD_JSON, "m")], 3)
        ledger.abandon_job(job.id)
        for table in ("jobs", "shards", "items", "rejected_lines"):
            assert rows(ledger, f"SELECT count(*) FROM {table}") == [(0,)]

    def test_nothing_is_added_to_a_sealed_job(self, ledger: Ledger) -> None:
        job = submit(ledger)
        for call in (lambda: ledger.stage(job.id, shards_of((1,), 9), [], 9), lambda: ledger.abandon_job(job.id)):
            with pytest.raises(ServiceError) as caught:
                call()
            assert caught.value.code is ErrorCode.LEDGER_STATE


class TestDispatch:
    def test_the_window_follows_live_workers(self, ledger: Ledger) -> None:
        submit(ledger, (1,) * 9)
        assert ledger.free_window() == 4
        ledger.register_worker(worker("a", slots=3))
        assert ledger.free_window() == 6
        ledger.take_ready(5)
        assert ledger.free_window() == 1
        ledger.worker_heartbeat("a", "draining")
        assert ledger.free_window() == 0

    def test_higher_priority_first_then_fair_shares_then_the_older_job(self, ledger: Ledger) -> None:
        low = submit(ledger, (1,) * 9)
        heavy = submit(ledger, (1,) * 9, priority=5, weight=2)
        light = submit(ledger, (1,) * 9, priority=5)
        names = {low.id: "low", heavy.id: "heavy", light.id: "light"}
        first = [names[ticket.job_id] for ticket in ledger.take_ready(6)]
        assert first == ["heavy", "light", "heavy", "heavy", "light", "heavy"]
        assert {ticket.priority for ticket in ledger.take_ready(1)} == {5}
        ledger.set_priority(low.id, 9)
        assert [ticket.job_id for ticket in ledger.take_ready(2)] == [low.id] * 2

    def test_a_job_holds_no_more_than_its_limit_in_flight(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,) * 5, max_in_flight=2)
        other = submit(ledger, (1,), priority=-1)
        tickets = ledger.take_ready(10)
        assert [ticket.job_id for ticket in tickets] == [job.id, job.id, other.id]
        assert ledger.take_ready(10) == []

    def test_backoff_holds_a_shard_back(self, ledger: Ledger) -> None:
        submit(ledger)
        execute(ledger, "UPDATE shards SET not_before = :at", at=ledger.now() + 60)
        assert ledger.take_ready(1) == []
        wake(ledger)
        assert len(ledger.take_ready(1)) == 1

    def test_tickets_that_were_not_published_go_back(self, ledger: Ledger) -> None:
        submit(ledger, (1, 1))
        tickets = ledger.take_ready(2)
        assert ledger.claim(tickets[0], "w1", LEASE_SECONDS)
        assert ledger.give_back(tickets) == 1
        assert ledger.take_ready(2) == tickets[1:]


class TestLeases:
    def test_a_message_is_claimed_once(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        (ticket,) = ledger.take_ready(1)
        lease = ledger.claim(ticket, "w1", LEASE_SECONDS)
        assert lease is not None
        assert (lease.epoch, lease.open_items, lease.input_key) == (1, {0: ("e0", 0), 1: ("e1", 0)}, "input/0")
        assert lease.job.state is JobState.RUNNING
        assert lease.job.started_at is not None
        assert ledger.claim(ticket, "w2", LEASE_SECONDS) is None
        assert ledger.claim(Ticket(job.id, 99, 0), "w2", LEASE_SECONDS) is None
        assert ledger.claim(Ticket("none", 0, 0), "w2", LEASE_SECONDS) is None

    def test_a_message_of_an_older_epoch_is_dropped(self, ledger: Ledger) -> None:
        submit(ledger)
        (old,) = ledger.take_ready(1)
        lease = ledger.claim(old, "w1", LEASE_SECONDS)
        assert lease is not None
        assert ledger.release(lease.ticket, "drain")
        (new,) = ledger.take_ready(1)
        assert ledger.claim(old, "w2", LEASE_SECONDS) is None
        assert ledger.claim(new, "w2", LEASE_SECONDS) is not None

    def test_heartbeats_name_the_leases_that_are_lost(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1, 1))
        kept, gone, _ = (lease_next(ledger) for _ in range(3))
        execute(ledger, "UPDATE shards SET lease_until = 1 WHERE no = 0")
        ledger.release(gone.ticket, "drain")
        lost = ledger.heartbeat("w1", [kept.ticket, gone.ticket, Ticket(job.id, 2, 7)], LEASE_SECONDS)
        assert lost == {gone.ticket, Ticket(job.id, 2, 7)}
        assert rows(ledger, "SELECT lease_until > 1 FROM shards WHERE no = 0")[0][0]
        assert ledger.heartbeat("w2", [kept.ticket], LEASE_SECONDS) == {kept.ticket}
        assert ledger.heartbeat("w1", [], LEASE_SECONDS) == set()

    def test_a_released_shard_is_ready_at_once_and_lost_no_attempt(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,), max_attempts=1)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(0)])
        assert ledger.release(lease.ticket, "drain")
        assert not ledger.release(lease.ticket, "drain")
        (ticket,) = ledger.take_ready(1)
        again = ledger.claim(ticket, "w2", LEASE_SECONDS)
        assert again is not None
        assert list(again.open_items) == [1]
        assert outcomes_of_attempts(ledger, job.id) == [(0, 1, "released", 1, 0), (0, 2, None, 0, 0)]


class TestCommit:
    def test_outcomes_are_written_once_and_counted_exactly(self, ledger: Ledger) -> None:
        job = submit(ledger, (4,))
        lease = lease_next(ledger)
        batch = [done(0), done(0, seed=8), failed(1), failed(2, ErrorCode.SYNTH_OOM)]
        assert ledger.commit(lease.ticket, batch) == CommitResult(3)
        assert ledger.commit(lease.ticket, batch) == CommitResult(0)
        assert states(ledger, job.id) == [ItemState.DONE, ItemState.FAILED, ItemState.PENDING, ItemState.PENDING]
        assert_exact(ledger, job.id)
        status = ledger.status(job.id)
        assert (status.items.total, status.items.done, status.items.failed, status.items.pending) == (4, 1, 1, 2)
        assert (status.audio_ms, status.bytes_out, status.engine_ms) == (1500, 100, 20)
        first = next(ledger.items(job.id))
        assert first.artifact == done(0).artifacts[0]
        assert first.attempts == 1

    def test_a_stale_epoch_writes_nothing(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        old = lease_next(ledger)
        expire(ledger, old)
        assert ledger.reconcile().expired_leases == 1
        assert ledger.commit(old.ticket, [done(0)]) == CommitResult(0, lost=True)
        new = lease_next(ledger, "w2")
        assert ledger.commit(old.ticket, [done(0)]) == CommitResult(0, lost=True)
        assert not ledger.finish_shard(old.ticket)
        assert not ledger.fail_shard(old.ticket, ErrorCode.SYNTH_ENGINE, "m")
        assert ledger.commit(new.ticket, [done(0)]).accepted == 1
        assert_exact(ledger, job.id)

    def test_an_item_of_another_shard_is_not_touched(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1))
        lease = lease_next(ledger)
        assert ledger.commit(lease.ticket, [done(1), failed(77)]) == CommitResult(0)
        assert_exact(ledger, job.id)

    def test_a_retryable_failure_waits_until_its_attempts_are_spent(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,), max_attempts=2)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(0, ErrorCode.SYNTH_TIMEOUT, "first")])
        assert ledger.finish_shard(lease.ticket)
        assert ledger.take_ready(1) == []
        lease = lease_next(ledger)
        assert lease.open_items == {0: ("e0", 1)}
        ledger.commit(lease.ticket, [failed(0, ErrorCode.SYNTH_TIMEOUT, "x" * 9000 + "\x00")])
        assert ledger.finish_shard(lease.ticket)
        (item,) = ledger.items(job.id)
        assert (item.state, item.attempts, item.error_code) == (ItemState.FAILED, 2, ErrorCode.SYNTH_TIMEOUT)
        assert len(item.error_message or "") == 2000
        assert rows(ledger, "SELECT epoch, code, retryable FROM item_errors ORDER BY epoch") == [
            (1, "synth.timeout", True),
            (2, "synth.timeout", True),
        ]
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert outcomes_of_attempts(ledger, job.id) == [(0, 1, "partial", 0, 0), (0, 2, "done", 0, 1)]

    def test_a_done_item_forgets_its_earlier_error(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,))
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(0, ErrorCode.SYNTH_OOM)])
        ledger.finish_shard(lease.ticket)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(0)])
        (item,) = ledger.items(job.id)
        assert (item.state, item.error_code, item.attempts) == (ItemState.DONE, None, 2)


class TestFinish:
    def test_the_last_shard_completes_the_job(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1))
        for index in range(2):
            assert ledger.job(job.id).finished_at is None
            lease = lease_next(ledger)
            ledger.commit(lease.ticket, [done(index)])
            assert ledger.finish_shard(lease.ticket, f"manifest/{index}", "sha")
            assert not ledger.finish_shard(lease.ticket)
        finished = ledger.job(job.id)
        assert finished.state is JobState.COMPLETED
        assert finished.finished_at is not None
        assert rows(ledger, "SELECT manifest_key FROM shards ORDER BY no") == [("manifest/0",), ("manifest/1",)]
        assert [(audio.index, audio.key) for audio in ledger.shard_audio(job.id, 1)] == [(1, done(1).artifacts[0].key)]

    def test_rejected_lines_are_errors_of_the_job(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, shards_of((1,)), [RejectedLine(2, ErrorCode.INPUT_BAD_JSON, "m")], 2)
        ledger.seal_job(job.id)
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(0)])
        ledger.finish_shard(lease.ticket)
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert ledger.error_counts(job.id) == {ErrorCode.INPUT_BAD_JSON: 1}

    def test_a_finish_without_any_outcome_counts_as_a_crash(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,), max_attempts=2)
        for _ in range(2):
            assert ledger.finish_shard(lease_next(ledger).ticket)
        assert states(ledger, job.id) == [ItemState.DEAD]

    def test_an_outage_costs_time_but_no_attempt(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,), max_attempts=1)
        for _ in range(5):
            assert ledger.fail_shard(lease_next(ledger).ticket, ErrorCode.STORE_UNREACHABLE, "down")
            assert ledger.take_ready(1) == []
        assert states(ledger, job.id) == [ItemState.PENDING]
        assert rows(ledger, "SELECT attempts, outages FROM shards") == [(0, 5)]

    def test_an_input_that_is_gone_ends_the_open_items(self, ledger: Ledger) -> None:
        job = submit(ledger, (3,))
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(1)])
        assert ledger.fail_shard(lease.ticket, ErrorCode.STORE_MISSING, "input/0 is gone")
        assert states(ledger, job.id) == [ItemState.FAILED, ItemState.DONE, ItemState.FAILED]
        assert ledger.error_counts(job.id) == {ErrorCode.STORE_MISSING: 2}
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert_exact(ledger, job.id)


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


class TestPeople:
    def test_pause_voids_messages_and_lets_leases_end(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1, 1))
        running = lease_next(ledger)
        (message,) = ledger.take_ready(1)
        ledger.pause(job.id)
        ledger.pause(job.id)
        assert ledger.claim(message, "w2", LEASE_SECONDS) is None
        assert ledger.take_ready(5) == []
        assert ledger.heartbeat("w1", [running.ticket], LEASE_SECONDS) == set()
        assert ledger.commit(running.ticket, [done(0)]).accepted == 1
        assert ledger.finish_shard(running.ticket)
        ledger.resume(job.id)
        assert ledger.job(job.id).state is JobState.RUNNING
        assert message in ledger.take_ready(5)

    def test_a_job_paused_before_its_first_claim_resumes_ready(self, ledger: Ledger) -> None:
        job = submit(ledger)
        ledger.pause(job.id)
        ledger.resume(job.id)
        assert ledger.job(job.id).state is JobState.READY

    def test_cancel_refuses_all_further_work(self, ledger: Ledger) -> None:
        job = submit(ledger, (2, 2, 2))
        running = lease_next(ledger)
        ledger.commit(running.ticket, [done(0)])
        (message,) = ledger.take_ready(1)
        ledger.cancel(job.id)
        ledger.cancel(job.id)
        assert ledger.heartbeat("w1", [running.ticket], LEASE_SECONDS) == {running.ticket}
        assert ledger.commit(running.ticket, [done(1)]) == CommitResult(0, lost=True)
        assert not ledger.finish_shard(running.ticket)
        assert not ledger.release(running.ticket, "drain")
        assert ledger.claim(message, "w2", LEASE_SECONDS) is None
        status = ledger.status(job.id)
        assert status.job.state is JobState.CANCELLED
        assert (status.items.done, status.items.skipped, status.items.pending) == (1, 5, 0)
        assert status.shards == {ShardState.CANCELLED: 3}
        assert_exact(ledger, job.id)

    def test_an_ingesting_job_can_be_cancelled(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, shards_of((2,)), [], 2)
        ledger.cancel(job.id)
        assert ledger.status(job.id).items.skipped == 2
        assert ledger.seal_job(job.id).state is JobState.CANCELLED

    def test_retry_opens_exactly_the_items_with_the_code(self, ledger: Ledger) -> None:
        job = submit(ledger, (3, 1, 1))
        for outcomes in ([failed(0), failed(1, ErrorCode.SYNTH_SILENT), done(2)], [failed(3)], [done(4)]):
            lease = lease_next(ledger)
            ledger.commit(lease.ticket, outcomes)
            ledger.finish_shard(lease.ticket)
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert ledger.retry(job.id, [ErrorCode.SYNTH_NAN]) == 0
        assert ledger.job(job.id).state is JobState.COMPLETED_WITH_ERRORS
        assert ledger.retry(job.id, [ErrorCode.SYNTH_NO_EOS]) == 2
        status = ledger.status(job.id)
        assert (status.job.state, status.job.finished_at) == (JobState.RUNNING, None)
        assert (status.items.failed, status.items.pending) == (1, 2)
        assert status.shards == {ShardState.READY: 2, ShardState.DONE: 1}
        assert_exact(ledger, job.id)
        for index in (0, 3):
            lease = lease_next(ledger)
            assert list(lease.open_items) == [index]
            ledger.commit(lease.ticket, [done(index)])
            ledger.finish_shard(lease.ticket)
        assert ledger.retry(job.id, None) == 1
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(1)])
        ledger.finish_shard(lease.ticket)
        assert ledger.job(job.id).state is JobState.COMPLETED
        assert_exact(ledger, job.id)

    def test_retry_under_a_running_lease_runs_the_item_in_the_next_one(self, ledger: Ledger) -> None:
        job = submit(ledger, (2,))
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(0)])
        assert ledger.retry(job.id, None) == 1
        ledger.commit(lease.ticket, [done(1)])
        assert ledger.finish_shard(lease.ticket)
        assert list(lease_next(ledger).open_items) == [0]

    def test_retry_raises_the_dead(self, ledger: Ledger) -> None:
        job = submit(ledger, (1,), max_attempts=1)
        expire(ledger, lease_next(ledger))
        assert ledger.reconcile().dead_items == 1
        assert ledger.status(job.id).shards == {ShardState.DEAD: 1}
        assert ledger.retry(job.id, [ErrorCode.POISON_WORKER_CRASH]) == 1
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [done(0)])
        ledger.finish_shard(lease.ticket)
        assert ledger.job(job.id).state is JobState.COMPLETED

    def test_what_a_state_does_not_allow_is_said(self, ledger: Ledger) -> None:
        job = submit(ledger)
        ledger.cancel(job.id)
        for call in (ledger.pause, ledger.resume, lambda job_id: ledger.retry(job_id, None)):
            with pytest.raises(ServiceError, match="cancelled") as caught:
                call(job.id)
            assert caught.value.code is ErrorCode.LEDGER_STATE


class TestViews:
    def test_a_job_is_found_by_the_beginning_of_its_id(self, ledger: Ledger) -> None:
        first, second = submit(ledger), submit(ledger)
        assert ledger.find_job(first.id) == ledger.job(first.id)
        execute(ledger, "UPDATE jobs SET id = 'zebra_1' WHERE id = :id", id=ledger.begin_job(new_job()).id)
        assert ledger.find_job("ZEBRA").id == "zebra_1"
        for prefix in ("0", "%", "zebra%1", ""):
            with pytest.raises(Exception, match="job"):
                ledger.find_job(prefix)
        assert [job.id for job in ledger.jobs(2)] == ["zebra_1", second.id]
        assert [job.id for job in ledger.jobs(9, {JobState.READY})] == [second.id, first.id]
        assert [status.job.id for status in ledger.statuses(2)] == ["zebra_1", second.id]

    def test_items_stream_in_order_and_by_state_and_code(self, ledger: Ledger) -> None:
        job = submit(ledger, (1500, 1200))
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(i) if i % 3 == 0 else done(i) for i in range(1500)])
        assert [item.index for item in ledger.items(job.id)] == list(range(2700))
        assert [item.index for item in ledger.items(job.id, ItemState.FAILED, after=2, limit=3)] == [3, 6, 9]
        assert len(list(ledger.items(job.id, codes=[ErrorCode.SYNTH_NO_EOS]))) == 500
        assert list(ledger.items(job.id, codes=[ErrorCode.QA_WER])) == []
        assert len(list(ledger.items(job.id, after=1999, limit=2000))) == 700
        assert [audio.index for audio in ledger.shard_audio(job.id, 0)] == [i for i in range(1500) if i % 3]
        assert ledger.shard_audio(job.id, 9) == []

    def test_a_job_that_no_pinned_worker_serves_takes_no_room(self, ledger: Ledger) -> None:
        other = submit(ledger, (1,) * 6, spec=JobSpec("other"), priority=9)
        assert len(ledger.take_ready(4)) == 4, "while nobody is up, anything may be queued"
        mine = submit(ledger, (1,) * 6)
        ledger.register_worker(worker(slots=2))
        assert ledger.free_window() == 4
        assert [ticket.job_id for ticket in ledger.take_ready(4)] == [mine.id] * 4
        assert ledger.free_window() == 0
        ledger.register_worker(replace(worker("w2"), model="other", slots=3))
        assert [ticket.job_id for ticket in ledger.take_ready(ledger.free_window())] == [other.id] * 2
        ledger.register_worker(replace(worker("w3"), model="", slots=1))
        assert [ticket.job_id for ticket in ledger.take_ready(9)] == [mine.id] * 2

    def test_a_model_gets_no_more_than_its_own_workers_take(self, ledger: Ledger) -> None:
        submit(ledger, (1,) * 9, spec=JobSpec("other"), priority=9)
        mine = submit(ledger, (1,) * 9)
        ledger.register_worker(worker(slots=1))
        ledger.register_worker(replace(worker("w2"), model="other", slots=1))
        assert [ticket.job_id == mine.id for ticket in ledger.take_ready(ledger.free_window())] == [False, False, True, True]

    def test_a_job_says_what_it_waits_for(self, ledger: Ledger) -> None:
        job = submit(ledger, (2, 2))
        assert ledger.last_outage(job.id) is None
        assert ledger.fail_shard(lease_next(ledger).ticket, ErrorCode.STORE_FULL, "No space is left.")
        outage = ledger.last_outage(job.id)
        assert outage is not None
        assert (outage.code, outage.message) == (ErrorCode.STORE_FULL, "No space is left.")
        assert ledger.status(job.id).outage == outage
        ledger.check_writable(job.id)
        assert [ticket.shard_no for ticket in ledger.take_ready(9)] == [1], "the other one waits"
        assert ledger.wake(job.id) == 1
        lease = lease_next(ledger)
        assert ledger.last_outage(job.id) == outage, "until a lease ends otherwise"
        ledger.commit(lease.ticket, [done(0), done(1)])
        ledger.finish_shard(lease.ticket)
        assert ledger.last_outage(job.id) is None

    def test_workers_and_clock(self, ledger: Ledger) -> None:
        before = ledger.now()
        ledger.register_worker(worker("a"))
        (row,) = ledger.workers()
        assert row.info == worker("a")
        assert before - 0.01 <= row.started_at <= ledger.now() + 0.01

    def test_a_night_runs_once(self, ledger: Ledger) -> None:
        assert ledger.schedule_ran("news", "2026-11-02")
        assert not ledger.schedule_ran("news", "2026-11-02")
        assert ledger.schedule_ran("news", "2026-11-01")
        assert ledger.schedule_history("news") == ["2026-11-01", "2026-11-02"]
        ledger.schedule_forget("news", "2026-11-02")
        assert ledger.schedule_ran("news", "2026-11-02")
