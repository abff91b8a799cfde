"""The model of Qwen3-TTS: the tensors of its talker and code predictor, and the embeddings of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.frame import DepthTensors, DrawRules, Feedback, FrameTensors
from kernels.registry import to_device
from pipelines.engine.executor import FrameModel
from pipelines.engine.state import LARGEST_PAGE
from pipelines.nn.checkpoint import Loader, StackWeights, TensorSource, take_stack
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig
from pipelines.qwen3_tts.prompt import Prompt
from pipelines.request import IntArray

#: Rows of each matrix product whose results must not depend on which rows are requested together.
ROW_BLOCK = 32


class ModelWeights(NamedTuple):
    talker: StackWeights
    #: [text_vocab, text_hidden] and the two layers of `text_projection`.
    text_embedding: Tensor
    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]
    #: [codec vocab, hidden].
    head: Tensor
    predictor: StackWeights
    #: The predictor's heads: [residuals, codes, hidden].
    heads: Tensor
    #: `small_to_mtp_projection`; None if talker and predictor have the same width.
    projection: tuple[Tensor, Tensor] | None
    #: [codec vocab + residuals * codes + 1, talker hidden]: the embeddings of all codebooks one after the
    #: other, then zeros.
    codec_table: Tensor
    #: int64 [codebooks]: the first row of each codebook.
    codec_starts: Tensor


def take_weights(
    source: TensorSource, config: Qwen3TTSConfig, dtype: torch.dtype, device: torch.device | str
) -> ModelWeights:
    """Reads talker and code predictor. Raises `ModelError` (`model.bad_checkpoint`) with the name of a wrong
    tensor."""
    vocab = config.talker.vocab
    hidden = config.talker.hidden
    text = config.text_hidden
    predictor = config.predictor
    residuals = range(config.codebooks - 1)

    take = Loader(source, "talker.", dtype, torch.device(device))

    def linear(name: str, *shape: int) -> tuple[Tensor, Tensor]:
        return take(f"{name}.weight", *shape), take(f"{name}.bias", shape[0])

    tables = [
        take("model.codec_embedding.weight", vocab, hidden),
        *(
            take(f"code_predictor.model.codec_embedding.{index}.weight", predictor.vocab, hidden)
            for index in residuals
        ),
    ]
    project = (
        linear("code_predictor.small_to_mtp_projection", predictor.hidden, hidden)
        if config.needs_projection
        else None
    )
    return ModelWeights(
        talker=take_stack(take.at("model."), config.talker),
        text_embedding=take("model.text_embedding.weight", config.text_vocab, text),
        fc1=linear("text_projection.linear_fc1", text, text),
        fc2=linear("text_projection.linear_fc2", hidden, text),
        head=take("codec_head.weight", vocab, hidden),
        predictor=take_stack(take.at("code_predictor.model."), predictor),
        heads=torch.stack(
            [
                take(f"code_predictor.lm_head.{index}.weight", predictor.vocab, predictor.hidden)
                for index in residuals
            ]
        ),
        projection=project,
        codec_table=torch.cat((*tables, tables[0].new_zeros(1, hidden))),
        codec_starts=torch.tensor(
            [0, *(vocab + index * predictor.vocab for index in residuals)], device=device
        ),
    )


class TextTable:
    """Projected text embeddings, [text_vocab + 1, hidden]; the last row is zeros, for positions without text.

    On a GPU the whole vocabulary is projected at once. On a CPU rows are computed when first used, in products of
    `ROW_BLOCK` rows, so that a row's bits do not depend on the other requested rows.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        vocab = weights.text_embedding.shape[0]
        self.rows = weights.text_embedding.new_empty(vocab + 1, weights.head.shape[1])
        self.rows[vocab] = 0
        self._known = torch.zeros(vocab, dtype=torch.bool)
        self._complete = False
        if self.rows.is_cuda:
            self.ensure(np.arange(vocab), block=4096)
        self._complete = self.rows.is_cuda

    def ensure(self, *ids: IntArray, block: int = ROW_BLOCK) -> None:
        """Computes missing rows, in blocks of `block`; ids: int64 [n], each below the vocabulary size, or negative
        for a position without text."""
        if self._complete:
            return
        wanted = torch.from_numpy(np.unique(np.concatenate(ids)))
        wanted = wanted[wanted >= 0]
        missing = wanted[~self._known[wanted]]
        for part in missing.split(block) if len(missing) else ():
            padded = functional.pad(part, (0, block - len(part))).to(self.rows.device)
            inner = functional.silu(
                functional.linear(self._weights.text_embedding[padded], *self._weights.fc1)
            )
            self.rows[part.to(self.rows.device)] = functional.linear(inner, *self._weights.fc2)[: len(part)]
        self._known[missing] = True


