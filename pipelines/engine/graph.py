"""Frames as CUDA graphs: one graph for each size of the batch, replayed once a frame, with all state on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kernels.cuda_graphs import capture
from kernels.lm_frame import DrawTensors, FrameTensors, FusedFrame, StateTensors, plan_for, runs_cuda
from kernels.prefill_triton import prefill_padded
from kernels.registry import to_device
from pipelines.engine.buckets import Buckets, buckets_for
from pipelines.engine.executor import FrameCodes, FrameModel, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.state import SCRATCH_PAGE, DrawSettings, PagedKV, SlotState
from pipelines.errors import ConfigError, ErrorCode

log = logging.getLogger(__name__)

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
    """Prefills chunks that fit a shape; thousands of launches become one. A graph is captured when `Buckets` has it due."""

    def __init__(self, work: Work, state: SlotState, kv: PagedKV, pool: Any, sharing: Sharing = "free") -> None:
        self.sharing: Sharing = sharing
        self._work, self._state, self._kv, self._pool = work, state, kv, pool
        self._shapes = [shape for shape in SHAPES if shape[1] + shape[2] <= state.page_table.shape[1]]
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        sizes = dict.fromkeys((new, before) for _, new, before in self._shapes)
        #: The numbers of prompts that chunks of one size and place can share a replay of.
        self._prompts = {size: Buckets([count for count, *pages in self._shapes if tuple(pages) == size]) for size in sizes}
        self._aside = torch.cuda.Stream() if kv.k.is_cuda else None

    def warm(self) -> None:
        """Captures the graph that most prompts need: of chunks that fit a page, as many as share a replay."""
        for size, prompts in list(self._prompts.items())[:1]:
            self._graph((prompts.sizes[-1 if self.sharing == "free" else 0], *size))

    def prepare(self) -> bool:
        """Captures one more graph; False when there is nothing left."""
        missing = [(prompts.missing, *size) for size, prompts in self._prompts.items() if self.sharing == "free" or not prompts.captured]
        shape = next(((count, new, before) for count, new, before in missing if count is not None), None)
        if shape is not None:
            self._may_capture(shape)
        return shape is not None

    def _chosen(self, size: tuple[int, int], prompts: int) -> _Graph | None:
        """The graph that so many chunks of this size and place take; None when there is no memory for one."""
        known = self._prompts[size]
        if self.sharing != "free":
            return self._graph((known.sizes[0], *size))
        prompts = min(prompts, known.sizes[-1])
        while (count := known.choose(prompts)) is not None:
            if count in known.captured or self._may_capture((count, *size)):
                return self._graph((count, *size))
        return None

    def _may_capture(self, shape: tuple[int, int, int]) -> bool:
        """Captures a graph that others, or none, can stand in for; whether there was memory for it."""
        try:
            self._graph(shape)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for a graph of %d prompts of %d pages", *shape[:2])
            self._prompts[shape[1:]].refuse(shape[0])
            return False
        return True

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
            while group:
                graph = self._chosen(size, len(group))
                if graph is None:
                    left += group
                    break
                taken = 1 if self.sharing == "alone" else len(graph.counts)
                self._replay(graph, group[:taken])
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
        self._prompts[pages, before].captured.add(runs)
        self._graphs[shape] = _Graph(replay, embeddings, table, counts)
        return self._graphs[shape]

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What replays this work."""
        assert self._aside is not None
        return capture(work, self._pool, self._aside).replay


