"""The items of a job that have audio, with their lines of the input; and which of them go into which part
of a dataset, known before the first byte is written."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.checks import CHECKS, METERS, scores_with
from jobs.dialogue import Dialogue, spoken_text
from jobs.export.files import invalid
from jobs.ledger.records import Artifact, Draw, ItemRow, ItemState, Job
from jobs.packs import ArtifactReader
from jobs.shard_file import RawLine, ShardLines, read_raw_shard
from jobs.store.base import ObjectStore
from jobs.turns import reference_places
from jobs.voices import is_stored
from jobs.where import FilteredOut, Where
from pipelines.errors import ConfigError
from pipelines.request import Generation, SpokenRole

if TYPE_CHECKING:
    from jobs.ledger import Ledger


_decode = msgspec.json.Decoder(Dialogue).decode
#: Scores whose detail is what an ASR model heard.
_HEARD_BY = ("wer", "cer")
_PAGE_ITEMS = 1000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_HASHES = 2**64


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
        """The name of its audio in the store without the extension: ASCII, without a dot, unique in the
        job."""
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
    #: The voice; without one `ref-` and the beginning of the reference audio's SHA-256; without either the
    #: model.
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
    return ItemMetadata(
        text, role, index, speaker, generation.voice, generation.language, generation.instruct
    )


#: How an item was made and what was measured of it. A job without checks has no `draw`, `scores` and
#: `transcript`.
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
    """The settings that the line and the job give to the spoken message at `index`, or to the answer to
    the whole dialogue."""
    defaults, own = job.spec.generation, dialogue.generation or Generation()
    if index is None:
        return own.over(defaults)
    role = cast("SpokenRole", dialogue.messages[index][0])
    of_role = own.of(role)
    generation = of_role.over(defaults.of(role))
    if (
        of_role.voice is None
        and is_stored(job.spec, generation.voice)
        and reference_places(dialogue.messages, index)
    ):
        # The line's recording went before the job's stored voice.
        return msgspec.structs.replace(generation, voice=None)
    return generation


def exported(rows: Iterable[ItemRow], *, whole: bool) -> Iterator[tuple[ItemRow, Artifact | None]]:
    """Each item, in index order, with its audio if it is exported. `whole`: only with all other items of
    its dialogue."""
    for _, dialogue in (
        groupby(rows, key=lambda row: row.example_id) if whole else ((None, [row]) for row in rows)
    ):
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

    Indexes are above `after` and up to `last`, and `wanted` chooses by example id. `whole`: a dialogue is
    left out unless all its spoken turns have audio. `names`: those of the scores, where they are known.
    `where`: only items that match it, with `dialogues` together with the others of their dialogues.
    `members`: only these, see `plan.Plan`.
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
            if (
                artifact is None
                or not wanted(row.example_id)
                or (members is not None and not is_member(members, row.index))
            ):
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
    """Index -> the draw whose audio is the item's. Read after the items, so that those of a job that runs
    have theirs."""
    if job.spec.quality is None:
        return {}
    return {row.index: row.draw for row in ledger.draws_of(job.id, indexes) if row.draw.kept}


def is_member(members: bytes, index: int) -> bool:
    """Whether the bit of an index is set."""
    return index // 8 < len(members) and bool(members[index // 8] & 1 << index % 8)


def text_answers(
    ledger: Ledger, store: ObjectStore, job_id: str, where: Where | None = None
) -> Iterator[tuple[msgspec.Raw, str]]:
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
        return (
            self._artifacts.read(self._next).decode()
            if self._next is not None and self._next.index == row.index
            else None
        )


def _speaker(
    job: Job, references: Mapping[int, str], voice: str | None, recordings: Sequence[int] | None
) -> str:
    """`recordings`: indexes of the messages whose voice it is; None: any."""
    if voice and voice.strip():
        return voice.strip()
    heard = [references[index] for index in sorted(references) if recordings is None or index in recordings]
    if heard:
        return f"ref-{heard[0].rpartition('/')[2][:16]}"
    return job.spec.model.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Splits:
    """Names with the upper bounds of their shares of all 64-bit hashes; the last bound is 2**64."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    def of(self, example_id: str) -> str:
        """The split of an example: the same in every job and on every machine, however many others there
        are."""
        if len(self.names) == 1:
            return self.names[0]
        digest = hashlib.blake2b(example_id.encode(), digest_size=8, person=b"nightjar.split").digest()
        number = int.from_bytes(digest, "big")
        return next(name for name, bound in zip(self.names, self.bounds, strict=True) if number < bound)


#: Everything in one split, for exports without splits.
WHOLE = Splits(("train",), (_HASHES,))


