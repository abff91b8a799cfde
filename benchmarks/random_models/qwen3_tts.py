"""Qwen3-TTS at its published sizes with dummy weights: the shapes of the checkpoints, and no speech."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.random_models.weights import DummyWeights, Rule
from pipelines.qwen3_tts.codec import CodecDecoder, fuses_front
from pipelines.qwen3_tts.config import CodecDecoderConfig, Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights

_STACK = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "num_code_groups": 16,
    "hidden_act": "silu",
}
_WIDTHS = {"0b6": (1024, 3072), "1b7": (2048, 6144), "tiny": (64, 64)}
_CODEC_IDS = {"pad": 2148, "bos": 2149, "think": 2154, "nothink": 2155, "think_bos": 2156, "think_eos": 2157}


def published_config(size: str) -> dict[str, Any]:
    """The keys of config.json that inference reads, of the CustomVoice checkpoint of this size ("0b6" or
    "1b7").

    "tiny" has the layout and vocabularies of the published ones and next to no width, to try a benchmark
    on a CPU.
    """
    hidden, intermediate = _WIDTHS[size]
    tiny = size == "tiny"
    predictor = {
        **_STACK,
        "hidden_size": hidden if tiny else 1024,
        "intermediate_size": 3072 // (48 if tiny else 1),
        "num_hidden_layers": 1 if tiny else 5,
        "vocab_size": 2048,
        "max_position_embeddings": 65536,
    }
    talker = {
        **_STACK,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1 if tiny else 28,
        "vocab_size": 3072,
        "max_position_embeddings": 32768,
        "text_vocab_size": 151936,
        "text_hidden_size": 16 if tiny else 2048,
        "codec_eos_token_id": 2150,
        **{f"codec_{name}_id": value for name, value in _CODEC_IDS.items()},
        "codec_language_id": {"english": 2050},
        "spk_id": {"ryan": 3061},
        "spk_is_dialect": {"ryan": False},
        "code_predictor_config": predictor,
    }
    return {
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size,
        "tts_model_type": "custom_voice",
        "im_start_token_id": 151644,
        "im_end_token_id": 151645,
        "assistant_token_id": 77091,
        "tts_pad_token_id": 151671,
        "tts_bos_token_id": 151672,
        "tts_eos_token_id": 151673,
        "talker_config": talker,
    }


#: The published 12 Hz decoder.
PUBLISHED_CODEC = CodecDecoderConfig(
    codebook_size=2048, codebook_dim=512, num_quantizers=16, latent_dim=1024, hidden_size=512,
    intermediate_size=1024, head_dim=64, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=8, sliding_window=72,
    rope_theta=10_000.0, rms_norm_eps=1e-5, decoder_dim=1536, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2),
)  # fmt: skip
#: The same with next to no width, to try things on a CPU.
TINY_CODEC = replace(PUBLISHED_CODEC, latent_dim=32, codebook_dim=16, hidden_size=32, intermediate_size=32, head_dim=16,
                     num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, decoder_dim=48)  # fmt: skip


@torch.inference_mode()
def dummy_model(
    size: str, device: torch.device, dtype: torch.dtype, max_context: int = 4096, ends: bool = False
) -> Qwen3TTSModel:
    """A model of this size on the device; with `ends`, one that draws the end wherever `min_new_tokens`
    lets it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(published_config(size)), encoding="utf-8")
        config = Qwen3TTSConfig.from_folder(folder)
    rule = ends_when_allowed(config.ids.eos) if ends else as_published
    return Qwen3TTSModel(config, take_weights(DummyWeights(device, rule), config, dtype, device), max_context)


@torch.inference_mode()
def dummy_decoder(
    shape: CodecDecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    fused: bool | None = None,
    *,
    reproducible: bool = False,
    fused_front: bool | None = None,
) -> CodecDecoder:
    """A codec decoder of this shape."""
    front = fuses_front(device, dtype, reproducible, 0) if fused_front is None else fused_front
    return CodecDecoder(shape, DummyWeights(device, codec_values), device, dtype, fused, reproducible, front)


def as_published(name: str, noise: Tensor) -> Tensor:
    """Norms around 1, matrices scaled to keep the variance; rounded to bfloat16, so that models of both
    types hold the same values."""
    return (1 + 0.1 * noise if "norm" in name else noise * noise.shape[-1] ** -0.5).to(torch.bfloat16)


def codec_values(name: str, noise: Tensor) -> Tensor:
    """A spread that keeps the decoder's activations near one."""
    last = name.rsplit(".", 1)[1]
    if last == "cluster_usage":
        return noise.abs() + 0.5
    if last in ("alpha", "beta"):
        return 0.3 * noise
    if last in ("gamma", "scale"):
        return 0.5 * noise
    if last == "bias":
        return 0.02 * noise
    if noise.dim() == 1:
        return 1.0 + 0.1 * noise
    transposed = ".block.1.conv." in name or name.startswith(("decoder.upsample.0.0", "decoder.upsample.1.0"))
    fan = 2 * noise.shape[0] if transposed else math.prod(noise.shape[1:])
    return noise if last == "embedding_sum" else 0.8 / math.sqrt(fan) * noise


def ends_when_allowed(end: int) -> Rule:
    """Values of a model that draws the id `end` wherever `min_new_tokens` lets it.

    Channel 0 of the residual stream holds a constant that every code adds to and no layer changes; only
    the end's logit reads it.
    """

    def values(name: str, noise: Tensor) -> Tensor:
        made = as_published(name, noise)
        if ".codec_embedding." in name:
            made[:, 0] = 0.1
        elif name.startswith("talker.model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            made[0] = 0
        elif name == "talker.codec_head.weight":
            made[end] = 0
            made[end, 0] = 200
        return made

    return values
