"""A SpeechLM checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.nn.config_keys import Keys, revision
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

MODEL_TYPES = ("speechlm", "bagpiper")
_ADVICE = "Check that the folder holds an unchanged SpeechLM checkpoint."
#: Whole seconds of audio that the position table of the tower has room for: 3000 mel frames, 10 ms each.
TOWER_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Backbone:
    """`text_config`: the Qwen3 decoder."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int


@dataclass(frozen=True, slots=True)
class Specials:
    """Ids of the control tokens."""

    pad: int
    bos: int
    eos: int
    eot: int
    system: int
    user: int
    assistant: int
    text: int
    audio: int


@dataclass(frozen=True, slots=True)
class SpeechLmConfig:
    """One checkpoint folder. Every offset of the vocabulary comes from here."""

    folder: Path
    backbone: Backbone
    specials: Specials
    #: Parallel streams of codec tokens, and ids of one stream: its pad, then its codes.
    streams: int
    layer_size: int
    codec_base: int
    #: Text ids are `text_start` <= id < `text_end`.
    text_start: int
    text_end: int
    #: `text_config` and `audio_config` as they stand: what `transformers` builds the decoder and the tower from.
    text: dict[str, Any]
    tower: dict[str, Any]
    tower_width: int
    xcodec: str
    sample_rate: int
    text_temperature: float
    text_top_k: int
    audio_temperature: float
    audio_top_k: int

    @property
    def codes(self) -> int:
        """Values that a code can have."""
        return self.layer_size - 1

    @property
    def codec_end(self) -> int:
        return self.codec_base + self.streams * self.layer_size

    @property
    def delay(self) -> int:
        """Rows by which the last stream comes behind the first."""
        return self.streams - 1

    @classmethod
    def from_folder(cls, folder: Path) -> SpeechLmConfig:
        """Reads and checks config.json. Raises `ModelError` (`model.bad_checkpoint`) that names the key."""
        keys = Keys.read(folder / "config.json", _ADVICE)
        config = cls(
            folder=folder,
            backbone=_backbone(keys.section("text_config")),
            specials=_specials(keys),
            streams=keys.size("num_stream"),
            layer_size=keys.size("codec_layer_size"),
            codec_base=keys.size("codec_base_offset"),
            text_start=keys.size("text_token_offset"),
            text_end=keys.size("text_token_end"),
            text=_table(keys, "text_config"),
            tower=_table(keys, "audio_config"),
            tower_width=keys.size("adaptor_input_dim"),
            xcodec=keys.text("xcodec_hf_model_tag"),
            sample_rate=keys.size("xcodec_sample_rate"),
            text_temperature=keys.number("text_temperature"),
            text_top_k=keys.whole("text_topk"),
            audio_temperature=keys.number("audio_temperature"),
            audio_top_k=keys.whole("audio_topk"),
        )
        config._check(keys)
        return config

    def _check(self, keys: Keys) -> None:
        """The shapes of the tensors do not tell ranges that were swapped, so they are checked here."""
        if max(vars_of(self.specials)) >= self.text_start:
            raise keys.error("text_token_offset", "must lie above the control tokens")
        if not self.text_start < self.text_end <= self.codec_base:
            raise keys.error("text_token_end", "must lie above text_token_offset and not above codec_base_offset")
        if self.codec_end > self.backbone.vocab:
            raise keys.error("codec_base_offset", f"leaves no room for {self.streams} streams of {self.layer_size} ids in the vocabulary")
        if self.layer_size < 2 or self.layer_size >= 1 << 15:
            raise keys.error("codec_layer_size", "must be 2 to 32767")


def _table(keys: Keys, name: str) -> dict[str, Any]:
    return {key: value for key, value in keys.table(name).items() if key not in ("model_type", "architectures")}


def vars_of(specials: Specials) -> list[int]:
    """All control ids."""
    return [getattr(specials, name) for name in Specials.__dataclass_fields__]


def _backbone(keys: Keys) -> Backbone:
    return Backbone(
        vocab=keys.size("vocab_size"),
        hidden=keys.size("hidden_size"),
        intermediate=keys.size("intermediate_size"),
        layers=keys.size("num_hidden_layers"),
        heads=keys.size("num_attention_heads"),
        kv_heads=keys.size("num_key_value_heads"),
        head_dim=keys.size("head_dim"),
        rope_theta=keys.number("rope_theta"),
        max_positions=keys.size("max_position_embeddings"),
    )


def _specials(keys: Keys) -> Specials:
    return Specials(**{name: keys.whole(f"{name}_token_id") for name in Specials.__dataclass_fields__})


CAPABILITIES = Capabilities(
    streaming=True,
    guidance=True,
    text_out=True,
    audio_in=True,
    modes=("text_audio", "text_only"),
    multi_turn=True,
    max_text_characters=20_000,
)
_SUFFIXES = (".json", ".jinja", ".safetensors")


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = SpeechLmConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="speechlm",
        engine="vllm",
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        revision=revision(folder, _SUFFIXES),
    )
