"""The items of a job that have audio, with their lines of the input; and the plan of a dataset, which assigns
them to its parts before the first byte is written."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from jobs.checks import CHECKS, OF_ENGINES, scores_with
from jobs.codes import StoredCodes
from jobs.dialogue import (
    NO_GENERATION,
    decode_dialogue,
    metadata_json,
    metadata_of,
    reference_places,
    spoken_text,
)
from jobs.formatting import JsonObject
from jobs.layout import references_prefix
from jobs.ledger.records import WORDS, Artifact, Decision, Draw, ItemRow, ItemState, Job
from jobs.packs import ArtifactReader
from jobs.shard_file import RawLine, ShardLines
from jobs.store.base import ObjectStore
from jobs.where import FilteredOut
from pipelines.errors import invalid
from pipelines.request import SpokenRole, Word

if TYPE_CHECKING:
    from jobs.export.table_formats import Type
    from jobs.ledger import Ledger


#: Reads the lines of an artifact `words`.
read_words = msgspec.json.Decoder(tuple[Word, ...]).decode_lines
#: Scores whose detail is the transcript of an ASR model.
TRANSCRIBED = ("wer", "cer")
#: Kind of the artifact for the text that a model wrote beside its audio.
TEXT = "text"
_PAGE_ITEMS = 1000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_HASHES = 2**64


class Place(NamedTuple):
    """The place of a turn in the sound of its dialogue."""

    #: Seconds, to a millionth.
    start: float = 0.0
    end: float = 0.0
    #: 0 or 1; in a mono sound 0.
    channel: int = 0
    #: The name of the sound.
    dialogue: str = ""


class Columns(msgspec.Struct, frozen=True):
    """What all items of a dataset have in common."""

    #: The names of their scores; None: its jobs have no checks, and no later ones either.
    scores: tuple[str, ...] | None = None
    #: The types of their metadata, for tables.
    metadata: Type = {}
    #: Whether they have `words`, and whether they have `spoken_text`.
    timed: bool = False
    respelled: bool = False
    #: Whether they are of several jobs. Their ids and their index are then unique in the dataset.
    several: bool = False


class AudioItem(msgspec.Struct, frozen=True):
    """An item with its audio."""

    example_id: str
    #: Unique in the dataset: the example id, with the turn if several are spoken.
    id: str
    artifact: Artifact
    #: The line as it was submitted.
    dialogue: msgspec.Raw
    #: The job that made it.
    job: Job
    #: Index of the message that is spoken; None: the item is the whole dialogue.
    message_index: int | None = None
    #: Index of a message -> key of its reference audio.
    references: Mapping[int, str] = {}
    #: The text that the model wrote before its audio, if it writes text.
    text_out: str | None = None
    #: When each word and phoneme is said, in a job with `--timestamps`; phonemes only if the model knows them.
    words: tuple[Word, ...] = ()
    phonemes: tuple[Word, ...] = ()
    #: The text as it was spoken, if it is written otherwise.
    spoken: str | None = None
    #: The draw that made its audio; None in a job without checks.
    draw: Draw | None = None
    columns: Columns = Columns()
    #: What a person decided about it.
    decision: Decision | None = None
    #: Its codes, if the job makes codes, and what they contain once they are read.
    codes_artifact: Artifact | None = None
    codes: StoredCodes | None = None
    #: The turns in its audio, if that is the sound of a dialogue, and the number of its channels.
    turns: tuple[AudioItem, ...] = ()
    channels: int = 1
    #: Of a turn in such a sound.
    place: Place = Place()

    @property
    def scores(self) -> dict[str, float | None]:
        """Name -> score, for all score names of the job; None: not measured."""
        measured = {} if self.draw is None else self.draw.scores
        return {
            name: measured[name].value if name in measured else None for name in self.columns.scores or ()
        }

    @property
    def transcript(self) -> str | None:
        """The transcript of the ASR model, in a job with the check `wer` or `cer`."""
        measured = {} if self.draw is None else self.draw.scores
        return next((measured[name].detail for name in TRANSCRIBED if name in measured), None)

    @property
    def metadata(self) -> JsonObject:
        """The other columns or keys of its record, with JSON's types."""
        return metadata_of(self.dialogue)

    @property
    def is_codes(self) -> bool:
        """Whether it has no audio, so that its artifact is its codes."""
        return self.artifact.kind == "codes"

    @property
    def seconds(self) -> float:
        return self.artifact.samples / self.artifact.sample_rate

    @property
    def name(self) -> str:
        """The name of its audio in the store, without the extension: ASCII, no dot. In a dataset of several
        jobs it begins with the index there, so that it is unique."""
        name = self.artifact.key.rpartition("/")[2].partition(".")[0]
        return f"{self.artifact.index:09d}-{name.partition('-')[2]}" if self.columns.several else name

    @property
    def extension(self) -> str:
        """`wav`, `flac`, `mp3` or `opus`."""
        return self.artifact.key.rpartition(".")[2]


