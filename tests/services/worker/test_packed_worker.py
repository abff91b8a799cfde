"""Packed jobs with real worker processes: killed and resumed, against loose jobs, on PostgreSQL with S3,
and by the commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.layout import packs_prefix
from jobs.ledger.records import ItemState, Job
from jobs.packs import read_artifact
from jobs.store.base import ObjectStore
from jobs.verify import ObjectCheck
from pipelines.audio import encode
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.ledger_kit import execute, expire_leases_of_the_dead
from tests.support.run_kit import Shell, write_input
from tests.support.services import S3
from tests.support.worker_process import Site, stop
from worker.garbage import sweep

#: Small packs, which the few and short items of a test fill.
SMALL = {"NIGHTJAR_TIMES__PACK_BYTES": "20000", "NIGHTJAR_TIMES__PACK_SECONDS": "0.5"}


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    with Site(tmp_path, valkey_url, **SMALL) as site:
        yield site


def content(site: Site, job: Job) -> dict[int, str]:
    """Index -> hash of the item's bytes in the store."""
    return {
        one.index: hashlib.sha256(read_artifact(site.store, one)).hexdigest()
        for one in site.ledger.artifacts(job.id, "audio")
    }


def packs_in(store: ObjectStore, job: Job) -> set[str]:
    return {info.key for info in store.list(packs_prefix(job.id))}


def assert_all_done(site: Site, job: Job, items: int) -> None:
    """Every item is done once, with the right bytes, in a pack that is there; no item is an object of its
    own."""
    rows = list(site.ledger.items(job.id))
    assert [row.state for row in rows] == [ItemState.DONE] * items
    stored = packs_in(site.store, job)
    for row in rows:
        assert row.artifact is not None
        assert row.artifact.pack in stored
        assert read_artifact(site.store, row.artifact) == encode(
            sine(f"text {row.index}", row.artifact.seed), SAMPLE_RATE, "wav"
        )
    assert list(site.store.list(f"jobs/{job.id}/audio/")) == []
    assert [*ObjectCheck(site.ledger, site.store, job)] == []


def test_a_killed_worker_loses_nothing_and_doubles_nothing(site: Site) -> None:
    job = site.submit([f"text {n}" for n in range(80)], pack=True)
    first = site.worker(engine={"seconds": 0.1, "slots": 4})
    site.wait_for(lambda: site.status(job).items.done > 5)
    first.kill()
    first.wait()
    assert site.ledger.packs(job.id) <= packs_in(site.store, job)
    done_before = set(content(site, job))
    assert 0 < len(done_before) < 80
    expire_leases_of_the_dead(site.ledger)
    worker = site.worker(engine={"seconds": 0.01, "slots": 4})
    assert site.wait_until_final(job).items.done == 80
    assert stop(worker) == 0
    assert_all_done(site, job, 80)
    orphan = "packs/000000-1-77-0123456789abcdef.tar"
    site.store.put(f"jobs/{job.id}/{orphan}", b"of the worker that was killed")
    named = site.ledger.packs(job.id)
    unnamed = packs_in(site.store, job) - named
    execute(site.ledger, "UPDATE jobs SET finished_at = finished_at - 100")
    report = sweep(site.ledger, lambda _: site.store, -100, delete=True)
    assert (report.orphans, report.failed_jobs) == (len(unnamed), 0)
    assert packs_in(site.store, job) == named
    assert_all_done(site, job, 80)


def test_it_is_the_loose_job_item_by_item_on_postgresql_and_s3(
    tmp_path: Path, valkey_url: str, postgres_url: str, s3: S3
) -> None:
    bucket = s3.create_bucket("packed-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:20])
    environment = {**s3.environment(), "SPEECH_S3__ADDRESSING_STYLE": "path"}
    with Site(
        tmp_path, valkey_url, postgres_url, SPEECH_STORE_URL=f"s3://{bucket}/p", **environment, **SMALL
    ) as site:
        texts = [f"text {n}" for n in range(60)]
        packed, loose = site.submit(texts, pack=True), site.submit(texts)
        site.worker(engine={"seconds": 0.01, "slots": 16})
        for job in (packed, loose):
            assert site.wait_until_final(job).items.done == 60
        assert content(site, packed) == content(site, loose)
        assert_all_done(site, packed, 60)
        assert 4 <= len(packs_in(site.store, packed)) < 60
        assert packs_in(site.store, loose) == set()


def test_the_commands_run_verify_and_repair_a_packed_job(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 6, words=3)
    run = shell.run("run", "in.jsonl", "--pack", "--format", "flac", "--qa", "off")
    assert run.returncode == 0, run.stderr
    (folder,) = (shell.folder / "out" / "jobs").iterdir()
    job, (pack,) = folder.name, (folder / "packs").iterdir()
    rows = shell.items()
    assert {row["pack"] for row in rows.values()} == {str(pack.relative_to(shell.folder / "out"))}
    assert not (folder / "audio").exists()
    verified = shell.run("verify", job, "--sample", "2")
    assert verified.returncode == 0, verified.stderr
    refused = shell.run("export", job, "--to", "out.jsonl")
    assert refused.returncode == 4
    assert "--audio-root" in refused.stderr
    exported = shell.run("export", job, "--to", "out.jsonl", "--audio-root", "audio")
    assert exported.returncode == 0, exported.stderr
    damaged = rows["line-3"]
    data = bytearray(pack.read_bytes())
    assert isinstance(damaged["pack_offset"], int)
    data[damaged["pack_offset"] + 100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    found = shell.run("verify", job, "--sample", "0", "--json")
    assert found.returncode == 1
    assert [line["example_id"] for line in map(json.loads, found.stdout.splitlines()) if "fault" in line] == [
        "line-3"
    ]
    mended = shell.run("verify", job, "--sample", "0", "--repair")
    assert mended.returncode == 0, mended.stderr
    assert shell.run("verify", job, "--sample", "6").returncode == 0
    assert [row["example_id"] for row in shell.items().values() if row["pack"] is None] == ["line-3"]
