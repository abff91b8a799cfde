"""Sizes of the 12 Hz codec and of the speaker encoder, read from a checkpoint's own config files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pipelines.nn.config_keys import DOWNLOAD_AGAIN, Keys, Positive, Size, Sizes
from pipelines.qwen3_tts.config import TOKENIZER


@dataclass(frozen=True, slots=True)
class CodecDecoderConfig:
    """`decoder_config` of `speech_tokenizer/config.json`; the fields bear the names of its keys."""

    codebook_size: Size
    codebook_dim: Size
    num_quantizers: Size
    latent_dim: Size
    hidden_size: Size
    intermediate_size: Size
    head_dim: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    num_hidden_layers: Size
    sliding_window: Size
    rope_theta: Positive
    rms_norm_eps: Positive
    decoder_dim: Size
    upsample_rates: Sizes
    upsampling_ratios: Sizes

    @property
    def samples_per_frame(self) -> int:
        """Samples that one frame of codes becomes: the product of all upsampling factors."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @classmethod
    def read(cls, keys: Keys) -> CodecDecoderConfig:
        """Reads the object `decoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        keys.expect(hidden_act="silu", attention_bias=False, num_semantic_quantizers=1)
        config = keys.take(cls)
        keys.require(config.num_quantizers > 1, "num_quantizers must be larger than 1")
        keys.require(config.codebook_dim % 2 == 0, "codebook_dim must be even")
        keys.require(config.head_dim % 2 == 0, "head_dim must be even")
        keys.require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads must divide num_attention_heads")
        halved = config.decoder_dim % (1 << len(config.upsample_rates)) == 0
        keys.require(halved, "decoder_dim must halve once for each of the upsample_rates")
        return config


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """`speech_tokenizer/config.json`: both halves of the codec and the rates between samples and frames."""

    decoder: CodecDecoderConfig
    #: The keys of a `MimiConfig`, which has defaults for those that are absent.
    encoder: Annotated[dict[str, Any], "encoder_config"]
    encoder_valid_num_quantizers: Size
    input_sample_rate: Size
    output_sample_rate: Size
    decode_upsample_rate: Size
    encode_downsample_rate: Size

    @classmethod
    def load(cls, folder: str | Path) -> CodecConfig:
        """Reads `config.json` of a `speech_tokenizer` folder. Raises `ModelError` (`model.bad_checkpoint`) naming file and key."""
        keys = Keys.read(Path(folder) / "config.json", DOWNLOAD_AGAIN)
        keys.expect(model_type=TOKENIZER)
        encoder = keys.section("encoder_config")
        encoder.expect(use_causal_conv=True, audio_channels=1, pad_mode="constant")
        decoder = CodecDecoderConfig.read(keys.section("decoder_config"))
        config = keys.take(cls, decoder=decoder)
        keys.require(
            decoder.samples_per_frame == config.decode_upsample_rate,
            f"decode_upsample_rate is {config.decode_upsample_rate}, but the upsampling factors make {decoder.samples_per_frame}",
        )
        fits = config.encoder_valid_num_quantizers <= encoder.value("num_quantizers", Size, 32)
        keys.require(fits, "encoder_valid_num_quantizers exceeds the encoder's num_quantizers")
        frame_rate = config.input_sample_rate / config.encode_downsample_rate
        return replace(config, encoder={"frame_rate": frame_rate} | config.encoder)


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """`speaker_encoder_config` of the main `config.json`; only `enc_dim` is always published, the rest has the package's defaults."""

    enc_dim: Size = 1024
    sample_rate: Size = 24_000
    mel_dim: Size = 128
    enc_channels: Sizes = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: Sizes = (5, 3, 3, 3, 1)
    enc_dilations: Sizes = (1, 2, 3, 4, 1)
    enc_attention_channels: Size = 128
    enc_res2net_scale: Size = 8
    enc_se_channels: Size = 128

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> SpeakerEncoderConfig:
        """Reads the object `speaker_encoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        keys = Keys(Path("config.json"), values, DOWNLOAD_AGAIN, "speaker_encoder_config.")
        config = keys.take(cls)
        channels = list(config.enc_channels)
        keys.require(
            len(channels) == len(config.enc_kernel_sizes) == len(config.enc_dilations) and len(channels) >= 3,
            "enc_channels, enc_kernel_sizes and enc_dilations must have one length of at least 3",
        )
        keys.require(sum(channels[1:-1]) == channels[-1], "the last of enc_channels must be the sum of those between first and last")
        keys.require(len(set(channels[:-1])) == 1, "all of enc_channels but the last must be equal")
        keys.require(channels[0] % config.enc_res2net_scale == 0, "enc_res2net_scale must divide enc_channels")
        keys.require(all(size % 2 for size in config.enc_kernel_sizes), "enc_kernel_sizes must be odd")
        return config
