"""Frames as CUDA graphs: one graph for each size of the batch, replayed once a frame, with all state on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.lm_frame import DrawTensors, FrameTensors, FusedFrame, StateTensors
from kernels.lm_plans import plan_for
from kernels.prefill_launch import prefill_padded
from pipelines.engine.executor import FrameCodes, PendingFrames
from pipelines.engine.kv import SCRATCH_PAGE
from pipelines.engine.model import FrameModel, FrameSettings, PrefillRun
from pipelines.engine.prefill_graphs import PrefillGraphs
from pipelines.engine.state import DrawSettings, SlotState
from pipelines.errors import ConfigError, ErrorCode

#: Sizes of the batch that a graph is captured for; others are filled up with the dead slot.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)


class GraphExecutor:
    """The `FrameExecutor` for a GPU: the frame of `model` in fused kernels, captured once a bucket.

    A graph is captured when its bucket is first asked for; `warm` does so ahead. `reproducible` runs every batch in one bucket,
    so with the same splits, and prefills chunks of one size and place in one shape, so that every row meets the same kernels and its
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
        self._reproducible = reproducible
        self.kv = model.make_kv(pages, page_size)
        self.state = model.make_state(slots, self.kv.pages_for(max_context), max_context)
        largest = _bucket(slots, BUCKETS)
        self._buckets = (
            (largest,) if reproducible else tuple(sorted({_bucket(rows, BUCKETS) for rows in (*BUCKETS, slots) if rows <= largest}))
        )
        self._tensors, self._state_tensors = tensors, _state_tensors(self.state)
        with torch.inference_mode():
            self._rows = torch.full((largest,), self.state.dead, device=model.device)
            self._codes = torch.zeros(largest, model.codebooks, dtype=torch.int64, device=model.device)
            self._flags = torch.zeros(largest, dtype=torch.uint8, device=model.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._frames: dict[int, FusedFrame] = {}
        self._pool = torch.cuda.graph_pool_handle()
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
        for group in [[run] for run in left] if self._reproducible else [left] if left else []:
            self._model.prefill(group, self.state, self.kv)

    @torch.inference_mode()
    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames; `settings` is not needed, since the kernels read every row's own."""
        bucket = _bucket(len(slots), self._buckets)
        graph = self._graphs.get(bucket) or self._capture(bucket)
        self._write_rows([*slots, *[self.state.dead] * (bucket - len(slots))])
        codes = torch.empty(count, len(slots), self._codes.shape[1], dtype=torch.int64, device=self._codes.device)
        flags = torch.empty(count, len(slots), dtype=torch.uint8, device=self._codes.device)
        for frame in range(count):
            graph.replay()
            codes[frame].copy_(self._codes[: len(slots)])
            flags[frame].copy_(self._flags[: len(slots)])
        return _OnTheWay(codes, flags)

    @torch.inference_mode()
    def warm(self, most: int) -> None:
        """Captures the graphs of all buckets up to the one that `most` slots need."""
        for bucket in self._buckets:
            if bucket <= _bucket(most, self._buckets) and bucket not in self._graphs:
                self._capture(bucket)
        self.prefills.warm()

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
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            frame.run(rows, codes, flags)  # builds kernels and sets up libraries, which a capture may not do
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            frame.run(rows, codes, flags)
        self._graphs[bucket], self._frames[bucket] = graph, frame
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


def _bucket(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`, or `rows` itself rounded up to a multiple of 128 beyond the largest."""
    return next((bucket for bucket in buckets if rows <= bucket), -(-rows // 128) * 128)


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
