"""Bar charts, which the page's template draws as SVG: histograms, and rates over a job's busy time, from the
leases of its shards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.ledger.queries import Attempt

MAX_BARS = 24


class Bar(NamedTuple):
    """A range, which the label names, and its value."""

    begin: float
    end: float
    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A bar chart, with a summary in words and the headings of its table. Each value that is not zero is a
    bar between two edges."""

    key: str
    title: str
    unit: str
    summary: str
    heads: tuple[str, str]
    edges: Sequence[float]
    values: Sequence[float]
    #: Size and symbol of the labels' unit.
    scale: tuple[float, str]
    #: Minimum step between the ticks of the vertical axis.
    min_step: float = 0.0
    median: float | None = None

    @cached_property
    def bars(self) -> list[Bar]:
        size, sign = self.scale
        spans = zip(self.edges, self.edges[1:], self.values, strict=False)
        return [
            Bar(begin, end, value, f"{number(begin / size)} to {number(end / size)} {sign}".rstrip())
            for begin, end, value in spans
            if value
        ]

    @cached_property
    def x_ticks(self) -> list[tuple[float, str]]:
        """The ticks of the horizontal axis, with their labels."""
        size, sign = self.scale
        marked = self.edges[:: math.ceil(len(self.values) / 7)]
        return [(edge, f"{number(edge / size)} {sign}".rstrip()) for edge in marked]

    @cached_property
    def y_ticks(self) -> list[float]:
        """The ticks of the vertical axis, from 0 up."""
        highest = max(self.values) or 1.0
        step = max(self.min_step, round_step(highest / 4))
        return [at * step for at in range(math.ceil(highest / step - 1e-9) + 1)]


def histogram(key: str, title: str, unit: str, values: Sequence[float]) -> Chart | None:
    """Counts values in equal steps; None without a finite value."""
    known = sorted(filter(math.isfinite, values))
    if not known:
        return None
    low = known[0]
    high = known[-1]
    if high - low < 1e-9 * max(1.0, abs(high)):
        low -= max(0.5, abs(low) * 0.1)
        high += max(0.5, abs(high) * 0.1)
    step = round_step((high - low) / min(MAX_BARS, max(6, round(math.sqrt(len(known))))))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    edges = [at * step for at in range(first, max(last, first + 1) + 1)]
    counts = np.histogram(np.clip(known, edges[0], edges[-1]), edges)[0].tolist()
    median = statistics.median(known)
    spread = f"{number(known[0])} to {number(known[-1])}, median {number(median)} {unit}".rstrip()
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=f"{spread}, {len(known):,} items.",
        heads=("Range", "Items"),
        edges=edges,
        values=counts,
        scale=(1, unit),
        min_step=1.0,
        median=median,
    )


def number(value: float) -> str:
    """A number as text for people: three significant digits, no exponent for common sizes."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "unknown"
    if abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def round_step(step: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


class Timeline(NamedTuple):
    """The items and the speech made in each step of a job's busy time, in which workers held its shards."""

    #: Busy seconds at the edges of the steps: float64 [steps + 1]; `scale` as in a chart.
    edges: NDArray[np.float64]
    scale: tuple[float, str]
    #: Items that ended, and seconds of speech, in each step: float64 [steps].
    items: NDArray[np.float64]
    audio_seconds: NDArray[np.float64]
    #: Number of leases from which it was computed. Changes within a lease are not visible.
    leases: int

    def chart(self, key: str, title: str, unit: str, values: NDArray[np.float64]) -> Chart:
        """The rates of the values over the steps."""
        rates = values / np.diff(self.edges)
        average = values.sum() / self.edges[-1]
        return Chart(
            key=key,
            title=title,
            unit=unit,
            summary=f"Maximum {number(rates.max())}, average {number(average)} {unit}.",
            heads=("Time", title),
            edges=self.edges.tolist(),
            values=rates.tolist(),
            scale=self.scale,
        )


def timeline(leases: Iterable[Attempt], busy: Sequence[tuple[float, float]]) -> Timeline:
    """Spreads each lease of a job evenly over the busy time it took; memory does not grow with the leases.
    `busy`: (start, end) of the times in which workers held shards, by the ledger's clock, in order."""
    work = np.cumsum([0.0, *(end - start for start, end in busy)])
    seconds = max(float(work[-1]), 1e-3)
    # The largest unit that fits twice into the busy time.
    scales = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    scale = next((one for one in scales if seconds >= 2 * one[0]), scales[-1])
    step = round_step(seconds / scale[0] / MAX_BARS) * scale[0]
    edges = np.append(np.arange(0.0, seconds * (1 - 1e-9), step), seconds)
    # The ledger's time of each edge.
    times = np.interp(edges, np.repeat(work, 2)[1:-1], np.ravel(busy))
    items = np.zeros(len(edges) - 1)
    audio = np.zeros(len(edges) - 1)
    count = 0
    for lease in leases:
        count += 1
        # The share of the lease before each edge. A lease of length zero counts in the step that contains it.
        share = np.clip((times - lease.started_at) / max(lease.ended_at - lease.started_at, 1e-9), 0, 1)
        share[-1] = 1.0
        items += (lease.done + lease.failed) * np.diff(share)
        audio += lease.audio_ms / 1000 * np.diff(share)
    return Timeline(edges, scale, items, audio, count)
