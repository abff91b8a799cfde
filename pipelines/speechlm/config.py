"""A SpeechLM checkpoint's config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pipelines.nn.config_keys import Keys, Size, StackConfig, Whole, revision
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

#: Maximum seconds of audio, for which the position table of the tower has room: 3000 mel frames of 10 ms.
TOWER_SECONDS = 30


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
    """One checkpoint folder, with all offsets of its vocabulary."""

    folder: Path
    #: `text_config`: the Qwen3 decoder.
    backbone: StackConfig
    specials: Specials
    #: Number of parallel streams of codec tokens, and number of ids of a stream: its pad, then its codes.
    streams: Annotated[Size, "num_stream"]
    codec_layer_size: Size
    codec_base_offset: Size
    #: Text ids are `text_token_offset` <= id < `text_token_end`.
    text_token_offset: Size
    text_token_end: Size
    #: `text_config` and `audio_config`, from which `transformers` builds the decoder and the tower.
    text_config: dict[str, Any]
    audio_config: dict[str, Any]
    adaptor_input_dim: Size
    xcodec_hf_model_tag: str
    sample_rate: Annotated[Size, "xcodec_sample_rate"]
    text_temperature: float
    text_topk: Whole
    audio_temperature: float
    audio_topk: Whole

    @property
    def codes(self) -> int:
        """The number of values that a code can have."""
        return self.codec_layer_size - 1

    @property
    def codec_end(self) -> int:
        return self.codec_base_offset + self.streams * self.codec_layer_size

    @property
    def delay(self) -> int:
        """Number of rows by which the last stream is later than the first."""
        return self.streams - 1

    @classmethod
    def from_folder(cls, folder: Path) -> SpeechLmConfig:
        """Reads and checks config.json. Raises `ModelError` (`model.bad_checkpoint`) that names the key."""
        keys = Keys.read(folder / "config.json")
        text = keys.section("text_config")
        specials = {name: keys.value(f"{name}_token_id", Whole) for name in Specials.__dataclass_fields__}
        backbone = text.take(StackConfig, rope_theta=text.rope_theta())
        config = keys.take(cls, folder=folder, backbone=backbone, specials=Specials(**specials))
        # The shapes of tensors do not show whether ranges are swapped, so ranges are checked here.
        if max(specials.values()) >= config.text_token_offset:
            raise keys.error("text_token_offset", "must be above the control tokens")
        if not config.text_token_offset < config.text_token_end <= config.codec_base_offset:
            raise keys.error(
                "text_token_end", "must be above text_token_offset and not above codec_base_offset"
            )
        if config.codec_end > backbone.vocab:
            room = f"leaves no room for {config.streams} streams of {config.codec_layer_size} ids in the vocabulary"
            raise keys.error("codec_base_offset", room)
        if config.codec_layer_size < 2 or config.codec_layer_size >= 1 << 15:
            raise keys.error("codec_layer_size", "must be 2 to 32767")
        return config


def own_keys(section: dict[str, Any]) -> dict[str, Any]:
    """A section for a config class of `transformers`, without the keys that name the class."""
    return {key: value for key, value in section.items() if key not in ("model_type", "architectures")}


CAPABILITIES = Capabilities(
    streaming=True,
    codes=True,
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
        # That module imports torch. Its weights are in the checkpoint with those of the LM.
        codec=lambda: import_module("pipelines.speechlm.codec").identity(config),
    )
