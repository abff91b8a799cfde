"""Fish Speech S2 on either engine: the native engine's sizes and prefixes, and the specification and prefix
salts for vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, check_executor
from pipelines.engine.scheduler import PromptPrefix
from pipelines.fish_speech.config import CODEC_WEIGHTS, FishConfig
from pipelines.fish_speech.model import drawn_ids
from pipelines.fish_speech.prompt import Prompt, columns, prompt_of
from pipelines.nn.checkpoint import Checkpoint
from pipelines.vllm_engine.library import PRIVATE, SALTS, ModelSpec

#: Default maximum positions of a sequence: a dialogue of ten minutes with its references and texts.
_CONTEXT = 16_384
#: vLLM's share of the GPU's memory. The LM has nine billion bytes; the codec needs the rest.
_MEMORY_SHARE = 0.6
#: Memory that the codec's decoder needs for a frame in bfloat16: four tensors of its widest part, 96 channels
#: at every sample. Calculated, not measured.
_DECODED_FRAME_BYTES = 4 * 2 * 96 * 2048
#: Size of a prefix's digest, large enough that different prefixes never have equal ones.
_DIGEST_BYTES = 32
#: Size of the digest of a run of speech, for vLLM's prefix cache.
_SALT_BYTES = 16
#: Key of a request's extras on vLLM: the codes at the semantic positions of its prompt, int16 [positions,
#: codebooks] as bytes.
PROMPT_CODES = "codes"


def plan_sizes(
    config: FishConfig, options: NativeModelOptions, device: torch.device, dtype: torch.dtype
) -> EngineOptions:
    """Sizes of the engine, before anything is loaded. Raises as `check_executor` and
    `NativeModelOptions.plan`."""
    stacks = [config.slow, config.fast]
    check_executor(device, options.executor, options.reproducible, options.page_size, stacks)
    needs = memory_needs(config, dtype, options.page_size)
    if not options.decodes:
        needs = replace(needs, decoded_frame=1)
    return options.plan(
        needs, device, config.slow.max_positions, _CONTEXT, frame_seconds=1 / config.frames_per_second
    )


def memory_needs(config: FishConfig, dtype: torch.dtype, page_size: int) -> MemoryNeeds:
    """The GPU memory that a checkpoint needs."""
    slow, fast, width = config.slow, config.fast, dtype.itemsize
    with Checkpoint.open(config.folder) as checkpoint:
        values = checkpoint.values()
    span = 1 << (config.codebooks - 1).bit_length()
    # A row's keys and values in the fast AR, whose positions are padded to a power of two; the row's other
    # buffers are smaller.
    row = 2 * span * fast.cached_values * width
    # The codec's file is in float32, and its encoder stays in float32. The head is a copy of rows of the
    # embeddings.
    weights = (
        values * width
        + (config.folder / CODEC_WEIGHTS).stat().st_size
        + (len(config.semantic) + 64) * slow.hidden * width
    )
    return MemoryNeeds(
        weights=weights,
        # In the graphs of all buckets, which have up to three rows for a slot: logits in float32, and the
        # widest state of a layer.
        slot=3
        * (
            row
            + 4
            * (
                len(config.semantic)
                + config.codebooks * fast.vocab
                + 2 * max(slow.intermediate, fast.intermediate)
            )
        ),
        page=page_size * slow.cached_values * width,
        decoded_frame=_DECODED_FRAME_BYTES,
    )


def native_host(config: FishConfig, engine: Engine) -> NativeHost:
    """The host of this model's sequences on the native engine."""
    ids = np.array(drawn_ids(config), np.int64)
    prefixes = partial(shared_prefixes, semantic=config.semantic)
    return NativeHost(engine, ids, prompt_of, prefixes, config.codebooks)


def shared_prefixes(prompt: Prompt, semantic: range) -> Sequence[PromptPrefix]:
    """The prefixes of a prompt that other prompts can share: its voice, and the dialogue up to each turn.
    Digests of ids and codes identify them."""
    # One row for each position, so that the bytes of a prefix do not depend on its shorter prefixes.
    rows = np.ascontiguousarray(columns(prompt, semantic).T)
    hasher, start, prefixes = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, list[PromptPrefix]()
    for end in prompt.shared:
        hasher.update(rows[start:end].tobytes())
        prefixes.append(PromptPrefix(hasher.copy().digest(), end))
        start = end
    return prefixes


def model_spec(config: FishConfig, share_prefixes: bool | None = None, **engine: Any) -> ModelSpec:
    """The model's specification for vLLM, with further arguments of its engine."""
    return ModelSpec(
        config.folder,
        qwen3_config(config),
        "FishForCausalLM",
        codes_per_step=1 + config.codebooks,
        share_prefixes=share_prefixes,
        memory_share=_MEMORY_SHARE,
        context=_CONTEXT,
        max_positions=config.slow.max_positions,
        engine=engine,
        prompt_extra=lambda request: as_extra(prompt_of(request), config.semantic),
    )


def qwen3_config(config: FishConfig) -> dict[str, Any]:
    """The slow AR's config with the keys of transformers."""
    slow = config.slow
    return {
        "vocab_size": slow.vocab,
        "hidden_size": slow.hidden,
        "intermediate_size": slow.intermediate,
        "num_hidden_layers": slow.layers,
        "num_attention_heads": slow.heads,
        "num_key_value_heads": slow.kv_heads,
        "head_dim": slow.head_dim,
        "max_position_embeddings": slow.max_positions,
        "rms_norm_eps": slow.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": slow.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "eos_token_id": config.end,
    }


def as_extra(prompt: Prompt, semantic: range) -> dict[str, Any]:
    """The extras of a request with this prompt: its codes, and digests of those on which the KV depends.

    Each run of speech (the references, an answer) has a digest of its codes, so prompts that begin alike
    share their KV. The KV of drawn frames is private to the request, because different frames may have the
    same ids.
    """
    codes, ids = prompt.codes.astype(np.int16), np.array(prompt.ids)
    places = np.flatnonzero((ids >= semantic.start) & (ids < semantic.stop))
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    runs = zip(np.split(places, breaks), np.split(codes, breaks))
    salts = [
        (int(run[0]), hashlib.blake2b(spoken.tobytes(), digest_size=_SALT_BYTES).digest())
        for run, spoken in runs
        if len(run)
    ]
    return {PROMPT_CODES: codes.tobytes(), SALTS: salts, PRIVATE: True}
