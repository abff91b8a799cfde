"""The published codec decoder's sizes and random weights for it, made in place."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from pipelines.qwen3_tts.codec_config import CodecDecoderConfig

#: The published 12 Hz decoder.
PUBLISHED = CodecDecoderConfig(
    codebook_size=2048, codebook_dim=512, num_quantizers=16, num_semantic_quantizers=1, latent_dim=1024, hidden_size=512,
    intermediate_size=1024, head_dim=64, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=8, sliding_window=72,
    attention_bias=False, rope_theta=10_000.0, rms_norm_eps=1e-5, decoder_dim=1536, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2),
)  # fmt: skip


class RandomWeights:
    """Makes each tensor from its name, with a spread that keeps the decoder's activations near one."""

    def __init__(self, device: str) -> None:
        self.device = device

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(*shape, generator=generator, device=self.device)
        return self._scaled(name, drawn).to(device=device, dtype=dtype)

    @staticmethod
    def _scaled(name: str, drawn: Tensor) -> Tensor:
        last = name.rsplit(".", 1)[1]
        if last == "cluster_usage":
            return drawn.abs() + 0.5
        if last in ("alpha", "beta"):
            return 0.3 * drawn
        if last in ("gamma", "scale"):
            return 0.5 * drawn
        if last == "bias":
            return 0.02 * drawn
        if drawn.dim() == 1:
            return 1.0 + 0.1 * drawn
        transposed = ".block.1.conv." in name or name.startswith(("decoder.upsample.0.0", "decoder.upsample.1.0"))
        fan = 2 * drawn.shape[0] if transposed else math.prod(drawn.shape[1:])
        return drawn if last == "embedding_sum" else 0.8 / math.sqrt(fan) * drawn
