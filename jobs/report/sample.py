"""The items that a report reads, and those that it shows, with players and waveforms. Both numbers have limits that do
not depend on the size of the job."""

from __future__ import annotations

import base64
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

from jobs.checks import CHECKS
from jobs.codes import EXTENSION
from jobs.export.items import item_metadata
from jobs.ledger import Ledger
from jobs.ledger.records import QUARANTINE, Artifact, Draw, ItemRow, ItemState, Job
from jobs.packs import read_artifact
from jobs.shard_file import ShardLines
from jobs.store.base import ObjectStore
from pipelines.audio import Samples, decode, encode
from pipelines.duration import text_units
from pipelines.errors import ErrorCode, NightjarError

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
#: Size of a waveform in pixels. Coordinates of the SVG are also pixels.
WIDTH, HEIGHT = 220, 44
_STROKE = 2
#: The lowest level that is told: -100 dB of full scale.
_SILENCE = 1e-5
#: Maximum size of a file that is drawn or embedded.
MAX_BYTES = 32 << 20
#: Maximum length of an embedded clip, and maximum size of all clips together, in characters of base64.
CLIP_SECONDS = 10.0
MAX_EMBEDDED_BYTES = 12_000_000


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
    draws: Sequence[Draw] = ()
    #: Scores of the draw whose audio is shown, and the pace.
    values: dict[str, float] = field(default_factory=dict)
    #: Names of the scores that did not pass.
    refused: Sequence[str] = ()
    #: How bad it is, and why; the worst items are shown first.
    badness: float = 0.0
    reason: str = "typical"


class Sample(NamedTuple):
    """The items that a report reads: items with audio, which the histograms measure, and failed items."""

    done: Sequence[SampleItem]
    failed: Sequence[SampleItem]
    #: Whether it contains all items with audio.
    whole: bool

    def scores(self) -> dict[str, list[float]]:
        """Maps each score to its values over the items with audio."""
        names = sorted({name for item in self.done for name in item.values})
        return {name: [item.values[name] for item in self.done if name in item.values] for name in names}

    def rank(self) -> None:
        """Sets `badness` and `reason`: failed items are the worst, then items that failed a check, then
        outliers of a score."""
        for item in self.failed:
            code = item.row.error_code
            item.badness = math.inf
            item.reason = code.value if code else "unknown reason"
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
                item.badness = 1e9 + item.badness
                item.reason = f"failed checks: {', '.join(item.refused)}"

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
        return [*self.failed[:shown], *worst, *(rest[number * len(rest) // count] for number in range(count))]


def take_sample(
    ledger: Ledger, store: ObjectStore, job: Job, shown: int, codes: Iterable[ErrorCode]
) -> Sample:
    """Reads the items of a job that a report with `shown` rows needs. Raises `StoreError`, `ServiceError`."""
    limit = max(1, int(shown * _FAILED_SHARE))
    wanted = list(codes)[:limit]
    rows: list[ItemRow] = []
    # Failed items about which nobody has decided, with an equal share for each code.
    for code in wanted:
        undecided = (row for row in ledger.broken_items(job.id, [code]) if row.decision is None)
        rows += islice(undecided, max(1, limit // len(wanted)))
    quarantined = ledger.artifacts_of(job.id, QUARANTINE, [row.index for row in rows])
    failed = [SampleItem(row, quarantined.get(row.index)) for row in rows]
    whole = job.total_items <= MAX_MEASURED
    size = MAX_MEASURED // BLOCKS
    firsts = [(job.total_items - size) * block // (BLOCKS - 1) for block in range(BLOCKS)]
    blocks = (ledger.items(job.id, after=first - 1, limit=size) for first in firsts)
    measured = ledger.items(job.id) if whole else chain.from_iterable(blocks)
    done = [SampleItem(row, row.artifact) for row in measured if row.state is ItemState.DONE]
    both = sorted([*done, *failed], key=lambda item: item.row.index)
    draws = defaultdict[int, list[Draw]](list)
    for row in ledger.draws_of(job.id, [item.row.index for item in both]):
        draws[row.index].append(row.draw)
    lines = ShardLines(ledger, store, job.id)
    for item in both:
        known = item_metadata(job, lines.of(item.row))
        seed = None
        item.text = known.text
        item.role = known.role
        item.voice = known.voice or ""
        if (artifact := item.artifact) is not None:
            item.seconds = artifact.samples / artifact.sample_rate
            seed = artifact.seed
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


class Picture(NamedTuple):
    """The waveform of an item, with its length and levels."""

    #: `d` of an SVG path in a box of `WIDTH` x `HEIGHT`.
    wave: str
    seconds: float
    #: Peak and root mean square, in dB of full scale.
    peak_dbfs: float
    rms_dbfs: float


def picture(samples: Samples, sample_rate: int) -> Picture:
    """Draws a waveform. `samples`: float32 [samples], at least one."""
    middle = HEIGHT / 2
    parts = np.array_split(np.clip(samples, -1, 1), min(WIDTH // _STROKE, len(samples)))
    # A stroke from the lowest to the highest sample of each column.
    strokes = (
        f"M{_STROKE * at} {middle - middle * part.max():.1f}V{middle - middle * part.min() + 0.5:.1f}"
        for at, part in enumerate(parts)
    )
    levels = float(np.abs(samples).max()), math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))
    peak_dbfs, rms_dbfs = (20 * math.log10(max(_SILENCE, level)) for level in levels)
    return Picture("".join(strokes), len(samples) / sample_rate, peak_dbfs, rms_dbfs)


class Clip(NamedTuple):
    """The audio of one item on a page."""

    #: Source of the player: a relative link or a `data:` address; None: no player.
    source: str | None
    picture: Picture | None
    #: A remark for the reader, or an empty text.
    note: str = ""


class Clips:
    """Makes the clips of the page at the path `page`."""

    def __init__(self, store: ObjectStore, page: Path, *, embed: bool, served: bool) -> None:
        self._store = store
        self._root = None if embed else store.root
        self._folder = Path(os.path.abspath(page)).parent
        self._left = MAX_EMBEDDED_BYTES
        self._served = served
        #: Whether players read the store's files and not data in the page.
        self.linked = self._root is not None

    def clip(self, artifact: Artifact) -> Clip:
        """Makes the clip of an artifact. If audio cannot be read, its clip has a note instead of a player."""
        link = None if self._root is None else quote(os.path.relpath(self._root / artifact.key, self._folder))
        link = f"audio/{artifact.index}" if self._served else link
        if artifact.key.endswith(EXTENSION):
            return Clip(None, None, "codes")
        if artifact.bytes > MAX_BYTES:
            return Clip(link, None, f"too large to be {'drawn' if link else 'embedded'}")
        try:
            samples, rate = decode(read_artifact(self._store, artifact), max_seconds=3600)
        except NightjarError as error:
            return Clip(None, None, f"cannot be read: {error.code.value}")
        drawn = picture(samples, rate)
        if link is not None:
            return Clip(link, drawn)
        cut = samples[: int(CLIP_SECONDS * rate)]
        source = f"data:audio/flac;base64,{base64.b64encode(encode(cut, rate, 'flac')).decode()}"
        if len(source) > self._left:
            return Clip(None, drawn, "not embedded, because the page would be too large")
        self._left -= len(source)
        return Clip(source, drawn, f"the first {CLIP_SECONDS:g} s" if len(cut) < len(samples) else "")
