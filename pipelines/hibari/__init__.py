"""Hibari, the voice that needs no GPU and no download: its card, and what it asks of texts. Imports no model
library before it is loaded."""

from __future__ import annotations

import re
from importlib.metadata import version

from pipelines.duration import Pace
from pipelines.registry import ModelCard
from pipelines.request import Capabilities

SAMPLE_RATE = 24_000
#: An ASCII text with one of these is read.
_SPOKEN = re.compile("[A-Za-z0-9]")
CAPABILITIES = Capabilities(voices=("heart",), languages=("English",), streaming=True, sampling=False)


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
        rtf=0.0038,
        # 200 generated sentences of 4 to 25 words: 0.85 to 1.19 times as long.
        # Numbers, initials and single words are up to 1.5 times as long, which the slack covers.
        check_text=check_text,
        pace=Pace(base_seconds=0.33, seconds_per_unit=0.0558, low=0.7, high=1.5),
    )


def check_text(text: str) -> None:
    """Raises `InputError` for text that the voice cannot read aloud, as far as its characters tell."""
    if text.isascii() and _SPOKEN.search(text):
        return
    # Costs a fraction of a second once, which a file of plain English need not pay.
    from pipelines.hibari.text import check_pronounceable

    check_pronounceable(text)
