"""Units of a text: where sentences end, and that pieces make no difference."""

from __future__ import annotations

import random
import unicodedata
from itertools import pairwise

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from pipelines.text_units import (
    MAX_PASSAGE_CHARACTERS,
    MAX_UNIT_CHARACTERS,
    PASSAGE_CHARACTERS,
    TextUnits,
    has_words,
    units_of,
)

PIECES = [
    "Dr.",
    "Mr.",
    " ",
    "  ",
    "\n",
    "\n\n",
    "a",
    "Big",
    "word",
    "3.14",
    "e.g.",
    "etc.",
    "No.",
    " 5",
    "J.",
    ".",
    "!",
    "?",
    "...",
    "\u2026",
]
PIECES += [
    '"',
    "\u201d",
    ")",
    ",",
    "\u4f60\u597d",
    "\u3002",
    "\uff01",
    "\u300d",
    "\U0001f389",
    "x" * 150,
    "long " * 40,
    "p.m.",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def texts(pieces: list[tuple[str, bool]]) -> list[str]:
    assert all(complete for _, complete in pieces)
    return [text for text, _ in pieces if has_words(text)]


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    units, found = TextUnits(), []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += units.add(text[begin:end])
    return texts(found + units.add("", final=True))


@given(TEXTS, st.data())
def test_units_do_not_depend_on_the_pieces_of_a_text(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    assert in_pieces(text, cuts) == units_of(text)
    assert in_pieces(text, list(range(len(text)))) == units_of(text)


@given(TEXTS)
def test_units_are_the_text_without_what_nobody_says(text: str) -> None:
    units = units_of(text)
    assert all(unit == unit.strip() and len(unit) <= MAX_UNIT_CHARACTERS for unit in units)
    said = "".join(character for character in text if character.isalnum())
    assert "".join(character for unit in units for character in unit if character.isalnum()) == said


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Dr. Smith paid 3.14 dollars. He left.", ["Dr. Smith paid 3.14 dollars.", "He left."]),
        ('"Stop!" he said. Then', ['"Stop!" he said.', "Then"]),
        ("Is it 5 p.m. yet? It is 5 p.m. Go.", ["Is it 5 p.m. yet?", "It is 5 p.m.", "Go."]),
        ("No. No. 5 is alive.", ["No.", "No. 5 is alive."]),
        ("Yes... maybe. J. R. Tolkien, etc. and so on.", ["Yes... maybe.", "J. R. Tolkien, etc. and so on."]),
        ("See example.com/a.b for v1.2.3! Fine", ["See example.com/a.b for v1.2.3!", "Fine"]),
        (
            "\u4f60\u597d\u3002\u300c\u597d\uff01\u300d\u4ed6\u8bf4\u3002",
            ["\u4f60\u597d\u3002", "\u300c\u597d\uff01\u300d", "\u4ed6\u8bf4\u3002"],
        ),
        ("A title\n\nAnd text", ["A title", "And text"]),
        ("Bye! \U0001f389 ...", ["Bye!"]),
        (" \n ", []),
    ],
)
def test_where_sentences_end(text: str, units: list[str]) -> None:
    assert units_of(text) == units


def test_a_unit_is_complete_as_soon_as_the_next_character_says_so() -> None:
    units = TextUnits()
    assert units.add("It costs 3.") == []
    assert units.add("5 dollars.") == []
    assert texts(units.add(" ")) == ["It costs 3.5 dollars."]
    assert not units.pending
    assert units.add("Then wor") == []
    assert texts(units.cut()) == ["Then"]
    assert texts(units.cut()) == []
    assert units.pending
    assert units.add("ds.") == []
    assert texts(units.cut()) == ["words."]
    assert texts(units.add("", final=True)) == []


#: A grapheme each, or several: words with marks, syllables, pictures of several characters, and what has a
#: mark inside.
WORDS = [
    "word",
    "na\u0131\u0308ve",
    "e\u0323\u0302",
    "don't",
    "well-known",
    "3.14",
    "p.m.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "\u0e19\u0e49\u0e33",
]
WORDS += [
    "\U0001f469\u200d\U0001f680",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "\U0001f1e9\U0001f1ea",
    "\u4f60\u597d",
    "\u304b\u3099",
    "\u1112\u1161\u11ab" * 160,
]
BETWEEN = [
    " ",
    " ",
    "  ",
    "\n\n",
    ", ",
    ". ",
    "! ",
    "? ",
    "... ",
    "\u3002",
    "\uff0c",
    ".",
    "!",
    "\u201d ",
    "\u2026 ",
]
WRITTEN = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(BETWEEN)), max_size=12).map(
    lambda pairs: "".join(map("".join, pairs))
)


