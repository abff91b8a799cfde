"""Numbers as the geometry of charts: histograms and lines over time. The page's template draws all of them in one way, as SVG."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 190
#: Room for the labels of the axes.
LEFT, BOTTOM, TOP, RIGHT = 52, 34, 10, 24
MAX_BARS = 24
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
        x_ticks=[(LEFT + at * width, number((first + at) * step)) for at in range(0, steps + 1, max(1, math.ceil(steps / 7)))],
        y_ticks=y_ticks,
        heads=("Range", "Items"),
        rows=[(bar.label, bar.count) for bar in bars],
        bars=bars,
        median_at=LEFT + (median / step - first) * width,
    )


def lines(key: str, title: str, unit: str, seconds: float, summary: str, series: Mapping[str, Points]) -> Chart | None:
    """Named lines through (seconds, value), the first of which is the table's; None with fewer than two points."""
    name, points = next(iter(series.items()))
    if len(points) < 2:
        return None
    y, y_ticks = _y_axis(max(value for line in series.values() for _, value in line) or 1.0, whole=False)
    x_scale = (WIDTH - LEFT - RIGHT) / max(seconds, 1e-9)
    # The largest unit of which there are two, and its sign.
    size, sign = next(((size, sign) for size, sign in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    step = nice_step(max(seconds, 1e-3) / size / 6) * size
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=summary,
        x_ticks=[(LEFT + at * step * x_scale, f"{number(at * step / size)} {sign}") for at in range(int(seconds / step) + 1)],
        y_ticks=y_ticks,
        heads=("Time", name.capitalize() or title),
        rows=[(f"{number(at / size)} {sign}", f"{number(value)}{_spaced(unit)}") for at, value in points[:: max(1, len(points) // 12)]],
        lines={name: " ".join(f"{LEFT + at * x_scale:.1f},{y(value):.1f}" for at, value in line) for name, line in series.items()},
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
