"""Which items go into which part of a dataset, known before the first byte is written."""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import msgspec

from jobs.export.items import exported
from jobs.ledger.records import ItemRow
from pipelines.errors import ConfigError, ErrorCode

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
        place = int.from_bytes(digest, "big")
        return next(name for name, bound in zip(self.names, self.bounds, strict=True) if place < bound)


#: Everything in one split, for exports that name none.
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
        raise _bad(f"{name[:80]!r} is no name of a split.")
    try:
        value = Fraction(share)
    except (ValueError, ZeroDivisionError):
        raise _bad(f"The split {name} has the share {share[:40]!r}.") from None
    if not 0 < value <= 1:
        raise _bad(f"The split {name} has the share {share[:40]}.")
    return value


def _bad(message: str) -> ConfigError:
    return ConfigError(
        ErrorCode.CONFIG_INVALID,
        message,
        "Write names of letters, digits and _ with shares that add up to 1: train=0.98,dev=0.01,test=0.01.",
    )


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


_RUN_BYTES = 32 << 20


class SortedLines:
    """Takes lines in any order and gives them back in the order of their bytes (the C locale's); sorted runs lie in `folder`."""

    def __init__(self, folder: Path, run_bytes: int = _RUN_BYTES) -> None:
        self._folder = folder
        self._run_bytes = run_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._runs: list[Path] = []

    def add(self, line: bytes) -> None:
        """`line` ends with its only newline."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= self._run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        if not self._runs:
            self._lines.sort()
            return iter(self._lines)
        if self._lines:
            self._spill()
        return self._merged()

    def _spill(self) -> None:
        self._lines.sort()
        path = self._folder / f"run-{len(self._runs):06d}"
        with path.open("wb") as file:
            file.writelines(self._lines)
        self._runs.append(path)
        self._lines, self._bytes = [], 0

    def _merged(self) -> Generator[bytes, None, None]:
        with ExitStack() as stack:
            yield from heapq.merge(*(stack.enter_context(path.open("rb")) for path in self._runs))