def check_cuts(text: str, parts: list[str]) -> None:
    """The parts are the text as it stands there, without what nobody says, and none ends inside a word or
    a grapheme."""
    graphemes = {found.end() for found in regex.finditer(r"\X", text)} | {0}
    place = 0
    for part in parts:
        begin = text.index(part, place)
        assert not has_words(text[place:begin])
        place = begin + len(part)
        assert place in graphemes
        one_word = len(part) >= MAX_UNIT_CHARACTERS // 2 and not any(map(str.isspace, part))
        in_word = unicodedata.category(text[place - 1])[0] in "LNMC" and not text[place : place + 1].isspace()
        assert place == len(text) or one_word or not in_word
    assert not has_words(text[place:])


@given(WRITTEN, st.data())
def test_no_unit_ends_inside_a_word_whatever_the_pieces_and_the_delays(
    text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    units, found = TextUnits(), list[tuple[str, bool]]()
    for begin, end in pairwise([0, *cuts, len(text)]):
        found += units.add(text[begin:end])
        for _ in range(data.draw(st.integers(0, 2))):
            found += units.cut()
    check_cuts(text, texts(found + units.add("", final=True)))


@given(WRITTEN, st.data())
def test_no_passage_ends_inside_a_word_whatever_the_pieces_and_the_delays(
    text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    passages, pieces = TextUnits(by_word=True), list[tuple[str, bool]]()
    for begin, end in pairwise([0, *cuts, len(text)]):
        pieces += passages.add(text[begin:end])
        for _ in range(data.draw(st.integers(0, 2))):
            pieces += passages.cut()
    joined = joined_passages(pieces + passages.add("", final=True))
    check_cuts(text, [one for one in joined if has_words(one)])


def test_a_delay_speaks_what_is_whole() -> None:
    for text, said, kept in [
        ("Please hold.", ["Please hold."], ""),
        ("One two thr", ["One two"], "thr"),
        ("It costs 3.", ["It costs"], "3."),
        ("Ask Dr.", ["Ask"], "Dr."),
        ("At 5 p.", ["At 5"], "p."),
        ("Yes, it'", ["Yes,"], "it'"),
        ("cafe\u0301", [], "cafe\u0301"),
        ("Is it\u2026", ["Is it\u2026"], ""),
        ("\u4f60\u597d\uff0c\u4e16", ["\u4f60\u597d\uff0c"], "\u4e16"),
        ("\u4f60\u597d\u3002", ["\u4f60\u597d\u3002"], ""),
    ]:
        units = TextUnits()
        assert units.add(text) == []
        assert texts(units.cut()) == said
        assert texts(units.cut()) == []
        assert texts(units.add("", final=True)) == ([kept] if kept else [])


def joined_passages(pieces: list[tuple[str, bool]]) -> list[str]:
    found = [""]
    for text, ends in pieces:
        found[-1] += text
        if ends:
            found.append("")
    return [one.rstrip() for one in found]


def passages_of(pieces: list[str]) -> list[str]:
    passages = TextUnits(by_word=True)
    found = [one for piece in pieces for one in passages.add(piece)]
    return joined_passages(found + passages.add("", final=True))


def test_passages_depend_on_the_joined_text_alone() -> None:
    rng = random.Random(4)
    parts = [
        "Good morning. ",
        "Dr. Smith, etc. ",
        "你好。",
        "word ",
        "x" * 90,
        "Really?! ",
        "\n\n",
        "3.14 ",
        "no. 5 ",
        "... ",
        "“Yes.” ",
        " ",
    ]
    for _ in range(60):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 200)))
        cuts = sorted(rng.sample(range(len(text)), min(rng.randint(0, 60), len(text))))
        split = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
        once = passages_of([text])
        assert passages_of(split) == once
        assert passages_of(list(text)) == once
        assert "".join("".join(once).split()) == "".join(text.split())
        assert all(len(one) <= MAX_PASSAGE_CHARACTERS + 200 for one in once)


def test_a_passage_ends_with_a_sentence() -> None:
    sentence = "One two three four five six seven eight nine. "
    found = passages_of([sentence * 20])
    assert [len(one) % len(sentence) for one in found[:-1]] == [len(sentence) - 1] * (len(found) - 1)
    assert len(found[0]) >= PASSAGE_CHARACTERS
