"""What a SparkTTS checkpoint can do, known from its configs alone. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from pipelines.nn.keys import revision
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities
from pipelines.spark_tts.config import SparkConfig

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
        engine="vllm",
        sample_rate=config.sample_rate,
        capabilities=CAPABILITIES,
        revision=revision(folder, _SUFFIXES),
        seconds_per_character=SECONDS_PER_CHARACTER,
        check_reference=check_encoded,
    )
