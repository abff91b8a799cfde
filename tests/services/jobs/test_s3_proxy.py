"""The proxy of the soak's S3 server: it passes on what it gets, forgets for a while, and flips one bit of
one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from pydantic import SecretStr

from jobs.settings import S3Settings
from jobs.store import open_store
from tests.support.s3_proxy import S3Proxy, s3_proxy
from tests.support.services import S3

KEY = "jobs/one/input/000000.jsonl.zst"


@pytest.fixture
def proxy(s3: S3) -> Iterator[S3Proxy]:
    with s3_proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: S3Proxy, s3: S3) -> Any:
    keys = {
        "aws_access_key_id": s3.access_key,
        "aws_secret_access_key": s3.secret_key,
        "region_name": s3.region,
    }
    return boto3.client("s3", endpoint_url=proxy.endpoint, config=Config(retries={"max_attempts": 1}), **keys)


def test_a_store_behind_the_proxy_is_as_it_is_without(
    proxy: S3Proxy, client: Any, s3: S3, bucket: str
) -> None:
    settings = S3Settings(
        endpoint_url=proxy.endpoint,
        access_key_id=s3.access_key,
        secret_access_key=SecretStr(s3.secret_key),
        region=s3.region,
    )
    store = open_store(f"s3://{bucket}", settings)
    store.check()
    content = bytes(range(256)) * 5000
    assert store.put(KEY, content, metadata={"seed": "7"}).created
    assert not store.put(KEY, b"other").created
    found = store.head(KEY)
    assert found is not None
    assert found.bytes == len(content)
    assert client.head_object(Bucket=bucket, Key=KEY)["Metadata"] == {"seed": "7"}
    assert store.get(KEY) == content
    assert store.get_range(KEY, 300, 20) == content[300:320]
    assert [info.key for info in store.list("jobs/")] == [KEY]
    store.delete_many([KEY])
    assert store.head(KEY) is None


@pytest.mark.parametrize("code", ["NoSuchKey", "NoSuchBucket"])
def test_every_request_is_answered_with_404_while_the_server_is_forgotten(
    proxy: S3Proxy, client: Any, bucket: str, code: str
) -> None:
    client.put_object(Bucket=bucket, Key=KEY, Body=b"content")
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: client.get_object(Bucket=bucket, Key=KEY),
        "put": lambda: client.put_object(Bucket=bucket, Key="other", Body=b"content"),
        "list": lambda: client.list_objects_v2(Bucket=bucket),
        "delete": lambda: client.delete_object(Bucket=bucket, Key=KEY),
        # Its answer has no body that could say more.
        "head": lambda: client.head_object(Bucket=bucket, Key=KEY),
    }
    proxy.forget(code, 1e6)
    for name, call in calls.items():
        with pytest.raises(ClientError) as raised:
            call()
        assert raised.value.response["Error"]["Code"] == ("404" if name == "head" else code)
    assert proxy.refused == 5
    proxy.forget(code, 0)
    assert client.get_object(Bucket=bucket, Key=KEY)["Body"].read() == b"content"
    assert [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]] == [KEY]


def test_one_bit_of_one_answer_is_flipped(proxy: S3Proxy, client: Any, bucket: str) -> None:
    content = b"\0" * 1000
    for key in (KEY, "jobs/one/audio/000.wav"):
        client.put_object(Bucket=bucket, Key=key, Body=content)

    def get(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=key, ChecksumMode="DISABLED")["Body"].read()

    proxy.flip_next("/jobs/one/input/")
    assert get("jobs/one/audio/000.wav") == content
    spoiled = get(KEY)
    assert len(spoiled) == len(content)
    assert sum(byte.bit_count() for byte in spoiled) == 1
    assert get(KEY) == content
    assert proxy.flipped == 1
