"""Splits by hash: which part of a dataset an item belongs to depends on its example id alone."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from fractions import Fraction

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
