"""The S3 store against real servers: write-once, checksums, metadata, streams, and closed codes for what
goes wrong."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pytest
from pydantic import SecretStr

from jobs.delete import delete_objects
from jobs.settings import S3Settings
from jobs.store import S3Store, open_store
from jobs.store.s3 import open_s3_object
from pipelines.errors import ErrorCode, StoreError
from tests.support.services import S3, MotoS3, SeaweedFS


def access_of(endpoint_url: str, secret_access_key: str) -> S3Settings:
    return S3Settings(
        endpoint_url=endpoint_url,
        region=S3.region,
        access_key_id=S3.access_key,
        secret_access_key=SecretStr(secret_access_key),
        addressing_style="path",
    )


@pytest.fixture
def access(s3: S3) -> S3Settings:
    return access_of(s3.endpoint, s3.secret_key)


@pytest.fixture
def store(access: S3Settings, bucket: str) -> S3Store:
    opened = open_store(f"s3://{bucket}/some/prefix", access)
    assert isinstance(opened, S3Store)
    return opened


def test_the_first_put_stays(store: S3Store, s3: S3) -> None:
    metadata = {"seed": "7", "spec_sha": "ab" * 32, "voice": "Zoë 100 %"}
    first = store.put("a/b.wav", b"one", metadata=metadata)
    second = store.put("a/b.wav", b"other")
    assert (first.created, second.created) == (True, False)
    assert second == first
    head = s3.client().head_object(Bucket=store.bucket, Key=store.prefix + "a/b.wav")
    assert {name: unquote(value) for name, value in head["Metadata"].items()} == metadata
    assert first.sha256 == hashlib.sha256(b"one").hexdigest()
    assert store.get("a/b.wav") == b"one"


def test_a_job_is_deleted_by_requests_for_many_objects(
    store: S3Store, access: S3Settings, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.delete.OBJECTS_AT_ONCE", 3)
    keys = [f"jobs/a/audio/00000/{number:09d}-Zoë &%+.wav" for number in range(7)]
    for key in (*keys, "jobs/ab/audio/00000/0.wav", "jobs/b/0.wav"):
        store.put(key, b"four")
    outside = open_store(f"s3://{bucket}/some", access)
    outside.put("jobs/a/audio/0.wav", b"another store's")
    assert delete_objects(store, "a") == (7, 28)
    assert [info.key for info in store.list("jobs/")] == ["jobs/ab/audio/00000/0.wav", "jobs/b/0.wav"]
    assert outside.get("jobs/a/audio/0.wav") == b"another store's"
    store.delete_many([])


def test_a_range_is_the_bytes_that_are_there(store: S3Store) -> None:
    store.put("a/pack.tar", b"0123456789")
    asked = [(0, 10), (3, 4), (8, 4), (10, 1), (20, 5), (4, 0)]
    assert [store.get_range("a/pack.tar", *one) for one in asked] == [
        b"0123456789",
        b"3456",
        b"89",
        b"",
        b"",
        b"",
    ]
    with pytest.raises(StoreError) as caught:
        store.get_range("a/none.tar", 0, 1)
    assert caught.value.code is ErrorCode.STORE_MISSING


def test_of_many_writers_one_wins(store: S3Store) -> None:
    created: list[bytes] = []

    def write(data: bytes) -> None:
        if store.put("contended", data).created:
            created.append(data)

    threads = [threading.Thread(target=write, args=(bytes([number]) * 50_000,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1
    assert store.get("contended") == created[0]


def test_a_large_file_streams_in_and_out(store: S3Store, tmp_path: Path) -> None:
    local = tmp_path / "large"
    local.write_bytes(os.urandom(20 << 20))
    with local.open("rb") as file:
        put = store.put("large", file)
    assert put.created
    assert store.head("large") == put
    with store.open("large") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    assert digest.hexdigest() == put.sha256


def test_a_listing_knows_when_objects_were_written(store: S3Store) -> None:
    before = time.time()
    store.put("a/one", b"1")
    (info,) = store.list("a/")
    # Servers write whole seconds; this one has the clock of this machine.
    assert info.modified_at is not None
    assert before - 2 <= info.modified_at <= time.time() + 2


def test_listing_crosses_pages(store: S3Store, s3: S3) -> None:
    names = [f"x/{number:05d}" for number in range(1100)]
    client = s3.client()
    with ThreadPoolExecutor(8) as putters:
        list(
            putters.map(
                lambda name: client.put_object(Bucket=store.bucket, Key=store.prefix + name, Body=b"12"),
                names,
            )
        )
    store.put("y", b"1")
    listed = list(store.list("x/"))
    assert [info.key for info in listed] == names
    assert {info.bytes for info in listed} == {2}


def test_missing_objects(store: S3Store) -> None:
    assert store.head("none") is None
    store.delete("none")
    with pytest.raises(StoreError) as caught:
        store.get("none")
    assert caught.value.code is ErrorCode.STORE_MISSING


def test_an_object_without_a_checksum_is_read_for_it(store: S3Store, s3: S3) -> None:
    s3.client().put_object(Bucket=store.bucket, Key=store.prefix + "foreign", Body=b"foreign")
    info = store.head("foreign")
    assert info is not None
    assert info.sha256 == hashlib.sha256(b"foreign").hexdigest()


def test_check_leaves_nothing(store: S3Store) -> None:
    store.check()
    assert list(store.list("")) == []


def test_any_object_of_any_bucket_opens(store: S3Store, access: S3Settings) -> None:
    store.put("in.jsonl", b"line\n")
    with open_s3_object(store.uri("in.jsonl"), access) as stream:
        assert stream.read() == b"line\n"


def test_wrong_credentials(seaweedfs: SeaweedFS) -> None:
    store = open_store("s3://bucket", access_of(seaweedfs.endpoint, "wrong-secret"))
    with pytest.raises(StoreError) as caught:
        store.put("x", b"1")
    assert caught.value.code is ErrorCode.STORE_FORBIDDEN
    assert "wrong-secret" not in str(caught.value)


def test_a_missing_bucket(moto: MotoS3) -> None:
    with pytest.raises(StoreError) as caught:
        open_store("s3://no-such-bucket-here", access_of(moto.endpoint, moto.secret_key)).check()
    assert caught.value.code is ErrorCode.STORE_UNREACHABLE


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.store.s3.MAX_ATTEMPTS", 1)
    with socket.socket() as silent, pytest.raises(StoreError) as caught:
        # Taken, so that nobody else does, but not listened at.
        silent.bind(("127.0.0.1", 0))
        open_store("s3://bucket", access_of(f"http://127.0.0.1:{silent.getsockname()[1]}", "secret")).put(
            "x", b"1"
        )
    assert caught.value.code is ErrorCode.STORE_UNREACHABLE
    assert caught.value.code.retryable
