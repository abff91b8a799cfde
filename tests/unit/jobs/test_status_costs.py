"""What `nightjar status` says of time and money, from shard counters alone."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.ledger.records import Job, JobState, ShardState
from jobs.ledger.status import ItemCounts, JobStatus, ShardSpread, newest_jobs, status_and_errors, statuses_of
from jobs.ledger.transaction import read_with_driver
from jobs.progress import RecentRate
from jobs.status import (
    MIN_SHARDS,
    cost,
    cost_at_end,
    energy_view,
    eta_error_seconds,
    eta_seconds,
    status_lines,
    status_view,
)
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.times import with_times
from tests.support.worker_rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    rig.settings = with_times(rig.settings, shard_items=2)
    yield rig
    rig.close()
    forget()


def status_of(job: Job, done: list[float], to_go: int, seconds: float) -> JobStatus:
    """A running job whose ended shards of one item each took so many milliseconds of an engine that never
    rests."""
    job = replace(job, state=JobState.RUNNING, started_at=0.0)
    spread = ShardSpread(len(done), sum(done), sum(value * value for value in done))
    shards = {ShardState.DONE: len(done), ShardState.READY: to_go}
    return JobStatus(
        job,
        ItemCounts(len(done) + to_go, len(done)),
        shards,
        0,
        round(sum(done)),
        0,
        seconds,
        spread=spread,
        busy_seconds=seconds,
    )


def test_nineteen_of_twenty_jobs_end_within_the_error(rig: Rig) -> None:
    job = rig.submit(["a"])
    chooser = random.Random(7)
    hits: dict[int, list[bool]] = {}
    for ended in (3, 10, 40):
        for _ in range(400):
            taken = [chooser.lognormvariate(6, 0.4) for _ in range(ended + 30)]
            status = status_of(job, taken[:ended], 30, sum(taken[:ended]) / 1000)
            eta, error = eta_seconds(status), eta_error_seconds(status)
            assert eta is not None
            assert error is not None
            hits.setdefault(ended, []).append(abs(sum(taken[ended:]) / 1000 - eta) <= error)
    for ended, within in hits.items():
        assert 0.9 < statistics.mean(within) < 0.98, ended


def test_the_error_is_unknown_while_nothing_tells(rig: Rig) -> None:
    job = rig.submit(["a"])
    few = status_of(job, [5.0] * (MIN_SHARDS - 1), 4, 1.0)
    assert eta_error_seconds(few) is None
    untimed = status_of(job, [0.0] * 9, 4, 1.0)
    assert eta_error_seconds(untimed) is None
    paused = few._replace(job=replace(few.job, state=JobState.PAUSED))
    assert (eta_seconds(paused), eta_error_seconds(paused)) == (None, None)
    assert eta_error_seconds(status_of(job, [5.0] * 9, 4, 1.0)) == 0


def test_a_price_gives_what_was_spent_and_what_will_be(rig: Rig) -> None:
    status = status_of(rig.submit(["a"]), [1_800_000.0] * 4, 12, 7200.0)
    assert (cost(status, 3.0), cost_at_end(status, 3.0)) == (6.0, 24.0)
    assert (cost(status, None), cost_at_end(status, None)) == (None, None)
    view = status_view(status, 3.0)
    assert (view["gpu_seconds"], view["cost"], view["cost_at_end"], view["price_per_gpu_hour"]) == (
        7200.0,
        6.0,
        24.0,
        3.0,
    )
    assert "cost" not in status_view(status)
    lines = list(status_lines(status, 3.0))
    assert "engine  2 h 0 min (2.00 h) busy" in lines
    assert "cost    6.00, about 24.00 at the end, at 3 per engine hour" in lines
    nothing = status_of(rig.submit(["b"]), [], 12, 0.0)
    assert cost_at_end(nothing, 3.0) is None


def test_energy_is_told_for_a_second_of_audio_where_it_is_known(rig: Rig) -> None:
    unknown = status_of(rig.submit(["a"]), [1000.0] * 4, 0, 4.0)._replace(audio_ms=8000)
    assert "joules_per_audio_s" not in status_view(unknown)
    assert "engine  4.0 s busy" in list(status_lines(unknown))
    status = unknown._replace(energy_mj=1_560)
    assert status_view(status)["joules_per_audio_s"] == 0.195
    assert "engine  4.0 s busy, 0.195 J per audio-second" in list(status_lines(status))
    assert RecentRate().facts(status) == ", 0.195 J per audio-second"
    assert energy_view(status._replace(audio_ms=0)) == {}


def test_the_driver_and_the_ledger_agree_about_the_spread(rig: Rig) -> None:
    job = rig.submit(["a", "bb", "ccc", "dddd", "[[fail:synth.nan]]", "[[fail:synth.nan]]", "e", "f"])
    rig.pipeline.seconds_per_character = 0.01
    for _ in range(3):
        rig.run_next()
    seen = read_with_driver(rig.settings.ledger_url, lambda reader: status_and_errors(reader, job.id))
    assert seen is not None
    status, known = seen[0], rig.status(job)
    assert status.spread == known.spread
    # The shard whose items failed made no speech.
    assert status.spread.shards == 2
    assert status.spread.item_ms > 0
    assert status.spread.item_ms_squared > 0
    assert rig.ledger.read(lambda sql: statuses_of(sql, newest_jobs(sql)))[0].spread == status.spread
