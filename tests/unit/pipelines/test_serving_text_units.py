"""Units of a text: where sentences end, and that pieces make no difference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.serving.text_units import (
    MAX_PASSAGE_CHARACTERS,
    MAX_UNIT_CHARACTERS,
    PASSAGE_CHARACTERS,
    TextPassages,
    TextUnits,
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
PIECES += ['"', "\u201d", ")", ",", "\u4f60\u597d", "\u3002", "\uff01", "\u300d", "\U0001f389", "x" * 150, "long " * 40, "p.m."]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    units, found = TextUnits(), []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += units.add(text[begin:end])
    return found + units.flush()


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
    assert units.add(" ") == ["It costs 3.5 dollars."]
    assert not units.pending
    assert units.add("Then wor") == []
    assert units.words() == ["Then"]
    assert units.pending
    assert units.add("ds.") == []
    assert units.flush() == ["words."]
    assert units.flush() == []


def passages_of(pieces: list[str]) -> list[str]:
    passages, found = TextPassages(), [""]
    for piece in pieces:
        for text, ends in passages.add(piece):
            found[-1] += text
            if ends:
                found.append("")
    return [one.rstrip() for one in found]


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
    for _ in range(300):
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
