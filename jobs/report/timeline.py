"""How a job went over its time at work: from its commits, or for a large job from the leases of its shards, each spread over its time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jobs.ledger.queries import Attempt, Commit

#: Steps of a timeline; one of few commits has fewer.
BINS, MIN_BINS = 60, 12
#: With fewer spans a chart would show an even spread and not what happened. An ETA is judged from more spans only.
MIN_SPANS, MIN_FOR_ETA = 4, 10
#: Maximum time that the work of one commit is spread over.
COMMIT_SECONDS = 10.0
#: Shares of the whole time at which the ETA's error is shown.
CHECKPOINTS = (0.1, 0.25, 0.5, 0.75, 0.9)


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
        return [((index + 0.5) * self.step_seconds, value / self.step_seconds) for index, value in enumerate(values)]


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
    """Counts only the time in which workers held shards of a job, as its rates do: without pauses, and without the time before a retry."""

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
        return (Span(self.at(span.start), self.at(span.end), span.items, span.audio_seconds) for span in spans)


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
        yield Span(attempt.started_at, attempt.ended_at, attempt.done + attempt.failed, attempt.audio_ms / 1000)


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
    """The ETA at the end of each step before the last, as `jobs.status.eta_seconds` makes it, beside the truth."""
    total = sum(line.items)
    times = [index * line.step_seconds for index in range(1, len(line.items))]
    return [
        EtaCheck(at, max(0.0, total - ended) * at / ended, line.seconds - at)
        for at, ended in zip(times, accumulate(line.items))
        if ended > 0
    ]


def checkpoints(checks: Sequence[EtaCheck], seconds: float) -> list[tuple[float, EtaCheck]]:
    """(share of the time, check) nearest to each of `CHECKPOINTS`."""
    return [(share, min(checks, key=lambda check: abs(check.at_seconds - share * seconds))) for share in CHECKPOINTS] if checks else []
