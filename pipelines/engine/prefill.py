"""Prefill of prompts as CUDA graphs: packed one after another in a row of positions, or padded to whole pages
if results must be reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PackedPrompts
from kernels.registry import send, to_device
from pipelines.engine.buckets import BUCKETS, Buckets
from pipelines.engine.executor import PrefillRun
from pipelines.engine.state import PagedKV, SlotState

#: Captures work; returns a function that replays it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
#: Prefills the embeddings [total, hidden] of packed prompts.
PackedWork = Callable[[Tensor, PackedPrompts], None]
#: Prefills chunks that all start at the same position. Arguments: embeddings [runs, new, hidden], pages,
#: numbers of new positions, start position.
PaddedWork = Callable[[Tensor, Tensor, Tensor, int], None]

#: Numbers of positions of a row, all prompts together, that packed prefills are captured for.
PACKED_SIZES = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)
#: Further sizes for engines with more than 512 slots, which prefill more prompts at once.
WIDE_PACKED_SIZES = (4096, 6144)
#: A row has room for one chunk for each 8 positions, and for at least 8 chunks; further chunks go to the next
#: row.
_RUN_POSITIONS = 8
_MIN_RUNS = 8
#: Maximum unused positions of a row. If there were more, two rows are used: a second replay takes about as
#: long as this many positions.
_MAX_EMPTY = 256
#: Length of a row that holds most first prefills; in the longest row they would take three times as long.
_USUAL = 2048

#: Shapes that padded prefills are captured for: (number of prompts, pages of new positions, pages before
#: them).
SHAPES = ((8, 1, 0), (16, 2, 0), (8, 4, 0), (4, 4, 4), (4, 4, 8), (4, 4, 12))


class _Row(NamedTuple):
    """A captured prefill and its inputs: embeddings [positions, hidden]; slot, start and count of each chunk
    (slot and count if padded), int64 [2 or 3, runs]."""

    replay: Callable[[], None]
    embeddings: Tensor
    runs: Tensor


def packed_sizes(slots: int) -> tuple[int, ...]:
    """The sizes of packed prefills for an engine with `slots` slots."""
    return PACKED_SIZES if slots <= BUCKETS[-1] else (*PACKED_SIZES, *WIDE_PACKED_SIZES)


@dataclass(eq=False)
class PackedPrefills:
    """Prefills chunks of any lengths from any positions. Only positions after the last chunk of a row are
    padding.

    `Buckets` chooses when to capture a graph. A call can have one chunk of each slot.
    """

    _work: PackedWork
    _state: SlotState
    _capture: Capture
    #: Numbers of positions of rows that graphs are captured for.
    _sizes: Sequence[int]

    def __post_init__(self) -> None:
        self.rows: Buckets[_Row] = Buckets(self._sizes, "positions")

    def warm(self) -> None:
        """Captures the longest row that fits into memory, which can replace all others, and the usual one.

        Raises `torch.OutOfMemoryError` if none fits.
        """
        shortest, *longer = self.rows.sizes
        if not any(self.rows.attempt(size, self._row) for size in reversed(longer)):
            self.rows.of(shortest, self._row)
        if _USUAL in self.rows.possible:
            self.rows.attempt(_USUAL, self._row)

    def prepare(self) -> bool:
        """Captures one more row. Returns False if none is left."""
        return self.rows.prepare(self._row)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills runs. Returns, in order, those for which there is no memory for a graph."""
        left = list[PrefillRun]()
        for group in self._groups(runs):
            # If a group is left, later groups are left too, since they may hold later pieces of its last run.
            wanted = _shortest(self.rows.sizes, sum(len(run.embeddings) for run in group), len(group))
            size = None if left else self.rows.choose(wanted, self._row)
            if size is None:
                left += group
            else:
                self._replay(self.rows.captured[size], group)
        return left

    def _groups(self, runs: Sequence[PrefillRun]) -> list[list[PrefillRun]]:
        """Divides runs into groups that fill rows, in order; the rest of a run goes to the next row."""
        groups = list[list[PrefillRun]]()
        left = sum(len(run.embeddings) for run in runs)
        room = 0
        limit = 0
        for at, run in enumerate(runs):
            begin = 0
            while begin < len(run.embeddings):
                if not room or len(groups[-1]) == limit:
                    groups.append([])
                    room = self._row_for(left, len(runs) - at)
                    limit = _max_runs(room)
                piece = run.embeddings[begin : begin + room]
                groups[-1].append(PrefillRun(run.slot, run.start + begin, piece))
                begin += len(piece)
                room -= len(piece)
                left -= len(piece)
        return groups

    def _row_for(self, positions: int, runs: int) -> int:
        """The length of the next row: one that holds all positions and runs with little empty space, or the
        longest one that they fill, if it has room for the runs."""
        sizes = self.rows.possible
        held = _shortest(sizes, positions, runs)
        shorter = max((size for size in sizes if size <= positions), default=held)
        return held if held - positions <= _MAX_EMPTY or _max_runs(shorter) < runs else shorter

    @torch.inference_mode()
    def _row(self, size: int) -> _Row:
        inputs = self._state.inputs
        embeddings = inputs.new_zeros(size, inputs.shape[1])
        runs = torch.zeros(3, _max_runs(size), dtype=torch.int64, device=inputs.device)
        prompts = PackedPrompts(self._state.page_table, runs[0], runs[1], runs[2])
        return _Row(self._capture(lambda: self._work(embeddings, prompts)), embeddings, runs)

    def _replay(self, row: _Row, group: Sequence[PrefillRun]) -> None:
        sent = np.zeros(row.runs.shape, np.int64)
        for at, run in enumerate(group):
            sent[:, at] = run.slot, run.start, len(run.embeddings)
        send(sent, row.runs)
        torch.cat([run.embeddings for run in group], out=row.embeddings[: sent[2].sum()])
        row.replay()


