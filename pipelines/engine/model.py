"""What the engine asks of a model family: embed a prompt, prefill, and make one frame of every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.kv import PagedKV
from pipelines.engine.state import DrawFlags, SlotState

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
