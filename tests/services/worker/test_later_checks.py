"""Meters that measure a job after it has ended: what they leave in the ledger, and who may not be disturbed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

from jobs.checks import Option, Quality, quality_of
from jobs.export.items import audio_items
from jobs.ledger.records import QUARANTINE, Decision, DrawRow, ItemState, Job, JobState, Score
from jobs.provenance import put_provenance, read_records, reopened_model
from jobs.recent_jobs import FoundJob
from jobs.where import parse_where
from pipelines.errors import ConfigError, ErrorCode, ModelError, ServiceError, StoreError
from pipelines.registry import register_pipeline
from pipelines.request import EngineInfo
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.quality_kit import Costs, TextMeter
from tests.support.times import with_times
from tests.support.worker_rig import Rig
from worker.check import Checked, check_job, checks_of
from worker.garbage import orphans
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterError, MeterPool
from worker.result_writer import ResultWriter

TEXTS = ["one", "[[wer:0.9]] two", "three", "[[distillmos:1]] four", "[[silence:0.9]] [[wer:1]] five", "six"]
CODES = [None, ErrorCode.QA_WER, None, ErrorCode.QA_MOS, ErrorCode.QA_SILENCE, None]


def quality(preset: str = "strict", *changes: str) -> Quality:
    found = quality_of(preset, None, ["draws=1", *changes])
    assert found is not None
    return found


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rigs: list[Rig] = []

    def build_rig(name: str = "rig") -> Rig:
        (tmp_path / name).mkdir()
        rig = Rig(tmp_path / name)
        rig.writer = ResultWriter(meters=MeterPool(open_host=Costs))
        rig.runner = rig.runner_on(rig.ledger)
        rigs.append(rig)
        return rig

    yield build_rig
    for rig in rigs:
        rig.close()
    forget()


class AllGood(Costs):
    """Hears no fault."""

    def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        return super().measure_one(meters, dataclasses.replace(utterance, text="good"))


class Slow(Costs):
    """Takes some time for each draw."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__()
        self.seconds = seconds

    def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        time.sleep(self.seconds)
        return super().measure_one(meters, utterance)


def run(rig: Rig, texts: list[str], checks: Quality | None, **spec: object) -> Job:
    job = rig.submit(texts, quality=checks, **spec)
    while not rig.status(job).job.state.final:
        rig.run_next()
    return job


def result(
    rig: Rig, job: Job, checks: Quality | None = None, host: TextMeter | None = None, told: list[str] | None = None
) -> Checked:  # fmt: skip
    class Found(FoundJob):
        """A job whose store is in memory."""

        store = rig.store  # pyright: ignore[reportAssignmentType]

    pool, job = MeterPool(open_host=lambda: host or Costs()), rig.ledger.job(job.id)  # pyright: ignore
    with closing(pool):
        chosen = checks_of(job, checks or quality())
        return check_job(
            Found(rig.settings, rig.ledger, job), chosen, pool, [].append if told is None else told.append
        )


def check(
    rig: Rig, job: Job, checks: Quality | None = None, host: TextMeter | None = None, errors: list[str] | None = None
) -> dict[str, int]:  # fmt: skip
    pool_host = host or Costs()
    before = {(row.index, row.draw.draw) for row in rig.ledger.draws(job.id) if row.draw.code is not None}
    left = result(rig, job, checks or checks_of(rig.ledger.job(job.id), None), pool_host, errors).left.total()
    failed = {(row.index, row.draw.draw) for row in rig.ledger.draws(job.id) if row.draw.code is not None}
    return {"measured": len(pool_host.texts), "failed": len(failed - before), "left": left}


def known(rig: Rig, job: Job) -> tuple[list[object], list[DrawRow]]:
    """The rows of a job and its draws, without the keys, which name the job."""
    rows = [(row.state, row.error_code, row.error_message, bool(row.artifact)) for row in rig.items(job)]
    return rows, list(rig.ledger.draws(job.id))


