"""Ingest from S3 into S3."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.settings import S3Settings, Settings
from jobs.shard_file import read_shard
from jobs.store import open_store
from pipelines.errors import ErrorCode, InputError
from tests.support.services import S3
from tests.support.times import with_times


def test_a_file_in_a_bucket_becomes_a_job_in_a_bucket(tmp_path: Path, s3: S3, bucket: str) -> None:
    settings = Settings(
        s3=S3Settings(
            endpoint_url=s3.endpoint,
            region=s3.region,
            access_key_id=s3.access_key,
            secret_access_key=s3.secret_key,
            addressing_style="path",
        ),
    )
    settings = with_times(settings, shard_items=7)
    lines = [
        json.dumps({"example_id": str(n), "messages": [["user", "text", "hello"]]}).encode() + b"\n"
        for n in range(100)
    ]
    s3.client().put_object(Bucket=bucket, Key="in/.odd name//x.jsonl.gz", Body=gzip.compress(b"".join(lines)))
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.migrate()
    store = open_store(f"s3://{bucket}/out", settings.s3)

    result = submit(settings, ledger, store, f"s3://{bucket}/in/.odd name//x.jsonl.gz", JobSpec("hibari"))
    assert (result.job.total_items, result.job.total_shards) == (100, 15)
    payload = [
        line
        for _, (key, sha) in sorted(ledger.shard_inputs(result.job.id).items())
        for line in read_shard(store, key, sha)
    ]
    assert [(line.index, line.example_id) for line in payload] == [(n, str(n)) for n in range(100)]
    assert not submit(
        settings, ledger, store, f"s3://{bucket}/in/.odd name//x.jsonl.gz", JobSpec("hibari")
    ).created
    with pytest.raises(InputError) as caught:
        submit(settings, ledger, store, f"s3://{bucket}/missing", JobSpec("hibari"))
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE
    ledger.close()
