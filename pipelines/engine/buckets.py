"""Which batch sizes have a graph, which of them a batch takes, and which is captured next."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Sizes of the batch that a CUDA graph is captured for; others are filled up with the dead slot. Most
#: defaults of slots are among them.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
#: Sizes beyond them, of engines that are asked for more slots, and of jobs by default where the memory holds
#: them.
WIDE_BUCKETS = (640, 768, 896, 1024)
#: Beyond the largest: multiples of this.
_STEP = 128
#: Of these one is captured before the first batch, beside the largest: a single request and a few have theirs
#: at once.
_FIRST = (1, 8)
#: Turns in a larger bucket after which a capture pays: it takes the time of about so many frames of a large
#: batch.
ASKS = 8


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`, or `rows` itself rounded up to a multiple of 128 beyond the
    largest."""
    return next((bucket for bucket in buckets if rows <= bucket), -(-rows // _STEP) * _STEP)


def buckets_for(slots: int) -> tuple[int, ...]:
    """The buckets of an engine with so many slots."""
    sizes = (*BUCKETS, *WIDE_BUCKETS)
    largest = bucket_of(slots, sizes)
    return (*(bucket for bucket in sizes if bucket < largest), largest)


class Buckets(Generic[T]):
    """Keeps what is captured by size. A batch is correct in any size that holds it, and fastest in the
    smallest.

    So few graphs are enough to begin with. Another is captured when its size was asked for `ASKS` times,
    or when nothing else is to do.
    """

    def __init__(self, sizes: Sequence[int], unit: str = "rows") -> None:
        """`unit`: of a size, for the log."""
        self.sizes = tuple(sorted(sizes))
        #: What was captured, by its size.
        self.captured: dict[int, T] = {}
        self._unit = unit
        self._refused: set[int] = set()
        self._asked: Counter[int] = Counter()

    @property
    def first(self) -> list[int]:
        """What to capture before the first batch: the largest, which holds every batch, and those of few
        rows."""
        return [self.sizes[-1], *(size for size in _FIRST if size in self.sizes[:-1])]

    @property
    def possible(self) -> tuple[int, ...]:
        """All sizes but those that cannot be captured; all where none can."""
        return tuple(size for size in self.sizes if size not in self._refused) or self.sizes

    def of(self, size: int, capture: Callable[[int], T]) -> T:
        """What is captured for a size, now where it is not there. Raises what a lack of memory raises."""
        if size not in self.captured:
            self.captured[size] = capture(size)
        return self.captured[size]

    def attempt(self, size: int, capture: Callable[[int], T]) -> bool:
        """Captures a size that others, or none, can stand in for; whether there was memory for it."""
        try:
            self.of(size, capture)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for a graph of %d %s; others take its place", size, self._unit)
            self._refused.add(size)
            return False
        return True

    def prepare(self, capture: Callable[[int], T]) -> bool:
        """Captures one more size, as far as there is memory, when nothing else is to do; False when there
        is nothing left."""
        missing = next(
            (size for size in self.sizes if size not in self.captured and size not in self._refused), None
        )
        if missing is not None:
            self.attempt(missing, capture)
        return missing is not None

    def choose(self, rows: int, capture: Callable[[int], T]) -> int | None:
        """The size that a batch of `rows` takes, captured where that is due now. None: there is no memory
        for any that holds it."""
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