def test_a_later_check_leaves_what_meters_leave_during_the_job(build: Callable[..., Rig]) -> None:
    rig = build()
    at_once = run(rig, TEXTS, quality())
    later = run(rig, TEXTS, quality("basic", "bounds.loudness.low=-40", "bounds.loudness.high=-10"))
    assert rig.status(later).job.state is JobState.COMPLETED
    assert check(rig, later, quality()) == {"measured": 6, "failed": 3, "left": 0}
    rows, draws = known(rig, at_once)
    assert [row.error_code for row in rig.items(at_once)] == CODES
    late_rows, late_draws = known(rig, later)
    assert [row[:2] for row in late_rows] == [row[:2] for row in rows]  # pyright: ignore
    assert late_draws == draws
    for one, other in ((rig.status(at_once), rig.status(later)),):
        assert (one.items, one.audio_ms, one.bytes_out, one.measured, one.job.state) == (
            other.items, other.audio_ms, other.bytes_out, other.measured, other.job.state,
        )  # fmt: skip
    for job in (at_once, later):
        items = list(audio_items(rig.ledger, rig.store, job.id))
        assert [item.example_id for item in items] == ["item-0", "item-2", "item-5"]
        assert [(item.scores["wer"], item.scores["distillmos"]) for item in items] == [(0.0, 4.0)] * 3
        where = parse_where("wer < 0.5 and distillmos > 3")
        assert [row.index for row in rig.ledger.items(job.id, where=where)] == [0, 2, 5]


def test_failed_audio_is_quarantined_and_nothing_is_lost(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, TEXTS, quality("basic"))
    before = rig.audio()
    check(rig, job, quality())
    kept = {one.index: one for one in rig.ledger.artifacts(job.id, QUARANTINE)}
    assert sorted(kept) == [1, 3, 4]
    assert {rig.store.get(one.key) for one in kept.values()} <= set(before.values())
    assert rig.audio() == before
    assert [info.key for info, _ in orphans(rig.ledger, rig.store, job, rig.ledger.now() + 3600)] == []
    newest = max(key for key in rig.store.objects if key.startswith(f"jobs/{job.id}/manifest."))
    lines = [json.loads(line) for line in rig.store.get(newest).splitlines()]
    assert [line["example_id"] for line in lines] == ["item-0", "item-2", "item-5"]
    # A person can draw again, and the draws go on.
    assert rig.ledger.retry(job.id, [ErrorCode.QA_WER]) == 1
    assert rig.run_next() == "finished"
    assert rig.items(job)[1].state is ItemState.DONE
    assert [row.draw.draw for row in rig.ledger.draws_of(job.id, [1])] == [0, 1]
    assert check(rig, job, quality()) == {"measured": 1, "failed": 1, "left": 0}


def test_a_job_that_keeps_its_best_draw_keeps_its_audio(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, TEXTS, quality("basic", "on_fail=keep"))
    assert check(rig, job, quality()) == {"measured": 6, "failed": 3, "left": 0}
    assert [row.state for row in rig.items(job)] == [ItemState.DONE] * 6
    assert [row.draw.code for row in rig.ledger.draws(job.id)] == CODES
    assert check(rig, job, quality()) == {"measured": 0, "failed": 0, "left": 0}


def test_a_job_without_checks_gets_scores(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, TEXTS, None)
    check(rig, job, quality())
    assert [row.error_code for row in rig.items(job)] == CODES
    (item, *_) = audio_items(rig.ledger, rig.store, job.id)
    assert item.scores == {"silence": 0.1, "wer": 0.0, "cer": 0.0, "distillmos": 4.0}
    assert rig.status(job).measured.items == 6


