"""The items of a job that have audio, with their lines of the input, and the names that an export gives their audio."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.checks import CHECKS, METERS, scores_with
from jobs.dialogue import Dialogue, spoken_text
from jobs.ledger.records import Artifact, Draw, ItemRow, ItemState, Job
from jobs.packs import ArtifactReader
from jobs.shard_file import RawLine, ShardLines, read_raw_shard
from jobs.store.base import ObjectStore
from jobs.turns import reference_places
from jobs.voices import is_stored
from jobs.where import Where
from pipelines.request import Generation, SpokenRole

if TYPE_CHECKING:
    from jobs.ledger import Ledger


_decode = msgspec.json.Decoder(Dialogue).decode
#: Scores whose detail is what an ASR model heard.
_HEARD_BY = ("wer", "cer")
_PAGE_ITEMS = 1000


class AudioItem(msgspec.Struct, frozen=True):
    """An item with its audio."""

    example_id: str
    #: Unique in the job: the example id, with the turn where several are spoken.
    id: str
    artifact: Artifact
    #: The line as it was submitted.
    dialogue: msgspec.Raw
    #: Index of the message that is spoken; None: the item is the whole dialogue.
    message_index: int | None = None
    #: Index of a message -> key of its reference audio.
    references: Mapping[int, str] = {}
    #: The text that the model wrote before its audio, where it writes text.
    text_out: str | None = None
    #: The attempt whose audio it is; None in a job without checks.
    draw: Draw | None = None
    #: Names of the scores of the job, the same for all its items.
    score_names: tuple[str, ...] = ()

    @property
    def scores(self) -> dict[str, float | None]:
        """What was measured of its audio, by the names of the job's scores; None: not measured."""
        measured = {} if self.draw is None else self.draw.scores
        return {name: measured[name].value if name in measured else None for name in self.score_names}

    @property
    def transcript(self) -> str | None:
        """What the ASR model of a job with the check `wer` or `cer` heard."""
        measured = {} if self.draw is None else self.draw.scores
        return next((measured[name].detail for name in _HEARD_BY if name in measured), None)

    @property
    def seconds(self) -> float:
        return self.artifact.samples / self.artifact.sample_rate

    @property
    def name(self) -> str:
        """The name of its audio in the store without the extension: ASCII, without a dot, unique in the job."""
        return self.artifact.key.rpartition("/")[2].partition(".")[0]

    @property
    def extension(self) -> str:
        """`wav`, `flac`, `mp3` or `opus`."""
        return self.artifact.key.rpartition(".")[2]


class ItemMetadata(msgspec.Struct, frozen=True):
    """What datasets say about an item beside its audio."""

    #: The text that was asked for.
    text: str
    #: Whose turn it is.
    role: SpokenRole
    #: Index of the message that is spoken; None: the audio answers the whole dialogue.
    message_index: int | None
    #: The voice; without one `ref-` and the beginning of the reference audio's SHA-256; without either the model.
    speaker: str
    voice: str | None
    language: str | None
    instruct: str | None


def item_metadata(job: Job, item: AudioItem | RawLine) -> ItemMetadata:
    """The metadata of an item, from its line and the job's defaults."""
    dialogue, index = _decode(item.dialogue), item.message_index
    generation = _generation_of(job, dialogue, index)
    role: SpokenRole = "assistant"
    if index is None:
        text, recordings = spoken_text(dialogue.typed_messages()), None
    else:
        role = cast("SpokenRole", dialogue.messages[index][0])
        text, recordings = dialogue.messages[index][2].strip(), reference_places(dialogue.messages, index)
    speaker = _speaker(job, item.references, generation.voice, recordings)
    return ItemMetadata(text, role, index, speaker, generation.voice, generation.language, generation.instruct)


#: How an item was made and what was measured of it. A job without checks has no `draw`, `scores` and `transcript`.
ORIGIN = ("seed", "model", "voice", "draw", "scores", "transcript")


def facts(job: Job, item: AudioItem) -> dict[str, Any]:
    """Everything that formats say of an item, by the names that all of them have for it."""
    known, artifact = item_metadata(job, item), item.artifact
    about = {
        "example_id": item.example_id,
        "index": artifact.index,
        "text": known.text,
        "role": known.role,
        "message_index": known.message_index,
        "speaker": known.speaker,
        "language": known.language,
        "sample_rate": artifact.sample_rate,
        "samples": artifact.samples,
        "duration": round(item.seconds, 6),
        "sha256": artifact.sha256,
        "spec_sha": job.spec_sha,
        "seed": artifact.seed,
        "model": job.spec.model,
        "voice": known.voice,
    }
    if job.spec.quality is not None:
        draw = None if item.draw is None else item.draw.draw
        about |= {"draw": draw, "scores": item.scores, "transcript": item.transcript}
    return about


