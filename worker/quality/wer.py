"""Error rates of words and characters: what was heard against what was asked for, both in a normal form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

#: Languages whose script puts no spaces between words: their word error rate means nothing.
UNSPACED = frozenset({"zh", "chinese", "yue", "cantonese", "ja", "japanese", "th", "thai", "lo", "lao", "km", "khmer", "my", "burmese"})


#: In a shorter text one word misheard is more than any bound, and homophones and names are misheard in good speech too.
LEAST_WORDS, LEAST_CHARACTERS, LEAST_UNSPACED = 4, 12, 6

#: Signs as an English voice reads them and an ASR model may write them.
_ENGLISH_SIGNS = tuple(
    (re.compile(sign), spoken)
    for sign, spoken in (
        (r"&", " and "),
        (r"(?<=\d)\s*%", " percent"),
        (r"#(?=\d)|\b[Nn]o\.\s*(?=\d)", " number "),
        (r"\+", " plus "),
        (r"=", " equals "),
        (r"@", " at "),
        (r"°\s*C\b", " degrees celsius "),
        (r"°\s*F\b", " degrees fahrenheit "),
        (r"°", " degrees "),
    )
)
#: `3:16`, `3.16` and `3 16` are heard alike, as are `5th` and `5`.
_BETWEEN_DIGITS, _ORDINAL = re.compile(r"(?<=\d)[ .,:](?=\d)"), re.compile(r"(?<=\d)(?:st|nd|rd|th)\b")


@lru_cache(maxsize=8)
def normalizer_of(language: str) -> Callable[[str], str]:
    """Whisper's English rules (numbers, spellings, contractions), or its basic ones for other languages (Radford et al., 2022, C)."""
    if language.casefold() in ("", "en", "english"):
        from whisper_normalizer.english import EnglishTextNormalizer

        whisper = EnglishTextNormalizer()
        return lambda text: _BETWEEN_DIGITS.sub("", _ORDINAL.sub("", whisper(_spoken_signs(text))))
    from whisper_normalizer.basic import BasicTextNormalizer

    return BasicTextNormalizer()


class Rate(NamedTuple):
    """Edits over the length of what was asked, which may pass 1."""

    value: float
    #: Whether the text is long enough to judge speech by it.
    telling: bool


def error_rates(asked: str, heard: str, language: str = "") -> dict[str, Rate]:
    """`wer` and `cer`; without `wer` for scripts without spaces.

    Empty where nothing is left of `asked` in its normal form. Spaces are no characters.
    """
    from rapidfuzz.distance import Levenshtein

    normal = normalizer_of(language)
    wanted, found = (_words(normal(text)) for text in (asked, heard))
    if not wanted:
        return {}
    letters, unspaced = "".join(wanted), language.casefold() in UNSPACED
    least = LEAST_UNSPACED if unspaced else LEAST_CHARACTERS
    rates = {"cer": Rate(Levenshtein.distance(letters, "".join(found)) / len(letters), len(letters) >= least)}
    if not unspaced:
        rates["wer"] = Rate(Levenshtein.distance(wanted, found) / len(wanted), len(wanted) >= LEAST_WORDS)
    return rates


def _spoken_signs(text: str) -> str:
    for sign, spoken in _ENGLISH_SIGNS:
        text = sign.sub(spoken, text)
    return text


def _words(text: str) -> list[str]:
    return [word for word in unicodedata.normalize("NFKC", text).split() if any(character.isalnum() for character in word)]