def test_a_repeated_check_measures_only_what_is_left(build: Callable[..., Rig]) -> None:
    rig = build()
    texts = [f"text {number}" for number in range(90)]
    job = run(rig, texts, quality("basic"))
    sampled = check(rig, job, quality("strict", "sample=0.2"))["measured"]
    assert 0 < sampled < 50

    class Dies(Costs):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            if len(self.measured) > 4 * 45:
                raise ModelError(ErrorCode.MODEL_UNREACHABLE, "Gone.")
            return super().measure_one(meters, utterance)

    with pytest.raises(ModelError):
        check(rig, job, quality(), Dies())
    left = sum("wer" not in row.draw.scores for row in rig.ledger.draws(job.id))
    assert 0 < left < 90 - sampled
    assert check(rig, job, quality()) == {"measured": left, "failed": 0, "left": 0}
    host = Costs()
    assert check(rig, job, quality("strict", "meters.speaker={}"), host)["measured"] == 90
    assert host.measured == ["speaker"] * 90
    # Without options: the job's own checks, of which there are none to measure.
    with pytest.raises(ConfigError, match="no meter"):
        check(rig, job)


def test_other_bounds_do_not_change_a_verdict_and_the_user_is_told(build: Callable[..., Rig]) -> None:
    rig, told = build(), list[str]()
    job = run(rig, ["one", "[[wer:0.4]] two"], quality("basic"))
    assert check(rig, job, quality(), errors=told) == {"measured": 2, "failed": 0, "left": 0}
    assert told == []
    stricter = quality("strict", "bounds.wer.high=0.1")
    assert check(rig, job, stricter, errors=told) == {"measured": 0, "failed": 0, "left": 0}
    assert told == ["Already measured, accepted, or kept after a failure, so the verdict stays: 2 items."]


def test_the_rest_of_a_sample_is_measured_by_the_jobs_own_checks(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, [f"text {number}" for number in range(60)], quality("strict", "sample=0.3"))
    done = rig.status(job).measured.items
    assert check(rig, job) == {"measured": 60 - done, "failed": 0, "left": 0}


def test_an_item_that_a_meter_fails_on_is_left(build: Callable[..., Rig]) -> None:
    class Fails(Costs):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            if utterance.text == "two":
                raise MeterError("It broke.")
            return super().measure_one(meters, utterance)

    rig, told = build(), list[str]()
    job = run(rig, ["one", "two", "three"], quality("basic"))
    assert check(rig, job, quality(), Fails(), told) == {"measured": 2, "failed": 0, "left": 1}
    assert "item-1" in told[0]
    assert "It broke." in told[0]
    assert check(rig, job, quality()) == {"measured": 1, "failed": 0, "left": 0}


def test_a_running_job_is_refused_and_one_that_runs_again_is_left_alone(build: Callable[..., Rig]) -> None:
    rig = build()
    job = rig.submit(TEXTS, quality=quality("basic"))
    lease = rig.claim_next()
    with pytest.raises(ServiceError) as caught:
        check(rig, job, quality())
    assert caught.value.code is ErrorCode.LEDGER_STATE
    rig.runner.run(lease)

    class Reopens(Costs):
        """A person runs failed items again while the check runs."""

        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            if not self.measured:
                assert rig.ledger.retry(job.id, None) == 3
            return super().measure_one(meters, utterance)

    check(rig, job, quality("strict", "sample=0.7"))
    failed = rig.status(job).items.failed
    before = known(rig, job)
    if failed == 3:
        with pytest.raises(ServiceError, match="running"):
            check(rig, job, quality("strict", "meters.speaker={}"), Reopens())
        assert known(rig, job)[1] == before[1]


def test_an_item_that_was_repaired_meanwhile_keeps_its_state(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, ["one", "[[wer:1]] two"], quality("basic"))

    class Replaces(Costs):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            found = rig.items(job)[1].artifact
            if found is not None and found.sha256 != "other":
                other = msgspec.structs.replace(found, sha256="other")
                assert rig.ledger.replace_artifact(job.id, other, found.sha256)
            return super().measure_one(meters, utterance)

    # Both are read before they are measured.
    check(rig, job, quality(), Replaces())
    rows = rig.items(job)
    assert [row.state for row in rows] == [ItemState.DONE] * 2
    assert "wer" not in rig.ledger.draws_of(job.id, [1])[0].draw.scores


