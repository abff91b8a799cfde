"""SparkTTS at its published size with dummy weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from benchmarks.random_models.weights import fill
from pipelines.spark_tts.bicodec import BiCodec, Encoder, Prenet, SemanticQuantizer, Tokenizer
from pipelines.spark_tts.config import (
    BiCodecConfig,
    LmConfig,
    MelConfig,
    SparkConfig,
    SpeakerConfig,
    VocosConfig,
    WaveConfig,
)
from pipelines.spark_tts.speaker import MelMagnitudes, SpeakerEncoder
from pipelines.spark_tts.wave_generator import WaveGenerator, prepared

Module = TypeVar("Module", bound=nn.Module)
LM = LmConfig(
    hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, eps=1e-6, rope_theta=1e6, vocab=166_000,
    max_positions=32_768, tied=True, eos=151_645,
)  # fmt: skip
CODEC = BiCodecConfig(
    MelConfig(16_000, 1024, 640, 320, 10.0, 128),
    VocosConfig(1024, 384, 2048, 12, 1024, (1, 1)),
    VocosConfig(1024, 384, 2048, 12, 1024, (1, 1)),
    SpeakerConfig(128, 1024, 128, 32, (4,) * 6),
    WaveConfig(1024, 1536, (8, 5, 4, 2), (16, 11, 8, 4)),
    8192,
    8,
)


def published_config(folder: Path) -> SparkConfig:
    """The config of a checkpoint that would lie in this folder."""
    return SparkConfig(folder, 16_000, 96_000, CODEC, LM, volume_normalize=True)


def dummy_codecs(
    settings: SparkConfig, device: torch.device, dtype: torch.dtype, fused: bool | None = None
) -> tuple[Tokenizer, BiCodec]:
    """Both halves of BiCodec, the decoder in `dtype`; `fused` as for
    `pipelines.spark_tts.wave_generator.prepared`."""

    def made(make: Callable[[], Module]) -> Module:
        with torch.device("meta"):
            module = make()
        module.to_empty(device=device).requires_grad_(False).eval()
        fill(module)
        return module

    quantizer = made(lambda: SemanticQuantizer(CODEC.encoder.output, CODEC.codebook_size, CODEC.codebook_dim))
    speaker = made(lambda: SpeakerEncoder(CODEC.speaker))
    encoder = made(lambda: Encoder(CODEC.encoder))
    prenet = made(lambda: Prenet(CODEC.prenet, CODEC.speaker.output)).to(dtype)
    wave = made(lambda: WaveGenerator(CODEC.wave))
    tokenizer = Tokenizer(encoder, quantizer, speaker, MelMagnitudes(CODEC.mel, settings.sample_rate, device))
    return tokenizer, BiCodec(CODEC, quantizer, speaker, prenet, prepared(wave, dtype, fused))
