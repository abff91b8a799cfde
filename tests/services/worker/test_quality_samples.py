"""Meters that measure a sample of a job's items: which items those are, and what the job tells about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from jobs.checks import Quality, quality_of
from jobs.ledger.records import Job
from jobs.ledger.status import MeasuredItems
from jobs.status import status_lines, status_view
from pipelines.registry import register_pipeline
from pipelines.request import Speech, SynthesisRequest
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.quality_kit import Costs
from tests.support.times import with_times
from tests.support.worker_rig import Rig
from worker.quality.process import MeterPool
from worker.result_writer import ResultWriter


def strict(*changes: str) -> Quality:
    quality = quality_of("strict", None, changes)
    assert quality is not None
    return quality


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    rig.writer = ResultWriter(meters=MeterPool(open_host=Costs))
    rig.runner = rig.runner_on(rig.ledger)
    yield rig
    rig.close()
    forget()


def run(rig: Rig, texts: list[str], quality: Quality, shard_items: int = 256, seed: int = 0) -> Job:
    rig.settings = with_times(rig.settings, shard_items=shard_items)
    job = rig.submit(texts, quality=quality, seed=seed)
    while not rig.status(job).job.state.final:
        rig.run_next()
    return job


def measured(rig: Rig, job: Job) -> set[str]:
    """The example ids of the items that meters have measured."""
    ids = {row.index: row.example_id for row in rig.items(job)}
    return {ids[row.index] for row in rig.ledger.draws(job.id) if "distillmos" in row.draw.scores}


def test_a_sample_is_drawn_by_seed_and_example_id_alone(rig: Rig) -> None:
    texts = [f"text {number}" for number in range(400)]
    jobs = [run(rig, texts, strict("sample=0.25"), size, seed) for size, seed in ((256, 0), (7, 0), (256, 1))]
    jobs.append(run(rig, texts, strict("sample=0.5", "draws=2")))
    first, small_shards, other_seed, larger = (measured(rig, job) for job in jobs)
    assert 70 < len(first) < 130
    assert first == small_shards
    assert first != other_seed
    assert first < larger
    for row in rig.ledger.draws(jobs[0].id):
        assert {"ended", "clipped", "silence", "pause", "loudness"} <= row.draw.scores.keys()


def test_the_failure_rate_of_a_sample_has_an_interval_and_a_maximum(rig: Rig) -> None:
    texts = [f"{'[[wer:1]] ' if number % 10 == 0 else ''}text {number}" for number in range(400)]
    for maximum, above in (("0.5", False), ("0.02", True), ("0", True)):
        job = run(rig, texts, strict("sample=0.25", f"max_failure_rate={maximum}", "draws=2"))
        status, asked = rig.status(job), measured(rig, job)
        # A draw whose words are wrong is not measured by DistillMOS.
        bad = {row.index for row in rig.ledger.draws(job.id) if row.draw.code is not None}
        assert status.items.failed == len(bad) > 0
        assert (status.measured.items, status.measured.failed) == (len(asked) + len(bad), len(bad))
        view = status_view(status)["measured"]
        low, high = view["interval"]
        assert low < view["failure_rate"] == len(bad) / (len(asked) + len(bad)) < high
        assert (view["max_failure_rate"], view["above"]) == (float(maximum), above)
        line = next(line for line in status_lines(status) if line.startswith("checks"))
        assert f"{len(bad)} of {len(asked) + len(bad)} measured items failed a draw" in line
        assert ("above" in line) is above


class Untimed(FakePipeline):
    """Does not know when it says each word."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        return super().submit(dataclasses.replace(request, timestamps=False))


def test_the_times_of_words_are_measured_of_every_item(rig: Rig) -> None:
    rig.pipeline = Untimed()
    job = rig.submit(
        [f"text {number}" for number in range(60)],
        quality=strict("sample=0.25", "meters.align={}"),
        timestamps=True,
    )
    rig.run_next()
    sampled = measured(rig, job)
    assert 0 < len(sampled) < 60
    assert all("align" in row.draw.scores for row in rig.ledger.draws(job.id))
    # The aligner alone makes no item one of the sample.
    assert rig.status(job).measured.items == len(sampled)


def test_a_job_without_meters_tells_nothing(rig: Rig) -> None:
    job = run(rig, ["one", "[[silent]] two"], msgspec.structs.replace(strict(), vad="energy", meters={}))
    assert rig.status(job).measured.items == 0
    assert "measured" not in status_view(rig.status(job))


@pytest.mark.parametrize(
    ("failed", "items", "low", "high"),
    [(0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (2, 40, 0.0138, 0.1650), (50, 100, 0.4038, 0.5962), (5, 5, 0.5655, 1.0)],
)  # fmt: skip
def test_the_interval_is_wilsons(failed: int, items: int, low: float, high: float) -> None:
    found = MeasuredItems(items, failed).interval
    assert found == pytest.approx([low, high], abs=1e-4)
    assert not any(math.isnan(side) for side in found)
