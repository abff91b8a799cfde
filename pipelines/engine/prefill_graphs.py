"""Prefill of short prompts as CUDA graphs: one graph for each number of prompts and padded length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.transfer import to_device
from pipelines.engine.kv import PagedKV
from pipelines.engine.model import FrameModel, PrefillRun
from pipelines.engine.state import SlotState

#: (prompts, pages of each) that a graph is captured for, by pages, then prompts.
SHAPES = ((8, 1), (32, 1), (16, 2), (8, 4))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured prefill and its inputs: [runs * new, hidden], [runs, pages], [runs]."""

    graph: torch.cuda.CUDAGraph
    embeddings: Tensor
    pages: Tensor
    counts: Tensor


class PrefillGraphs:
    """Prefills whole prompts of up to four pages; thousands of launches become one."""

    def __init__(self, model: FrameModel, state: SlotState, kv: PagedKV, pool: Any, alone: bool) -> None:
        """`alone` gives every prompt a replay of its own, so that what is computed for it depends on its length only."""
        self._model, self._state, self._kv, self._pool = model, state, kv, pool
        self._alone = alone
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def warm(self) -> None:
        """Captures all graphs."""
        for shape in SHAPES:
            if shape[1] <= self._state.page_table.shape[1]:
                self._graph(shape)

    def run(self, runs: Sequence[PrefillRun]) -> list[PrefillRun]:
        """Prefills what fits a graph; returns the rest: later chunks, and longer ones."""
        left: list[PrefillRun] = []
        sizes: dict[int, list[PrefillRun]] = {}
        widths = [pages for pages in dict.fromkeys(pages for _, pages in SHAPES) if pages <= self._state.page_table.shape[1]]
        for run in runs:
            used = self._kv.pages_for(len(run.embeddings))
            pages = next((width for width in widths if used <= width), None)
            if run.start or pages is None:
                left.append(run)
            else:
                sizes.setdefault(pages, []).append(run)
        for pages, group in sizes.items():
            while group:
                prompts = [count for count, width in SHAPES if width == pages]
                count = prompts[0] if self._alone else next((count for count in prompts if len(group) <= count), prompts[-1])
                taken = 1 if self._alone else count
                self._replay(self._graph((count, pages)), group[:taken])
                group = group[taken:]
        return left

    def _replay(self, graph: _Graph, runs: Sequence[PrefillRun]) -> None:
        most, pages = graph.pages.shape
        new = pages * self._kv.page_size
        empty = most - len(runs)
        counts = [len(run.embeddings) for run in runs]
        targets = np.concatenate([np.arange(row * new, row * new + count) for row, count in enumerate(counts)])
        slots = [*(run.slot for run in runs), *[self._state.dead] * empty]
        sent = to_device(torch.from_numpy(np.concatenate((slots, counts, [0] * empty, targets)).astype(np.int64)), self._kv.k.device)
        graph.pages.copy_(self._state.page_table[sent[:most], :pages])
        graph.counts.copy_(sent[most : 2 * most])
        graph.embeddings[sent[2 * most :]] = torch.cat([run.embeddings for run in runs])
        graph.graph.replay()

    def _graph(self, shape: tuple[int, int]) -> _Graph:
        if (known := self._graphs.get(shape)) is not None:
            return known
        runs, pages = shape
        new, hidden, device = pages * self._kv.page_size, self._state.inputs.shape[1], self._kv.k.device
        with torch.inference_mode():
            embeddings = torch.zeros(runs * new, hidden, dtype=self._state.inputs.dtype, device=device)
            table, counts = (torch.zeros(*size, dtype=torch.int64, device=device) for size in ((runs, pages), (runs,)))
            graph = torch.cuda.CUDAGraph()

            def work() -> None:
                self._model.prefill_padded(embeddings.view(runs, new, hidden), table, counts, self._kv)

            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                work()  # sets up libraries, which a capture may not do
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        self._graphs[shape] = _Graph(graph, embeddings, table, counts)
        return self._graphs[shape]
