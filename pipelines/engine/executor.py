"""Runs prefill and frames on a device. The scheduler speaks to a `FrameExecutor`; which ops it runs is its own matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.kv import PagedKV
from pipelines.engine.model import FrameModel, FrameSettings, PrefillRun
from pipelines.engine.state import SlotState

#: Rows of every batch on CPU: with one shape for all batches, no row's bits depend on how many rows there are.
CPU_ROWS = 32


@dataclass(frozen=True, slots=True)
class FrameCodes:
    """Frames on the host. codes: int64 [frames, rows, codebooks]; flags: uint8 [frames, rows] of `ENDED` and `NOT_FINITE`."""

    codes: NDArray[np.int64]
    flags: NDArray[np.uint8]


class PendingFrames(Protocol):
    """Frames that the device may still be making."""

    def result(self) -> FrameCodes:
        """Waits for them."""
        ...


class FrameExecutor(Protocol):
    """Makes frames of the slots of a `SlotState`."""

    name: str
    state: SlotState
    kv: PagedKV
    #: Turns that may be under way before the oldest is read: 0 where frames are made at once, 1 to hide the host behind a GPU.
    lag: int

    def embed(self, prompt: object) -> Tensor:
        """Embeddings [length, hidden] of a prompt."""
        ...

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        """Writes keys and values of prompt positions; a slot's pages are already in its table."""
        ...

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames of these slots; `settings.max_length` holds for the first and grows by one a frame."""
        ...


class EagerExecutor:
    """PyTorch ops one by one, on any device: the oracle of the other executors.

    On CPU a batch always has `CPU_ROWS` rows (more slots make several batches) and every prompt is prefilled alone, so that a
    request's codes are the same bits alone and in any company.
    """

    name = "eager"

    def __init__(self, model: FrameModel, slots: int, pages: int, page_size: int, max_context: int) -> None:
        self._model = model
        self._on_cpu = model.device.type == "cpu"
        self.kv = model.make_kv(pages, page_size)
        self.state = model.make_state(slots, self.kv.pages_for(max_context), max_context)
        self.lag = 0 if self._on_cpu else 1

    @torch.inference_mode()
    def embed(self, prompt: object) -> Tensor:
        return self._model.embed(prompt)

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