#: An item with the path or address of its audio, or with the content of its file; empty if it has only codes.
Located = tuple[AudioItem, str]
Loaded = tuple[AudioItem, bytes]


class ItemMetadata(NamedTuple):
    """The metadata of an item in a dataset."""

    #: The requested text, as it is written and as it was spoken.
    text: str
    spoken_text: str
    #: The role of the turn.
    role: SpokenRole
    #: Index of the message that is spoken; None: the audio answers the whole dialogue.
    message_index: int | None
    #: The voice; without one, `ref-` and the first digits of the reference audio's SHA-256; without either,
    #: the model.
    speaker: str
    voice: str | None
    language: str | None
    instruct: str | None
    #: Key of the recording of a cloned voice; None: there is none.
    recording: str | None


def item_metadata(job: Job, item: AudioItem | RawLine) -> ItemMetadata:
    """The metadata of an item, from its line and its job's defaults. `job`: that of the dataset, of which an
    item in a dataset of several jobs has its own."""
    job = item.job if isinstance(item, AudioItem) else job
    dialogue = decode_dialogue(item.dialogue)
    index = item.message_index
    own = dialogue.generation or NO_GENERATION
    defaults = job.spec.generation
    role: SpokenRole = "assistant"
    #: Indexes of the messages that contain the voice; None: any message.
    recordings: Sequence[int] | None = None
    if index is None:
        text = spoken_text(dialogue.typed_messages())
    else:
        role = cast("SpokenRole", dialogue.messages[index][0])
        text = dialogue.messages[index][2].strip()
        recordings = reference_places(dialogue.messages, index)
        own = own.of(role)
        defaults = defaults.of(role)
    generation = own.over(defaults)
    voice = generation.voice
    if recordings and own.voice is None and voice in (job.spec.stored_voices or {}):
        # The line's recording takes precedence over the job's stored voice.
        voice = None
    keys = [
        item.references[place]
        for place in sorted(item.references)
        if recordings is None or place in recordings
    ]
    speaker = voice.strip() if voice else ""
    if not speaker and keys:
        speaker = f"ref-{keys[0].rpartition('/')[2][:16]}"
    speaker = speaker or job.spec.model.rstrip("/").rpartition("/")[2]
    stored = (job.spec.stored_voices or {}).get(voice or "")
    keys += [references_prefix(job.id) + stored.recording] if stored else []
    about = (speaker, voice, generation.language, generation.instruct, next(iter(keys), None))
    return ItemMetadata(text, item.spoken or text, role, index, *about)


def minutes_by_voice(ledger: Ledger, store: ObjectStore, job: Job) -> dict[str, float]:
    """Returns voice -> minutes of audio of a job, longest first. Reads the lines of all items. Raises
    `StoreError`."""
    lines = ShardLines(ledger, store, job.id)
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in exported(ledger.items(job.id)):
        artifact = cast("Artifact", row.artifact)
        voice = item_metadata(job, lines.of(row)).speaker
        seconds[voice] += artifact.samples / artifact.sample_rate
    return {voice: seconds[voice] / 60 for voice in sorted(seconds, key=lambda one: (-seconds[one], one))}


#: Names of the fields that say how an item was made and what was measured. Jobs without checks have no `draw`,
#: `scores` and `transcript`, jobs without `--timestamps` no `words`, those without `normalize` and `lexicon` no
#: `spoken_text`, a record without other columns or keys no `metadata`, items whose codes are not exported no `codec` and `voice_codes`, and only datasets of several jobs
#: have `job`.
ORIGIN = (
    "seed",
    "model",
    "voice",
    "draw",
    "scores",
    "transcript",
    "words",
    "spoken_text",
    "codec",
    "voice_codes",
    "metadata",
    "job",
)


def facts(item: AudioItem) -> JsonObject:
    """All fields of an item that formats write, under their common names; of a dialogue also those of its
    turns."""
    known = item_metadata(item.job, item)
    artifact = item.artifact
    job = item.job
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
    if item.columns.scores is not None:
        draw = None if item.draw is None else item.draw.draw
        about |= {"draw": draw, "scores": item.scores, "transcript": item.transcript}
    if item.codes is not None:
        voice = item.codes.voice_codes
        about["codec"] = msgspec.to_builtins(item.codes.codec)
        about["voice_codes"] = None if voice is None else voice.tolist()
    if item.columns.timed:
        about["words"] = item.words
    if item.columns.respelled:
        about["spoken_text"] = known.spoken_text
    if metadata := metadata_json(item.dialogue):
        about["metadata"] = metadata
    if item.place.dialogue:
        about |= item.place._asdict()
    if item.turns:
        turns = [facts(turn) for turn in item.turns]
        about = picked(about, "example_id", "sample_rate", "samples", "duration", "sha256", "metadata")
        about |= {"text": "\n".join(turn["text"] for turn in turns), "turns": turns}
    return about | ({"job": job.id} if item.columns.several else {})


