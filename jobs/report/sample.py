"""Which items a report looks at and which it shows: a bounded number of either, whatever the size of the
job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from jobs.checks import CHECKS
from jobs.export.items import item_metadata
from jobs.ledger.records import QUARANTINE, Artifact, Draw, ItemRow, ItemState, Job
from jobs.shard_file import RawLine, ShardLines, read_raw_shard
from jobs.store.base import ObjectStore
from pipelines.duration import text_units
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger

#: Maximum of items in the histograms of lengths and scores. A larger job is sampled in blocks, evenly over
#: its items.
MAX_MEASURED = 4000
BLOCKS = 20
#: Maximum share of failed items among the shown ones, and share that is chosen evenly over the job.
_FAILED_SHARE, _TYPICAL_SHARE = 0.5, 0.25
#: An item this many times further from the median than half of the items is odd.
ODD = 3.5
#: How fast an item is spoken; the report's own score, in `pipelines.duration.text_units` a second.
PACE = "pace"
_INDEXES_AT_ONCE = 500


@dataclass(slots=True)
class SampleItem:
    """An item in the sample of a report."""

    row: ItemRow
    #: Its audio; for an item that failed its checks the audio in quarantine.
    artifact: Artifact | None
    text: str = ""
    #: Requested voice; empty: none.
    voice: str = ""
    #: Whose turn it is.
    role: str = ""
    draws: list[Draw] = field(default_factory=list[Draw])
    #: Scores of the draw whose audio is shown, and the pace.
    values: dict[str, float] = field(default_factory=dict[str, float])
    #: Names of the scores that did not pass.
    refused: list[str] = field(default_factory=list[str])
    #: How odd it is, and why; the worst first.
    badness: float = 0.0
    why: str = "typical"

    @property
    def seconds(self) -> float | None:
        return (
            self.artifact.samples / self.artifact.sample_rate
            if self.artifact and self.artifact.sample_rate
            else None
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """The items that a report reads."""

    #: Number of items with audio in the histograms, and whether these are all of the job.
    measured: int
    whole: bool
    durations: Sequence[float]
    #: Name of a score -> its values.
    scores: Mapping[str, Sequence[float]]
    #: Requested voices.
    voices: frozenset[str]
    #: The shown ones, the worst first.
    items: Sequence[SampleItem]


def take_sample(
    ledger: Ledger, store: ObjectStore, job: Job, shown: int, codes: Iterable[ErrorCode]
) -> Sample:
    """Reads items of a job and chooses `shown` of them. Raises `StoreError`, `ServiceError`."""
    broken = list(_broken(ledger, job, codes, max(1, int(shown * _FAILED_SHARE))))
    quarantined = ledger.artifacts_of(job.id, QUARANTINE, [row.index for row in broken])
    failed = [SampleItem(row, quarantined.get(row.index)) for row in broken]
    done = [
        SampleItem(row, row.artifact)
        for row in _population(ledger, job)
        if row.state is ItemState.DONE and row.artifact is not None
    ]
    both = sorted([*done, *failed], key=lambda item: item.row.index)
    lines = ShardLines(ledger, store, job.id, read_raw_shard)
    for start in range(0, len(both), _INDEXES_AT_ONCE):
        _read(ledger, job, both[start : start + _INDEXES_AT_ONCE], lines)
    _judge(done, failed)
    return Sample(
        len(done),
        job.total_items <= MAX_MEASURED,
        [seconds for item in done if (seconds := item.seconds) is not None],
        _values(done),
        frozenset(filter(None, (item.voice for item in both))),
        _chosen(done, failed, shown),
    )


def _values(items: Sequence[SampleItem]) -> dict[str, list[float]]:
    """Name of a score -> the values that items have."""
    values: dict[str, list[float]] = {}
    for item in items:
        for name, value in item.values.items():
            values.setdefault(name, []).append(value)
    return values


def _population(ledger: Ledger, job: Job) -> Iterator[ItemRow]:
    if job.total_items <= MAX_MEASURED:
        yield from ledger.items(job.id)
        return
    size = MAX_MEASURED // BLOCKS
    for block in range(BLOCKS):
        first = (job.total_items - size) * block // (BLOCKS - 1)
        yield from ledger.items(job.id, after=first - 1, limit=size)


def _broken(ledger: Ledger, job: Job, codes: Iterable[ErrorCode], most: int) -> Iterator[ItemRow]:
    """Failed items, with an equal share for each code."""
    wanted = list(codes)[:most]
    for code in wanted:
        each = max(1, most // len(wanted))
        found = (
            ledger.items(job.id, state=state, codes=[code], limit=each)
            for state in (ItemState.FAILED, ItemState.DEAD)
        )
        yield from islice(chain.from_iterable(found), each)


def _read(ledger: Ledger, job: Job, items: Sequence[SampleItem], lines: ShardLines[RawLine]) -> None:
    """Sets texts, draws and scores of some items, in the order of their indexes."""
    draws: dict[int, list[Draw]] = {}
    if job.spec.quality is not None:
        for row in ledger.draws_of(job.id, [item.row.index for item in items]):
            draws.setdefault(row.index, []).append(row.draw)
    for item in items:
        known = item_metadata(job, lines.of(item.row))
        item.text, item.role, item.voice = known.text, known.role, known.voice or ""
        item.draws = draws.get(item.row.index, [])
        seed = None if item.artifact is None else item.artifact.seed
        # The draw whose audio is shown: the kept one, or the one in quarantine; else the last.
        shown = [draw for draw in item.draws if draw.kept or draw.seed == seed] or item.draws[-1:]
        for name, score in (shown[0].scores if shown else {}).items():
            if score.value is not None:
                item.values[name] = score.value
            if score.passed is False:
                item.refused.append(name)
        item.refused.sort()
        if (seconds := item.seconds) and item.text:
            item.values[PACE] = text_units(item.text) / seconds


def _judge(done: Sequence[SampleItem], failed: Sequence[SampleItem]) -> None:
    """Sets `badness` and `why`: failed items, then items that a check refused, then by how far a score is
    from the others."""
    for item in failed:
        code = item.row.error_code
        item.badness, item.why = math.inf, code.value if code else "no reason is known"
    for name, values in sorted(_values(done).items()):
        median = statistics.median(values)
        # Half of the items are nearer than this. Where more than half are equal, every other value is odd.
        spread = statistics.median(abs(value - median) for value in values) or max(1e-3, abs(median) * 0.05)
        for item in done:
            if name not in item.values:
                continue
            away = (item.values[name] - median) / spread
            bad = CHECKS[name].bad if name in CHECKS else "both"
            odd = -away if bad == "low" else away if bad == "high" else abs(away)
            if odd > max(item.badness, ODD):
                item.badness, item.why = odd, f"{name} {item.values[name]:.3g}, where {median:.3g} is common"
    for item in done:
        if item.refused:
            item.badness, item.why = 1e9 + item.badness, f"refused by {', '.join(item.refused)}"


def _chosen(done: Sequence[SampleItem], failed: Sequence[SampleItem], shown: int) -> list[SampleItem]:
    """Failed items, then the worst ones, then others that are taken evenly over the job."""
    room = max(0, shown - len(failed))
    by_badness = sorted(done, key=lambda item: (-item.badness, item.row.index))
    worst = [item for item in by_badness if item.badness > 0][: max(0, room - int(room * _TYPICAL_SHARE))]
    taken = {item.row.index for item in worst}
    rest = [item for item in (by_badness if len(done) <= shown else done) if item.row.index not in taken]
    count = min(room - len(worst), len(rest))
    if len(done) > shown:
        rest = [rest[number * len(rest) // count] for number in range(count)]
    return [*failed[:shown], *worst, *rest[:count]]
