"""Which items go into which part of a dataset, known before the first byte is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from jobs.export.made import exported
from jobs.export.splits import Splits
from jobs.ledger.records import ItemRow


class Part(msgspec.Struct, frozen=True):
    """A run of made items of one split: the unit in which an export is written and goes on after a stop."""

    split: str
    #: From 0 within its split.
    number: int
    #: Index of its first and last item; items of other splits may lie between.
    first: int
    last: int
    items: int
    #: Of their audio.
    audio_bytes: int
    #: Parts of its split.
    of: int = 0


class Plan(msgspec.Struct, frozen=True):
    """The parts of an export, by split and number."""

    parts: tuple[Part, ...]
    #: Items of the job that have no audio (failed, skipped or still pending), or are left out with one that has none.
    left_out: int
    #: SHA-256 over indexes, ids and audio hashes of all made items: the same result of a job has the same one.
    digest: str

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


@dataclass(slots=True)
class _Growing:
    """The part of a split that takes items now."""

    number: int = 0
    first: int = -1
    last: int = -1
    items: int = 0
    audio_bytes: int = 0
    closed: list[Part] = field(default_factory=list[Part])

    def add(self, split: str, index: int, audio_bytes: int, limit: int | None) -> None:
        if limit is not None and self.items and self.audio_bytes + audio_bytes > limit:
            self.close(split)
        if not self.items:
            self.first = index
        self.last = index
        self.items += 1
        self.audio_bytes += audio_bytes

    def close(self, split: str) -> None:
        if self.items:
            self.closed.append(Part(split, self.number, self.first, self.last, self.items, self.audio_bytes))
            self.number, self.items, self.audio_bytes = self.number + 1, 0, 0


def make_plan(rows: Iterable[ItemRow], splits: Splits, part_bytes: int | None, *, whole: bool = False) -> Plan:
    """The plan for the items of a job, in index order. A part ends before its audio passes `part_bytes`; None: one part a split.
    `whole`: dialogues of which a spoken turn has no audio are left out.
    """
    growing = {name: _Growing() for name in splits.names}
    digest = hashlib.sha256()
    left_out = 0
    for row, artifact in exported(rows, whole=whole):
        if artifact is None:
            left_out += 1
            continue
        digest.update(msgspec.json.encode((row.index, row.example_id, artifact.sha256)))
        split = splits.of(row.example_id)
        growing[split].add(split, row.index, artifact.bytes, part_bytes)
    parts: list[Part] = []
    for name, grown in growing.items():
        grown.close(name)
        parts += [msgspec.structs.replace(part, of=len(grown.closed)) for part in grown.closed]
    return Plan(tuple(parts), left_out, digest.hexdigest())
