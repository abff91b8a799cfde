"""English text to the voice's phoneme ids. What it could not read aloud is refused, never left out unheard."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from hibari import Hibari
from hibari.g2p import G2P, SYMBOL_PHONEMES
from hibari.g2p.lexicon import CONSONANTS, CURRENCIES, VOWELS
from hibari.g2p.lexicon import SYMBOLS as LEXICON_SYMBOLS
from hibari.g2p.normalize import CURRENCY_WORDS, SYMBOLS
from hibari.g2p.oov import OOV
from hibari.tts import MAX_PHONEMES

from pipelines.errors import ErrorCode, InputError

# The article alone: a vowel that the voice's lexicon lists with neither.
_PHONES = VOWELS | CONSONANTS | {"ɐ"}
_READ_SYMBOLS = frozenset({*SYMBOLS, *CURRENCY_WORDS, *SYMBOL_PHONEMES, *CURRENCIES, *LEXICON_SYMBOLS, "ª", "º", "µ", "°"})
_GREEK_LETTER = re.compile("(?<![\u0370-\u03ff])[\u0370-\u03ff](?![\u0370-\u03ff])")
# Emoji, dingbats and marks of punctuation say nothing aloud; mathematical and currency signs and numbers do.
_UNSPOKEN = frozenset({"So", "Sk", "Po", "Pd", "Ps", "Pe", "Pi", "Pf", "Pc", "Zs", "Zl", "Zp", "Cc"})
_SAME = str.maketrans({"\N{MINUS SIGN}": "-", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-", "\N{FRACTION SLASH}": "/"})
_INAUDIBLE = frozenset({"Cf", "Mn", "Me"})


class EnglishReader:
    """Reads text as hibari does, with three of its gaps closed.

    - Letters of other scripts, which it would drop or garble, are `input.unpronounceable`; so are mathematical and currency
      signs that it does not read. Accents it does not know are dropped from their letter (ặ is read as a), a Greek letter
      that stands alone is read by its name, and emoji are not spoken.
    - Unknown words longer than its word model takes are read in pieces rather than cut off.
    - A sentence without commas is split between words, so that memory stays bounded.

    May be used from several threads.
    """

    def __init__(self) -> None:
        words = OOV()
        self._alphabet = frozenset(words.cin)
        #: The loaded voice, whose `from_ids` makes speech of what `read` returns.
        self.voice = Hibari(g2p=G2P(oov=_in_pieces(words, words.maxlen)))
        self._spoken = lru_cache(maxsize=4096)(self._spoken_form)

    def read(self, text: str) -> list[list[int]]:
        """The phoneme ids of each piece of speech, in order, each with the silences the model expects around it.

        Raises `InputError` (`input.unpronounceable`) for text without pronounceable English or with a letter or sign that
        the voice cannot read.
        """
        try:
            chunks = [piece for chunk in self.voice.phonemize(self._readable(text)) for piece in _between_words(chunk)]
        except InputError:
            raise
        except Exception as error:
            # The grapheme model fails with bare IndexError, ValueError and others on numbers it has no words for.
            raise _unpronounceable(f"The voice cannot read this text ({error}).") from error
        if not any(phoneme in _PHONES for chunk in chunks for phoneme in chunk):
            raise _unpronounceable("The text has nothing that can be pronounced in English.")
        return [self.voice.ids(chunk) for chunk in chunks]

    def _readable(self, text: str) -> str:
        # "[word](link)" would give the word the phonemes or the sound of the link alone.
        text = text.replace("](", "] (")
        if text.isascii():
            return text
        text = _GREEK_LETTER.sub(_greek_name, unicodedata.normalize("NFC", text).translate(_SAME))
        unreadable = dict.fromkeys(character for character in text if not character.isascii() and self._spoken(character) is None)
        if unreadable:
            shown = "".join(unreadable)[:20]
            raise _unpronounceable(f"The voice reads English and cannot pronounce {shown!r}.")
        return "".join(character if character.isascii() else self._spoken(character) or "" for character in text)

    def _spoken_form(self, character: str) -> str | None:
        """What the voice is given for a character outside ASCII; None where it would lose what the character says."""
        if character in _READ_SYMBOLS:
            return character
        category = unicodedata.category(character)
        if category in _INAUDIBLE:
            return ""
        if category == "Nd":
            return str(unicodedata.digit(character))
        if category[0] == "L" and character in self._alphabet and unicodedata.name(character, "").startswith("LATIN "):
            return character
        if not unicodedata.decomposition(character).startswith("<super>"):
            base = "".join(part for part in unicodedata.normalize("NFKD", character) if unicodedata.category(part) != "Mn")
            base = base.translate(_SAME)
            if base.strip() and all(part.isascii() or part in _READ_SYMBOLS for part in base):
                return f" {base} " if "/" in base else base
        if category[0] == "P" or category[0] == "Z":
            return character
        return " " if category in _UNSPOKEN else None


def _in_pieces(words: Callable[[str], str | None], longest: int) -> Callable[[str], str | None]:
    def read(word: str) -> str | None:
        if len(word) <= longest:
            return words(word)
        count = -(-len(word) // longest)
        size = -(-len(word) // count)
        return "".join(words(word[start : start + size]) or "" for start in range(0, len(word), size))

    return read


def _between_words(phonemes: str) -> list[str]:
    """The phonemes in pieces of at most MAX_PHONEMES, split at the last space that allows it, or within a word without one."""
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


def _unpronounceable(message: str) -> InputError:
    return InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, message, "Use a model for the text's language, or write it in English words.")
