"""Which items a report looks at and which it shows: a bounded number of either, whatever the size of the
job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from jobs.checks import CHECKS
from jobs.export.items import item_metadata
from jobs.ledger.records import QUARANTINE, Artifact, Draw, ItemRow, ItemState, Job
from jobs.shard_file import ShardLines, read_raw_shard
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
        return self.artifact.samples / self.artifact.sample_rate if self.artifact else None


@dataclass(frozen=True, slots=True)
class Sample:
    """The items that a report reads: those with audio, which the histograms measure, and those that
    failed."""

    done: Sequence[SampleItem]
    failed: Sequence[SampleItem]
    #: Whether these are all of the job.
    whole: bool

    def scores(self) -> dict[str, list[float]]:
        """Name of a score -> the values that items with audio have."""
        found: dict[str, list[float]] = {}
        for item in self.done:
            for name, value in item.values.items():
                found.setdefault(name, []).append(value)
        return dict(sorted(found.items()))

    def judge(self) -> None:
        """Sets `badness` and `why`: failed items, then items that a check refused, then by how far a score
        is from the others."""
        for item in self.failed:
            code = item.row.error_code
            item.badness, item.why = math.inf, code.value if code else "no reason is known"
        for name, values in self.scores().items():
            median = statistics.median(values)
            # Half of the items are nearer than this. Where more than half are equal, every other value is odd.
            spread = statistics.median(abs(value - median) for value in values) or max(
                1e-3, abs(median) * 0.05
            )
            for item in self.done:
                if name not in item.values:
                    continue
                away = (item.values[name] - median) / spread
                bad = CHECKS[name].bad if name in CHECKS else "both"
                odd = -away if bad == "low" else away if bad == "high" else abs(away)
                if odd > max(item.badness, ODD):
                    item.badness, item.why = (
                        odd,
                        f"{name} {item.values[name]:.3g}, where {median:.3g} is common",
                    )
        for item in self.done:
            if item.refused:
                item.badness, item.why = 1e9 + item.badness, f"refused by {', '.join(item.refused)}"

    def chosen(self, shown: int) -> list[SampleItem]:
        """Failed items, then the worst ones, then others that are taken evenly over the job."""
        room = max(0, shown - len(self.failed))
        odd = sorted(
            (item for item in self.done if item.badness), key=lambda item: (-item.badness, item.row.index)
        )
        worst = odd[: room - int(room * _TYPICAL_SHARE)]
        taken = {item.row.index for item in worst}
        rest = [item for item in self.done if item.row.index not in taken]
        count = min(room - len(worst), len(rest))
        return [
            *self.failed[:shown],
            *worst,
            *(rest[number * len(rest) // count] for number in range(count)),
        ]


def take_sample(
    ledger: Ledger, store: ObjectStore, job: Job, shown: int, codes: Iterable[ErrorCode]
) -> Sample:
    """Reads items of a job, as many as it takes to show so many. Raises `StoreError`, `ServiceError`."""
    broken = list(_broken(ledger, job, list(codes), max(1, int(shown * _FAILED_SHARE))))
    quarantined = ledger.artifacts_of(job.id, QUARANTINE, [row.index for row in broken])
    failed = [SampleItem(row, quarantined.get(row.index)) for row in broken]
    done = [SampleItem(row, row.artifact) for row in _population(ledger, job) if row.state is ItemState.DONE]
    both = sorted([*done, *failed], key=lambda item: item.row.index)
    draws: dict[int, list[Draw]] = {}
    if job.spec.quality is not None:
        for row in ledger.draws_of(job.id, [item.row.index for item in both]):
            draws.setdefault(row.index, []).append(row.draw)
    lines = ShardLines(ledger, store, job.id, read_raw_shard)
    for item in both:
        known = item_metadata(job, lines.of(item.row))
        item.text, item.role, item.voice = known.text, known.role, known.voice or ""
        _score(item, draws.get(item.row.index, []))
    sample = Sample(done, failed, job.total_items <= MAX_MEASURED)
    sample.judge()
    return sample


def _population(ledger: Ledger, job: Job) -> Iterator[ItemRow]:
    if job.total_items <= MAX_MEASURED:
        yield from ledger.items(job.id)
        return
    size = MAX_MEASURED // BLOCKS
    for block in range(BLOCKS):
        first = (job.total_items - size) * block // (BLOCKS - 1)
        yield from ledger.items(job.id, after=first - 1, limit=size)


def _broken(ledger: Ledger, job: Job, codes: Sequence[ErrorCode], most: int) -> Iterator[ItemRow]:
    """Failed items, with an equal share for each code."""
    wanted = codes[:most]
    for code in wanted:
        each = max(1, most // len(wanted))
        found = (
            ledger.items(job.id, state=state, codes=[code], limit=each)
            for state in (ItemState.FAILED, ItemState.DEAD)
        )
        yield from islice(chain.from_iterable(found), each)


def _score(item: SampleItem, draws: list[Draw]) -> None:
    """Sets the draws of an item with a text, and the scores of the one whose audio is shown: the kept one,
    or the one in quarantine; else the last."""
    item.draws = draws
    seed = None if item.artifact is None else item.artifact.seed
    shown = [draw for draw in draws if draw.kept or draw.seed == seed] or draws[-1:]
    for name, score in (shown[0].scores if shown else {}).items():
        if score.value is not None:
            item.values[name] = score.value
        if score.passed is False:
            item.refused.append(name)
    item.refused.sort()
    if (seconds := item.seconds) and item.text:
        item.values[PACE] = text_units(item.text) / seconds
