"""The words of a text, as times name them: what spaces separate, and each character of scripts without spaces."""

from __future__ import annotations

import re

#: Characters that begin a word without a space before them: Thai, Lao, Burmese and Khmer consonants, kana, Bopomofo, and
#: Chinese characters.
_LETTER = (
    "[\u0e01-\u0e2e\u0e81-\u0eae\u0edc-\u0edf\u1000-\u102a\u103f\u1780-\u17b3\u3005-\u3007\u3041-\u3096"
    "\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u3105-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff]"
)
#: Marks and vowels that are written before their character, and vowels and signs, letters by Unicode, after it.
_OPENERS = "(\\[{\u201c\u2018\u00ab\u00bf\u00a1\u300c\u300e\uff08\u300a\u3008\u3010\u3014\uff3b\uff5b\u0e40-\u0e44\u0ec0-\u0ec4"
_FOLLOWERS = "\u0e2f-\u0e33\u0e45\u0e46\u0eaf-\u0eb3\u0ebd\u0ec6\uff9e\uff9f"
# A straight quotation mark opens after a space only.
_UNSPACED = rf"(?:(?<!\S)['\"])?[{_OPENERS}]*{_LETTER}"
# A stacked consonant follows its sign.
_AFTER = rf"(?:[\u1039\u17d2]{_LETTER}|[{_FOLLOWERS}]|[^\w\s{_OPENERS}])*"
_WORD = re.compile(rf"{_UNSPACED}{_AFTER}|(?:(?!{_UNSPACED})\S)+")
_BEGINS = re.compile(_UNSPACED)
_ENDS = re.compile(rf"{_LETTER}{_AFTER}\Z")


def words_of(text: str) -> list[str]:
    """The words of a text with their marks. They are all of it but its white space; of a text that grows, all but the
    last one stay as they are."""
    return _WORD.findall(text)


def are_spaced(before: str, after: str) -> bool:
    """Whether a space separates two adjacent words."""
    return not (_BEGINS.match(after) or _ENDS.search(before))
