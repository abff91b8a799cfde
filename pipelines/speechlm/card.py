"""What a SpeechLM checkpoint can do, known from its config alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pipelines.nn.keys import revision
from pipelines.registry import ModelCard
from pipelines.request import Capabilities
from pipelines.speechlm.config import SpeechLmConfig

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
