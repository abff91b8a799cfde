"""An S3 store that answers with 404 for a while is away: no item fails, and what is missing is told from
what is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.ledger.records import JobState
from jobs.settings import S3Settings
from jobs.store import S3Store, open_store
from jobs.store.base import IDENTITY_KEY
from jobs.verify import ObjectCheck
from pipelines.errors import ErrorCode, StoreError
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakeClock, FakePipeline
from tests.support.manifests import newest_job_manifest
from tests.support.s3_proxy import S3Proxy, s3_proxy
from tests.support.services import S3, MotoS3
from tests.support.worker_rig import Rig, wait_for
from worker.garbage import sweep
from worker.writer_processes import WriterProcesses

ITEMS = 30


@dataclass(frozen=True)
class Bucket:
    """A store behind a proxy."""

    proxy: S3Proxy
    url: str
    access: S3Settings

    def open(self) -> S3Store:
        store = open_store(self.url, self.access)
        assert isinstance(store, S3Store)
        return store


@pytest.fixture
def behind(moto: MotoS3, bucket: str) -> Iterator[Bucket]:
    with s3_proxy(moto.endpoint) as proxy:
        access = S3Settings(
            endpoint_url=proxy.endpoint,
            region=S3.region,
            access_key_id=S3.access_key,
            secret_access_key=moto.secret_key,  # pyright: ignore[reportArgumentType]
            addressing_style="path",
        )
        yield Bucket(proxy, f"s3://{bucket}/prefix", access)


@pytest.fixture
def bucket(moto: MotoS3, tmp_path: Path) -> str:
    return moto.create_bucket(f"windows-{abs(hash(tmp_path)) % 10**9}")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path, clock=FakeClock(), lease_seconds=20_000, commit_items=4)
    yield rig
    rig.close()
    forget()


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchBucket"])
def test_a_404_is_believed_only_where_the_store_is_there(behind: Bucket, code: str) -> None:
    store = behind.open()
    identity = store.establish()
    store.put("a/x", b"1")
    behind.proxy.refuses = lambda method, path: code
    for call in (
        lambda: store.get("a/x"),
        lambda: store.get_range("a/x", 0, 1),
        lambda: store.open("a/x"),
        lambda: store.head("a/x"),
        lambda: store.put("a/y", b"2"),
        lambda: list(store.list("a/")),
        lambda: store.delete("a/x"),
        lambda: store.delete_many(["a/x"]),
        lambda: store.confirm(identity),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.code is ErrorCode.STORE_UNREACHABLE
    behind.proxy.refuses = lambda method, path: None
    assert store.get("a/x") == b"1"
    assert store.head("a/none") is None
    with pytest.raises(StoreError) as caught:
        store.get("a/none")
    assert caught.value.code is ErrorCode.STORE_MISSING


def test_what_was_put_into_another_bucket_is_not_committed(behind: Bucket) -> None:
    store = behind.open()
    store.establish()
    store.put("jobs/one.wav", b"audio")
    store.sync()
    store.delete("nightjar-store")
    with pytest.raises(StoreError) as caught:
        store.sync()
    assert caught.value.code is ErrorCode.STORE_UNREACHABLE


def test_an_object_that_was_missing_for_a_moment_is_there(behind: Bucket) -> None:
    store = behind.open()
    store.establish()
    store.put("a/x", b"1")
    refused: list[str] = []

    def once(method: str, path: str) -> str | None:
        refused.append(path)
        return "NoSuchKey" if len(refused) == 1 else None

    behind.proxy.refuses = once
    assert store.get("a/x") == b"1"
    refused.clear()
    info = store.head("a/x")
    assert info is not None
    assert info.bytes == 1


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "any"])
def test_no_item_fails_in_a_window_of_404s(behind: Bucket, rig: Rig, method: str, pack: bool) -> None:
    """Each window begins with the next request of its kind, and lasts until the worker has met it four
    times."""
    writers = WriterProcesses(1, behind.access)
    try:
        rig.store = writers.open(behind.url)  # type: ignore[assignment]
        job = rig.submit([f"text {n}" for n in range(ITEMS)], pack=pack)
        asked = 0
        lock = threading.Lock()

        def windows(of: str, path: str) -> str | None:
            nonlocal asked
            if method not in (of, "any"):
                return None
            with lock:
                asked += 1
                return ("NoSuchKey", "NoSuchBucket")[asked % 2] if asked % 12 < 4 else None

        behind.proxy.refuses = windows
        rig.run_next()
        upkeep = rig.upkeep(lambda _: rig.store, rig.clock)
        for _ in range(20):
            upkeep.end_job(job.id)
        behind.proxy.refuses = lambda method, path: None
    finally:
        writers.close()
    status = rig.status(job)
    assert (status.job.state, status.items.done) == (JobState.COMPLETED, ITEMS), rig.ledger.error_counts(
        job.id
    )
    assert list(ObjectCheck(rig.ledger, rig.store, job, deep=True)) == []
    assert newest_job_manifest(rig.store, job.id) is not None
    assert behind.proxy.refused > 0 or method == "HEAD"


def test_another_bucket_in_its_place_gets_nothing_and_loses_nothing(
    behind: Bucket, rig: Rig, moto: MotoS3
) -> None:
    rig.store = behind.open()  # type: ignore[assignment]
    job = rig.submit([f"text {n}" for n in range(ITEMS)])
    name, prefix = behind.url.removeprefix("s3://").split("/")
    client = moto.client()
    key = f"{prefix}/{IDENTITY_KEY}"
    own = client.get_object(Bucket=name, Key=key)["Body"].read()
    # As a copy of the bucket would be: its inputs can be read.
    client.put_object(Bucket=name, Key=key, Body=b"f" * 32)
    client.put_object(Bucket=name, Key=f"{prefix}/jobs/{job.id}/audio/stray.wav", Body=b"1")
    thread = threading.Thread(target=rig.run_next)
    thread.start()
    retries = rig.metrics.registry.get_sample_value
    wait_for(lambda: (retries("speech_service_retries_total", {"code": "store.unreachable"}) or 0) > 3)
    listed = client.list_objects_v2(Bucket=name, Prefix=f"{prefix}/jobs/{job.id}/audio/")
    client.put_object(Bucket=name, Key=key, Body=own)
    thread.join()
    assert [entry["Key"].rpartition("/")[2] for entry in listed["Contents"]] == ["stray.wav"]
    assert rig.status(job).items.done == ITEMS
    client.put_object(Bucket=name, Key=key, Body=b"f" * 32)
    assert sweep(rig.ledger, lambda _: behind.open(), -10.0, delete=True).failed_jobs == 1
    client.head_object(Bucket=name, Key=f"{prefix}/jobs/{job.id}/audio/stray.wav")
