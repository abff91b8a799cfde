"""The jobs of one dataset as one sequence of items, numbered over all jobs.

The jobs are in the order in which they were submitted, so that the same jobs make the same dataset however
they are named. An item has the index of its job's first item plus its own. An example id that several jobs
have is preceded by the id of its job. For a dataset of several jobs, or without duplicates, a first pass
over the items decides which of them are exported. It keeps one byte per item; what it compares are hashes
that are sorted on disk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, chain, groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from jobs.dialogue import decode_object, metadata_json
from jobs.export.files import SortedLines
from jobs.export.formats import ExportFormat
from jobs.export.items import (
    TEXT,
    AudioItem,
    Columns,
    LeftOut,
    audio_items,
    columns_of,
    exported,
    item_metadata,
    matched,
    pages,
)
from jobs.export.table_formats import Type, widened
from jobs.ledger.records import ItemRow, ItemState
from jobs.packs import ArtifactReader
from jobs.shard_file import ShardLines, read_raw_shard
from jobs.store import StoredJob
from jobs.where import FilteredOut, Where

_HASH_BYTES = 16
#: Values of a byte of `JobSet.choose`: exported, and exported with the id of its job before its example id.
_EXPORTED, _RENAMED = 1, 2


class Repeats:
    """Finds equal keys among any number of items, without holding them: hashes of 16 bytes, sorted on disk.
    Two different keys have the same hash with a probability below 1e-20 for a billion items."""

    def __init__(self) -> None:
        self._lines = SortedLines()

    def add(self, key: object, index: int, items: int = 1) -> None:
        """Adds the key of consecutive items, the first of which has this index."""
        digest = blake2b(msgspec.json.encode(key), digest_size=_HASH_BYTES).hexdigest()
        self._lines.add(b"%b%012x%x\n" % (digest.encode(), index, items))

    def __iter__(self) -> Iterator[Iterator[tuple[int, int]]]:
        """Yields (first index, items) of each use of a key, in order, key by key."""
        begin = 2 * _HASH_BYTES
        for _, lines in groupby(self._lines, key=lambda line: line[:begin]):
            yield ((int(line[begin : begin + 12], 16), int(line[begin + 12 :], 16)) for line in lines)

    def later(self) -> Iterator[tuple[int, int]]:
        """Yields (first index, items) of each use of a key but its first."""
        for uses in self:
            next(uses)
            yield from uses


@dataclass(eq=False)
class JobSet:
    """The items of jobs, in order, that match a filter and are in a format."""

    jobs: Sequence[StoredJob]
    where: Where | None
    format: ExportFormat
    #: Of the items with the same text and voice (in formats of dialogues: of equal dialogues), only the first one is
    #: exported.
    unique: bool

    def __post_init__(self) -> None:
        #: The index of the first item of each job.
        self._starts = [0, *accumulate(one.job.total_items for one in self.jobs)]
        self._prefixes = tuple(f"{one.job.id}-" for one in self.jobs) if self.several else ()
        #: A byte for each item; None: every item with audio is exported.
        self._chosen: bytearray | None = None
        #: Number of items whose text and voice an earlier item has; None: not counted yet.
        self.duplicates: int | None = None
        self._texts = Repeats()

    @property
    def several(self) -> bool:
        return len(self.jobs) > 1

    @property
    def name(self) -> str:
        """The id of the job; of several jobs, a name that depends on their ids."""
        ids = [one.job.id for one in self.jobs]
        return f"set-{blake2b(','.join(ids).encode(), digest_size=8).hexdigest()}" if self.several else ids[0]

    @property
    def running(self) -> bool:
        return not all(one.job.state.final for one in self.jobs)

    def choose(self) -> None:
        """Fixes which items are exported."""
        chosen = bytearray(self._starts[-1])
        ids = Repeats()

        def noted() -> Iterator[ItemRow]:
            for row in self.rows():
                chosen[row.index] = _EXPORTED
                if self.several:
                    ids.add(row.example_id, row.index)
                yield row

        for _ in self.noting(self.items(noted())) if self.unique else noted():
            pass
        if self.unique:
            self.duplicates = 0
            for first, items in self._texts.later():
                chosen[first : first + items] = bytes(items)
                self.duplicates += items
        for uses in ids:
            same = [index for index, _ in uses if chosen[index]]
            if len({self._number(index) for index in same}) > 1:
                for index in same:
                    chosen[index] = _RENAMED
        self._chosen = chosen

    def count(self) -> None:
        """Counts the duplicates among the items that were noted, unless they are left out."""
        if not self.unique:
            self.duplicates = sum(items for _, items in self._texts.later())

    def noting(self, items: Iterable[AudioItem]) -> Iterator[AudioItem]:
        """Yields the items, and notes the text and the voice of each, or of each dialogue."""
        whole = self.format.whole_dialogues
        # Ids of different jobs may be equal until the items are chosen.
        for _, group in groupby(
            items, lambda item: (item.job.id, item.example_id if whole else item.artifact.index)
        ):
            same = list(group)
            known = [item_metadata(item.job, item) for item in same]
            said = decode_object(same[0].dialogue)["messages"] if whole else known[0].text
            self._texts.add((said, [one.speaker for one in known]), same[0].artifact.index, len(same))
            yield from same

    def rows(self, after: int = -1, *, whole: bool = True) -> Iterator[ItemRow]:
        """The items with audio after an index that match the filter and, once this is fixed, are exported.
        `whole`: without incomplete dialogues, if the format leaves them out."""
        for start, (ledger, _, job) in zip(self._starts, self.jobs):
            own = max(after - start, -1)
            if own + 1 < job.total_items:
                dialogues = self.format.whole_dialogues
                items = partial(ledger.items, job.id, after=own)
                if self.where is not None and self.format.sounds is not None:
                    found = matched(items(), items(where=self.where))
                else:
                    found = items(where=self.where, dialogues=dialogues)
                for row in exported(found, whole=whole and dialogues):
                    if self._chosen is None or self._chosen[start + row.index]:
                        yield _moved(row, start)

    def by_job(self, rows: Iterable[ItemRow]) -> Iterator[tuple[StoredJob, Iterator[AudioItem]]]:
        """Yields the jobs of rows, each with its items."""
        for number, group in groupby(rows, key=lambda row: self._number(row.index)):
            start = self._starts[number]
            one = self.jobs[number]
            found = audio_items(*one[:2], one.job.id, (_moved(row, -start) for row in group), self.columns)
            yield one, (self._in_set(item, start) for item in found) if self.several else found

    def items(self, rows: Iterable[ItemRow]) -> Iterator[AudioItem]:
        return chain.from_iterable(items for _, items in self.by_job(rows))

    @cached_property
    def columns(self) -> Columns:
        """What all items have in common."""
        types: Type = {}
        for ledger, store, job in self.jobs if self.format.typed else ():
            # One shard is in memory.
            for place in dict.fromkeys(ledger.shard_inputs(job.id).values()):
                for line in read_raw_shard(store, *place):
                    types = widened(types, metadata_json(line.dialogue))
        return columns_of(*((one.ledger, one.job) for one in self.jobs), metadata=types)

    def left_out(self, items: int) -> LeftOut:
        """Counts what a dataset with this number of items leaves out."""
        jobs = self.jobs
        where = self.where
        statuses = [ledger.status(job.id) for ledger, _, job in jobs]
        counts = [status.items for status in statuses]
        sounds = self.format.sounds is not None
        dialogues = self.format.whole_dialogues and not sounds
        by_job = (
            ledger.filtered_out(job.id, where, dialogues=dialogues)
            for ledger, _, job in jobs
            if where is not None
        )
        filtered = tuple(
            FilteredOut(
                outs[0].condition, sum(out.items for out in outs), sum(out.without_score for out in outs)
            )
            for outs in zip(*by_job)
        )
        duplicates = (self.duplicates or 0) if self.unique else msgspec.UNSET
        refused = Counter(
            row.decision.reason
            for status, (ledger, _, job) in zip(statuses, jobs)
            if status.decisions
            for row in ledger.items(job.id, ItemState.DONE, where=where, dialogues=dialogues)
            if row.decision and row.refused
        )
        without_audio = sum(one.total for one in counts) - items - (duplicates or 0) - refused.total()
        # Items of a running job may get their audio after the export has passed them.
        without_audio = max(0, without_audio - sum(out.items for out in filtered))
        if where is not None and sounds:
            others = max(0, without_audio - sum(one.total - one.done for one in counts))
            without_audio -= others
            filtered += (FilteredOut("other turns of their dialogue", others, 0),)
        pending = sum(one.pending for one, (_, _, job) in zip(counts, jobs) if not job.state.final)
        reasons = dict(refused.most_common()) or msgspec.UNSET
        return LeftOut(
            without_audio, filtered, min(pending, without_audio), self.running, duplicates, reasons
        )

    def text_answers(self) -> Iterator[tuple[msgspec.Raw, str]]:
        """Yields the lines of items whose answer is text without audio, with that text, in index order."""
        for ledger, store, job in self.jobs:
            if next(ledger.artifacts(job.id, TEXT), None) is None:
                continue
            lines = ShardLines(ledger, store, job.id)
            texts = ArtifactReader(store)
            done = ledger.items(job.id, ItemState.DONE, where=self.where)
            for page in pages(row for row in done if row.artifact is None and not row.refused):
                written = ledger.artifacts_of(job.id, TEXT, [row.index for row in page])
                for row in page:
                    if row.index in written:
                        dialogue = lines.of(row).dialogue
                        if self.several:
                            dialogue = _renamed(dialogue, f"{job.id}-{row.example_id}")
                        yield dialogue, texts.read(written[row.index]).decode()

    def _number(self, index: int) -> int:
        """The number of the job that has the item with this index in the dataset."""
        return bisect_right(self._starts, index) - 1

    def _in_set(self, item: AudioItem, start: int) -> AudioItem:
        """An item with its index and its ids in the dataset. An id that looks as if it began with the id of a
        job gets one too, so that no two ids are equal."""
        index = start + item.artifact.index
        job = item.job
        changes: dict[str, Any] = {"artifact": replace(item.artifact, index=index)}
        renamed = self._chosen is not None and self._chosen[index] == _RENAMED
        if renamed or item.example_id.startswith(self._prefixes):
            changes["example_id"], changes["id"] = (f"{job.id}-{own}" for own in (item.example_id, item.id))
            changes["dialogue"] = _renamed(item.dialogue, changes["example_id"])
        return replace(item, **changes)


def _moved(row: ItemRow, by: int) -> ItemRow:
    return replace(row, index=row.index + by) if by else row


def _renamed(dialogue: msgspec.Raw, example_id: str) -> msgspec.Raw:
    line = decode_object(dialogue) | {"example_id": msgspec.Raw(msgspec.json.encode(example_id))}
    return msgspec.Raw(msgspec.json.encode(line))
