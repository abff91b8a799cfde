"""What a worker may meet at its broker: messages of strangers, commands from afar, a replica, errors of
any kind."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import redis
from celery.bootsteps import CLOSE, RUN

from jobs.dispatch import KEY_PREFIX, QUEUE, make_celery
from jobs.settings import load_settings
from tests.support.services import Valkey, free_port
from tests.support.worker_process import Site, closed_port, stop
from worker.celery_app import ReconnectingConsumer, create_app


def envelope(body: Any = ([], {}, {}), **changes: Any) -> bytes:
    """A message as kombu writes it, with parts of it changed; None leaves a part out."""
    message: dict[str, Any] = {
        "body": base64.b64encode(json.dumps(body).encode()).decode() if not isinstance(body, str) else body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "lang": "py",
            "task": "nightjar.run_shard",
            "id": "one",
            "argsrepr": "",
            "kwargsrepr": "",
        },
        "properties": {
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "tag",
        },
        **changes,
    }
    return json.dumps({name: value for name, value in message.items() if value is not None}).encode()


PROPERTIES = json.loads(envelope())["properties"]
#: None of these is a message of ours, each in a way of its own.
STRANGE = [
    b"\xff\x00 not text",
    b"not json",
    b"[]",
    b"null",
    b'{"a": 1}',
    envelope(properties=None),
    envelope(properties={**PROPERTIES, "delivery_info": {}}),
    envelope(properties={**PROPERTIES, "delivery_tag": None}),
    envelope(properties={**PROPERTIES, "body_encoding": "none such"}),
    envelope(body="not base64!"),
    envelope(headers=None),
    envelope(headers={}),
    envelope(headers={"task": "nightjar.run_shard"}),
    envelope(headers={"task": "nightjar.run_shard", "id": None, "eta": "never", "lang": "py"}),
    envelope(headers={"task": "nobody.knows", "id": "one", "lang": "py"}),
    envelope(headers={"task": ["nightjar.run_shard"], "id": {}, "lang": "py"}),
    envelope(headers=7),
    envelope(**{"content-type": "application/x-python-serialize"}),
    envelope(**{"content-encoding": "no-such-code"}),
    envelope(body="bm90IGpzb24="),
    envelope(body=[1, 2]),
    envelope(body=[[], {"job": "no job", "shard": 0, "epoch": 0, "more": 1}, {}]),
    envelope(body=[[], {"job": None, "shard": "x", "epoch": {}}, {}]),
]


def dropped(port: int) -> dict[str, float]:
    lines = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
    found = dict(
        line.rsplit(" ", 1) for line in lines if line.startswith(("speech_dropped_", "speech_consumer_"))
    )
    return {name: float(value) for name, value in found.items()}


@pytest.fixture
def metrics_port() -> int:
    return free_port()


@pytest.fixture
def site(tmp_path: Path, valkey_url: str, metrics_port: int) -> Iterator[Site]:
    with Site(tmp_path, valkey_url, SPEECH_WORKER__METRICS_PORT=str(metrics_port)) as site:
        yield site


def test_messages_of_strangers_are_dropped_and_counted(
    site: Site, valkey_url: str, metrics_port: int
) -> None:
    broker = redis.Redis.from_url(valkey_url)
    worker = site.worker()
    for message in STRANGE:
        broker.lpush(KEY_PREFIX + QUEUE, message)
    job = site.submit([f"text {n}" for n in range(40)])
    assert site.wait_until_final(job).items.done == 40
    site.wait_for(lambda: site.queue_depth() == 0)
    assert worker.poll() is None
    # The last three name a task of ours: they reach it, and it refuses their arguments.
    site.wait_for(lambda: dropped(metrics_port)["speech_dropped_messages_total"] == len(STRANGE) - 3)
    site.wait_for(lambda: broker.hlen(KEY_PREFIX + "unacked") == 0)
    assert stop(worker) == 0


def test_nobody_ends_a_worker_from_afar(site: Site) -> None:
    worker = site.worker()
    site.wait_for(lambda: "worker up" in site.log_text())
    job = site.submit([f"text {n}" for n in range(20)])
    site.wait_until_final(job)
    app = make_celery(site.settings)
    assert app.control.ping(timeout=3) == []
    app.control.shutdown()
    job = site.submit([f"text {n}" for n in range(20)])
    assert site.wait_until_final(job).items.done == 20
    assert worker.poll() is None
    assert stop(worker) == 0


def test_a_broker_that_becomes_a_replica_and_comes_back_finds_the_worker(
    tmp_path: Path, metrics_port: int
) -> None:
    valkey = Valkey(tmp_path / "valkey")
    valkey.start()
    broker = redis.Redis.from_url(valkey.url)
    try:
        with (
            Site(tmp_path, valkey.url, SPEECH_WORKER__METRICS_PORT=str(metrics_port)) as site,
            closed_port() as port,
        ):
            worker = site.worker()
            job = site.submit(["text 0"])
            site.wait_until_final(job)
            broker.replicaof("127.0.0.1", str(port))
            site.wait_for(
                lambda: (
                    dropped(metrics_port)["speech_consumer_restarts_total"] >= 2 or worker.poll() is not None
                )
            )
            assert worker.poll() is None
            broker.replicaof("NO", "ONE")
            job = site.submit([f"text {n}" for n in range(20)])
            assert site.wait_until_final(job).items.done == 20
            assert stop(worker) == 0
    finally:
        valkey.stop()


class Failing:
    """A consumer's steps that fail while they run and while they are cleaned up, as kombu's do after a
    broker was killed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state = RUN

    def start(self, parent: ReconnectingConsumer) -> None:
        self.calls.append("start")
        if self.calls.count("start") == 4:
            self.state = CLOSE
            return
        raise AttributeError("'NoneType' object has no attribute 'hostname'")

    def restart(self, parent: ReconnectingConsumer) -> None:
        self.calls.append("clean")
        if self.calls.count("clean") == 2:
            raise KeyError("unacked")


def test_the_consumer_starts_again_after_any_error_of_its_own_too() -> None:
    app = create_app(load_settings(broker_url="redis://127.0.0.1:1/0"))
    consumer = ReconnectingConsumer(
        lambda request: None, app=app, controller=SimpleNamespace(use_eventloop=False, semaphore=None)
    )
    consumer.blueprint = blueprint = Failing()  # pyright: ignore[reportAttributeAccessIssue]
    consumer.start()
    assert blueprint.calls == ["start", "clean", "start", "clean", "clean", "start", "clean", "start"]
