"""Which items a report looks at and which it shows: a bounded number of either, whatever the size of the job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from jobs.checks import CHECKS
from jobs.dialogue import Dialogue, spoken_text
from jobs.export.items import generation_of
from jobs.ledger.records import Artifact, Draw, ItemRow, ItemState, Job
from jobs.shard_file import read_raw_shard
from jobs.store.base import ObjectStore
from pipelines.duration import text_units
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.ledger import Ledger

#: Maximum of items in the histograms of lengths and scores. A larger job is sampled in blocks, evenly over its items.
MAX_MEASURED = 4000
BLOCKS = 20
#: Maximum share of failed items among the shown ones, and share that is chosen evenly over the job.
_FAILED_SHARE, _TYPICAL_SHARE = 0.5, 0.25
#: An item this many times further from the median than half of the items is odd.
ODD = 3.5
#: How fast an item is spoken; the report's own score, in `pipelines.duration.text_units` a second.
PACE = "pace"
_INDEXES_AT_ONCE = 500
_QUARANTINE = "quarantine"

_decode = msgspec.json.Decoder(Dialogue).decode


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
        return self.artifact.samples / self.artifact.sample_rate if self.artifact and self.artifact.sample_rate else None


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


def take_sample(ledger: Ledger, store: ObjectStore, job: Job, shown: int, codes: Iterable[ErrorCode]) -> Sample:
    """Reads items of a job and chooses `shown` of them. Raises `StoreError`, `ServiceError`."""
    rows = list(_population(ledger, job))
    broken = list(_broken(ledger, job, codes, max(1, int(shown * _FAILED_SHARE))))
    quarantined = _artifacts(ledger, job, _QUARANTINE, [row.index for row in broken])
    done = [SampleItem(row, row.artifact) for row in rows if row.state is ItemState.DONE and row.artifact is not None]
    failed = [SampleItem(row, quarantined.get(row.index)) for row in broken]
    _add_texts(ledger, store, job, [*done, *failed])
    _add_scores(ledger, job, [*done, *failed])
    _judge(done, failed)
    scores: dict[str, list[float]] = {}
    for item in done:
        for name, value in item.values.items():
            scores.setdefault(name, []).append(value)
    durations = [seconds for item in done if (seconds := item.seconds) is not None]
    voices = frozenset(filter(None, (item.voice for item in (*done, *failed))))
    return Sample(len(done), job.total_items <= MAX_MEASURED, durations, scores, voices, _chosen(done, failed, shown))


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
    wanted = list(codes)
    each = max(1, most // max(1, len(wanted)))
    for code in wanted[:most]:
        left = each
        for state in (ItemState.FAILED, ItemState.DEAD):
            for row in ledger.items(job.id, state=state, codes=[code], limit=left) if left else ():
                left -= 1
                yield row


def _artifacts(ledger: Ledger, job: Job, kind: str, indexes: Sequence[int]) -> dict[int, Artifact]:
    found: dict[int, Artifact] = {}
    for some in _some(indexes):
        found.update(ledger.artifacts_of(job.id, kind, some))
    return found


def _add_texts(ledger: Ledger, store: ObjectStore, job: Job, items: Sequence[SampleItem]) -> None:
    inputs = ledger.shard_inputs(job.id)
    by_input: dict[tuple[str, str], dict[int, list[SampleItem]]] = {}
    for item in items:
        by_input.setdefault(inputs[item.row.shard_no], {}).setdefault(item.row.index, []).append(item)
    for shard_input, wanted in by_input.items():
        for line in read_raw_shard(store, *shard_input):
            for item in wanted.get(line.index, ()):
                dialogue = _decode(line.dialogue)
                spoken = line.message_index
                item.text = spoken_text(dialogue.typed_messages()) if spoken is None else dialogue.messages[spoken][2].strip()
                item.role = "assistant" if spoken is None else dialogue.messages[spoken][0]
                item.voice = generation_of(job, dialogue, spoken).voice or ""


def _add_scores(ledger: Ledger, job: Job, items: Sequence[SampleItem]) -> None:
    known: dict[int, list[Draw]] = {}
    if job.spec.quality is not None:
        for some in _some([item.row.index for item in items]):
            for row in ledger.draws_of(job.id, some):
                known.setdefault(row.index, []).append(row.draw)
    for item in items:
        item.draws = known.get(item.row.index, [])
        counts = _draw_that_counts(item)
        if counts is not None:
            item.values = {name: score.value for name, score in counts.scores.items() if score.value is not None}
            item.refused = sorted(name for name, score in counts.scores.items() if score.passed is False)
        if (seconds := item.seconds) and item.text:
            item.values[PACE] = text_units(item.text) / seconds


def _draw_that_counts(item: SampleItem) -> Draw | None:
    """The draw whose audio is shown: the kept one, or the one in quarantine if the item failed; else the last."""
    shown = [draw for draw in item.draws if draw.kept or (item.artifact is not None and draw.seed == item.artifact.seed)]
    return next(iter(shown or item.draws[-1:]), None)


def _judge(done: Sequence[SampleItem], failed: Sequence[SampleItem]) -> None:
    """Sets `badness` and `why`: failed items, then items that a check refused, then by how far a score is from the others."""
    for item in failed:
        code = item.row.error_code
        item.badness, item.why = math.inf, code.value if code else "no reason is known"
    names = sorted({name for item in done for name in item.values})
    for name in names:
        values = [item.values[name] for item in done if name in item.values]
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
    room = max(0, shown - len(failed))
    by_badness = sorted(done, key=lambda item: (-item.badness, item.row.index))
    worst = [item for item in by_badness if item.badness > 0][: max(0, room - int(room * _TYPICAL_SHARE))]
    rest = [item for item in by_badness if item not in worst] if len(done) <= shown else _spread(done, worst, room - len(worst))
    return [*failed[:shown], *worst, *rest[: room - len(worst)]]


def _spread(done: Sequence[SampleItem], worst: Sequence[SampleItem], count: int) -> list[SampleItem]:
    """`count` of the items that are not odd, evenly over the job."""
    taken = {item.row.index for item in worst}
    left = [item for item in done if item.row.index not in taken]
    count = min(count, len(left))
    return [left[number * len(left) // count] for number in range(count)] if count else []


def _some(indexes: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(indexes), _INDEXES_AT_ONCE):
        yield indexes[start : start + _INDEXES_AT_ONCE]
