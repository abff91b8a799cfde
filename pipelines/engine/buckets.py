"""Batch sizes with a captured graph: which one a batch uses, and which one is captured next."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Batch sizes that CUDA graphs are captured for; other batches are padded with the dead slot. By
#: default the number of slots is one of these too.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
#: Larger sizes for engines with more than 512 slots, which some models have by default if memory suffices.
WIDE_BUCKETS = (640, 768, 896, 1024)
#: Sizes above the largest of `WIDE_BUCKETS` are multiples of this.
_STEP = 128
#: Sizes captured before the first batch, in addition to the largest.
_FIRST = (1, 8)
#: A size is captured after this many batches wanted it, because a capture takes about as long as that many
#: frames of a large batch.
ASKS = 8


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`; above the largest, `rows` rounded up to a multiple of 128."""
    return next((bucket for bucket in buckets if rows <= bucket), -(-rows // _STEP) * _STEP)


def buckets_for(slots: int) -> tuple[int, ...]:
    """The buckets of an engine with `slots` slots."""
    sizes = (*BUCKETS, *WIDE_BUCKETS)
    largest = bucket_of(slots, sizes)
    return (*(bucket for bucket in sizes if bucket < largest), largest)


class Buckets(Generic[T]):
    """Captured graphs by size. A batch can run in any size that holds it, and is fastest in the smallest one.

    So a few graphs are enough at first. A further size is captured when `ASKS` batches wanted it, or while
    the engine is idle.
    """

    def __init__(self, sizes: Sequence[int], unit: str = "rows") -> None:
        """`unit`: the unit of sizes, for the log."""
        self.sizes = tuple(sorted(sizes))
        #: Captured graphs by size.
        self.captured = dict[int, T]()
        self._unit = unit
        self._refused = set[int]()
        self._asked = Counter[int]()

    @property
    def first(self) -> list[int]:
        """The sizes to capture before the first batch: the largest, which holds every batch, and small ones."""
        return [self.sizes[-1], *(size for size in _FIRST if size in self.sizes[:-1])]

    @property
    def possible(self) -> tuple[int, ...]:
        """The sizes that were not refused for lack of memory; all sizes if all of them were."""
        return tuple(size for size in self.sizes if size not in self._refused) or self.sizes

    def of(self, size: int, capture: Callable[[int], T]) -> T:
        """The graph of a size, captured now if needed. Raises `torch.OutOfMemoryError`."""
        if size not in self.captured:
            self.captured[size] = capture(size)
        return self.captured[size]

    def attempt(self, size: int, capture: Callable[[int], T]) -> bool:
        """Captures a size that is not required. Returns False if there is no memory for it."""
        try:
            self.of(size, capture)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for a graph of %d %s; others are used instead", size, self._unit)
            self._refused.add(size)
            return False
        return True

    def prepare(self, capture: Callable[[int], T]) -> bool:
        """Captures one more size, for an idle engine. Returns False if none is left."""
        for size in self.sizes:
            if size not in self.captured and size not in self._refused:
                self.attempt(size, capture)
                return True
        return False

    def choose(self, rows: int, capture: Callable[[int], T]) -> int | None:
        """The size for a batch of `rows`, captured now if it is due. None: there is no memory for any size that
        holds it."""
        while (size := self._wanted(rows)) is not None and size not in self.captured:
            self.attempt(size, capture)
        return size

    def _wanted(self, rows: int) -> int | None:
        wanted = bucket_of(rows, self.sizes)
        held = next((size for size in self.sizes if rows <= size and size in self.captured), None)
        if wanted in self._refused or held == wanted:
            return held
        self._asked[wanted] += 1
        return wanted if held is None or self._asked[wanted] >= ASKS else held
