"""English text to the voice's phoneme ids. What it could not read aloud is refused, never left out
unheard."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from hibari import Hibari
from hibari.g2p import G2P, SUBTOKEN_JUNKS, SYMBOL_PHONEMES, oov
from hibari.g2p.lexicon import CONSONANTS, CURRENCIES, VOWELS
from hibari.g2p.lexicon import SYMBOLS as LEXICON_SYMBOLS
from hibari.g2p.normalize import CURRENCY_WORDS, SYMBOLS
from hibari.g2p.token import Tok
from hibari.g2p.tokenize import Tokenizer
from hibari.tts import MAX_PHONEMES

from pipelines.errors import ErrorCode, InputError

# The article alone: a vowel that the voice's lexicon lists with neither.
_PHONES = VOWELS | CONSONANTS | {"ɐ"}
_READ_SYMBOLS = frozenset(
    {*SYMBOLS, *CURRENCY_WORDS, *SYMBOL_PHONEMES, *CURRENCIES, *LEXICON_SYMBOLS, "ª", "º", "µ", "°"}
)
_GREEK_LETTER = re.compile("(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])")
# Emoji, dingbats and marks of punctuation say nothing aloud; mathematical and currency signs and numbers do.
_UNSPOKEN = frozenset({"So", "Sk", "Po", "Pd", "Ps", "Pe", "Pi", "Pf", "Pc", "Zs", "Zl", "Zp", "Cc"})
_SAME = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-", "\N{FRACTION SLASH}": "/"}
)
_INAUDIBLE = frozenset({"Cf", "Mn", "Me"})
#: Words that are looked up together: 16 keep the worst of 5,000 characters at about a second, and a web
#: address whole.
MAX_GROUP_WORDS = 16
MAX_RUN_CHARACTERS = 200
#: Of a text whose signs are written out; twice the longest text (`Capabilities.max_text_characters`).
MAX_READABLE_CHARACTERS = 10_000


class BoundedTokenizer(Tokenizer):
    """hibari's tokenizer, which peels marks off a run without white space one by one and looks at all of
    the rest each time.

    A longer run than `MAX_RUN_CHARACTERS`, which no normal text has, is taken apart in pieces.
    """

    def split(self, s: str) -> list[str]:
        """The tokens of a run without white space."""
        pieces = (s[start : start + MAX_RUN_CHARACTERS] for start in range(0, len(s), MAX_RUN_CHARACTERS))
        return [token for piece in pieces for token in super(BoundedTokenizer, self).split(piece)]


class BoundedG2P(G2P):
    """hibari's words to phonemes, in time that grows with the length of the text.

    Words without white space between them ("state-of-the-art") are one group, and hibari looks up each
    stretch of a group: time grows with the cube of its words. A longer group than `MAX_GROUP_WORDS` is
    read as several, with a space between.
    """

    def __init__(self, words: Callable[[str], str | None]) -> None:
        super().__init__(words)
        self.tokenizer = BoundedTokenizer(self.tokenizer.special)

    @staticmethod
    def retokenize(tokens: list[Tok]) -> list[Tok | list[Tok]]:
        """Single words, and groups of at most `MAX_GROUP_WORDS`."""
        return [
            part
            for word in G2P.retokenize(tokens)
            for part in (_groups(word) if isinstance(word, list) else [word])
        ]


def _groups(words: list[Tok]) -> Iterator[Tok | list[Tok]]:
    """The words of a group in runs of at most `MAX_GROUP_WORDS`, which end behind a mark where there is
    one in their second half."""
    while len(words) > MAX_GROUP_WORDS:
        marks = (
            end
            for end in range(MAX_GROUP_WORDS, MAX_GROUP_WORDS // 2, -1)
            if set(words[end - 1].text) <= SUBTOKEN_JUNKS
        )
        cut = next(marks, MAX_GROUP_WORDS)
        words[cut - 1].whitespace = " "
        yield words[:cut]
        words = words[cut:]
    yield words if len(words) > 1 else words[0]


class EnglishReader:
    """Reads text as hibari does, with four of its gaps closed.

    - Letters of other scripts, which it would drop or garble, are `input.unpronounceable`; so are
      mathematical and currency
      signs that it does not read. Accents it does not know are dropped from their letter (ặ is read as a), a Greek letter
      that stands alone is read by its name, and emoji are not spoken.
    - Unknown words longer than its word model takes are read in pieces rather than cut off.
    - A sentence without commas is split between words, so that memory stays bounded.
    - Time grows with the length of the text, whatever it is made of, and reading can be given up between
      sentences.

    May be used from several threads.
    """

    def __init__(self) -> None:
        words = oov.OOV()
        #: The loaded voice, whose `from_ids` makes speech of `pieces`.
        self.voice = Hibari(g2p=BoundedG2P(_in_pieces(words, words.maxlen)))

    def pieces(self, text: str, given_up: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
        """The phoneme ids of each piece of speech, in order, each with the silences the model expects
        around it, and each sentence when it is asked for.

        Between sentences it asks `given_up`; then it ends. Nothing comes of a text before the first piece
        that can be pronounced. Raises `InputError`: `input.unpronounceable` for text without pronounceable
        English or with a letter or sign that the voice cannot read, `input.too_long` for signs that written
        out are too many characters.
        """
        held: list[str] = []
        pronounced = False
        for sentence in self.voice.split_sentences(readable(text)):
            if given_up():
                return
            held += self._phonemes(sentence)
            pronounced = pronounced or any(phoneme in _PHONES for chunk in held for phoneme in chunk)
            if pronounced:
                yield from map(self.voice.ids, held)
                held = []
        if not pronounced and not given_up():
            raise _nothing_to_say()

    def _phonemes(self, sentence: str) -> list[str]:
        try:
            return [piece for chunk in self.voice.phonemize(sentence) for piece in _between_words(chunk)]
        except Exception as error:
            # The grapheme model fails with bare IndexError, ValueError and others on numbers it has no words
            # for.
            raise _unpronounceable(f"The voice cannot read this text ({error}).") from error


def check_pronounceable(text: str) -> None:
    """The cheap part of `EnglishReader.pieces`, for submit: no model is loaded, and it costs microseconds.

    Raises `InputError` for a letter or sign that the voice cannot read, for text without a letter, digit
    or sign that is spoken, and for signs that written out are too many characters. What passes may still
    be refused by `pieces`, but rarely.
    """
    written = readable(text)
    if not any(character.isalnum() or character in _READ_SYMBOLS for character in written):
        raise _nothing_to_say()


def readable(text: str) -> str:
    """The text as hibari is given it: what it would misread is written out or left out. Raises as
    `check_pronounceable`."""
    # "[word](link)" would give the word the phonemes or the sound of the link alone.
    text = text.replace("](", "] (")
    if not text.isascii():
        text = _GREEK_LETTER.sub(_greek_name, unicodedata.normalize("NFC", text).translate(_SAME))
        unreadable = dict.fromkeys(
            character for character in text if not character.isascii() and _spoken(character) is None
        )
        if unreadable:
            shown = "".join(unreadable)[:20]
            raise _unpronounceable(f"The voice reads English and cannot pronounce {shown!r}.")
        text = "".join(character if character.isascii() else _spoken(character) or "" for character in text)
    if len(text) > MAX_READABLE_CHARACTERS:
        raise InputError(
            ErrorCode.INPUT_TOO_LONG,
            f"The text has {len(text)} characters once its signs are written out.",
            "Split it.",
        )
    return text


@lru_cache(maxsize=4096)
def _spoken(character: str) -> str | None:
    """What the voice is given for a character outside ASCII; None where it would lose what the character
    says."""
    if character in _READ_SYMBOLS:
        return character
    category = unicodedata.category(character)
    if category in _INAUDIBLE:
        return ""
    if category == "Nd":
        return str(unicodedata.digit(character))
    if (
        category[0] == "L"
        and character in _alphabet()
        and unicodedata.name(character, "").startswith("LATIN ")
    ):
        return character
    if not unicodedata.decomposition(character).startswith("<super>"):
        base = "".join(
            part for part in unicodedata.normalize("NFKD", character) if unicodedata.category(part) != "Mn"
        )
        base = base.translate(_SAME)
        if base.strip() and all(part.isascii() or part in _READ_SYMBOLS for part in base):
            return f" {base} " if "/" in base else base
    if category[0] == "P" or category[0] == "Z":
        return character
    return " " if category in _UNSPOKEN else None


@lru_cache(maxsize=1)
def _alphabet() -> frozenset[str]:
    """The letters that hibari's model of unknown words takes."""
    return frozenset(json.loads((Path(oov.ASSETS) / "oov.json").read_text(encoding="utf-8"))["in"])


