"""Which items go into which part of a dataset, known before the first byte is written."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from jobs.export.files import invalid
from jobs.export.items import exported
from jobs.ledger.records import ItemRow, Job
from jobs.where import FilteredOut, Where
from pipelines.errors import ConfigError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_HASHES = 2**64


@dataclass(frozen=True, slots=True)
class Splits:
    """Names with the upper bounds of their shares of all 64-bit hashes; the last bound is 2**64."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    def of(self, example_id: str) -> str:
        """The split of an example: the same in every job and on every machine, however many others there are."""
        if len(self.names) == 1:
            return self.names[0]
        digest = hashlib.blake2b(example_id.encode(), digest_size=8, person=b"nightjar.split").digest()
        number = int.from_bytes(digest, "big")
        return next(name for name, bound in zip(self.names, self.bounds, strict=True) if number < bound)


#: Everything in one split, for exports without splits.
WHOLE = Splits(("train",), (_HASHES,))


def parse_splits(text: str) -> Splits:
    """`train=0.98,dev=0.01,test=0.01` as `Splits`. Raises `config.invalid` unless the shares add up to exactly 1."""
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
    return invalid(message, "Write names of letters, digits and _ with shares that add up to 1: train=0.98,dev=0.01,test=0.01.")


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

    #: Failed, skipped or still pending, and in a format of dialogues those that are left out with one of them.
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
        """As in `3 without audio, 120 by wer < 0.1, 14 by distillmos > 3.5 (8 without that score)`; empty where none is left out."""
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
    #: SHA-256 over indexes, ids and audio hashes of all exported items: the same result of a job has the same one.
    digest: str
    #: Of a job that runs: a bit for each index, set for those that are exported. Others may get their audio while they are written.
    members: bytes | None = None
    #: Why items of the job are not exported.
    reasons: LeftOut = LeftOut()

    @property
    def items(self) -> int:
        return sum(part.items for part in self.parts)


def make_plan(rows: Iterable[ItemRow], splits: Splits, part_bytes: int | None, *, whole: bool = False, running: bool = False) -> Plan:
    """The plan for the items of a job, in index order. A part ends before its audio passes `part_bytes`; None: one part a split.

    `whole`: a dialogue is left out unless all its spoken turns have audio. `running`: other items may get their audio from now on.
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
            own[-1] = msgspec.structs.replace(part, last=row.index, items=part.items + 1, audio_bytes=part.audio_bytes + artifact.bytes)
    counted = [msgspec.structs.replace(part, of=len(own)) for own in parts.values() for part in own]
    return Plan(tuple(counted), digest.hexdigest(), bytes(members) if running else None)
