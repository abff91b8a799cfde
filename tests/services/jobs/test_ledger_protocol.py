"""The protocol of the ledger, from ingest to the end of a shard, the same on SQLite and on PostgreSQL."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from jobs.ledger import Ledger
from jobs.ledger.control import DuplicateExamples
from jobs.ledger.records import CommitResult, ItemState, JobState, NewShard, RejectedLine, Ticket
from pipelines.errors import ErrorCode, InputError, ServiceError
from tests.support.ledger_kit import (
    LEASE_SECONDS,
    assert_exact,
    done,
    execute,
    expire,
    failed,
    lease_next,
    new_job,
    outcomes_of_attempts,
    rows,
    shards_of,
    states,
    submit,
    wake,
    worker,
)


class TestIngest:
    def test_the_same_key_is_the_same_job(self, ledger: Ledger) -> None:
        new = new_job(name="night", labels={"team": "voice"}, error_budget=0.5, max_in_flight=2)
        job = ledger.begin_job(new)
        assert ledger.begin_job(new) == job
        assert (job.state, job.name, job.labels, job.spec) == (
            JobState.INGESTING,
            "night",
            {"team": "voice"},
            new.spec,
        )
        ledger.seal_job(job.id)
        assert ledger.begin_job(new).id == job.id

    def test_staged_shards_wait_until_the_job_is_sealed(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(
            job.id,
            shards_of((2, 1)),
            [RejectedLine(2, ErrorCode.INPUT_BAD_JSON, "No JSON.\x00", "x\x00y")],
            4,
        )
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
        assert ledger.stage(job.id, *batch)
        assert not ledger.stage(job.id, *batch)
        assert ledger.staged_shards(job.id) == (1, 2, 3)
        assert ledger.job(job.id).rejected_lines == 1

    def test_duplicates_are_named_and_nothing_of_the_batch_is_written(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, [NewShard(0, ((0, "a"), (1, "b")), "k", "s", 1)], [], 2)
        with pytest.raises(DuplicateExamples) as caught:
            ledger.stage(
                job.id, [NewShard(1, ((2, "c"), (3, "b"), (4, "d"), (5, "d")), "k1", "s1", 1)], [], 6
            )
        assert caught.value.example_ids == ("b", "d")
        assert caught.value.code is ErrorCode.INPUT_DUPLICATE_ID
        assert ledger.staged_shards(job.id) == (1, 2, 2)

    def test_what_another_process_staged_is_no_duplicate(self, ledger: Ledger, ledger_url: str) -> None:
        """Two processes meet a batch that repeats an example; one stages the rest of it before the other
        has looked which it is."""
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, [NewShard(0, ((0, "a"), (1, "b")), "k", "s", 1)], [], 2)
        rest = [NewShard(1, ((2, "c"), (3, "d")), "k1", "s1", 1)]
        rejected = [RejectedLine(4, ErrorCode.INPUT_DUPLICATE_ID, "m", "b")]
        overtaken: list[bool] = []

        class Overtaken(Ledger):
            def read(self, *arguments: Any) -> Any:
                if not overtaken:
                    overtaken.append(ledger.stage(job.id, rest, rejected, 5))
                return super().read(*arguments)

        with closing(Overtaken(ledger_url)) as late:
            assert not late.stage(job.id, [NewShard(1, ((2, "c"), (3, "b"), (4, "d")), "k1", "s1", 1)], [], 5)
        assert overtaken == [True]
        assert ledger.staged_shards(job.id) == (2, 4, 5)
        assert ledger.job(job.id).rejected_lines == 1

    def test_example_ids_are_data(self, ledger: Ledger) -> None:
        names = [
            "../../x",
            "a\tb",
            "line\nbreak",
            "back\\slash",
            "'; DROP TABLE jobs; --",
            "\\N",
            "\\.",
            "ü" * 300,
            "日本",
            "",
        ]
        job = ledger.begin_job(new_job())
        ledger.stage(job.id, [NewShard(0, tuple(enumerate(names)), "k", "s", 1)], [], len(names))
        assert [item.example_id for item in ledger.items(job.id)] == names
        with pytest.raises(InputError):
            ledger.stage(job.id, [NewShard(1, ((10, "nul\x00"),), "k1", "s1", 1)], [], 11)

    def test_turns_of_a_dialogue_are_items_that_share_its_id(self, ledger: Ledger) -> None:
        job = ledger.begin_job(new_job())
        two = [
            NewShard(0, ((0, "a"), (1, "a"), (2, "a")), "k", "s", 1, {1: 1, 2: 2}),
            NewShard(1, ((3, "b"), (4, "c"), (5, "c")), "k1", "s1", 1, {5: 1}),
        ]
        assert ledger.stage(job.id, two, [], 3)
        assert [(row.index, row.shard_no, row.example_id, row.turn) for row in ledger.items(job.id)] == [
            (0, 0, "a", 0),
            (1, 0, "a", 1),
            (2, 0, "a", 2),
            (3, 1, "b", 0),
            (4, 1, "c", 0),
            (5, 1, "c", 1),
        ]
        with pytest.raises(DuplicateExamples) as caught:
            ledger.stage(job.id, [NewShard(2, ((6, "c"), (7, "c")), "k2", "s2", 1, {7: 1})], [], 4)
        assert caught.value.example_ids == ("c",)
        with pytest.raises(ServiceError) as refused:
            ledger.stage(job.id, [NewShard(2, ((5, "d"),), "k2", "s2", 1)], [], 4)
        assert refused.value.code is ErrorCode.LEDGER_STATE
        assert ledger.staged_shards(job.id) == (2, 6, 3)

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
        for call in (
            lambda: ledger.stage(job.id, shards_of((1,), 9), [], 9),
            lambda: ledger.abandon_job(job.id),
        ):
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

    def test_shares_are_of_items_and_not_of_shards(self, ledger: Ledger) -> None:
        small = submit(ledger, (10,) * 20)
        large = submit(ledger, (50, 50))
        names = {small.id: "small", large.id: "large"}
        taken = [names[ticket.job_id] for ticket in ledger.take_ready(12)]
        assert taken == ["small", "large", *["small"] * 5, "large", *["small"] * 4]

    def test_a_window_full_of_shards_does_not_keep_a_job_of_a_higher_priority_waiting(
        self, ledger: Ledger
    ) -> None:
        ledger.register_worker(worker("a", slots=2))
        low = submit(ledger, (1,) * 9)
        assert len(ledger.take_ready(ledger.free_window())) == 4
        assert ledger.free_window() == 0
        high = submit(ledger, (1,) * 3, priority=5)
        assert [ticket.job_id for ticket in ledger.take_ready(ledger.free_window())] == [high.id] * 3, (
            "and no more of the other one"
        )
        assert ledger.free_window() == 0
        submit(ledger, (1,) * 9, priority=5)
        assert ledger.free_window() == 1
        assert low.id not in [ticket.job_id for ticket in ledger.take_ready(1)]

    def test_the_speed_of_a_model_is_that_of_its_newest_jobs(self, ledger: Ledger) -> None:
        assert ledger.measured_rtf("fake") is None
        submit(ledger, (1,))
        execute(ledger, "UPDATE shards SET state = 'done', engine_ms = 1000, audio_ms = 599000")
        assert ledger.measured_rtf("fake") is None, "too little audio"
        submit(ledger, (1,))
        execute(ledger, "UPDATE shards SET state = 'done', engine_ms = 1000, audio_ms = 400000")
        assert ledger.measured_rtf("fake") == pytest.approx(2 / 800)
        assert ledger.measured_rtf("other") is None
        for _ in range(20):
            submit(ledger, (1,))
        execute(
            ledger,
            "UPDATE shards SET state = 'done', engine_ms = 500, audio_ms = 100000 WHERE state = 'ready'",
        )
        assert ledger.measured_rtf("fake") == pytest.approx(5 / 1000)

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
        assert (lease.epoch, lease.open_items, lease.input_key) == (
            1,
            {0: ("e0", 0), 1: ("e1", 0)},
            "input/0",
        )
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

    def test_a_heartbeat_of_a_job_that_is_being_cancelled_is_lost(self, ledger: Ledger) -> None:
        submit(ledger, (1,))
        lease = lease_next(ledger)
        execute(ledger, "UPDATE jobs SET state = 'cancelling'")
        assert ledger.heartbeat("w1", [lease.ticket], LEASE_SECONDS) == {lease.ticket}

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
        assert states(ledger, job.id) == [
            ItemState.DONE,
            ItemState.FAILED,
            ItemState.PENDING,
            ItemState.PENDING,
        ]
        assert_exact(ledger, job.id)
        status = ledger.status(job.id)
        assert (status.items.total, status.items.done, status.items.failed, status.items.pending) == (
            4,
            1,
            1,
            2,
        )
        assert (status.audio_ms, status.bytes_out, status.engine_ms) == (1500, 100, 20 + 7 + 7)
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
        assert ledger.status(job.id).engine_ms == 2 * 7
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
        assert rows(ledger, "SELECT manifest_key FROM shards ORDER BY no") == [
            ("manifest/0",),
            ("manifest/1",),
        ]
        assert [(audio.index, audio.key) for audio in ledger.shard_audio(job.id, 1)] == [
            (1, done(1).artifacts[0].key)
        ]

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

    def test_a_shard_that_one_worker_cannot_run_goes_back_while_another_may(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1), max_attempts=1)
        for worker_id in ("w1", "w2"):
            ledger.register_worker(worker(worker_id))
        first = lease_next(ledger, "w1")
        assert ledger.refuse(first.ticket, ErrorCode.MODEL_BAD_CHECKPOINT, "A file is cut.")
        assert not ledger.refuse(first.ticket, ErrorCode.MODEL_BAD_CHECKPOINT, "Again.")
        assert (ledger.status(job.id).workers, ledger.others_may_run(job.id, "w1")) == (1, True)
        second = lease_next(ledger, "w2")
        assert not ledger.refuse(second.ticket, ErrorCode.MODEL_BAD_CHECKPOINT, "A file is cut."), (
            "w1 cannot either"
        )
        assert ledger.fail_shard(second.ticket, ErrorCode.MODEL_BAD_CHECKPOINT, "A file is cut.")
        assert {outcome for _, _, outcome, *_ in outcomes_of_attempts(ledger, job.id)} == {
            "refused",
            "failed",
        }
        assert sorted(states(ledger, job.id)) == [ItemState.FAILED, ItemState.PENDING]
        assert_exact(ledger, job.id)

    @pytest.mark.parametrize("change", ["state = 'draining'", "model = 'other'", "heartbeat_at = 1"])
    def test_a_worker_that_takes_no_such_shard_is_none_that_may_run_it(
        self, ledger: Ledger, change: str
    ) -> None:
        submit(ledger, (1,))
        for worker_id in ("w1", "w2"):
            ledger.register_worker(worker(worker_id))
        execute(ledger, f"UPDATE workers SET {change} WHERE id = 'w2'")
        assert not ledger.refuse(lease_next(ledger, "w1").ticket, ErrorCode.CONFIG_INVALID, "No GPU.")

    def test_a_job_that_others_made_items_of_waits_for_them(self, ledger: Ledger) -> None:
        job = submit(ledger, (1, 1))
        ledger.register_worker(worker("w2"))
        made = lease_next(ledger, "w1")
        ledger.commit(made.ticket, [done(made.shard_no)])
        ledger.finish_shard(made.ticket)
        assert ledger.refuse(lease_next(ledger, "w2").ticket, ErrorCode.CONFIG_INVALID, "No GPU.")
        assert ledger.status(job.id).workers == 0
        again = lease_next(ledger, "w2")
        assert ledger.status(job.id).workers == 1, "it has the shard again, and did not refuse it"
        ledger.commit(again.ticket, [done(again.shard_no)])
        assert ledger.finish_shard(again.ticket)
        assert ledger.job(job.id).state is JobState.COMPLETED
