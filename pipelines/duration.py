"""The expected length of speech, computed from the length of its text, and bounds for it, which are learned
from a model's speech."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from pipelines.languages import language_code

#: Deviation in seconds that is always allowed, such as a breath, a pause or a codec's last frame.
SLACK_SECONDS = 0.5
#: Factors for text that is not prose: numbers may be read as many or few words, and markup spelled out or
#: skipped, so the text says little about the length.
WIDE_LOW = 0.1
WIDE_HIGH = 4.0


_DIGITS = "0123456789"
_MARKS = ".!?;:,"
# Patterns are strings, which `re` compiles at first use: `nightjar status` does not use them.
_IDEOGRAPHS = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
#: Patterns of characters that count more than one unit, and their additional units: punctuation, Chinese,
#: Korean, kana.
_EXTRA_UNITS = {
    "[\u2026\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a]": 2.0,
    _IDEOGRAPHS: 2.5,
    "[\uac00-\ud7af]": 1.5,
    "[\u3040-\u30ff]": 1.0,
}
#: Text that is not prose, since a voice may spell it out, skip it or shorten it: numbers, signs, markup, two
#: capitals, a repeated mark, repeated white space, several lines.
_UNLIKE_PROSE = r"[0-9\u00bc-\u00be\u2150-\u215e<>/@#&=*_{}\[\]|~^%$+\\\n]|[A-Z]{2}|([^\w\s])\1|\s\s"


def text_units(text: str) -> float:
    """The spoken length of a text, in letters of a script that separates words by spaces.

    A digit is read as a word and counts five, a mark is a pause and counts three; a Chinese character is a
    syllable and counts three and a half, a Hangul block two and a half, a kana two.
    """
    # `str.count` is ten times as fast as a pattern, and this runs for every item.
    units = len(text) + 4.0 * sum(map(text.count, _DIGITS)) + 2.0 * sum(map(text.count, _MARKS))
    if not text.isascii():
        units += sum(extra * len(re.findall(sign, text)) for sign, extra in _EXTRA_UNITS.items())
    return units


def is_prose(text: str) -> bool:
    """Whether the letters of a text predict the length of its speech: plain sentences with at least five
    words for every two marks."""
    if re.search(_UNLIKE_PROSE, text):
        return False
    marks = max(1, sum(map(text.count, _MARKS)))
    return 2 * len(text.split()) >= 5 * marks or bool(re.search(_IDEOGRAPHS, text))


#: How long speech of an unknown voice can take: letters a second of slow speech, with pauses.
_SLOW_UNITS = 4.0
_SLOW_SECONDS = 6.0


def longest_seconds(text: str) -> float:
    """The length in seconds that no speech of this text exceeds, however slow the voice; more is a runaway."""
    return _SLOW_SECONDS + text_units(text) * (1 if is_prose(text) else WIDE_HIGH) / _SLOW_UNITS


_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a voice speaks: seconds = `base_seconds` + `seconds_per_unit` x `text_units(text)`.

    Speech is as long as it should be if it takes `low` to `high` times that, or up to `slack_seconds` less or
    more. For text that is not prose the factors are at least as wide as `WIDE_LOW` to `WIDE_HIGH`.
    """

    base_seconds: _NotNegative
    seconds_per_unit: _NotNegative
    low: _NotNegative
    high: _NotNegative
    slack_seconds: _NotNegative = SLACK_SECONDS
    #: The voice and the language that it applies to; empty: all of them.
    voice: str = ""
    language: str = ""

    def applies_to(self, voice: str | None, language: str | None) -> bool:
        """Whether it is the pace of this voice in this language."""
        of_voice = self.voice.casefold() in ("", (voice or "").casefold())
        return of_voice and language_code(self.language) in ("", language_code(language or ""))

    def expected_seconds(self, text: str) -> float:
        return self.base_seconds + self.seconds_per_unit * text_units(text)

    def fits(self, seconds: float, expected_seconds: float, text: str) -> bool:
        """Whether speech of this length is as long as it should be."""
        low, high = (
            (self.low, self.high) if is_prose(text) else (min(self.low, WIDE_LOW), max(self.high, WIDE_HIGH))
        )
        return (
            low * expected_seconds - self.slack_seconds
            <= seconds
            <= high * expected_seconds + self.slack_seconds
        )
