"""The configuration of a Qwen3-TTS checkpoint, read from its `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipelines.nn.config_keys import (
    BaseSamplingDefaults,
    Keys,
    NotNegative,
    Positive,
    Size,
    Sizes,
    StackConfig,
    StackShape,
    Whole,
    codec_identity,
)
from pipelines.registry import ModelCard, checkpoint_card
from pipelines.request import Capabilities

CheckpointType = Literal["base", "custom_voice", "voice_design"]
TOKENIZER = "qwen3_tts_tokenizer_12hz"
#: Number of control, language and speaker ids, which are the last ids of the talker's vocabulary. Of them,
#: only the end is ever sampled.
CONTROL_IDS = 1024


@dataclass(frozen=True, slots=True)
class TextIds:
    """Ids of the text vocabulary that have a special meaning."""

    tts_pad_token_id: Whole
    tts_bos_token_id: Whole
    tts_eos_token_id: Whole
    im_start_token_id: Whole
    im_end_token_id: Whole
    assistant_token_id: Whole


@dataclass(frozen=True, slots=True)
class CodecIds:
    """Ids of the talker's codec vocabulary that have a special meaning."""

    codec_pad_id: Whole
    codec_bos_id: Whole
    codec_eos_token_id: Whole
    codec_think_id: Whole
    codec_nothink_id: Whole
    codec_think_bos_id: Whole
    codec_think_eos_id: Whole


@dataclass(frozen=True, slots=True)
class SamplingDefaults(BaseSamplingDefaults):
    """`generation_config.json`. Keys that it lacks have the defaults of the published API."""

    temperature: NotNegative = 0.9
    top_k: Whole = 50
    top_p: NotNegative = 1.0
    repetition_penalty: NotNegative = 1.05
    do_sample: bool = True
    predictor_do_sample: Annotated[bool, "subtalker_dosample"] = True
    predictor_temperature: Annotated[NotNegative, "subtalker_temperature"] = 0.9
    predictor_top_k: Annotated[Whole, "subtalker_top_k"] = 50
    predictor_top_p: Annotated[NotNegative, "subtalker_top_p"] = 1.0


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """`speaker_encoder_config` of the main `config.json`, for the ECAPA-TDNN of transformers. Only `enc_dim`
    is always published; other keys have the defaults of the published package."""

    enc_dim: Size = 1024
    sample_rate: Size = 24_000
    mel_dim: Size = 128
    enc_channels: Sizes = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: Sizes = (5, 3, 3, 3, 1)
    enc_dilations: Sizes = (1, 2, 3, 4, 1)
    enc_attention_channels: Size = 128
    enc_res2net_scale: Size = 8
    enc_se_channels: Size = 128


@dataclass(frozen=True, slots=True)
class Qwen3TTSConfig:
    """The values of `config.json` and `generation_config.json` that inference uses."""

    folder: Path
    kind: Annotated[CheckpointType, "tts_model_type"]
    tts_model_size: str
    talker: StackConfig
    predictor: StackConfig
    codebooks: Annotated[Size, "talker_config.num_code_groups"]
    text_vocab: Annotated[Size, "talker_config.text_vocab_size"]
    text_hidden: Annotated[Size, "talker_config.text_hidden_size"]
    text_ids: TextIds
    ids: CodecIds
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    speaker_encoder: SpeakerEncoderConfig
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def takes_instructions(self) -> bool:
        """Whether the published wrapper passes instructions to the model: not for voice clones, and not for
        named voices of 0.6B."""
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.tts_model_size != "0b6")

    @property
    def clones(self) -> bool:
        return self.kind == "base"

    @property
    def spoken_languages(self) -> tuple[str, ...]:
        """The languages a request may name: "auto" and every language id that is not a dialect."""
        return ("auto", *(name for name in self.languages if "dialect" not in name))

    @property
    def needs_projection(self) -> bool:
        """Whether `small_to_mtp_projection` projects talker states to the width of the code predictor."""
        return self.talker.hidden != self.predictor.hidden

    @classmethod
    def from_folder(cls, folder: Path) -> Qwen3TTSConfig:
        """Reads a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the
        wrong key."""
        top = Keys.read(folder / "config.json")
        top.expect(model_type="qwen3_tts", tokenizer_type=TOKENIZER)
        talker = top.section("talker_config")
        predictor = talker.section("code_predictor_config")
        generation = folder / "generation_config.json"
        dialects = talker.value("spk_is_dialect", dict[str, str | bool])
        config = top.take(
            cls,
            folder=folder,
            talker=_stack(talker),
            predictor=_stack(predictor),
            text_ids=top.take(TextIds),
            ids=talker.take(CodecIds),
            languages=_ids(talker, "codec_language_id"),
            speakers=_ids(talker, "spk_id"),
            dialects={name.lower(): tag.lower() for name, tag in dialects.items() if isinstance(tag, str)},
            speaker_encoder=_speaker_encoder(top),
            sampling=Keys.read(generation).take(SamplingDefaults)
            if generation.is_file()
            else SamplingDefaults(),
        )
        _check(config, top, talker, predictor)
        return config


