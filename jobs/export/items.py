"""The items of a job that have audio, each with the line it was made of and the name an export gives its audio."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from jobs.dialogue import Dialogue, spoken_text
from jobs.ledger.records import Artifact, ItemRow, ItemState, Job
from jobs.shard_file import RawLine, read_raw_shard
from jobs.store.base import ObjectStore
from jobs.store.folder import FolderStore
from jobs.turns import Triple, reference_places
from pipelines.request import Generation, SpokenRole

if TYPE_CHECKING:
    from jobs.ledger import Ledger


_decode = msgspec.json.Decoder(Dialogue).decode
_NO_GENERATION = Generation()


class MadeItem(msgspec.Struct, frozen=True):
    """An item with its audio."""

    example_id: str
    #: Its own in the job: that of the dialogue, with the turn where several are spoken.
    id: str
    artifact: Artifact
    #: The line as it was submitted.
    dialogue: msgspec.Raw
    #: Place of the message that is spoken; None: the item is the whole dialogue.
    message_index: int | None = None
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
    #: Whose turn it is.
    role: SpokenRole
    #: Place of the message that is spoken; None: the audio answers the whole dialogue.
    message_index: int | None
    #: The voice; without one `ref-` and the beginning of the reference audio's SHA-256; without either the model.
    speaker: str
    voice: str | None
    language: str | None
    instruct: str | None


def facts(job: Job, item: MadeItem) -> ItemFacts:
    """The facts of an item, from its line and the job's defaults."""
    dialogue = _decode(item.dialogue)
    place = spoken_place(job, item, dialogue.messages)
    generation = settings_of(job, dialogue, place)
    if place is None:
        text = spoken_text(dialogue.typed_messages())
        speaker = _speaker(job, item, generation.voice)
        return ItemFacts(text, "assistant", None, speaker, generation.voice, generation.language, generation.instruct)
    role = cast("SpokenRole", dialogue.messages[place][0])
    text = dialogue.messages[place][2].strip()
    heard = reference_places(dialogue.messages, place)
    speaker = _speaker(job, item, generation.voice, heard)
    return ItemFacts(text, role, place, speaker, generation.voice, generation.language, generation.instruct)


def settings_of(job: Job, dialogue: Dialogue, place: int | None) -> Generation:
    """What the line and the job ask for of a spoken message, or of the answer to the whole dialogue."""
    defaults, said = job.spec.generation, dialogue.generation or _NO_GENERATION
    if place is None:
        return said.over(defaults)
    role = cast("SpokenRole", dialogue.messages[place][0])
    return said.of(role).over(defaults.of(role))


def spoken_place(job: Job, item: MadeItem | RawLine, messages: Sequence[Triple]) -> int | None:
    """The place of the message that the audio of an item says; None: it answers the whole dialogue.

    Of a job of before turns could be chosen that is the one user's text, unless the model wrote its own.
    """
    if item.message_index is not None or job.spec.speak is not msgspec.UNSET:
        return item.message_index
    texts = [place for place, message in enumerate(messages) if message[0] == "user" and message[1] == "text"]
    wrote = isinstance(item, MadeItem) and item.text_out is not None
    return texts[0] if len(texts) == 1 and not wrote else None


def dialogues(rows: Iterable[ItemRow]) -> Iterator[list[ItemRow]]:
    """The items of each dialogue, of items in index order."""
    together: list[ItemRow] = []
    for row in rows:
        if together and not row.turn:
            yield together
            together = []
        together.append(row)
    if together:
        yield together


def exported(rows: Iterable[ItemRow], *, whole: bool) -> Iterator[tuple[ItemRow, Artifact | None]]:
    """Each item with its audio where it is exported; `whole`: only with all others of its dialogue."""
    if not whole:
        yield from ((row, made(row)) for row in rows)
        return
    for together in dialogues(rows):
        audio = [made(row) for row in together]
        yield from zip(together, audio if None not in audio else [None] * len(together), strict=True)


def made(row: ItemRow) -> Artifact | None:
    """The audio of an item that was made."""
    return row.artifact if row.state is ItemState.DONE else None


class MadeItems:
    """Iterates once over made items of a job in index order, with one shard's lines in memory at a time.

    `after` and `last` bound the indexes, `wanted` chooses by example id; what they leave out is not counted. `whole`: dialogues
    of which a spoken turn has no audio are left out.
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
        whole: bool = False,
    ) -> None:
        self._rows = exported(ledger.items(job_id, after=after), whole=whole)
        self._texts = _TextKeys(ledger, job_id)
        self._inputs = ledger.shard_inputs(job_id)
        self._store = store
        self._last = last
        self._wanted = wanted
        #: Items seen so far that have no audio, or are left out with one that has none.
        self.left_out = 0

    def __iter__(self) -> Iterator[MadeItem]:
        loaded = ("", "")
        lines: dict[int, RawLine] = {}
        for row, artifact in self._rows:
            if self._last is not None and row.index > self._last:
                return
            if not self._wanted(row.example_id):
                continue
            if artifact is None:
                self.left_out += 1
                continue
            if self._inputs[row.shard_no] != loaded:
                loaded = self._inputs[row.shard_no]
                lines = {line.index: line for line in read_raw_shard(self._store, *loaded)}
            line = lines[row.index]
            text_out = self._text_of(row.index)
            yield MadeItem(row.example_id, row.id, artifact, line.dialogue, line.message_index, line.references, text_out)

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


def _speaker(job: Job, item: MadeItem, voice: str | None, heard: Sequence[int] | None = None) -> str:
    """`heard`: places of the recordings whose voice it is; None: any."""
    if voice and voice.strip():
        return voice.strip()
    references = [item.references[place] for place in sorted(item.references) if heard is None or place in heard]
    if references:
        return f"ref-{references[0].rpartition('/')[2][:16]}"
    return job.spec.model.rstrip("/").rpartition("/")[2]


class AudioNames:
    """The names of audio for the files of one export to `folder`; with None, on standard output or in a bucket, paths are absolute."""

    def __init__(self, store: ObjectStore, folder: Path | None) -> None:
        self._root = store.root if isinstance(store, FolderStore) and folder is not None else None
        self._folder = folder
        self._prefixes: dict[str, str] = {}

    @property
    def base(self) -> str | None:
        """The store as seen from the export's folder; None where audio is named by what it is everywhere."""
        return None if self._root is None else self._prefix("")

    def of(self, file: str, where: str) -> str:
        """What `file`, a name in the folder of the export, calls the audio at `where`: a path of the store, or an address."""
        if self._root is None or not where.startswith(f"{self._root}/"):
            return where
        return os.path.normpath(f"{self._prefix(os.path.dirname(file))}/{where[len(str(self._root)) + 1 :]}")

    def _prefix(self, below: str) -> str:
        prefix = self._prefixes.get(below)
        if prefix is None:
            # `..` leads out of what a link leads to.
            folder = os.path.realpath(os.path.join(self._folder or "", below))
            prefix = self._prefixes[below] = os.path.relpath(os.path.realpath(self._root or ""), folder)
        return prefix
