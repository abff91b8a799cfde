"""Frames as CUDA graphs: one graph for each size of the batch, replayed once a frame, with all state on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PackedPrompts
from kernels.cuda_graphs import FRAME_PRIORITY, GraphPool, capture
from kernels.lm_frame import FusedFrame, plan_for, runs_cuda
from kernels.prefill import prefill_packed, prefill_padded
from kernels.registry import send, to_device
from pipelines.engine.buckets import SHAPES, SMALL_SHAPES, Buckets, Prefill, buckets_for, packed_sizes, packs
from pipelines.engine.executor import FrameCodes, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.packed_prefill import PackedPrefills
from pipelines.engine.state import SCRATCH_PAGE, PagedKV, SlotState
from pipelines.errors import ConfigError, ErrorCode

log = logging.getLogger(__name__)

#: Up to so many prompts are copied into a graph's inputs one by one.
_FEW = 4
#: Bytes between what kernels write for the host: flags, then codes.
_ALIGNED = 128

#: Which prompts share a replay: as many as fit the best shape ("free"), or those that fit the one shape that chunks of their size and
#: place always meet ("fixed"), or none ("alone").
Sharing = Literal["free", "fixed", "alone"]
#: `FrameModel.prefill_padded` without its pages: embeddings, pages, counts, start.
Work = Callable[[Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured prefill and its inputs: embeddings [runs * new, hidden]; slots and counts of new positions, int64 [2, runs]."""

    replay: Callable[[], None]
    embeddings: Tensor
    owners: Tensor


