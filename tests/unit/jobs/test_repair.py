"""Lost and damaged objects are made again, inputs are written again, and an export of what is lost is
refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.job_options import SubmitOptions
from jobs.ledger.records import Job
from jobs.repair import Repaired, repair_objects, reproduce
from jobs.store import FolderStore
from jobs.verify import Fault, ObjectCheck, expected_objects, listed_faults
from pipelines.errors import ErrorCode, InputError, StoreError
from pipelines.registry import register_pipeline
from pipelines.request import Speech, SynthesisRequest
from tests.support.export_kit import export
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakePipeline, sine
from tests.support.ledger_kit import rows
from tests.support.manifests import newest_job_manifest, read_manifest
from tests.support.times import with_times
from tests.support.worker_rig import Rig

TEXTS = [f"[[says:Answer {number}]] number {number}" for number in range(5)]


class Other(FakePipeline):
    """Makes other speech of the same request."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        future: Future[Speech] = Future()
        future.set_result(
            Speech(sine("a longer text than it was", request.seed), SAMPLE_RATE, "text", "Other")
        )
        return future


class Refusing(FakePipeline):
    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, "Not this.")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    one = Rig(tmp_path)
    yield one
    one.close()
    forget()


@pytest.fixture
def job(rig: Rig) -> Job:
    """A finished job with audio and texts, whose objects are two each gone and damaged."""
    job = rig.submit(TEXTS, seed=3)
    assert rig.run_next() == "finished"
    objects = rig.store.objects
    audio, texts = sorted(rig.audio()), sorted(key for key in objects if "/text/" in key)
    del objects[audio[1]], objects[texts[1]]
    objects[audio[3]], objects[texts[4]] = (b"", {}), (b"x", {})
    return job


def check(rig: Rig, job: Job) -> dict[str, Fault]:
    return {expected.key: fault for expected, fault in ObjectCheck(rig.ledger, rig.store, job)}


def check_counters(rig: Rig, job: Job) -> None:
    """The shards count what the artifacts say."""
    artifacts = rows(rig.ledger, "SELECT sum(duration_ms), sum(bytes) FROM artifacts")
    status = rig.ledger.status(job.id)
    assert artifacts == [(status.audio_ms, status.bytes_out)]


def test_a_listing_shows_what_is_gone_or_of_another_size(rig: Rig, job: Job) -> None:
    seen = {
        expected.key: fault
        for expected, fault in listed_faults(rig.store, expected_objects(rig.ledger, job.id))
    }
    assert seen == check(rig, job)
    assert sorted(seen.values()) == ["changed"] * 2 + ["missing"] * 2
    (shard,) = rig.ledger.shard_inputs(job.id).values()
    rig.store.objects[shard[0]] = (b"", {})
    assert (shard[0], "changed") in {
        (e.key, fault) for e, fault in listed_faults(rig.store, expected_objects(rig.ledger, job.id))
    }


def test_the_same_engine_makes_the_same_bytes(rig: Rig, job: Job) -> None:
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 4}
    assert check(rig, job) == {}
    assert not rig.store.unsynced & {expected.key for expected in lost}
    check_counters(rig, job)


def test_other_bytes_are_recorded_with_their_hash(rig: Rig, job: Job) -> None:
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, rig.ledger.job(job.id), Other(), lost) == {"other": 4}
    assert check(rig, job) == {}
    check_counters(rig, job)
    done = list(rig.ledger.items(job.id))
    manifest = newest_job_manifest(rig.store, job.id)
    assert manifest is not None
    assert [line.sha256 for line in read_manifest(rig.store, manifest)] == [
        row.artifact.sha256 for row in done if row.artifact
    ]
    ((key, sha256),) = rows(rig.ledger, "SELECT manifest_key, manifest_sha256 FROM shards")
    assert hashlib.sha256(rig.store.get(key)).hexdigest() == sha256
    assert [line.sha256 for line in read_manifest(rig.store, key)] == [
        row.artifact.sha256 for row in done if row.artifact
    ]


def test_a_repair_without_an_input_says_so_and_needs_no_manifest(rig: Rig, job: Job) -> None:
    ended = rig.ledger.job(job.id)
    ((key, _),) = rig.ledger.shard_inputs(job.id).values()
    data = rig.store.get(key)
    rig.store.delete(key)
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, ended)]
    assert repair_objects(rig.ledger, rig.store, ended, rig.pipeline, lost) == {"failed": 5}
    assert newest_job_manifest(rig.store, job.id) is None
    rig.store.put(key, data)
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, ended)]
    assert repair_objects(rig.ledger, rig.store, ended, rig.pipeline, lost) == {"same": 4}
    assert newest_job_manifest(rig.store, job.id) is not None


def test_what_cannot_be_made_is_said_and_nothing_is_removed(rig: Rig, job: Job) -> None:
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    before = dict(rig.store.objects)
    repaired: list[Repaired] = []
    repair_objects(rig.ledger, rig.store, job, Refusing(), lost, repaired.append)
    assert {(one.outcome, one.reason) for one in repaired} == {("failed", "Not this.")}
    assert {one.example_id for one in repaired} == {"item-1", "item-3", "item-4"}
    assert rig.store.objects == before


def test_an_artifact_that_another_repair_recorded_is_not_replaced(rig: Rig, job: Job) -> None:
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    audio = next(expected for expected in lost if expected.kind == "audio")
    (artifact,) = rig.ledger.artifacts_of(job.id, "audio", [audio.index or 0]).values()
    assert not rig.ledger.replace_artifact(job.id, artifact, "another")
    assert rig.ledger.replace_artifact(job.id, artifact, artifact.sha256)
    check_counters(rig, job)