def picked(about: Mapping[str, Any], *names: str) -> JsonObject:
    """Selects the named fields that an item has, in this order."""
    return {name: about[name] for name in names if name in about}


def columns_of(*jobs: tuple[Ledger, Job], metadata: Type) -> Columns:
    """The columns of a dataset with these jobs; the scores of built-in checks are first. `metadata`: the types of the
    metadata, if they are needed."""
    names = set[str]()
    for ledger, job in jobs:
        names |= ledger.measured_scores(job.id)
        if (quality := job.spec.quality) is not None:
            names |= scores_with(quality.meters) - {*OF_ENGINES} | quality.bounds.keys()
    scores = (*(name for name in CHECKS if name in names), *sorted(names - CHECKS.keys())) or None
    specs = [job.spec for _, job in jobs]
    timed = any(spec.timestamps is True for spec in specs)
    return Columns(scores, metadata, timed, any(spec.respells for spec in specs), len(jobs) > 1)


def exported(rows: Iterable[ItemRow], *, whole: bool = False) -> Iterator[ItemRow]:
    """Yields the items that have audio which no person refused, in index order. `whole`: only items of dialogues
    whose items all have such audio."""
    for _, dialogue in groupby(rows, key=lambda row: row.example_id if whole else row.index):
        items = list(dialogue)
        if all(row.state is ItemState.DONE and row.artifact is not None and not row.refused for row in items):
            yield from items


def matched(rows: Iterable[ItemRow], matching: Iterator[ItemRow]) -> Iterator[ItemRow]:
    """Yields all rows, without their audio if they are not in `matching`. Both are in index order."""
    found = next(matching, None)
    for row in rows:
        if found is not None and found.index == row.index:
            yield row
            found = next(matching, None)
        else:
            yield msgspec.structs.replace(row, artifact=None)


def audio_items(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    rows: Iterable[ItemRow] | None = None,
    columns: Columns | None = None,
) -> Iterator[AudioItem]:
    """Yields the items with audio of a job, or of `rows`, in index order, with the lines of one shard in
    memory at a time. `columns`: those of the dataset, if it is not the job alone."""
    job = ledger.job(job_id)
    texts = ArtifactReader(store)
    lines = ShardLines(ledger, store, job_id)
    columns = columns or columns_of((ledger, job), metadata={})
    for page in pages(exported(ledger.items(job_id) if rows is None else rows)):
        indexes = [row.index for row in page]
        # Read after the items, so that all items of a running job have their draws.
        kept = ledger.kept_draws(job_id, indexes)
        written = ledger.artifacts_of(job_id, TEXT, indexes)
        coded = ledger.artifacts_of(job_id, "codes", indexes) if job.spec.output else {}
        timed = ledger.artifacts_of(job_id, WORDS, indexes) if job.spec.timestamps is True else {}
        for row in page:
            line = lines.of(row)
            text = written.get(row.index)
            times = timed.get(row.index)
            words, *phonemes = ((),) if times is None else read_words(texts.read(times))
            yield AudioItem(
                example_id=row.example_id,
                id=row.id,
                artifact=cast("Artifact", row.artifact),
                dialogue=line.dialogue,
                job=job,
                message_index=line.message_index,
                references=line.references,
                spoken=line.spoken,
                text_out=None if text is None else texts.read(text).decode(),
                words=words,
                phonemes=phonemes[0] if phonemes else (),
                draw=kept.get(row.index),
                decision=row.decision,
                codes_artifact=coded.get(row.index),
                columns=columns,
            )


def pages(rows: Iterable[ItemRow]) -> Iterator[list[ItemRow]]:
    """Yields the rows in lists, one for each query of what belongs to them."""
    rows = iter(rows)
    while page := list(islice(rows, _PAGE_ITEMS)):
        yield page


class Splits(NamedTuple):
    """The splits of a dataset. `bounds`: name -> exclusive upper bound of the 64-bit hashes in the split."""

    bounds: Mapping[str, int]

    def of(self, example_id: str) -> str:
        """The split of an example: the same in every job and on every machine."""
        number = int.from_bytes(
            hashlib.blake2b(example_id.encode(), digest_size=8, person=b"nightjar.split").digest(), "big"
        )
        return next(name for name, bound in self.bounds.items() if number < bound)


