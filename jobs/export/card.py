"""The dataset card: the README.md of an export to a folder, from the template `card.md`. Its front matter is
that of the Hugging Face hub."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib import resources
from itertools import groupby

import msgspec

from jobs.export.files import SortedLines, json_line
from jobs.export.formats import ExportFormat, ExportOptions
from jobs.export.items import AudioItem, Plan, item_metadata
from jobs.export.job_set import JobSet
from pipelines.languages import language_code

#: The hub's size categories.
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
#: Maximum number of rows of a table, and of samples.
ROWS, _SAMPLES = 50, 5
#: Number of names whose sums are in memory.
_NAMES = 10_000
_decode = msgspec.json.Decoder(tuple[str, int]).decode


class Hours:
    """Sums milliseconds of audio by name. Any number of names is possible: they are sorted on disk."""

    def __init__(self) -> None:
        self._sums = Counter[str]()
        self._lines = SortedLines()
        #: Number of names, known once `longest` was called.
        self.names = 0

    def add(self, name: str, milliseconds: int) -> None:
        self._sums[name] += milliseconds
        if len(self._sums) > _NAMES:
            self._spill()

    def _spill(self) -> None:
        for pair in self._sums.items():
            self._lines.add(json_line(pair))
        self._sums.clear()

    def longest(self) -> list[tuple[str, int]]:
        """The names with the most audio, with their milliseconds."""

        def sums() -> Iterator[tuple[int, str]]:
            for name, pairs in groupby(map(_decode, self._lines), lambda one: one[0]):
                self.names += 1
                yield -sum(milliseconds for _, milliseconds in pairs), name

        self._spill()
        return [(name, -negative) for negative, name in heapq.nsmallest(ROWS, sums())]


class CardFacts:
    """What a card says about the items of a dataset."""

    def __init__(self) -> None:
        self.voices = Hours()
        self.languages = Hours()
        #: Milliseconds of audio by job, and by format and sample rate.
        self.jobs = Counter[str]()
        self.audio = Counter[str]()
        #: (hash of the id, id, voice, seconds, text) of the items with the lowest hashes.
        self.samples: list[tuple[bytes, str, str, float, str]] = []

    def noting(self, items: Iterable[AudioItem]) -> Iterator[AudioItem]:
        """Yields the items and notes them."""
        for item in items:
            known = item_metadata(item.job, item)
            milliseconds = item.artifact.duration_ms
            self.voices.add(known.speaker, milliseconds)
            self.languages.add(known.language or "not given", milliseconds)
            self.jobs[item.job.id] += milliseconds
            self.audio[f"{item.extension}, {item.artifact.sample_rate} Hz"] += milliseconds
            digest = blake2b(item.id.encode(), digest_size=8).digest()
            sample = digest, item.id, known.speaker, item.seconds, known.text[:200]
            self.samples = sorted([*self.samples, sample])[:_SAMPLES]
            yield item


def dataset_card(
    jobs: JobSet, plan: Plan, facts: CardFacts, format: ExportFormat, options: ExportOptions
) -> bytes:
    """The card of a dataset. Splits without items have no files and are not in it."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701
    )
    environment.filters.update(
        hours=lambda milliseconds: f"{milliseconds / 3_600_000:.2f}",
        # A JSON string is valid YAML.
        json=lambda value: msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode(),
        # Text from inputs is shown as code, so that it cannot contain links, pictures or cells of a table.
        code=lambda text: f"`{' '.join(text.replace('`', chr(39)).split())}`".replace("|", "\\|"),
    )
    failed = Counter[str]()
    for ledger, _, job in jobs.jobs:
        failed.update({code.value: items for code, items in ledger.failed_counts(job.id).items()})
    languages = facts.languages.longest()
    codes = {language_code(name) for name, _ in languages if name != "not given"}
    template = resources.files("jobs.export").joinpath("card.md").read_text(encoding="utf-8")
    card = environment.from_string(template).render(
        set=jobs,
        plan=plan,
        facts=facts,
        format=format,
        options=options,
        codes=sorted(filter(re.compile("[A-Za-z]{2,3}").fullmatch, codes)),
        size=_SIZES[max(0, min(len(str(plan.items)) - 3, len(_SIZES) - 1))],
        splits={name: list(parts) for name, parts in groupby(plan.parts, lambda part: part.split)},
        failed=failed,
        languages=languages,
        rows=ROWS,
    )
    return card.encode()
