"""The speech LM of SparkTTS on the engine `native`, which draws one id in each frame."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.frame import DrawRules, Feedback, FrameTensors
from kernels.registry import to_device
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import FrameModel
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions
from pipelines.engine.state import LARGEST_PAGE
from pipelines.nn.checkpoint import Checkpoint, Loader, StackWeights, TensorSource, bad_checkpoint, take_stack
from pipelines.request import IntArray
from pipelines.spark_tts.config import BICODEC, LLM, WAV2VEC2, LmConfig, SparkConfig
from pipelines.spark_tts.prompt import Vocabulary
from pipelines.tokens import TokenPrompt

#: Kernels need a head whose number of rows is a multiple of this.
ROW_STEP = 64


class Drawable(NamedTuple):
    """The ids that the LM can write. The engine's codes are indices into them."""

    #: int64 [codes], in order.
    ids: IntArray
    #: The codes that end a sequence.
    ends: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the head, including padding rows, which are never drawn."""
        return -(-len(self.ids) // ROW_STEP) * ROW_STEP

    @classmethod
    def of(cls, vocabulary: Vocabulary, lm: LmConfig) -> Drawable:
        """All ids except those of text, which the model reads but never writes. They would make its head ten
        times as large.

        Raises `ModelError` (`model.bad_checkpoint`) for an id that the LM does not know.
        """
        ends = {lm.eos_token_id, vocabulary.controls["end_semantic_token"]}
        ids = np.array(sorted(vocabulary.non_text | ends), np.int64)
        if ids[-1] >= lm.vocab:
            raise bad_checkpoint(
                f"The tokenizer of {LLM} has the id {ids[-1]}, but the LM knows {lm.vocab} ids."
            )
        return cls(ids, tuple(np.searchsorted(ids, sorted(ends)).tolist()))


class LmWeights(NamedTuple):
    stack: StackWeights
    #: [vocabulary, hidden], the embeddings of all ids.
    table: Tensor
    #: [rows, hidden]: the embeddings of the ids that can be drawn, and the head that draws them, both padded
    #: with zeros; the same tensor if the head is tied.
    codes: Tensor
    head: Tensor


def take_weights(
    source: TensorSource, lm: LmConfig, drawable: Drawable, dtype: torch.dtype, device: torch.device | str
) -> LmWeights:
    """Reads the LM. Raises `ModelError` (`model.bad_checkpoint`) that names a missing or wrong tensor."""
    load = Loader(source, "", dtype, torch.device(device))
    table = load("model.embed_tokens.weight", lm.vocab, lm.hidden)
    stack = take_stack(load.at("model."), lm, head_norm=False, qkv_bias=True)
    codes = _rows(table, drawable)
    head = codes if lm.tie_word_embeddings else _rows(load("lm_head.weight", lm.vocab, lm.hidden), drawable)
    return LmWeights(stack, table, codes, head)


def load_weights(
    config: SparkConfig, drawable: Drawable, dtype: torch.dtype, device: torch.device | str
) -> LmWeights:
    """The LM of a checkpoint folder. Raises as `take_weights`, and for an unknown tensor."""
    with Checkpoint(config.folder / LLM) as checkpoint:
        weights = take_weights(checkpoint, config.lm, drawable, dtype, device)
        checkpoint.ignore("*rotary_emb*", *(["lm_head.weight"] if config.lm.tie_word_embeddings else []))
        checkpoint.finish()
    return weights


def _rows(table: Tensor, drawable: Drawable) -> Tensor:
    """The rows of a table that can be drawn, padded with zeros: [rows, hidden]."""
    kept = table[torch.from_numpy(drawable.ids).to(table.device)]
    return functional.pad(kept, (0, 0, 0, drawable.rows - len(kept)))


class SparkModel(FrameModel):
    """A Qwen2 whose head has only the rows that can be drawn. The drawn id is its next input."""

    def __init__(self, lm: LmConfig, weights: LmWeights, drawable: Drawable, max_context: int) -> None:
        # Prompts are padded to whole pages, and the maximum context may end within a page.
        backbone = weights.stack.tensors(lm, max_context + LARGEST_PAGE)
        starts = torch.zeros(1, dtype=torch.int64, device=weights.table.device)
        draw = DrawRules(drawable.ends, suppress_from=len(drawable.ids))
        super().__init__(FrameTensors(backbone, weights.head, draw, Feedback(weights.codes, starts)))
        self._table = weights.table

    def embed(self, prompt: TokenPrompt) -> Tensor:
        """Embeddings [length, hidden] of a prompt."""
        return self._table[to_device(np.asarray(prompt.ids, np.int64), self.device)]


#: Possible numbers of delivered tokens, 50 per second, in a stream's chunks and in its first chunk. The codec
#: decodes up to 76 more tokens for each chunk.
CHUNK_TOKENS = (8, 16, 32, 64, 96)
FIRST_TOKENS = (8, 16, 32)
#: Frames that a GPU computes in each turn of the host: a frame of 512 rows takes 2 ms, the host's own work for a
#: turn 5 ms.
_TOKENS_PER_TURN = 4
#: Memory that BiCodec's decoder needs for a token in bfloat16: four tensors of its widest part. Calculated,
#: not measured.
_DECODED_TOKEN_BYTES = 4 * 61_440


def plan_sizes(
    config: SparkConfig, options: NativeModelOptions, device: torch.device, dtype: torch.dtype
) -> EngineOptions:
    """Sizes of the engine, before anything is loaded. Raises as `NativeModelOptions.plan`."""
    lm = config.lm
    width = dtype.itemsize
    folder = config.folder
    with Checkpoint(folder / LLM) as model, Checkpoint(folder / BICODEC) as codec:
        weights = model.values() * width + codec.values() * torch.float32.itemsize
    weights += sum(
        path.stat().st_size
        for path in (folder / WAV2VEC2).iterdir()
        if path.suffix in (".bin", ".safetensors")
    )
    needs = MemoryNeeds(
        # The head is estimated to be as large as the embeddings; it has at most their rows.
        weights=weights + lm.vocab * lm.hidden * width,
        # The graphs of all buckets together have up to three rows for a slot. A row has logits and the widest
        # state of a layer, each in float32.
        slot=3 * 4 * (lm.vocab + 2 * lm.intermediate),
        page=options.page_size * lm.cached_values * width,
        decoded_frame=_DECODED_TOKEN_BYTES,
    )
    sizes = options.plan(needs, device, lm.max_positions, frame_seconds=1 / config.tokens_per_second)
    # On a GPU several frames in each turn hide the time of the host.
    turn = _TOKENS_PER_TURN if device.type == "cuda" else sizes.frames_per_turn
    return replace(sizes, chunk_frames=CHUNK_TOKENS, first_frames=FIRST_TOKENS, frames_per_turn=turn)
