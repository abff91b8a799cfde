"""The model of Qwen3-TTS: talker and code predictor as a frame's tensors, and prompts to embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
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

#: Of prompts that are embedded together: the rows of all codebooks of so many take 64 MiB at the 0.6B's width.
_EMBEDDED_POSITIONS = 2048


class Qwen3TTSModel(FrameModel):
    """The talker is the backbone, the code predictor the depth; a text embedding is added to the embeddings of each frame."""

    def __init__(self, config: Qwen3TTSConfig, weights: ModelWeights, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.text = TextTable(weights.talker)
        self._codec_starts = weights.codec_starts.to("cpu")
        super().__init__(_frame_tensors(config, weights, self.text.rows, max_context), config.text_ids.tts_pad)
        self.text.ensure(torch.tensor([config.text_ids.tts_pad]))

    def embed(self, prompt: Prompt) -> Tensor:
        """Embeddings [length, hidden] of a prompt: projected text, plus the sum of its codec embeddings, plus the voice vector."""
        return self._embedded([prompt])

    def embed_all(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """`embed` of each, in one set of launches for prompts of up to so many positions together."""
        found: list[Tensor] = []
        for group in _groups(prompts):
            found += self._embedded(group).split([len(prompt) for prompt in group])
        return found

    def _embedded(self, prompts: Sequence[Prompt]) -> Tensor:
        """Embeddings of prompts one after the other, [positions, hidden]."""
        text, codes, trailing = (
            torch.from_numpy(np.concatenate(parts))
            for parts in zip(*((prompt.text, prompt.codes, prompt.trailing) for prompt in prompts), strict=True)
        )
        self.text.ensure(torch.cat((text[text >= 0], trailing)))
        codec_rows = torch.where(codes >= 0, codes + self._codec_starts, len(self.weights.codec_table) - 1)
        text_rows = torch.where(text >= 0, text, self.config.text_vocab)
        rows = to_device(torch.cat((codec_rows, text_rows[:, None]), dim=1), self.device)
        codec = self.weights.codec_table[rows[:, :-1]].sum(dim=1)
        firsts = accumulate((len(prompt) for prompt in prompts), initial=0)
        places = [
            (first + one.voice_at, one.voice) for first, one in zip(firsts, prompts) if one.voice_at is not None and one.voice is not None
        ]
        if places:
            at, voices = torch.tensor([place for place, _ in places]), torch.from_numpy(np.stack([voice for _, voice in places]))
            codec.index_copy_(0, to_device(at, self.device), to_device(voices, self.device).to(self.dtype))
        return self.text.rows[rows[:, -1]] + codec

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """As `FrameModel` says."""
        self.text.ensure(torch.from_numpy(ids))


def _groups(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts in order, in groups of at most `_EMBEDDED_POSITIONS` positions; a longer one is alone."""
    group: list[Prompt] = []
    room = _EMBEDDED_POSITIONS
    for prompt in prompts:
        if group and len(prompt) > room:
            yield group
            group, room = [], _EMBEDDED_POSITIONS
        group.append(prompt)
        room -= len(prompt)
    if group:
        yield group


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
