"""How long speech should be: from a text's length in units to seconds, with bounds that were learned. Imports no library."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

#: Seconds that a length may always be off: breath, a pause, a codec's last frame.
SLACK_SECONDS = 0.5


@lru_cache(maxsize=1)
def _signs() -> tuple[tuple[float, re.Pattern[str]], ...]:
    """(units beyond the one that every character counts, what counts so). Compiled at first use: `jobs status` needs none.

    A digit is read as a word, a mark is a pause, a Chinese character is a syllable, a kana half of one, a Hangul block one.
    """
    marks = "[.!?;:,\u2026\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a]+"
    ideographs = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
    signs = ((4.0, r"\d"), (2.0, marks), (2.5, ideographs), (1.5, "[\uac00-\ud7af]"), (1.0, "[\u3040-\u30ff]"))
    return tuple([(units, re.compile(sign)) for units, sign in signs])


def text_units(text: str) -> float:
    """Length of a text as it is spoken, in letters of a spaced script: digits and syllabic signs count as several."""
    signs = _signs()[:2] if text.isascii() else _signs()
    return len(text) + sum([units * len(sign.findall(text)) for units, sign in signs])


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a voice speaks: seconds = `base_seconds` + `seconds_per_unit` x `text_units(text)`.

    Speech whose length is `low` to `high` times that, or off by no more than `slack_seconds`, is as long as it should be.
    """

    base_seconds: float
    seconds_per_unit: float
    low: float
    high: float
    slack_seconds: float = SLACK_SECONDS
    #: Only for this voice and this language; empty: for every one.
    voice: str = ""
    language: str = ""

    def expected_seconds(self, text: str) -> float:
        return self.base_seconds + self.seconds_per_unit * text_units(text)

    def fits(self, seconds: float, expected_seconds: float) -> bool:
        """Whether speech of this length is as long as it should be."""
        low, high = self.low * expected_seconds - self.slack_seconds, self.high * expected_seconds + self.slack_seconds
        return low <= seconds <= high


def pace_of(paces: tuple[Pace, ...], voice: str | None, language: str | None) -> Pace | None:
    """The first pace that is for this voice and language, or None."""
    for pace in paces:
        if pace.voice.casefold() in ("", (voice or "").casefold()) and pace.language.casefold() in ("", (language or "").casefold()):
            return pace
    return None
