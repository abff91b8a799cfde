"""A SparkTTS checkpoint folder's own configuration: config.yaml, BiCodec/config.yaml and LLM/config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.nn.config_keys import Keys, revision
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

LLM, BICODEC, WAV2VEC2 = "LLM", "BiCodec", "wav2vec2-large-xlsr-53"
_ADVICE = "Check that the folder holds an unchanged SparkTTS checkpoint."


@dataclass(frozen=True, slots=True)
class MelConfig:
    """`mel_params` of BiCodec/config.yaml."""

    n_fft: int
    win_length: int
    hop_length: int
    #: Hz; `mel_fmax` null means half the sample rate.
    fmin: float
    fmax: float
    mels: int


@dataclass(frozen=True, slots=True)
class VocosConfig:
    """One of `encoder` and `prenet` of BiCodec/config.yaml: a stack of ConvNeXt blocks between two projections."""

    input: int
    dim: int
    intermediate: int
    layers: int
    output: int
    #: Sampling blocks; each is the factor 3 of the published block at ratio 1 and two ConvNeXt blocks.
    samplings: int


@dataclass(frozen=True, slots=True)
class SpeakerConfig:
    """`speaker_encoder` of BiCodec/config.yaml."""

    input: int
    output: int
    latent: int
    #: Global tokens of a voice.
    tokens: int
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaveConfig:
    """`decoder` of BiCodec/config.yaml."""

    input: int
    channels: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BiCodecConfig:
    """The sizes of BiCodec."""

    mel: MelConfig
    encoder: VocosConfig
    prenet: VocosConfig
    speaker: SpeakerConfig
    wave: WaveConfig
    codebook_size: int
    codebook_dim: int

    @property
    def samples_per_token(self) -> int:
        samples = 1
        for rate in self.wave.rates:
            samples *= rate
        return samples

    @property
    def global_codes(self) -> int:
        """How many values a global token can have."""
        values = 1
        for level in self.speaker.levels:
            values *= level
        return values


@dataclass(frozen=True, slots=True)
class LmConfig:
    """What we need to know of LLM/config.json: the shape of a Qwen2. vLLM reads it itself."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    rope_theta: float
    tied: bool
    eos: int
    #: Of the norms.
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The published model's own sampling (cli/SparkTTS.py, `inference`)."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    max_new_tokens: int = 3000


@dataclass(frozen=True, slots=True)
class SparkConfig:
    """One checkpoint folder."""

    folder: Path
    sample_rate: int
    #: Samples of the clip that the global tokens are made of.
    clip_samples: int
    volume_normalize: bool
    bicodec: BiCodecConfig
    lm: LmConfig
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def tokens_per_second(self) -> float:
        return self.sample_rate / self.bicodec.samples_per_token

    @classmethod
    def from_folder(cls, folder: str | Path) -> SparkConfig:
        """Reads the configs. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the key at fault."""
        folder = Path(folder)
        top = Keys.read(folder / "config.yaml", _ADVICE)
        bicodec = _bicodec(Keys.read(folder / BICODEC / "config.yaml", _ADVICE).section("audio_tokenizer"))
        rate, hop = top.whole("sample_rate"), top.whole("latent_hop_length")
        if hop != bicodec.samples_per_token:
            raise top.error("latent_hop_length", f"is {hop}, but BiCodec makes {bicodec.samples_per_token} samples a token")
        clip = int(rate * top.number("ref_segment_duration")) // hop * hop
        return cls(
            folder, rate, clip, bool(top.get("volume_normalize", False)), bicodec, _lm(Keys.read(folder / LLM / "config.json", _ADVICE))
        )


