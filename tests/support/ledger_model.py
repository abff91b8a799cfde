"""A pure model of jobs, shards and items, and a machine that plays random moves on it and on a real
ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jobs.ledger import Ledger
from jobs.ledger.lifecycle import (
    after_crash,
    after_failure,
    attempts_after_bisection,
    final_state,
)
from jobs.ledger.records import (
    OUTAGES,
    CommitResult,
    Failed,
    ItemState,
    JobState,
    Lease,
    Outcome,
    ShardState,
    Ticket,
)
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import LEASE_SECONDS, assert_exact, done, execute, failed, rows, submit, wake

WORKING = {JobState.READY, JobState.RUNNING, JobState.PAUSED}
FAILURES = [ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_OOM, ErrorCode.QA_WER]


@dataclass
class ModelItem:
    state: ItemState = ItemState.PENDING
    attempts: int = 0
    code: ErrorCode | None = None
    #: Epochs under which a failure was told.
    told: set[int] = field(default_factory=set)


@dataclass
class ModelShard:
    items: list[int]
    state: ShardState = ShardState.READY
    epoch: int = 0
    attempts: int = 0
    progress: bool = False
    told: bool = False


@dataclass
class ModelJob:
    max_attempts: int
    items: list[ModelItem]
    shards: list[ModelShard]
    state: JobState = JobState.READY
    started: bool = False

    def open_items(self, shard: ModelShard) -> list[int]:
        return [index for index in shard.items if self.items[index].state is ItemState.PENDING]

    def end_item(self, shard: ModelShard, index: int, state: ItemState, code: ErrorCode | None) -> None:
        item = self.items[index]
        item.state, item.code = state, code
        shard.progress = True

    def complete_if_over(self) -> None:
        if all(
            shard.state in {ShardState.DONE, ShardState.DEAD, ShardState.CANCELLED} for shard in self.shards
        ):
            broken = sum(item.state in {ItemState.FAILED, ItemState.DEAD} for item in self.items)
            self.state = final_state(broken, 0)

    def crash(self, shard: ModelShard) -> None:
        still_open = self.open_items(shard)
        verdict, shard.attempts = after_crash(
            len(still_open), shard.attempts, self.max_attempts, shard.progress
        )
        if verdict == "retry":
            shard.state = ShardState.READY
        elif verdict == "close":
            shard.state = ShardState.DONE
        elif verdict == "mark_dead":
            shard.state = ShardState.DEAD
            self.items[still_open[0]].attempts += 1
            self.end_item(shard, still_open[0], ItemState.DEAD, ErrorCode.POISON_WORKER_CRASH)
        else:
            upper = still_open[len(still_open) // 2 :]
            lower = [index for index in still_open if index not in upper]
            shard.items = [index for index in shard.items if index not in upper]
            shard.state, shard.attempts = (
                ShardState.READY,
                attempts_after_bisection(len(lower), self.max_attempts),
            )
            child = ModelShard(
                upper, epoch=shard.epoch, attempts=attempts_after_bisection(len(upper), self.max_attempts)
            )
            self.shards.append(child)
        self.complete_if_over()


class LedgerMachine(RuleBasedStateMachine):
    """Each rule makes one move on the ledger and on the model, and compares the answers."""

    #: Set by the test: an empty ledger.
    ledger: Ledger

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, ModelJob] = {}
        #: Every message ever published and every lease ever given: they come again, late and in any order.
        self.messages: list[Ticket] = []
        self.leases: list[Lease] = []

    def teardown(self) -> None:
        try:
            self._play_to_the_end()
        finally:
            for table in ("artifacts", "item_errors", "attempts", "items", "shards", "jobs"):
                execute(self.ledger, f"DELETE FROM {table}")

    def _shard(self, ticket: Ticket) -> ModelShard:
        return self.jobs[ticket.job_id].shards[ticket.shard_no]

    def _holds(self, lease: Lease) -> bool:
        shard = self._shard(lease.ticket)
        return (
            self.jobs[lease.job.id].state in WORKING
            and shard.state is ShardState.LEASED
            and shard.epoch == lease.epoch
        )

    def _pick_job(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.jobs)))

    def _pick_lease(self, data: st.DataObject) -> Lease:
        # The latest leases more often than stale ones.
        return data.draw(st.sampled_from(self.leases[-3:] + self.leases))

    @precondition(lambda self: len(self.jobs) < 2)
    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), max_attempts=st.integers(1, 3))
    def submit(self, sizes: list[int], max_attempts: int) -> None:
        job = submit(self.ledger, sizes, max_attempts=max_attempts)
        starts = [sum(sizes[:no]) for no in range(len(sizes))]
        shards = [
            ModelShard(list(range(start, start + size))) for start, size in zip(starts, sizes, strict=True)
        ]
        self.jobs[job.id] = ModelJob(max_attempts, [ModelItem() for _ in range(sum(sizes))], shards)

    @rule(limit=st.integers(1, 4))
    def dispatch(self, limit: int) -> None:
        wake(self.ledger)
        tickets = self.ledger.take_ready(limit)
        ready = {
            Ticket(job_id, no, shard.epoch)
            for job_id, job in self.jobs.items()
            if job.state in {JobState.READY, JobState.RUNNING}
            for no, shard in enumerate(job.shards)
            if shard.state is ShardState.READY
        }
        assert set(tickets) <= ready
        assert len(tickets) == min(limit, len(ready))
        for ticket in tickets:
            self._shard(ticket).state = ShardState.QUEUED
        self.messages += tickets

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """A message arrives: new, late, or once more."""
        self._claim(data.draw(st.sampled_from(self.messages[-3:] + self.messages)))

    def _claim(self, ticket: Ticket) -> None:
        job, shard = self.jobs[ticket.job_id], self._shard(ticket)
        valid = (
            job.state in {JobState.READY, JobState.RUNNING}
            and shard.state is ShardState.QUEUED
            and shard.epoch == ticket.epoch
        )
        lease = self.ledger.claim(ticket, "w1", LEASE_SECONDS)
        assert (lease is not None) == valid
        if lease is None:
            return
        shard.state, shard.epoch, shard.progress, shard.told = (
            ShardState.LEASED,
            ticket.epoch + 1,
            False,
            False,
        )
        job.state, job.started = JobState.RUNNING, True
        assert lease.epoch == shard.epoch
        assert {index: attempts for index, (_, attempts) in lease.open_items.items()} == {
            index: job.items[index].attempts for index in job.open_items(shard)
        }
        self.leases.append(lease)

    @precondition(lambda self: any(map(self._holds, self.leases)))
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        """A lease runs out, or is given back, and another worker gets the shard; what the first one still
        does is refused."""
        old = data.draw(st.sampled_from([lease for lease in self.leases if self._holds(lease)]))
        job, shard = self.jobs[old.job.id], self._shard(old.ticket)
        execute(
            self.ledger,
            "UPDATE shards SET lease_until = 1 WHERE job_id = :job AND no = :no",
            job=old.job.id,
            no=old.shard_no,
        )
        self.ledger.reconcile()
        job.crash(shard)
        self.dispatch(20)
        self._claim(Ticket(old.job.id, old.shard_no, old.epoch))
        everything = [done(index) for index in range(len(job.items))]
        assert self.ledger.commit(old.ticket, everything) == CommitResult(0, lost=True)
        assert not self.ledger.finish_shard(old.ticket)
        assert not self.ledger.release(old.ticket, "drain")
        assert not self.ledger.fail_shard(old.ticket, ErrorCode.STORE_MISSING, "It failed.")
        assert self.ledger.heartbeat("w1", [old.ticket], LEASE_SECONDS) == {old.ticket}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self._pick_lease(data)
        job, shard = self.jobs[lease.job.id], self._shard(lease.ticket)
        indexes = data.draw(st.lists(st.integers(0, len(job.items) - 1), max_size=4))
        outcomes: list[Outcome] = [
            done(index) if data.draw(st.booleans()) else failed(index, data.draw(st.sampled_from(FAILURES)))
            for index in indexes
        ]
        result = self.ledger.commit(lease.ticket, outcomes)
        if not self._holds(lease):
            assert result == CommitResult(0, lost=True)
            return
        first = {outcome.index: outcome for outcome in reversed(outcomes)}
        assert result == CommitResult(sum(self._apply(job, shard, outcome) for outcome in first.values()))

    def _apply(self, job: ModelJob, shard: ModelShard, outcome: Outcome) -> bool:
        item = job.items[outcome.index]
        if outcome.index not in shard.items or item.state is not ItemState.PENDING:
            return False
        if not isinstance(outcome, Failed):
            item.attempts += 1
            job.end_item(shard, outcome.index, ItemState.DONE, None)
            return True
        again = shard.epoch in item.told
        tries = item.attempts + (not again)
        state = after_failure(tries, job.max_attempts, outcome.code)
        if state is ItemState.PENDING and again:
            return False
        item.attempts, item.code, shard.told = tries, outcome.code, True
        item.told.add(shard.epoch)
        if state is not ItemState.PENDING:
            job.end_item(shard, outcome.index, state, outcome.code)
        return True

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lease = self._pick_lease(data)
        job, shard, held = self.jobs[lease.job.id], self._shard(lease.ticket), self._holds(lease)
        assert self.ledger.finish_shard(lease.ticket) == held
        if not held:
            return
        if not job.open_items(shard):
            shard.state, shard.attempts = ShardState.DONE, 0
            job.complete_if_over()
        elif shard.progress or shard.told:
            shard.state, shard.attempts = ShardState.READY, 0
        else:
            job.crash(shard)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self._pick_lease(data)
        job, shard, held = self.jobs[lease.job.id], self._shard(lease.ticket), self._holds(lease)
        assert self.ledger.release(lease.ticket, "drain") == held
        if held:
            shard.attempts = 0 if shard.progress else shard.attempts
            shard.state = ShardState.READY if job.open_items(shard) else ShardState.DONE
            job.complete_if_over()

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        code=st.sampled_from([ErrorCode.STORE_UNREACHABLE, ErrorCode.SYNTH_ENGINE, ErrorCode.STORE_MISSING]),
    )
    def fail(self, data: st.DataObject, code: ErrorCode) -> None:
        lease = self._pick_lease(data)
        job, shard, held = self.jobs[lease.job.id], self._shard(lease.ticket), self._holds(lease)
        assert self.ledger.fail_shard(lease.ticket, code, "It failed.") == held
        if not held:
            return
        if code in OUTAGES:
            shard.attempts = 0 if shard.progress else shard.attempts
            shard.state = ShardState.READY
        elif code.retryable:
            job.crash(shard)
        else:
            for index in job.open_items(shard):
                job.items[index].attempts += 1
                job.end_item(shard, index, ItemState.FAILED, code)
            shard.state = ShardState.DONE
            job.complete_if_over()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        leases = data.draw(
            st.lists(st.sampled_from(self.leases), unique_by=lambda lease: lease.ticket, max_size=4)
        )
        lost = self.ledger.heartbeat("w1", [lease.ticket for lease in leases], LEASE_SECONDS)
        assert lost == {lease.ticket for lease in leases if not self._holds(lease)}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A worker dies: all its lease does from here on is to run out."""
        lease = self._pick_lease(data)
        held = self._holds(lease)
        if held:
            values = {"job": lease.job.id, "no": lease.shard_no}
            execute(
                self.ledger, "UPDATE shards SET lease_until = 1 WHERE job_id = :job AND no = :no", **values
            )
        assert self.ledger.reconcile().expired_leases == held
        if held:
            self.jobs[lease.job.id].crash(self._shard(lease.ticket))

    @rule()
    def lose_all_messages(self) -> None:
        execute(self.ledger, "UPDATE shards SET enqueued_at = 1 WHERE state = 'queued'")
        queued = [
            shard for job in self.jobs.values() for shard in job.shards if shard.state is ShardState.QUEUED
        ]
        assert self.ledger.reconcile().lost_messages == len(queued)
        for shard in queued:
            shard.state = ShardState.READY

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        job_id = self._pick_job(data)
        job = self.jobs[job_id]
        if self._allowed(job.state in WORKING, lambda: self.ledger.pause(job_id)):
            job.state = JobState.PAUSED
            for shard in job.shards:
                shard.state = ShardState.READY if shard.state is ShardState.QUEUED else shard.state

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        job_id = self._pick_job(data)
        job = self.jobs[job_id]
        if (
            self._allowed(job.state in WORKING, lambda: self.ledger.resume(job_id))
            and job.state is JobState.PAUSED
        ):
            job.state = JobState.RUNNING if job.started else JobState.READY

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), certainty=st.integers(0, 3))
    def cancel(self, data: st.DataObject, certainty: int) -> None:
        if certainty:
            return
        job_id = self._pick_job(data)
        job = self.jobs[job_id]
        if not self._allowed(job.state in WORKING | {JobState.CANCELLED}, lambda: self.ledger.cancel(job_id)):
            return
        job.state = JobState.CANCELLED
        for shard in job.shards:
            if shard.state in {ShardState.READY, ShardState.QUEUED, ShardState.LEASED}:
                shard.state = ShardState.CANCELLED
        for item in job.items:
            item.state = ItemState.SKIPPED if item.state is ItemState.PENDING else item.state

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        codes=st.none() | st.lists(st.sampled_from([*FAILURES, ErrorCode.POISON_WORKER_CRASH]), max_size=2),
    )
    def retry(self, data: st.DataObject, codes: list[ErrorCode] | None) -> None:
        job_id = self._pick_job(data)
        job = self.jobs[job_id]
        opened: list[int] = []
        if not self._allowed(
            job.state is not JobState.CANCELLED, lambda: opened.append(self.ledger.retry(job_id, codes))
        ):
            return
        broken = [
            index
            for index, item in enumerate(job.items)
            if item.state in {ItemState.FAILED, ItemState.DEAD} and (codes is None or item.code in codes)
        ]
        assert opened == [len(broken)]
        for index in broken:
            job.items[index] = ModelItem(told=job.items[index].told)
        for shard in job.shards:
            reopened = set(broken) & set(shard.items)
            if reopened and shard.state in {ShardState.DONE, ShardState.DEAD}:
                shard.state, shard.attempts = ShardState.READY, 0
        if broken and job.state.final:
            job.state = JobState.RUNNING

    def _allowed(self, allowed: bool, call: object) -> bool:
        assert callable(call)
        if allowed:
            call()
            return True
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.code is ErrorCode.LEDGER_STATE
        return False

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        for job_id, job in self.jobs.items():
            status = self.ledger.status(job_id)
            assert status.job.state is job.state
            assert status.shards == Counter(shard.state for shard in job.shards)
            states = Counter(item.state for item in job.items)
            counts = status.items
            assert (counts.total, counts.done, counts.skipped) == (
                len(job.items),
                states[ItemState.DONE],
                states[ItemState.SKIPPED],
            )
            assert counts.failed == states[ItemState.FAILED] + states[ItemState.DEAD]
            assert status.job.total_shards == len(job.shards)
            kept = [(item.state, item.attempts, item.error_code) for item in self.ledger.items(job_id)]
            assert kept == [
                (item.state, item.attempts, None if item.state is ItemState.DONE else item.code)
                for item in job.items
            ]
            numbers = "SELECT no, state, epoch, attempts FROM shards WHERE job_id = :job ORDER BY no"
            assert rows(self.ledger, numbers, job=job_id) == [
                (no, shard.state.value, shard.epoch, shard.attempts) for no, shard in enumerate(job.shards)
            ]
            assert_exact(self.ledger, job_id)

    def _play_to_the_end(self) -> None:
        """Whatever happened, with workers that work every job ends, and every item of it."""
        for job_id, job in self.jobs.items():
            if job.state is JobState.PAUSED:
                self.ledger.resume(job_id)
        execute(self.ledger, "UPDATE shards SET lease_until = 1 WHERE state = 'leased'")
        execute(self.ledger, "UPDATE shards SET enqueued_at = 1 WHERE state = 'queued'")
        self.ledger.reconcile()
        wake(self.ledger)
        while tickets := self.ledger.take_ready(10):
            for ticket in tickets:
                lease = self.ledger.claim(ticket, "w2", LEASE_SECONDS)
                assert lease is not None
                self.ledger.commit(lease.ticket, [done(index) for index in lease.open_items])
                assert self.ledger.finish_shard(lease.ticket)
        for job_id in self.jobs:
            status = self.ledger.status(job_id)
            assert status.job.state.final
            assert status.items.pending == 0
            assert_exact(self.ledger, job_id)
