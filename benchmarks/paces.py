"""`python -m benchmarks.paces JOB`: the speaking rates of a finished job's voices, as the `[[paces]]` of a
quality configuration."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np

from jobs.export.items import audio_items, item_metadata
from jobs.ledger import Ledger
from jobs.ledger.records import Job
from jobs.recent_jobs import settings_for_job
from jobs.store import open_store
from jobs.store.base import ObjectStore
from pipelines.duration import Pace, text_units
from pipelines.errors import ErrorCode, NotFoundError

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


def learned_paces(ledger: Ledger, store: ObjectStore, job: Job) -> tuple[Pace, ...]:
    """The paces of a job's voices and languages, those with most items first, and last one for all others.

    Items are chosen by a hash of their id, so the same job gives the same paces. Raises `NotFoundError`
    for a job with fewer than `LEAST_ITEMS` finished items that have a text.
    """
    lengths: dict[tuple[str, str], list[_Length]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for item in audio_items(ledger, store, job.id):
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
            "Calibrate on a larger job of the same model.",
        )
    order = sorted(counts, key=lambda voice: (voice == ("", ""), -counts[voice], voice))
    return tuple([fit(lengths[voice], *voice) for voice in order if counts[voice] >= LEAST_ITEMS])


def fit(lengths: list[_Length], voice: str = "", language: str = "") -> Pace:
    """The pace of these lengths: the line after Theil and Sen, drawn again without those that are
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


@click.command()
@click.argument("job")
@click.option("--home", metavar="DIR", help="Folder of the run that made the job.")
def main(job: str, home: str | None) -> None:
    """Prints the paces of JOB."""
    settings = settings_for_job(job, home)
    with closing(Ledger.of(settings)) as ledger:
        found = ledger.find_job(job)
        click.echo(as_toml(learned_paces(ledger, open_store(found.store_url, settings.s3), found)))


if __name__ == "__main__":
    main()
