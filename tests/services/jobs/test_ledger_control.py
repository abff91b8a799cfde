"""What people do to jobs and see of them in the ledger, on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.ledger import Ledger
from jobs.ledger.records import CommitResult, ItemState, JobSpec, JobState, ShardState, WorkerInfo
from jobs.ledger.status import newest_jobs, status_and_errors, statuses_of
from jobs.ledger.transaction import read_with_driver
from jobs.status import elapsed_seconds, eta_seconds, items_per_second
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import (
    LEASE_SECONDS,
    assert_exact,
    done,
    execute,
    expire,
    failed,
    lease_next,
    new_job,
    shards_of,
    submit,
    worker,
)


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
        assert [status.job.id for status in ledger.read(lambda sql: statuses_of(sql, newest_jobs(sql)))][
            :2
        ] == ["zebra_1", second.id]

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
        assert [ticket.job_id == mine.id for ticket in ledger.take_ready(ledger.free_window())] == [
            False,
            False,
            True,
            True,
        ]

    def test_a_job_says_what_it_waits_for(self, ledger: Ledger) -> None:
        job = submit(ledger, (2, 2))
        assert ledger.status(job.id).outage is None
        assert ledger.fail_shard(lease_next(ledger).ticket, ErrorCode.STORE_FULL, "No space is left.")
        outage = ledger.status(job.id).outage
        assert outage is not None
        assert (outage.code, outage.message) == (ErrorCode.STORE_FULL, "No space is left.")
        ledger.check_writable(job.id)
        assert [ticket.shard_no for ticket in ledger.take_ready(9)] == [1], "the other one waits"
        assert ledger.wake(job.id) == 1
        lease = lease_next(ledger)
        assert ledger.status(job.id).outage == outage, "until a lease ends otherwise"
        ledger.commit(lease.ticket, [done(0), done(1)])
        ledger.finish_shard(lease.ticket)
        assert ledger.status(job.id).outage is None

    def test_workers_and_clock(self, ledger: Ledger) -> None:
        before = ledger.now()
        ledger.register_worker(worker("a"))
        (row,) = ledger.worker_statuses()
        assert WorkerInfo(**{name: getattr(row, name) for name in WorkerInfo.__dataclass_fields__}) == worker(
            "a"
        )
        assert before - 0.01 <= row.started_at <= ledger.now() + 0.01

    def test_a_night_runs_once(self, ledger: Ledger) -> None:
        assert ledger.schedule_ran("news", "2026-11-02")
        assert not ledger.schedule_ran("news", "2026-11-02")
        assert ledger.schedule_ran("news", "2026-11-01")
        assert ledger.schedule_history("news") == ["2026-11-01", "2026-11-02"]
        ledger.schedule_forget("news", "2026-11-02")
        assert ledger.schedule_ran("news", "2026-11-02")


class TestBusy:
    """Rates count the time in which shards were leased."""

    def test_the_gap_before_a_retry_is_left_out(self, ledger: Ledger, ledger_url: str) -> None:
        job = submit(ledger, (1, 1))
        for outcome in (done(0), failed(1)):
            lease = lease_next(ledger)
            ledger.commit(lease.ticket, [outcome])
            ledger.finish_shard(lease.ticket)
        # It took ten seconds, yesterday.
        execute(ledger, "UPDATE attempts SET started_at = started_at - 86400, ended_at = ended_at - 86390")
        execute(ledger, "UPDATE jobs SET started_at = started_at - 86400, finished_at = finished_at - 86390")
        ended = ledger.status(job.id)
        assert items_per_second(ended) == pytest.approx(0.2, rel=0.1)
        assert ledger.retry(job.id, None) == 1
        reopened = ledger.status(job.id)
        assert elapsed_seconds(reopened) > 86000
        assert items_per_second(reopened) == pytest.approx(0.1, rel=0.1)
        assert eta_seconds(reopened) == pytest.approx(10, rel=0.1)
        lease_next(ledger)
        running = ledger.status(job.id)
        assert 9 < running.busy_seconds < 60
        assert ledger.busy_spans([job.id])[job.id] == [
            pytest.approx((running.now - 86400, running.now - 86390), abs=30),
            pytest.approx((running.now, running.now), abs=30),
        ]
        seen = read_with_driver(ledger_url, lambda reader: status_and_errors(reader, job.id))
        assert seen is not None
        assert seen[0].busy_seconds == pytest.approx(running.busy_seconds, abs=30)
        assert seen[0].workers == running.workers == 0

    def test_short_gaps_between_shards_are_work_and_a_lease_counts_no_longer_than_it_held(
        self, ledger: Ledger
    ) -> None:
        job = submit(ledger, (1, 1))
        first = lease_next(ledger)
        ledger.commit(first.ticket, [done(0)])
        ledger.finish_shard(first.ticket)
        lease = lease_next(ledger)
        execute(ledger, "UPDATE attempts SET started_at = 1000, ended_at = 1010 WHERE shard_no = 0")
        execute(ledger, "UPDATE attempts SET started_at = 1015 WHERE shard_no = 1")
        execute(ledger, "UPDATE shards SET heartbeat_at = 1020, lease_until = 1030 WHERE no = 1")
        assert ledger.busy_spans([job.id])[job.id] == [(1000, 1030)]
        # Its worker is dead, which is found much later.
        assert ledger.reconcile().expired_leases == 1
        assert ledger.busy_spans([job.id])[job.id] == [(1000, 1030)]
        assert not ledger.finish_shard(lease.ticket)
