"""Error rates of words and characters: what was heard against what was asked for, both in a normal form."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Protocol

#: Languages whose script puts no spaces between words: their word error rate means nothing.
UNSPACED = frozenset({"zh", "chinese", "yue", "cantonese", "ja", "japanese", "th", "thai", "lo", "lao", "km", "khmer", "my", "burmese"})


class Normalizer(Protocol):
    """Text in, normal form out."""

    def __call__(self, text: str, /) -> str: ...


@lru_cache(maxsize=8)
def normalizer_of(language: str) -> Normalizer:
    """Whisper's English rules (numbers, spellings, contractions), or its basic ones for other languages (Radford et al., 2022, C)."""
    if language.casefold() in ("", "en", "english"):
        from whisper_normalizer.english import EnglishTextNormalizer

        return EnglishTextNormalizer()
    from whisper_normalizer.basic import BasicTextNormalizer

    return BasicTextNormalizer()


def error_rates(asked: str, heard: str, language: str = "") -> dict[str, float]:
    """`wer` and `cer` (edits over the length of what was asked, which may pass 1); without `wer` for scripts without spaces.

    Empty where nothing is left of `asked` in its normal form. Spaces are no characters.
    """
    from rapidfuzz.distance import Levenshtein

    normal = normalizer_of(language)
    wanted, found = (_words(normal(text)) for text in (asked, heard))
    if not wanted:
        return {}
    letters = "".join(wanted)
    rates = {"cer": Levenshtein.distance(letters, "".join(found)) / len(letters)}
    if language.casefold() not in UNSPACED:
        rates["wer"] = Levenshtein.distance(wanted, found) / len(wanted)
    return rates


def _words(text: str) -> list[str]:
    return [word for word in unicodedata.normalize("NFKC", text).split() if any(character.isalnum() for character in word)]
