"""Prefill of prompts as CUDA graphs: one after the other in a row of positions, or padded to whole pages
where results are reproducible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PackedPrompts
from kernels.registry import send, to_device
from pipelines.engine.buckets import BUCKETS, Buckets
from pipelines.engine.executor import PrefillRun
from pipelines.engine.state import PagedKV, SlotState

#: What replays a piece of work.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
#: Prefills embeddings [total, hidden] of these prompts.
PackedWork = Callable[[Tensor, PackedPrompts], None]
#: Prefills embeddings [runs, new, hidden] of chunks from one position on: embeddings, pages, counts of new
#: positions, the position.
PaddedWork = Callable[[Tensor, Tensor, Tensor, int], None]

#: Positions of all prompts together that a packed prefill is captured for.
PACKED_SIZES = (64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)
#: The same beyond them, of engines with more than 512 slots, whose prompts come in such numbers.
WIDE_PACKED_SIZES = (4096, 6144)
#: Positions for each chunk that a row has room for, and the fewest chunks that any row has room for: the
#: others follow in the next row.
_RUN_POSITIONS, _LEAST_RUNS = 8, 8
#: Positions that a row may leave empty rather than be two rows: another replay takes about as long as these.
_LEFT_EMPTY = 256
#: A row that most first prefills fit: in the longest one they would take three times as long.
_USUAL = 2048

#: (prompts, pages of new positions, pages before them) that a padded prefill is captured for.
SHAPES = ((8, 1, 0), (16, 2, 0), (8, 4, 0), (4, 4, 4), (4, 4, 8), (4, 4, 12))


@dataclass(frozen=True, slots=True)
class _Row:
    """A captured prefill and its inputs: embeddings [positions, hidden]; what it must know of each of its
    chunks, int64 [2 or 3, runs]."""

    replay: Callable[[], None]
    embeddings: Tensor
    runs: Tensor


def packed_sizes(slots: int) -> tuple[int, ...]:
    """The positions that an engine with so many slots has packed prefills for."""
    return PACKED_SIZES if slots <= BUCKETS[-1] else (*PACKED_SIZES, *WIDE_PACKED_SIZES)


class PackedPrefills:
    """Prefills chunks of any lengths, from any position on. Only what is behind the last chunk of a row is
    padding.

    A graph is captured when `Buckets` has it due. Chunks of one call may be of any slots, but not two of
    one slot.
    """

    def __init__(
        self, work: PackedWork, state: SlotState, capture: Capture, sizes: Sequence[int] = PACKED_SIZES
    ) -> None:
        """`sizes`: positions of the rows that a graph is captured for."""
        self._work, self._state, self._capture = work, state, capture
        self._rows: Buckets[_Row] = Buckets(sizes, "positions")

    def warm(self) -> None:
        """Captures the longest row that there is memory for, which can take all others' place, and that of
        most prefills.

        Raises `torch.OutOfMemoryError` where there is memory for none.
        """
        shortest, *longer = self._rows.sizes
        if not any(self._rows.attempt(size, self._row) for size in reversed(longer)):
            self._rows.of(shortest, self._row)
        if _USUAL in self._rows.possible:
            self._rows.attempt(_USUAL, self._row)

    def prepare(self) -> bool:
        """Captures one more row; False when there is nothing left."""
        return self._rows.prepare(self._row)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills all runs; returns those that there is no memory for a graph for, in order."""
        left: list[PrefillRun] = []
        for group in self._groups(runs):
            # A piece of a long run never comes before an earlier piece that is left.
            size = None if left else self._rows.choose(self._wanted(group), self._row)
            if size is None:
                left += group
            else:
                self._replay(self._rows.captured[size], group)
        return left

    def _groups(self, runs: Sequence[PrefillRun]) -> list[list[PrefillRun]]:
        """Runs in groups that fill rows, in order; what a row has no room for comes in the next one."""
        groups: list[list[PrefillRun]] = []
        left, room, most = sum(len(run.embeddings) for run in runs), 0, 0
        for at, run in enumerate(runs):
            begin = 0
            while begin < len(run.embeddings):
                if not room or len(groups[-1]) == most:
                    groups.append([])
                    room = self._row_for(left, len(runs) - at)
                    most = _most_runs(room)
                piece = run.embeddings[begin : begin + room]
                groups[-1].append(PrefillRun(run.slot, run.start + begin, piece))
                begin, room, left = begin + len(piece), room - len(piece), left - len(piece)
        return groups

    def _row_for(self, positions: int, runs: int) -> int:
        """The length of the next row for so many positions of so many runs: one that holds them and leaves
        little empty, or the longest that they fill, if it has room for so many runs."""
        sizes = self._rows.possible
        held = next((size for size in sizes if size >= positions and _most_runs(size) >= runs), sizes[-1])
        shorter = max((size for size in sizes if size <= positions), default=held)
        return held if held - positions <= _LEFT_EMPTY or _most_runs(shorter) < runs else shorter

    def _wanted(self, group: Sequence[PrefillRun]) -> int:
        """The shortest row that holds a group."""
        positions = sum(len(run.embeddings) for run in group)
        return next(size for size in self._rows.sizes if size >= positions and _most_runs(size) >= len(group))

    @torch.inference_mode()
    def _row(self, size: int) -> _Row:
        inputs = self._state.inputs
        embeddings = inputs.new_zeros(size, inputs.shape[1])
        runs = torch.zeros(3, _most_runs(size), dtype=torch.int64, device=inputs.device)
        prompts = PackedPrompts(self._state.page_table, runs[0], runs[1], runs[2])
        return _Row(self._capture(lambda: self._work(embeddings, prompts)), embeddings, runs)

    def _replay(self, row: _Row, group: Sequence[PrefillRun]) -> None:
        told = np.zeros(row.runs.shape, np.int64)
        for at, run in enumerate(group):
            told[:, at] = run.slot, run.start, len(run.embeddings)
        send(told, row.runs)
        torch.cat([run.embeddings for run in group], out=row.embeddings[: told[2].sum()])
        row.replay()


