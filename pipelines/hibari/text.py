"""Converts English text to the voice's phoneme ids. Text that the voice cannot read aloud is refused, never
skipped."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice, repeat
from pathlib import Path

from hibari.g2p import G2P, SUBTOKEN_JUNKS, SYMBOL_PHONEMES, oov
from hibari.g2p.lexicon import CONSONANTS, CURRENCIES, VOWELS
from hibari.g2p.lexicon import SYMBOLS as LEXICON_SYMBOLS
from hibari.g2p.normalize import CURRENCY_WORDS, SYMBOLS, normalize
from hibari.g2p.token import Tok
from hibari.g2p.tokenize import Tokenizer
from hibari.tts import MAX_PHONEMES

from pipelines.errors import ErrorCode, InputError, input_too_long
from pipelines.hibari.times import TimedVoice, read_as
from pipelines.pronunciation import WholeWords
from pipelines.words import words_of

# "ɐ" is the vowel of the article "a", which the lexicon has in neither set.
PHONES = VOWELS | CONSONANTS | {"ɐ"}
_READ_SYMBOLS = frozenset(
    {*SYMBOLS, *CURRENCY_WORDS, *SYMBOL_PHONEMES, *CURRENCIES, *LEXICON_SYMBOLS, "ª", "º", "µ", "°"}
)
_GREEK_LETTER = re.compile("(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])")
# Categories of characters that are not spoken: emoji, dingbats, punctuation. Mathematical and currency signs
# and numbers are spoken.
_UNSPOKEN = frozenset({"So", "Sk", "Po", "Pd", "Ps", "Pe", "Pi", "Pf", "Pc", "Zs", "Zl", "Zp", "Cc"})
_SAME = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-", "\N{FRACTION SLASH}": "/"}
)
_INAUDIBLE = frozenset({"Cf", "Mn", "Me"})
#: Maximum words that are looked up together. With 16 the slowest text of 5,000 characters takes about a
#: second, and a web address remains one group.
MAX_GROUP_WORDS = 16
#: Maximum characters without white space that are tokenized together.
MAX_RUN_CHARACTERS = 200
#: Maximum length of a text whose signs are written out: twice `Capabilities.max_text_characters`.
MAX_READABLE_CHARACTERS = 10_000


class BoundedTokenizer(Tokenizer):
    """hibari's tokenizer, in time that grows linearly with the length of the text.

    hibari removes the marks of a run without white space one by one, and reads the rest of the run each time.
    A run longer than `MAX_RUN_CHARACTERS`, which no normal text has, is tokenized in pieces.
    """

    def split(self, s: str) -> list[str]:
        """The tokens of a run without white space."""
        pieces = (s[start : start + MAX_RUN_CHARACTERS] for start in range(0, len(s), MAX_RUN_CHARACTERS))
        return [token for piece in pieces for token in super(BoundedTokenizer, self).split(piece)]


class BoundedG2P(G2P):
    """hibari's conversion of words to phonemes, in time that grows linearly with the length of the text.

    Words without white space between them ("state-of-the-art") are one group, and hibari looks up each
    sequence of words in it: its time grows with the cube of the number of words. A group longer than
    `MAX_GROUP_WORDS` is read as several groups with spaces between them.
    """

    def __init__(self, words: Callable[[str], str | None]) -> None:
        super().__init__(words)
        self.tokenizer = BoundedTokenizer(self.tokenizer.special)
        #: The words that are read for a text, with their phonemes. The last ones are kept, because the times of
        #: words need them after the phonemes.
        self.tokens = lru_cache(maxsize=32)(self._tokens_of)

    def __call__(self, text: str, normalize_text: bool = True) -> str:
        """The phonemes of a text, with a space where the text has one."""
        assert normalize_text, "the voice always reads numbers and signs as words"
        return "".join(
            (tok.phonemes or "") + (" " if tok.whitespace else "") for tok in self.tokens(text)
        ).strip()

    def _tokens_of(self, text: str) -> list[Tok]:
        return self.phonemize_tokens(self.tokenize(normalize(text)))

    @staticmethod
    def retokenize(tokens: list[Tok]) -> list[Tok | list[Tok]]:
        """Single words, and groups of up to `MAX_GROUP_WORDS` words."""
        return [
            part
            for word in G2P.retokenize(tokens)
            for part in (_groups(word) if isinstance(word, list) else [word])
        ]


def _groups(words: list[Tok]) -> Iterator[Tok | list[Tok]]:
    """Divides a group into parts of up to `MAX_GROUP_WORDS` words. A part ends after a mark, if there is one
    in its second half."""
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
    """Reads text as hibari does, except:

    - Letters of other scripts, and mathematical and currency signs that hibari does not read, raise
      `input.unpronounceable`. hibari would drop or misread them. Unknown accents are dropped (ặ is read as a),
      a single Greek letter is read by its name, and emoji are not spoken.
    - Unknown words that are too long for hibari's word model are read in pieces instead of being cut.
    - A long sentence without commas is split between words, so that memory is limited.
    - Time grows linearly with the length of any text, and reading can be stopped between sentences.

    May be used from several threads.
    """

    def __init__(self) -> None:
        words = oov.OOV()
        self._g2p = BoundedG2P(_in_pieces(words, words.maxlen))
        #: The loaded voice; its `timed` makes the speech of `pieces`.
        self.voice = TimedVoice(self._g2p)

    def pieces(
        self,
        text: str,
        is_stopped: Callable[[], bool],
        owners: deque[int] | None = None,
        pronunciations: WholeWords | None = None,
    ) -> Iterator[list[int]]:
        """Yields the phoneme ids of each piece of speech, in order, with the silences that the model expects
        around a piece. Each sentence is read when its first piece is requested.

        Ends between two sentences once `is_stopped()` is true. Yields nothing before the first piece that can
        be pronounced. Raises `InputError`: `input.unpronounceable` for text without pronounceable English or
        with a letter or sign that the voice cannot read, `input.too_long` for a text that is too long once
        its signs are written out.

        `owners`: gets, for each id of the pieces other than the space, the index of its word in `words_of(text)`.
        `pronunciations`: the phonemes of words, which replace those of the voice.
        """
        held = list[str]()
        pronounced = False
        written = (number for number, word in enumerate(words_of(text)) for _ in readable(word).split())
        for sentence in self.voice.split_sentences(readable(text)):
            if is_stopped():
                return
            marked = _marked(sentence, pronunciations)
            try:
                held += [piece for chunk in self.voice.phonemize(marked) for piece in _between_words(chunk)]
            except Exception as error:
                # The grapheme model fails with bare IndexError, ValueError and others on numbers it has no
                # words for.
                raise _unpronounceable(f"The voice cannot read this text ({error}).") from error
            if owners is not None:
                owners += self._owners(sentence, written, pronunciations)
            pronounced = pronounced or any(phoneme in PHONES for chunk in held for phoneme in chunk)
            if pronounced:
                yield from map(self.voice.ids, held)
                held = []
        if not pronounced and not is_stopped():
            raise _nothing_to_say()

    def _owners(
        self, sentence: str, written: Iterator[int], pronunciations: WholeWords | None
    ) -> Iterator[int]:
        """For each phoneme of a sentence, the index of its word. `written`: the indexes of the words that
        follow in the text."""
        words = sentence.split()
        own = list(islice(written, len(words)))
        #: The words as they are read, each with the number of its phonemes.
        read = list[tuple[str, int]]()
        for part in self.voice.split_sentences(sentence):
            begun = False
            for token in self._g2p.tokens(_marked(part, pronunciations)):
                text, count = read.pop() if begun else ("", 0)
                count += sum(one in self.voice.vocab and one != " " for one in token.phonemes or "")
                read.append((text + token.text, count))
                begun = not token.whitespace
        for place, (_, count) in zip(read_as(words, [text for text, _ in read]), read, strict=True):
            yield from repeat(own[place], count)


def _marked(text: str, pronunciations: WholeWords | None) -> str:
    """The text with phonemes as hibari reads them: `[word](/phonemes/)`."""
    if pronunciations is None:
        return text
    return pronunciations.replaced(text, lambda word, said: f"[{word}](/{said}/)")


def check_pronounceable(text: str) -> None:
    """The fast part of the checks of `EnglishReader.pieces`: it loads no model and takes microseconds.

    Raises `InputError` for a letter or sign that the voice cannot read, for text without a letter, digit or
    sign that is spoken, and for a text that is too long once its signs are written out. `pieces` rarely
    refuses a text that passes.
    """
    written = readable(text)
    if not any(character.isalnum() or character in _READ_SYMBOLS for character in written):
        raise _nothing_to_say()


def readable(text: str) -> str:
    """The text for hibari: signs that it would misread are written out or removed. Raises as
    `check_pronounceable`, except for a text without anything to say."""
    # hibari would read the link of "[word](link)" as the pronunciation of the word.
    text = text.replace("](", "] (")
    if not text.isascii():
        text = _GREEK_LETTER.sub(_greek_name, unicodedata.normalize("NFC", text).translate(_SAME))
        unreadable = dict.fromkeys(
            character for character in text if not character.isascii() and _replacement(character) is None
        )
        if unreadable:
            shown = "".join(unreadable)[:20]
            raise _unpronounceable(f"The voice reads English and cannot pronounce {shown!r}.")
        text = "".join(
            character if character.isascii() else _replacement(character) or "" for character in text
        )
    if len(text) > MAX_READABLE_CHARACTERS:
        raise input_too_long(
            f"The text has {len(text)} characters once its signs are written out.",
            "Split it.",
        )
    return text


@lru_cache(maxsize=4096)
def _replacement(character: str) -> str | None:
    """The text that replaces a character outside ASCII for the voice; None if the voice cannot say the
    character."""
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
    """The letters that hibari's model of unknown words accepts."""
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
    """The phonemes in pieces of up to MAX_PHONEMES, split at the last possible space, or within a word if
    there is no space."""
    pieces = list[str]()
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
