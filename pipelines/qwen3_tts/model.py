"""The model of Qwen3-TTS: talker and code predictor as a frame's tensors, and prompts to embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frame import DepthTensors, DrawRules, Feedback, FrameTensors
from kernels.layers import rope_table
from kernels.registry import to_device
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.state import LARGEST_PAGE
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig
from pipelines.qwen3_tts.weights import ModelWeights, TextTable, predictor_inputs

if TYPE_CHECKING:
    from pipelines.qwen3_tts.prompt import Prompt


class Qwen3TTSModel(FrameModel):
    """The talker is the backbone, the code predictor the depth; a text embedding is added to the embeddings of each frame."""

    def __init__(self, config: Qwen3TTSConfig, weights: ModelWeights, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.text = TextTable(weights.talker)
        self._codec_starts = weights.codec_starts.to("cpu")
        super().__init__(_frame_tensors(config, weights, self.text.rows, max_context), config.ids.tts_pad)
        self.text.ensure(torch.tensor([config.ids.tts_pad]))

    def embed(self, prompt: Prompt) -> Tensor:
        """Embeddings [length, hidden] of a prompt: projected text, plus the sum of its codec embeddings, plus the voice vector."""
        text, codes = torch.from_numpy(prompt.text), torch.from_numpy(prompt.codes)
        trailing = torch.from_numpy(prompt.trailing)
        self.text.ensure(torch.cat((text[text >= 0], trailing)))
        codec_rows = torch.where(codes >= 0, codes + self._codec_starts, len(self.weights.codec_table) - 1)
        text_rows = torch.where(text >= 0, text, self.config.text_vocab)
        rows = to_device(torch.cat((codec_rows, text_rows[:, None]), dim=1), self.device)
        codec = self.weights.codec_table[rows[:, :-1]].sum(dim=1)
        if prompt.voice_at is not None and prompt.voice is not None:
            codec[prompt.voice_at] = to_device(torch.from_numpy(prompt.voice), self.device).to(self.dtype)
        return self.text.rows[rows[:, -1]] + codec

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """As `FrameModel` says."""
        self.text.ensure(torch.from_numpy(ids))


def _frame_tensors(config: Qwen3TTSConfig, weights: ModelWeights, text: Tensor, max_context: int) -> FrameTensors:
    """Views of the weights: nothing big is copied, but for the predictor's inputs where they are projected."""
    talker, predictor = config.talker, config.predictor
    dtype, device = weights.codec_table.dtype, weights.codec_table.device
    # Prompts are filled up to whole pages, and a context may end within one.
    table = rope_table(max_context + LARGEST_PAGE, talker.head_dim, talker.rope_theta, dtype, device)
    frame_table = rope_table(config.codebooks, predictor.head_dim, predictor.rope_theta, dtype, device)
    depth = weights.predictor
    return FrameTensors(
        backbone=weights.talker.stack.tensors(talker, table),
        head=weights.talker.head,
        draw=DrawRules((config.ids.eos,), talker.vocab - CONTROL_IDS),
        feedback=Feedback(weights.codec_table, weights.codec_starts, text),
        depth=DepthTensors(
            depth.stack.tensors(predictor, frame_table), depth.heads, predictor_inputs(weights), weights.codec_starts, depth.projection
        ),
    )
