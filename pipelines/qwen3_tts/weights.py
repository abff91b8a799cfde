"""The tensors of a Qwen3-TTS checkpoint under our names, every one accounted for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pipelines.nn.checkpoint import TensorSource
from pipelines.nn.stack import StackWeights, take_stack
from pipelines.qwen3_tts.config import Qwen3TTSConfig

#: Rows of one matrix product where a result must not depend on how many rows are asked for together.
ROW_BLOCK = 32


@dataclass(frozen=True, slots=True)
class TalkerWeights:
    stack: StackWeights
    #: [text_vocab, text_hidden] and the two layers of `text_projection`.
    text_embedding: Tensor
    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]
    #: [codec vocab, hidden].
    head: Tensor


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    stack: StackWeights
    #: [residuals, codes, hidden].
    heads: Tensor
    #: `small_to_mtp_projection`, None where talker and predictor are equally wide.
    projection: tuple[Tensor, Tensor] | None

    def project(self, x: Tensor) -> Tensor:
        """Talker width to predictor width; x: [..., talker hidden]."""
        return x if self.projection is None else functional.linear(x, *self.projection)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    talker: TalkerWeights
    predictor: PredictorWeights
    #: [codec vocab + residuals * codes + 1, talker hidden]: the embeddings of all codebooks one after the other, then zeros.
    codec_table: Tensor
    #: int64 [codebooks]: the first row of each codebook.
    codec_starts: Tensor


def take_weights(source: TensorSource, config: Qwen3TTSConfig, dtype: torch.dtype, device: torch.device | str) -> ModelWeights:
    """Reads talker and code predictor. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor at fault."""
    hidden, text = config.talker.hidden, config.text_hidden
    predictor, residuals = config.predictor, config.codebooks - 1

    def take(name: str, *shape: int) -> Tensor:
        return source.take(f"talker.{name}", shape, dtype, device)

    talker = TalkerWeights(
        stack=take_stack(source, "talker.model.", config.talker, dtype, device),
        text_embedding=take("model.text_embedding.weight", config.text_vocab, text),
        fc1=(take("text_projection.linear_fc1.weight", text, text), take("text_projection.linear_fc1.bias", text)),
        fc2=(take("text_projection.linear_fc2.weight", hidden, text), take("text_projection.linear_fc2.bias", hidden)),
        head=take("codec_head.weight", config.talker.vocab, hidden),
    )
    projection = None
    if config.needs_projection:
        at = "code_predictor.small_to_mtp_projection."
        projection = take(f"{at}weight", predictor.hidden, hidden), take(f"{at}bias", predictor.hidden)
    heads = [take(f"code_predictor.lm_head.{index}.weight", predictor.vocab, predictor.hidden) for index in range(residuals)]
    tables = [take("model.codec_embedding.weight", config.talker.vocab, hidden)]
    for index in range(residuals):
        tables.append(take(f"code_predictor.model.codec_embedding.{index}.weight", predictor.vocab, hidden))
    starts = [0, *(config.talker.vocab + index * predictor.vocab for index in range(residuals))]
    return ModelWeights(
        talker=talker,
        predictor=PredictorWeights(
            take_stack(source, "talker.code_predictor.model.", predictor, dtype, device), torch.stack(heads), projection
        ),
        codec_table=torch.cat((*tables, tables[0].new_zeros(1, hidden))),
        codec_starts=torch.tensor(starts, device=device),
    )


class TextTable:
    """Text embeddings behind `text_projection`, [text_vocab + 1, hidden]; the last row is zeros, for positions without text.

    The projection works token by token. A row's bits do not depend on the rows asked for with it: every product has
    `ROW_BLOCK` rows. On a GPU the whole vocabulary is projected at once; on CPU rows are filled in when first asked for.
    """

    def __init__(self, talker: TalkerWeights) -> None:
        self._talker = talker
        vocab, hidden = talker.text_embedding.shape[0], talker.head.shape[1]
        self.rows = talker.text_embedding.new_empty(vocab + 1, hidden)
        self.rows[vocab] = 0
        self._known = torch.zeros(vocab, dtype=torch.bool)
        self._complete = self.rows.is_cuda
        if self._complete:
            self._fill(torch.arange(vocab), 4096)

    def ensure(self, ids: Tensor) -> None:
        """Makes sure that these rows are there; ids: int64 [n] on CPU, each below the vocabulary."""
        if self._complete:
            return
        ids = ids.unique()
        missing = ids[~self._known[ids]]
        if len(missing):
            self._fill(missing, ROW_BLOCK)

    def _fill(self, ids: Tensor, block: int) -> None:
        for part in ids.split(block):
            padded = functional.pad(part, (0, block - len(part))).to(self.rows.device)
            inner = functional.silu(functional.linear(self._talker.text_embedding[padded], *self._talker.fc1))
            self.rows[part.to(self.rows.device)] = functional.linear(inner, *self._talker.fc2)[: len(part)]
        self._known[ids] = True


def predictor_inputs(weights: ModelWeights) -> Tensor:
    """The codec table behind `small_to_mtp_projection`: [rows, predictor hidden], projected once instead of at every step."""
    if weights.predictor.projection is None:
        return weights.codec_table
    return torch.cat([weights.predictor.project(part) for part in weights.codec_table.split(4096)])
