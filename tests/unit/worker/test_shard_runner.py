"""The shard runner on a real ledger: every item once, whatever engine, store and ledger do."""

from __future__ import annotations

import io
import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import soundfile

from jobs.checks import quality_of
from jobs.ingest import SubmitOptions
from jobs.layout import SPEC_SHA_CHARACTERS
from jobs.ledger.records import ItemState, Job, JobState, ShardState
from jobs.store.base import ObjectInfo
from pipelines.audio import encode
from pipelines.errors import ErrorCode, StoreError
from pipelines.request import EngineStats, Speech, SynthesisRequest
from tests.support.fakes import SAMPLE_RATE, FakeClock, FakePipeline, sine
from tests.support.ledger_kit import wake
from tests.support.manifests import read_manifest
from tests.support.worker_rig import WORKER, Build, Recording, wait_for
from worker.shard_run import ShardEnd


def test_every_item_is_stored_committed_and_listed_in_the_manifest(build: Build) -> None:
    rig = build()
    job = rig.submit([f"text {n}" for n in range(100)], seed=5)
    assert rig.run_next() == "finished"
    status = rig.status(job)
    assert (status.job.state, status.items.done, status.items.total) == (JobState.COMPLETED, 100, 100)
    rows = rig.items(job)
    assert len(rig.audio()) == 100
    for row in rows:
        assert row.artifact is not None
        data, metadata = rig.store.objects[row.artifact.key]
        assert data == encode(sine(f"text {row.index}", row.artifact.seed), SAMPLE_RATE, "wav")
        assert metadata == {"seed": str(row.artifact.seed), "spec_sha": job.spec_sha[:SPEC_SHA_CHARACTERS]}
        assert (row.artifact.bytes, row.artifact.samples) == (
            len(data),
            soundfile.info(io.BytesIO(data)).frames,
        )
    (key,) = [key for key in rig.store.objects if "/manifest/" in key]
    entries = list(read_manifest(rig.store, key))
    assert [(entry.example_id, entry.text) for entry in entries] == [
        (f"item-{n}", f"text {n}") for n in range(100)
    ]


def test_flac_jobs_get_flac(build: Build) -> None:
    rig = build()
    rig.submit(["one"], format="flac")
    rig.run_next()
    ((key, data),) = rig.audio().items()
    assert key.endswith(".flac")
    assert soundfile.info(io.BytesIO(data)).format == "FLAC"


def test_what_a_model_writes_is_stored_beside_its_speech(build: Build) -> None:
    rig = build()
    job = rig.submit(["[[says:bonjour]] hello"])
    rig.run_next()
    assert rig.store.get(f"jobs/{job.id}/text/00000/000000000-item-0.txt") == b"bonjour"
    (row,) = rig.items(job)
    assert row.artifact is not None
    assert row.artifact.kind == "audio"
    assert rig.status(job).audio_ms == row.artifact.duration_ms


def test_the_engines_time_is_shared_out_among_its_items(build: Build) -> None:
    rig = build(pipeline=FakePipeline(seconds=0.2, slots=4))
    job = rig.submit([f"text {n}" for n in range(8)])
    started_at = time.monotonic()
    rig.run_next()
    assert 380 <= rig.status(job).engine_ms <= (time.monotonic() - started_at) * 1000 + 8


def test_the_energy_of_the_board_is_shared_out_as_the_engines_time_is(build: Build) -> None:
    clock, use = FakeClock(), {"watts": 0.0, "joules": 0.0}

    class Metered(FakePipeline):
        def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
            clock.advance(2)
            use["joules"] += 2 * use["watts"]
            super()._finish(request, future)

        def stats(self) -> EngineStats:
            return replace(super().stats(), joules=use["joules"])

    rig = build(clock=clock, pipeline=Metered(), lease_seconds=1000)
    jobs: list[Job] = []
    for watts in (300.0, 0.0, 500.0):
        use["watts"] = watts
        jobs.append(
            rig.submit([f"at {watts} W", "[[fail:synth.oom]]"], options=SubmitOptions(max_attempts=1))
        )
        rig.run_next()
        use["joules"] += 10_000  # a rest between jobs belongs to none
    assert [rig.status(job).engine_ms for job in jobs] == [4000] * 3
    # The failed item's energy is part of it.
    assert [rig.status(job).energy_mj for job in jobs] == [1_200_000, 0, 2_000_000]