class GraphExecutor:
    """The `FrameExecutor` for a GPU: the frame of `model` in fused kernels, captured once a bucket.

    `warm` captures a few graphs, which serve every batch; `Buckets` says when others follow. `reproducible` runs every batch in one
    bucket, so with the same splits, and prefills chunks of one size and place in one shape: every row meets the same kernels, and its
    codes are the same bits alone and in any company.
    """

    name = "graph"
    lag = 1

    def __init__(
        self,
        model: FrameModel,
        tensors: FrameTensors,
        slots: int,
        pages: int,
        page_size: int,
        max_context: int,
        reproducible: bool = False,
    ) -> None:
        """`tensors` are the weights of `model`. Raises `ConfigError` (`config.invalid`) when the model is not on a CUDA device."""
        if model.device.type != "cuda":
            raise ConfigError(ErrorCode.CONFIG_INVALID, "The graph executor needs a CUDA device.", "Use the eager executor on CPU.")
        self._model = model
        self.reproducible = reproducible
        self.kv = model.make_kv(pages, page_size)
        self.state = model.make_state(slots, self.kv.pages_for(max_context), max_context)
        sizes = buckets_for(slots)
        largest = sizes[-1]
        self.batch_sizes = (largest,) if reproducible else sizes
        self._buckets = Buckets(self.batch_sizes)
        self._tensors, self._state_tensors = tensors, _state_tensors(self.state)
        self.kernels = "fused CUDA" if runs_cuda(tensors, self.kv.k) else "Triton"
        with torch.inference_mode():
            self._rows = torch.full((largest,), self.state.dead, device=model.device)
            self._codes = torch.zeros(largest, model.codebooks, dtype=torch.int64, device=model.device)
            self._flags = torch.zeros(largest, dtype=torch.uint8, device=model.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._frames: dict[int, FusedFrame] = {}
        self._pool, self._aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stack, cache = tensors.talker, self.kv

        def prefill(embeddings: Tensor, page_table: Tensor, counts: Tensor, start: int) -> None:
            prefill_padded(embeddings, page_table, counts, start, stack, cache.k, cache.v, SCRATCH_PAGE)

        self.prefills = PrefillGraphs(prefill, self.state, self.kv, self._pool, "fixed" if reproducible else "free")
        self._running: list[int] = []

    @torch.inference_mode()
    def embed(self, prompt: object) -> Tensor:
        return self._model.embed(prompt)

    @torch.inference_mode()
    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        left = self.prefills.run(runs)
        for group in [[run] for run in left] if self.reproducible else [left] if left else []:
            self._model.prefill(group, self.state, self.kv)

    @torch.inference_mode()
    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames; `settings` is not needed, since the kernels read every row's own."""
        bucket, graph = self._graph_for(len(slots))
        self._write_rows([*slots, *[self.state.dead] * (bucket - len(slots))])
        codes = torch.empty(count, len(slots), self._codes.shape[1], dtype=torch.int64, device=self._codes.device)
        flags = torch.empty(count, len(slots), dtype=torch.uint8, device=self._codes.device)
        for frame in range(count):
            graph.replay()
            codes[frame].copy_(self._codes[: len(slots)])
            flags[frame].copy_(self._flags[: len(slots)])
        return _OnTheWay(codes, flags)

    @torch.inference_mode()
    def warm(self) -> None:
        """Captures the graphs without which a first batch would wait."""
        for bucket in self._buckets.first:
            self._capture(bucket)
        self.prefills.warm()
        # What ran before the captures took memory that later batches do not need.
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def prepare(self) -> bool:
        missing = self._buckets.missing
        if missing is None:
            return self.prefills.prepare()
        self._may_capture(missing)
        return True

    def _graph_for(self, rows: int) -> tuple[int, torch.cuda.CUDAGraph]:
        """The bucket and the graph that so many rows take now. Raises what a lack of memory raises where no graph holds them."""
        while (bucket := self._buckets.choose(rows)) is not None:
            if bucket in self._graphs or self._may_capture(bucket):
                return bucket, self._graphs[bucket]
        largest = self._buckets.sizes[-1]
        return largest, self._capture(largest)

    def _may_capture(self, bucket: int) -> bool:
        """Captures a bucket that others can stand in for; whether there was memory for it."""
        try:
            self._capture(bucket)
        except torch.OutOfMemoryError:
            log.warning("there is no memory for a graph of %d rows; larger ones serve its batches", bucket)
            self._buckets.refuse(bucket)
            return False
        return True

    def _write_rows(self, rows: list[int]) -> None:
        if rows != self._running:
            # A fresh pinned buffer each time: the one before may still be on its way.
            self._rows[: len(rows)].copy_(torch.tensor(rows).pin_memory(), non_blocking=True)
            self._running = rows

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        """Captures one frame of the dead slot, which no frame changes."""
        self._write_rows([self.state.dead] * bucket)
        rows, codes, flags = self._rows[:bucket], self._codes[:bucket], self._flags[:bucket]
        frame = FusedFrame(
            self._tensors, self._state_tensors, self.kv.k, self.kv.v, bucket, plan_for(bucket, self._tensors.talker.norm.shape[0])
        )
        graph = capture(lambda: frame.run(rows, codes, flags), self._pool, self._aside)
        self._graphs[bucket], self._frames[bucket] = graph, frame
        self._buckets.captured.add(bucket)
        return graph


class _OnTheWay:
    """Codes and flags on their way to pinned host memory."""

    def __init__(self, codes: Tensor, flags: Tensor) -> None:
        self._tensors = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (codes, flags))
        self._event = torch.cuda.Event()
        self._event.record()

    def result(self) -> FrameCodes:
        self._event.synchronize()
        codes, flags = self._tensors
        return FrameCodes(codes.numpy().copy(), flags.numpy())  # a request keeps its codes; the pinned memory goes back


def _draw_tensors(settings: DrawSettings) -> DrawTensors:
    return DrawTensors(settings.temperature, settings.top_k, settings.top_p, settings.greedy.view(torch.uint8))


def _state_tensors(state: SlotState) -> StateTensors:
    return StateTensors(
        inputs=state.inputs,
        positions=state.positions,
        frames=state.frames,
        seeds=state.seeds,
        page_table=state.page_table,
        trailing=state.trailing,
        seen=state.seen.view(torch.uint8),
        penalty=state.penalty,
        min_new_tokens=state.min_new_tokens,
        first=_draw_tensors(state.first),
        residual=_draw_tensors(state.residual),
        dead=state.dead,
    )
