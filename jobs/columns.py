"""Columns of tables and keys of rows: which ones are the fields of a dialogue, and which ones its metadata."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from jobs.dialogue import LINE_KEYS, VoiceOf, chat_dialogue, row_dialogue
from jobs.formatting import printable
from jobs.ledger.records import Reading
from jobs.source import MAX_LINE_BYTES, TEXT_COLUMNS, Record, rejected_line, wrong_format
from pipelines.errors import InputError, bad_line, input_too_long

#: The fields of a row. `--column FIELD=NAME` selects the column of a field.
FIELDS = (
    "text",
    "id",
    "example_id",
    "voice",
    "speaker",
    "language",
    "instruct",
    "seed",
    "reference_audio",
    "reference_text",
)
#: Field -> usual names of its column, if they are not just that of the field. The first one that the table has is used.
_USUAL_NAMES = {"text": TEXT_COLUMNS, "speaker": ("speaker", "speaker_id")}
# The csv module refuses fields of more than 128 KiB by default.
csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
_encode = msgspec.json.encode


def csv_dialect(header: str, *, tabs: bool) -> dict[str, Any]:
    """The options of `csv.reader` for CSV (RFC 4180), separated by commas, or by semicolons if the header has no
    comma; or for TSV, without quoting."""
    if tabs:
        return {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return {"delimiter": ";" if ";" in header and "," not in header else ",", "strict": True}


def file_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of its last line, cells) of each row of a CSV file, or of a TSV file by its name. Raises
    `OSError`, `UnicodeDecodeError` or `csv.Error`."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        header = lines.readline()
        lines.seek(0)
        rows = csv.reader(lines, **csv_dialect(header, tabs=path.suffix.lower() == ".tsv"))
        for cells in rows:
            yield rows.line_num, cells


class Columns:
    """Finds the columns of a table, and converts its rows."""

    def __init__(
        self,
        names: Sequence[str],
        chosen: Reading,
        uri: str,
        voice_of: VoiceOf,
        left_out: set[str],
        *,
        whole: bool = True,
    ) -> None:
        """`left_out`: columns whose values JSON cannot contain; others are added as their rows are read.
        `whole`: the names are those of all rows, not of one.

        Raises `input.wrong_format` for a table without the needed columns, with two columns of the same name,
        or with the name of another key of dialogues.
        """
        wanted = chosen.columns or {}
        shown = ", ".join(repr(printable(name, 40)) for name in names[:20]) or "none"
        asked = [*wanted.values(), *(chosen.keep or ()), *(chosen.drop or ())]
        for name in asked if whole else ():
            if name not in names and name != "*":
                raise wrong_format(
                    uri, f"has no column {printable(name, 40)!r}", f"Its columns are: {shown}."
                )
        #: Field -> name of its column.
        self.of: dict[str, str] = {}
        for field in FIELDS:
            usual = (wanted[field],) if field in wanted else _USUAL_NAMES.get(field, (field,))
            found = [name for name in usual if name in names]
            # Without a choice by speaker, the name of a speaker is metadata alone.
            if found and (voice_of or field != "speaker") and not (field == "example_id" and "id" in wanted):
                self.of[field] = found[0]
        self.chat = "text" not in self.of and "messages" in names
        if self.chat:
            if voice_of is not None:
                raise wrong_format(
                    uri, "has chats, which name no speakers", "Leave --voice-for and --voices-by out."
                )
            ids = {field: name for field, name in self.of.items() if field in LINE_KEYS}
            self.of = {**ids, "messages": "messages"}
        elif "text" not in self.of:
            raise wrong_format(
                uri,
                f"has no column `text`; its columns are: {shown}",
                "Give the column with the text: --column text=NAME.",
            )
        counts = Counter(names)
        # A speaker only chooses a voice, so its name is metadata too.
        used = {name for field, name in self.of.items() if field != "speaker"}
        ids = {"id", "example_id"} if "id" in wanted else set[str]()
        others = [name for name in counts if name not in used | ids and chosen.keeps(name)]
        for name in (*self.of.values(), *others):
            if counts[name] > 1 or (name in LINE_KEYS and name in others):
                what = "two columns" if counts[name] > 1 else "a column with the name of a key of dialogues,"
                out = f", or leave it out: --drop {printable(name, 40)!r}" * (name in others)
                raise wrong_format(uri, f"has {what} {printable(name, 40)!r}", f"Rename it{out}.")
        self.left_out = left_out
        left_out.difference_update(counts.keys() - {*others})
        #: Names of the columns that are metadata.
        self.metadata = [name for name in others if not (whole and name in left_out)]
        self._voice_of = voice_of

    @property
    def names(self) -> list[str]:
        """The names of the columns that are read."""
        return [*dict.fromkeys([*self.of.values(), *self.metadata])]

    def record(self, cell: Callable[[str], Any], number: int) -> Record:
        """The dialogue of a row, or a rejected line if the row cannot be converted."""
        try:
            return self.dialogue(cell, number)
        except InputError as error:
            return rejected_line(number, error)

    def dialogue(self, cell: Callable[[str], Any], number: int) -> bytes:
        """Converts a row to a dialogue; `cell` reads a value by its column's name. Raises `InputError`, also for
        a value that cannot be read."""
        try:
            cells = {field: _decoded(cell(name)) for field, name in self.of.items()}
            metadata = dict(self._metadata(cell))
            if self.chat:
                given = {field: value for field, value in cells.items() if value != ""}
                line = chat_dialogue(_encode(metadata | given), number)
            else:
                values = {field: _text(value, self.of[field]) for field, value in cells.items()}
                line = row_dialogue(values, number, self._voice_of, metadata)
        except (UnicodeError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise bad_line(f"The row cannot be read: {printable(str(error), 200)}.", "Correct it.") from None
        if metadata and len(line) > MAX_LINE_BYTES:
            raise input_too_long(
                f"The row is longer than {MAX_LINE_BYTES >> 20} MiB as JSON.",
                "Leave its largest columns out with --drop.",
            )
        return line

    def _metadata(self, cell: Callable[[str], Any]) -> Iterator[tuple[str, msgspec.Raw]]:
        for name in self.metadata:
            try:
                yield name, msgspec.Raw(_encode(json_value(cell(name))))
            except TypeError:
                self.left_out.add(name)
            except (ValueError, RecursionError) as error:
                raise bad_line(
                    f"The column {printable(name, 40)!r} cannot be read: {printable(str(error), 200)}.",
                    "Correct it, or leave it out with --drop.",
                ) from None


def row_converter(
    chosen: Reading, voice_of: VoiceOf, left_out: set[str]
) -> Callable[[Mapping[str, Any], int], bytes]:
    """A function that converts rows with columns of their own to dialogues. It raises `InputError`."""
    # Cached, because most rows have the same columns.
    columns_of = lru_cache(lambda names: Columns(names, chosen, "", voice_of, left_out, whole=False))
    return lambda row, number: columns_of(tuple(row)).dialogue(row.__getitem__, number)


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def json_value(value: Any) -> Any:
    """A value that JSON can contain: a missing value and one that is not a number are null, a date is text in
    ISO 8601. Raises TypeError for bytes, and ValueError for infinity."""
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError("it is infinite")
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(own) for own in value]
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("it is bytes")
    if hasattr(value, "isoformat"):
        # Only pandas' missing date differs from itself.
        return value.isoformat() if value == value else None
    return json_value(value.tolist()) if hasattr(value, "tolist") else value


def _text(value: Any, name: str) -> str:
    """The text of a cell; empty for a missing value. Raises `InputError`."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise bad_line(
            f"The column {printable(name, 40)!r} contains {type(value).__name__}, not text.",
            "Convert the column to text, or select another one with --column.",
        )
    return str(value)