def _stack(keys: Keys) -> StackConfig:
    keys.expect(attention_bias=False, use_sliding_window=False, hidden_act="silu")
    config = keys.take(StackConfig, rope_theta=keys.rope_theta())
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise keys.error("num_key_value_heads", "and head_dim do not fit num_attention_heads")
    return config


def _ids(keys: Keys, key: str) -> dict[str, int]:
    """Lowercase names -> ids."""
    return {name.lower(): token for name, token in keys.value(key, dict[str, Whole]).items()}


def _speaker_encoder(top: Keys) -> SpeakerEncoderConfig:
    if "speaker_encoder_config" not in top:
        return SpeakerEncoderConfig()
    keys = top.section("speaker_encoder_config")
    config = keys.take(SpeakerEncoderConfig)
    keys.require(
        len(config.enc_channels) == len(config.enc_kernel_sizes) == len(config.enc_dilations),
        "enc_channels, enc_kernel_sizes and enc_dilations must have one length",
    )
    return config


def _check(config: Qwen3TTSConfig, top: Keys, talker: Keys, predictor: Keys) -> None:
    """Checks relations between keys on which the model relies."""
    if config.codebooks < 2 or predictor.value("num_code_groups", Size) != config.codebooks:
        raise predictor.error("num_code_groups", f"does not fit the talker's {config.codebooks}")
    if config.predictor.vocab + CONTROL_IDS > config.talker.vocab:
        raise talker.error(
            "vocab_size", f"leaves no room for {config.predictor.vocab} codes and {CONTROL_IDS} control ids"
        )
    if config.clones and config.speaker_encoder.enc_dim != config.talker.hidden:
        what = f"{config.speaker_encoder.enc_dim}, but the talker is {config.talker.hidden} wide"
        raise top.error("speaker_encoder_config.enc_dim", f"is {what}")
    vocabularies = {
        "text_vocab_size": (config.text_vocab, asdict(config.text_ids)),
        "vocab_size": (config.talker.vocab, {**asdict(config.ids), **config.languages, **config.speakers}),
    }
    for key, (size, ids) in vocabularies.items():
        for name, token in ids.items():
            if token >= size:
                raise talker.error(key, f"is {size}, but the id of {name} is {token}")
    for name, dialect in config.dialects.items():
        if dialect not in config.languages:
            raise talker.error(
                "spk_is_dialect", f"gives {name!r} the dialect {dialect!r}, which has no language id"
            )


