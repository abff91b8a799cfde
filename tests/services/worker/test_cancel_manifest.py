"""A job that `nightjar cancel` itself ends has the manifest that a worker would have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec
from jobs.store import open_store
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.manifests import newest_job_manifest, read_manifest
from tests.support.times import with_times
from tests.support.worker_rig import Rig


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    rig.settings = with_times(rig.settings, shard_items=2)
    rig.store = open_store(str(tmp_path))  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield rig
    rig.close()
    forget()


def half_done(rig: Rig) -> Job:
    path = rig.folder / "in.jsonl"
    lines = [{"example_id": str(number), "messages": [["user", "text", "a"]]} for number in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = submit(rig.settings, rig.ledger, rig.store, str(path), JobSpec(model="fake")).job
    rig.run_next()
    return job


def test_a_cancelled_job_lists_what_it_has(rig: Rig) -> None:
    job = half_done(rig)
    done = CliRunner().invoke(cli, ["cancel", job.id, "--home", str(rig.folder)])
    assert done.exit_code == 0, done.output
    key = newest_job_manifest(rig.store, job.id)
    assert key is not None
    assert [entry.example_id for entry in read_manifest(rig.store, key)] == ["0", "1"]


def test_a_store_that_is_away_does_not_keep_a_job_from_its_end(rig: Rig) -> None:
    job = half_done(rig)
    for path in (rig.folder / "jobs" / job.id / "input").iterdir():
        path.unlink()
    done = CliRunner().invoke(cli, ["cancel", job.id, "--home", str(rig.folder)])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{job.id} is cancelled.\n"
    assert "manifest was not written" in done.stderr
    with_ledger = Ledger(rig.settings.ledger_url)
    assert with_ledger.job(job.id).state.value == "cancelled"
    with_ledger.close()
