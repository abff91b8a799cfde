"""Numbers as charts, which the page's template draws in one way, as SVG; and how a job went over its time at
work: from its commits, or for a large job from the leases of its shards, each spread over its time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jobs.ledger.queries import Attempt, Commit

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """How many values lie in a range, which the label names."""

    begin: float
    end: float
    count: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: bars, or a line; and the same as a sentence and as a table."""

    key: str
    title: str
    unit: str
    summary: str
    #: Ends of the axis to the right, and (value, label) on it.
    ends: tuple[float, float]
    x_ticks: Sequence[tuple[float, str]]
    #: Values on the axis upwards, from 0 to its end.
    y_ticks: Sequence[float]
    #: Headings and rows of the table under the chart.
    heads: tuple[str, str]
    rows: Sequence[tuple[str, object]]
    bars: Sequence[Bar] = ()
    median: float | None = None
    #: Of a line.
    points: Points = ()


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
    spaced = f" {unit}" if unit else ""
    bars = [
        Bar(begin, end, count, f"{number(begin)} to {number(end)}{spaced}")
        for begin, end, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    median = statistics.median(known)
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=f"{number(known[0])} to {number(known[-1])}, median {number(median)}{spaced}, {len(known):,} items.",
        ends=(edges[0], edges[-1]),
        x_ticks=[(edge, number(edge)) for edge in edges[:: max(1, math.ceil((len(edges) - 1) / 7))]],
        y_ticks=_y_ticks(max(counts), 1.0),
        heads=("Range", "Items"),
        rows=[(bar.label, bar.count) for bar in bars],
        bars=bars,
        median=median,
    )


def line(key: str, title: str, unit: str, seconds: float, summary: str, points: Points) -> Chart:
    """A line through (seconds, value)."""
    # The largest unit of which there are two, and its sign.
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, sign = next((one for one in units if seconds >= 2 * one[0]), units[-1])
    step = nice_step(max(seconds, 1e-3) / size / 6) * size
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=summary,
        ends=(0.0, max(seconds, 1e-9)),
        x_ticks=[(at * step, f"{number(at * step / size)} {sign}") for at in range(int(seconds / step) + 1)],
        y_ticks=_y_ticks(max(value for _, value in points) or 1.0),
        heads=("Time", title),
        rows=[
            (f"{number(at / size)} {sign}", f"{number(value)} {unit}")
            for at, value in points[:: max(1, len(points) // 12)]
        ],
        points=points,
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


def _y_ticks(highest: float, whole: float = 0.0) -> list[float]:
    """Values from 0 to at least `highest`, each a multiple of `whole`."""
    step = nice_step(highest / 4)
    step = max(whole, math.ceil(step)) if whole else step
    return [at * step for at in range(max(1, math.ceil(highest / step - 1e-9)) + 1)]


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
    #: Items that ended, and seconds of speech, in each step: float64 [steps].
    items: NDArray[np.float64]
    audio_seconds: NDArray[np.float64]
    #: Number of spans it was computed from. It shows nothing that is shorter than they are.
    spans: int

    @property
    def seconds(self) -> float:
        return self.step_seconds * len(self.items)

    def rates(self, values: NDArray[np.float64]) -> list[tuple[float, float]]:
        """(middle of a step, value a second) of what is counted in each step."""
        rates = enumerate((values / self.step_seconds).tolist())
        return [((index + 0.5) * self.step_seconds, rate) for index, rate in rates]


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
        self._times = np.array(busy, np.float64).ravel()
        work = list(accumulate((end - start for start, end in busy), initial=0.0))
        #: Seconds of work before each of these times.
        self._work = np.repeat(work, 2)[1:-1]
        #: All the time at work.
        self.seconds = work[-1]

    def at(self, time: float) -> float:
        """Seconds of work before a time of the ledger's clock."""
        return float(np.interp(time, self._times, self._work))

    def at_work(self, spans: Iterable[Span]) -> Iterator[Span]:
        """The spans on this clock."""
        return (span._replace(start=self.at(span.start), end=self.at(span.end)) for span in spans)


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
        items = attempt.done + attempt.failed
        yield Span(attempt.started_at, attempt.ended_at, items, attempt.audio_ms / 1000)


def timeline(spans: Iterable[Span], seconds: float, bins: int = BINS) -> Timeline:
    """The timeline of spans between 0 and `seconds`. Memory does not grow with the spans."""
    edges, step = np.linspace(0.0, max(seconds, 1e-3), bins + 1, retstep=True)
    items, audio, count = np.zeros(bins), np.zeros(bins), 0
    for span in spans:
        count += 1
        begin, end = np.clip([span.start, span.end], 0.0, edges[-1])
        # Its share before each edge; what took no time is in the step that begins then.
        before = np.clip((edges - begin) / max(end - begin, 1e-9), 0.0, 1.0)
        before[-1] = 1.0
        items += span.items * np.diff(before)
        audio += span.audio_seconds * np.diff(before)
    return Timeline(float(step), items, audio, count)


def eta_checks(line: Timeline) -> list[tuple[float, EtaCheck]]:
    """(share of the time, the ETA at the end of the step that is nearest to it) for each of `CHECKPOINTS`:
    the ETA as `jobs.status.eta_seconds` makes it, beside the truth."""
    *ended, total = np.cumsum(line.items).tolist()
    times = [(index * line.step_seconds, done) for index, done in enumerate(ended, 1) if done > 0]
    checks = [EtaCheck(at, max(0.0, total - done) * at / done, line.seconds - at) for at, done in times]

    def nearest(share: float) -> EtaCheck:
        return min(checks, key=lambda check: abs(check.at_seconds - share * line.seconds))

    return [(share, nearest(share)) for share in CHECKPOINTS] if checks else []
