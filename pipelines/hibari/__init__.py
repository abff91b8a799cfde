"""Hibari, the voice that needs no GPU and no download. Imports no model library before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.hibari.config import HibariOptions, describe
from pipelines.options import read_options

if TYPE_CHECKING:
    from pipelines.hibari.pipeline import HibariPipeline

__all__ = ["describe", "load"]


def load(**options: Any) -> HibariPipeline:
    """Loads the voice. Raises `ConfigError` (`config.invalid`) for an option that is none of
    `HibariOptions`, or a wrong value."""
    from pipelines.hibari.pipeline import HibariPipeline

    chosen = read_options(HibariOptions, options)
    return HibariPipeline(threads=chosen.threads, waiting_room=chosen.waiting_room)
