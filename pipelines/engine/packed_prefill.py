"""Prefill of prompts one after the other in a row of positions, as CUDA graphs: one graph for each length of the row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PackedPrompts
from kernels.registry import send
from pipelines.engine.buckets import PACKED_SIZES, Buckets
from pipelines.engine.executor import PrefillRun
from pipelines.engine.state import SlotState

log = logging.getLogger(__name__)

#: Positions for each chunk that a row has room for, and the fewest chunks that any row has room for: the others follow in the next row.
_RUN_POSITIONS, _LEAST_RUNS = 8, 8
#: Positions that a row may leave empty rather than be two rows: another replay takes about as long as these.
_LEFT_EMPTY = 256
#: A row that most first prefills fit: in the longest one they would take three times as long.
_USUAL = 2048

#: Prefills embeddings [total, hidden] of these prompts.
Work = Callable[[Tensor, PackedPrompts], None]
#: What replays a piece of work.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class _Row:
    """A captured prefill and its inputs: embeddings [total, hidden]; slots, first positions and counts, int64 [3, runs]."""

    replay: Callable[[], None]
    embeddings: Tensor
    runs: Tensor


class PackedPrefills:
    """Prefills chunks of any lengths, from any position on. Only what is behind the last chunk of a row is padding.

    A graph is captured when `Buckets` has it due. Chunks of one call may be of any slots, but not two of one slot.
    """

    def __init__(self, work: Work, state: SlotState, capture: Capture, sizes: Sequence[int] = PACKED_SIZES) -> None:
        """`sizes`: positions of the rows that a graph is captured for."""
        self._work, self._state, self._capture = work, state, capture
        self._buckets = Buckets(sizes)
        self._rows: dict[int, _Row] = {}

    def warm(self) -> None:
        """Captures the longest row that there is memory for, which can take all others' place, and that of most prefills.

        Raises `torch.OutOfMemoryError` where there is memory for none.
        """
        shortest, *longer = self._buckets.sizes
        if not any(self._may_capture(size) for size in reversed(longer)):
            self._row(shortest)
        if _USUAL in self._buckets.possible:
            self._may_capture(_USUAL)

    def prepare(self) -> bool:
        """Captures one more row; False when there is nothing left."""
        missing = self._buckets.missing
        if missing is not None:
            self._may_capture(missing)
        return missing is not None

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills all runs; returns those that there is no memory for a graph for, in order."""
        left: list[PrefillRun] = []
        for group in self._groups(runs):
            # A piece of a long run never comes before an earlier piece that is left.
            row = None if left else self._chosen(group)
            if row is None:
                left += group
            else:
                self._replay(row, group)
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
        """The length of the next row for so many positions of so many runs: one that holds them and leaves little empty, or the longest
        that they fill, if it has room for so many runs."""
        sizes = self._buckets.possible
        held = next((size for size in sizes if size >= positions and _most_runs(size) >= runs), sizes[-1])
        shorter = max((size for size in sizes if size <= positions), default=held)
        return held if held - positions <= _LEFT_EMPTY or _most_runs(shorter) < runs else shorter

    def _chosen(self, group: Sequence[PrefillRun]) -> _Row | None:
        """The row that a group takes now; None when there is no memory for one."""
        positions = sum(len(run.embeddings) for run in group)
        wanted = next(size for size in self._buckets.sizes if size >= positions and _most_runs(size) >= len(group))
        while (size := self._buckets.choose(wanted)) is not None:
            if size in self._rows or self._may_capture(size):
                return self._row(size)
        return None

    def _may_capture(self, size: int) -> bool:
        """Captures a row that others, or none, can stand in for; whether there was memory for it."""
        try:
            self._row(size)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for a graph of %d positions", size)
            self._buckets.refuse(size)
            return False
        return True

    def _row(self, size: int) -> _Row:
        if (known := self._rows.get(size)) is not None:
            return known
        inputs = self._state.inputs
        with torch.inference_mode():
            embeddings = torch.zeros(size, inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
            runs = torch.zeros(3, _most_runs(size), dtype=torch.int64, device=inputs.device)
            prompts = PackedPrompts(self._state.page_table, runs[0], runs[1], runs[2])
            replay = self._capture(lambda: self._work(embeddings, prompts))
        self._buckets.captured.add(size)
        self._rows[size] = _Row(replay, embeddings, runs)
        return self._rows[size]

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
