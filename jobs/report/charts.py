"""Numbers as the geometry of charts, which the page's template draws in one way, as SVG; and how a job
went over its time at work: from its commits, or for a large job from the leases of its shards, each spread
over its time."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jobs.ledger.queries import Attempt, Commit

WIDTH, HEIGHT = 560, 190
#: Room for the labels of the axes.
LEFT, BOTTOM, TOP, RIGHT = 52, 34, 10, 24
MAX_BARS = 24
#: Steps of a timeline; one of few commits has fewer.
BINS, MIN_BINS = 60, 12
#: With fewer spans a chart would show an even spread and not what happened. An ETA is judged from more spans
#: only.
MIN_SPANS, MIN_FOR_ETA = 4, 10
#: Maximum time that the work of one commit is spread over.
COMMIT_SECONDS = 10.0
#: Shares of the whole time at which the ETA's error is shown.
CHECKPOINTS = (0.1, 0.25, 0.5, 0.75, 0.9)
#: (pixels from the left or from the top, label)
Tick = tuple[float, str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in pixels, with what it says."""

    x: float
    y: float
    width: float
    height: float
    label: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: bars, or lines; and the same as a sentence and as a table."""

    key: str
    title: str
    unit: str
    summary: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    #: Headings and rows of the table under the chart.
    heads: tuple[str, str]
    rows: Sequence[tuple[str, object]]
    bars: Sequence[Bar] = ()
    #: Where the median is, in pixels from the left.
    median_at: float | None = None
    #: Name -> `points` of an SVG polyline.
    lines: Mapping[str, str] | None = None


def histogram(key: str, title: str, unit: str, values: Sequence[float]) -> Chart | None:
    """How often values fall in equal steps; None without a value that is a number."""
    known = sorted(filter(math.isfinite, values))
    if not known:
        return None
    low, high = known[0], known[-1]
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - max(0.5, abs(low) * 0.1), high + max(0.5, abs(high) * 0.1)
    step = nice_step((high - low) / min(MAX_BARS, max(6, round(math.sqrt(len(known))))))
    first = math.floor(low / step + 1e-9)
    steps = max(1, math.ceil(high / step - 1e-9) - first)
    counts = Counter(min(steps - 1, max(0, int(value / step - first + 1e-9))) for value in known)
    y, y_ticks = _y_axis(max(counts.values()), whole=True)
    width = (WIDTH - LEFT - RIGHT) / steps
    bars = [
        Bar(
            LEFT + index * width,
            y(counts[index]),
            max(1.0, width - 1),
            y(0) - y(counts[index]),
            f"{number((first + index) * step)} to {number((first + index + 1) * step)}{_spaced(unit)}",
            counts[index],
        )
        for index in range(steps)
        if counts[index]
    ]
    median = statistics.median(known)
    summary = f"{number(known[0])} to {number(known[-1])}, median {number(median)}{_spaced(unit)}, {len(known):,} items."
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=summary,
        x_ticks=[
            (LEFT + at * width, number((first + at) * step))
            for at in range(0, steps + 1, max(1, math.ceil(steps / 7)))
        ],
        y_ticks=y_ticks,
        heads=("Range", "Items"),
        rows=[(bar.label, bar.count) for bar in bars],
        bars=bars,
        median_at=LEFT + (median / step - first) * width,
    )


def lines(
    key: str, title: str, unit: str, seconds: float, summary: str, series: Mapping[str, Points]
) -> Chart | None:
    """Named lines through (seconds, value), the first of which is the table's; None with fewer than two
    points."""
    name, points = next(iter(series.items()))
    if len(points) < 2:
        return None
    y, y_ticks = _y_axis(max(value for line in series.values() for _, value in line) or 1.0, whole=False)
    x_scale = (WIDTH - LEFT - RIGHT) / max(seconds, 1e-9)
    # The largest unit of which there are two, and its sign.
    size, sign = next(
        ((size, sign) for size, sign in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= 2 * size),
        (1, "s"),
    )
    step = nice_step(max(seconds, 1e-3) / size / 6) * size
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=summary,
        x_ticks=[
            (LEFT + at * step * x_scale, f"{number(at * step / size)} {sign}")
            for at in range(int(seconds / step) + 1)
        ],
        y_ticks=y_ticks,
        heads=("Time", name.capitalize() or title),
        rows=[
            (f"{number(at / size)} {sign}", f"{number(value)}{_spaced(unit)}")
            for at, value in points[:: max(1, len(points) // 12)]
        ],
        lines={
            name: " ".join(f"{LEFT + at * x_scale:.1f},{y(value):.1f}" for at, value in line)
            for name, line in series.items()
        },
    )


def number(value: float) -> str:
    """A number for a person: three significant digits, no exponent for common sizes."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "unknown"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def nice_step(step: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def _y_axis(highest: float, *, whole: bool) -> tuple[Callable[[float], float], list[Tick]]:
    """Pixels from the top for a value, and the labels of the axis."""
    step = nice_step(highest / 4)
    if whole:
        step = max(1.0, math.ceil(step))
    count = max(1, math.ceil(highest / step - 1e-9))
    room = HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return TOP + room * (1 - value / (count * step))

    return y, [(y(index * step), number(index * step)) for index in range(count + 1)]


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


