"""The running requests on the device: one row a slot, so that a frame can be captured and replayed; their keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.registry import to_device


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its codes; `predictor_*` for codebooks 1 and on. A temperature of 0 means greedy."""

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    predictor_temperature: float = 0.9
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0
    #: Codebook-0 draws that may not be the end.
    min_new_tokens: int = 2


@dataclass(frozen=True, slots=True)
class DrawFlags:
    """What a batch needs of the sampler, known on the host: the largest top_k, and shortcuts."""

    max_top_k: int
    any_top_p: bool
    all_greedy: bool

    @classmethod
    def of(cls, settings: Sequence[tuple[float, int, float]]) -> DrawFlags:
        """The flags of rows given as (temperature, top_k, top_p)."""
        drawn = [(top_k, top_p) for temperature, top_k, top_p in settings if temperature > 0]
        return cls(
            max_top_k=max((k for k, _ in drawn), default=0),
            any_top_p=any(p < 1 for _, p in drawn),
            all_greedy=not drawn,
        )


class DrawSettings:
    """The settings of one sampler, a row a slot: temperature, top_p float32; top_k int64; greedy bool; each [slots]."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.ones(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.greedy = torch.ones(slots, dtype=torch.bool, device=device)

    def write(self, slots: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        """Sets the rows `slots` [n]; the others are [n] each."""
        greedy = temperature == 0
        self.temperature[slots] = temperature.masked_fill(greedy, 1.0)
        self.top_k[slots] = top_k
        self.top_p[slots] = top_p
        self.greedy[slots] = greedy

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """temperature, top_k, top_p, greedy of these slots, in the order of the sampler's arguments."""
        return self.temperature[rows], self.top_k[rows], self.top_p[rows], self.greedy[rows]


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


class SlotState:
    """The device side of all slots. Slot `dead` is nobody's: batches are filled up with it, and it stays at position 0."""

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
    ) -> None:
        rows = slots + 1
        self.dead = slots
        self.slots = slots
        self.pad_text = pad_text
        #: [rows, hidden]: the embedding that the next frame starts from.
        self.inputs = torch.zeros(rows, hidden, dtype=dtype, device=device)
        #: [rows]: the position of that embedding; frames made so far; the seed of the noise.
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.frames = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        #: [rows, max_pages]; entries beyond a slot's pages are the scratch page.
        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int64, device=device)
        #: [rows, max_trailing + 1]: text id added after each frame; the last column is always the pad.
        self.trailing = torch.full((rows, max_trailing + 1), pad_text, dtype=torch.int64, device=device)
        #: [rows, vocab]: codebook-0 tokens drawn so far.
        self.seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device)
        self.penalty = torch.ones(rows, device=device)
        self.min_new_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.first = DrawSettings(rows, device)
        self.residual = DrawSettings(rows, device)

    def place(self, newcomers: Sequence[Placement]) -> None:
        """Writes requests into their slots, all in one go."""
        samplings = [one.sampling for one in newcomers]
        places = [(one.slot, one.position, one.seed, s.min_new_tokens) for one, s in zip(newcomers, samplings)]
        ranks = [(s.top_k, s.predictor_top_k) for s in samplings]
        whole = self._sent(torch.tensor([(*place, *rank) for place, rank in zip(places, ranks)], dtype=torch.int64))
        real = self._sent(
            torch.tensor(
                [(s.temperature, s.top_p, s.predictor_temperature, s.predictor_top_p, s.repetition_penalty) for s in samplings],
                dtype=torch.float32,
            )
        )
        slots, positions, seeds, least, top_k, predictor_top_k = whole.unbind(1)
        temperature, top_p, predictor_temperature, predictor_top_p, penalty = real.unbind(1)
        self.inputs[slots] = torch.stack([one.embedding for one in newcomers])
        self.positions[slots] = positions
        self.frames[slots] = torch.zeros_like(positions)
        self.seeds[slots] = seeds
        self.seen.index_fill_(0, slots, False)
        self.penalty[slots] = penalty
        self.min_new_tokens[slots] = least
        self.first.write(slots, temperature, top_k, top_p)
        self.residual.write(slots, predictor_temperature, predictor_top_k, predictor_top_p)
        self.trailing.index_fill_(0, slots, self.pad_text)
        self._scatter(self.trailing, [(one.slot, 0, one.trailing[: self.trailing.shape[1] - 1]) for one in newcomers])
        self.page_table.index_fill_(0, slots, 0)
        self.write_pages([(one.slot, one.pages, 0) for one in newcomers])

    def write_pages(self, grown: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Appends pages to slots' tables: (slot, pages, the entry that the first one goes to)."""
        self._scatter(self.page_table, [(slot, start, np.asarray(pages, np.int64)) for slot, pages, start in grown])

    def _scatter(self, table: Tensor, parts: Sequence[tuple[int, int, NDArray[np.int64]]]) -> None:
        """Writes values into rows of an int64 table: (row, first column, values)."""
        if not any(len(values) for _, _, values in parts):
            return
        width = table.shape[1]
        cells = [np.arange(row * width + column, row * width + column + len(values)) for row, column, values in parts]
        sent = self._sent(torch.from_numpy(np.stack((np.concatenate(cells), np.concatenate([values for _, _, values in parts])))))
        table.view(-1)[sent[0]] = sent[1]

    def _sent(self, made: Tensor) -> Tensor:
        return to_device(made, self.inputs.device)


#: Page 0 belongs to nobody: rows that are not in use write there.
SCRATCH_PAGE = 0


class PagedKV:
    """The key and value pages of all layers, and the list of free ones.

    `k`, `v`: [layers, pages, kv_heads, page_size, head_dim], zeros at first so that nothing read by mistake is NaN.
    """

    def __init__(
        self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
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
        """Zeroes pages that hold NaN, which would reach their next owner through masked positions (0 * NaN)."""
        if pages:
            self.k[:, pages] = 0
            self.v[:, pages] = 0