def test_what_failed_items_took_of_the_engine_is_counted_in_every_attempt(build: Build) -> None:
    clock = FakeClock()

    class Slow(FakePipeline):
        def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
            clock.advance(1)
            super()._finish(request, future)

    rig = build(clock=clock, pipeline=Slow(), lease_seconds=1000)
    options, basic = SubmitOptions(max_attempts=2), quality_of("basic")
    plain = [rig.submit([text], options=options) for text in ("fine", "[[fail:synth.oom]]", "[[silent]]")]
    checked = [rig.submit([text], options=options, quality=basic) for text in ("[[silent]]", "[[nan]]")]
    while not all(rig.status(job).job.state.final for job in (*plain, *checked)):
        wake(rig.ledger)
        rig.run_next()
    assert [rig.status(job).engine_ms for job in plain] == [1000, 2000, 1000]
    # The second draw fails as the first did, and is the last.
    assert [rig.status(job).engine_ms for job in checked] == [2000, 2000]


def test_items_that_are_done_are_not_run_again(build: Build) -> None:
    rig = build()
    job = rig.submit(["good one", "[[fail_once:synth.oom]] bad one"])
    assert rig.run_next() == "finished"
    assert rig.status(job).shards[ShardState.READY] == 1
    assert [row.state for row in rig.items(job)] == [ItemState.DONE, ItemState.PENDING]
    assert rig.run_next() == "finished"
    assert [request.split("/")[1] for request in rig.pipeline.submitted] == ["0", "1", "1"]
    assert rig.status(job).job.state is JobState.COMPLETED


@pytest.mark.parametrize(
    ("marker", "code"),
    [
        ("[[nan]]", ErrorCode.SYNTH_NAN),
        ("[[empty]]", ErrorCode.SYNTH_NO_AUDIO),
        ("[[silent]]", ErrorCode.SYNTH_SILENT),
        ("[[fail:synth.no_eos]]", ErrorCode.SYNTH_NO_EOS),
        ("[[refuse:input.too_long]]", ErrorCode.INPUT_TOO_LONG),
    ],
)
def test_bad_speech_fails_its_item_and_is_never_stored(build: Build, marker: str, code: ErrorCode) -> None:
    rig = build()
    job = rig.submit(["before", f"{marker} bad", "after"])
    assert rig.run_next() == "finished"
    assert [row.state for row in rig.items(job)] == [ItemState.DONE, ItemState.FAILED, ItemState.DONE]
    assert rig.items(job)[1].error_code is code
    assert len(rig.audio()) == 2
    assert rig.status(job).job.state is JobState.COMPLETED_WITH_ERRORS


def test_outcomes_are_committed_in_micro_batches(build: Build) -> None:
    rig = build(commit_items=10, commit_seconds=600.0)
    rig.submit([f"text {n}" for n in range(35)])
    ledger = Recording(rig.ledger)
    rig.runner_on(ledger).run(rig.claim_next())  # pyright: ignore[reportArgumentType]
    assert ledger.sizes == [10, 10, 10, 5]


def test_an_outcome_waits_no_longer_than_the_commit_time(build: Build) -> None:
    rig = build(pipeline=FakePipeline(slots=2), commit_items=64, commit_seconds=0.2)
    job = rig.submit(["quick", "[[slow:6000]] late"])
    thread = threading.Thread(target=rig.run_next)
    thread.start()
    wait_for(lambda: rig.status(job).items.done == 1)
    assert thread.is_alive()
    rig.leases.drain()
    thread.join(240)
    assert not thread.is_alive()


def test_a_ledger_that_is_away_for_a_while_costs_no_item(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=1000.0)
    job = rig.submit([f"text {n}" for n in range(20)])
    ledger = Recording(rig.ledger, failures=6)
    assert rig.runner_on(ledger).run(rig.claim_next()) == "finished"  # pyright: ignore[reportArgumentType]
    assert rig.status(job).items.done == 20
    assert (
        rig.metrics.registry.get_sample_value("speech_service_retries_total", {"code": "ledger.unreachable"})
        == 6
    )


