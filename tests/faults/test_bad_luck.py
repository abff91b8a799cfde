"""One kind of bad luck at a time: lost and repeated messages, stopped and draining workers, wrong clocks, poison, a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.broker import Publisher
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, JobState, Ticket
from pipelines.errors import ErrorCode
from tests.faults.cluster import REPOSITORY, Cluster, assert_exactly_once


def sentences(count: int, suffix: str = "") -> dict[str, str]:
    return {f"item-{number}": f"Sentence number {number}.{suffix}" for number in range(count)}


def wait_and_repeat(cluster: Cluster, job: str, act: Callable[[], object], pause_seconds: float) -> None:
    """Does `act` again and again until the job ends."""
    deadline = time.monotonic() + 120
    while (status := cluster.status(job)) is None or not status.job.state.final:
        assert time.monotonic() < deadline, status
        act()
        time.sleep(pause_seconds)


def test_an_emptied_broker_costs_time_and_no_item(cluster: Cluster) -> None:
    import redis

    texts = sentences(1000)
    job = cluster.submit(texts)
    broker = redis.Redis.from_url(cluster.valkey.url)
    wait_and_repeat(cluster, job, broker.flushall, 1.0)
    assert_exactly_once(cluster, job, texts)


def test_repeated_messages_of_every_epoch_change_nothing(cluster: Cluster) -> None:
    texts = sentences(1000)
    job = cluster.submit(texts)
    shards = cluster.ledger.job(job).total_shards
    tickets = [Ticket(job, shard, epoch) for shard in range(shards) for epoch in range(3)]
    publisher = Publisher(cluster.settings)
    wait_and_repeat(cluster, job, lambda: publisher.publish(tickets), 0.5)
    assert_exactly_once(cluster, job, texts)
    assert cluster.attempts(job) == {"done": shards}


def test_a_worker_that_wakes_after_its_lease_expired_writes_nothing(cluster: Cluster) -> None:
    cluster.signal_worker(1, signal.SIGKILL)
    cluster.workers[1].wait()
    texts = sentences(600)
    job = cluster.submit(texts)
    stop_in_a_lease(cluster, 0, job)
    cluster.start_worker(1)
    deadline = time.monotonic() + 120
    while not cluster.attempts(job)["expired"]:
        assert time.monotonic() < deadline, cluster.status(job)
        time.sleep(0.2)
    cluster.signal_worker(0, signal.SIGCONT)
    cluster.wait(job, seconds=120)
    time.sleep(2)
    assert_exactly_once(cluster, job, texts)


def stop_in_a_lease(cluster: Cluster, number: int, job: str) -> None:
    """Stops the only worker at a moment when it holds a shard and has made some of the job's items."""
    cluster.wait_for_done(job, 100)
    deadline = time.monotonic() + 60
    while True:
        cluster.signal_worker(number, signal.SIGSTOP)
        time.sleep(0.5)  # what it had sent to the database has arrived by now
        if cluster.leases(job):
            return
        assert time.monotonic() < deadline, cluster.status(job)
        cluster.signal_worker(number, signal.SIGCONT)
        time.sleep(0.1)


def test_an_item_longer_than_its_lease_runs_once(cluster: Cluster) -> None:
    texts = {**sentences(20), "slow": "A long sentence. [[slow:14]]"}
    job = cluster.submit(texts)
    cluster.wait(job, seconds=120)
    assert_exactly_once(cluster, job, texts)
    assert cluster.attempts(job)["expired"] == 0


def test_wrong_clocks_of_workers_change_nothing(cluster: Cluster) -> None:
    for number, skew in enumerate(("-7200", "7200")):
        cluster.signal_worker(number, signal.SIGKILL)
        cluster.workers[number].wait()
        cluster.start_worker(number, NIGHTJAR_CLOCK_SKEW=skew)
    texts = sentences(400)
    job = cluster.submit(texts)
    cluster.wait(job, seconds=120)
    assert_exactly_once(cluster, job, texts)
    assert set(cluster.attempts(job)) == {"done"}