def parse_splits(text: str) -> Splits:
    """`train=0.98,dev=0.01,test=0.01` as `Splits`. Raises `config.invalid` unless the shares add up to
    exactly 1."""
    names: list[str] = []
    bounds: list[int] = []
    total = Fraction(0)
    for part in text.split(","):
        name, _, share = (piece.strip() for piece in part.partition("="))
        total += _share(name, share)
        names.append(name)
        bounds.append(math.ceil(total * _HASHES))
    if len(set(names)) < len(names):
        raise _bad(f"The splits {text[:100]!r} name one twice.")
    if total != 1:
        raise _bad(f"The shares of the splits {text[:100]!r} add up to {float(total):g}.")
    return Splits(tuple(names), tuple(bounds))


def _share(name: str, share: str) -> Fraction:
    if not _NAME.fullmatch(name):
        raise _bad(f"{name[:80]!r} is not a valid name of a split.")
    try:
        value = Fraction(share)
    except (ValueError, ZeroDivisionError):
        value = Fraction()
    if not 0 < value <= 1:
        raise _bad(f"The split {name} has the share {share[:40]!r}.")
    return value


def _bad(message: str) -> ConfigError:
    return invalid(
        message,
        "Write names of letters, digits and _ with shares that add up to 1: train=0.98,dev=0.01,test=0.01.",
    )


class Part(msgspec.Struct, frozen=True):
    """A run of items of one split: the unit in which an export is written and goes on after a stop."""

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


class LeftOut(msgspec.Struct, frozen=True):
    """Items that an export leaves out."""

    #: Failed, skipped or still pending, and in a format of dialogues those that are left out with one of
    #: them.
    without_audio: int = 0
    #: By the conditions of the filter, in its order.
    filtered: tuple[FilteredOut, ...] = ()
    #: Of those without audio: items of a job that runs, which may still get theirs.
    pending: int = 0
    #: Whether the job was still running.
    running: bool = False

    @property
    def items(self) -> int:
        return self.without_audio + sum(out.items for out in self.filtered)

    def __str__(self) -> str:
        """As in `3 without audio, 120 by wer < 0.1, 14 by distillmos > 3.5 (8 without that score)`; empty
        where none is left out."""
        parts = [f"{self.without_audio} without audio"] if self.without_audio else []
        for out in self.filtered:
            unknown = "" if not out.without_score else f" ({out.without_score} without that score)"
            parts += [f"{out.items} by {out.condition}{unknown}"] if out.items else []
        return ", ".join(parts)


def left_out(ledger: Ledger, job: Job, where: Where | None, items: int, *, dialogues: bool) -> LeftOut:
    """What an export of `items` items leaves out of a job."""
    status = ledger.status(job.id).items
    filtered = () if where is None else tuple(ledger.filtered_out(job.id, where, dialogues=dialogues))
    # Items of a job that runs may have got their audio since they were passed.
    without_audio = max(0, status.total - items - sum(out.items for out in filtered))
    running = not job.state.final
    return LeftOut(without_audio, filtered, min(status.pending, without_audio) if running else 0, running)


class Plan(msgspec.Struct, frozen=True):
    """The parts of an export, by split and number."""

    parts: tuple[Part, ...]
    #: SHA-256 over indexes, ids and audio hashes of all exported items: the same result of a job has the same
    #: one.
    digest: str
    #: Of a job that runs: a bit for each index, set for those that are exported. Others may get their audio
    #: while they are written.
    members: bytes | None = None
    #: Why items of the job are not exported.
    reasons: LeftOut = LeftOut()

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


def make_plan(
    rows: Iterable[ItemRow],
    splits: Splits,
    part_bytes: int | None,
    *,
    whole: bool = False,
    running: bool = False,
) -> Plan:
    """The plan for the items of a job, in index order. A part ends before its audio passes `part_bytes`;
    None: one part a split.

    `whole`: a dialogue is left out unless all its spoken turns have audio. `running`: other items may get
    their audio from now on.
    """
    parts: dict[str, list[Part]] = {name: [] for name in splits.names}
    digest, members = hashlib.sha256(), bytearray()
    for row, artifact in exported(rows, whole=whole):
        if artifact is None:
            continue
        digest.update(msgspec.json.encode((row.index, row.example_id, artifact.sha256)))
        if running:
            members.extend(bytes(max(0, row.index // 8 + 1 - len(members))))
            members[row.index // 8] |= 1 << row.index % 8
        split = splits.of(row.example_id)
        own = parts[split]
        if not own or (part_bytes is not None and own[-1].audio_bytes + artifact.bytes > part_bytes):
            own.append(Part(split, len(own), row.index, row.index, 1, artifact.bytes))
        else:
            part = own[-1]
            own[-1] = msgspec.structs.replace(
                part, last=row.index, items=part.items + 1, audio_bytes=part.audio_bytes + artifact.bytes
            )
    counted = [msgspec.structs.replace(part, of=len(own)) for own in parts.values() for part in own]
    return Plan(tuple(counted), digest.hexdigest(), bytes(members) if running else None)
