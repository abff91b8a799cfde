"""What is spoken of a text: the words of a job's lexicon in another spelling, then English numbers, dates, money
and units in words."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from jobs import installed_version
from jobs.columns import file_rows
from jobs.formatting import printable
from jobs.ledger.records import JobSpec
from pipelines.errors import ConfigError, ErrorCode, InputError, invalid, missing_library
from pipelines.languages import language_code
from pipelines.pronunciation import WholeWords
from pipelines.registry import ModelCard
from pipelines.text_units import TextUnits

#: Limits of a lexicon, which is part of the job's spec.
MAX_ENTRIES, MAX_ENTRY_CHARACTERS = 5_000, 200
#: A first row that is no entry.
_HEADER = ["word", "spelling"]
LIBRARY = "damga"
#: A line without such a mark has nothing that is read otherwise than it is written: a digit, a sign, an
#: abbreviation, a Roman number.
_WRITTEN = re.compile(r"\d|[^\w\s.,;:!?'\"()…—–’‘“”-]|\.\s*\w|\b[A-Z][a-z]{0,3}\.|\b[IVXLCDM]{2,}\b")
_LINE_ENDS = re.compile(r"(\s*\n\s*)")


def read_lexicon(path: Path) -> dict[str, str]:
    """Reads a lexicon: rows of a word and its spelling, or its phonemes as `/…/`; separated by commas, in a file
    `.tsv` by tabs. Raises `config.invalid`."""
    entries: dict[str, str] = {}
    try:
        for number, (_, row) in enumerate(file_rows(path), 1):
            if not any(map(str.strip, row)) or (number == 1 and [*map(str.strip, row)] == _HEADER):
                continue
            where = f"is wrong in row {number}"
            if len(row) != 2 or not (word := row[0].strip()) or not (spelling := row[1].strip()):
                raise _refused(
                    path,
                    f"{where}: a row is a word and its spelling, and the only header is {','.join(_HEADER)}",
                )
            if word in entries:
                raise _refused(path, f"{where}: {printable(word)!r:.100} has an earlier row")
            if (
                not re.search(r"\w", word)
                or max(len(word), len(spelling)) > MAX_ENTRY_CHARACTERS
                or len(entries) == MAX_ENTRIES
            ):
                limits = f"words with a letter or digit, up to {MAX_ENTRY_CHARACTERS} characters, and up to {MAX_ENTRIES:,} rows"
                raise _refused(path, f"{where}: a lexicon has {limits}")
            entries[word] = spelling
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _refused(path, f"cannot be read: {error}") from None
    if not entries:
        raise _refused(path, "has no rows")
    return entries


def phonemes_of(lexicon: Mapping[str, str]) -> dict[str, str]:
    """The entries with phonemes, without the slashes."""
    return {
        word: said[1:-1] for word, said in lexicon.items() if len(said) > 2 and said[0] == said[-1] == "/"
    }


def pronunciations_of(spec: JobSpec) -> WholeWords | None:
    """The words of a job's lexicon that have phonemes."""
    return WholeWords(found) if (found := phonemes_of(spec.lexicon or {})) else None


def with_spoken_text(spec: JobSpec, card: ModelCard) -> JobSpec:
    """The spec with the version of the library that normalizes. Raises `config.invalid` for a model that answers
    dialogues and for phonemes that the model does not take, and `config.missing_library`."""
    if not spec.normalize and not spec.lexicon:
        return spec
    if card.capabilities.multi_turn:
        raise invalid(
            f"The model {card.name} answers dialogues in its own words.", "Leave normalize and lexicon out."
        )
    for word, said in phonemes_of(spec.lexicon or {}).items():
        known = card.capabilities.phonemes
        if unknown := set(said) - set(known) - {" "}:
            shown = printable("".join(sorted(unknown)))
            can = f"has no phonemes {shown!r}" if known else "takes no phonemes"
            raise invalid(
                f"The lexicon has phonemes for {printable(word)!r}, but the model {card.name} {can}.",
                "Give a spelling instead." if not known else f"It has: {known}",
            )
        if re.search(r"[\s()\[\]]", word):
            raise invalid(
                f"The lexicon has phonemes for {printable(word)!r}, which is not one word.",
                "Give phonemes for each word, or a spelling.",
            )
    if not spec.normalize:
        return spec
    if (version := installed_version(LIBRARY)) is None:
        raise missing_library("Normalizing text", LIBRARY, "text")
    return msgspec.structs.replace(spec, normalizer=f"{LIBRARY} {version}")


class SpokenText:
    """Makes the spoken text from the written one, as a job's spec says. Equal specs give equal texts."""

    def __init__(self, spec: JobSpec) -> None:
        self._normalizes = bool(spec.normalize)
        lexicon = spec.lexicon or {}
        phonemes = phonemes_of(lexicon)
        self._words = WholeWords({word: said for word, said in lexicon.items() if word not in phonemes})

    @cached_property
    def _normalize(self) -> Callable[[str], str]:
        # Imported here, because a job without the option does not need it.
        from damga import TextNormalizer  # pyright: ignore[reportMissingTypeStubs]

        return TextNormalizer(lang="en").normalize

    def of(self, text: str, language: str | None) -> str:
        """The spoken text. Only a text in English, or in an unknown language, is normalized. Raises
        `input.unpronounceable` if the library fails."""
        spoken = self._words.replaced(text, lambda _, said: said)
        if self._normalizes and language_code(language or "en") == "en":
            try:
                spoken = "".join(map(self._line, _LINE_ENDS.split(spoken)))
            except Exception as error:
                raise InputError(
                    ErrorCode.INPUT_UNPRONOUNCEABLE,
                    f"The text cannot be normalized: {error!r:.200}.",
                    "Write it as it is spoken.",
                ) from error
        return spoken

    def _line(self, line: str) -> str:
        """A line in words. The time of the library grows with the square of the length, so it gets sentences."""
        if _WRITTEN.search(line) is None:
            return line
        units = [unit for unit, _ in TextUnits().add(line, final=True)]
        said = " ".join([self._normalize(unit) if _WRITTEN.search(unit) else unit for unit in units])
        # Space alone is no difference.
        return line if said.split() == line.split() else said


def _refused(path: Path, why: str) -> ConfigError:
    return invalid(f"The lexicon {printable(str(path))} {why}.", "docs/texts.md describes the file.")
