"""Several processes and threads on one ledger: exactly once, without deadlocks."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator

import pytest

from jobs.ledger import Ledger
from jobs.ledger.records import JobState, Lease, Ticket
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import LEASE_SECONDS, assert_exact, done, execute, failed, rows, submit, wake

PROCESSES = 3
THREADS = 2


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """A ledger whose shards hardly wait for their next attempt."""
    ledger = Ledger(ledger_url, backoff_seconds=0.1)
    ledger.migrate()
    yield ledger
    ledger.close()


def work_as_process(url: str, number: int) -> None:
    """A worker: every message is delivered twice, now and then a lease is dropped or expires under its
    feet."""
    ledger = Ledger(url)
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            work(ledger, name, random.Random(name))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(f"w{number}-{thread}",)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    if failures:
        raise failures[0]


def work(ledger: Ledger, name: str, dice: random.Random) -> None:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        tickets = ledger.take_ready(3)
        if not tickets and all(job.state.final for job in ledger.jobs()):
            return
        leases = [
            lease
            for ticket in tickets * 2
            if (lease := ledger.claim(ticket, name, LEASE_SECONDS)) is not None
        ]
        assert len(leases) == len(tickets)
        for lease in leases:
            work_on(ledger, name, lease, dice)
        ledger.reconcile()
        time.sleep(0.001)
    raise AssertionError("The jobs did not end.")


def work_on(ledger: Ledger, name: str, lease: Lease, dice: random.Random) -> None:
    indexes = list(lease.open_items)
    half = len(indexes) // 2
    ledger.commit(lease.ticket, [done(index) for index in indexes[:half]])
    assert ledger.heartbeat(name, [lease.ticket, Ticket(lease.job.id, 0, 999)], LEASE_SECONDS) >= {
        Ticket(lease.job.id, 0, 999)
    }
    fate = dice.random()
    if fate < 0.1:
        assert ledger.release(lease.ticket, "drain")
    elif fate < 0.2:
        execute(
            ledger,
            "UPDATE shards SET lease_until = 1 WHERE job_id = :job AND no = :no",
            job=lease.job.id,
            no=lease.shard_no,
        )
        ledger.reconcile()
        assert ledger.commit(lease.ticket, [done(index) for index in indexes]).lost
        wake(ledger)
    else:
        last = [failed(index) if index % 7 == 0 else done(index) for index in indexes[half:]]
        assert not ledger.commit(lease.ticket, last).lost
        assert ledger.finish_shard(lease.ticket)


@pytest.mark.timeout(600)
def test_processes_that_race_end_every_item_exactly_once(ledger: Ledger, ledger_url: str) -> None:
    jobs = [submit(ledger, (8,) * 12, max_attempts=10), submit(ledger, (5,) * 10, max_attempts=10, weight=2)]
    processes = [
        multiprocessing.get_context("spawn").Process(target=work_as_process, args=(ledger_url, n))
        for n in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    for job in jobs:
        status = ledger.status(job.id)
        assert status.items.pending == 0
        assert status.job.state in {JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS}
        assert_exact(ledger, job.id)
    assert rows(ledger, "SELECT count(*) FROM attempts WHERE ended_at IS NULL") == [(0,)]


@pytest.mark.timeout(600)
def test_people_and_reconcilers_meet_workers_without_deadlock(ledger: Ledger) -> None:
    job = submit(ledger, (4,) * 40, max_attempts=50)
    over = threading.Event()
    failures: list[BaseException] = []

    def guarded(call: object) -> None:
        assert callable(call)
        try:
            while not over.is_set():
                call()
                time.sleep(0.002)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)
            over.set()

    def people() -> None:
        with contextlib.suppress(ServiceError):
            ledger.pause(job.id)
            ledger.resume(job.id)
        ledger.retry(job.id, [ErrorCode.SYNTH_NO_EOS])

    def worker(name: str) -> None:
        for ticket in ledger.take_ready(2):
            lease = ledger.claim(ticket, name, LEASE_SECONDS)
            if lease is not None:
                ledger.heartbeat(name, [lease.ticket], LEASE_SECONDS)
                ledger.commit(
                    lease.ticket, [failed(i) if random.random() < 0.1 else done(i) for i in lease.open_items]
                )
                ledger.finish_shard(lease.ticket)
        if ledger.job(job.id).state is JobState.COMPLETED:
            over.set()

    def reconciler() -> None:
        # A shard that is queued while its job is being paused misses the pause, and its claim is refused: its
        # message is lost.
        ledger.reconcile(queued_timeout_seconds=2)

    calls = [people, reconciler, *(lambda name=f"w{n}": worker(name) for n in range(4))]
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(500)
    over.set()
    assert failures == []
    assert ledger.job(job.id).state is JobState.COMPLETED
    assert ledger.status(job.id).items.done == 160
    assert_exact(ledger, job.id)


def test_one_message_claimed_by_many_at_once(ledger: Ledger) -> None:
    submit(ledger, (2,))
    (ticket,) = ledger.take_ready(1)
    barrier = threading.Barrier(8)
    leases: list[Lease | None] = []

    def run(name: str) -> None:
        barrier.wait()
        leases.append(ledger.claim(ticket, name, LEASE_SECONDS))

    threads = [threading.Thread(target=run, args=(f"w{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([lease for lease in leases if lease is not None]) == 1


def test_the_last_two_shards_finish_at_once_and_complete_the_job(ledger: Ledger) -> None:
    for _ in range(10):
        job = submit(ledger, (1, 1))
        leases = [
            lease
            for ticket in ledger.take_ready(2)
            if (lease := ledger.claim(ticket, "w", LEASE_SECONDS)) is not None
        ]
        for lease in leases:
            ledger.commit(lease.ticket, [done(index) for index in lease.open_items])
        barrier = threading.Barrier(2)

        def run(lease: Lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            ledger.finish_shard(lease.ticket)

        threads = [threading.Thread(target=run, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.job(job.id).state is JobState.COMPLETED