def test_a_ledger_that_stays_away_ends_the_shard_when_the_lease_is_over(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=60.0)
    job = rig.submit(["text"])
    ledger = Recording(rig.ledger, failures=10**6)
    assert rig.runner_on(ledger).run(rig.claim_next()) == "lost"  # pyright: ignore[reportArgumentType]
    assert rig.status(job).items.done == 0
    assert len(rig.leases) == 0


def test_a_store_that_is_away_for_a_while_costs_no_item(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=1000.0)
    job = rig.submit([f"text {n}" for n in range(20)])
    rig.store.fail_next = [StoreError(ErrorCode.STORE_UNREACHABLE, "The store is away.") for _ in range(12)]
    assert rig.run_next() == "finished"
    assert not rig.store.fail_next
    rows = rig.items(job)
    assert [row.state for row in rows] == [ItemState.DONE] * 20
    made = {
        row.artifact.key: sine(f"text {row.index}", row.artifact.seed)
        for row in rows
        if row.artifact is not None
    }
    assert rig.audio() == {key: encode(samples, SAMPLE_RATE, "wav") for key, samples in made.items()}


def test_an_input_that_is_gone_fails_the_shard_cleanly(build: Build) -> None:
    rig = build()
    job = rig.submit(["text"])
    lease = rig.claim_next()
    rig.store.delete(lease.input_key)
    assert rig.runner.run(lease) == "failed"
    assert rig.items(job)[0].error_code is ErrorCode.STORE_MISSING


def test_a_lost_lease_aborts_its_requests_and_writes_nothing(build: Build) -> None:
    rig = build(pipeline=FakePipeline(slots=2))
    job = rig.submit(["[[slow:6000]] one", "[[slow:6000]] two", "[[slow:6000]] three"])
    ends: list[ShardEnd] = []
    lease = rig.claim_next()
    thread = threading.Thread(target=lambda: ends.append(rig.runner.run(lease)))
    thread.start()
    wait_for(lambda: len(rig.pipeline.submitted) == 3)
    rig.ledger.cancel(job.id)
    tickets = rig.leases.tickets()
    lost = rig.ledger.heartbeat(WORKER.id, tickets, 60)
    assert len(lost) == 1
    rig.leases.renewed(tickets, lost, rig.clock.monotonic())
    thread.join(240)
    assert ends == ["lost"]
    assert set(rig.pipeline.aborted) == set(rig.pipeline.submitted)
    assert rig.audio() == {}
    assert rig.status(job).items.skipped == 3


def test_a_stale_worker_changes_nothing(build: Build) -> None:
    rig = build(pipeline=FakePipeline(seconds=0.3), lease_seconds=0.1)
    job = rig.submit(["text"])
    stale = rig.claim_next()
    wait_for(lambda: rig.ledger.reconcile().expired_leases)
    rig.leases.lease_seconds = 1000.0
    assert rig.runner.run(stale) == "lost"
    assert rig.status(job).items.done == 0


@pytest.mark.parametrize("code", [ErrorCode.STORE_FULL, ErrorCode.STORE_FORBIDDEN])
def test_a_store_that_a_person_has_to_mend_ends_the_lease_and_no_item(build: Build, code: ErrorCode) -> None:
    rig = build()
    job = rig.submit([f"text {n}" for n in range(8)])
    lease = rig.claim_next()
    put, puts = rig.store.put, itertools.count()

    def refuse(*arguments: Any, **more: Any) -> ObjectInfo:
        if next(puts) >= 3:
            raise StoreError(code, "It takes no more.", "Mend it.")
        return put(*arguments, **more)

    rig.store.put = refuse
    assert rig.runner.run(lease) == "failed"
    assert rig.status(job).items.failed == 0
    assert {row.attempts for row in rig.items(job) if row.error_code is None and row.artifact is None} == {0}
    outage = rig.status(job).outage
    assert outage is not None
    assert (outage.code, outage.message) == (code, "It takes no more. Mend it.")
    rig.store.put = put
    rig.ledger.wake(job.id)
    assert rig.run_next() == "finished"
    assert rig.status(job).items.done == 8
    assert rig.status(job).outage is None


