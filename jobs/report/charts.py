"""Numbers as bars, which the page's template draws as SVG; and how a job went over its time at work, from the
leases of its shards, each spread over its time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jobs.ledger.queries import Attempt

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BARS = 24


class Bar(NamedTuple):
    """What there is of a range, which the label names."""

    begin: float
    end: float
    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars; and the same as a sentence, and as a table with these headings."""

    key: str
    title: str
    unit: str
    summary: str
    heads: tuple[str, str]
    bars: Sequence[Bar]
    #: Edges of the bars, and their labels on the axis to the right.
    edges: Sequence[float]
    x_ticks: Sequence[tuple[float, str]]
    #: Values on the axis upwards, from 0 to its end.
    y_ticks: Sequence[float]
    median: float | None


def chart(
    key: str,
    title: str,
    unit: str,
    summary: str,
    heads: tuple[str, str],
    edges: Sequence[float],
    values: Sequence[float],
    scale: tuple[float, str],
    whole: float = 0.0,
    median: float | None = None,
) -> Chart:
    """A bar for each value that is not zero, between its two edges. `scale`: the size of the unit in which
    labels name the edges, and its sign; `whole`: the least step between the values that are marked."""
    size, sign = scale
    labels = [number(edge / size) for edge in edges]
    bars = [
        Bar(edges[at], edges[at + 1], value, f"{labels[at]} to {labels[at + 1]} {sign}".rstrip())
        for at, value in enumerate(values)
        if value
    ]
    highest = max(values) or 1.0
    step = max(whole, nice_step(highest / 4))
    every = math.ceil(len(values) / 7)
    return Chart(
        key,
        title,
        unit,
        summary,
        heads,
        bars,
        edges,
        x_ticks=[(edge, f"{label} {sign}".rstrip()) for edge, label in zip(edges, labels)][::every],
        y_ticks=[at * step for at in range(math.ceil(highest / step - 1e-9) + 1)],
        median=median,
    )


def histogram(key: str, title: str, unit: str, values: Sequence[float]) -> Chart | None:
    """How often values fall in equal steps; None without a value that is a number."""
    known = sorted(filter(math.isfinite, values))
    if not known:
        return None
    low, high = known[0], known[-1]
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - max(0.5, abs(low) * 0.1), high + max(0.5, abs(high) * 0.1)
    step = nice_step((high - low) / min(MAX_BARS, max(6, round(math.sqrt(len(known))))))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    edges = [at * step for at in range(first, max(last, first + 1) + 1)]
    counts = np.histogram(np.clip(known, edges[0], edges[-1]), edges)[0].tolist()
    median = statistics.median(known)
    spread = f"{number(known[0])} to {number(known[-1])}, median {number(median)} {unit}".rstrip()
    summary = f"{spread}, {len(known):,} items."
    return chart(
        key, title, unit, summary, ("Range", "Items"), edges, counts, (1, unit), whole=1.0, median=median
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
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was made in the steps of the time in which workers held shards of a job, up to the end or to
    now."""

    #: Seconds of work at the ends of the steps: float64 [steps + 1]; `scale` as that of a chart.
    edges: NDArray[np.float64]
    scale: tuple[float, str]
    #: Items that ended, and seconds of speech, in each step: float64 [steps].
    items: NDArray[np.float64]
    audio_seconds: NDArray[np.float64]
    #: Leases that it was computed from. It shows nothing that is shorter than they are.
    leases: int

    def chart(self, key: str, title: str, unit: str, values: NDArray[np.float64]) -> Chart:
        """The rate of what is counted in each step."""
        rates = values / np.diff(self.edges)
        average = values.sum() / self.edges[-1]
        summary = f"Highest {number(rates.max())}, on average {number(average)} {unit}."
        return chart(
            key, title, unit, summary, ("Time", title), self.edges.tolist(), rates.tolist(), self.scale
        )


def timeline(leases: Iterable[Attempt], busy: Sequence[tuple[float, float]]) -> Timeline:
    """The leases of a job by a clock of work, which stands still while nobody holds a shard; memory does
    not grow with them. `busy`: (start, end) of the times at work by the ledger's clock, in order."""
    work = np.cumsum([0.0, *(end - start for start, end in busy)])
    seconds = max(float(work[-1]), 1e-3)
    # The largest unit of which there are two.
    scales = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    scale = next((one for one in scales if seconds >= 2 * one[0]), scales[-1])
    step = nice_step(seconds / scale[0] / MAX_BARS) * scale[0]
    edges = np.append(np.arange(0.0, seconds * (1 - 1e-9), step), seconds)
    # The ledger's time of each edge.
    times = np.interp(edges, np.repeat(work, 2)[1:-1], np.ravel(busy))
    items, audio, count = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1), 0
    for lease in leases:
        count += 1
        # Its share before each edge; what took no time is in the step that begins then.
        share = np.clip((times - lease.started_at) / max(lease.ended_at - lease.started_at, 1e-9), 0, 1)
        share[-1] = 1.0
        items += (lease.done + lease.failed) * np.diff(share)
        audio += lease.audio_ms / 1000 * np.diff(share)
    return Timeline(edges, scale, items, audio, count)
