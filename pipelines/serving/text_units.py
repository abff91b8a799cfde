"""Cuts a text, also one that comes in pieces, into units that are spoken one after the other: whole sentences.

Where a unit ends depends on the joined text alone, never on where its pieces begin and end.
"""

from __future__ import annotations

import re

#: Of a unit. A longer sentence is cut behind a comma or between two words.
MAX_UNIT_CHARACTERS = 400

_CLOSERS = "\"'”’»›)\\]}」』】》〉）］｝"
_END = re.compile(rf"(?P<wide>[。！？｡]+)[{_CLOSERS}]*|(?P<stops>[.!?…]+)(?P<closed>[{_CLOSERS}]*)|(?P<blank>\n[ \t\r]*\n)")
_LAST_WORD = re.compile(r"[^\W_](?:[\w.'’-]*\w)?\Z")
_SOFT_END = re.compile(r"[,;:，；：、—–](?=\s)|[，；：、]")
_SPACE = re.compile(r"\s")
_WORD = re.compile(r"[^\W_]")
#: Above it there are scripts that put no space between sentences.
_FIRST_WIDE = "\u2e80"
#: Never the end of a sentence: a name follows, or what was meant.
_TITLES = frozenset(
    {"adm", "bzw", "ca", "capt", "cf", "col", "d.h", "dr", "e.g", "gen", "gov", "hon", "i.e", "lt", "messrs", "mlle", "mme", "mr", "mrs"}
    | {"ms", "mt", "pres", "prof", "rep", "rev", "sen", "sgt", "st", "vs", "z.b"}
)
#: Not the end of a sentence where a number follows.
_NUMBERED = frozenset({"art", "ch", "fig", "figs", "no", "nos", "nr", "op", "p", "pp", "sec", "vol"})
#: The end of a sentence where the next word has a capital letter.
_SHORT_FORMS = frozenset({"co", "corp", "dept", "est", "etc", "inc", "jr", "ltd", "sr", "univ", "usw"})


class TextUnits:
    """The text of one speaker, which grows at its end."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def pending(self) -> bool:
        """Whether there is text that has not become a unit yet."""
        return bool(self._text)

    def add(self, text: str) -> list[str]:
        """The units that are complete with this text."""
        return self._take(text, final=False)

    def flush(self) -> list[str]:
        """All the rest."""
        return self._take("", final=True)

    def words(self) -> list[str]:
        """The rest up to its last whole word; all of it where it ends with a mark, or has no space."""
        if not self._text[-1:].isalnum():
            return self.flush()
        cut = max((space.start() for space in _SPACE.finditer(self._text)), default=0)
        rest, self._text = (self._text[:cut], self._text[cut:].lstrip()) if cut else (self._text, "")
        return _spoken([rest])

    def _take(self, text: str, *, final: bool) -> list[str]:
        joined = (self._text + text).lstrip()
        units: list[str] = []
        begin = 0
        while begin < len(joined):
            length = _unit_length(joined[begin : begin + MAX_UNIT_CHARACTERS + 1], final=final)
            if length is None:
                break
            units.append(joined[begin : begin + length])
            begin += length
            while begin < len(joined) and joined[begin].isspace():
                begin += 1
        self._text = joined[begin:]
        return _spoken(units)


#: A passage ends with the sentence in which it comes to so many characters, or at the first space behind the maximum.
PASSAGE_CHARACTERS = 400
MAX_PASSAGE_CHARACTERS = 1200
_MAX_WORD_CHARACTERS = 200


class TextPassages:
    """A text that is spoken while it grows, as passages of some sentences each. Every piece of a passage is given at once."""

    def __init__(self) -> None:
        #: The passage, as far as it was given, and where its last sentence begins.
        self._text = ""
        self._sentence = 0

    def add(self, text: str) -> list[tuple[str, bool]]:
        """This text as pieces of passages, each with whether its passage ends with it."""
        pieces: list[tuple[str, bool]] = []
        given, joined = len(self._text), (self._text + text).lstrip()
        while (end := self._end(joined)) is not None:
            pieces.append((joined[given:end], True))
            given, joined = 0, joined[end:].lstrip()
            self._sentence = 0
        self._text = joined
        return [*pieces, (joined[given:], False)] if joined[given:] else pieces

    def cut(self) -> None:
        """The passage ends where it is."""
        self._text, self._sentence = "", 0

    def _end(self, text: str) -> int | None:
        """Where the passage that a text begins with ends; None where the text to come decides."""
        while (length := _sentence_length(text[self._sentence : MAX_PASSAGE_CHARACTERS])) is not None:
            self._sentence += length
            if self._sentence >= PASSAGE_CHARACTERS:
                return self._sentence
        if (space := _SPACE.search(text, MAX_PASSAGE_CHARACTERS)) is not None:
            return min(space.start(), MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS)
        return MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS if len(text) > MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS else None


def has_words(text: str) -> bool:
    """Whether there is something to say: marks and pictures alone are nothing."""
    return _WORD.search(text) is not None


def _sentence_length(text: str) -> int | None:
    """Characters of the sentence that a text begins with, with the space before it; None where the text to come decides."""
    window = text.lstrip()
    for found in _END.finditer(window):
        ends = _ends(window, found)
        if ends:
            return len(text) - len(window) + found.end()
        if ends is None:
            return None
    return None


def units_of(text: str) -> list[str]:
    """The units of a whole text."""
    return TextUnits()._take(text, final=True)


def _spoken(units: list[str]) -> list[str]:
    """Those with something to say: marks and pictures alone are none."""
    return [unit.strip() for unit in units if has_words(unit)]


def _unit_length(window: str, *, final: bool) -> int | None:
    """Characters of the unit that a window begins with; None where the text to come decides. A full window is all that counts."""
    full = len(window) > MAX_UNIT_CHARACTERS
    for found in _END.finditer(window):
        if found.end() > MAX_UNIT_CHARACTERS:
            break
        ends = _ends(window, found)
        if ends:
            return found.end()
        if ends is None and not full:
            break
    if full:
        return _cut(window[:MAX_UNIT_CHARACTERS])
    return len(window) if final else None


def _ends(window: str, found: re.Match[str]) -> bool | None:
    """Whether a unit ends at a mark; None where that is not known before more text."""
    if found["blank"]:
        return True
    behind = window[found.end() :]
    if not behind:
        return None
    if found["wide"]:
        return True
    if not behind[0].isspace():
        return behind[0] >= _FIRST_WIDE and found["stops"] != "."
    if found["stops"] in ("!", "?") and not found["closed"]:
        return True
    rest = behind.lstrip()
    if found["stops"] != "." or found["closed"]:
        return not rest[0].islower() if rest else None
    match = _LAST_WORD.search(window, 0, found.start())
    word = match[0] if match else ""
    short = word.lower()
    if short in _TITLES or (len(word) == 1 and word.isupper()) or (word.isdigit() and match and match.start() == 0):
        return False
    if short in _NUMBERED:
        return not rest[0].isdigit() if rest else None
    if short in _SHORT_FORMS or "." in word:
        return rest[0].isupper() if rest else None
    return True


def _cut(sentence: str) -> int:
    """Where a sentence that is too long is cut: behind a comma in its second half, else between words, else anywhere."""
    half = len(sentence) // 2
    for pattern in (_SOFT_END, _SPACE):
        ends = [found.end() for found in pattern.finditer(sentence) if found.end() > half]
        if ends:
            return ends[-1]
    return len(sentence)
