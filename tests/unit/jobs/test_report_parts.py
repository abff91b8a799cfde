"""The parts of a report: pictures, charts, the timeline, and the choice of items."""

from __future__ import annotations

import base64
import io
import math
import re
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from jobs.ledger.queries import Attempt, Commit
from jobs.ledger.records import Artifact, ItemRow, ItemState
from jobs.report import charts, clips
from jobs.report.charts import (
    COMMIT_SECONDS,
    Span,
    WorkClock,
    eta_checks,
    spans_of_attempts,
    spans_of_commits,
    timeline,
)
from jobs.report.sample import PACE, SampleItem, _chosen, _judge
from pipelines.errors import ErrorCode

RATE = 16_000


def tone(pitch_hz: float, seconds: float, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * pitch_hz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def spectrogram(samples: np.ndarray) -> np.ndarray:
    """Brightness of the picture, [height, width], the top row first."""
    data = clips.picture(samples, RATE).spectrogram.removeprefix("data:image/png;base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    image.load()
    return np.asarray(image.convert("L"), np.float32)


def test_a_higher_tone_stands_higher_in_the_spectrogram() -> None:
    rows = [
        int(spectrogram(tone(pitch, 1.0)).mean(axis=1).argmax()) for pitch in (150, 400, 1000, 3000, 7000)
    ]
    assert all(low > high for low, high in pairwise(rows)), rows
    silent = spectrogram(np.zeros(RATE, np.float32))
    assert silent.shape == (clips.SPECTROGRAM_HEIGHT, clips.WIDTH)
    assert silent.max() < 16


def test_time_runs_to_the_right() -> None:
    samples = np.concatenate([tone(1000, 0.5), np.zeros(RATE // 2, np.float32)])
    columns = spectrogram(samples).max(axis=0)
    assert columns[: len(columns) // 3].min() > 2 * columns[-len(columns) // 3 :].max()


def test_the_wave_is_as_high_as_the_speech_is_loud() -> None:
    heights = []
    for level in (0.0, 0.25, 1.0):
        values = [
            float(y) for y in re.findall(r" (-?[\d.]+)", clips.picture(tone(440, 0.3, level), RATE).wave)
        ]
        assert all(0 <= value <= clips.WAVE_HEIGHT + 0.5 for value in values)
        heights.append(max(values) - min(values))
    assert heights[0] < 1
    assert heights[1] == pytest.approx(clips.WAVE_HEIGHT / 4, abs=1.5)
    assert heights[2] == pytest.approx(clips.WAVE_HEIGHT, abs=1.5)


@pytest.mark.parametrize("samples", [1, 2, 50, 111, 5000])
def test_short_speech_has_a_picture(samples: int) -> None:
    made = clips.picture(np.full(samples, 0.5, np.float32), RATE)
    assert made == clips.picture(np.full(samples, 0.5, np.float32), RATE)
    assert (made.peak_dbfs, made.rms_dbfs) == (pytest.approx(-6.02, abs=0.01),) * 2
    assert made.seconds == samples / RATE


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.0, 0.0], [5.0] * 9, list(range(100)), [-3.0, 2.5, 1e6], [0.1, 0.2, 0.3], [1e-9, 2e-9]],
)
def test_every_value_is_in_one_bar(values: list[float]) -> None:
    chart = charts.histogram("k", "Title", "s", [*values, math.nan])
    assert chart is not None
    assert sum(bar.count for bar in chart.bars) == len(values)
    assert chart.summary.endswith(f", {len(values):,} items.")
    assert chart.median is not None
    assert 1 <= len(chart.bars) <= 2 * charts.MAX_BARS
    left, right = chart.ends
    assert left <= chart.bars[0].begin <= chart.bars[-1].end <= right
    assert left <= chart.median <= right
    assert all(0 < bar.count <= chart.y_ticks[-1] for bar in chart.bars)


def test_the_bars_hold_what_their_labels_say() -> None:
    chart = charts.histogram("k", "Title", "", [0.5, 1.5, 1.6, 2.5, 9.5])
    assert chart is not None
    assert (
        [(bar.label, bar.count) for bar in chart.bars]
        == chart.rows
        == [("0 to 2", 3), ("2 to 4", 1), ("8 to 10", 1)]
    )
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


def test_a_timeline_keeps_every_item_and_its_time() -> None:
    attempts = [
        Attempt(0, 1, 0.0, 60.0, 30, 0, 60_000.0),
        Attempt(1, 1, 60.0, 120.0, 90, 10, 90_000.0),
        Attempt(2, 1, 120.0, 120.0, 1, 0, 1.0),
    ]
    line = timeline(spans_of_attempts(attempts), 120.0)
    assert (line.seconds, line.spans) == (pytest.approx(120.0), 3)
    assert sum(line.items) == pytest.approx(131)
    assert sum(line.audio_seconds) == pytest.approx(150.001)
    assert line.rates(line.items)[0] == (pytest.approx(1.0), pytest.approx(0.5))
    assert line.rates(line.items)[-2][1] == pytest.approx(100 / 60)
    assert line.rates(line.audio_seconds)[0][1] == pytest.approx(1.0)


def test_a_commit_stands_for_the_time_before_it_but_not_for_a_pause() -> None:
    commits = [
        Commit(102.0, 4, 8000.0),
        Commit(104.0, 4, 8000.0),
        Commit(3704.0, 10, 20_000.0),
        Commit(None, 1, 1.0),
    ]
    spans = list(spans_of_commits(commits, 100.0))
    assert [(span.start, span.end) for span in spans[:3]] == [
        (100.0, 102.0),
        (102.0, 104.0),
        (3704.0 - COMMIT_SECONDS, 3704.0),
    ]
    line = timeline(spans, 3704.0)
    assert sum(line.items) == pytest.approx(19)
    assert line.items[len(line.items) // 2] == 0


def test_the_eta_of_an_even_job_is_right_and_of_a_slowing_one_too_short() -> None:
    even = timeline(spans_of_attempts([Attempt(0, 1, 0.0, 100.0, 100, 0, 0.0)]), 100.0)
    assert all(abs(check.error) < 1e-9 for _, check in eta_checks(even))
    slowing = timeline(
        spans_of_attempts([Attempt(0, 1, 0.0, 20.0, 80, 0, 0.0), Attempt(1, 1, 20.0, 100.0, 20, 0, 0.0)]),
        100.0,
    )
    found = eta_checks(slowing)
    assert [share for share, _ in found] == [0.1, 0.25, 0.5, 0.75, 0.9]
    assert all(check.error < 0 for _, check in found)
    assert eta_checks(timeline([], 1.0)) == []


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
    _judge(made, [])
    odd = {one.row.index: one.why for one in made if one.badness > 0}
    assert set(odd) == {7, 17, 27, 28}
    assert odd[7] == "wer 0.9, where 0.11 is common"


def test_failed_then_refused_then_odd_then_typical() -> None:
    made = [item(n, **{PACE: 15.0 + n % 3}) for n in range(60)]
    made[40].refused = ["silence"]
    made[41].values[PACE] = 2.0
    failed = [SampleItem(ItemRow(100, "x", ItemState.FAILED, 0, 1, ErrorCode.SYNTH_NAN, "", None), None)]
    _judge(made, failed)
    shown = _chosen(made, failed, 9)
    assert [one.row.index for one in shown[:3]] == [100, 40, 41]
    assert (len(shown), len({one.row.index for one in shown})) == (9, 9)
    assert [one.why for one in shown[:3]] == ["synth.nan", "refused by silence", "pace 2, where 16 is common"]
    spread = [one.row.index for one in shown[3:]]
    assert spread == sorted(spread)
    assert spread[-1] - spread[0] > 40
    assert len(_chosen(made, failed, 500)) == 61
    assert _chosen(made, failed, 0) == []


def test_the_clock_of_work_stands_still_between_leases() -> None:
    clock = WorkClock([(100.0, 110.0), (500.0, 530.0)])
    assert [clock.at(time) for time in (0, 100, 104, 110, 300, 500, 515, 530, 900)] == [
        0,
        0,
        4,
        10,
        10,
        10,
        25,
        40,
        40,
    ]
    assert clock.seconds == 40
    assert list(clock.at_work([Span(104, 515, 3, 1.5)])) == [Span(4, 25, 3, 1.5)]
    assert WorkClock([]).seconds == 0