@pytest.mark.parametrize("format", ["espnet", "nemo", "manifest", "kaldi", "shar"])
def test_an_export_names_what_is_lost_and_writes_nothing(rig: Rig, job: Job, format: str) -> None:
    to = rig.folder / "dataset"
    with pytest.raises(StoreError) as caught:
        export(rig.ledger, rig.store, job.id, format, str(to))
    assert caught.value.code is ErrorCode.STORE_MISSING
    for key, fault in check(rig, job).items():
        assert f"{fault} {key}" in caught.value.message
    assert f"nightjar verify {job.id} --repair" in caught.value.advice
    assert not to.exists()


def test_an_export_names_a_few_of_many(rig: Rig) -> None:
    job = rig.submit([f"text {number}" for number in range(9)])
    assert rig.run_next() == "finished"
    for key in rig.audio():
        rig.store.delete(key)
    with pytest.raises(StoreError, match="and 4 more"):
        export(rig.ledger, rig.store, job.id, "espnet", str(rig.folder / "x"))


@pytest.mark.parametrize("left", [None, b""])
def test_inputs_are_written_again_from_their_file(rig: Rig, left: bytes | None) -> None:
    rig.settings = with_times(rig.settings, shard_items=2)
    job = rig.submit(["one", "two", "three", "four", "five"])
    before = dict(rig.store.objects)
    inputs = rig.ledger.shard_inputs(job.id)
    lost = [inputs[1][0], inputs[2][0]]
    for key in lost:
        rig.store.delete(key)
        if left is not None:
            rig.store.objects[key] = (left, {})
    assert rig.submit_file(rig.folder / "0.jsonl", lost=lost) == job
    assert rig.store.objects == before


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[: len(data) // 2]]
)
def test_damaged_inputs_are_found_and_written_again(rig: Rig, damage: Callable[[bytes], bytes]) -> None:
    job = rig.submit(["one", "two"])
    before = dict(rig.store.objects)
    ((key, _),) = rig.ledger.shard_inputs(job.id).values()
    assert list(check(rig, job)) == []
    rig.store.objects[key] = (damage(rig.store.get(key)), {})
    assert list(check(rig, job)) == [key]
    rig.submit_file(rig.folder / "0.jsonl", lost=[key])
    assert rig.store.objects == before


def test_an_input_of_halves_is_written_again(rig: Rig) -> None:
    job = rig.submit(["one", "two"], options=SubmitOptions(max_attempts=1))
    before = dict(rig.store.objects)
    assert rig.ledger.fail_shard(rig.claim_next().ticket, ErrorCode.WORKER_CRASH, "It died.")
    ((key, _), other) = rig.ledger.shard_inputs(job.id).values()
    assert other[0] == key
    rig.store.delete(key)
    rig.submit_file(rig.folder / "0.jsonl", options=SubmitOptions(max_attempts=1), lost=[key])
    assert rig.store.objects == before


def test_an_input_with_a_line_that_is_refused_by_now_stays_lost(rig: Rig) -> None:
    job = rig.submit(["one", "two"])
    ((key, _),) = rig.ledger.shard_inputs(job.id).values()
    rig.store.delete(key)

    def refuse(_: str) -> None:
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, "Not this.")

    register_pipeline("fake", replace(fake_card(), check_text=refuse), FakePipeline)
    with pytest.raises(StoreError, match="the software has changed") as caught:
        rig.submit_file(rig.folder / "0.jsonl", lost=[key])
    assert caught.value.code is ErrorCode.STORE_MISSING
    assert rig.ledger.job(job.id) == job


def test_a_sample_without_its_input_has_failed_items(rig: Rig, job: Job) -> None:
    ((key, _),) = rig.ledger.shard_inputs(job.id).values()
    rig.store.delete(key)
    redrawn = list(reproduce(rig.ledger, rig.store, job, rig.pipeline, 3))
    assert [one.match for one in redrawn] == ["failed"] * 3
    assert all(key in one.reason for one in redrawn)


def test_what_lies_in_the_place_of_an_object_stops_no_repair(rig: Rig, job: Job) -> None:
    for expected in expected_objects(rig.ledger, job.id):
        rig.store.objects.setdefault(expected.key, (b"", {}))
    (rig.folder / "store").mkdir()
    store = FolderStore(rig.folder / "store")
    for key, (data, _) in rig.store.objects.items():
        store.put(key, data)
    folder, link, *_ = [Path(store.uri(key)) for key in sorted(rig.audio())]
    folder.unlink()
    folder.mkdir()
    link.unlink()
    link.symlink_to(rig.folder / "0.jsonl")
    lost = [(expected, fault) for expected, fault in ObjectCheck(rig.ledger, store, job)]
    assert {fault for _, fault in lost} == {"changed"}
    repaired: list[Repaired] = []
    repair_objects(rig.ledger, store, job, rig.pipeline, (expected for expected, _ in lost), repaired.append)
    assert [store.uri(one.key) for one in repaired if one.outcome == "failed"] == [str(folder)]
    assert [store.uri(expected.key) for expected, _ in ObjectCheck(rig.ledger, store, job)] == [str(folder)]
    assert not link.is_symlink()
    assert (rig.folder / "0.jsonl").exists()


def test_a_repair_that_is_stopped_leaves_no_manifest_of_before(rig: Rig, job: Job) -> None:
    def stop(repaired: Repaired) -> None:
        assert repaired.outcome == "other"
        raise KeyboardInterrupt

    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    with pytest.raises(KeyboardInterrupt):
        repair_objects(rig.ledger, rig.store, job, Other(), lost, stop)
    ((key,),) = rows(rig.ledger, "SELECT manifest_key FROM shards")
    assert [line.sha256 for line in read_manifest(rig.store, key)] == [
        row.artifact.sha256 for row in rig.items(job) if row.artifact
    ]