def test_the_object_of_an_earlier_holder_is_adopted(build: Build) -> None:
    rig = build(clock=FakeClock(), lease_seconds=60.0)
    job = rig.submit(["text"], seed=1)
    first = rig.claim_next()
    ledger = Recording(rig.ledger, failures=10**6)
    assert rig.runner_on(ledger).run(first) == "lost"  # pyright: ignore[reportArgumentType]
    (before,) = rig.audio().values()
    assert rig.ledger.release(first.ticket, "test")
    assert rig.run_next() == "finished"
    assert list(rig.audio().values()) == [before]
    assert rig.status(job).items.done == 1


def test_a_slow_item_times_out_and_the_others_are_kept(build: Build) -> None:
    clock = FakeClock()
    rig = build(pipeline=FakePipeline(slots=4), clock=clock, item_timeout_seconds=30, lease_seconds=1000)
    job = rig.submit(["quick", "[[hang]] never", "[[slow:6000]] late"], options=SubmitOptions(max_attempts=1))
    ends: list[ShardEnd] = []
    thread = threading.Thread(target=lambda: ends.append(rig.run_next()))
    thread.start()
    wait_for(lambda: len(rig.pipeline.submitted) == 3 and len(rig.audio()) == 1 and not fed())
    clock.advance(31)
    thread.join(240)
    assert ends == ["finished"]
    assert [row.error_code for row in rig.items(job)] == [
        None,
        ErrorCode.SYNTH_TIMEOUT,
        ErrorCode.SYNTH_TIMEOUT,
    ]
    assert len(rig.pipeline.aborted) == 2
    # They kept the engine at work for all their time.
    assert rig.status(job).engine_ms == 31_000


def fed() -> list[threading.Thread]:
    """The threads that still feed items to an engine."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("feeder-")]


def test_an_engine_that_takes_no_more_requests_is_opened_anew(build: Build) -> None:
    clock, pipeline = FakeClock(), FakePipeline(slots=1, waiting_room=1)
    rig = build(pipeline=pipeline, clock=clock, item_timeout_seconds=30, lease_seconds=1000)
    rig.submit([f"[[hang]] {n}" for n in range(4)])
    ends: list[ShardEnd] = []
    thread = threading.Thread(target=lambda: ends.append(rig.run_next()))
    thread.start()
    wait_for(lambda: len(pipeline.submitted) == 3)
    clock.advance(31)
    thread.join(240)
    assert ends == ["failed"]
    assert pipeline.closes == 1
    assert rig.pipelines.pipelines() == []


def test_an_engine_that_fails_everything_is_opened_anew(build: Build) -> None:
    rig = build()
    job = rig.submit(["[[fail:synth.engine]] a", "[[fail:synth.engine]] b"])
    assert rig.run_next() == "finished"
    assert rig.pipeline.closes == 1
    assert [row.state for row in rig.items(job)] == [ItemState.PENDING, ItemState.PENDING]


def test_two_shards_share_one_engine(build: Build) -> None:
    pipeline = FakePipeline(seconds=0.05, slots=4)
    rig = build(pipeline=pipeline)
    jobs = [rig.submit([f"{name} {n}" for n in range(10)]) for name in "ab"]
    threads = [threading.Thread(target=rig.runner.run, args=(rig.claim_next(),)) for _ in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert [rig.status(job).items.done for job in jobs] == [10, 10]
    assert rig.opened == ["fake"]


def test_retried_items_get_a_new_manifest_beside_the_old_one(build: Build) -> None:
    rig = build()
    job = rig.submit(["good", "[[fail_once:synth.no_eos]] bad"])
    rig.run_next()
    assert rig.ledger.retry(job.id, None) == 1
    rig.run_next()
    keys = sorted(key for key in rig.store.objects if "/manifest/" in key)
    assert [len(list(read_manifest(rig.store, key))) for key in keys] == [2, 1]
    assert rig.status(job).job.state is JobState.COMPLETED
