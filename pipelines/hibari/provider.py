"""What the registry knows of the embedded voice before it is loaded."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from pipelines.registry import ModelCard
from pipelines.request import Capabilities

if TYPE_CHECKING:
    from pipelines.hibari.pipeline import HibariPipeline

SAMPLE_RATE = 24_000
CAPABILITIES = Capabilities(voices=("heart",), languages=("English",), sampling=False)


def describe() -> ModelCard:
    """The card of the bundled voice. Its figures: Harvard sentences, one worker with two cores."""
    return ModelCard(
        "hibari",
        "hibari",
        "cpu",
        SAMPLE_RATE,
        CAPABILITIES,
        revision=version("hibari-tts"),
        seconds_per_character=0.068,
        realtime_factor=0.0038,
    )


def load(*, threads: int | None = None, waiting_room: int | None = None) -> HibariPipeline:
    """Loads the voice. `threads` synthesize at once (None: one a core); `waiting_room` requests wait before `submit` blocks."""
    from pipelines.hibari.pipeline import HibariPipeline

    return HibariPipeline(threads=threads, waiting_room=waiting_room)