def _in_pieces(words: Callable[[str], str | None], longest: int) -> Callable[[str], str | None]:
    def read(word: str) -> str | None:
        if len(word) <= longest:
            return words(word)
        count = -(-len(word) // longest)
        size = -(-len(word) // count)
        return "".join(words(word[start : start + size]) or "" for start in range(0, len(word), size))

    return read


def _between_words(phonemes: str) -> list[str]:
    """The phonemes in pieces of at most MAX_PHONEMES, split at the last space that allows it, or within a
    word without one."""
    pieces: list[str] = []
    while len(phonemes) > MAX_PHONEMES:
        cut = phonemes.rfind(" ", 1, MAX_PHONEMES + 1)
        cut = cut if cut > 0 else MAX_PHONEMES
        pieces.append(phonemes[:cut])
        phonemes = phonemes[cut:].lstrip(" ")
    return [*pieces, phonemes] if phonemes else pieces


def _greek_name(match: re.Match[str]) -> str:
    name = unicodedata.name(match.group(), "")
    if " LETTER " not in name:
        return match.group()
    return name.split(" LETTER ")[1].split(" WITH ")[0].lower().replace("lamda", "lambda")


def _nothing_to_say() -> InputError:
    return _unpronounceable("The text has nothing that can be pronounced in English.")


def _unpronounceable(message: str) -> InputError:
    return InputError(
        ErrorCode.INPUT_UNPRONOUNCEABLE,
        message,
        "Use a model for the text's language, or write it in English words.",
    )