def test_lost_audio_is_left_and_what_follows_is_measured(build: Callable[..., Rig]) -> None:
    rig, told = build(), list[str]()
    job = run(rig, [f"text {number}" for number in range(30)], quality("basic"))
    lost, broken, *_ = keys = [row.artifact.key for row in rig.items(job) if row.artifact]
    rig.store.delete(lost)
    rig.store.objects[broken] = (b"changed", rig.store.objects[broken][1])
    assert check(rig, job, quality(), errors=told) == {"measured": 28, "failed": 0, "left": 2}
    assert [text.split(":")[0] for text in told[:2]] == [
        "Item item-0 is left (store.missing)", "Item item-1 is left (store.conflict)",
    ]  # fmt: skip
    assert "2 items (store.missing: 1, store.conflict: 1)" in told[2]
    assert "--repair" in told[2]
    rows = rig.items(job)
    assert {row.state for row in rows} == {ItemState.DONE}
    assert [row.draw.scores.keys() >= {"wer"} for row in rig.ledger.draws(job.id)] == [False] * 2 + [
        True
    ] * 28
    # All that a worker wrote is gone, as after a wrong `rm`: each item is named, and the command ends.
    for key in keys[2:]:
        rig.store.delete(key)
    rig.store.delete(next(key for key in rig.store.objects if "/input/" in key))
    told.clear()
    assert check(rig, job, quality("strict", "meters.speaker={}"), errors=told)["left"] == 30
    assert sum("store.missing" in text for text in told) == 31


