"""What the embedded voice reads, and what it refuses to read."""

from __future__ import annotations

import pytest

from pipelines.errors import ErrorCode, InputError
from pipelines.hibari.text import MAX_PHONEMES, EnglishReader


@pytest.fixture(scope="module")
def reader() -> EnglishReader:
    return EnglishReader()


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("e\u0301cole", "école"),
        ("Đặng", "Đang"),
        ("he\u200bl\u00adlo", "hello"),
        ("ＡＢＣ １２", "ABC 12"),
        ("π is 3", "pi is 3"),
        ("β-carotene", "beta-carotene"),
        ("25℃", "25°C"),
        ("H₂O", "H2O"),
        ("⅝ cup", "5/8 cup"),
        ("−5 degrees", "-5 degrees"),
        ("Hello 👍🏽 world", "Hello world"),
        ("٣ cats", "3 cats"),
        ("Hello", "\ufeffHello"),
    ],
)
def test_reads_as(reader: EnglishReader, text: str, same_as: str) -> None:
    assert _without_spaces(reader, text) == _without_spaces(reader, same_as)


def test_letters_that_cannot_be_read_are_named_in_their_order(reader: EnglishReader) -> None:
    with pytest.raises(InputError, match="cannot pronounce 'Привет'"):
        reader.read("Hello Привет, Привет")


@pytest.mark.parametrize(
    "text", ["café", "naïve Zürich Łódź", "don’t", "€5", "x²", "50% & more", "“Hi” — she said…", "A.B.C.", "hmm", "7", "a"]
)
def test_reads(reader: EnglishReader, text: str) -> None:
    assert reader.read(text)


@pytest.mark.parametrize(
    "text",
    [
        "你好",
        "Hello 你好 world.",
        "日本語のtext",
        "Привет",
        "αβγ",
        "क्या",
        "...",
        "—",
        "😀",
        "$",
        "'",
        "x ≤ 5",
        "₽5",
        "10⁶",
        "\ud800 hi",
        "1" * 400,
    ],
)
def test_refuses(reader: EnglishReader, text: str) -> None:
    with pytest.raises(InputError) as caught:
        reader.read(text)
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    assert caught.value.advice


def test_names_what_it_cannot_pronounce(reader: EnglishReader) -> None:
    with pytest.raises(InputError, match="你好"):
        reader.read("Hello 你好 world.")


def test_a_long_unknown_word_is_read_to_its_end(reader: EnglishReader) -> None:
    word = "blorptangiz" * 9
    assert sum(map(len, reader.read(word))) > 3 * sum(map(len, reader.read(word[:24])))


def test_markup_of_links_is_text(reader: EnglishReader) -> None:
    assert sum(map(len, reader.read("[click](https://x.y)"))) > 2 * sum(map(len, reader.read("click")))
    assert reader.read("[word](/d/)") != reader.read("[word](/b/)") != reader.read("[sword](/b/)")


@pytest.mark.parametrize("text", ["word " * 900, "word, " * 800, "a" * 4000])
def test_pieces_are_bounded_and_lose_no_words(reader: EnglishReader, text: str) -> None:
    pieces = reader.read(text)
    assert max(map(len, pieces)) <= MAX_PHONEMES + 2
    if " " in text:
        assert sum(map(len, pieces)) > 900 * 5


def _without_spaces(reader: EnglishReader, text: str) -> list[list[int]]:
    space = reader.voice.vocab[" "]
    return [[phoneme for phoneme in piece if phoneme != space] for piece in reader.read(text)]
