"""What the engine runs frames with: a `FrameExecutor`. Which ops that runs is its own matter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import lacks_memory
from kernels.sampler import DrawFlags
from pipelines.engine.state import PagedKV, SlotState

log = logging.getLogger(__name__)


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
class FrameCodes:
    """Frames on the host. codes: int64 [frames, rows, codebooks]; flags: uint8 [frames, rows] of `ENDED`, `NOT_FINITE`."""

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
    #: Whether graphs prefill prompts one after the other in one row, without padding.
    packed: bool
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

    def embed_all(self, prompts: Sequence[object]) -> list[Tensor]:
        """`embed` of each, where a device allows it in a few launches for all of them."""
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


def embedded(executor: FrameExecutor, prompts: Sequence[object]) -> Sequence[Tensor | None]:
    """Embeddings [length, hidden] of the prompts of newcomers; None for all of them where one broke, so that each is embedded alone.

    Raises what a lack of memory raises.
    """
    if len(prompts) < 2:
        return [None] * len(prompts)
    try:
        return executor.embed_all(prompts)
    except Exception as error:
        if lacks_memory(error):
            raise
        log.warning("prompts could not be embedded together, and are embedded one by one", exc_info=True)
        return [None] * len(prompts)
