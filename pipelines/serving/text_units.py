"""Cuts a text, also one that comes in pieces, into units that are spoken one after the other: whole
sentences.

Where a unit ends depends on the joined text alone, never on where its pieces begin and end.
"""

from __future__ import annotations

import re
import unicodedata

#: Of a unit. A longer sentence is cut behind a comma or between two words.
MAX_UNIT_CHARACTERS = 400

_CLOSERS = "\"'”’»›)\\]}」』】》〉）］｝"
_WIDE_END = re.compile(rf"(?P<wide>[。！？｡]+)[{_CLOSERS}]*")
_END = re.compile(rf"{_WIDE_END.pattern}|(?P<stops>[.!?…]+)(?P<closed>[{_CLOSERS}]*)|(?P<blank>\n[ \t\r]*\n)")
_LAST_WORD = re.compile(r"[^\W_](?:[\w.'’-]*\w)?\Z")
_SOFT_END = re.compile(rf"[,;:，；：、—–](?=\s)|[，；：、](?![{_CLOSERS}])")
_SPACE = re.compile(r"\s")
_WORD = re.compile(r"[^\W_]")
_JOINER = "\u200d"
_MARKS = frozenset({"Mn", "Mc", "Me", "Cf"})
#: Letters that are written into the one before them: Hangul's vowels and ends, marks of Kana, Thai and Lao;
#: and the skin of an emoji.
_CONTINUES = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff\uff9e\uff9f\u0e33\u0eb3\U0001f3fb-\U0001f3ff]")
_FLAG_LETTERS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))
#: Above it there are scripts that put no space between sentences.
_FIRST_WIDE = "\u2e80"
#: Never the end of a sentence: a name follows, or what was meant.
_TITLES = frozenset(
    {
        "adm",
        "bzw",
        "ca",
        "capt",
        "cf",
        "col",
        "d.h",
        "dr",
        "e.g",
        "gen",
        "gov",
        "hon",
        "i.e",
        "lt",
        "messrs",
        "mlle",
        "mme",
        "mr",
        "mrs",
    }
    | {"ms", "mt", "pres", "prof", "rep", "rev", "sen", "sgt", "st", "vs", "z.b"}
)
#: Not the end of a sentence where a number follows.
_NUMBERED = frozenset({"art", "ch", "fig", "figs", "no", "nos", "nr", "op", "p", "pp", "sec", "vol"})
#: The end of a sentence where the next word has a capital letter.
_SHORT_FORMS = frozenset({"co", "corp", "dept", "est", "etc", "inc", "jr", "ltd", "sr", "univ", "usw"})


#: A piece of text, and whether the unit or passage that it belongs to ends with it.
Piece = tuple[str, bool]


