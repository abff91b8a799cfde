"""The logits of a graph executor's frames, which its graphs otherwise write over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipelines.qwen3_tts.config import Qwen3TTSConfig


class Taps:
    """Logits as the draws read them, in float32; first: [rows, vocab]; residual: [residuals, rows, codes]."""

    def __init__(self, config: Qwen3TTSConfig, rows: int, device: torch.device) -> None:
        self.first = torch.zeros(rows, config.talker.vocab, device=device)
        self.residual = torch.zeros(config.codebooks - 1, rows, config.predictor.vocab, device=device)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Those of the last frame that was started, in the stream's order; the next frame writes over
        them."""
        return self.first, self.residual

    def keep(self, codebook: int, logits: Tensor) -> None:
        target = self.residual[codebook - 1] if codebook else self.first
        # A kernel in either type: a plain copy may become a node that programmatic launches cannot follow.
        torch.mul(logits, 1.0, out=target[: len(logits)])


@contextmanager
def tapped(config: Qwen3TTSConfig, rows: int, device: torch.device) -> Iterator[Taps]:
    """Graphs captured inside copy their logits before each draw; `rows`: the largest bucket."""
    from kernels.lm_frame import FusedFrame

    taps, draw = Taps(config, rows, device), FusedFrame.draw_codebook

    def kept(frame: FusedFrame, stage: int, codebook: int, logits: Tensor, *rest: Any) -> None:
        taps.keep(codebook, logits)
        draw(frame, stage, codebook, logits, *rest)

    FusedFrame.draw_codebook = kept  # type: ignore[method-assign]
    try:
        yield taps
    finally:
        FusedFrame.draw_codebook = draw  # type: ignore[method-assign]
