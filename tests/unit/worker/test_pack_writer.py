"""Packed jobs: what is in a pack, when it is stored, and that no item is done before its pack is."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections import Counter
from concurrent.futures import Future

import pytest

from jobs.checks import quality_of
from jobs.layout import packs_prefix
from jobs.ledger.records import Artifact, Done, Job, JobState
from jobs.packs import read_artifact
from jobs.times import Times
from pipelines.errors import ErrorCode, StoreError
from tests.support.fakes import FakeClock, FakePipeline, MemoryStore
from tests.support.worker_rig import Build, Recording, Rig, wait_for
from worker.leases import LeaseGoneError
from worker.pack_writer import PackWriter
from worker.shard_run import ShardEnd

TEXTS = [f"Sentence {number}." for number in range(40)]


def packs_of(rig: Rig, job: Job) -> list[str]:
    return [key for key in rig.store.objects if key.startswith(packs_prefix(job.id))]


def content_of(rig: Rig, job: Job, kind: str = "audio") -> dict[int, str]:
    """Index -> hash of what the store has of each item that has an artifact; each is what the ledger says."""
    found: dict[int, str] = {}
    for artifact in rig.ledger.artifacts(job.id, kind):
        found[artifact.index] = hashlib.sha256(read_artifact(rig.store, artifact)).hexdigest()
        assert found[artifact.index] == artifact.sha256
    return found


def run_all(rig: Rig, job: Job) -> None:
    while rig.ledger.job(job.id).state is not JobState.COMPLETED:
        assert rig.run_next() == "finished"


def test_a_packed_job_has_the_same_audio_as_a_loose_one(build: Build) -> None:
    rig = build(pipeline=FakePipeline(seconds=0.002), commit_items=4)
    loose, packed = rig.submit(TEXTS, seed=3), rig.submit(TEXTS, seed=3, pack=True)
    run_all(rig, loose)
    run_all(rig, packed)
    assert content_of(rig, packed) == content_of(rig, loose)
    assert len(content_of(rig, packed)) == len(TEXTS)
    assert packed.spec_sha != loose.spec_sha
    assert (len(packs_of(rig, packed)), len(packs_of(rig, loose))) == (1, 0)
    # Nothing of it is an object of its own.
    assert not [key for key in rig.store.objects if key.startswith(f"jobs/{packed.id}/audio/")]


def test_a_pack_is_a_tar_file_of_the_loose_files(build: Build) -> None:
    rig = build()
    loose, packed = (
        rig.submit(["One.", "Two. [[says:zwei]]"]),
        rig.submit(["One.", "Two. [[says:zwei]]"], pack=True),
    )
    run_all(rig, loose)
    run_all(rig, packed)
    (pack,) = packs_of(rig, packed)
    with tarfile.open(fileobj=io.BytesIO(rig.store.get(pack))) as archive:
        *members, index = archive.getnames()
    expected = [
        key
        for key in rig.store.objects
        if key.startswith((f"jobs/{loose.id}/audio/", f"jobs/{loose.id}/text/"))
    ]
    assert sorted(members) == sorted(key.replace(loose.id, packed.id) for key in expected)
    assert index == f"jobs/{packed.id}/packs/000000-1-0.jsonl"
    assert content_of(rig, packed, "text") == content_of(rig, loose, "text") != {}


def test_a_full_pack_is_put_and_the_next_one_begun(build: Build) -> None:
    rig = build(pack_bytes=20_000)
    job = rig.submit(TEXTS, pack=True)
    run_all(rig, job)
    packs = packs_of(rig, job)
    assert 1 < len(packs) < len(TEXTS)
    assert (
        {artifact.pack for artifact in rig.ledger.artifacts(job.id, "audio")}
        == set(packs)
        == rig.ledger.packs(job.id)
    )
    assert all(len(rig.store.get(pack)) < 20_000 + 60_000 for pack in packs)
    assert len(content_of(rig, job)) == len(TEXTS)


def test_an_item_is_done_only_when_its_pack_is_synced(build: Build) -> None:
    rig = build(pack_bytes=20_000, commit_seconds=0.01)
    seen: list[bool] = []

    class Watching(Recording):
        def commit(self, ticket, outcomes):  # pyright: ignore
            artifacts = [artifact for outcome in outcomes for artifact in outcome.artifacts]
            seen.extend(
                artifact.pack in rig.store.objects and artifact.pack not in rig.store.unsynced
                for artifact in artifacts
            )
            return super().commit(ticket, outcomes)

    rig.runner = rig.runner_on(Watching(rig.ledger))  # pyright: ignore[reportArgumentType]
    job = rig.submit(TEXTS, pack=True)
    run_all(rig, job)
    assert seen == [True] * len(TEXTS)


def test_the_end_of_a_shard_waits_for_no_time(build: Build) -> None:
    """The last items include one that fails in the engine and one that the checks refuse."""
    rig = build(pack_seconds=3600.0)
    job = rig.submit(["One.", "Two.", "[[fail:synth.no_eos]] Three.", "[[empty]] Four."], pack=True)
    assert rig.run_next() == "finished"
    assert sorted(content_of(rig, job)) == [0, 1]


def test_checked_draws_go_into_packs_and_refused_ones_do_not(build: Build) -> None:
    rig = build()
    quality = quality_of("basic", None, ())
    job = rig.submit(["A quiet sentence.", "[[silent]] nothing is heard"], pack=True, quality=quality)
    assert rig.run_next() == "finished"
    assert [(row.index, row.pack) for row in rig.ledger.artifacts(job.id, "quarantine")] == [(1, None)]
    assert [(row.index, row.pack in rig.store.objects) for row in rig.ledger.artifacts(job.id, "audio")] == [
        (0, True)
    ]


def test_a_worker_that_drains_stores_what_it_has(build: Build) -> None:
    rig = build(pipeline=FakePipeline(slots=1, waiting_room=1), pack_seconds=3600.0)
    job = rig.submit(["One.", "Two.", "[[hang]] Three."], pack=True)
    lease = rig.claim_next()
    ends: list[ShardEnd] = []
    thread = threading.Thread(target=lambda: ends.append(rig.runner.run(lease)))
    thread.start()
    wait_for(lambda: rig.pipeline.stats().requests_done == 2)
    rig.leases.drain()
    thread.join()
    assert ends == ["released"]
    assert sorted(content_of(rig, job)) == [0, 1]


def test_items_of_a_pack_that_was_never_committed_are_made_again(build: Build) -> None:
    rig = build()
    job = rig.submit(["One.", "Two."], pack=True)
    lost = Recording(rig.ledger)
    lease = rig.claim_next()

    def gone(*_: object) -> None:
        raise LeaseGoneError("lost")

    lost.commit = gone  # type: ignore[method-assign]  # pyright: ignore
    rig.runner_on(lost).run(lease)  # pyright: ignore[reportArgumentType]
    (orphan,) = packs_of(rig, job)
    assert rig.ledger.packs(job.id) == set()
    rig.ledger.release(lease.ticket, "drain")
    run_all(rig, job)
    assert len(packs_of(rig, job)) == 2
    assert orphan not in rig.ledger.packs(job.id)
    assert sorted(content_of(rig, job)) == [0, 1]


def test_a_store_that_is_away_costs_no_item(build: Build) -> None:
    rig = build()
    job = rig.submit(["One.", "Two."], pack=True)
    lease = rig.claim_next()
    put = rig.store.put
    failures = [StoreError(ErrorCode.STORE_UNREACHABLE, "away")] * 2

    def failing(key: str, data: bytes, **more: object):  # type: ignore[no-untyped-def]
        if key.endswith(".tar") and failures:
            raise failures.pop()
        return put(key, data, **more)  # pyright: ignore[reportArgumentType]

    rig.store.put = failing  # type: ignore[method-assign]
    assert rig.runner.run(lease) == "finished"
    assert failures == []
    assert sorted(content_of(rig, job)) == [0, 1]


def test_a_slow_store_holds_back_who_adds_and_memory_stays_two_packs(build: Build) -> None:
    """Eight threads add items while each put waits to be let go: at no time is more in memory than two
    packs and an item a thread."""
    rig = build()
    rig.submit(["One."], pack=True)
    held = rig.leases.hold(rig.claim_next())
    let_go, putting = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, data: bytes, **more: object):  # type: ignore[no-untyped-def, override]
            putting.set()
            let_go.wait()
            return super().put(key, data, **more)  # pyright: ignore[reportArgumentType]

    packs = PackWriter(
        held,
        Slow(),
        times=Times(pack_bytes=10_000, pack_seconds=3600),
        clock=FakeClock(),
        run=lambda work: work(),
        are_last=lambda items: False,
    )
    stored: list[Future[Done]] = []

    def add(first: int) -> None:
        for index in range(first, first + 10):
            data = b"x" * 4000
            made = Artifact(index, "audio", f"{index}.wav", "", len(data), 1, 1, 1, 0)
            stored.append(packs.add(Done(index, ()), [(made, data)], ""))

    threads = [threading.Thread(target=add, args=(10 * number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    putting.wait()
    # Three items fill a pack: three are put, three wait in the full one, and each other thread holds the one
    # it adds.
    wait_for(lambda: len(stored) >= 5)
    assert not any(one.done() for one in stored)
    let_go.set()
    for thread in threads:
        thread.join()
    packs_by_item = Counter(one.result().artifacts[0].pack for one in stored if one.done())
    # No pack has more than fill it, however long the put before it took; the last one is not full.
    assert list(packs_by_item.values()) == [3] * 26


def test_what_the_store_raises_is_each_items(build: Build) -> None:
    rig = build()
    rig.submit(["One."], pack=True)
    held = rig.leases.hold(rig.claim_next())
    store = MemoryStore()
    store.fail_next = [StoreError(ErrorCode.STORE_FORBIDDEN, "no")]
    packs = PackWriter(
        held,
        store,
        times=Times(pack_bytes=10, pack_seconds=1),
        clock=FakeClock(),
        run=lambda work: work(),
        are_last=lambda _: False,
    )
    made = Artifact(0, "audio", "0.wav", "", 100, 1, 1, 1, 0)
    refused = packs.add(Done(0, ()), [(made, b"x" * 100)], "")
    with pytest.raises(StoreError):
        refused.result(0)
    again = packs.add(Done(0, ()), [(made, b"x" * 100)], "")
    assert again.result(0).artifacts[0].pack in store.objects
