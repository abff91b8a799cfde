"""Hibari, the voice that needs no GPU and no download: its card, and its check of texts. Importing it loads
no model library."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from pipelines.duration import Pace
from pipelines.options import Count, read_options
from pipelines.registry import ModelCard
from pipelines.request import Capabilities, Pipeline

SAMPLE_RATE = 24_000
#: An ASCII text that contains one of these characters can be read aloud.
_SPOKEN = re.compile("[A-Za-z0-9]")
#: Phonemes of misaki's American English, with the marks of stress.
PHONEMES = "AIOQWYabdfhijklmnpstuvwzæðŋɐɑɒɔəɛɜɡɪɹɾʃʊʌʒʤʧθᵊᵻˈˌ"
CAPABILITIES = Capabilities(
    voices=("heart",),
    languages=("English",),
    streaming=True,
    sampling=False,
    phonemes=PHONEMES,
    word_times="exact",
)


def describe() -> ModelCard:
    """The card of the bundled voice. Its figures were measured with Harvard sentences on one worker with two
    cores."""
    return ModelCard(
        "hibari",
        "hibari",
        "cpu",
        SAMPLE_RATE,
        CAPABILITIES,
        revision=version("hibari-tts"),
        seconds_per_character=0.068,
        rtf=0.0038,
        check_text=check_text,
        # The speech of 200 generated sentences of 4 to 25 words takes 0.85 to 1.19 times the estimate of
        # `pace`; numbers, initials and single words take up to 1.5 times.
        pace=Pace(base_seconds=0.33, seconds_per_unit=0.0558, low=0.7, high=1.5),
    )


@dataclass(frozen=True, slots=True)
class HibariOptions:
    """Options of the voice: `threads` synthesize at the same time (None: one per core); `waiting_room`
    requests can wait before `submit` blocks."""

    threads: Count | None = None
    waiting_room: Count | None = None


def load(**options: Any) -> Pipeline:
    """Loads the voice. Raises `ConfigError` (`config.invalid`) for an unknown option or a wrong value."""
    from pipelines.hibari.pipeline import HibariPipeline

    return HibariPipeline(**asdict(read_options(HibariOptions, options)))


def check_text(text: str) -> None:
    """Raises `InputError` for text with characters that the voice cannot read aloud."""
    if text.isascii() and _SPOKEN.search(text):
        return
    # This import takes a fraction of a second, and a file of plain English does not need it.
    from pipelines.hibari.text import check_pronounceable

    check_pronounceable(text)
