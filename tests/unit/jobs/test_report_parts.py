"""The parts of a report: waveforms, charts, the timeline, and the choice of items."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from jobs.ledger.queries import Attempt
from jobs.ledger.records import Artifact, ItemRow, ItemState
from jobs.report import charts
from jobs.report.charts import timeline
from jobs.report.sample import HEIGHT, PACE, Sample, SampleItem, picture
from pipelines.errors import ErrorCode

RATE = 16_000


def tone(pitch_hz: float, seconds: float, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * pitch_hz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def test_the_wave_is_as_high_as_the_speech_is_loud() -> None:
    heights = []
    for level in (0.0, 0.25, 1.0):
        values = [float(y) for y in re.findall(r"[ V](-?[\d.]+)", picture(tone(440, 0.3, level), RATE).wave)]
        assert all(0 <= value <= HEIGHT + 0.5 for value in values)
        heights.append(max(values) - min(values))
    assert heights[0] < 1
    assert heights[1] == pytest.approx(HEIGHT / 4, abs=1.5)
    assert heights[2] == pytest.approx(HEIGHT, abs=1.5)


@pytest.mark.parametrize("samples", [1, 2, 50, 111, 5000])
def test_short_speech_has_a_picture(samples: int) -> None:
    made = picture(np.full(samples, 0.5, np.float32), RATE)
    assert made == picture(np.full(samples, 0.5, np.float32), RATE)
    assert (made.peak_dbfs, made.rms_dbfs) == (pytest.approx(-6.02, abs=0.01),) * 2
    assert made.seconds == samples / RATE


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [5.0] * 9, list(range(100)), [-3.0, 2.5, 1e6], [0.1, 0.2, 0.3], [1e-9, 2e-9]],
)
def test_every_value_is_in_one_bar(values: list[float]) -> None:
    chart = charts.histogram("k", "Title", "s", [*values, math.nan])
    assert chart is not None
    assert sum(bar.value for bar in chart.bars) == len(values)
    assert chart.summary.endswith(f", {len(values):,} items.")
    assert chart.median is not None
    assert 1 <= len(chart.bars) <= 2 * charts.MAX_BARS
    left, right = chart.edges[0], chart.edges[-1]
    assert left <= chart.bars[0].begin <= chart.bars[-1].end <= right
    assert left <= chart.median <= right
    assert all(0 < bar.value <= chart.y_ticks[-1] for bar in chart.bars)


def test_the_bars_hold_what_their_labels_say() -> None:
    chart = charts.histogram("k", "Title", "", [0.5, 1.5, 1.6, 2.5, 9.5])
    assert chart is not None
    assert [(bar.label, bar.value) for bar in chart.bars] == [("0 to 2", 3), ("2 to 4", 1), ("8 to 10", 1)]
    assert charts.histogram("k", "Title", "", [math.nan]) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1,234"),
        (0.01234, "0.0123"),
        (12.0, "12"),
        (-23.04, "-23"),
        (3e-7, "3.00e-07"),
        (math.nan, "unknown"),
        (10, "10"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert charts.number(value) == text


def item(index: int, **values: float) -> SampleItem:
    audio = Artifact(index, "audio", "k", "", 1, 1000, RATE, RATE, 7)
    row = ItemRow(index, str(index), ItemState.DONE, 0, 1, None, None, audio)
    return SampleItem(row, audio, values=values)


def test_what_is_odd_depends_on_the_score() -> None:
    made = [
        item(n, wer=0.1 + n % 3 / 100, distillmos=4.0 + n % 3 / 10, **{PACE: 15.0 + n % 3}) for n in range(50)
    ]
    made[7].values["wer"], made[8].values["wer"] = 0.9, 0.0
    made[17].values["distillmos"], made[18].values["distillmos"] = 1.5, 9.0
    made[27].values[PACE], made[28].values[PACE] = 5.0, 30.0
    Sample(made, [], whole=True).rank()
    odd = {one.row.index: one.reason for one in made if one.badness > 0}
    assert set(odd) == {7, 17, 27, 28}
    assert odd[7] == "wer 0.9, median 0.11"


def test_failed_then_refused_then_odd_then_typical() -> None:
    made = [item(n, **{PACE: 15.0 + n % 3}) for n in range(60)]
    made[40].refused = ["silence"]
    made[41].values[PACE] = 2.0
    failed = [SampleItem(ItemRow(100, "x", ItemState.FAILED, 0, 1, ErrorCode.SYNTH_NAN, "", None), None)]
    sample = Sample(made, failed, whole=True)
    sample.rank()
    shown = sample.choose(9)
    assert [one.row.index for one in shown[:3]] == [100, 40, 41]
    assert (len(shown), len({one.row.index for one in shown})) == (9, 9)
    assert [one.reason for one in shown[:3]] == ["synth.nan", "failed checks: silence", "pace 2, median 16"]
    spread = [one.row.index for one in shown[3:]]
    assert spread == sorted(spread)
    assert spread[-1] - spread[0] > 40
    assert len(sample.choose(500)) == 61
    assert sample.choose(0) == []


def test_a_timeline_keeps_every_item_and_its_time() -> None:
    leases = [
        Attempt(0, 1, 0.0, 60.0, 30, 0, 60_000.0),
        Attempt(1, 1, 60.0, 120.0, 90, 10, 90_000.0),
        Attempt(2, 1, 120.0, 120.0, 1, 0, 1.0),
    ]
    line = timeline(leases, [(0.0, 120.0)])
    assert (line.edges[-1], line.leases) == (pytest.approx(120.0), 3)
    assert sum(line.items) == pytest.approx(131)
    assert sum(line.audio_seconds) == pytest.approx(150.001)
    chart = line.chart("k", "Throughput", "items per second", line.items)
    assert chart.bars[0].value == pytest.approx(0.5)
    assert chart.bars[-2].value == pytest.approx(100 / 60)
    assert (chart.bars[0].begin, chart.bars[-1].end) == (0, pytest.approx(120.0))
    assert chart.bars[0].label.endswith(" min")
    assert f"average {charts.number(131 / 120)} items per second" in chart.summary


def test_the_clock_of_work_stands_still_between_leases() -> None:
    leases = [Attempt(0, 1, 100.0, 110.0, 10, 0, 0.0), Attempt(1, 1, 500.0, 530.0, 90, 0, 0.0)]
    line = timeline(leases, [(100.0, 110.0), (500.0, 530.0)])
    assert line.edges[-1] == 40
    ended = dict(zip(line.edges[1:].tolist(), line.items.cumsum().tolist(), strict=True))
    assert (ended[10], ended[20], ended[40]) == pytest.approx((10, 40, 100))


@pytest.mark.parametrize("seconds", [0.0, 0.5, 61.0, 5000.0, 1e6])
def test_a_timeline_of_any_length_has_some_steps(seconds: float) -> None:
    line = timeline([Attempt(0, 1, 7.0, 7.0 + seconds, 3, 0, 9.0)], [(7.0, 7.0 + seconds)])
    assert 1 <= len(line.items) <= charts.MAX_BARS
    assert sum(line.items) == pytest.approx(3)
    assert np.all(np.diff(line.edges) > 0)
