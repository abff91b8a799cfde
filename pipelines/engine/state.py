"""The running requests on the device: one row a slot, so that a frame can be captured and replayed; their
keys and values in pages."""

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
    """How one request draws its codes; `residual_*` for codebooks 1 and on. A temperature of 0 means
    greedy."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    residual_temperature: float = 0.9
    residual_top_k: int = 50
    residual_top_p: float = 1.0
    #: Codebook-0 draws that may not be the end.
    min_new_tokens: int = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """A request that goes into a slot; `embedding` [hidden] at `position` is the last of its prompt."""

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
    """The device side of all slots. Slot `dead` is nobody's: batches are filled up with it, and it stays
    at position 0."""

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
        """`vocab`: codes that the head draws; `max_trailing`: text ids that follow a prompt, `pad_text`
        the one after them.

        `window`: frames whose codes are remembered (`kernels.frame.DrawRules`).
        """
        rows = slots + 1
        self.dead = slots
        self.slots = slots
        self.pad_text = pad_text
        #: [rows, hidden]: the embedding that the next frame starts from.
        self.inputs = torch.zeros(rows, hidden, dtype=dtype, device=device)
        #: [rows, vocab]: codebook-0 tokens drawn so far.
        self.seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        #: [rows, window]: the codes of the last frames, at frame % window; -1 where there is none.
        self.recent = torch.full((rows, window), -1, dtype=torch.int64, device=device)
        # All values of one type lie in one tensor, so that one launch writes what a newcomer brings.
        self._whole, whole = _blocks(
            [(rows, max_pages), (rows, max_trailing + 1), *[(rows,)] * 6], torch.int64, device
        )
        self._real, real = _blocks([(rows,)] * 5, torch.float32, device)
        self._truth, truth = _blocks([(rows,)] * 2, torch.bool, device)
        #: [rows, max_pages]; entries beyond a slot's pages are the scratch page.
        #: [rows, max_trailing + 1]: text id added after each frame; the last column is always the pad.
        self.page_table, self.trailing = whole[:2]
        #: [rows]: the position of the next input; frames made so far; the seed of the noise; codebook-0 draws
        #: that may not be the end.
        self.positions, self.frames, self.seeds, self.min_new_tokens = whole[2:6]
        self.penalty = real[4]
        self.first = DrawTensors(real[0], whole[6], real[1], truth[0])
        self.residual = DrawTensors(real[2], whole[7], real[3], truth[1])
        self.trailing.fill_(pad_text)
        self._real.fill_(1)
        self._truth.fill_(True)
        #: Where the [rows] of each type begin, in the order in which `place` writes them.
        self._at = [np.array([block.storage_offset() for block in kind]) for kind in (whole[2:], real, truth)]
        #: By slot: entries of its page table, and of its trailing text, that an owner wrote.
        self._used = [[0, 0] for _ in range(rows)]
        self._tensors = StateTensors(
            **{field.name: getattr(self, field.name) for field in fields(StateTensors)}
        )

    def tensors(self) -> StateTensors:
        """The slots as a frame takes them: the same memory."""
        return self._tensors

    def place(self, newcomers: Sequence[Placement]) -> None:
        """Writes requests into their slots: one transfer, and one launch for each type of values."""
        cells: list[NDArray[np.int64]] = []
        values: list[NDArray[np.int64]] = []
        for one in newcomers:
            drawn, trailing = one.sampling, one.trailing[: self.trailing.shape[1] - 1]
            numbers = (one.position, 0, one.seed, drawn.min_new_tokens, drawn.top_k, drawn.residual_top_k)
            for at, (table, entries, rest) in enumerate(
                (
                    (self.page_table, np.asarray(one.pages, np.int64), 0),
                    (self.trailing, trailing, self.pad_text),
                )
            ):
                # What an earlier owner wrote beyond them is put back.
                empty = max(self._used[one.slot][at] - len(entries), 0)
                cells.append(_cells(table, one.slot, 0, len(entries) + empty))
                values += [entries, np.full(empty, rest, np.int64)]
                self._used[one.slot][at] = len(entries)
            cells.append(self._at[0] + one.slot)
            values.append(np.array(numbers, np.int64))
        slots = np.array([one.slot for one in newcomers], np.int64)
        reals = np.array([_reals(one.sampling) for one in newcomers], np.float32)
        greedy = np.array(
            [(one.sampling.temperature == 0, one.sampling.residual_temperature == 0) for one in newcomers]
        )
        whole = np.concatenate(cells), np.concatenate(values)
        places = [
            *whole,
            (self._at[1] + slots[:, None]).ravel(),
            (self._at[2] + slots[:, None]).ravel(),
            slots,
        ]
        packed = [
            np.concatenate(places).view(np.uint8),
            reals.ravel().view(np.uint8),
            greedy.ravel().view(np.uint8),
        ]
        sent = self._sent(np.concatenate(packed))
        wholes, real, truth = sent.split([len(part) for part in packed])
        at, what, at_real, at_truth, rows = wholes.view(torch.int64).split([len(part) for part in places])
        self._whole[at] = what
        self._real[at_real] = real.view(torch.float32)
        self._truth[at_truth] = truth.view(torch.bool)
        embeddings = [one.embedding for one in newcomers]
        self.inputs.index_copy_(
            0, rows, torch.stack(embeddings) if len(embeddings) > 1 else embeddings[0][None]
        )
        self.seen.index_fill_(0, rows, False)
        if self.recent.shape[1]:
            self.recent.index_fill_(0, rows, -1)
        if any(len(one.drawn) for one in newcomers):
            known = np.concatenate(
                [one.slot * self.seen.shape[1] + np.asarray(one.drawn, np.int64) for one in newcomers]
            )
            self.seen.view(-1)[self._sent(known)] = True

    def _sent(self, made: NDArray[np.int64] | NDArray[np.uint8]) -> Tensor:
        return to_device(torch.from_numpy(made), self.inputs.device)

    def write_pages(self, grown: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Appends pages to slots' tables: (slot, pages, the entry that the first one goes to)."""
        for slot, pages, start in grown:
            self._used[slot][0] = start + len(pages)
        cells = np.concatenate(
            [_cells(self.page_table, slot, start, len(pages)) for slot, pages, start in grown]
        )
        sent = self._sent(
            np.stack((cells, np.concatenate([np.asarray(pages, np.int64) for _, pages, _ in grown])))
        )
        self._whole[sent[0]] = sent[1]

    def write_trailing(self, slot: int, ids: NDArray[np.int64], start: int) -> None:
        """Adds ids to a slot's trailing text, the first one at entry `start`: one transfer."""
        ids = ids[: max(self.trailing.shape[1] - 1 - start, 0)]
        if len(ids):
            self._used[slot][1] = start + len(ids)
            sent = self._sent(np.stack((_cells(self.trailing, slot, start, len(ids)), ids)))
            self._whole[sent[0]] = sent[1]


