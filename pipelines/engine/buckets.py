"""Which batch sizes have a graph, which of them a batch takes, and which is captured next. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

#: Sizes of the batch that a CUDA graph is captured for; others are filled up with the dead slot. Most defaults of slots are among them.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
#: Sizes beyond them, of engines that are asked for more slots, and of jobs by default where the memory holds them.
WIDE_BUCKETS = (640, 768, 896, 1024)
#: Beyond the largest: multiples of this.
_STEP = 128
#: How graphs prefill prompts: padded to shapes of whole pages, or one after the other in one row of positions. "auto": packed, but padded
#: where results are reproducible.
Prefill = Literal["auto", "padded", "packed"]
#: (prompts, pages of new positions, pages before them) that a padded prefill is captured for.
SHAPES = ((8, 1, 0), (16, 1, 0), (32, 1, 0), (16, 2, 0), (8, 4, 0), (4, 4, 4), (4, 4, 8), (4, 4, 12))
#: The same for one newcomer or a few, where a chunk's bits may depend on the shape.
SMALL_SHAPES = ((1, 1, 0), (2, 1, 0), (4, 1, 0), (1, 2, 0), (1, 4, 0))
#: Positions of all prompts together that a packed prefill is captured for.
PACKED_SIZES = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)
#: The same beyond them, of engines with more than 512 slots, whose prompts come in such numbers.
WIDE_PACKED_SIZES = (4096, 6144)
#: Of these one is captured before the first batch, beside the largest: a single request and a few have theirs at once.
_FIRST = (1, 8)
#: Turns in a larger bucket after which a capture pays: it takes the time of about so many frames of a large batch.
ASKS = 8


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`, or `rows` itself rounded up to a multiple of 128 beyond the largest."""
    return next((bucket for bucket in buckets if rows <= bucket), -(-rows // _STEP) * _STEP)


def buckets_for(slots: int) -> tuple[int, ...]:
    """The buckets of an engine with so many slots."""
    sizes = (*BUCKETS, *WIDE_BUCKETS)
    largest = bucket_of(slots, sizes)
    return (*(bucket for bucket in sizes if bucket < largest), largest)


def packs(prefill: Prefill, reproducible: bool) -> bool:
    """Whether graphs prefill prompts one after the other in one row."""
    return prefill == "packed" or (prefill == "auto" and not reproducible)


def packed_sizes(slots: int) -> tuple[int, ...]:
    """The positions that an engine with so many slots has packed prefills for."""
    return PACKED_SIZES if slots <= BUCKETS[-1] else (*PACKED_SIZES, *WIDE_PACKED_SIZES)


def prefill_graphs(prefill: Prefill) -> int:
    """The largest number of graphs that prefill prompts."""
    return len(PACKED_SIZES) + len(WIDE_PACKED_SIZES) if prefill == "packed" else len(SHAPES) + len(SMALL_SHAPES)


class Buckets:
    """Chooses among sizes of which some have a graph. A batch is correct in any size that holds it, and fastest in the smallest.

    So few graphs are enough to begin with. Another is captured when its size was asked for `ASKS` times, or when nothing else is to do.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sorted(sizes))
        self.captured: set[int] = set()
        self._refused: set[int] = set()
        self._asked: Counter[int] = Counter()

    @property
    def first(self) -> list[int]:
        """What to capture before the first batch: the largest, which holds every batch, and those of few rows."""
        return [self.sizes[-1], *(size for size in _FIRST if size in self.sizes[:-1])]

    @property
    def missing(self) -> int | None:
        """What to capture when nothing else is to do; None when there is nothing left."""
        return next((size for size in self.sizes if size not in self.captured | self._refused), None)

    @property
    def possible(self) -> tuple[int, ...]:
        """All sizes but those that cannot be captured; all where none can."""
        return tuple(size for size in self.sizes if size not in self._refused) or self.sizes

    def choose(self, rows: int) -> int | None:
        """The size that a batch of `rows` takes; where that has no graph, the caller captures it now. None: no size can serve it."""
        wanted = bucket_of(rows, self.sizes)
        held = next((size for size in self.sizes if rows <= size and size in self.captured), None)
        if wanted in self._refused or held == wanted:
            return held
        self._asked[wanted] += 1
        return wanted if held is None or self._asked[wanted] >= ASKS else held

    def refuse(self, size: int) -> None:
        """Takes a size as one that cannot be captured, for want of memory: larger ones serve it."""
        self._refused.add(size)
