"""Sizes of the 12 Hz codec and of the speaker encoder, read from a checkpoint's own config files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.nn.config_keys import Keys

_ADVICE = "Download the checkpoint again, or check that it belongs to this model family."


@dataclass(frozen=True, slots=True)
class CodecDecoderConfig:
    """`decoder_config` of `speech_tokenizer/config.json`; the fields bear the names of its keys."""

    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    num_semantic_quantizers: int
    latent_dim: int
    hidden_size: int
    intermediate_size: int
    head_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    sliding_window: int
    attention_bias: bool
    rope_theta: float
    rms_norm_eps: float
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    @property
    def samples_per_frame(self) -> int:
        """Samples that one frame of codes becomes: the product of all upsampling factors."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @classmethod
    def read(cls, keys: Keys) -> CodecDecoderConfig:
        """Reads the object `decoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        keys.choice("hidden_act", ("silu",))
        config = cls(
            codebook_size=keys.size("codebook_size"),
            codebook_dim=keys.size("codebook_dim"),
            num_quantizers=keys.size("num_quantizers"),
            num_semantic_quantizers=keys.size("num_semantic_quantizers", 1),
            latent_dim=keys.size("latent_dim"),
            hidden_size=keys.size("hidden_size"),
            intermediate_size=keys.size("intermediate_size"),
            head_dim=keys.size("head_dim"),
            num_attention_heads=keys.size("num_attention_heads"),
            num_key_value_heads=keys.size("num_key_value_heads"),
            num_hidden_layers=keys.size("num_hidden_layers"),
            sliding_window=keys.size("sliding_window"),
            attention_bias=keys.flag("attention_bias", False),
            rope_theta=keys.positive("rope_theta"),
            rms_norm_eps=keys.positive("rms_norm_eps"),
            decoder_dim=keys.size("decoder_dim"),
            upsample_rates=keys.wholes("upsample_rates"),
            upsampling_ratios=keys.wholes("upsampling_ratios"),
        )
        keys.require(config.num_semantic_quantizers == 1, "only one semantic quantizer is known (num_semantic_quantizers)")
        keys.require(config.num_quantizers > 1, "num_quantizers must be larger than 1")
        keys.require(config.codebook_dim % 2 == 0, "codebook_dim must be even")
        keys.require(config.head_dim % 2 == 0, "head_dim must be even")
        keys.require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads must divide num_attention_heads")
        keys.require(
            config.decoder_dim % (1 << len(config.upsample_rates)) == 0, "decoder_dim must halve once for each of the upsample_rates"
        )
        return config


@dataclass(frozen=True, slots=True)
class CodecEncoderConfig:
    """`encoder_config` of `speech_tokenizer/config.json`: a Mimi encoder; absent keys have the defaults of transformers' MimiConfig."""

    sampling_rate: int
    audio_channels: int
    hidden_size: int
    num_filters: int
    num_residual_layers: int
    upsampling_ratios: tuple[int, ...]
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    dilation_growth_rate: int
    pad_mode: str
    compress: int
    use_conv_shortcut: bool
    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    num_semantic_quantizers: int
    vector_quantization_hidden_dimension: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    attention_bias: bool
    frame_rate: float

    @property
    def downsample_kernel(self) -> int:
        """Kernel of the last convolution, which halves the rate of the convolution stack to the frame rate; 0 when there is none."""
        stack_rate = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        return 0 if stack_rate == self.frame_rate else 2 * int(stack_rate / self.frame_rate)

    @classmethod
    def read(cls, keys: Keys, frame_rate: float) -> CodecEncoderConfig:
        """Reads the object `encoder_config`; `frame_rate` (frames a second) holds where it names none of its own.

        Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault.
        """
        keys.require(keys.flag("use_causal_conv", True), "only causal convolutions are known (use_causal_conv)")
        keys.choice("hidden_act", ("gelu",), "gelu")
        hidden_size = keys.size("hidden_size", 512)
        heads = keys.size("num_attention_heads", 8)
        config = cls(
            sampling_rate=keys.size("sampling_rate", 24_000),
            audio_channels=keys.size("audio_channels", 1),
            hidden_size=hidden_size,
            num_filters=keys.size("num_filters", 64),
            num_residual_layers=keys.size("num_residual_layers", 1),
            upsampling_ratios=keys.wholes("upsampling_ratios", (8, 6, 5, 4)),
            kernel_size=keys.size("kernel_size", 7),
            last_kernel_size=keys.size("last_kernel_size", 3),
            residual_kernel_size=keys.size("residual_kernel_size", 3),
            dilation_growth_rate=keys.size("dilation_growth_rate", 2),
            pad_mode=keys.choice("pad_mode", ("constant", "replicate"), "constant"),
            compress=keys.size("compress", 2),
            use_conv_shortcut=keys.flag("use_conv_shortcut", False),
            codebook_size=keys.size("codebook_size", 2048),
            codebook_dim=keys.size("codebook_dim", 256),
            num_quantizers=keys.size("num_quantizers", 32),
            num_semantic_quantizers=keys.size("num_semantic_quantizers", 1),
            vector_quantization_hidden_dimension=keys.size("vector_quantization_hidden_dimension", 256),
            num_hidden_layers=keys.size("num_hidden_layers", 8),
            intermediate_size=keys.size("intermediate_size", 2048),
            num_attention_heads=heads,
            num_key_value_heads=keys.size("num_key_value_heads", 8),
            head_dim=keys.size("head_dim", max(1, hidden_size // heads)),
            norm_eps=keys.positive("norm_eps", 1e-5),
            rope_theta=keys.positive("rope_theta", 10_000.0),
            attention_bias=keys.flag("attention_bias", False),
            frame_rate=keys.positive("frame_rate", keys.positive("_frame_rate", frame_rate)),
        )
        keys.require(config.audio_channels == 1, "only mono audio is known (audio_channels)")
        keys.require(config.head_dim % 2 == 0, "head_dim must be even")
        keys.require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads must divide num_attention_heads")
        keys.require(config.num_quantizers > config.num_semantic_quantizers, "num_quantizers must exceed num_semantic_quantizers")
        return config


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """`speech_tokenizer/config.json`: both halves of the codec and the rates between samples and frames."""

    decoder: CodecDecoderConfig
    encoder: CodecEncoderConfig
    encoder_valid_num_quantizers: int
    input_sample_rate: int
    output_sample_rate: int
    decode_upsample_rate: int
    encode_downsample_rate: int

    @classmethod
    def load(cls, folder: str | Path) -> CodecConfig:
        """Reads `config.json` of a `speech_tokenizer` folder. Raises `ModelError` (`model.bad_checkpoint`) naming file and key."""
        keys = Keys.read(Path(folder) / "config.json", _ADVICE)
        keys.choice("model_type", ("qwen3_tts_tokenizer_12hz",))
        downsample = keys.size("encode_downsample_rate")
        rate = keys.size("input_sample_rate")
        config = cls(
            decoder=CodecDecoderConfig.read(keys.section("decoder_config")),
            encoder=CodecEncoderConfig.read(keys.section("encoder_config"), rate / downsample),
            encoder_valid_num_quantizers=keys.size("encoder_valid_num_quantizers"),
            input_sample_rate=rate,
            output_sample_rate=keys.size("output_sample_rate"),
            decode_upsample_rate=keys.size("decode_upsample_rate"),
            encode_downsample_rate=downsample,
        )
        keys.require(
            config.decoder.samples_per_frame == config.decode_upsample_rate,
            f"decode_upsample_rate is {config.decode_upsample_rate}, but the upsampling factors make {config.decoder.samples_per_frame}",
        )
        keys.require(
            config.encoder_valid_num_quantizers <= config.encoder.num_quantizers,
            "encoder_valid_num_quantizers exceeds the encoder's num_quantizers",
        )
        return config


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """`speaker_encoder_config` of the main `config.json`; only `enc_dim` is always published, the rest has the package's defaults."""

    enc_dim: int
    sample_rate: int = 24_000
    mel_dim: int = 128
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> SpeakerEncoderConfig:
        """Reads the object `speaker_encoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        keys = Keys(Path("config.json"), values, _ADVICE, "speaker_encoder_config.")
        config = cls(
            enc_dim=keys.size("enc_dim", 1024),
            sample_rate=keys.size("sample_rate", 24_000),
            mel_dim=keys.size("mel_dim", 128),
            enc_channels=keys.wholes("enc_channels", (512, 512, 512, 512, 1536)),
            enc_kernel_sizes=keys.wholes("enc_kernel_sizes", (5, 3, 3, 3, 1)),
            enc_dilations=keys.wholes("enc_dilations", (1, 2, 3, 4, 1)),
            enc_attention_channels=keys.size("enc_attention_channels", 128),
            enc_res2net_scale=keys.size("enc_res2net_scale", 8),
            enc_se_channels=keys.size("enc_se_channels", 128),
        )
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
