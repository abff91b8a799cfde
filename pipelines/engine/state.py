"""The device's state of running requests: one row for each slot, and keys and values in pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frame import DrawTensors, StateTensors
from kernels.registry import to_device


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; `residual_*` are for codebooks from 1 on. A temperature of 0 means
    greedy."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    residual_temperature: float = 0.9
    residual_top_k: int = 50
    residual_top_p: float = 1.0
    #: Number of codebook-0 draws before the end can be drawn.
    min_new_tokens: int = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """The values that a new request writes into its slot. `position` is the last position of its prompt, and
    `embedding` [hidden] the embedding there."""

    slot: int
    pages: Sequence[int]
    seed: int
    sampling: SamplingParams
    trailing: NDArray[np.int64]
    embedding: Tensor
    position: int
    #: Codes that count as drawn already, for the repetition penalty.
    drawn: Sequence[int] = ()


class SlotState:
    """The device's state of all slots. Slot `dead` is unused and pads batches; it stays at position 0."""

    def __init__(
        self,
        slots: int,
        hidden: int,
        vocab: int,
        max_pages: int,
        max_trailing: int,
        pad_text: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int = 0,
    ) -> None:
        """`vocab`: number of codes of the head; `max_trailing`: maximum text ids after a prompt; `pad_text`:
        the id that is used after them.

        `window`: number of frames whose codes are kept (`kernels.frame.DrawRules`).
        """
        rows = slots + 1
        self.dead = slots
        self.slots = slots
        self.pad_text = pad_text
        #: [rows, hidden]: the input embedding of the next frame.
        self.inputs = torch.zeros(rows, hidden, dtype=dtype, device=device)
        #: [rows, vocab]: codebook-0 tokens drawn so far.
        self.seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        #: [rows, window]: the codes of the last frames, at frame % window; -1 if there is none.
        self.recent = torch.full((rows, window), -1, dtype=torch.int64, device=device)
        # All values of one type are in one tensor, so that one launch writes a new request's values.
        self._integers, integers = _blocks(
            [(rows, max_pages), (rows, max_trailing + 1), *[(rows,)] * 6], torch.int64, device
        )
        self._floats, floats = _blocks([(rows,)] * 5, torch.float32, device)
        self._flags, flags = _blocks([(rows,)] * 2, torch.bool, device)
        #: [rows, max_pages]; entries beyond a slot's pages are the scratch page.
        #: [rows, max_trailing + 1]: text id added after each frame; the last column is always the pad.
        self.page_table, self.trailing = integers[:2]
        #: [rows]: position of the next input; number of frames made; seed of the noise; number of draws before
        #: the end can be drawn.
        self.positions, self.frames, self.seeds, self.min_new_tokens = integers[2:6]
        self.penalty = floats[4]
        self.first = DrawTensors(floats[0], integers[6], floats[1], flags[0])
        self.residual = DrawTensors(floats[2], integers[7], floats[3], flags[1])
        self.trailing.fill_(pad_text)
        self._floats.fill_(1)
        self._flags.fill_(True)
        #: For each type: the offsets of its [rows] tensors, in the order in which `place` writes them.
        self._offsets = [
            np.array([block.storage_offset() for block in kind]) for kind in (integers[2:], floats, flags)
        ]
        #: For each slot: numbers of written entries of its page table and of its trailing text.
        self._used = [[0, 0] for _ in range(rows)]
        #: The state as the tensors that a frame takes; they share its memory.
        self.tensors = StateTensors(
            **{field.name: getattr(self, field.name) for field in fields(StateTensors)}
        )

    def place(self, placements: Sequence[Placement]) -> None:
        """Writes requests into their slots with one transfer, and one launch for each type of values."""
        cells: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int64]] = []
        settings: list[tuple[float, ...]] = []
        for one in placements:
            sampling, trailing = one.sampling, one.trailing[: self.trailing.shape[1] - 1]
            tables = (
                (self.page_table, np.asarray(one.pages, np.int64), 0),
                (self.trailing, trailing, self.pad_text),
            )
            for at, (table, entries, rest) in enumerate(tables):
                # An earlier request may have written further entries; they are reset.
                empty = max(self._used[one.slot][at] - len(entries), 0)
                cells.append(_cells(table, one.slot, 0, len(entries) + empty))
                values += [entries, np.full(empty, rest, np.int64)]
                self._used[one.slot][at] = len(entries)
            cells.append(self._offsets[0] + one.slot)
            numbers = (
                one.position,
                0,
                one.seed,
                sampling.min_new_tokens,
                sampling.top_k,
                sampling.residual_top_k,
            )
            values.append(np.array(numbers, np.int64))
            # In the order of a slot's blocks; greedy rows have a temperature of 1.
            settings.append(
                (
                    sampling.temperature or 1.0,
                    sampling.top_p,
                    sampling.residual_temperature or 1.0,
                    sampling.residual_top_p,
                    sampling.repetition_penalty,
                )
            )
        slots = np.array([one.slot for one in placements], np.int64)
        greedy = np.array(
            [(one.sampling.temperature == 0, one.sampling.residual_temperature == 0) for one in placements]
        )
        places = [
            np.concatenate(cells),
            np.concatenate(values),
            (self._offsets[1] + slots[:, None]).ravel(),
            (self._offsets[2] + slots[:, None]).ravel(),
            slots,
        ]
        packed = [
            np.concatenate(places).view(np.uint8),
            np.array(settings, np.float32).ravel().view(np.uint8),
            greedy.ravel().view(np.uint8),
        ]
        sent = self._sent(np.concatenate(packed))
        integers, floats, flags = sent.split([len(part) for part in packed])
        at, what, at_floats, at_flags, rows = integers.view(torch.int64).split([len(part) for part in places])
        self._integers[at] = what
        self._floats[at_floats] = floats.view(torch.float32)
        self._flags[at_flags] = flags.view(torch.bool)
        embeddings = [one.embedding for one in placements]
        self.inputs.index_copy_(
            0, rows, torch.stack(embeddings) if len(embeddings) > 1 else embeddings[0][None]
        )
        self.seen.index_fill_(0, rows, False)
        if self.recent.shape[1]:
            self.recent.index_fill_(0, rows, -1)
        if any(len(one.drawn) for one in placements):
            known = np.concatenate(
                [one.slot * self.seen.shape[1] + np.asarray(one.drawn, np.int64) for one in placements]
            )
            self.seen.view(-1)[self._sent(known)] = True

    def _sent(self, made: NDArray[np.int64] | NDArray[np.uint8]) -> Tensor:
        return to_device(torch.from_numpy(made), self.inputs.device)

    def write_pages(self, grown: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Appends pages to slots' tables: (slot, pages, entry of the first page)."""
        for slot, pages, start in grown:
            self._used[slot][0] = start + len(pages)
        cells = np.concatenate(
            [_cells(self.page_table, slot, start, len(pages)) for slot, pages, start in grown]
        )
        sent = self._sent(
            np.stack((cells, np.concatenate([np.asarray(pages, np.int64) for _, pages, _ in grown])))
        )
        self._integers[sent[0]] = sent[1]

    def write_trailing(self, slot: int, ids: NDArray[np.int64], start: int) -> None:
        """Adds ids to a slot's trailing text, the first one at entry `start`, in one transfer."""
        ids = ids[: max(self.trailing.shape[1] - 1 - start, 0)]
        if len(ids):
            self._used[slot][1] = start + len(ids)
            sent = self._sent(np.stack((_cells(self.trailing, slot, start, len(ids)), ids)))
            self._integers[sent[0]] = sent[1]


#: Offsets of blocks are multiples of this number of elements, since kernels load several elements at once.
_ALIGNED = 64


def _blocks(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """A flat tensor of zeros, and views of its parts in these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
    flat = torch.zeros(starts[-1], dtype=dtype, device=device)
    return flat, [flat[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes)]


def _cells(table: Tensor, row: int, column: int, count: int) -> NDArray[np.int64]:
    """Indices of a row's entries in the flat tensor that holds the table."""
    start = table.storage_offset() + row * table.shape[1] + column
    return np.arange(start, start + count)


#: Page 0 is never allocated; unused rows write to it.
SCRATCH_PAGE = 0
#: Maximum positions of a page.
LARGEST_PAGE = 1024


class PagedKV:
    """The key and value pages of all layers, and the numbers of the `free` pages.

    `k`, `v`: [layers, pages, kv_heads, page_size, head_dim], initialized with zeros so that masked positions
    are never NaN.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, pages + 1, kv_heads, page_size, head_dim)
        self.k: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.v: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.page_size = page_size
        self.pages = pages
        self.free = list(range(pages, SCRATCH_PAGE, -1))

    def pages_for(self, positions: int) -> int:
        """The number of pages that hold this many positions."""
        return -(-positions // self.page_size)

    def scrub(self, pages: list[int]) -> None:
        """Zeroes pages that hold NaN, which would affect their next owner through masked positions (0 * NaN)."""
        for cache in (self.k, self.v):
            cache[:, pages] = 0