#: One split with all items, for exports without splits.
WHOLE = Splits({"train": _HASHES})


def parse_splits(text: str) -> Splits:
    """Parses a text such as `train=0.98,dev=0.01,test=0.01`. Raises `config.invalid` unless the shares add up
    to exactly 1."""
    bounds = dict[str, int]()
    total = Fraction(0)
    wrong = ""
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        try:
            value = Fraction(share)
        except (ValueError, ZeroDivisionError):
            value = Fraction()
        if not _NAME.fullmatch(name) or name in bounds or value <= 0:
            wrong = wrong or f"{part[:80]!r} is not a unique name with a share."
        total += value
        bounds[name] = math.ceil(total * _HASHES)
    if total != 1:
        wrong = wrong or f"The shares of the splits {text[:100]!r} add up to {float(total):g}."
    if wrong:
        raise invalid(
            wrong,
            "Write names of letters, digits and _ with shares that add up to 1: train=0.98,dev=0.01,test=0.01.",
        )
    return Splits(bounds)


class Part(NamedTuple):
    """Consecutive items of one split: the unit in which an export is written and continues after a stop."""

    split: str
    #: From 0 within its split.
    number: int
    #: Indexes of its first and last item, with items of other splits between.
    first: int
    last: int
    items: int
    #: Size of their audio.
    audio_bytes: int
    #: Number of parts of its split.
    of: int = 0


class LeftOut(msgspec.Struct, frozen=True):
    """Numbers of items that an export leaves out."""

    #: Failed, skipped or pending items; in a format of dialogues, all items of a dialogue with such an item, and the
    #: others of a dialogue with a refused one.
    without_audio: int = 0
    #: Items per condition of the filter, in the order of the conditions.
    filtered: tuple[FilteredOut, ...] = ()
    #: Pending items among those without audio, if the job was still running.
    pending: int = 0
    #: Whether the job was still running.
    running: bool = False
    #: Items whose text and voice an earlier item has, if these are left out.
    duplicates: int | msgspec.UnsetType = msgspec.UNSET
    #: Reason -> items that a person refused, the most frequent reason first, if there are any.
    refused: dict[str, int] | msgspec.UnsetType = msgspec.UNSET

    @property
    def items(self) -> int:
        filtered = sum(out.items for out in self.filtered)
        return self.without_audio + filtered + (self.duplicates or 0) + sum((self.refused or {}).values())

    def __str__(self) -> str:
        """A text such as `3 without audio, 120 by wer < 0.1, 14 by distillmos > 3.5 (8 without that score)`;
        empty if none is left out."""
        parts = [f"{self.without_audio} without audio"] if self.without_audio else []
        for out in self.filtered:
            unknown = "" if not out.without_score else f" ({out.without_score} without that score)"
            parts += [f"{out.items} by {out.condition}{unknown}"] if out.items else []
        if self.refused:
            parts.append(f"{sum(self.refused.values())} refused")
        if self.duplicates:
            parts.append(f"{self.duplicates} duplicates")
        return ", ".join(parts)


class Plan(NamedTuple):
    """The parts of an export, by split and number."""

    parts: tuple[Part, ...]
    #: SHA-256 over indexes, ids and audio hashes of all exported items.
    digest: str
    #: Items that are not exported, by reason.
    reasons: LeftOut = LeftOut()

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


def make_plan(
    rows: Iterable[ItemRow], splits: Splits, part_bytes: int | None, *, whole: bool = False
) -> Plan:
    """Plans the export of items with audio, in index order. A part ends before its audio exceeds
    `part_bytes`; None: one part per split. `whole`: a part ends with a dialogue, and may exceed `part_bytes`
    by the rest of it."""
    #: [first index, last index, items, bytes] of each part.
    parts = {name: [] for name in splits.bounds}
    digest = hashlib.sha256()
    dialogue = None
    for row in rows:
        artifact = cast("Artifact", row.artifact)
        digest.update(msgspec.json.encode((row.index, row.example_id, artifact.sha256)))
        own = parts[splits.of(row.example_id)]
        full = own and part_bytes is not None and own[-1][3] + artifact.bytes > part_bytes
        if not own or (full and not (whole and row.example_id == dialogue)):
            own.append([row.index, row.index, 0, 0])
        dialogue = row.example_id
        own[-1][1:] = row.index, own[-1][2] + 1, own[-1][3] + artifact.bytes
    made = (
        Part(split, number, *facts, of=len(own))
        for split, own in parts.items()
        for number, facts in enumerate(own)
    )
    return Plan((*made,), digest.hexdigest())