def picked(about: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of the names that an item has, in their order."""
    return {name: about[name] for name in names if name in about}


def score_names(ledger: Ledger, job: Job) -> tuple[str, ...]:
    """The names of the scores of a job, known before its first item: those of built-in checks first.

    Which scores a meter of another package has is known from the draws alone, which are all read then.
    """
    quality = job.spec.quality
    if quality is None:
        return ()
    names = scores_with(quality.meters) | quality.bounds.keys()
    if quality.meters.keys() - METERS.keys():
        names |= {name for row in ledger.draws(job.id) if row.draw.kept for name in row.draw.scores}
    return (*(name for name in CHECKS if name in names), *sorted(names - CHECKS.keys()))


def _generation_of(job: Job, dialogue: Dialogue, index: int | None) -> Generation:
    """The settings that the line and the job give to the spoken message at `index`, or to the answer to the whole dialogue."""
    defaults, own = job.spec.generation, dialogue.generation or Generation()
    if index is None:
        return own.over(defaults)
    role = cast("SpokenRole", dialogue.messages[index][0])
    of_role = own.of(role)
    generation = of_role.over(defaults.of(role))
    if of_role.voice is None and is_stored(job.spec, generation.voice) and reference_places(dialogue.messages, index):
        # The line's recording went before the job's stored voice.
        return msgspec.structs.replace(generation, voice=None)
    return generation


def exported(rows: Iterable[ItemRow], *, whole: bool) -> Iterator[tuple[ItemRow, Artifact | None]]:
    """Each item, in index order, with its audio if it is exported. `whole`: only with all other items of its dialogue."""
    for _, dialogue in groupby(rows, key=lambda row: row.example_id) if whole else ((None, [row]) for row in rows):
        items = list(dialogue)
        audio = [row.artifact if row.state is ItemState.DONE else None for row in items]
        yield from zip(items, audio if None not in audio else [None] * len(items), strict=True)


def audio_items(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    *,
    after: int = -1,
    last: int | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
    whole: bool = False,
    names: tuple[str, ...] | None = None,
    where: Where | None = None,
    dialogues: bool = False,
    members: bytes | None = None,
) -> Iterator[AudioItem]:
    """The items of a job that have audio, in index order, with the lines of one shard in memory at a time.

    Indexes are above `after` and up to `last`, and `wanted` chooses by example id. `whole`: a dialogue is left out unless all its
    spoken turns have audio. `names`: those of the scores, where they are known. `where`: only items that match it, with `dialogues`
    together with the others of their dialogues. `members`: only these, see `plan.Plan`.
    """
    job = ledger.job(job_id)
    rows = exported(ledger.items(job_id, after=after, where=where, dialogues=dialogues), whole=whole)
    lines, texts = ShardLines(ledger, store, job_id, read_raw_shard), _Texts(ledger, store, job_id)
    names = score_names(ledger, job) if names is None else names
    while page := list(islice(rows, _PAGE_ITEMS)):
        kept = _kept_draws(ledger, job, [row.index for row, artifact in page if artifact is not None])
        for row, artifact in page:
            if last is not None and row.index > last:
                return
            if artifact is None or not wanted(row.example_id) or (members is not None and not is_member(members, row.index)):
                continue
            line = lines.of(row)
            yield AudioItem(
                example_id=row.example_id,
                id=row.id,
                artifact=artifact,
                dialogue=line.dialogue,
                message_index=line.message_index,
                references=line.references,
                text_out=texts.of(row),
                draw=kept.get(row.index),
                score_names=names,
            )


def _kept_draws(ledger: Ledger, job: Job, indexes: Sequence[int]) -> dict[int, Draw]:
    """Index -> the draw whose audio is the item's. Read after the items, so that those of a job that runs have theirs."""
    if job.spec.quality is None:
        return {}
    return {row.index: row.draw for row in ledger.draws_of(job.id, indexes) if row.draw.kept}


def is_member(members: bytes, index: int) -> bool:
    """Whether the bit of an index is set."""
    return index // 8 < len(members) and bool(members[index // 8] & 1 << index % 8)


def text_answers(ledger: Ledger, store: ObjectStore, job_id: str, where: Where | None = None) -> Iterator[tuple[msgspec.Raw, str]]:
    """The lines of items whose answer is text alone, each with that text, in index order."""
    lines, texts = ShardLines(ledger, store, job_id, read_raw_shard), _Texts(ledger, store, job_id)
    for row in ledger.items(job_id, where=where) if texts else ():
        if row.state is ItemState.DONE and row.artifact is None and (text := texts.of(row)) is not None:
            yield lines.of(row).dialogue, text


class _Texts:
    """The texts that the model of a job wrote, looked up in index order."""

    def __init__(self, ledger: Ledger, store: ObjectStore, job_id: str) -> None:
        self._artifacts = ArtifactReader(store)
        self._texts = ledger.artifact_facts(job_id, "text")
        self._next = next(self._texts, None)

    def __bool__(self) -> bool:
        """Whether there are texts that have not been passed."""
        return self._next is not None

    def of(self, row: ItemRow) -> str | None:
        """The text that the model wrote for an item, or None."""
        while self._next is not None and self._next.index < row.index:
            self._next = next(self._texts, None)
        return self._artifacts.read(self._next).decode() if self._next is not None and self._next.index == row.index else None


def _speaker(job: Job, references: Mapping[int, str], voice: str | None, recordings: Sequence[int] | None) -> str:
    """`recordings`: indexes of the messages whose voice it is; None: any."""
    if voice and voice.strip():
        return voice.strip()
    heard = [references[index] for index in sorted(references) if recordings is None or index in recordings]
    if heard:
        return f"ref-{heard[0].rpartition('/')[2][:16]}"
    return job.spec.model.rstrip("/").rpartition("/")[2]


class AudioNames:
    """The names of audio in the files of one export to `folder`. None (standard output, a bucket): paths are absolute."""

    def __init__(self, store: ObjectStore, folder: Path | None) -> None:
        self._root = None if folder is None else store.root
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
