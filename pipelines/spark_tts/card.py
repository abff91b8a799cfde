"""What a SparkTTS checkpoint can do, known from its configs alone. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
_PROBES = 16
_PROBE_BYTES = 1 << 16
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
        revision=_revision(folder),
        seconds_per_character=SECONDS_PER_CHARACTER,
    )


def _revision(folder: Path) -> str:
    """A digest that tells checkpoints apart: configs and sizes whole, weights by samples (they have gigabytes)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            for probe in range(_PROBES):
                file.seek(probe * size // _PROBES)
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]
