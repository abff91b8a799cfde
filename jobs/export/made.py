"""The items of a job that have audio, each with the line it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from jobs.dialogue import Dialogue, spoken_text
from jobs.ledger.records import Artifact, ItemRow, ItemState, Job
from jobs.payload import read_raw_shard
from jobs.store.base import ObjectStore

if TYPE_CHECKING:
    from jobs.ledger import Ledger

_decode = msgspec.json.Decoder(Dialogue).decode


class MadeItem(msgspec.Struct, frozen=True):
    """An item with its audio."""

    example_id: str
    artifact: Artifact
    #: The line as it was submitted.
    dialogue: msgspec.Raw
    #: Place of a message -> key of its reference audio.
    references: Mapping[int, str] = {}
    #: The text that the model wrote before its audio, where it writes text.
    text_out: str | None = None

    @property
    def seconds(self) -> float:
        return self.artifact.samples / self.artifact.sample_rate

    @property
    def name(self) -> str:
        """The name of its audio in the store without the extension: ASCII, without a dot, its own in the job."""
        return self.artifact.key.rpartition("/")[2].partition(".")[0]

    @property
    def extension(self) -> str:
        """`wav` or `flac`."""
        return self.artifact.key.rpartition(".")[2]


class ItemFacts(msgspec.Struct, frozen=True):
    """What datasets say of an item beside its audio."""

    #: The text that was asked for.
    text: str
    #: The voice; without one `ref-` and the beginning of the reference audio's SHA-256; without either the model.
    speaker: str
    language: str | None
    instruct: str | None


def facts(job: Job, item: MadeItem) -> ItemFacts:
    """The facts of an item, from its line and the job's defaults."""
    dialogue = _decode(item.dialogue)
    defaults = job.spec.generation
    generation = dialogue.generation.over(defaults) if dialogue.generation else defaults
    return ItemFacts(
        spoken_text(dialogue.typed_messages()), _speaker(job, item, generation.voice), generation.language, generation.instruct
    )


def made(row: ItemRow) -> Artifact | None:
    """The audio of an item that was made."""
    return row.artifact if row.state is ItemState.DONE else None


class MadeItems:
    """Iterates once over made items of a job in index order, with one shard's lines in memory at a time.

    `after` and `last` bound the indexes, `wanted` chooses by example id; what they leave out is not counted.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        job_id: str,
        *,
        after: int = -1,
        last: int | None = None,
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._rows = ledger.items(job_id, after=after)
        self._texts = _TextKeys(ledger, job_id)
        self._inputs = ledger.shard_inputs(job_id)
        self._store = store
        self._last = last
        self._wanted = wanted
        #: Items seen so far that have no audio.
        self.left_out = 0

    def __iter__(self) -> Iterator[MadeItem]:
        loaded = ("", "")
        lines: dict[int, tuple[msgspec.Raw, Mapping[int, str]]] = {}
        for row in self._rows:
            if self._last is not None and row.index > self._last:
                return
            if not self._wanted(row.example_id):
                continue
            artifact = made(row)
            if artifact is None:
                self.left_out += 1
                continue
            if self._inputs[row.shard_no] != loaded:
                loaded = self._inputs[row.shard_no]
                lines = {line.index: (line.dialogue, line.references) for line in read_raw_shard(self._store, *loaded)}
            yield MadeItem(row.example_id, artifact, *lines[row.index], self._text_of(row.index))

    def _text_of(self, index: int) -> str | None:
        key = self._texts.of(index)
        return None if key is None else self._store.get(key).decode()


def written_items(ledger: Ledger, store: ObjectStore, job_id: str) -> Iterator[tuple[msgspec.Raw, str]]:
    """The lines of items whose answer is text alone, each with that text, in index order."""
    texts = _TextKeys(ledger, job_id)
    inputs = ledger.shard_inputs(job_id)
    loaded = ("", "")
    lines: dict[int, msgspec.Raw] = {}
    for row in ledger.items(job_id) if texts.left else ():
        key = texts.of(row.index)
        if key is None or row.state is not ItemState.DONE or row.artifact is not None:
            continue
        if inputs[row.shard_no] != loaded:
            loaded = inputs[row.shard_no]
            lines = {line.index: line.dialogue for line in read_raw_shard(store, *loaded)}
        yield lines[row.index], store.get(key).decode()


class _TextKeys:
    """The keys of the texts that a job's model wrote, asked for in index order; a page of them in memory at a time."""

    def __init__(self, ledger: Ledger, job_id: str) -> None:
        self._keys = ledger.artifact_keys(job_id, "text")
        self._next = next(self._keys, None)

    @property
    def left(self) -> bool:
        """Whether there is one that has not been passed."""
        return self._next is not None

    def of(self, index: int) -> str | None:
        while self._next is not None and self._next[0] < index:
            self._next = next(self._keys, None)
        return self._next[1] if self._next is not None and self._next[0] == index else None


def _speaker(job: Job, item: MadeItem, voice: str | None) -> str:
    if voice and voice.strip():
        return voice.strip()
    if item.references:
        reference = item.references[min(item.references)]
        return f"ref-{reference.rpartition('/')[2][:16]}"
    return job.spec.model.rstrip("/").rpartition("/")[2]
