"""Cuts a text, which may arrive in pieces, into sentences that are spoken one after the other, each by a request
of its own.

The cuts depend only on the whole text, not on how it was divided into pieces.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipelines.request import Capabilities, Message, SynthesisRequest

#: Maximum length of a unit. A longer sentence is cut after a comma or between two words.
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
#: Characters that combine with the one before them: Hangul's vowels and finals, marks of Kana, Thai and Lao,
#: and the skin tone of an emoji.
_CONTINUES = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff\uff9e\uff9f\u0e33\u0eb3\U0001f3fb-\U0001f3ff]")
_FLAG_LETTERS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))
#: First character of the scripts without spaces between sentences.
_FIRST_WIDE = "\u2e80"
#: Abbreviations that never end a sentence.
_TITLE = re.compile(
    r"adm|bzw|ca|capt|cf|col|d\.h|dr|e\.g|gen|gov|hon|i\.e|lt|messrs|mlle|mme|mr|mrs|ms|mt|pres|prof|rep|rev"
    r"|sen|sgt|st|vs|z\.b"
)
#: Abbreviations that do not end a sentence before a number.
_NUMBERED = re.compile(r"art|ch|figs?|nos?|nr|op|pp?|sec|vol")
#: Abbreviations that end a sentence only before a capital letter.
_SHORT_FORM = re.compile(r"co|corp|dept|est|etc|inc|jr|ltd|sr|univ|usw")


#: A passage ends with the sentence that reaches this length, or at the first space after the maximum.
PASSAGE_CHARACTERS = 400
MAX_PASSAGE_CHARACTERS = 1200
#: If no space follows within this many characters after the maximum, the passage is cut inside a word.
_MAX_WORD_CHARACTERS = 200

#: Maximum length of a text that is spoken in parts.
MAX_LONG_CHARACTERS = 200_000
#: Seconds of silence between two parts of a text, within a paragraph and between paragraphs.
SENTENCE_PAUSE = 0.4
PARAGRAPH_PAUSE = 0.8
_PARAGRAPH_END = re.compile(r"\n[ \t\r]*\n")

#: A piece of text, and whether it ends its unit or passage.
Piece = tuple[str, bool]


class TextPart(NamedTuple):
    """A part of a text that is too long for one request."""

    text: str
    #: Seconds of silence after it, if another part follows.
    pause: float


class TextUnits:
    """Cuts a growing text into units: whole sentences, or with `by_word` passages of several sentences, which
    are returned word by word."""

    def __init__(self, *, by_word: bool = False) -> None:
        self._by_word = by_word
        self._unit_end = self._passage_end if by_word else _sentence_cut
        #: The current unit; how many of its characters were returned; and where the last sentence of a
        #: passage begins.
        self._text = ""
        self._given = self._sentence = 0

    @property
    def pending(self) -> bool:
        """Whether there is an unfinished unit."""
        return bool(self._text)

    def add(self, text: str, *, final: bool = False) -> list[Piece]:
        """Adds text; returns the pieces that later text cannot change, and with `final` all the rest."""
        self._text = (self._text + text).lstrip()
        pieces = list[Piece]()
        while (end := self._unit_end(self._text)) is not None:
            pieces += self._end_at(end)
        if final:
            return pieces + self._end_at(len(self._text))
        if self._by_word and (gap := _last_gap(self._text, self._given)) > self._given:
            pieces.append((self._text[self._given : gap], False))
            self._given = gap
        return pieces

    def cut(self) -> list[Piece]:
        """Ends the current unit: all of it if it ends like a sentence, else up to its last complete word. The
        remainder begins the next unit."""
        return self._end_at(
            len(self._text) if _is_sentence(self._text) else _last_gap(self._text, self._given)
        )

    def _end_at(self, end: int) -> list[Piece]:
        rest = self._text[self._given : end]
        self._text = self._text[end:].lstrip()
        self._given = 0
        self._sentence = 0
        return [(rest if self._by_word else rest.strip(), True)] if end else []

    def _passage_end(self, text: str) -> int | None:
        """The end of the first passage of a text; None if it depends on later text."""
        while self._sentence < PASSAGE_CHARACTERS:
            rest = text[self._sentence : MAX_PASSAGE_CHARACTERS]
            sentence = rest.lstrip()
            if (end := _sentence_end(sentence, certain=False)) is None:
                break
            self._sentence += len(rest) - len(sentence) + end
        else:
            return self._sentence
        last = MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS
        if (space := _SPACE.search(text, MAX_PASSAGE_CHARACTERS, last + 1)) is not None:
            return space.start()
        return _between_characters(text, last, MAX_PASSAGE_CHARACTERS) if len(text) > last else None


def has_words(text: str) -> bool:
    """Whether the text has a letter or a digit."""
    return _WORD.search(text) is not None


def _sentence_end(window: str, *, certain: bool) -> int | None:
    """The end of the first sentence of a window; None if it depends on later text, or there is none.
    `certain`: a mark that depends on later text counts as no end."""
    for found in _END.finditer(window):
        ends = _ends(window, found)
        if ends:
            return found.end()
        if ends is None and not certain:
            return None
    return None


def units_of(text: str, *, by_word: bool = False) -> list[str]:
    """The units, or with `by_word` the passages, of a complete text that have words."""
    units = TextUnits(by_word=by_word).add(text, final=True)
    return [unit.strip() for unit, _ in units if has_words(unit)]


def parts_of(text: str, able: Capabilities) -> list[TextPart]:
    """The parts of a text that is too long for one request of a model: passages of several sentences of one
    paragraph, or single sentences if a passage may be too long too. Empty: the text is not too long, has no
    words, or the model answers whole dialogues."""
    if len(text) <= able.max_text_characters or able.multi_turn:
        return []
    by_word = able.max_text_characters >= MAX_PASSAGE_CHARACTERS + _MAX_WORD_CHARACTERS
    parts = list[TextPart]()
    for paragraph in _PARAGRAPH_END.split(text):
        units = units_of(paragraph, by_word=by_word)
        parts += map(TextPart, units, [SENTENCE_PAUSE] * (len(units) - 1) + [PARAGRAPH_PAUSE])
    return parts


def unit_seed(seed: int, number: int) -> int:
    """The seed of a unit. The first unit has the seed of the request, so that a text of one unit sounds the
    same on every route."""
    if not number:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest(), "big") >> 1


def unit_request(request: SynthesisRequest, text: str, number: int) -> SynthesisRequest:
    """The request for one unit of a text, which replaces the last message of `request`."""
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        messages=(*request.messages[:-1], Message("user", "text", text)),
        seed=unit_seed(request.seed, number),
    )


def unit_requests(request: SynthesisRequest, units: Sequence[str]) -> list[SynthesisRequest]:
    """The requests for the units of a text."""
    return [unit_request(request, text, number) for number, text in enumerate(units)]


def _sentence_cut(text: str) -> int | None:
    """The end of the first sentence of a text, or the cut of one that is too long; None if it depends on
    later text."""
    window = text[: MAX_UNIT_CHARACTERS + 1]
    full = len(window) > MAX_UNIT_CHARACTERS
    end = _sentence_end(window, certain=full)
    if end is not None and end <= MAX_UNIT_CHARACTERS:
        return end
    if not full:
        return None
    # It is cut after a comma in its second half, else between words, else between characters.
    half = MAX_UNIT_CHARACTERS // 2
    for pattern, minimum in ((_SOFT_END, half), (_SPACE, 0)):
        ends = [
            found.end() for found in pattern.finditer(window, 0, MAX_UNIT_CHARACTERS) if found.end() > minimum
        ]
        ends = [end for end in ends if not _belong_together(window[end - 1], window[end])]
        if ends:
            return ends[-1]
    return _between_characters(window, MAX_UNIT_CHARACTERS, half)


def _ends(window: str, found: re.Match[str]) -> bool | None:
    """Whether a unit ends at a mark; None if that depends on later text."""
    if found["blank"]:
        return True
    after = window[found.end() :]
    if not after:
        return None
    if _belong_together(window[found.end() - 1], after[0]):
        return False
    if found["wide"]:
        return True
    if not after[0].isspace():
        return after[0] >= _FIRST_WIDE and found["stops"] != "."
    if found["stops"] in ("!", "?") and not found["closed"]:
        return True
    rest = after.lstrip()
    if found["stops"] != "." or found["closed"]:
        return not rest[0].islower() if rest else None
    match = _LAST_WORD.search(window, 0, found.start())
    word = match[0] if match else ""
    short = word.lower()
    if (
        _TITLE.fullmatch(short)
        or (len(word) == 1 and word.isupper())
        or (word.isdigit() and match and match.start() == 0)
    ):
        return False
    if _NUMBERED.fullmatch(short):
        return not rest[0].isdigit() if rest else None
    if _SHORT_FORM.fullmatch(short) or "." in word:
        return rest[0].isupper() if rest else None
    return True


def _is_sentence(text: str) -> bool:
    """Whether a text ends like a sentence. A full stop after a number, a title or an abbreviation is no end."""
    *_, found = (None, *_END.finditer(text))
    if found is None or found["blank"] or found.end() < len(text):
        return False
    if found["stops"] != "." or found["closed"]:
        return True
    match = _LAST_WORD.search(text, 0, found.start())
    is_word = match is not None and "." not in match[0] and len(match[0]) > 1 and match[0][-1].isalpha()
    return is_word and _ends(f"{text} ", found) is not False


def _last_gap(text: str, begin: int) -> int:
    """The start of the last word of a text, which may be incomplete; `begin` if no word after it is complete.

    A word is complete if a space follows; in scripts without spaces, if a mark and another character follow.
    """
    return max(
        (
            found.end()
            for pattern in (_SPACE, _SOFT_END, _WIDE_END)
            for found in pattern.finditer(text, begin)
            if (found.end() < len(text) or pattern is _SPACE)
            and not _belong_together(text[found.end() - 1], text[found.end() : found.end() + 1])
        ),
        default=begin,
    )


def _between_characters(text: str, place: int, minimum: int) -> int:
    """The last place up to `place`, and above `minimum`, that is not inside a written character; `place` if
    there is none."""
    places = range(place, minimum, -1)
    return next((end for end in places if not _belong_together(text[end - 1], text[end])), place)


def _belong_together(before: str, after: str) -> bool:
    """Whether two adjacent characters are written as one: a letter and its marks, a syllable of Hangul, an
    emoji."""
    if not before or not after:
        return False
    continues = unicodedata.category(after) in _MARKS or _CONTINUES.match(after) is not None
    return continues or before == _JOINER or (before in _FLAG_LETTERS and after in _FLAG_LETTERS)
