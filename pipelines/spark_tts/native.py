"""SparkTTS on our own engine: its sizes, its model, and its sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, context_of, open_executor, plan_engine
from pipelines.engine.token_host import NativeHost
from pipelines.nn.checkpoint import Checkpoint
from pipelines.nn.options import NativeModelOptions
from pipelines.spark_tts.config import BICODEC, LLM, WAV2VEC2, SparkConfig
from pipelines.spark_tts.model import Prompt, SparkModel
from pipelines.spark_tts.prompt import Vocabulary
from pipelines.spark_tts.streaming_decoder import Voice
from pipelines.spark_tts.weights import Drawable, load_weights

#: Positions of a sequence: a minute of reference, a minute of speech, and their texts.
CONTEXT = 8192
#: Heard tokens of a stream's chunks, 50 a second, and those that the first chunk may have: a window of the codec has 76 tokens more.
CHUNK_TOKENS, FIRST_TOKENS = (8, 16, 32, 64, 96), (8, 16, 32)
#: Tokens of a turn on a GPU: a frame of 512 rows takes 2 ms there, a turn of the host 5.
_TOKENS_PER_TURN = 4
#: Of BiCodec's decoder in bfloat16: four tensors of its widest part. Computed, not measured.
_DECODED_TOKEN_BYTES = 4 * 61_440


@dataclass(frozen=True, slots=True)
class NativeLm:
    """The LM in the memory of its device, and the sizes of its engine."""

    model: SparkModel
    drawable: Drawable
    sizes: EngineOptions


def plan_sizes(config: SparkConfig, options: NativeModelOptions, device: torch.device, dtype: torch.dtype) -> EngineOptions:
    """Sizes of the engine, before anything is loaded.

    Raises `ConfigError` (`config.invalid`) for slots that the GPU's memory does not hold, and a context that is too short.
    """
    context = context_of(options.context(CONTEXT), config.lm.max_positions)
    sizes = plan_engine(
        memory_needs(config, dtype, options.page_size),
        device,
        context,
        **options.sizes,
        frame_seconds=1 / config.tokens_per_second,
    )
    return sized(sizes, device)


def sized(sizes: EngineOptions, device: torch.device) -> EngineOptions:
    """Sizes of an engine whose frames are tokens: chunks of streams, and on a GPU turns that hide the host."""
    turn = _TOKENS_PER_TURN if device.type == "cuda" else sizes.frames_per_turn
    return replace(sizes, chunk_frames=CHUNK_TOKENS, first_frames=FIRST_TOKENS, frames_per_turn=turn)


def memory_needs(config: SparkConfig, dtype: torch.dtype, page_size: int) -> MemoryNeeds:
    """What a checkpoint takes of a GPU."""
    lm, width = config.lm, dtype.itemsize
    with Checkpoint.open(config.folder / LLM) as model, Checkpoint.open(config.folder / BICODEC) as codec:
        weights = model.values() * width + codec.values() * torch.float32.itemsize
    weights += sum(path.stat().st_size for path in (config.folder / WAV2VEC2).iterdir() if path.suffix in (".bin", ".safetensors"))
    return MemoryNeeds(
        # The head is a copy of rows of the embeddings, and no larger than they.
        weights=weights + lm.vocab * lm.hidden * width,
        # In the graphs of all buckets, which have up to three rows for a slot: logits in float32, and the widest state of a layer.
        slot=3 * 4 * (lm.vocab + 2 * lm.intermediate),
        page=2 * lm.layers * lm.kv_heads * lm.head_dim * page_size * width,
        decoded_frame=_DECODED_TOKEN_BYTES,
    )


def load_lm(config: SparkConfig, vocabulary: Vocabulary, sizes: EngineOptions, device: torch.device, dtype: torch.dtype) -> NativeLm:
    """Reads LLM/. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor at fault."""
    drawable = Drawable.of(vocabulary, config.lm)
    with torch.inference_mode():
        model = SparkModel(config.lm, load_weights(config, drawable, dtype, device), drawable, sizes.max_context)
    return NativeLm(model, drawable, sizes)


def open_host(lm: NativeLm, options: NativeModelOptions, stage: CodecStage[Voice]) -> NativeHost:
    """The engine of a loaded LM, whose speech goes on to `stage`. Raises `ConfigError` for an executor that the device cannot have."""
    executor = open_executor(lm.model, lm.sizes, options.executor, options.reproducible, options.streams)
    engine = Engine(executor, lm.sizes, options.room(lm.sizes.slots, lm.model.device), stage)
    drawable = lm.drawable
    return NativeHost(engine, drawable.ids, drawable.ends, lambda request: Prompt(np.asarray(request.prompt_ids, np.int64)))
