"""The executor that runs a frame as single PyTorch ops, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.buckets import buckets_for
from pipelines.engine.executor import FrameCodes, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.frame_model import FrameModel

#: Rows of every batch on CPU: with one shape for all batches, no row's bits depend on how many rows there are.
CPU_ROWS = 32


class EagerExecutor:
    """PyTorch ops one by one, on any device: the oracle of the other executors.

    On CPU a batch always has `CPU_ROWS` rows (more slots make several batches) and every prompt is prefilled alone, so that a
    request's codes are the same bits alone and in any company.
    """

    name = "eager"
    kernels = "plain"
    packed = False
    stream = None

    def __init__(self, model: FrameModel, slots: int, pages: int, page_size: int, max_context: int) -> None:
        self._model = model
        self._on_cpu = model.device.type == "cpu"
        self.reproducible = self._on_cpu and torch.get_num_threads() == 1
        self.kv = model.make_kv(pages, page_size)
        self.state = model.make_state(slots, self.kv.pages_for(max_context), max_context)
        self.lag = 0 if self._on_cpu else 1
        self.batch_sizes = range(CPU_ROWS, slots + CPU_ROWS, CPU_ROWS) if self._on_cpu else buckets_for(slots)

    @torch.inference_mode()
    def embed(self, prompt: object) -> Tensor:
        return self._model.embed(prompt)

    def embed_all(self, prompts: Sequence[object]) -> list[Tensor]:
        return [self.embed(prompt) for prompt in prompts]

    @torch.inference_mode()
    def take_text(self, ids: NDArray[np.int64]) -> None:
        self._model.take_text(ids)

    @torch.inference_mode()
    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        for group in [[run] for run in runs] if self._on_cpu else [runs]:
            self._model.prefill(group, self.state, self.kv)

    @torch.inference_mode()
    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        block = CPU_ROWS if self._on_cpu else len(slots)
        parts = [list(slots[start : start + block]) for start in range(0, len(slots), block)]
        rows = [torch.tensor(part + [self.state.dead] * (block - len(part)), device=self._model.device) for part in parts]
        outputs = [self._model.frame(part, settings.later(step), self.state, self.kv) for step in range(count) for part in rows]
        codes = torch.stack([output.codes for output in outputs]).view(count, -1, self._model.codebooks)
        flags = torch.stack([output.flags for output in outputs]).view(count, -1)
        return _Copy(codes[:, : len(slots)], flags[:, : len(slots)])

    def prepare(self) -> bool:
        return False


class _Copy:
    """Codes and flags on their way to the host."""

    def __init__(self, codes: Tensor, flags: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if codes.is_cuda:
            codes, flags = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (codes, flags))
            self._event = torch.cuda.Event()
            self._event.record()
        self._tensors = codes, flags

    def result(self) -> FrameCodes:
        if self._event is not None:
            self._event.synchronize()
        codes, flags = self._tensors
        return FrameCodes(codes.numpy(), flags.numpy())
