"""Fish Speech S2 at its published size with dummy weights, and at a tiny size that a CPU can run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_models.weights import DummyWeights
from kernels.frame import StackTensors
from pipelines.engine.state import Placement, SamplingParams, SlotState
from pipelines.fish_speech.codec import Codec, codec_from
from pipelines.fish_speech.config import CodecConfig, CodecStackConfig, FishConfig
from pipelines.fish_speech.model import drawn_ids, frame_tensors, take_fast
from pipelines.nn.checkpoint import Loader
from pipelines.vllm_engine.engine_frames import EngineFrames

_TEXT_IDS = 151_643
CONTROLS = (
    "<|pad|>", "<|phoneme_start|>", "<|phoneme_end|>", "<|text|>", "<|voice|>", "<|interleave|>", "<|audio_start|>", "<|audio_end|>",
    "<|audio_pad|>",
)  # fmt: skip
_STACK = CodecStackConfig(1, 32, 1, 32, 48, 8)
TINY_CODEC = CodecConfig(
    encoder_dim=2,
    encoder_stacks=(None, None, None, None),
    decoder_dim=16,
    latent=32,
    residual_codes=16,
    semantic_codes=64,
    pre=_STACK,
    post=_STACK,
)


def write_checkpoint(folder: Path, tiny: bool = False) -> FishConfig:
    """A folder with the published config.json and no weights, for vLLM's `load_format="dummy"`; `tiny` is
    for trying things out."""
    slow = {
        "dim": 2560,
        "n_layer": 36,
        "n_head": 32,
        "n_local_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
    }
    fast, codes, text = {**slow, "n_layer": 4}, 4096, _TEXT_IDS
    if tiny:
        slow = {
            "dim": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_local_heads": 1,
            "head_dim": 32,
            "intermediate_size": 96,
        }
        fast, codes, text = {**slow, "n_layer": 1}, 64, 300
    first = text + 3 + len(CONTROLS)
    shared = {"rope_base": 1_000_000, "norm_eps": 1e-6}
    content = {
        "model_type": "fish_qwen3_omni",
        "eos_token_id": text + 2,
        "semantic_start_token_id": first,
        "semantic_end_token_id": first + codes - 1,
        # The published vocabulary has two spare ids behind the semantic tokens.
        "text_config": {
            **slow,
            **shared,
            "vocab_size": first + codes + 2,
            "max_seq_len": 32_768,
            "attention_qk_norm": True,
        },
        "audio_decoder_config": {
            **fast,
            **shared,
            "vocab_size": codes,
            "num_codebooks": 10,
            "text_dim": slow["dim"],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = FishConfig.from_folder(folder)
    return replace(config, codec=TINY_CODEC) if tiny else config


def dummy_codec(
    config: FishConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None
) -> Codec:
    return codec_from(config.codec, DummyWeights(device), device, dtype, fused)


def dummy_frames(
    config: FishConfig, slots: int, device: torch.device, dtype: torch.dtype, graphed: bool = True
) -> EngineFrames:
    """What draws the frames of so many slots on vLLM, every slot with a request's default sampling and a
    seed of its own."""
    weights = Loader(DummyWeights(device, _keeping_variance), "", dtype, device)
    norm = torch.ones(config.slow.hidden, dtype=dtype, device=device)
    slow = config.slow
    backbone = StackTensors(
        (), norm, norm.new_zeros(1, slow.head_dim), slow.heads, slow.kv_heads, slow.eps, slow.head_dim**-0.5
    )
    drawn = weights("drawn", len(drawn_ids(config)), slow.hidden)
    tensors = frame_tensors(config, backbone, drawn, take_fast(weights, config))
    state = SlotState(slots, slow.hidden, len(tensors.head), 1, 0, 0, dtype, device, tensors.draw.window)
    defaults = config.sampling
    how = defaults.temperature, defaults.top_k, defaults.top_p
    sampling, nothing = SamplingParams(*how, 1.0, *how, min_new_tokens=0), np.zeros(0, np.int64)
    state.place([Placement(slot, (), slot, sampling, nothing, norm, 0) for slot in range(slots)])
    return EngineFrames(tensors, state, graphed)


def _keeping_variance(name: str, noise: Tensor) -> Tensor:
    return torch.ones_like(noise) if noise.dim() == 1 else noise * noise.shape[-1] ** -0.5
