"""Frames as CUDA graphs: one graph for each batch size, replayed once a frame, with all state on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.cuda_graphs import FRAME_PRIORITY, GraphPool, capture
from kernels.lm_frame import FusedFrame, plan_for, runs_cuda
from kernels.prefill import prefill_packed, prefill_padded
from kernels.registry import send
from pipelines.engine.buckets import Buckets, buckets_for
from pipelines.engine.executor import (
    EngineOptions,
    FrameCodes,
    FrameExecutor,
    FrameModel,
    FrameSettings,
    PendingFrames,
    PrefillRun,
)
from pipelines.engine.prefill import PackedPrefills, PaddedPrefills, packed_sizes
from pipelines.engine.state import SCRATCH_PAGE

#: Alignment in bytes of the parts of a frame's output.
_ALIGNED = 128


class GraphExecutor(FrameExecutor):
    """The `FrameExecutor` for a GPU: the frame of `model` in fused kernels, captured once for each bucket.

    `warm` captures a few graphs, which are enough for every batch; `Buckets` chooses when to capture others.
    If `reproducible`, every batch runs in the same bucket with the same splits, and chunks of the same size
    and position are prefilled in the same shape. So every row runs in the same kernels, and its bits do not
    depend on its batch.
    """

    name = "graph"

    def __init__(
        self,
        model: FrameModel,
        sizes: EngineOptions,
        reproducible: bool = False,
        first_on_device: bool = False,
    ) -> None:
        """`first_on_device`: its work has priority over other CUDA streams."""
        super().__init__(model, sizes, reproducible)
        buckets = buckets_for(sizes.slots)
        largest = buckets[-1]
        self.batch_sizes = (largest,) if reproducible else buckets
        #: Each graph is kept with its frame, which holds the tensors that the graph reads and writes.
        self.graphs: Buckets[tuple[torch.cuda.CUDAGraph, FusedFrame]] = Buckets(self.batch_sizes)
        tensors = self.tensors = model.tensors
        self.kernels = "fused CUDA" if runs_cuda(tensors, self.kv.k) else "Triton"
        with torch.inference_mode():
            self._rows = torch.full((largest,), self.state.dead, device=model.device)
            # Flags, log probabilities and codes are in one tensor, so that one copy sends all to the host.
            self._room = -(-largest // _ALIGNED) * _ALIGNED
            self._codes_from = 5 * self._room
            self._made = torch.zeros(
                self._codes_from + 8 * largest * model.codebooks, dtype=torch.uint8, device=model.device
            )
            self._flags = self._made[:largest]
            self._log_probabilities = self._made[self._room : self._codes_from].view(torch.float32)
            self._codes = self._made[self._codes_from :].view(torch.int64).view(largest, model.codebooks)
        #: Free pinned buffers, each for one frame.
        self._buffers = list[Tensor]()
        self._running = list[int]()
        priority = FRAME_PRIORITY if first_on_device else 0
        # A graph keeps the priority of the stream on which it was captured.
        self.pool = GraphPool()
        self.capture_stream = torch.cuda.Stream(model.device, priority=priority)
        self.stream = torch.cuda.Stream(model.device, priority=priority) if first_on_device else None
        self.packed = not reproducible
        self.prefills = prefills_of(self, packed_sizes(sizes.slots))

    @torch.inference_mode()
    def embed(self, prompts: Sequence[object]) -> list[Tensor]:
        # The order of a sum can depend on the total number of positions.
        return super().embed(prompts) if self.reproducible else self._model.embed_all(prompts)

    @torch.inference_mode()
    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        left = self.prefills.run(runs)
        for group in [[run] for run in left] if self.reproducible else [left] if left else []:
            self._model.prefill(group, self.state, self.kv)

    @torch.inference_mode()
    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames; ignores `settings`, since the kernels read the settings of each row from its
        slot."""
        bucket = self.graphs.choose(len(slots), self._capture) or self.graphs.sizes[-1]
        graph, _ = self.graphs.of(bucket, self._capture)
        self._write_rows([*slots, *[self.state.dead] * (bucket - len(slots))])
        size = self._codes_from + 8 * len(slots) * self._codes.shape[1]
        used = list[Tensor]()
        for _ in range(count):
            graph.replay()
            buffer = (
                self._buffers.pop()
                if self._buffers
                else torch.empty(len(self._made), dtype=torch.uint8, pin_memory=True)
            )
            buffer[:size].copy_(self._made[:size], non_blocking=True)
            used.append(buffer)
        event = torch.cuda.Event()
        event.record()
        return partial(self._read, used, event, len(slots))

    def _read(self, used: list[Tensor], event: torch.cuda.Event, rows: int) -> FrameCodes:
        """Reads a turn from pinned buffers, one for each frame, and frees the buffers."""
        event.synchronize()
        codebooks = self._codes.shape[1]
        made = [buffer.numpy() for buffer in used]
        ends = self._codes_from + 8 * rows * codebooks
        # `stack` copies, so that a request can keep its codes.
        codes = np.stack(
            [frame[self._codes_from : ends].view(np.int64).reshape(rows, codebooks) for frame in made]
        )
        flags = np.stack([frame[:rows] for frame in made])
        ends = self._room + 4 * rows
        log_probabilities = np.stack([frame[self._room : ends].view(np.float32) for frame in made])
        self._buffers += used
        return FrameCodes(codes, flags, log_probabilities)

    @torch.inference_mode()
    def warm(self, everything: bool = False) -> None:
        """Captures the graphs that the first batches need, or every graph, so that no request waits for one."""
        for bucket in self.graphs.first:
            self.graphs.of(bucket, self._capture)
        self.prefills.warm()
        while everything and self.prepare():
            pass
        # Frees memory that was only needed before the captures; the engine's thread may use another stream.
        torch.cuda.current_stream().synchronize()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def prepare(self) -> bool:
        return self.graphs.prepare(self._capture) or self.prefills.prepare()

    def _write_rows(self, rows: list[int]) -> None:
        if rows != self._running:
            send(np.array(rows, np.int64), self._rows[: len(rows)])
            self._running = rows

    def _capture(self, bucket: int) -> tuple[torch.cuda.CUDAGraph, FusedFrame]:
        """Captures one frame of the dead slot, which no frame changes."""
        self._write_rows([self.state.dead] * bucket)
        rows = self._rows[:bucket]
        codes = self._codes[:bucket]
        flags = self._flags[:bucket]
        frame = self._new_frame(bucket)
        frame.log_probabilities = self._log_probabilities
        return capture(lambda: frame.run(rows, codes, flags), self.pool, self.capture_stream), frame

    def _new_frame(self, bucket: int) -> FusedFrame:
        """Makes the frame of a bucket."""
        plan = plan_for(bucket, self.tensors.backbone.hidden)
        return FusedFrame(self.tensors, self.state.tensors, self.kv.k, self.kv.v, bucket, plan)


def prefills_of(executor: GraphExecutor, sizes: Sequence[int]) -> PackedPrefills | PaddedPrefills:
    """Makes the prefills of an executor; `sizes`: the numbers of positions that a row of packed prompts can
    have. The prefills refer only to parts of the executor: a reference to the executor itself would be a
    cycle."""
    stack = executor.tensors.backbone
    state = executor.state
    cache = executor.kv
    pool = executor.pool
    stream = executor.capture_stream

    def replayed(work: Callable[[], None]) -> Callable[[], None]:
        return capture(work, pool, stream).replay

    if executor.packed:
        packed = partial(prefill_packed, stack=stack, k_cache=cache.k, v_cache=cache.v, scratch=SCRATCH_PAGE)
        return PackedPrefills(packed, state, replayed, sizes)
    padded = partial(prefill_padded, stack=stack, k_cache=cache.k, v_cache=cache.v, scratch=SCRATCH_PAGE)
    return PaddedPrefills(padded, state, cache, replayed)
