"""The configuration of a SparkTTS checkpoint folder: config.yaml, BiCodec/config.yaml and LLM/config.json.
Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipelines.nn.config_keys import (
    BaseSamplingDefaults,
    Keys,
    Positive,
    Size,
    Sizes,
    StackConfig,
    Whole,
    codec_identity,
)
from pipelines.registry import ModelCard, checkpoint_card
from pipelines.request import Capabilities

LLM = "LLM"
BICODEC = "BiCodec"
WAV2VEC2 = "wav2vec2-large-xlsr-53"


@dataclass(frozen=True, slots=True)
class MelConfig:
    """`mel_params` of BiCodec/config.yaml; frequencies in Hz."""

    sample_rate: Size
    n_fft: Size
    win_length: Size
    hop_length: Size
    mel_fmin: float
    num_mels: Size
    #: None: half the sample rate.
    mel_fmax: float | None = None


@dataclass(frozen=True, slots=True)
class VocosConfig:
    """`encoder` or `prenet` of BiCodec/config.yaml: a stack of ConvNeXt blocks between two projections."""

    input_channels: Size
    vocos_dim: Size
    vocos_intermediate_dim: Size
    vocos_num_layers: Size
    out_channels: Size
    #: The ratios of the sampling blocks, all of which are 1 (see `bicodec.Sampling`).
    sample_ratios: Sizes


@dataclass(frozen=True, slots=True)
class SpeakerConfig:
    """`speaker_encoder` of BiCodec/config.yaml."""

    input_dim: Size
    out_dim: Size
    latent_dim: Size
    #: Global tokens of a voice.
    token_num: Size
    fsq_levels: Sizes


@dataclass(frozen=True, slots=True)
class WaveConfig:
    """`decoder` of BiCodec/config.yaml."""

    input_channel: Size
    channels: Size
    rates: Sizes
    kernel_sizes: Sizes


@dataclass(frozen=True, slots=True)
class BiCodecConfig:
    """The sizes of BiCodec."""

    mel_params: MelConfig
    encoder: VocosConfig
    prenet: VocosConfig
    speaker: Annotated[SpeakerConfig, "speaker_encoder"]
    wave: Annotated[WaveConfig, "decoder"]
    codebook_size: Annotated[Size, "quantizer.codebook_size"]
    codebook_dim: Annotated[Size, "quantizer.codebook_dim"]

    @property
    def samples_per_token(self) -> int:
        return math.prod(self.wave.rates)

    @property
    def global_codes(self) -> int:
        """The number of values that a global token can have."""
        return math.prod(self.speaker.fsq_levels)


@dataclass(frozen=True, slots=True)
class LmConfig(StackConfig):
    """The shape of a Qwen2, from LLM/config.json. vLLM reads that file itself."""

    eos_token_id: Whole
    tie_word_embeddings: bool = False


#: The sampling settings of the published model (cli/SparkTTS.py, `inference`).
SAMPLING = BaseSamplingDefaults(temperature=0.8, top_k=50, top_p=0.95, max_new_tokens=3000)


@dataclass(frozen=True, slots=True)
class SparkConfig:
    """One checkpoint folder."""

    folder: Path
    sample_rate: Size
    #: Samples of the clip from which the global tokens are made.
    clip_samples: int
    bicodec: BiCodecConfig
    lm: LmConfig
    volume_normalize: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.sample_rate / self.bicodec.samples_per_token

    @classmethod
    def from_folder(cls, folder: Path) -> SparkConfig:
        """Reads the configs. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the wrong
        key."""
        top = Keys.read(folder / "config.yaml")
        bicodec = _bicodec(Keys.read(folder / BICODEC / "config.yaml").section("audio_tokenizer"))
        hop = top.value("latent_hop_length", Whole)
        if hop != bicodec.samples_per_token:
            raise top.error(
                "latent_hop_length",
                f"is {hop}, but BiCodec makes {bicodec.samples_per_token} samples per token",
            )
        clip = int(top.value("sample_rate", Size) * top.value("ref_segment_duration", Positive)) // hop * hop
        keys = Keys.read(folder / LLM / "config.json")
        keys.expect(model_type="qwen2", use_sliding_window=False, hidden_act="silu")
        heads = keys.value("num_attention_heads", Size)
        head_dim = keys.value("head_dim", Size, keys.value("hidden_size", Size) // heads)
        lm = keys.take(LmConfig, rope_theta=keys.rope_theta(), head_dim=head_dim)
        keys.require(
            heads % lm.kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"
        )
        return top.take(cls, folder=folder, clip_samples=clip, bicodec=bicodec, lm=lm)


def _bicodec(keys: Keys) -> BiCodecConfig:
    config = keys.take(BiCodecConfig)
    prenet = keys.section("prenet")
    speaker = keys.section("speaker_encoder")
    prenet.expect(
        use_tanh_at_final=False, condition_dim=config.speaker.out_dim, out_channels=config.speaker.out_dim
    )
    speaker.expect(fsq_num_quantizers=1)
    if any(level % 2 for level in config.speaker.fsq_levels):
        raise speaker.error("fsq_levels", "must be even numbers")
    for name, vocos in (("encoder", config.encoder), ("prenet", config.prenet)):
        keys.section(name).expect(sample_ratios=[1] * len(vocos.sample_ratios))
    wave = config.wave
    if len(wave.rates) != len(wave.kernel_sizes) or any(
        (k - s) % 2 for k, s in zip(wave.kernel_sizes, wave.rates)
    ):
        raise keys.error("decoder.kernel_sizes", "do not fit the rates")
    return config


#: Labels of created voices, in the order of their token numbers (`gender_0` is female, `pitch_label_0` very
#: low).
GENDERS = ("female", "male")
LEVELS = ("very_low", "low", "moderate", "high", "very_high")
#: The voice of a line that neither names a voice nor has reference audio.
DEFAULT_VOICE = "female/moderate/moderate"
CAPABILITIES = Capabilities(
    voices=tuple(f"{gender}/{pitch}/{speed}" for gender in GENDERS for pitch in LEVELS for speed in LEVELS),
    cloning=True,
    streaming=True,
    codes=True,
)


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = SparkConfig.from_folder(folder)
    return checkpoint_card(
        folder,
        "spark_tts",
        (".json", ".yaml", ".safetensors", ".bin"),
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        executors=("eager", "graph"),
        engines=("native", "vllm"),
        codec=lambda: codec_identity(
            "bicodec",
            (folder / BICODEC).glob("*.safetensors"),
            config.bicodec.samples_per_token,
            config.sample_rate,
            [config.bicodec.codebook_size],
        ),
    )
