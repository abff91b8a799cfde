"""The configuration of a Qwen3-TTS checkpoint, read from its `config.json`; nothing about a model is known without it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pipelines.errors import ErrorCode, ModelError
from pipelines.nn.config_keys import Keys, revision
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

CheckpointType = Literal["base", "custom_voice", "voice_design"]
_TYPES = ("base", "custom_voice", "voice_design")
_TOKENIZER = "qwen3_tts_tokenizer_12hz"
_ADVICE = "Check that the folder holds an unchanged Qwen3-TTS 12 Hz checkpoint."
#: The last ids of the talker's vocabulary are control, language and speaker ids, never sampled except for the end.
CONTROL_IDS = 1024


@dataclass(frozen=True, slots=True)
class StackConfig:
    """The shape of a stack of Qwen3 decoder layers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    vocab: int
    max_positions: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids with a meaning: `tts_*` and `im_*` of the text vocabulary, the others of the talker's codec vocabulary."""

    tts_pad: int
    tts_bos: int
    tts_eos: int
    im_start: int
    im_end: int
    assistant: int
    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`generation_config.json`, over the defaults of the published API."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    predictor_do_sample: bool = True
    predictor_temperature: float = 0.9
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0
    max_new_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Qwen3TTSConfig:
    """Everything of `config.json` and `generation_config.json` that inference reads."""

    folder: Path
    kind: CheckpointType
    size: str
    talker: StackConfig
    predictor: StackConfig
    codebooks: int
    text_vocab: int
    text_hidden: int
    ids: SpecialIds
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    speaker_encoder: Mapping[str, Any]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def takes_instructions(self) -> bool:
        """Whether the published wrapper passes instructions on: never for voice clones, and not for named voices of 0.6B."""
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.size != "0b6")

    @property
    def clones(self) -> bool:
        return self.kind == "base"

    @property
    def spoken_languages(self) -> tuple[str, ...]:
        """The languages a request may name: "auto" and every language id that is not a dialect."""
        return ("auto", *(name for name in self.languages if "dialect" not in name))

    @property
    def needs_projection(self) -> bool:
        """Whether talker states pass `small_to_mtp_projection` on their way into the code predictor."""
        return self.talker.hidden != self.predictor.hidden

    @classmethod
    def from_folder(cls, folder: str | Path) -> Qwen3TTSConfig:
        """Reads a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`) that names the file and the key at fault."""
        folder = Path(folder)
        top = Keys.read(folder / "config.json", _ADVICE)
        if (model_type := top.text("model_type")) != "qwen3_tts":
            raise top.error("model_type", f"is {model_type!r}, not 'qwen3_tts'")
        if (tokenizer := top.text("tokenizer_type")) != _TOKENIZER:
            raise top.error("tokenizer_type", f"is {tokenizer!r}; only {_TOKENIZER!r} is supported")
        if (kind := top.text("tts_model_type")) not in _TYPES:
            raise top.error("tts_model_type", f"is {kind!r}; it must be one of {', '.join(_TYPES)}")
        talker = top.section("talker_config")
        predictor = talker.section("code_predictor_config")
        speakers = talker.ids("spk_id")
        config = cls(
            folder=folder,
            kind=cast(CheckpointType, kind),
            size=top.text("tts_model_size"),
            talker=_stack(talker),
            predictor=_stack(predictor),
            codebooks=talker.whole("num_code_groups"),
            text_vocab=talker.size("text_vocab_size"),
            text_hidden=talker.size("text_hidden_size"),
            ids=_special_ids(top, talker),
            languages=talker.ids("codec_language_id"),
            speakers=speakers,
            dialects={name.lower(): tag.lower() for name, tag in talker.table("spk_is_dialect").items() if isinstance(tag, str)},
            speaker_encoder=top.table("speaker_encoder_config") if kind == "base" else {},
            sampling=_sampling(folder / "generation_config.json"),
        )
        _check(config, talker, predictor)
        return config


def _stack(keys: Keys) -> StackConfig:
    for key in ("attention_bias", "use_sliding_window"):
        if keys.get(key, False):
            raise keys.error(key, "is set, which is not supported")
    if (act := keys.get("hidden_act", "silu")) != "silu":
        raise keys.error("hidden_act", f"is {act!r}; only 'silu' is supported")
    return StackConfig(
        hidden=keys.size("hidden_size"),
        intermediate=keys.size("intermediate_size"),
        layers=keys.size("num_hidden_layers"),
        heads=keys.size("num_attention_heads"),
        kv_heads=keys.size("num_key_value_heads"),
        head_dim=keys.size("head_dim"),
        eps=keys.number("rms_norm_eps"),
        rope_theta=keys.rope_theta(),
        vocab=keys.size("vocab_size"),
        max_positions=keys.size("max_position_embeddings"),
    )


