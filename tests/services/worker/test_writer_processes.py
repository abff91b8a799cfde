"""Writer processes in front of real S3 servers: the same results with any number of them, and none is
missed when it dies."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jobs.ledger.records import JobState
from jobs.settings import S3Settings
from jobs.store import open_store
from jobs.store.base import ObjectInfo, ObjectStore
from pipelines.errors import ErrorCode, StoreError
from tests.support.services import S3, MotoS3, runs
from tests.support.worker_rig import Rig
from worker.leases import HeldLeases
from worker.shard_run import ShardEnd
from worker.writer_processes import WriterProcesses

METADATA = {"seed": "7", "spec_sha": "ab" * 8}


def access(s3: S3) -> S3Settings:
    return S3Settings(
        endpoint_url=s3.endpoint,
        region=s3.region,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,  # pyright: ignore[reportArgumentType]
        addressing_style="path",
    )


def pids_of(pool: WriterProcesses) -> list[int]:
    """The processes that are up."""
    return [one.pid for one in pool.processes if one.up and not one.ended]


@contextmanager
def writers(s3: S3Settings, url: str, processes: int) -> Iterator[tuple[WriterProcesses, ObjectStore]]:
    """So many processes, all up, and a store that writes through them."""
    pool = WriterProcesses(processes, s3, busy_puts=0)
    try:
        store = pool.open(url)
        for number in range(1, processes + 1):
            store.put(f"warm-{number}", b"one")
            until(lambda number=number: len(pids_of(pool)) == number)
        yield pool, store
    finally:
        pool.close()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def own_moto(tmp_path: Path) -> Iterator[MotoS3]:
    """A server that this test may pause and kill."""
    server = MotoS3(tmp_path / "moto")
    server.folder.mkdir()
    server.start()
    yield server
    server.stop()


def test_the_first_put_stays(s3: S3, bucket: str) -> None:
    with writers(access(s3), f"s3://{bucket}/some/prefix", 1) as (pool, store):
        first = store.put("a/b.wav", b"one", metadata=METADATA)
        second = store.put("a/b.wav", b"other")
        assert pids_of(pool)
    assert (first.created, second.created) == (True, False)
    assert first == second
    head = s3.client().head_object(Bucket=bucket, Key="some/prefix/a/b.wav")
    assert head["Metadata"] == METADATA
    assert first.sha256 == hashlib.sha256(b"one").hexdigest()
    assert open_store(f"s3://{bucket}/some/prefix", access(s3)).get("a/b.wav") == b"one"


def test_a_job_has_the_same_artifacts_with_any_number_of_processes(rig: Rig, moto: MotoS3) -> None:
    texts = [f"This is sentence {number}." for number in range(24)]
    found = []
    for processes in (0, 1, 3):
        url = f"s3://{moto.create_bucket(f'writers-{processes}')}"
        with writers(access(moto), url, processes) as (pool, rig.store):  # pyright: ignore[reportAttributeAccessIssue]
            job = rig.submit(texts)
            assert rig.run_next() == "finished"
            assert len(pids_of(pool)) == processes
            audio = list(rig.ledger.shard_audio(job.id, 0))
            found.append(
                [
                    (one.index, one.key.removeprefix(f"jobs/{job.id}"), one.sha256, one.bytes, one.samples)
                    for one in audio
                ]
            )
            assert {one.sha256 for one in audio} == {
                hashlib.sha256(rig.store.get(one.key)).hexdigest() for one in audio
            }
    assert len(found[0]) == len(texts)
    assert found[0] == found[1] == found[2]


def test_puts_of_a_process_that_is_killed_are_put_by_another(own_moto: MotoS3) -> None:
    url = f"s3://{own_moto.create_bucket('killed')}"
    with writers(access(own_moto), url, 2) as (pool, store), ThreadPoolExecutor(8) as threads:
        own_moto.pause()
        puts = [
            threads.submit(store.put, f"a/{number}", b"%d" % number, metadata=METADATA) for number in range(8)
        ]
        until(lambda: sum(one.waiting for one in pool.processes) == 8)
        killed = pids_of(pool)
        os.kill(killed[0], signal.SIGKILL)
        own_moto.unpause()
        results: list[ObjectInfo] = [put.result() for put in puts]
        until(lambda: len(store.put("b", b"") and pids_of(pool)) == 2)
        assert killed[0] not in pids_of(pool)
        content = [store.get(f"a/{number}") for number in range(8)]
    # An object may have been there when the second process came: it is what the first one wrote.
    assert [one.sha256 for one in results] == [
        hashlib.sha256(b"%d" % number).hexdigest() for number in range(8)
    ]
    assert content == [b"%d" % number for number in range(8)]


def test_a_job_goes_on_when_every_process_dies(rig: Rig, moto: MotoS3) -> None:
    url = f"s3://{moto.create_bucket('all-die')}"
    with writers(access(moto), url, 2) as (pool, rig.store):  # pyright: ignore[reportAttributeAccessIssue]
        job = rig.submit([f"This is sentence {number}." for number in range(200)])
        doomed = list(pool.processes)
        runner = threading.Thread(target=rig.run_next)
        runner.start()
        until(lambda: sum(one.waiting for one in doomed) > 4)
        for one in doomed:
            one.kill()
        runner.join()
        audio = list(rig.ledger.shard_audio(job.id, 0))
        assert all(hashlib.sha256(rig.store.get(one.key)).hexdigest() == one.sha256 for one in audio)
        assert all(one.ended for one in doomed)
    assert len(audio) == 200
    assert rig.ledger.job(job.id).state is JobState.COMPLETED


def test_a_store_that_is_away_is_waited_for(rig: Rig, own_moto: MotoS3) -> None:
    url = f"s3://{own_moto.create_bucket('away')}"
    with writers(access(own_moto), url, 1) as (_, rig.store):  # pyright: ignore[reportAttributeAccessIssue]
        rig.submit(["One.", "Two."])
        shard = rig.claim_next()
        data = rig.store.get(shard.input_key)
        own_moto.kill()
        with pytest.raises(StoreError) as away:
            rig.store.put("x", b"x")
        assert away.value.code is ErrorCode.STORE_UNREACHABLE
        own_moto.start()
        own_moto.create_bucket("away")
        rig.store.establish(shard.job.store_identity)
        rig.store.put(shard.input_key, data)
        assert rig.runner.run(shard) == "finished"


def test_a_drain_gives_a_shard_back_while_its_puts_hang_and_the_rest_adopts_them(
    rig: Rig, own_moto: MotoS3
) -> None:
    url = f"s3://{own_moto.create_bucket('drained')}"
    with writers(access(own_moto), url, 1) as (pool, rig.store):  # pyright: ignore[reportAttributeAccessIssue]
        job = rig.submit([f"This is sentence {number}." for number in range(64)])
        ends: list[ShardEnd] = []
        put, store = rig.store.put, rig.store

        def put_into_a_frozen_store(*given: Any, **named: Any) -> Any:
            own_moto.pause()  # before any object is there: an outcome would wait for the store to be committed
            return put(*given, **named)

        store.put = put_into_a_frozen_store  # type: ignore[method-assign]
        runner = threading.Thread(target=lambda: ends.append(rig.run_next()))
        runner.start()
        until(lambda: sum(one.waiting for one in pool.processes) > 4)
        store.put = put  # type: ignore[method-assign]
        rig.leases.drain()
        runner.join()
        own_moto.unpause()
        assert ends == ["released"]
        rig.leases = HeldLeases(rig.settings.times.lease_seconds, rig.clock, rig.metrics.count_retry)
        rig.runner = rig.runner_on(rig.ledger)
        while rig.ledger.job(job.id).state is not JobState.COMPLETED:
            assert rig.run_next() == "finished"
        audio = [one for shard in range(8) for one in rig.ledger.shard_audio(job.id, shard)]
        assert all(hashlib.sha256(rig.store.get(one.key)).hexdigest() == one.sha256 for one in audio)
    assert len({one.index for one in audio}) == len(audio) == 64


class _Full(BaseHTTPRequestHandler):
    """A server whose disk is full."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(507)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_full_store_says_so_through_a_process() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Full)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = S3Settings(
        endpoint_url=f"http://127.0.0.1:{server.server_port}",
        region="x",
        access_key_id="a",
        secret_access_key="b",
    )  # type: ignore[arg-type]
    pool = WriterProcesses(1, settings, busy_puts=0)
    try:
        store = pool.open("s3://full/prefix")
        with pytest.raises(StoreError):
            store.put("a", b"one")
        until(lambda: bool(pids_of(pool)))
        with pytest.raises(StoreError) as caught:
            store.put("a", b"one")
        assert caught.value.code is ErrorCode.STORE_FULL
        assert "s3://full/prefix/a" in caught.value.message
    finally:
        pool.close()
        server.shutdown()
        server.server_close()


