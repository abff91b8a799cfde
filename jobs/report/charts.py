"""Numbers as the geometry of charts: histograms and lines over time. The page's template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 190
#: Room for the labels of the axes.
LEFT, BOTTOM, TOP, RIGHT = 52, 34, 10, 24
MAX_BARS = 24


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis; `at` in pixels from the left or from the top."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in pixels, with what it says."""

    x: float
    y: float
    width: float
    height: float
    label: str
    count: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fall in equal steps."""

    key: str
    title: str
    unit: str
    bars: Sequence[Bar]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    count: int
    low: float
    median: float
    high: float
    #: Where the median is, in pixels from the left.
    median_at: float


@dataclass(frozen=True, slots=True)
class Lines:
    """A value over time, and where there is one a second line to compare it with."""

    key: str
    title: str
    unit: str
    #: `points` of an SVG polyline.
    points: str
    other: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    #: (time, value) for the table under the chart.
    rows: Sequence[tuple[str, str]]
    summary: str
    names: tuple[str, str] = ("", "")


def histogram(key: str, title: str, unit: str, values: Sequence[float]) -> Histogram | None:
    """The histogram of values that are numbers; None without any."""
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return None
    low, high = known[0], known[-1]
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - max(0.5, abs(low) * 0.1), high + max(0.5, abs(high) * 0.1)
    step = nice_step((high - low) / min(MAX_BARS, max(6, round(math.sqrt(len(known))))))
    first = math.floor(low / step + 1e-9)
    bars = max(1, math.ceil(high / step - 1e-9) - first)
    counts = [0] * bars
    for value in known:
        counts[min(bars - 1, max(0, int((value / step) - first + 1e-9)))] += 1
    y_ticks, top = _y_axis(max(counts), whole=True)
    width = (WIDTH - LEFT - RIGHT) / bars
    room = HEIGHT - TOP - BOTTOM
    drawn = [
        Bar(
            x=LEFT + index * width,
            y=TOP + room * (1 - count / top),
            width=max(1.0, width - 1),
            height=room * count / top,
            label=f"{number((first + index) * step)} to {number((first + index + 1) * step)}{_spaced(unit)}",
            count=count,
        )
        for index, count in enumerate(counts)
    ]
    every = max(1, math.ceil(bars / 7))
    x_ticks = [Tick(LEFT + index * width, number((first + index) * step)) for index in range(0, bars + 1, every)]
    middle = known[len(known) // 2] if len(known) % 2 else (known[len(known) // 2 - 1] + known[len(known) // 2]) / 2
    at = LEFT + (middle / step - first) * width
    return Histogram(key, title, unit, drawn, x_ticks, y_ticks, len(known), known[0], middle, known[-1], at)


def lines(
    key: str,
    title: str,
    unit: str,
    points: Sequence[tuple[float, float]],
    seconds: float,
    summary: str,
    other: Sequence[tuple[float, float]] = (),
    names: tuple[str, str] = ("", ""),
) -> Lines | None:
    """A line through (seconds, value); None with fewer than two points."""
    if len(points) < 2:
        return None
    y_ticks, top = _y_axis(max(value for _, value in [*points, *other]) or 1.0, whole=False)
    x_scale = (WIDTH - LEFT - RIGHT) / max(seconds, 1e-9)
    room = HEIGHT - TOP - BOTTOM

    def drawn(line: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{LEFT + at * x_scale:.1f},{TOP + room * (1 - value / top):.1f}" for at, value in line)

    step, unit_seconds, letter = _time_step(seconds)
    x_ticks = [Tick(LEFT + at * step * x_scale, f"{number(at * step / unit_seconds)} {letter}") for at in range(int(seconds / step) + 1)]
    every = max(1, len(points) // 12)
    rows = [(f"{number(at / unit_seconds)} {letter}", f"{number(value)}{_spaced(unit)}") for at, value in points[::every]]
    return Lines(key, title, unit, drawn(points), drawn(other), x_ticks, y_ticks, rows, summary, names)


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


def _y_axis(highest: float, *, whole: bool) -> tuple[list[Tick], float]:
    step = nice_step(highest / 4)
    if whole:
        step = max(1.0, math.ceil(step))
    count = max(1, math.ceil(highest / step - 1e-9))
    room = HEIGHT - TOP - BOTTOM
    return [Tick(TOP + room * (1 - index / count), number(index * step)) for index in range(count + 1)], count * step


def _time_step(seconds: float) -> tuple[float, float, str]:
    """Seconds between labels, seconds of the unit they are in, and its sign."""
    unit, letter = next(((size, sign) for size, sign in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    return nice_step(max(seconds, 1e-3) / unit / 6) * unit, unit, letter


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""