def _bicodec(keys: Keys) -> BiCodecConfig:
    mel, decoder, quantizer, speaker = (keys.section(name) for name in ("mel_params", "decoder", "quantizer", "speaker_encoder"))
    top = mel.get("mel_fmax", None)
    rate = mel.whole("sample_rate")
    config = BiCodecConfig(
        MelConfig(
            mel.whole("n_fft"),
            mel.whole("win_length"),
            mel.whole("hop_length"),
            mel.number("mel_fmin"),
            rate / 2 if top is None else mel.number("mel_fmax"),
            mel.whole("num_mels"),
        ),
        _vocos(keys.section("encoder")),
        _vocos(keys.section("prenet")),
        SpeakerConfig(
            speaker.whole("input_dim"),
            speaker.whole("out_dim"),
            speaker.whole("latent_dim"),
            speaker.whole("token_num"),
            speaker.wholes("fsq_levels"),
        ),
        WaveConfig(decoder.whole("input_channel"), decoder.whole("channels"), decoder.wholes("rates"), decoder.wholes("kernel_sizes")),
        quantizer.whole("codebook_size"),
        quantizer.whole("codebook_dim"),
    )
    prenet = keys.section("prenet")
    if prenet.get("use_tanh_at_final", False):
        raise prenet.error("use_tanh_at_final", "is set, which is not supported")
    if speaker.get("fsq_num_quantizers", 1) != 1:
        raise speaker.error("fsq_num_quantizers", "must be 1")
    if any(level < 2 or level % 2 for level in config.speaker.levels):
        raise speaker.error("fsq_levels", "must be even numbers")
    if prenet.whole("condition_dim") != config.speaker.output or config.prenet.output != config.speaker.output:
        raise prenet.error("condition_dim", "and out_channels must equal the speaker encoder's out_dim")
    if len(config.wave.rates) != len(config.wave.kernels) or any((k - s) % 2 for k, s in zip(config.wave.kernels, config.wave.rates)):
        raise decoder.error("kernel_sizes", "do not fit the rates")
    return config


def _vocos(keys: Keys) -> VocosConfig:
    ratios = keys.wholes("sample_ratios")
    if any(ratio != 1 for ratio in ratios):
        raise keys.error("sample_ratios", f"are {list(ratios)}; only ratios of 1 are supported")
    names = ("input_channels", "vocos_dim", "vocos_intermediate_dim", "vocos_num_layers", "out_channels")
    sizes = [keys.whole(name) for name in names]
    return VocosConfig(*sizes, samplings=len(ratios))


def _lm(keys: Keys) -> LmConfig:
    if (kind := keys.get("model_type", None)) != "qwen2":
        raise keys.error("model_type", f"is {kind!r}, not 'qwen2'")
    if keys.get("use_sliding_window", False):
        raise keys.error("use_sliding_window", "is set, which is not supported")
    keys.choice("hidden_act", ("silu",), "silu")
    heads, kv_heads, hidden = keys.size("num_attention_heads"), keys.size("num_key_value_heads"), keys.size("hidden_size")
    keys.require(heads % kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads")
    return LmConfig(
        hidden=hidden,
        layers=keys.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.size("head_dim", hidden // heads),
        intermediate=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        max_positions=keys.size("max_position_embeddings"),
        rope_theta=keys.rope_theta(),
        tied=bool(keys.get("tie_word_embeddings", False)),
        eos=keys.whole("eos_token_id"),
        eps=keys.positive("rms_norm_eps", 1e-6),
    )


#: Labels of created voices, in the order of their token numbers (`gender_0` is female, `pitch_label_0` very low).
GENDERS = ("female", "male")
LEVELS = ("very_low", "low", "moderate", "high", "very_high")
#: The voice of a line that names none and has no reference audio.
DEFAULT_VOICE = "female/moderate/moderate"
#: Average of English read speech, for estimates.
SECONDS_PER_CHARACTER = 0.067
CAPABILITIES = Capabilities(
    voices=tuple(f"{gender}/{pitch}/{speed}" for gender in GENDERS for pitch in LEVELS for speed in LEVELS),
    cloning=True,
    streaming=True,
)
_SUFFIXES = (".json", ".yaml", ".safetensors", ".bin")


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = SparkConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="spark_tts",
        engine="native",
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        revision=revision(folder, _SUFFIXES),
        executors=("eager", "graph"),
        engines=("native", "vllm"),
        seconds_per_character=SECONDS_PER_CHARACTER,
        check_reference=check_encoded,
    )
