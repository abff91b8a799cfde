"""How long speech should be: from a text's length in units to seconds, with bounds that were learned. Imports no library."""

from __future__ import annotations

import re

import msgspec

#: Seconds that a length may always be off: breath, a pause, a codec's last frame.
SLACK_SECONDS = 0.5

_DIGIT, _BREAK, _SPACE = re.compile(r"\d"), re.compile(r"[.!?;:,\u2026\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a]+"), re.compile(r"\s+")
# A digit is read as a word, a Chinese character as a syllable, a kana as half of one, a Hangul block as one; a mark is a pause.
_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_SYLLABLE = re.compile("[\uac00-\ud7af]")
_KANA = re.compile("[\u3040-\u30ff]")


def text_units(text: str) -> float:
    """Length of a text as it is spoken, in letters of a spaced script: digits and syllabic signs count as several."""
    units = len(text) + 4.0 * len(_DIGIT.findall(text)) + 2.0 * len(_BREAK.findall(text))
    if not text.isascii():
        units += 2.5 * len(_IDEOGRAPH.findall(text)) + 1.5 * len(_SYLLABLE.findall(text)) + 1.0 * len(_KANA.findall(text))
    return units


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