#: Maximum positions of prompts that are embedded together: the rows of all their codebooks take 64 MiB at the
#: 0.6B's width.
EMBEDDED_POSITIONS = 2048


class Qwen3TTSModel(FrameModel):
    """The talker is the backbone, the code predictor the depth; a text embedding is added to the
    embeddings of each frame."""

    def __init__(self, config: Qwen3TTSConfig, weights: ModelWeights, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.text = TextTable(weights)
        talker = config.talker
        pad = config.text_ids.tts_pad_token_id
        starts = weights.codec_starts
        inputs = weights.codec_table
        #: The first row of each codebook and of the text in their tables, and the rows of positions without them.
        self._starts = np.append(starts.numpy(force=True), 0)
        self._empty = np.append(np.full(len(starts), len(weights.codec_table) - 1), config.text_vocab)
        if weights.projection is not None:
            # Projected once instead of at every step.
            inputs = torch.cat([functional.linear(part, *weights.projection) for part in inputs.split(4096)])
        depth = weights.predictor.tensors(config.predictor, config.codebooks)
        super().__init__(
            FrameTensors(
                # Prompts are padded to whole pages, and the maximum context may end within a page.
                backbone=weights.talker.tensors(talker, max_context + LARGEST_PAGE),
                head=weights.head,
                draw=DrawRules((config.ids.codec_eos_token_id,), talker.vocab - CONTROL_IDS),
                feedback=Feedback(weights.codec_table, starts, self.text.rows),
                depth=DepthTensors(depth, weights.heads, inputs, starts, weights.projection),
            ),
            pad,
        )
        self.text.ensure(np.array([pad]))

    def embed_all(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Embeds prompts in their order, in groups of up to `EMBEDDED_POSITIONS` positions, with one set of launches
        for each group; a longer prompt has its own."""
        groups = list[list[Prompt]]()
        room = 0
        for prompt in prompts:
            if len(prompt) > room:
                groups.append([])
                room = EMBEDDED_POSITIONS
            groups[-1].append(prompt)
            room -= len(prompt)
        return [
            embedded
            for group in groups
            for embedded in self.embed(*group).split([len(prompt) for prompt in group])
        ]

    def embed(self, *prompts: Prompt) -> Tensor:
        """Embeddings of prompts one after another, [positions, hidden]: projected text, plus the sum of the
        codec embeddings, plus the voice vector."""
        for prompt in prompts:
            self.text.ensure(prompt.text, prompt.trailing)
        ids = np.concatenate([np.column_stack((prompt.codes, prompt.text)) for prompt in prompts])
        rows = to_device(np.where(ids >= 0, ids + self._starts, self._empty), self.device)
        codec = self.weights.codec_table[rows[:, :-1]].sum(dim=1)
        firsts = accumulate((len(prompt) for prompt in prompts), initial=0)
        voices = [(first, *prompt.voice) for first, prompt in zip(firsts, prompts) if prompt.voice]
        if voices:
            at = to_device([first + place for first, place, _ in voices], self.device)
            vectors = to_device(np.stack([vector for _, _, vector in voices]), self.device)
            codec.index_copy_(0, at, vectors.to(self.dtype))
        return self.text.rows[rows[:, -1]] + codec

    def take_text(self, ids: IntArray) -> None:
        """See `FrameModel`."""
        self.text.ensure(ids)
