"""What a Fish Speech S2 checkpoint can do, known from its configs alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pipelines.fish_speech.config import FishConfig
from pipelines.nn.keys import revision
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

#: Average of English read speech, for estimates.
SECONDS_PER_CHARACTER = 0.067
#: Recordings of one line: as many speakers as a prompt of the published code joins turns of.
MOST_REFERENCES = 5
CAPABILITIES = Capabilities(
    cloning=True,
    needs_reference_text=True,
    references=MOST_REFERENCES,
    streaming=True,
    max_text_characters=20_000,
)
_SUFFIXES = (".json", ".safetensors", ".pth")


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = FishConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="fish_speech",
        engine="vllm",
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        revision=revision(folder, _SUFFIXES),
        seconds_per_character=SECONDS_PER_CHARACTER,
        check_reference=check_encoded,
    )
