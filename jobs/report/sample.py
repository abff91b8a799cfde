"""The items that a report reads, and those that it shows. Both numbers have limits that do not depend on the
size of the job."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
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

#: Maximum number of items in the histograms of lengths and scores. A larger job is sampled in blocks, spread
#: evenly over its items.
MAX_MEASURED = 4000
BLOCKS = 20
#: Maximum share of failed items among the shown items, and share of the remaining ones that is chosen evenly
#: over the job.
_FAILED_SHARE, _TYPICAL_SHARE = 0.5, 0.25
#: An item is an outlier if it is this many median absolute deviations from the median.
OUTLIER = 3.5
#: Name of a score that only the report computes: the speed of speech, in `pipelines.duration.text_units` per
#: second.
PACE = "pace"


@dataclass(slots=True)
class SampleItem:
    """An item in the sample of a report."""

    row: ItemRow
    #: Its audio; if the item failed its checks, the audio in quarantine.
    artifact: Artifact | None
    #: Length of that audio.
    seconds: float | None = None
    text: str = ""
    #: Requested voice; empty: none.
    voice: str = ""
    #: Role of its turn.
    role: str = ""
    draws: list[Draw] = field(default_factory=list[Draw])
    #: Scores of the draw whose audio is shown, and the pace.
    values: dict[str, float] = field(default_factory=dict[str, float])
    #: Names of the scores that did not pass.
    refused: list[str] = field(default_factory=list[str])
    #: How bad it is, and why; the worst items are shown first.
    badness: float = 0.0
    reason: str = "typical"


@dataclass(frozen=True, slots=True)
class Sample:
    """The items that a report reads: items with audio, which the histograms measure, and failed items."""

    done: Sequence[SampleItem]
    failed: Sequence[SampleItem]
    #: Whether it contains all items with audio.
    whole: bool

    def scores(self) -> dict[str, list[float]]:
        """Maps each score to its values over the items with audio."""
        found: dict[str, list[float]] = {}
        for item in self.done:
            for name, value in item.values.items():
                found.setdefault(name, []).append(value)
        return dict(sorted(found.items()))

    def rank(self) -> None:
        """Sets `badness` and `reason`: failed items are the worst, then items that failed a check, then
        outliers of a score."""
        for item in self.failed:
            code = item.row.error_code
            item.badness, item.reason = math.inf, code.value if code else "unknown reason"
        for name, values in self.scores().items():
            median = statistics.median(values)
            # If more than half of the values are equal, this is 0, and every other value would be an outlier.
            deviation = statistics.median(abs(value - median) for value in values)
            deviation = deviation or max(1e-3, abs(median) * 0.05)
            bad = CHECKS[name].bad if name in CHECKS else "both"
            for item in self.done:
                if name not in item.values:
                    continue
                away = (item.values[name] - median) / deviation
                badness = -away if bad == "low" else away if bad == "high" else abs(away)
                if badness > max(item.badness, OUTLIER):
                    item.badness = badness
                    item.reason = f"{name} {item.values[name]:.3g}, median {median:.3g}"
        for item in self.done:
            if item.refused:
                item.badness, item.reason = 1e9 + item.badness, f"failed checks: {', '.join(item.refused)}"

    def choose(self, shown: int) -> list[SampleItem]:
        """Chooses failed items, then the worst ones, then others, spread evenly over the job."""
        room = max(0, shown - len(self.failed))
        bad = sorted(
            (item for item in self.done if item.badness), key=lambda item: (-item.badness, item.row.index)
        )
        worst = bad[: room - int(room * _TYPICAL_SHARE)]
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
    """Reads the items of a job that a report with `shown` rows needs. Raises `StoreError`, `ServiceError`."""
    rows = list(_failed_rows(ledger, job, list(codes), max(1, int(shown * _FAILED_SHARE))))
    quarantined = ledger.artifacts_of(job.id, QUARANTINE, [row.index for row in rows])
    failed = [SampleItem(row, quarantined.get(row.index)) for row in rows]
    whole, size = job.total_items <= MAX_MEASURED, MAX_MEASURED // BLOCKS
    firsts = [(job.total_items - size) * block // (BLOCKS - 1) for block in range(BLOCKS)]
    blocks = (ledger.items(job.id, after=first - 1, limit=size) for first in firsts)
    measured = ledger.items(job.id) if whole else chain.from_iterable(blocks)
    done = [SampleItem(row, row.artifact) for row in measured if row.state is ItemState.DONE]
    both = sorted([*done, *failed], key=lambda item: item.row.index)
    draws = defaultdict[int, list[Draw]](list)
    if job.spec.quality is not None:
        for row in ledger.draws_of(job.id, [item.row.index for item in both]):
            draws[row.index].append(row.draw)
    lines = ShardLines(ledger, store, job.id, read_raw_shard)
    for item in both:
        known, seed = item_metadata(job, lines.of(item.row)), None
        item.text, item.role, item.voice = known.text, known.role, known.voice or ""
        if (artifact := item.artifact) is not None:
            item.seconds, seed = artifact.samples / artifact.sample_rate, artifact.seed
        item.draws = draws[item.row.index]
        # The draw whose audio is shown, kept or in quarantine, else the last draw.
        own = [draw for draw in item.draws if draw.kept or draw.seed == seed] or item.draws[-1:]
        scores = own[0].scores if own else {}
        item.values = {name: score.value for name, score in scores.items() if score.value is not None}
        item.refused = sorted(name for name, score in scores.items() if score.passed is False)
        if item.seconds and item.text:
            item.values[PACE] = text_units(item.text) / item.seconds
    sample = Sample(done, failed, whole)
    sample.rank()
    return sample


def _failed_rows(ledger: Ledger, job: Job, codes: Sequence[ErrorCode], limit: int) -> Iterator[ItemRow]:
    """Failed items, with an equal share for each code."""
    wanted = codes[:limit]
    for code in wanted:
        each = max(1, limit // len(wanted))
        found = (
            ledger.items(job.id, state=state, codes=[code], limit=each)
            for state in (ItemState.FAILED, ItemState.DEAD)
        )
        yield from islice(chain.from_iterable(found), each)