def test_a_store_that_cannot_be_reached_ends_a_check(build: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    rig = build()
    job = run(rig, ["one", "two"], quality("basic"))

    def down(key: str) -> bytes:
        raise StoreError(ErrorCode.STORE_UNREACHABLE, f"No answer for {key}.")

    monkeypatch.setattr(rig.store, "get", down)
    told = list[str]()
    with pytest.raises(StoreError) as caught:
        check(rig, job, quality(), errors=told)
    assert (caught.value.code, told) == (ErrorCode.STORE_UNREACHABLE, [])


def test_a_retry_mends_what_a_check_found(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, ["one", "[[wer:1]] two", "[[wer:1]] three"], quality("basic"))
    assert result(rig, job).measured.still_failed == 2
    assert not result(rig, job).passed
    rig.ledger.decide(job.id, ["item-2"], Decision(True, "ada"))
    assert result(rig, job).measured.still_failed == 1
    assert rig.ledger.retry(job.id, [ErrorCode.QA_WER]) == 1
    assert rig.run_next() == "finished"
    mended = result(rig, job, host=AllGood())
    # The rate is that of all draws, and the job is what it is now.
    assert (mended.measured.items, mended.measured.failed, mended.measured.still_failed) == (3, 2, 0)
    assert mended.passed
    assert str(mended).startswith("2 of 3 measured items failed a draw")
    kept = run(rig, ["[[wer:1]] two"], quality("basic", "on_fail=keep"))
    assert not result(rig, kept).passed


def test_a_check_that_measures_nothing_says_why(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, ["one", "two"], quality("basic"))
    no_audio = "No item is measured: no item of the sample (--qa-sample) has audio."
    assert str(result(rig, job, quality("strict", "sample=0.0001"))) == no_audio
    for text in ("[[fail:input.unsupported]] x", "one"):
        empty = run(rig, [text], quality("basic"))
        if text == "one":
            rig.store.delete(next(row.artifact.key for row in rig.items(empty) if row.artifact))
        said = str(result(rig, empty))
        assert said == ("No item is measured: none could be." if text == "one" else no_audio)

    class Deaf(Costs):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            return {}

    assert "no score" in str(result(rig, job, host=Deaf()))


def test_silero_alone_is_a_meter_too(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, ["one", "[[silence:0.9]] two", "three"], quality("basic"))
    checked = result(rig, job, quality("basic", "vad=silero", "sample=1"))
    assert (checked.measured.items, checked.measured.failed) == (3, 1)
    assert str(checked).startswith("1 of 3 measured items")


def test_two_checks_at_once_share_the_shards(build: Callable[..., Rig]) -> None:
    rig = build()
    rig.settings = with_times(rig.settings, shard_items=5)
    job = run(rig, [f"text {number}" for number in range(60)], quality("basic"))
    hosts, told = [Slow(), Slow()], list[str]()
    with ThreadPoolExecutor() as threads:
        done = list(threads.map(lambda host: result(rig, job, host=host, told=told), hosts))
    measured = [len(host.texts) for host in hosts]
    assert sum(measured) == 60
    assert min(measured) >= 15
    assert [one.measured.items for one in done] == [60, 60]
    assert all(one.passed for one in done)


def test_a_shard_of_a_killed_check_is_free_after_its_lease(build: Callable[..., Rig]) -> None:
    rig, told = build(), list[str]()
    rig.settings = with_times(rig.settings, lease_seconds=2.0, heartbeat_seconds=0.2)
    job = run(rig, ["one", "two"], quality("basic"))
    assert rig.ledger.take_for_check(job.id, 0, "killed", 2.0)
    assert not rig.ledger.take_for_check(job.id, 0, "another", 2.0)
    before = time.monotonic()
    assert result(rig, job, told=told).measured.items == 2
    assert time.monotonic() - before > 1
    assert told[0].startswith("Another check of the job measures 1 shard.")
    # A slow one keeps its shard for longer than a lease.
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(result, rig, job, quality("strict", "meters.speaker={}"), Slow(3.0))
        time.sleep(2.5)
        assert not rig.ledger.take_for_check(job.id, 0, "another", 0.1)
        assert slow.result().passed
    assert rig.ledger.take_for_check(job.id, 0, "another", 0.1)


def test_what_others_measured_meanwhile_is_kept(build: Callable[..., Rig]) -> None:
    """Even if a shard is measured twice, because the lease of a stopped process has ended."""
    rig = build()
    job = run(rig, ["one"], quality("basic"))

    class Late(Costs):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            if not self.measured:
                (item,), (row,) = audio_items(rig.ledger, rig.store, job.id), rig.ledger.draws(job.id)
                scores = {**row.draw.scores, "similarity": Score(0.9, None, "")}
                new = msgspec.structs.replace(row.draw, scores=scores)
                rig.ledger.commit_checks(job, [(item.artifact, row.draw, new, "")])
            return super().measure_one(meters, utterance)

    result(rig, job, host=Late())
    (row,) = rig.ledger.draws(job.id)
    assert "similarity" in row.draw.scores
    assert result(rig, job).measured.items == 1
    (row,) = rig.ledger.draws(job.id)
    assert row.draw.scores.keys() >= {"similarity", "wer"}


def test_the_provenance_has_the_meters_of_a_later_check(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, TEXTS, quality("basic"))
    put_provenance(rig.store, job, EngineInfo(engine="fake"))
    asked = quality("strict", "bounds.wer.high=0.3", "sample=0.9")
    result(rig, job, asked)
    result(rig, job, asked)
    worker, later = read_records(rig.store, job)
    assert (worker.recorded_by, later.recorded_by) == ("worker", "check")
    assert later.checks is not UNSET
    assert later.checks.meters.keys() == {"asr", "distillmos"}
    assert later.checks.bounds["wer"].high == 0.3
    assert (later.spec_sha, later.model.engine, later.checks.sample) == (job.spec_sha, "", 0.9)
    assert "faster-whisper" in later.libraries
    # A record of one that made no audio does not say with what to make it again.
    with reopened_model(rig.store, job, lambda text: pytest.fail(text)):
        pass


def test_jobs_of_codes_are_refused(build: Callable[..., Rig]) -> None:
    rig = build()
    job = run(rig, ["one"], quality("basic"))
    coded = msgspec.structs.replace(job.spec, output="codes")
    with pytest.raises(ConfigError, match="codes alone"):
        checks_of(dataclasses.replace(job, spec=coded), quality())
