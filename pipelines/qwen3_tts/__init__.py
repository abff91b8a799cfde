"""Qwen3-TTS, 12 Hz family: voice clones, named voices and designed voices, on the engine with the megakernel design."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.registry import ModelCard
from pipelines.request import Pipeline


def describe_checkpoint(path: str | Path) -> ModelCard:
    """What a checkpoint folder can do; reads its configs, loads no weights and no torch.

    Raises `ModelError` (`model.bad_checkpoint`).
    """
    from pipelines.qwen3_tts.config import describe

    return describe(Path(path))


def open_checkpoint(path: str | Path, **options: Any) -> Pipeline:
    """Loads a checkpoint folder; `options` are the fields of `pipelines.qwen3_tts.pipeline.PipelineOptions`.

    Raises `ModelError` (`model.bad_checkpoint`) that names the tensor or file at fault, `ConfigError` for an unknown option.
    """
    from pipelines.qwen3_tts.pipeline import open_pipeline

    return open_pipeline(Path(path), **options)
