"""Exports to and from buckets: stopped and gone on with, written once, never mixed with another export."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from jobs.export import parse_splits
from jobs.store import FolderStore, open_store
from pipelines.errors import ConfigError
from tests.services.jobs.test_export_resume import LINES, StoppedError, run, stop_at
from tests.services.jobs.test_s3_store import access_of
from tests.support.export_kit import finished_job
from tests.support.services import MotoS3


@pytest.mark.parametrize("format", ["webdataset", "lhotse", "nemo", "audiofolder"])
def test_a_bucket_to_a_bucket(tmp_path: Path, moto: MotoS3, format: str) -> None:
    bucket = moto.create_bucket(f"export-{tmp_path.name.replace('_', '-')[-20:]}".strip("-").lower())
    access = access_of(moto.endpoint, moto.secret_key)
    finished = finished_job(tmp_path, open_store(f"s3://{bucket}/p", access), LINES, seconds=0.1)
    to = f"s3://{bucket}/sets/{format}"
    with pytest.raises(StoppedError):
        run(finished, format, to, s3=access, part_bytes=20_000, on_part=stop_at(1))
    assert run(finished, format, to, s3=access, part_bytes=20_000) == 20
    target = open_store(to, access)
    names = {info.key: info for info in target.list("")}
    about = json.loads(target.get("export.json"))
    assert names.keys() == {file["name"] for file in about["files"]} | {"export.json"}
    for file in about["files"]:
        assert hashlib.sha256(target.get(file["name"])).hexdigest() == file["sha256"]
    with pytest.raises(ConfigError, match="another export"):
        run(finished, format, to, s3=access, part_bytes=20_001)
    target.put("notes.txt", b"mine")
    with pytest.raises(ConfigError, match="another export"):
        run(finished, format, to, s3=access, part_bytes=20_001, replaces=["another-job"])
    assert run(finished, format, to, s3=access, part_bytes=40_000, replaces=[finished.job_id]) == 20
    about = json.loads(target.get("export.json"))
    assert about["identity"]["part_bytes"] == 40_000
    assert {info.key for info in target.list("")} == {file["name"] for file in about["files"]} | {
        "export.json",
        "notes.txt",
    }
    finished.ledger.close()


def test_a_bucket_that_lacks_a_file_is_written_anew(tmp_path: Path, moto: MotoS3) -> None:
    access = access_of(moto.endpoint, moto.secret_key)
    finished = finished_job(tmp_path, FolderStore(tmp_path / "store"), LINES[:2], seconds=0.1)
    bucket = moto.create_bucket(f"export-{tmp_path.name.replace('_', '-')[-20:]}".strip("-").lower())
    to = f"s3://{bucket}/set"
    target = open_store(to, access)
    for _ in range(2):
        assert run(finished, "nemo", to, s3=access, splits=parse_splits("train=1")) == 2
        assert {info.key for info in target.list("")} == {
            "README.md",
            "export.json",
            "manifest.jsonl.gz",
            "provenance.json",
            "train.jsonl",
        }
        target.delete("train.jsonl")
    finished.ledger.close()


def test_kaldi_of_a_bucket_needs_local_audio(tmp_path: Path, moto: MotoS3) -> None:
    bucket = moto.create_bucket(f"export-{tmp_path.name.replace('_', '-')[-20:]}".strip("-").lower())
    finished = finished_job(
        tmp_path,
        open_store(f"s3://{bucket}/p", access_of(moto.endpoint, moto.secret_key)),
        LINES[:2],
        seconds=0.1,
    )
    to = tmp_path / "kaldi"
    with pytest.raises(ConfigError, match="local files"):
        run(finished, "kaldi", to, splits=None)
    run(finished, "kaldi", to, splits=None, audio_root=tmp_path / "audio")
    for line in (to / "train" / "wav.scp").read_text().splitlines():
        assert Path(line.split(" ", 1)[1]).is_file()
    finished.ledger.close()
