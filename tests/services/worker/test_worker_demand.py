"""A worker takes as many shards as keep its engine full, whatever their sizes, and leaves the others to
other workers."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from jobs.dispatch import KEY_PREFIX, QUEUE, RUN_SHARD, message_priority
from jobs.ingest import SubmitOptions
from jobs.ledger.records import ItemState, Job, JobState, ShardState
from jobs.settings import load_settings
from tests.support.ledger_kit import rows
from tests.support.worker_process import Site, stop
from worker import celery_app
from worker.celery_app import ReconnectingConsumer, create_app


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    # No message counts as lost because it waits for a worker that can use it.
    with Site(tmp_path, valkey_url, NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS="600") as site:
        yield site


def leased(site: Site) -> dict[str, int]:
    """Shards in flight of each worker."""
    return dict(
        Counter(
            worker for (worker,) in rows(site.ledger, "SELECT worker_id FROM shards WHERE state = 'leased'")
        )
    )


def in_flight(site: Site, job: Job) -> int:
    return site.status(job).shards.get(ShardState.LEASED, 0)


@pytest.mark.parametrize(("items", "shard"), [(300, 3), (10_100, 5000)])
def test_an_engine_of_many_slots_stays_full(tmp_path: Path, valkey_url: str, items: int, shard: int) -> None:
    with Site(
        tmp_path, valkey_url, NIGHTJAR_TIMES__SHARD_ITEMS=str(shard), NIGHTJAR_TIMES__SHARD_SECONDS="1000000"
    ) as site:
        job = site.submit([f"text {n}" for n in range(items)])
        # Until the tail, this engine ends no item while a slot is empty.
        worker = site.worker(engine={"seconds": 0.001, "slots": 64, "patient_until": items})
        assert site.wait_until_final(job).items.done == items
        assert stop(worker) == 0


def test_many_small_jobs_fill_the_engine_together(tmp_path: Path, valkey_url: str) -> None:
    sizes = [1 + 7 * n % 13 for n in range(30)]
    with Site(tmp_path, valkey_url) as site:
        jobs = [site.submit([f"text {n} of job {no}" for n in range(size)]) for no, size in enumerate(sizes)]
        site.worker(engine={"seconds": 0.001, "slots": 128, "waiting_room": 128, "patient_until": sum(sizes)})
        assert [site.wait_until_final(job).items.done for job in jobs] == sizes


def test_a_full_worker_leaves_shards_and_messages_to_others(site: Site, valkey_url: str) -> None:
    job = site.submit([site.held(f"text {n}") for n in range(160)])
    first = site.worker(engine={"slots": 16})
    # Shards of sixteen items: two cover the slots and the reserve.
    site.wait_for(lambda: in_flight(site, job) == 2 and site.queue_depth() >= 2)
    broker = redis.Redis.from_url(valkey_url)
    assert broker.hlen(KEY_PREFIX + "unacked") == 2, "no message is kept from other workers"
    second = site.worker(engine={"slots": 48})
    site.wait_for(lambda: sorted(leased(site).values()) == [2, 6])
    site.let_go()
    assert site.wait_until_final(job).items.done == 160
    assert (stop(first), stop(second)) == (0, 0)


def test_a_job_of_a_higher_priority_has_the_next_shard(tmp_path: Path, valkey_url: str) -> None:
    with Site(
        tmp_path, valkey_url, NIGHTJAR_TIMES__SHARD_ITEMS="100", NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS="600"
    ) as site:
        low = site.submit([site.held(f"text {n}") for n in range(500)])
        # With a model of its own the engine is open before the first claim.
        site.worker("--model", "fake", engine={"slots": 16})
        site.wait_for(lambda: in_flight(site, low) == 1 and site.status(low).shards.get(ShardState.QUEUED))
        high = site.submit([f"text {n}" for n in range(20)], options=SubmitOptions(priority=5))
        # Its message is in the broker's list of its priority, and the worker has enough to do.
        broker = redis.Redis.from_url(valkey_url)
        site.wait_for(lambda: broker.llen(f"{KEY_PREFIX}{QUEUE}\x06\x16{message_priority(5)}") == 1)
        assert in_flight(site, low) == 1
        site.let_go()
        assert site.wait_until_final(high).items.done == 20
        site.wait_until_final(low)
        claims = [job for (job,) in rows(site.ledger, "SELECT job_id FROM attempts ORDER BY started_at")]
        assert claims[:2] == [low.id, high.id]


def twenty_shards(site: Site) -> Job:
    """A job with twenty shards in flight; most of their feeders wait for room in the engine."""
    job = site.submit([site.held(f"text {n}") for n in range(80)])
    site.wait_for(lambda: in_flight(site, job) == 20)
    return job


CROWDED: dict[str, float] = {"slots": 20, "waiting_room": 1}


@pytest.fixture
def pairs(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    """Shards of two items, and a worker that drains at once."""
    with Site(
        tmp_path, valkey_url, NIGHTJAR_TIMES__SHARD_ITEMS="2", SPEECH_WORKER__DRAIN_SECONDS="0.5"
    ) as site:
        yield site


def test_a_drain_gives_twenty_shards_back(pairs: Site) -> None:
    worker = pairs.worker(engine=CROWDED)
    job = twenty_shards(pairs)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(240) == 0
    status = pairs.status(job)
    assert in_flight(pairs, job) == 0
    assert status.items.done == 0
    assert "Traceback" not in pairs.log_text()


def test_a_cancel_ends_twenty_shards(pairs: Site) -> None:
    pairs.worker(engine=CROWDED)
    job = twenty_shards(pairs)
    pairs.ledger.cancel(job.id)
    pairs.wait_for(lambda: pairs.status(job).job.state is JobState.CANCELLED)
    other = pairs.submit(["text 0"])
    assert pairs.wait_until_final(other).items.done == 1, "the engine is free again"


def test_a_pause_gives_back_what_is_not_in_the_engine(pairs: Site) -> None:
    pairs.worker(engine=CROWDED)
    job = twenty_shards(pairs)
    pairs.ledger.pause(job.id)
    # All others were begun: they are in the engine, or in the call that waits for its room.
    pairs.wait_for(lambda: all(count == 0 for count in [pairs.status(job).shards.get(ShardState.QUEUED, 0)]))
    pairs.let_go()
    pairs.wait_for(lambda: in_flight(pairs, job) == 0)
    done = pairs.status(job).items.done
    assert 21 <= done <= 40
    pairs.ledger.resume(job.id)
    assert pairs.wait_until_final(job).items.done == 80
    assert [row.state for row in pairs.ledger.items(job.id)] == [ItemState.DONE] * 80


class Message:
    """One as kombu hands it over."""

    acknowledged = False
    ack_log_error = reject_log_error = None

    def __init__(self, task: str) -> None:
        self.headers: Any = {"task": task}
        self.requeued = False

    def requeue(self) -> None:
        self.requeued = True


@pytest.mark.parametrize(
    ("task", "hungry", "requeued"),
    [(RUN_SHARD, False, True), (RUN_SHARD, True, False), ("other", False, False)],
)
def test_a_shard_that_came_too_late_goes_back_to_the_queue(
    monkeypatch: pytest.MonkeyPatch, task: str, hungry: bool, requeued: bool
) -> None:
    monkeypatch.setattr(celery_app, "wants_message", lambda: hungry)
    received: list[str] = []
    app = create_app(load_settings(broker_url="redis://127.0.0.1:1/0"))
    one = ReconnectingConsumer(
        lambda request: None, app=app, controller=SimpleNamespace(use_eventloop=False, semaphore=None)
    )
    one.strategies = {task: lambda *_: received.append(task)}
    message = Message(task)
    one.create_task_handler()(message)
    assert message.requeued == requeued
    assert received == ([] if requeued else [task])