def _special_ids(top: Keys, talker: Keys) -> SpecialIds:
    return SpecialIds(
        tts_pad=top.whole("tts_pad_token_id"),
        tts_bos=top.whole("tts_bos_token_id"),
        tts_eos=top.whole("tts_eos_token_id"),
        im_start=top.whole("im_start_token_id"),
        im_end=top.whole("im_end_token_id"),
        assistant=top.whole("assistant_token_id"),
        pad=talker.whole("codec_pad_id"),
        bos=talker.whole("codec_bos_id"),
        eos=talker.whole("codec_eos_token_id"),
        think=talker.whole("codec_think_id"),
        nothink=talker.whole("codec_nothink_id"),
        think_bos=talker.whole("codec_think_bos_id"),
        think_eos=talker.whole("codec_think_eos_id"),
    )


def _sampling(path: Path) -> SamplingDefaults:
    if not path.is_file():
        return SamplingDefaults()
    keys, base = Keys.read(path, _ADVICE), SamplingDefaults()

    def number(key: str, default: float) -> float:
        value = default if keys.get(key, None) is None else keys.number(key)
        if not 0 <= value < math.inf:
            raise keys.error(key, "must not be negative or infinite")
        return value

    def flag(key: str) -> bool:
        value = keys.get(key, None)
        if value is not None and not isinstance(value, bool):
            raise keys.error(key, "must be true or false")
        return value is not False

    return SamplingDefaults(
        do_sample=flag("do_sample"),
        temperature=number("temperature", base.temperature),
        top_k=int(number("top_k", base.top_k)),
        top_p=number("top_p", base.top_p),
        repetition_penalty=number("repetition_penalty", base.repetition_penalty),
        predictor_do_sample=flag("subtalker_dosample"),
        predictor_temperature=number("subtalker_temperature", base.predictor_temperature),
        predictor_top_k=int(number("subtalker_top_k", base.predictor_top_k)),
        predictor_top_p=number("subtalker_top_p", base.predictor_top_p),
        max_new_tokens=max(int(number("max_new_tokens", base.max_new_tokens)), 1),
    )


def _check(config: Qwen3TTSConfig, talker: Keys, predictor: Keys) -> None:
    """The relations between keys that the arithmetic relies on."""
    if config.codebooks < 2 or predictor.whole("num_code_groups") != config.codebooks:
        raise predictor.error("num_code_groups", f"does not fit the talker's {config.codebooks}")
    for keys, stack in ((talker, config.talker), (predictor, config.predictor)):
        if stack.heads % stack.kv_heads or stack.head_dim % 2:
            raise keys.error("num_key_value_heads", "and head_dim do not fit num_attention_heads")
    if config.predictor.vocab + CONTROL_IDS > config.talker.vocab:
        raise talker.error("vocab_size", f"leaves no room for {config.predictor.vocab} codes and {CONTROL_IDS} control ids")
    codec_ids = {"spk_id": config.speakers, "codec_language_id": config.languages}
    for key, table in codec_ids.items():
        for name, token in table.items():
            if not 0 <= token < config.talker.vocab:
                raise talker.error(key, f"gives {name!r} the id {token}, outside the vocabulary of {config.talker.vocab}")
    ids = config.ids
    for name in ("tts_pad", "tts_bos", "tts_eos", "im_start", "im_end", "assistant"):
        if getattr(ids, name) >= config.text_vocab:
            raise talker.error("text_vocab_size", f"is {config.text_vocab}, but the id of {name} is {getattr(ids, name)}")
    for name in ("pad", "bos", "eos", "think", "nothink", "think_bos", "think_eos"):
        if getattr(ids, name) >= config.talker.vocab:
            raise talker.error("vocab_size", f"is {config.talker.vocab}, but the id of codec {name} is {getattr(ids, name)}")
    for name, dialect in config.dialects.items():
        if dialect not in config.languages:
            raise talker.error("spk_is_dialect", f"gives {name!r} the dialect {dialect!r}, which has no language id")


#: Average of English read speech, for estimates.
SECONDS_PER_CHARACTER = 0.067


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = Qwen3TTSConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="qwen3_tts",
        engine="native",
        sample_rate=_sample_rate(folder / "speech_tokenizer" / "config.json"),
        capabilities=capabilities(config),
        revision=revision(folder, (".json", ".safetensors")),
        seconds_per_character=SECONDS_PER_CHARACTER,
        executors=("eager", "graph", "megakernel"),
        check_reference=check_encoded,
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
    )


def _sample_rate(path: Path) -> int:
    advice = "Download the checkpoint again, with its speech_tokenizer folder."
    try:
        rate = json.loads(path.read_text(encoding="utf-8"))["output_sample_rate"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{path} does not say the output_sample_rate.", advice) from error
    if type(rate) is not int or rate <= 0:
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{path}: output_sample_rate is {rate!r}.", advice)
    return rate
