"""SpeechLM: a Qwen3 that hears and writes text and eight streams of codec tokens, with guidance of the audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.registry import ModelCard
from pipelines.request import Pipeline


def describe_checkpoint(path: str | Path) -> ModelCard:
    """What a checkpoint folder can do; reads its config, loads no weights and no torch.

    Raises `ModelError` (`model.bad_checkpoint`).
    """
    from pipelines.speechlm.config import describe

    return describe(Path(path))


def open_checkpoint(path: str | Path, **options: Any) -> Pipeline:
    """Loads a checkpoint folder; `options` are the fields of `pipelines.speechlm.pipeline.SpeechLmOptions`.

    Raises `ModelError`: `model.bad_checkpoint` that names the tensor or file at fault, `model.missing_extra` where vLLM is
    not installed; `ConfigError` for an unknown option, or one that the model cannot run with.
    """
    from pipelines.speechlm.pipeline import open_pipeline

    return open_pipeline(Path(path), **options)
