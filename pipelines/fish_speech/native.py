"""Fish Speech S2 on our own engine: its sizes, its model, and its sequences of frames."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.opening import MemoryNeeds, context_of, open_executor, plan_engine
from pipelines.engine.prefixes import PromptPrefix
from pipelines.engine.token_host import NativeHost
from pipelines.fish_speech.config import CODEC_WEIGHTS, FishConfig
from pipelines.fish_speech.model import FishModel, load_weights
from pipelines.fish_speech.prompt import Prompt, prompt_of
from pipelines.nn.checkpoint import Checkpoint
from pipelines.nn.options import NativeModelOptions

#: Of the codec's decoder in bfloat16: four tensors of its widest part, 96 channels at every sample of a frame. Computed, not measured.
_DECODED_FRAME_BYTES = 4 * 2 * 96 * 2048
#: Of a prefix: as many as make two that are equal by chance no matter.
_DIGEST_BYTES = 32


def plan_sizes(config: FishConfig, options: NativeModelOptions, device: torch.device, dtype: torch.dtype, context: int) -> EngineOptions:
    """Sizes of the engine, before anything is loaded; `context`: positions of a sequence where nobody chose.

    Raises `ConfigError` (`config.invalid`) for slots that the GPU's memory does not hold, and a context that is too short.
    """
    return plan_engine(
        memory_needs(config, dtype, options.page_size),
        device,
        context_of(options.context(context), config.max_positions),
        **options.sizes,
        frame_seconds=1 / config.frames_per_second,
    )


def memory_needs(config: FishConfig, dtype: torch.dtype, page_size: int) -> MemoryNeeds:
    """What a checkpoint takes of a GPU."""
    slow, fast, width = config.slow, config.fast, dtype.itemsize
    with Checkpoint.open(config.folder) as checkpoint:
        values = checkpoint.values()
    span = 1 << (config.codebooks - 1).bit_length()
    # A row's keys and values of a frame in the fast AR, whose positions are filled up to a power of two; other buffers take less again.
    row = 2 * 2 * fast.layers * span * fast.kv_width * width
    # The codec's file is in float32, and its encoder stays in it. The head is a copy of rows of the embeddings.
    weights = values * width + (config.folder / CODEC_WEIGHTS).stat().st_size + (len(config.semantic) + 64) * slow.dim * width
    return MemoryNeeds(
        weights=weights,
        # In the graphs of all buckets, which have up to three rows for a slot: logits in float32, and the widest state of a layer.
        slot=3 * (row + 4 * (len(config.semantic) + config.codebooks * fast.vocab + 2 * max(slow.intermediate, fast.intermediate))),
        page=2 * slow.layers * slow.kv_width * page_size * width,
        decoded_frame=_DECODED_FRAME_BYTES,
    )


def load_model(config: FishConfig, sizes: EngineOptions, device: torch.device, dtype: torch.dtype) -> FishModel:
    """Reads the dual AR. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor at fault."""
    with torch.inference_mode():
        return FishModel(config, load_weights(config, dtype, device), sizes.max_context)


def open_host(
    config: FishConfig, model: FishModel, sizes: EngineOptions, options: NativeModelOptions, stage: CodecStage[CodecState]
) -> NativeHost:
    """The engine of a loaded model, whose speech goes on to `stage`. Raises `ConfigError` for an executor that the device cannot have."""
    executor = open_executor(model, sizes, options.executor, options.reproducible, options.streams)
    ids = np.array([*config.semantic, config.end], np.int64)
    engine = Engine(executor, sizes, options.room(sizes.slots, model.device), stage)
    prefixes = partial(shared_prefixes, semantic=config.semantic)
    return NativeHost(engine, ids, (len(config.semantic),), prompt_of, prefixes, config.codebooks)


def shared_prefixes(prompt: Prompt, semantic: range) -> Sequence[PromptPrefix]:
    """The positions that other prompts begin with too, those of its voice and of its dialogue so far, known by ids and codes of frames."""
    length = max(prompt.shared, default=0)
    # A row a position, so that the bytes before an end do not depend on the ends before it.
    rows = np.zeros((length, 1 + prompt.codes.shape[1]), np.int64)
    rows[:, 0] = prompt.ids[:length]
    frames = (rows[:, 0] >= semantic.start) & (rows[:, 0] < semantic.stop)
    rows[frames, 1:] = prompt.codes[: np.count_nonzero(frames)]
    hasher, start, prefixes = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, list[PromptPrefix]()
    for end in prompt.shared:
        hasher.update(rows[start:end].tobytes())
        prefixes.append(PromptPrefix(hasher.copy().digest(), end))
        start = end
    return prefixes