def test_the_worker_writes_where_no_process_starts(moto: MotoS3, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{moto.create_bucket('no-process')}"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = WriterProcesses(2, access(moto), busy_puts=0)
    store = pool.open(url)
    try:
        assert all(store.put(f"a/{number}", b"one").created for number in range(40))
        until(lambda: bool(store.put("b", b"") and pool.maximum == 0))
    finally:
        pool.close()
    assert not pids_of(pool)


WORKER = """
import sys, time
from jobs.ledger.records import JobState
from jobs.settings import S3Settings
from worker.writer_processes import WriterProcesses
pool = WriterProcesses(1, S3Settings(endpoint_url=sys.argv[1], region="x", access_key_id="nightjar", secret_access_key="x"), busy_puts=0)
try:
    pool.open("s3://b/p").put("a", b"")
except Exception:
    pass
while not any(one.up for one in pool.processes):
    time.sleep(0.05)
print(pool.processes[0].pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_its_worker(moto: MotoS3) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, moto.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    assert runs(child)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    until(lambda: not runs(child))


def test_a_folder_is_written_by_the_worker(tmp_path: Path) -> None:
    pool = WriterProcesses(4, None, busy_puts=0)
    assert pool.open(str(tmp_path)).put("a", b"one").created
    pool.close()
    assert not pids_of(pool)


def test_only_the_first_call_of_a_process_has_the_keys(moto: MotoS3) -> None:
    calls: list[Any] = []
    with writers(access(moto), f"s3://{moto.create_bucket('keys')}", 1) as (pool, store):
        (process,) = pool.processes
        call = process.call
        process.call = lambda content: calls.append(content) or call(content)
        store.put("a", b"one")
    assert [one.key for one in calls] == ["a"]
    assert calls[0].settings is None