def test_a_draining_worker_finishes_its_shards_and_spends_no_attempt(cluster: Cluster) -> None:
    texts = sentences(1200)
    job = cluster.submit(texts)
    cluster.wait_for_done(job, 100)
    cluster.signal_worker(0, signal.SIGTERM)
    assert cluster.workers[0].wait(timeout=60) == 0
    assert not cluster.ledger.status(job).job.state.final, "the job ended before the drain could be seen"
    cluster.wait(job, seconds=120)
    assert_exactly_once(cluster, job, texts)
    assert set(cluster.attempts(job)) <= {"done", "released"}


def test_past_the_deadline_a_draining_worker_gives_its_shards_back(cluster: Cluster) -> None:
    cluster.signal_worker(1, signal.SIGKILL)
    cluster.workers[1].wait()
    texts = {**sentences(40), "slow": "A very long sentence. [[slow:25]]"}
    job = cluster.submit(texts)
    cluster.wait_for_done(job, 40)
    cluster.signal_worker(0, signal.SIGTERM)
    assert cluster.workers[0].wait(timeout=60) == 0
    assert cluster.ledger.status(job).items.done == 40
    cluster.start_worker(1)
    cluster.wait(job, seconds=120)
    assert_exactly_once(cluster, job, texts)
    assert cluster.attempts(job)["released"] == 1


def test_an_item_that_kills_its_workers_is_found_and_the_others_are_made(cluster: Cluster) -> None:
    quick = {
        "SPEECH_WORKER__LEASE_SECONDS": "2",
        "SPEECH_WORKER__HEARTBEAT_SECONDS": "0.5",
        "SPEECH_DISPATCH__BACKOFF_SECONDS": "0.1",
    }
    for number in list(cluster.workers):
        cluster.signal_worker(number, signal.SIGKILL)
        cluster.workers[number].wait()
        cluster.start_worker(number, **quick)
    texts = {**sentences(100), "poison": "[[crash]]"}
    job = cluster.submit(texts)
    deadline = time.monotonic() + 280
    while (status := cluster.status(job)) is None or not status.job.state.final:
        assert time.monotonic() < deadline, status
        for number, process in list(cluster.workers.items()):
            if process.poll() is not None:
                cluster.start_worker(number, **quick)
        time.sleep(0.2)
    assert status.job.state == JobState.COMPLETED_WITH_ERRORS
    assert (status.items.done, status.items.failed) == (100, 1)
    poison = next(row for row in cluster.ledger.items(job) if row.example_id == "poison")
    assert (poison.state, poison.error_code) == (ItemState.DEAD, ErrorCode.POISON_WORKER_CRASH)


SMALL_DISK = """
mount -t tmpfs -o size=2m tmpfs "$1"
"$2" -m jobs run "$3" --out "$1/out" --quiet; echo "exit $?"
mount -o remount,size=64m "$1"
"$2" -m jobs run "$3" --out "$1/out" --quiet; echo "exit $?"
cp -r "$1/out" "$4"
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode != 0,
    reason="this machine gives no user namespace to mount a small disk in",
)
def test_a_full_disk_is_said_and_the_job_goes_on_when_there_is_space(tmp_path: Path) -> None:
    text = "The lamp in the window burned all night. " * 3
    lines = [{"example_id": f"item-{n}", "messages": [["user", "text", text]]} for n in range(12)]
    source = tmp_path / "input.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    command = ["unshare", "-Urm", "sh", "-c", SMALL_DISK, "sh", str(disk), sys.executable, str(source), str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=dict(os.environ), timeout=240, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert exits[0] != "exit 0"
    assert "space" in done.stderr, done.stderr
    assert exits[1] == "exit 0", done.stderr
    ledger = Ledger.open(f"sqlite:///{kept}/.nightjar/ledger.sqlite")
    (job,) = ledger.jobs(10)
    rows = list(ledger.items(job.id))
    assert [row.state for row in rows] == [ItemState.DONE] * len(lines)
    for row in rows:
        assert row.artifact is not None
        assert hashlib.sha256((kept / row.artifact.key).read_bytes()).hexdigest() == row.artifact.sha256