def _max_runs(size: int) -> int:
    """Maximum chunks of a row of `size` positions."""
    return max(size // _RUN_POSITIONS, _MIN_RUNS)


def _shortest(sizes: Sequence[int], positions: int, runs: int) -> int:
    """The shortest row that holds these positions and chunks; the longest if none does."""
    return next((size for size in sizes if size >= positions and _max_runs(size) >= runs), sizes[-1])


@dataclass(eq=False)
class PaddedPrefills:
    """Prefills chunks that fit a shape. Chunks of one size and position always have the same shape, so that
    their bits do not depend on other chunks."""

    _work: PaddedWork
    _state: SlotState
    _kv: PagedKV
    _capture: Capture

    def __post_init__(self) -> None:
        self._shapes = [shape for shape in SHAPES if shape[1] + shape[2] <= self._state.page_table.shape[1]]
        #: Captured rows by the index of their shape.
        self.rows: Buckets[_Row] = Buckets(range(len(self._shapes)), "(the index of a shape)")

    def warm(self) -> None:
        """Captures the graph of chunks that fit a page, which most prompts need."""
        self.rows.of(0, self._row)

    def prepare(self) -> bool:
        """Captures one more graph. Returns False if none is left."""
        return self.rows.prepare(self._row)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills runs that fit a graph; returns the others."""
        left = list[PrefillRun]()
        groups = dict[int, list[PrefillRun]]()
        for run in runs:
            before, rest = divmod(run.start, self._kv.page_size)
            used = self._kv.pages_for(len(run.embeddings))
            fits = (used <= new and first == before and not rest for _, new, first in self._shapes)
            if (shape := next((at for at, one in enumerate(fits) if one), None)) is None:
                left.append(run)
            else:
                groups.setdefault(shape, []).append(run)
        for shape, group in groups.items():
            row = self.rows.of(shape, self._row)
            together = self._shapes[shape][0]
            for start in range(0, len(group), together):
                self._replay(row, group[start : start + together])
        return left

    def _replay(self, row: _Row, runs: Sequence[PrefillRun]) -> None:
        sent = np.zeros(row.runs.shape, np.int64)
        sent[0] = self._state.dead
        for at, run in enumerate(runs):
            sent[:, at] = run.slot, len(run.embeddings)
        send(sent, row.runs)
        new = len(row.embeddings) // sent.shape[1]
        cells = np.concatenate([np.arange(at * new, at * new + count) for at, count in enumerate(sent[1])])
        targets = to_device(cells, row.embeddings.device)
        row.embeddings.index_copy_(0, targets, torch.cat([run.embeddings for run in runs]))
        row.replay()

    @torch.inference_mode()
    def _row(self, at: int) -> _Row:
        runs, pages, before = self._shapes[at]
        inputs = self._state.inputs
        new = pages * self._kv.page_size
        hidden = inputs.shape[1]
        start = before * self._kv.page_size
        embeddings = inputs.new_zeros(runs * new, hidden)
        owners = torch.tensor([[self._state.dead] * runs, [0] * runs], device=inputs.device)
        table = self._state.page_table[:, : before + pages]

        def work() -> None:
            self._work(embeddings.view(runs, new, hidden), table.index_select(0, owners[0]), owners[1], start)

        return _Row(self._capture(work), embeddings, owners)
