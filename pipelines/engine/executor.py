"""What the engine asks of a model family, and what runs it on a device: a `FrameExecutor`. Which ops that runs is its own matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.buckets import buckets_for
from pipelines.engine.state import DrawFlags, PagedKV, SlotState

#: Bits of a frame's flags.
ENDED, NOT_FINITE = 1, 2


class PromptLike(Protocol):
    """A prompt as its family builds it; the engine only needs its length and the text that follows it."""

    def __len__(self) -> int: ...

    @property
    def trailing(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """New positions of one request: embeddings [n, hidden] from position `start` on."""

    slot: int
    start: int
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """What the host knows of a batch: its longest context after this frame and what its samplers need."""

    max_length: int
    first: DrawFlags
    residual: DrawFlags

    def later(self, frames: int) -> FrameSettings:
        """The settings that many frames on."""
        return replace(self, max_length=self.max_length + frames)


@dataclass(frozen=True, slots=True)
class FrameOutput:
    """One frame of n rows. The engine reads `codes` and `flags`; the rest is for tests."""

    #: int64 [n, codebooks] and uint8 [n].
    codes: Tensor
    flags: Tensor
    #: float32 [n, vocab], the raw codebook-0 logits; [n, hidden] after the final norm; float32 [residuals, n, codes].
    first_logits: Tensor
    hidden: Tensor
    residual_logits: Tensor


class FrameModel(Protocol):
    """A talker that makes one frame of codes a step."""

    device: torch.device
    dtype: torch.dtype
    codebooks: int

    def make_kv(self, pages: int, page_size: int) -> PagedKV: ...

    def make_state(self, slots: int, max_pages: int, max_trailing: int) -> SlotState: ...

    def embed(self, prompt: Any) -> Tensor:
        """Embeddings [length, hidden] of a prompt; also makes ready what its trailing text needs."""
        ...

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """Makes ready what text that comes later needs."""
        ...

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        """Writes keys and values of packed runs of prompt positions."""
        ...

    def prefill_padded(self, embeddings: Tensor, pages: Tensor, counts: Tensor, start: int, kv: PagedKV) -> None:
        """`prefill` of chunks in one shape, all from position `start` on, a multiple of the page size.

        embeddings: [runs, new, hidden], finite everywhere; pages: [runs, (start + new) / page_size], the pages of each run, the scratch
        page where it has none; counts: [runs], new positions of each.
        """
        ...

    def frame(self, rows: Tensor, settings: FrameSettings, state: SlotState, kv: PagedKV, forced: Tensor | None = None) -> FrameOutput:
        """One frame of the slots `rows` [n] (filled up with the dead slot): talker step, draws, next input; updates `state`.

        `forced` [n, codebooks] stands in for the drawn codes wherever they are fed back.
        """
        ...


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
    #: What its kernels are made with: `fused CUDA`, `Triton`, or `plain` for PyTorch's own.
    kernels: str
    #: Whether a request's codes are the same bits alone and in any company.
    reproducible: bool
    state: SlotState
    kv: PagedKV
    #: Turns that may be under way before the oldest is read: 0 where frames are made at once, 1 to hide the host behind a GPU.
    lag: int

    @property
    def batch_sizes(self) -> Sequence[int]:
        """Numbers of rows that batches are filled up to, in order."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream that its caller should be on; None: any."""
        ...

    def embed(self, prompt: object) -> Tensor:
        """Embeddings [length, hidden] of a prompt."""
        ...

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """Makes ready what text ids need that come after their request's prompt."""
        ...

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        """Writes keys and values of prompt positions; a slot's pages are already in its table."""
        ...

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames of these slots; `settings.max_length` holds for the first and grows by one a frame."""
        ...

    def prepare(self) -> bool:
        """Makes one thing ready that later batches are faster with, while nothing else is to do; False when there is nothing left."""
        ...


class EagerExecutor:
    """PyTorch ops one by one, on any device: the oracle of the other executors.

    On CPU a batch always has `CPU_ROWS` rows (more slots make several batches) and every prompt is prefilled alone, so that a
    request's codes are the same bits alone and in any company.
    """

    name = "eager"
    kernels = "plain"
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
