"""What the embedded voice reads, and what it refuses to read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import pytest
from hibari.g2p import G2P
from hibari.g2p.normalize import normalize
from hibari.g2p.tokenize import Tokenizer
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import ErrorCode, InputError
from pipelines.hibari.text import (
    MAX_GROUP_WORDS,
    MAX_PHONEMES,
    MAX_READABLE_CHARACTERS,
    MAX_RUN_CHARACTERS,
    EnglishReader,
    check_pronounceable,
    readable,
)

#: Runs without a space that hibari alone reads in the cube, or the square, of their length.
GLUED = (
    "a-", "a/", "A-", "1-", "1%", "1m", "1a", "b-2-", "aB1", "a@", "a&", "a.com/", "and/or/", "é-", "-1", "1+1", "'a", "a's", "a.", "aB",
    "state-of-the-art-",
    "a😀", "1:1", "a—", "a…", "1,", "$1", "x²", "(a)", "(", "!.", "$", '"', "'",
)  # fmt: skip
NORMAL = (
    "It is a state-of-the-art, once-in-a-lifetime, jack-of-all-trades kind of thing; mother-in-law's included.",
    "See https://www.example.com/docs/a-long-page_name.html or write to jane.doe+news@mail.example.co.uk today.",
    "At 12:30 p.m. on 03/04/2024 she paid $1,234.56 (about €1,100) for 3.5kg of AB-12/C-7.",
    "“Don’t!” he said—she didn’t…and/or wouldn’t; rock’n’roll, A.B.C., U.S.A., e.g., 5'11\", x=y+2, 50%-60%, #1 & @home.",
    "The dates 1999-12-31 and 555-123-4567, ranges 10-20, 3/4 cups, 1st, 22nd, iPhone15ProMax, COVID-19, F-16s, H2O.",
    "antidisestablishmentarianism and pneumonoultramicroscopicsilicovolcanoconiosis are long.",
)


def read(reader: EnglishReader, text: str, given_up: Callable[[], bool] = lambda: False) -> list[list[int]]:
    return list(reader.pieces(text, given_up))


@lru_cache(maxsize=1)
def shared_reader() -> EnglishReader:
    return EnglishReader()


@pytest.fixture(scope="module")
def reader() -> EnglishReader:
    return shared_reader()


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
        read(reader, "Hello Привет, Привет")


@pytest.mark.parametrize(
    "text",
    [
        "café",
        "naïve Zürich Łódź",
        "don’t",
        "€5",
        "x²",
        "50% & more",
        "“Hi” — she said…",
        "A.B.C.",
        "hmm",
        "7",
        "a",
    ],
)
def test_reads(reader: EnglishReader, text: str) -> None:
    assert read(reader, text)


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
        read(reader, text)
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    assert caught.value.advice


def test_names_what_it_cannot_pronounce(reader: EnglishReader) -> None:
    with pytest.raises(InputError, match="你好"):
        read(reader, "Hello 你好 world.")


def test_a_long_unknown_word_is_read_to_its_end(reader: EnglishReader) -> None:
    word = "blorptangiz" * 9
    assert sum(map(len, read(reader, word))) > 3 * sum(map(len, read(reader, word[:24])))


def test_markup_of_links_is_text(reader: EnglishReader) -> None:
    assert sum(map(len, read(reader, "[click](https://x.y)"))) > 2 * sum(map(len, read(reader, "click")))
    assert read(reader, "[word](/d/)") != read(reader, "[word](/b/)") != read(reader, "[sword](/b/)")


@pytest.mark.parametrize("text", ["word " * 900, "word, " * 800, "a" * 4000])
def test_pieces_are_bounded_and_lose_no_words(reader: EnglishReader, text: str) -> None:
    pieces = read(reader, text)
    assert max(map(len, pieces)) <= MAX_PHONEMES + 2
    if " " in text:
        assert sum(map(len, pieces)) > 900 * 5


def _without_spaces(reader: EnglishReader, text: str) -> list[list[int]]:
    space = reader.voice.vocab[" "]
    return [[phoneme for phoneme in piece if phoneme != space] for piece in read(reader, text)]


SENTENCES = (
    "Keep the receipt, please.",
    "What will Mister Wilson think about our plan?",
    "Why does a young engineer always leave so early?",
    "The tall captain found a silver coin under the table.",
    "Our new neighbor sold the small boat to a stranger shortly after lunch.",
    "The tall captain watched the ships leave the harbor during the summer holiday.",
    "My younger sister told a funny story about a clever fox on the first day of spring.",
    "The tall captain found a silver coin under the table on the first day of spring, which made the others laugh.",
)


def test_normal_text_sounds_as_hibari_reads_it(reader: EnglishReader) -> None:
    bounded = reader.voice.g2p
    plain = G2P(bounded.oov)
    for text in (*NORMAL, *SENTENCES):
        assert bounded(text) == plain(text), text


def lookups(reader: EnglishReader, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the lexicon is asked while a text is read."""
    lexicon: Callable[..., object] = reader.voice.g2p.lexicon
    asked = 0

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(lexicon, name)

        def __call__(self, *given: object) -> object:
            nonlocal asked
            asked += 1
            return lexicon(*given)

    with monkeypatch.context() as patch:
        patch.setattr(reader.voice.g2p, "lexicon", Counted())
        with suppress(InputError):
            read(reader, text)
    return asked