@dataclass(frozen=True, slots=True)
class CodecDecoderConfig:
    """`decoder_config` of `speech_tokenizer/config.json`; `stack` is its transformer, and the other fields have the
    names of its keys."""

    codebook_size: Size
    codebook_dim: Size
    num_quantizers: Size
    latent_dim: Size
    stack: StackShape
    sliding_window: Size
    decoder_dim: Size
    upsample_rates: Sizes
    upsampling_ratios: Sizes

    @property
    def samples_per_frame(self) -> int:
        """Samples of one frame: the product of all upsampling factors."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @classmethod
    def read(cls, keys: Keys) -> CodecDecoderConfig:
        """Reads the object `decoder_config`. Raises `ModelError` (`model.bad_checkpoint`) that names the
        wrong key."""
        keys.expect(hidden_act="silu", attention_bias=False, num_semantic_quantizers=1)
        config = keys.take(cls, stack=keys.take(StackShape))
        keys.require(
            config.stack.heads % config.stack.kv_heads == 0,
            "num_key_value_heads must divide num_attention_heads",
        )
        halved = config.decoder_dim % (1 << len(config.upsample_rates)) == 0
        keys.require(halved, "decoder_dim must halve once for each of the upsample_rates")
        return config


@dataclass(frozen=True, slots=True)
class CodecEncoderConfig:
    """`encoder_config`: the keys of transformers' `MimiConfig` that inference uses, and its defaults."""

    hidden_size: Size = 512
    num_filters: Size = 64
    num_residual_layers: Size = 1
    upsampling_ratios: Sizes = (8, 6, 5, 4)
    kernel_size: Size = 7
    last_kernel_size: Size = 3
    residual_kernel_size: Size = 3
    dilation_growth_rate: Size = 2
    compress: Size = 2
    codebook_size: Size = 2048
    codebook_dim: Size = 256
    num_quantizers: Size = 32
    num_semantic_quantizers: Size = 1
    num_hidden_layers: Size = 8
    intermediate_size: Size = 2048
    num_attention_heads: Size = 8
    head_dim: Size = 64
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """`speech_tokenizer/config.json`: both halves of the codec and the rates between samples and frames."""

    decoder: CodecDecoderConfig
    encoder: Annotated[CodecEncoderConfig, "encoder_config"]
    encoder_valid_num_quantizers: Size
    input_sample_rate: Size
    output_sample_rate: Size
    decode_upsample_rate: Size
    encode_downsample_rate: Size

    @classmethod
    def load(cls, folder: Path) -> CodecConfig:
        """Reads `config.json` of a `speech_tokenizer` folder. Raises `ModelError` (`model.bad_checkpoint`)
        that names the file and the wrong key."""
        keys = Keys.read(folder / "config.json")
        keys.expect(model_type=TOKENIZER)
        keys.section("encoder_config").expect(
            use_causal_conv=True, audio_channels=1, pad_mode="constant", hidden_act="gelu", attention_bias=False,
            use_conv_shortcut=False,
        )  # fmt: skip
        decoder = CodecDecoderConfig.read(keys.section("decoder_config"))
        config = keys.take(cls, decoder=decoder)
        keys.require(
            decoder.samples_per_frame == config.decode_upsample_rate,
            f"decode_upsample_rate is {config.decode_upsample_rate}, but the upsampling factors make {decoder.samples_per_frame}",
        )
        fits = config.encoder_valid_num_quantizers <= config.encoder.num_quantizers
        keys.require(fits, "encoder_valid_num_quantizers exceeds the encoder's num_quantizers")
        return config


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = Qwen3TTSConfig.from_folder(folder)
    codec = CodecConfig.load(folder / "speech_tokenizer")
    decoder = codec.decoder
    return checkpoint_card(
        folder,
        "qwen3_tts",
        (".json", ".safetensors"),
        sample_rate=codec.output_sample_rate,
        capabilities=capabilities(config),
        executors=("eager", "graph", "megakernel"),
        codec=lambda: codec_identity(
            "qwen3-tts-12hz",
            (folder / "speech_tokenizer").glob("*.safetensors"),
            decoder.samples_per_frame,
            codec.output_sample_rate,
            [decoder.codebook_size] * decoder.num_quantizers,
        ),
    )


def capabilities(config: Qwen3TTSConfig) -> Capabilities:
    """What requests may ask of this checkpoint."""
    return Capabilities(
        voices=tuple(config.speakers) if config.kind == "custom_voice" else (),
        languages=config.spoken_languages,
        cloning=config.clones,
        needs_reference=config.clones,
        instruct=config.takes_instructions,
        streaming=True,
        codes=True,
    )
