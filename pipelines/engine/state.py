"""The device's state of running requests: one row for each slot, and keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.frame import DrawTensors, StackTensors, StateTensors
from kernels.registry import to_device
from pipelines.request import IntArray


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


class Placement(NamedTuple):
    """The values that a new request writes into its slot. `position` is the last position of its prompt, and
    `embedding` [hidden] the embedding there."""

    slot: int
    pages: Sequence[int]
    seed: int
    sampling: SamplingParams
    trailing: IntArray
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
        # Values of one type are in one tensor, so that one launch writes those of new requests.
        edge = _aligned(rows * max_pages)
        self._tables = torch.zeros(edge + rows * (max_trailing + 1), dtype=torch.int64, device=device)
        #: [rows, max_pages]; entries beyond a slot's pages are the scratch page.
        self.page_table = self._tables[: rows * max_pages].view(rows, max_pages)
        #: [rows, max_trailing + 1]: text id added after each frame; the last column is always the pad.
        self.trailing = self._tables[edge:].view(rows, -1)
        self.trailing.fill_(pad_text)
        #: [values, rows or more], in the order in which `place` writes them.
        self._integers, self._floats, self._flags = (
            torch.full((values, _aligned(rows)), start, dtype=kind, device=device)
            for values, start, kind in ((6, 0, torch.int64), (5, 1, torch.float32), (2, True, torch.bool))
        )
        #: [rows]: position of the next input; number of frames made; seed of the noise; number of draws before
        #: the end can be drawn.
        self.positions, self.frames, self.seeds, self.min_new_tokens, *top_k = self._integers[:, :rows]
        *floats, self.penalty = self._floats[:, :rows]
        greedy = self._flags[:, :rows]
        self.first = DrawTensors(floats[0], top_k[0], floats[1], greedy[0])
        self.residual = DrawTensors(floats[2], top_k[1], floats[3], greedy[1])
        #: For each slot: numbers of written entries of its page table and of its trailing text.
        self._used = [[0, 0] for _ in range(rows)]
        #: The state as the tensors that a frame takes; they share its memory.
        self.tensors = StateTensors(**{name: getattr(self, name) for name in StateTensors._fields})

    def place(self, placements: Sequence[Placement]) -> None:
        """Writes requests into their slots with one transfer, and a launch for each type of values."""
        cells = list[IntArray]()
        values = list[IntArray]()
        integers = list[tuple[int, ...]]()
        floats = list[tuple[float, ...]]()
        flags = list[tuple[bool, bool]]()
        for one in placements:
            sampling = one.sampling
            tables = (
                (self.page_table, np.asarray(one.pages, np.int64), 0),
                (self.trailing, one.trailing[: self.trailing.shape[1] - 1], self.pad_text),
            )
            for at, (table, entries, rest) in enumerate(tables):
                # An earlier request may have written further entries; they are reset.
                empty = max(self._used[one.slot][at] - len(entries), 0)
                cells.append(_cells(table, one.slot, 0, len(entries) + empty))
                values += [entries, np.full(empty, rest, np.int64)]
                self._used[one.slot][at] = len(entries)
            integers.append(
                (one.position, 0, one.seed, sampling.min_new_tokens, sampling.top_k, sampling.residual_top_k)
            )
            # Greedy rows have a temperature of 1.
            floats.append(
                (
                    sampling.temperature or 1.0,
                    sampling.top_p,
                    sampling.residual_temperature or 1.0,
                    sampling.residual_top_p,
                    sampling.repetition_penalty,
                )
            )
            flags.append((sampling.temperature == 0, sampling.residual_temperature == 0))
        slots = np.array([one.slot for one in placements], np.int64)
        parts = (
            np.concatenate(cells), np.concatenate(values), slots,
            np.array(integers, np.int64).T, np.array(floats, np.float32).T, np.array(flags).T,
        )  # fmt: skip
        device = self.inputs.device
        sent = to_device(np.frombuffer(bytearray().join(part.tobytes() for part in parts), np.uint8), device)
        cell, value, rows, *states = sent.split([part.nbytes for part in parts])
        rows = rows.view(torch.int64)
        self._tables[cell.view(torch.int64)] = value.view(torch.int64)
        for target, new in zip((self._integers, self._floats, self._flags), states, strict=True):
            target[:, rows] = new.view(target.dtype).view(-1, len(placements))
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
            self.seen.view(-1)[to_device(known, device)] = True

    def write_pages(self, grown: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Appends pages to slots' tables: (slot, pages, entry of the first page)."""
        for slot, pages, start in grown:
            self._used[slot][0] = start + len(pages)
        cells = [_cells(self.page_table, slot, start, len(pages)) for slot, pages, start in grown]
        values = [np.asarray(pages, np.int64) for _, pages, _ in grown]
        sent = to_device(np.stack((np.concatenate(cells), np.concatenate(values))), self.inputs.device)
        self._tables[sent[0]] = sent[1]

    def write_trailing(self, slot: int, ids: IntArray, start: int) -> None:
        """Adds ids to a slot's trailing text, the first one at entry `start`, in one transfer."""
        ids = ids[: max(self.trailing.shape[1] - 1 - start, 0)]
        if len(ids):
            self._used[slot][1] = start + len(ids)
            cells = _cells(self.trailing, slot, start, len(ids))
            sent = to_device(np.stack((cells, ids)), self.inputs.device)
            self._tables[sent[0]] = sent[1]


#: Offsets of tensors in another one are multiples of this number of elements, since kernels load several elements at
#: once.
_ALIGNED = 64


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def _cells(table: Tensor, row: int, column: int, count: int) -> IntArray:
    """Indices of a row's entries in the flat tensor that holds the table."""
    start = table.storage_offset() + row * table.shape[1] + column
    return np.arange(start, start + count)


#: Page 0 is never allocated; unused rows write to it.
SCRATCH_PAGE = 0
#: Maximum positions of a page.
LARGEST_PAGE = 1024


class PagedKV:
    """The key and value pages of all layers of a stack, and the numbers of the `free` pages.

    `k`, `v`: [layers, pages, kv_heads, page_size, head_dim], initialized with zeros so that masked positions
    are never NaN.
    """

    def __init__(self, stack: StackTensors, pages: int, page_size: int) -> None:
        shape = (len(stack.layers), pages + 1, stack.kv_heads, page_size, stack.head_dim)
        self.k, self.v = (stack.norm.new_zeros(shape) for _ in range(2))
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
