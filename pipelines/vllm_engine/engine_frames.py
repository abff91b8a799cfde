"""Draws frames with the native engine's kernels, for a backbone that another engine runs. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cuda_graphs import GraphPool, capture
from kernels.frame import FrameTensors
from kernels.reference import draw_frame
from kernels.sampler import DrawFlags
from pipelines.engine.buckets import bucket_of, buckets_for
from pipelines.engine.state import PagedKV, SlotState


class _Bucket(NamedTuple):
    """One batch size: the function that draws its frame, its inputs (states, slots), its codes, and the
    function that holds the graph's memory."""

    run: Callable[[], None]
    hidden: Tensor
    rows: Tensor
    codes: Tensor
    work: Callable[[], None]


class EngineFrames:
    """Draws frames from hidden states: with fused kernels and one graph per bucket on CUDA, with single operations
    elsewhere."""

    def __init__(self, tensors: FrameTensors, state: SlotState, graphed: bool) -> None:
        """`graphed`: whether the fused kernels are replayed as graphs."""
        self._tensors = tensors
        self._state = state
        self._graphed = graphed
        self._device = tensors.head.device
        self._buckets = buckets_for(state.slots) if self._device.type == "cuda" else ()
        self._made = dict[int, _Bucket]()
        self._pool = GraphPool()

    def capture(self) -> None:
        """Prepares every bucket."""
        for bucket in reversed(self._buckets):
            self._bucket(bucket)

    def __call__(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The codes int64 [n, codebooks] of the slots `rows` [n], which may be unused; hidden: [n, hidden],
        after the final norm."""
        count = len(rows)
        if not self._buckets:
            # Each row's own settings are read, so these flags allow all of them.
            flags = DrawFlags(0, any_top_p=True, all_greedy=False)
            return draw_frame(self._tensors, self._state.tensors, rows, hidden, flags, flags).codes
        bucket = self._bucket(bucket_of(count, self._buckets))
        bucket.hidden[:count].copy_(hidden)
        bucket.rows[:count].copy_(rows)
        bucket.rows[count:].fill_(self._state.dead)
        bucket.run()
        # Copied, because the next replay overwrites them before they reach the host.
        return bucket.codes[:count].clone()

    def _bucket(self, bucket: int) -> _Bucket:
        if bucket not in self._made:
            from kernels.lm_frame import FusedFrame, plan_for  # needs Triton

            tensors = self._tensors
            device = self._device
            stack = tensors.backbone
            dtype = tensors.head.dtype
            none = PagedKV(stack, 0, 1)
            frame = FusedFrame(
                tensors, self._state.tensors, none.k, none.v, bucket, plan_for(bucket, stack.hidden)
            )
            inputs = torch.zeros(bucket, stack.hidden, dtype=dtype, device=device)
            rows = torch.full((bucket,), self._state.dead, device=device)
            codes = torch.zeros(bucket, tensors.codebooks, dtype=torch.int64, device=device)
            flags = torch.zeros(bucket, dtype=torch.uint8, device=device)

            def work() -> None:
                frame.draw(inputs, rows, codes, flags)

            run = capture(work, self._pool, torch.cuda.Stream(device)).replay if self._graphed else work
            self._made[bucket] = _Bucket(run, inputs, rows, codes, work)
        return self._made[bucket]
