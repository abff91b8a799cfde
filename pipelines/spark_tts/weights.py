"""The speech LM of a SparkTTS checkpoint as our engine takes it: LLM/ under our names, every tensor accounted for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipelines.nn.checkpoint import Checkpoint, Shapes, TensorSource, bad_checkpoint
from pipelines.nn.stack import StackWeights, take_stack
from pipelines.spark_tts.config import LLM, LmConfig, SparkConfig
from pipelines.spark_tts.prompt import Vocabulary

#: Kernels take heads of a multiple of so many rows.
ROW_STEP = 64


@dataclass(frozen=True, slots=True)
class Drawable:
    """The ids that the LM can write: a code of the engine is a place in them."""

    #: int64 [codes], in order.
    ids: NDArray[np.int64]
    #: The codes that end a sequence.
    ends: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the head, those that are never drawn included."""
        return -(-len(self.ids) // ROW_STEP) * ROW_STEP

    @classmethod
    def of(cls, vocabulary: Vocabulary, lm: LmConfig) -> Drawable:
        """Everything but pieces of text, which the model reads and never writes: they would make its head ten times as large.

        Raises `ModelError` (`model.bad_checkpoint`) for an id that the LM does not know.
        """
        ends = {lm.eos, vocabulary.control("end_semantic_token")}
        ids = np.array(sorted(vocabulary.marks | ends), np.int64)
        if ids[-1] >= lm.vocab:
            raise bad_checkpoint(f"The tokenizer of {LLM} has the id {ids[-1]}, but the LM knows {lm.vocab} ids.")
        return cls(ids, tuple(np.searchsorted(ids, sorted(ends)).tolist()))


@dataclass(frozen=True, slots=True)
class LmWeights:
    stack: StackWeights
    #: [vocabulary, hidden], the embeddings of all ids.
    table: Tensor
    #: [rows, hidden]: the embeddings of what can be drawn, and the head that draws it, both filled up with zeros; one tensor where the
    #: head is tied.
    codes: Tensor
    head: Tensor


def take_weights(source: TensorSource, lm: LmConfig, drawable: Drawable, dtype: torch.dtype, device: torch.device | str) -> LmWeights:
    """Reads the LM. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor at fault."""
    table = source.take("model.embed_tokens.weight", (lm.vocab, lm.hidden), dtype, device)
    stack = take_stack(source, "model.", lm, dtype, device, head_norm=False, qkv_bias=True)
    codes = _rows(table, drawable)
    head = codes if lm.tied else _rows(source.take("lm_head.weight", (lm.vocab, lm.hidden), dtype, device), drawable)
    return LmWeights(stack, table, codes, head)


def check_weights(config: SparkConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when LLM/ lacks one, holds one too many, or of another shape."""
    wanted = Shapes()
    take_weights(wanted, config.lm, Drawable(np.zeros(0, np.int64), ()), torch.bfloat16, "meta")
    with _opened(config) as checkpoint:
        checkpoint.require(wanted.taken)
        checkpoint.finish()


def load_weights(config: SparkConfig, drawable: Drawable, dtype: torch.dtype, device: torch.device) -> LmWeights:
    """The LM of a checkpoint folder. Raises as `take_weights`, and for a tensor too many."""
    with _opened(config) as checkpoint:
        weights = take_weights(checkpoint, config.lm, drawable, dtype, device)
        checkpoint.finish()
    return weights


def _opened(config: SparkConfig) -> Checkpoint:
    """LLM/ without what may be stored and is not needed."""
    checkpoint = Checkpoint.open(config.folder / LLM)
    checkpoint.ignore("*rotary_emb*", *(["lm_head.weight"] if config.lm.tied else []))
    return checkpoint


def _rows(table: Tensor, drawable: Drawable) -> Tensor:
    """The rows of a table that can be drawn, filled up with zeros: [rows, hidden]."""
    kept = table[torch.from_numpy(drawable.ids).to(table.device)]
    return functional.pad(kept, (0, 0, 0, drawable.rows - len(kept)))