def _most_runs(size: int) -> int:
    """Chunks that a row of so many positions has room for."""
    return max(size // _RUN_POSITIONS, _LEAST_RUNS)


class PaddedPrefills:
    """Prefills chunks that fit a shape: those of one size and place always meet the same one, so that no
    bit depends on their company."""

    def __init__(self, work: PaddedWork, state: SlotState, kv: PagedKV, capture: Capture) -> None:
        self._work, self._state, self._kv, self._capture = work, state, kv, capture
        self._shapes = [shape for shape in SHAPES if shape[1] + shape[2] <= state.page_table.shape[1]]
        #: By the number of its shape.
        self._rows: Buckets[_Row] = Buckets(range(len(self._shapes)), "(the number of a shape)")

    def warm(self) -> None:
        """Captures the graph that most prompts need: of chunks that fit a page."""
        self._rows.of(0, self._row)

    def prepare(self) -> bool:
        """Captures one more graph; False when there is nothing left."""
        return self._rows.prepare(self._row)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills what fits a graph; returns the rest."""
        left: list[PrefillRun] = []
        groups: dict[int, list[PrefillRun]] = {}
        for run in runs:
            if (shape := self._shape_of(run)) is None:
                left.append(run)
            else:
                groups.setdefault(shape, []).append(run)
        for shape, group in groups.items():
            row, together = self._rows.of(shape, self._row), self._shapes[shape][0]
            for start in range(0, len(group), together):
                self._replay(row, group[start : start + together])
        return left

    def _shape_of(self, run: PrefillRun) -> int | None:
        """The number of the shape that a chunk fits; None when it fits none."""
        before, rest = divmod(run.start, self._kv.page_size)
        used = self._kv.pages_for(len(run.embeddings))
        fitting = (
            at
            for at, (_, new, first) in enumerate(self._shapes)
            if used <= new and first == before and not rest
        )
        return next(fitting, None)

    def _replay(self, row: _Row, runs: Sequence[PrefillRun]) -> None:
        rows = row.runs.shape[1]
        new, empty = len(row.embeddings) // rows, rows - len(runs)
        counts = [len(run.embeddings) for run in runs]
        slots = [*(run.slot for run in runs), *[self._state.dead] * empty]
        send(np.array((slots, [*counts, *[0] * empty]), np.int64), row.runs)
        targets = np.concatenate([np.arange(at * new, at * new + count) for at, count in enumerate(counts)])
        sent = to_device(torch.from_numpy(targets), row.embeddings.device)
        row.embeddings.index_copy_(0, sent, torch.cat([run.embeddings for run in runs]))
        row.replay()

    @torch.inference_mode()
    def _row(self, at: int) -> _Row:
        (runs, pages, before), inputs = self._shapes[at], self._state.inputs
        new, hidden, start = pages * self._kv.page_size, inputs.shape[1], before * self._kv.page_size
        embeddings = inputs.new_zeros(runs * new, hidden)
        owners = torch.tensor([[self._state.dead] * runs, [0] * runs], device=inputs.device)
        table = self._state.page_table[:, : before + pages]

        def work() -> None:
            self._work(embeddings.view(runs, new, hidden), table.index_select(0, owners[0]), owners[1], start)

        return _Row(self._capture(work), embeddings, owners)