#: Elements between the beginnings of blocks are a multiple of this: kernels load several at once.
_ALIGNED = 64


def _blocks(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor of zeros, and parts of it in these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
    flat = torch.zeros(starts[-1], dtype=dtype, device=device)
    return flat, [flat[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, shapes)]


def _cells(table: Tensor, row: int, column: int, count: int) -> NDArray[np.int64]:
    """Where so many entries of a row lie in the flat tensor that the table is a part of."""
    start = table.storage_offset() + row * table.shape[1] + column
    return np.arange(start, start + count)


def _reals(drawn: SamplingParams) -> tuple[float, ...]:
    """In the order of a slot's blocks; rows that are greedy are drawn as with a temperature of 1."""
    return (
        drawn.temperature or 1.0,
        drawn.top_p,
        drawn.residual_temperature or 1.0,
        drawn.residual_top_p,
        drawn.repetition_penalty,
    )


#: Page 0 belongs to nobody: rows that are not in use write there.
SCRATCH_PAGE = 0
#: Positions of a page at most.
LARGEST_PAGE = 1024


class PagedKV:
    """The key and value pages of all layers, and the list of free ones.

    `k`, `v`: [layers, pages, kv_heads, page_size, head_dim], zeros at first so that nothing read by
    mistake is NaN.
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
        self._free = list(range(pages, SCRATCH_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-positions // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """That many free pages, or None when there are fewer."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def scrub(self, pages: list[int]) -> None:
        """Zeroes pages that hold NaN, which would reach their next owner through masked positions (0 *
        NaN)."""
        if pages:
            self.k[:, pages] = 0
            self.v[:, pages] = 0