class PrefillGraphs:
    """Prefills chunks that fit a shape; thousands of launches become one. A graph is captured when `Buckets` has it due."""

    def __init__(
        self, work: Work, state: SlotState, kv: PagedKV, pool: GraphPool, sharing: Sharing = "free", aside: torch.cuda.Stream | None = None
    ) -> None:
        """Graphs are captured on the stream `aside`, and have its priority."""
        self.sharing: Sharing = sharing
        self._work, self._state, self._kv, self._pool = work, state, kv, pool
        shapes = sorted((*SHAPES, *(SMALL_SHAPES if sharing == "free" else ())), key=lambda shape: (shape[2], shape[1], shape[0]))
        self._shapes = [shape for shape in shapes if shape[1] + shape[2] <= state.page_table.shape[1]]
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        sizes = dict.fromkeys((new, before) for _, new, before in self._shapes)
        #: The numbers of prompts that chunks of one size and place can share a replay of.
        self._prompts = {size: Buckets([count for count, *pages in self._shapes if tuple(pages) == size]) for size in sizes}
        self._aside = aside or (torch.cuda.Stream(kv.k.device) if kv.k.is_cuda else None)

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
                taken = 1 if self.sharing == "alone" else graph.owners.shape[1]
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
        rows = graph.owners.shape[1]
        new, empty = len(graph.embeddings) // rows, rows - len(runs)
        counts = [len(run.embeddings) for run in runs]
        slots = [*(run.slot for run in runs), *[self._state.dead] * empty]
        send(np.array((slots, [*counts, *[0] * empty]), np.int64), graph.owners)
        if len(runs) <= _FEW:
            for row, run in enumerate(runs):
                graph.embeddings[row * new : row * new + len(run.embeddings)].copy_(run.embeddings)
        else:
            targets = np.concatenate([np.arange(row * new, row * new + count) for row, count in enumerate(counts)])
            sent = to_device(torch.from_numpy(targets), graph.embeddings.device)
            graph.embeddings.index_copy_(0, sent, torch.cat([run.embeddings for run in runs]))
        graph.replay()

    def _graph(self, shape: tuple[int, int, int]) -> _Graph:
        if (known := self._graphs.get(shape)) is not None:
            return known
        runs, pages, before = shape
        new, hidden, device = pages * self._kv.page_size, self._state.inputs.shape[1], self._kv.k.device
        with torch.inference_mode():
            embeddings = torch.zeros(runs * new, hidden, dtype=self._state.inputs.dtype, device=device)
            owners = torch.stack(
                (torch.full((runs,), self._state.dead, device=device), torch.zeros(runs, dtype=torch.int64, device=device))
            )
            table, start = self._state.page_table[:, : before + pages], before * self._kv.page_size

            def work() -> None:
                self._work(embeddings.view(runs, new, hidden), table.index_select(0, owners[0]), owners[1], start)

            replay = self._captured(work)
        self._prompts[pages, before].captured.add(runs)
        self._graphs[shape] = _Graph(replay, embeddings, owners)
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
        slots: int,
        pages: int,
        page_size: int,
        max_context: int,
        reproducible: bool = False,
        first_on_device: bool = False,
        prefill: Prefill = "auto",
        spare_slots: int = 0,
    ) -> None:
        """`first_on_device`: its work goes before that of other CUDA streams. `prefill`: "packed" is not for `reproducible`.

        `spare_slots`: slots beside those that have a row in a frame.

        Raises `ConfigError` (`config.invalid`) when the model is not on a CUDA device.
        """
        if model.device.type != "cuda":
            raise ConfigError(ErrorCode.CONFIG_INVALID, "The graph executor needs a CUDA device.", "Use the eager executor on CPU.")
        self._model = model
        self.reproducible = reproducible
        self.packed = packs(prefill, reproducible)
        self.kv = model.make_kv(pages, page_size)
        self.state = model.make_state(slots + spare_slots, self.kv.pages_for(max_context), max_context)
        sizes = buckets_for(slots)
        largest = sizes[-1]
        self.batch_sizes = (largest,) if reproducible else sizes
        self._buckets = Buckets(self.batch_sizes)
        tensors = self._tensors = model.tensors
        self.kernels = "fused CUDA" if runs_cuda(tensors, self.kv.k) else "Triton"
        with torch.inference_mode():
            self._rows = torch.full((largest,), self.state.dead, device=model.device)
            # One after the other, so that one copy takes both to the host.
            self._codes_from = -(-largest // _ALIGNED) * _ALIGNED
            self._made = torch.zeros(self._codes_from + 8 * largest * model.codebooks, dtype=torch.uint8, device=model.device)
            self._flags = self._made[:largest]
            self._codes = self._made[self._codes_from :].view(torch.int64).view(largest, model.codebooks)
        #: Pinned buffers of one frame each that no frame is on its way to.
        self._buffers: list[Tensor] = []
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._frames: dict[int, FusedFrame] = {}
        priority = FRAME_PRIORITY if first_on_device else 0
        # A graph keeps the priority of the stream on which it was captured.
        self._pool, self._aside = GraphPool(), torch.cuda.Stream(model.device, priority=priority)
        self.stream = torch.cuda.Stream(model.device, priority=priority) if first_on_device else None
        stack, cache = tensors.backbone, self.kv

        def padded(embeddings: Tensor, page_table: Tensor, counts: Tensor, start: int) -> None:
            prefill_padded(embeddings, page_table, counts, start, stack, cache.k, cache.v, SCRATCH_PAGE)

        def packed(embeddings: Tensor, prompts: PackedPrompts) -> None:
            prefill_packed(embeddings, prompts, stack, cache.k, cache.v, SCRATCH_PAGE)

        self.prefills: PrefillGraphs | PackedPrefills
        if self.packed:
            captured = partial(capture, pool=self._pool, aside=self._aside)
            self.prefills = PackedPrefills(packed, self.state, lambda work: captured(work).replay, packed_sizes(slots))
        else:
            self.prefills = PrefillGraphs(padded, self.state, self.kv, self._pool, "fixed" if reproducible else "free", self._aside)
        self._running: list[int] = []

    @torch.inference_mode()
    def embed(self, prompt: object) -> Tensor:
        return self._model.embed(prompt)

    @torch.inference_mode()
    def embed_all(self, prompts: Sequence[object]) -> list[Tensor]:
        # The order of a sum may depend on the positions of all prompts together.
        return [self._model.embed(prompt) for prompt in prompts] if self.reproducible else self._model.embed_all(prompts)

    @torch.inference_mode()
    def take_text(self, ids: NDArray[np.int64]) -> None:
        self._model.take_text(ids)

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
        size = self._codes_from + 8 * len(slots) * self._codes.shape[1]
        used: list[Tensor] = []
        for _ in range(count):
            graph.replay()
            buffer = self._buffers.pop() if self._buffers else torch.empty(len(self._made), dtype=torch.uint8, pin_memory=True)
            buffer[:size].copy_(self._made[:size], non_blocking=True)
            used.append(buffer)
        event = torch.cuda.Event()
        event.record()
        return _OnTheWay(used, self._buffers, event, (len(slots), self._codes.shape[1]), self._codes_from)

    @torch.inference_mode()
    def warm(self, everything: bool = False) -> None:
        """Captures the graphs without which a first batch would wait, or every graph, so that no request ever waits for one."""
        for bucket in self._buckets.first:
            self._capture(bucket)
        self.prefills.warm()
        while everything and self.prepare():
            pass
        # What ran before the captures took memory that later batches do not need; the engine's thread may be on another stream.
        torch.cuda.current_stream().synchronize()
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
            send(np.array(rows, np.int64), self._rows[: len(rows)])
            self._running = rows

    def _capture(self, bucket: int) -> torch.cuda.CUDAGraph:
        """Captures one frame of the dead slot, which no frame changes."""
        self._write_rows([self.state.dead] * bucket)
        rows, codes, flags = self._rows[:bucket], self._codes[:bucket], self._flags[:bucket]
        frame = self._new_frame(bucket)
        graph = capture(lambda: frame.run(rows, codes, flags), self._pool, self._aside)
        self._graphs[bucket], self._frames[bucket] = graph, frame
        self._buckets.captured.add(bucket)
        return graph

    def _new_frame(self, bucket: int) -> FusedFrame:
        """What runs frames of a bucket."""
        plan = plan_for(bucket, self._tensors.backbone.hidden)
        return FusedFrame(self._tensors, self.state.tensors(), self.kv.k, self.kv.v, bucket, plan)


class _OnTheWay:
    """Flags and codes of frames on their way to pinned host memory, one buffer a frame, which goes back to `free` after them."""

    def __init__(self, used: list[Tensor], free: list[Tensor], event: torch.cuda.Event, shape: tuple[int, int], codes_from: int) -> None:
        self._used, self._free, self._event, self._shape, self._codes_from = used, free, event, shape, codes_from

    def result(self) -> FrameCodes:
        self._event.synchronize()
        rows, codebooks = self._shape
        made = [buffer.numpy() for buffer in self._used]
        ends = self._codes_from + 8 * rows * codebooks
        # Copies: a request keeps its codes.
        codes = np.stack([frame[self._codes_from : ends].view(np.int64).reshape(rows, codebooks) for frame in made])
        flags = np.stack([frame[:rows] for frame in made])
        self._free += self._used
        return FrameCodes(codes, flags)
