"""Prefill in chunks of up to four pages as CUDA graphs: one graph for each number of prompts, padded length and first position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device
from pipelines.engine.kv import PagedKV
from pipelines.engine.model import PrefillRun
from pipelines.engine.state import SlotState

#: (prompts, pages of new positions, pages before them) that a graph is captured for, by pages, then prompts.
SHAPES = ((8, 1, 0), (16, 1, 0), (32, 1, 0), (16, 2, 0), (8, 4, 0), (4, 4, 4), (4, 4, 8), (4, 4, 12))

#: Which prompts share a replay: as many as fit the best shape ("free"), or those that fit the one shape that chunks of their size and
#: place always meet ("fixed"), or none ("alone").
Sharing = Literal["free", "fixed", "alone"]
#: `FrameModel.prefill_padded` without its pages: embeddings, pages, counts, start.
Work = Callable[[Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured prefill and its inputs: [runs * new, hidden], [runs, pages], [runs]."""

    replay: Callable[[], None]
    embeddings: Tensor
    pages: Tensor
    counts: Tensor


class PrefillGraphs:
    """Prefills chunks that fit a shape; thousands of launches become one."""

    def __init__(self, work: Work, state: SlotState, kv: PagedKV, pool: Any, sharing: Sharing = "free") -> None:
        self.sharing: Sharing = sharing
        self._work, self._state, self._kv, self._pool = work, state, kv, pool
        self._shapes = [shape for shape in SHAPES if shape[1] + shape[2] <= state.page_table.shape[1]]
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    def warm(self) -> None:
        """Captures all graphs."""
        for shape in self._shapes:
            self._graph(shape)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills what fits a graph; returns the rest."""
        left: list[PrefillRun] = []
        sizes: dict[tuple[int, int], list[PrefillRun]] = {}
        for run in runs:
            if (size := self._size(run)) is None:
                left.append(run)
            else:
                sizes.setdefault(size, []).append(run)
        for size, group in sizes.items():
            prompts = [count for count, *pages in self._shapes if tuple(pages) == size]
            while group:
                count = prompts[0] if self.sharing != "free" else next((one for one in prompts if len(group) <= one), prompts[-1])
                taken = 1 if self.sharing == "alone" else count
                self._replay(self._graph((count, *size)), group[:taken])
                group = group[taken:]
        return left

    def _size(self, run: PrefillRun) -> tuple[int, int] | None:
        """Pages of new positions and pages before them of the shape that a chunk fits; None when it fits none."""
        before, rest = divmod(run.start, self._kv.page_size)
        if rest:
            return None
        used = self._kv.pages_for(len(run.embeddings))
        return next(((new, first) for _, new, first in self._shapes if used <= new and first == before), None)

    def _replay(self, graph: _Graph, runs: Sequence[PrefillRun]) -> None:
        most, pages = graph.pages.shape
        new = len(graph.embeddings) // most
        empty = most - len(runs)
        counts = [len(run.embeddings) for run in runs]
        targets = np.concatenate([np.arange(row * new, row * new + count) for row, count in enumerate(counts)])
        slots = [*(run.slot for run in runs), *[self._state.dead] * empty]
        sent = to_device(torch.from_numpy(np.concatenate((slots, counts, [0] * empty, targets)).astype(np.int64)), self._kv.k.device)
        graph.pages.copy_(self._state.page_table[sent[:most], :pages])
        graph.counts.copy_(sent[most : 2 * most])
        graph.embeddings[sent[2 * most :]] = torch.cat([run.embeddings for run in runs])
        graph.replay()

    def _graph(self, shape: tuple[int, int, int]) -> _Graph:
        if (known := self._graphs.get(shape)) is not None:
            return known
        runs, pages, before = shape
        new, hidden, device = pages * self._kv.page_size, self._state.inputs.shape[1], self._kv.k.device
        with torch.inference_mode():
            embeddings = torch.zeros(runs * new, hidden, dtype=self._state.inputs.dtype, device=device)
            table, counts = (torch.zeros(*size, dtype=torch.int64, device=device) for size in ((runs, before + pages), (runs,)))
            start = before * self._kv.page_size
            replay = self._captured(lambda: self._work(embeddings.view(runs, new, hidden), table, counts, start))
        self._graphs[shape] = _Graph(replay, embeddings, table, counts)
        return self._graphs[shape]

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What replays this work."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()  # builds kernels and sets up libraries, which a capture may not do
        torch.cuda.current_stream().wait_stream(aside)
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay
