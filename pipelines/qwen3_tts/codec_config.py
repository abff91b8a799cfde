"""Sizes of the 12 Hz codec and of the speaker encoder, read from a checkpoint's own config files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.nn.checkpoint import bad_checkpoint, read_json

_MISSING: Any = object()


class Fields:
    """Typed reading of one JSON object; every error names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def integer(self, key: str, default: int = _MISSING) -> int:
        """A positive whole number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._bad(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: float = _MISSING) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise self._bad(key, value, "a positive number")
        return float(value)

    def integers(self, key: str, default: tuple[int, ...] = _MISSING) -> tuple[int, ...]:
        """A non-empty list of positive whole numbers."""
        value = self._value(key, default)
        if not isinstance(value, (list, tuple)) or not value or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in value):
            raise self._bad(key, value, "a list of positive whole numbers")
        return tuple(value)

    def flag(self, key: str, default: bool = _MISSING) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str = _MISSING) -> str:
        """One of the words that the code can run."""
        value = self._value(key, default)
        if value not in allowed:
            raise self._bad(key, value, " or ".join(allowed))
        return value

    def section(self, key: str) -> Fields:
        """A nested object."""
        value = self._value(key, _MISSING)
        if not isinstance(value, Mapping):
            raise self._bad(key, value, "an object")
        return Fields(value, f"{self._where}: {key}")

    def require(self, condition: bool, message: str) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) with `message` unless `condition` holds."""
        if not condition:
            raise bad_checkpoint(f"{self._where}: {message}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is _MISSING:
            raise bad_checkpoint(f"{self._where} has no {key}.")
        return value

    def _bad(self, key: str, value: object, wanted: str) -> Exception:
        return bad_checkpoint(f"{self._where} has {key} = {value!r}, which is not {wanted}.")


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
    def read(cls, fields: Fields) -> CodecDecoderConfig:
        """Reads the object `decoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        fields.choice("hidden_act", ("silu",))
        config = cls(
            codebook_size=fields.integer("codebook_size"),
            codebook_dim=fields.integer("codebook_dim"),
            num_quantizers=fields.integer("num_quantizers"),
            num_semantic_quantizers=fields.integer("num_semantic_quantizers", 1),
            latent_dim=fields.integer("latent_dim"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            head_dim=fields.integer("head_dim"),
            num_attention_heads=fields.integer("num_attention_heads"),
            num_key_value_heads=fields.integer("num_key_value_heads"),
            num_hidden_layers=fields.integer("num_hidden_layers"),
            sliding_window=fields.integer("sliding_window"),
            attention_bias=fields.flag("attention_bias", False),
            rope_theta=fields.number("rope_theta"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            decoder_dim=fields.integer("decoder_dim"),
            upsample_rates=fields.integers("upsample_rates"),
            upsampling_ratios=fields.integers("upsampling_ratios"),
        )
        fields.require(config.num_semantic_quantizers == 1, "only one semantic quantizer is known (num_semantic_quantizers)")
        fields.require(config.num_quantizers > 1, "num_quantizers must be larger than 1")
        fields.require(config.codebook_dim % 2 == 0, "codebook_dim must be even")
        fields.require(config.head_dim % 2 == 0, "head_dim must be even")
        fields.require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads must divide num_attention_heads")
        fields.require(
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
    def read(cls, fields: Fields, frame_rate: float) -> CodecEncoderConfig:
        """Reads the object `encoder_config`; `frame_rate` (frames a second) holds where it names none of its own.

        Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault.
        """
        fields.require(fields.flag("use_causal_conv", True), "only causal convolutions are known (use_causal_conv)")
        fields.choice("hidden_act", ("gelu",), "gelu")
        hidden_size = fields.integer("hidden_size", 512)
        heads = fields.integer("num_attention_heads", 8)
        config = cls(
            sampling_rate=fields.integer("sampling_rate", 24_000),
            audio_channels=fields.integer("audio_channels", 1),
            hidden_size=hidden_size,
            num_filters=fields.integer("num_filters", 64),
            num_residual_layers=fields.integer("num_residual_layers", 1),
            upsampling_ratios=fields.integers("upsampling_ratios", (8, 6, 5, 4)),
            kernel_size=fields.integer("kernel_size", 7),
            last_kernel_size=fields.integer("last_kernel_size", 3),
            residual_kernel_size=fields.integer("residual_kernel_size", 3),
            dilation_growth_rate=fields.integer("dilation_growth_rate", 2),
            pad_mode=fields.choice("pad_mode", ("constant", "replicate"), "constant"),
            compress=fields.integer("compress", 2),
            use_conv_shortcut=fields.flag("use_conv_shortcut", False),
            codebook_size=fields.integer("codebook_size", 2048),
            codebook_dim=fields.integer("codebook_dim", 256),
            num_quantizers=fields.integer("num_quantizers", 32),
            num_semantic_quantizers=fields.integer("num_semantic_quantizers", 1),
            vector_quantization_hidden_dimension=fields.integer("vector_quantization_hidden_dimension", 256),
            num_hidden_layers=fields.integer("num_hidden_layers", 8),
            intermediate_size=fields.integer("intermediate_size", 2048),
            num_attention_heads=heads,
            num_key_value_heads=fields.integer("num_key_value_heads", 8),
            head_dim=fields.integer("head_dim", max(1, hidden_size // heads)),
            norm_eps=fields.number("norm_eps", 1e-5),
            rope_theta=fields.number("rope_theta", 10_000.0),
            attention_bias=fields.flag("attention_bias", False),
            frame_rate=fields.number("frame_rate", fields.number("_frame_rate", frame_rate)),
        )
        fields.require(config.audio_channels == 1, "only mono audio is known (audio_channels)")
        fields.require(config.head_dim % 2 == 0, "head_dim must be even")
        fields.require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads must divide num_attention_heads")
        fields.require(config.num_quantizers > config.num_semantic_quantizers, "num_quantizers must exceed num_semantic_quantizers")
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
        path = Path(folder) / "config.json"
        fields = Fields(read_json(path), str(path))
        fields.choice("model_type", ("qwen3_tts_tokenizer_12hz",))
        downsample = fields.integer("encode_downsample_rate")
        rate = fields.integer("input_sample_rate")
        config = cls(
            decoder=CodecDecoderConfig.read(fields.section("decoder_config")),
            encoder=CodecEncoderConfig.read(fields.section("encoder_config"), rate / downsample),
            encoder_valid_num_quantizers=fields.integer("encoder_valid_num_quantizers"),
            input_sample_rate=rate,
            output_sample_rate=fields.integer("output_sample_rate"),
            decode_upsample_rate=fields.integer("decode_upsample_rate"),
            encode_downsample_rate=downsample,
        )
        fields.require(
            config.decoder.samples_per_frame == config.decode_upsample_rate,
            f"decode_upsample_rate is {config.decode_upsample_rate}, but the upsampling factors make {config.decoder.samples_per_frame}",
        )
        fields.require(
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
    def read(cls, values: Mapping[str, Any], where: str = "config.json: speaker_encoder_config") -> SpeakerEncoderConfig:
        """Reads the object `speaker_encoder_config`. Raises `ModelError` (`model.bad_checkpoint`) naming the key at fault."""
        fields = Fields(values, where)
        config = cls(
            enc_dim=fields.integer("enc_dim", 1024),
            sample_rate=fields.integer("sample_rate", 24_000),
            mel_dim=fields.integer("mel_dim", 128),
            enc_channels=fields.integers("enc_channels", (512, 512, 512, 512, 1536)),
            enc_kernel_sizes=fields.integers("enc_kernel_sizes", (5, 3, 3, 3, 1)),
            enc_dilations=fields.integers("enc_dilations", (1, 2, 3, 4, 1)),
            enc_attention_channels=fields.integer("enc_attention_channels", 128),
            enc_res2net_scale=fields.integer("enc_res2net_scale", 8),
            enc_se_channels=fields.integer("enc_se_channels", 128),
        )
        channels = list(config.enc_channels)
        fields.require(
            len(channels) == len(config.enc_kernel_sizes) == len(config.enc_dilations) and len(channels) >= 3,
            "enc_channels, enc_kernel_sizes and enc_dilations must have one length of at least 3",
        )
        fields.require(sum(channels[1:-1]) == channels[-1], "the last of enc_channels must be the sum of those between first and last")
        fields.require(len(set(channels[:-1])) == 1, "all of enc_channels but the last must be equal")
        fields.require(channels[0] % config.enc_res2net_scale == 0, "enc_res2net_scale must divide enc_channels")
        fields.require(all(size % 2 for size in config.enc_kernel_sizes), "enc_kernel_sizes must be odd")
        return config