def bound(text: str) -> int:
    """Lookups of a text at the worst: its characters are words, and each is looked up once for every place
    in its group."""
    return MAX_GROUP_WORDS * (len(normalize(readable(text))) + 1)


@pytest.mark.parametrize("pattern", GLUED)
def test_the_work_of_reading_grows_with_the_length_alone(
    reader: EnglishReader, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (pattern * 240)[:240]
    assert lookups(reader, text, monkeypatch) <= bound(text)


@given(st.text("aAbé19-._'’/,:;@#$%&()+\"😀— ", min_size=1, max_size=6))
def test_no_pattern_takes_more_work_than_its_length(pattern: str) -> None:
    text = (pattern * 120)[:120]
    with pytest.MonkeyPatch.context() as patch:
        assert lookups(shared_reader(), text, patch) <= bound(text)


@pytest.mark.parametrize("pattern", GLUED)
def test_no_run_is_taken_apart_that_is_longer_than_its_bound(
    reader: EnglishReader, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    split = Tokenizer.split
    monkeypatch.setattr(Tokenizer, "split", lambda self, run: runs.append(len(run)) or split(self, run))
    with suppress(InputError):
        read(reader, pattern * (2 * MAX_RUN_CHARACTERS // len(pattern)))
    assert 0 < max(runs) <= MAX_RUN_CHARACTERS


def test_signs_that_are_many_letters_written_out_are_bounded(reader: EnglishReader) -> None:
    with pytest.raises(InputError) as caught:
        read(reader, "㏂" * (MAX_READABLE_CHARACTERS // 4 + 1))
    assert caught.value.code is ErrorCode.INPUT_TOO_LONG


def test_reading_can_be_given_up_between_sentences(reader: EnglishReader) -> None:
    left = iter((False, False, True, True))
    assert read(reader, "One. Two. Three. Four.", lambda: next(left)) == read(reader, "One. Two.")


@pytest.mark.parametrize("text", ["你好", "...", "😀", "$ 10⁶", "x ≤ 5", " \u200b"])
def test_what_cannot_be_pronounced_is_known_without_a_model(text: str) -> None:
    with pytest.raises(InputError) as caught:
        check_pronounceable(text)
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE


@pytest.mark.parametrize("text", [*NORMAL, "café", "Đặng", "H₂O", "7", "a", "π is 3", "&", "€5"])
def test_what_can_be_pronounced_passes_without_a_model(reader: EnglishReader, text: str) -> None:
    check_pronounceable(text)
    assert read(reader, text)