class Span(NamedTuple):
    """What was synthesized between two times of the ledger's clock."""

    start: float
    end: float
    items: float
    audio_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Equal steps of the time in which workers held shards, up to the end or to now."""

    step_seconds: float
    #: Items that ended, and seconds of speech, in each step.
    items: Sequence[float]
    audio_seconds: Sequence[float]
    #: Number of spans it was computed from. It shows nothing that is shorter than they are.
    spans: int

    @property
    def seconds(self) -> float:
        return self.step_seconds * len(self.items)

    def rates(self, values: Sequence[float]) -> list[tuple[float, float]]:
        """(middle of a step, value a second) of what is counted in each step."""
        return [
            ((index + 0.5) * self.step_seconds, value / self.step_seconds)
            for index, value in enumerate(values)
        ]


class EtaCheck(NamedTuple):
    """What `nightjar status` would have said at a time of a job that has ended by now."""

    at_seconds: float
    #: Time to go by the rate until then, and as it turned out.
    said_seconds: float
    was_seconds: float

    @property
    def error(self) -> float:
        """As a share of the whole time; above zero: it was too long."""
        return (self.said_seconds - self.was_seconds) / (self.at_seconds + self.was_seconds)


class WorkClock:
    """Counts only the time in which workers held shards of a job, as its rates do: without pauses, and
    without the time before a retry."""

    def __init__(self, busy: Sequence[tuple[float, float]]) -> None:
        """`busy`: (start, end) by the ledger's clock, in order and apart from each other."""
        self._busy = busy
        self._before = [0.0, *accumulate(end - start for start, end in busy)]
        #: All the time at work.
        self.seconds = self._before[-1]

    def at(self, time: float) -> float:
        """Seconds of work before a time of the ledger's clock."""
        index = bisect_right(self._busy, time, key=lambda busy: busy[0]) - 1
        if index < 0:
            return 0.0
        start, end = self._busy[index]
        return self._before[index] + min(time, end) - start

    def at_work(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The spans on this clock."""
        return (
            Span(self.at(span.start), self.at(span.end), span.items, span.audio_seconds) for span in spans
        )


def spans_of_commits(commits: Iterable[Commit], start: float) -> Iterator[Span]:
    """Each commit spread over the time since the one before, but no longer than `COMMIT_SECONDS`."""
    before = start
    for commit in commits:
        at = start if commit.at is None else commit.at
        yield Span(min(at, max(before, at - COMMIT_SECONDS)), at, commit.done, commit.audio_ms / 1000)
        before = at


def spans_of_attempts(attempts: Iterable[Attempt]) -> Iterator[Span]:
    """Each lease with its items and audio."""
    for attempt in attempts:
        yield Span(
            attempt.started_at, attempt.ended_at, attempt.done + attempt.failed, attempt.audio_ms / 1000
        )


def timeline(spans: Iterable[Span], seconds: float, bins: int = BINS) -> Timeline:
    """The timeline of spans between 0 and `seconds`. Memory does not grow with the spans."""
    step = max(seconds, 1e-3) / bins
    items, audio, count = [0.0] * bins, [0.0] * bins, 0
    for span in spans:
        count += 1
        begin = min(max(span.start, 0.0), seconds)
        finish = min(max(span.end, begin), seconds)
        for index in range(min(int(begin / step), bins - 1), min(int(finish / step), bins - 1) + 1):
            overlap = max(0.0, min(finish, (index + 1) * step) - max(begin, index * step))
            share = overlap / (finish - begin) if finish > begin else 1.0
            items[index] += span.items * share
            audio[index] += span.audio_seconds * share
    return Timeline(step, items, audio, count)


def eta_checks(line: Timeline) -> list[EtaCheck]:
    """The ETA at the end of each step before the last, as `jobs.status.eta_seconds` makes it, beside the
    truth."""
    total = sum(line.items)
    times = [index * line.step_seconds for index in range(1, len(line.items))]
    return [
        EtaCheck(at, max(0.0, total - ended) * at / ended, line.seconds - at)
        for at, ended in zip(times, accumulate(line.items))
        if ended > 0
    ]


def checkpoints(checks: Sequence[EtaCheck], seconds: float) -> list[tuple[float, EtaCheck]]:
    """(share of the time, check) nearest to each of `CHECKPOINTS`."""
    return (
        [
            (share, min(checks, key=lambda check: abs(check.at_seconds - share * seconds)))
            for share in CHECKPOINTS
        ]
        if checks
        else []
    )
