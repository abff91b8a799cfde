"""What a Qwen3-TTS checkpoint can do, known from its configs alone. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.errors import ErrorCode, ModelError
from pipelines.nn.keys import revision
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.recording import check_encoded
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

#: Average of English read speech, for estimates.
SECONDS_PER_CHARACTER = 0.067


def describe(folder: Path) -> ModelCard:
    """The card of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    config = Qwen3TTSConfig.from_folder(folder)
    return ModelCard(
        name=str(folder),
        family="qwen3_tts",
        engine="megakernel",
        sample_rate=_sample_rate(folder / "speech_tokenizer" / "config.json"),
        capabilities=capabilities(config),
        revision=revision(folder, (".json", ".safetensors")),
        seconds_per_character=SECONDS_PER_CHARACTER,
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