class TextUnits:
    """The text of one speaker, which grows at its end. Each piece is a unit."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def pending(self) -> bool:
        """Whether there is text that has not become a unit yet."""
        return bool(self._text)

    def add(self, text: str, *, final: bool = False) -> list[Piece]:
        """The units that are complete with this text; `final`: all of the rest too."""
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

    def cut(self) -> list[Piece]:
        """The rest, if it ends like a sentence, else up to its last whole word: the text to come may go on
        with what follows that."""
        cut = len(self._text) if _is_sentence(self._text) else _last_gap(self._text)
        rest, self._text = self._text[:cut], self._text[cut:].lstrip()
        return _spoken([rest])


#: A passage ends with the sentence in which it comes to so many characters, or at the first space behind the
#: maximum.
PASSAGE_CHARACTERS = 400
MAX_PASSAGE_CHARACTERS = 1200
_MAX_WORD_CHARACTERS = 200


class TextPassages:
    """A text that is spoken while it grows, as passages of some sentences each. A word is given once its
    end is there."""

    def __init__(self) -> None:
        #: The passage, how much of it was given, and where its last sentence begins.
        self._text = ""
        self._given = 0
        self._sentence = 0

    @property
    def pending(self) -> bool:
        """Whether a passage has begun."""
        return bool(self._text)

    def add(self, text: str, *, final: bool = False) -> list[Piece]:
        """Pieces of passages that are certain with this text, each with whether its passage ends with it;
        `final`: all of the rest."""
        pieces: list[Piece] = []
        given, joined = self._given, (self._text + text).lstrip()
        while (end := self._end(joined)) is not None:
            pieces.append((joined[given:end], True))
            given, joined = 0, joined[end:].lstrip()
            self._sentence = 0
        self._text, self._given = joined, given
        if final:
            return pieces + self._cut_at(len(joined))
        self._given = _last_gap(joined, given, with_space=True)
        return [*pieces, (joined[given : self._given], False)] if self._given > given else pieces

    def cut(self) -> list[Piece]:
        """The end of the passage, if there is one, behind its last whole word; one that waits for its end
        begins the next passage."""
        return self._cut_at(len(self._text) if _is_sentence(self._text) else self._given)

    def _cut_at(self, end: int) -> list[Piece]:
        rest = self._text[self._given : end]
        self._text, self._given, self._sentence = self._text[end:], 0, 0
        return [(rest, True)] if end else []

    def _end(self, text: str) -> int | None:
        """Where the passage that a text begins with ends; None where the text to come decides."""
        while True:
            rest = text[self._sentence : MAX_PASSAGE_CHARACTERS]
            sentence = rest.lstrip()
            if (end := _sentence_end(sentence, certain=False)) is None:
                break
            self._sentence += len(rest) - len(sentence) + end
            if self._sentence >= PASSAGE_CHARACTERS:
                return self._sentence
        last = MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS
        if (space := _SPACE.search(text, MAX_PASSAGE_CHARACTERS, last + 1)) is not None:
            return space.start()
        return _between_characters(text, last, MAX_PASSAGE_CHARACTERS) if len(text) > last else None


def has_words(text: str) -> bool:
    """Whether there is something to say: marks and pictures alone are nothing."""
    return _WORD.search(text) is not None


def _sentence_end(window: str, *, certain: bool) -> int | None:
    """Where the first sentence of a window ends; None where the text to come decides. `certain`: that of which
    the text to come decides does not end."""
    for found in _END.finditer(window):
        ends = _ends(window, found)
        if ends:
            return found.end()
        if ends is None and not certain:
            return None
    return None


def units_of(text: str) -> list[str]:
    """The units of a whole text."""
    return [unit for unit, _ in TextUnits().add(text, final=True)]


def _spoken(units: list[str]) -> list[Piece]:
    """Those with something to say: marks and pictures alone are none."""
    return [(unit.strip(), True) for unit in units if has_words(unit)]


def _unit_length(window: str, *, final: bool) -> int | None:
    """Characters of the unit that a window begins with; None where the text to come decides. A full window
    is all that counts."""
    full = len(window) > MAX_UNIT_CHARACTERS
    end = _sentence_end(window, certain=full)
    if end is not None and end <= MAX_UNIT_CHARACTERS:
        return end
    if full:
        return _cut(window)
    return len(window) if final else None


def _ends(window: str, found: re.Match[str]) -> bool | None:
    """Whether a unit ends at a mark; None where that is not known before more text."""
    if found["blank"]:
        return True
    behind = window[found.end() :]
    if not behind:
        return None
    if _belong_together(window[found.end() - 1], behind[0]):
        return False
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
    if (
        short in _TITLES
        or (len(word) == 1 and word.isupper())
        or (word.isdigit() and match and match.start() == 0)
    ):
        return False
    if short in _NUMBERED:
        return not rest[0].isdigit() if rest else None
    if short in _SHORT_FORMS or "." in word:
        return rest[0].isupper() if rest else None
    return True


def _cut(window: str) -> int:
    """Where a sentence that is too long is cut: behind a comma in its second half, else between words,
    else between characters."""
    half = MAX_UNIT_CHARACTERS // 2
    for pattern, least in ((_SOFT_END, half), (_SPACE, 0)):
        ends = [
            found.end() for found in pattern.finditer(window, 0, MAX_UNIT_CHARACTERS) if found.end() > least
        ]
        ends = [end for end in ends if not _belong_together(window[end - 1], window[end])]
        if ends:
            return ends[-1]
    return _between_characters(window, MAX_UNIT_CHARACTERS, half)


def _is_sentence(text: str) -> bool:
    """Whether a text ends like a sentence. A full stop does not end what may go on behind it: a number, a
    title, an abbreviation."""
    *_, found = (None, *_END.finditer(text))
    if found is None or found["blank"] or found.end() < len(text):
        return False
    if found["stops"] != "." or found["closed"]:
        return True
    match = _LAST_WORD.search(text, 0, found.start())
    is_word = match is not None and "." not in match[0] and len(match[0]) > 1 and match[0][-1].isalpha()
    return is_word and _ends(f"{text} ", found) is not False


def _last_gap(text: str, begin: int = 0, *, with_space: bool = False) -> int:
    """Where the last word of a text begins that may go on, without or `with_space` before it; `begin`
    where no word behind it is whole.

    A word is whole with a space behind it; in scripts without spaces, with a mark of theirs and the
    character behind that.
    """
    spaces = [found.end() if with_space else found.start() for found in _SPACE.finditer(text, begin)]
    marks = [
        found.end()
        for pattern in (_SOFT_END, _WIDE_END)
        for found in pattern.finditer(text, begin)
        if found.end() < len(text)
    ]
    gaps = (
        place
        for place in (*spaces, *marks)
        if not _belong_together(text[place - 1 : place], text[place : place + 1])
    )
    return max(gaps, default=begin)


def _between_characters(text: str, place: int, least: int) -> int:
    """The last place up to `place` that is not inside of what is written as one character; `place` where
    there is none above `least`."""
    places = range(place, least, -1)
    return next((end for end in places if not _belong_together(text[end - 1], text[end])), place)


def _belong_together(before: str, after: str) -> bool:
    """Whether two characters that follow each other are written as one: a letter and its marks, syllables
    of Hangul, an emoji."""
    if not before or not after:
        return False
    goes_on = unicodedata.category(after) in _MARKS or _CONTINUES.match(after) is not None
    return goes_on or before == _JOINER or (before in _FLAG_LETTERS and after in _FLAG_LETTERS)
