"""The words of a text: all of it, in order, and the same ones for a text that grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.words import are_spaced, words_of


def joined(words: list[str]) -> str:
    text = ""
    for number, word in enumerate(words):
        text += " " * (number > 0 and are_spaced(words[number - 1], word)) + word
    return text


@pytest.mark.parametrize(
    "words",
    [
        "Good|evening.|The|7:30|\u2014|train",
        "你|好，|世|界！|我|用|Python|3.5|写|“code”，|好|（对|吗）？|「是。」",
        "他|说：|“好。”|7|点|30|分",
        "東|京|タ|ワ|ー|へ、|ﾊﾟ|々",
        "เขา|ไป|ทำ|งา|นะๆ|ที่|ABC",
        "မြ|န်|မာ",
        "ខ្មែ|រ",
        "안녕하세요|반갑습니다",
        "नमस्ते|दुनिया",
        '"好"|他',
        "好\U0001f44d\U0001f3fd|呀",
    ],
)
def test_words_by_script(words: str) -> None:
    listed = words.split("|")
    assert words_of(joined(listed)) == listed


MIXED = st.text(
    "a1.\u4f60\u3042\u0e01\u0e40\u0e32\u0e35\u1000\u1039\u300c\u300d\uff0c\"'( \n\U0001f44d", max_size=30
)


@given(MIXED)
def test_words_are_the_whole_text_but_its_spaces(text: str) -> None:
    words = words_of(text)
    assert "".join(words) == "".join(text.split())


@given(MIXED, st.integers(0, 30))
def test_of_a_text_that_grows_only_the_last_word_changes(text: str, end: int) -> None:
    before, after = words_of(text[:end]), words_of(text)
    assert after[: max(len(before) - 1, 0)] == before[:-1]


@given(st.text("ab1.,-(]é\U0001f642 \n$&/'\"\u201c\u2014", max_size=60))
def test_words_of_scripts_with_spaces_are_what_spaces_separate(text: str) -> None:
    assert words_of(text) == text.split()
