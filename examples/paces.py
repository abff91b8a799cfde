"""The speaking rates of the voices of a finished job, as a quality configuration: see docs/quality.md.

python examples/paces.py JOB [--home DIR] > qa.toml
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jobs.export.items import AudioItem, audio_items, item_metadata
from jobs.ledger import Ledger
from jobs.ledger.records import Job
from jobs.recent_jobs import settings_for_job
from jobs.store import open_store
from pipelines.duration import Pace, text_units
from pipelines.errors import ErrorCode, NightjarError, NotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A voice with fewer items has no pace of its own.
LEAST_ITEMS = 30
#: Of one voice; more items would change little and cost the square of their number.
MOST_ITEMS = 1000
#: The bounds leave out this share of the items at each end, and then widen by `_MARGIN`.
_TAIL, _MARGIN = 0.005, 0.15
#: Speech this many times too long or too short is a fault, not a slow voice.
_OUTLIER = 1.6

#: (hash, text's units, seconds)
_Length = tuple[bytes, float, float]


def learned_paces(job: Job, items: Iterable[AudioItem]) -> tuple[Pace, ...]:
    """The paces of the voices and languages of a job with these items: those with most items first, and last
    one for all others.

    Items are chosen by a hash of their id, so the same job gives the same paces. Raises `NotFoundError`
    for a job with fewer than `LEAST_ITEMS` finished items that have a text.
    """
    lengths: dict[tuple[str, str], list[_Length]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for item in items:
        known = item_metadata(job, item)
        if not (units := text_units(known.text)):
            continue
        length = (hashlib.blake2b(item.example_id.encode(), digest_size=8).digest(), units, item.seconds)
        for voice in {(known.voice or "", known.language or ""), ("", "")}:
            counts[voice] += 1
            heapq.heappush(lengths[voice], length)
            if len(lengths[voice]) > MOST_ITEMS:
                heapq.heappop(lengths[voice])
    if counts["", ""] < LEAST_ITEMS:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Job {job.id} has {counts['', '']} finished items with a text; at least {LEAST_ITEMS} are needed.",
            "Measure a larger job of the same model.",
        )
    order = sorted(counts, key=lambda voice: (voice == ("", ""), -counts[voice], voice))
    return tuple([fit_pace(lengths[voice], *voice) for voice in order if counts[voice] >= LEAST_ITEMS])


def fit_pace(lengths: list[_Length], voice: str = "", language: str = "") -> Pace:
    """The pace of `lengths`: the line after Theil and Sen, drawn again without those that are
    `_OUTLIER` times off it."""
    units, seconds = np.array([length[1:] for length in sorted(lengths)]).T
    base, slope = _line(units, seconds)
    ratio = seconds / (base + slope * units)
    ratio = ratio / np.median(ratio)
    usual = (ratio < _OUTLIER) & (ratio > 1 / _OUTLIER)
    units, seconds = units[usual], seconds[usual]
    base, slope = _line(units, seconds)
    low, high = np.quantile(seconds / (base + slope * units), [_TAIL, 1 - _TAIL])
    return Pace(
        round(base, 4), round(slope, 6), round(float(low) * (1 - _MARGIN), 3), round(float(high) * (1 + _MARGIN), 3),
        voice=voice, language=language,
    )  # fmt: skip


def _line(units: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(base, slope), neither negative. `units`, `seconds`: [items]."""
    from scipy.stats import theilslopes

    if np.ptp(units) > 0:
        line: Any = theilslopes(seconds, units)
        slope, base = float(line[0]), float(line[1])
        if slope > 0 and base >= 0:
            return base, slope
    return 0.0, float(np.median(seconds / np.maximum(units, 1.0)))


def as_toml(paces: tuple[Pace, ...]) -> str:
    """The paces as a part of a quality config."""
    tables = [
        ["[[paces]]", *(f"{name} = {_toml(value)}" for name, value in msgspec.structs.asdict(pace).items())]
        for pace in paces
    ]
    return "\n\n".join("\n".join(table) for table in tables)


def _toml(value: str | float) -> str:
    """A value as TOML has it, which knows no surrogate pairs, and no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("job")
    made.add_argument("--home")
    options = made.parse_args()
    try:
        settings = settings_for_job(options.job, options.home)
        with closing(Ledger.of(settings)) as ledger:
            found = ledger.find_job(options.job)
            items = audio_items(ledger, open_store(found.store_url, settings.s3), found.id)
            print(as_toml(learned_paces(found, items)))
    except NightjarError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
