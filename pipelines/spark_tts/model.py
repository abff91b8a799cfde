"""The speech LM of SparkTTS on our engine: one id a frame."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frame import DrawRules, Feedback, FrameTensors
from kernels.layers import rope_table
from kernels.registry import to_device
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.state import LARGEST_PAGE
from pipelines.spark_tts.config import LmConfig
from pipelines.spark_tts.weights import Drawable, LmWeights


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of the vocabulary, int64 [length]; no text follows them."""

    ids: NDArray[np.int64]
    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.ids)


class SparkModel(FrameModel):
    """A Qwen2 whose head has the rows that can be drawn; what was drawn is its next input."""

    def __init__(self, lm: LmConfig, weights: LmWeights, drawable: Drawable, max_context: int) -> None:
        dtype, device = weights.table.dtype, weights.table.device
        # Prompts are filled up to whole pages, and a context may end within one.
        rope = rope_table(max_context + LARGEST_PAGE, lm.head_dim, lm.rope_theta, dtype, device)
        starts = torch.zeros(1, dtype=torch.int64, device=device)
        draw = DrawRules(drawable.ends, suppress_from=len(drawable.ids))
        super().__init__(FrameTensors(weights.stack.tensors(lm, rope), weights.head, draw, Feedback(weights.codes, starts)))
        self._table = weights.table

    def embed(self, prompt: Prompt) -> Tensor:
        """Embeddings [length, hidden] of a prompt."""
        return self._table[to_device(torch.from_numpy(prompt.ids), self.device)]
