"""Rows of CSV, TSV and Parquet as dialogues: one text a row, with the columns that say how it is spoken.

id,text,voice                       {"example_id": "a1", "messages": [["user", "text", "Good evening."]],
a1,Good evening.,heart               "generation": {"voice": "heart"}}
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import msgspec

from jobs.chat_messages import chat_dialogue
from jobs.dialogue import chosen_id, clean
from jobs.input_format import CONVERT_RETURNS
from jobs.ledger.records import Reading
from jobs.source import MAX_LINE_BYTES, reading
from pipelines.errors import ConfigError, ErrorCode, InputError

#: A record of an input: the JSON of a dialogue, or why there is none; None: it is longer than a line may be. Blank: no record.
Record = bytes | InputError | None

#: Field of a row -> the columns that hold it, the first that a table has; `--column FIELD=NAME` names another.
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "transcription", "transcript"),
    "id": ("id", "example_id"),
    "voice": ("voice",),
    "speaker": ("speaker", "speaker_id"),
    "language": ("language",),
    "instruct": ("instruct",),
    "seed": ("seed",),
    "reference_audio": ("reference_audio",),
    "reference_text": ("reference_text",),
}
#: A field in quotes may hold line ends; so many lines, or bytes, are looked through for its end.
MAX_RECORD_LINES = 1000
_GENERATION = ("voice", "language", "instruct", "seed", "reference_text")
_ROWS = 256
# The csv module refuses fields of more than 128 KiB; a field may be as long as a line, and reach into the line after the last full one.
csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
_encode = msgspec.json.Encoder().encode


class Columns:
    """The columns of one table, and what is made of a row."""

    def __init__(self, names: Sequence[str], chosen: Reading, uri: str) -> None:
        """Raises `input.wrong_format` for a table without the columns that are needed, or with two of one name."""
        wanted = chosen.columns or {}
        shown = ", ".join(repr(clean(name, 40)) for name in names[:20]) or "none"
        self.of: dict[str, str] = {}
        self._ids: list[str] = []
        for field, usual in FIELDS.items():
            if field in wanted and wanted[field] not in names:
                raise _wrong(uri, f"has no column {clean(wanted[field], 40)!r}", f"Its columns are: {shown}.")
            found = [name for name in ((wanted[field],) if field in wanted else usual) if name in names]
            if field == "id":
                self._ids = found
            if found:
                self.of[field] = found[0]
                if names.count(found[0]) > 1:
                    raise _wrong(uri, f"has two columns {clean(found[0], 40)!r}", "Rename one of them.")
        self.chat = "text" not in self.of and "messages" in names
        if "text" not in self.of and not self.chat:
            raise _wrong(uri, f"has no column `text`; its columns are: {shown}", _advice_for(names))
        self._voices = chosen.voices

    @property
    def read(self) -> list[str]:
        """The names of the columns that are read."""
        return [*self.of.values(), *self._ids[1:], *(["messages"] if self.chat else [])]

    def _id(self, row: Mapping[str, Any]) -> str | None:
        """The id of a row. Raises `input.bad_line` where its columns differ."""
        ids = [_text(row[name], name) or None for name in self._ids]
        return chosen_id(ids[-1], ids[0]) if ids else None

    def dialogue(self, row: Mapping[str, Any], number: int) -> Record:
        """The dialogue of a row."""
        try:
            if self.chat:
                return chat_dialogue(_encode({"messages": row["messages"], "id": self._id(row)}), number)
            values = {field: _text(row[name], name) for field, name in self.of.items()}
            if self._ids[1:]:
                values["id"] = self._id(row) or ""
            return row_dialogue(values, number, self._voices)
        except InputError as error:
            return error
        except (UnicodeError, TypeError, ValueError) as error:
            return InputError(ErrorCode.INPUT_BAD_LINE, f"The row cannot be read: {clean(str(error), 200)}.", "Correct it.")


def row_dialogue(values: Mapping[str, str], number: int, voices: Mapping[str, str] | None) -> bytes:
    """The dialogue of the fields of a row, those of `FIELDS`; an empty one counts as none. Raises `InputError`."""
    messages = [("user", "text", values["text"])]
    if audio := values.get("reference_audio"):
        messages.insert(0, ("user", "audio", audio))
    generation: dict[str, Any] = {field: values[field] for field in _GENERATION if values.get(field)}
    if "seed" in generation:
        generation["seed"] = _seed(generation["seed"])
    if voices is not None and "voice" not in generation:
        generation["voice"] = _voice(values.get("speaker", ""), voices)
    dialogue: dict[str, Any] = {"example_id": values.get("id") or f"line-{number}", "messages": messages}
    return _encode(dialogue | ({"generation": generation} if generation else {}))


def csv_records(lines: Iterator[bytes | None], chosen: Reading, uri: str) -> Iterator[Record]:
    """The records of a CSV file with a header (RFC 4180), one for each of its lines: the lines of a record after its first, the
    header and blank lines are blank. Fields are between commas, or between semicolons, where the header has these and no comma.
    Raises `input.wrong_format`."""
    pulled = _PulledLines(lines, chosen)
    columns: Columns | None = None
    names: list[str] = []
    while (fields := pulled.record()) is not None:
        number, blank = pulled.number, pulled.rest
        if isinstance(fields, InputError):
            if columns is None:
                raise _wrong(uri, "has no header that can be read", str(fields))
            yield fields
        elif not fields:
            yield b""
        elif columns is None:
            names = [name.strip() for name in fields]
            columns = Columns(names, chosen, uri)
            yield b""
        else:
            yield columns.dialogue(dict(zip(names, fields)), number) if len(fields) == len(names) else _miscounted(fields, names)
        for _ in range(blank):
            yield b""


def tsv_records(lines: Iterator[bytes | None], chosen: Reading, uri: str) -> Iterator[Record]:
    """As `csv_records`, for a TSV file: fields between tabs, where quotes are characters like others."""
    columns: Columns | None = None
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            text = one_line(line)
        except InputError as error:
            if columns is None:
                raise _wrong(uri, "has no header that can be read", str(error)) from None
            yield error
            continue
        fields = text.split("\t")
        if not text.strip():
            yield b""
        elif columns is None:
            names = [name.strip() for name in fields]
            columns = Columns(names, chosen, uri)
            yield b""
        else:
            yield columns.dialogue(dict(zip(names, fields)), number) if len(fields) == len(names) else _miscounted(fields, names)


def parquet_records(file: BinaryIO, chosen: Reading, uri: str) -> Iterator[Record]:
    """The rows of a Parquet file; only the columns that are needed are read, some rows at a time.

    Raises `input.unreadable`, `input.wrong_format`, and `config.missing_library` without pyarrow.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        message = "Reading Parquet needs the library pyarrow."
        raise ConfigError(
            ErrorCode.CONFIG_MISSING_LIBRARY, message, "Install Nightjar with its extra `export` (docs/install.md)."
        ) from None
    try:
        # A stream of pages: a row group may be larger than the memory.
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        columns = Columns(table.schema_arrow.names, chosen, uri)
        number = 0
        for batch in table.iter_batches(_ROWS, columns=columns.read, use_threads=False):
            for place in range(batch.num_rows):
                number += 1
                yield columns.dialogue(_Row(batch, place), number)
    except (pyarrow.ArrowException, OSError) as error:
        with reading(uri):
            raise ValueError(clean(str(error), 200)) from error


class _Row(Mapping[str, Any]):
    """One row of a batch, read where it is asked for: a bad value is that row's fault alone."""

    def __init__(self, batch: Any, place: int) -> None:
        self._batch, self._place = batch, place

    def __getitem__(self, name: str) -> Any:
        return self._batch.column(name)[self._place].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return self._batch.num_columns


class _PulledLines:
    """Lines as the `csv` module pulls them, a record at a time; those of a record that turns out to be none are read again."""

    def __init__(self, lines: Iterator[bytes | None], chosen: Reading) -> None:
        self._lines = lines
        self._again: list[bytes | None] = []
        self._taken: list[bytes | None] = []
        self._bytes = 0
        self._next = 1
        #: Of the first line of the record.
        self.number = 1
        #: How many lines of the record follow it.
        self.rest = 0
        self._delimiter = self._found_delimiter(chosen)
        self._reader = csv.reader(self, delimiter=self._delimiter, strict=True)

    def _found_delimiter(self, chosen: Reading) -> str:
        """What the fields are between, by the header; the lines that are read for it are read again."""
        header = b""
        for line in self._lines:
            self._again.append(line)
            header = line or b""
            if line is None or line.strip():
                break
        self._again.reverse()
        return _delimiter(header, (chosen.columns or {}).values())

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._taken and (len(self._taken) >= MAX_RECORD_LINES or self._bytes > MAX_LINE_BYTES):
            raise InputError(
                ErrorCode.INPUT_BAD_LINE,
                f"A quote opens a field, and does not close within {MAX_RECORD_LINES:,} lines or {MAX_LINE_BYTES >> 20} MiB.",
                'Close it, or double it: "".',
            )
        line = self._again.pop() if self._again else next(self._lines)
        self._taken.append(line)
        self._bytes += len(line or b"")
        return decoded(line) + "\n"

    def record(self) -> list[str] | InputError | None:
        """The fields of the next record, none of a blank line; why it is no record; None at the end."""
        self._taken, self._bytes, self.number = [], 0, self._next
        try:
            found: list[str] | InputError = next(self._reader)
        except StopIteration:
            return None
        except InputError as error:
            found = error
        except csv.Error as error:
            found = _bare_return() if any(b"\r" in (line or b"").rstrip(b"\r") for line in self._taken) else _not_csv(error)
        if isinstance(found, InputError):
            self._again += reversed(self._taken[1:])
            self._taken = self._taken[:1]
            self._reader = csv.reader(self, delimiter=self._delimiter, strict=True)
        self.rest = len(self._taken) - 1
        self._next += len(self._taken)
        return found


def decoded(line: bytes | None) -> str:
    """The text of a line. Raises `InputError` for one that is too long, is not UTF-8, or holds a NUL."""
    if line is None:
        raise InputError(
            ErrorCode.INPUT_TOO_LONG, f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.", "Split its text into several lines."
        )
    if b"\0" in line:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE, "The line holds a NUL byte; the file may be binary or UTF-16.", "Write the file as UTF-8."
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f"The line is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}."
        raise InputError(ErrorCode.INPUT_BAD_LINE, message, "Convert the file, for example with `iconv -f LATIN1 -t UTF-8`.") from None


def one_line(line: bytes | None) -> str:
    """As `decoded`, without the end of the line. Raises `InputError` also for one that holds ends of lines of another kind."""
    text = decoded(line).rstrip("\r\n")
    if "\r" in text:
        raise _bare_return()
    return text


def _bare_return() -> InputError:
    message = "The line holds a carriage return (CR) that ends no line: lines end with LF, or with CR LF."
    return InputError(ErrorCode.INPUT_BAD_LINE, message, f"If it stands for the end of a line, convert the file: {CONVERT_RETURNS}.")


def _not_csv(error: csv.Error) -> InputError:
    message = f"The line is not CSV: {clean(str(error), 200)}."
    return InputError(ErrorCode.INPUT_BAD_LINE, message, 'Double the quotes in a field in quotes: "".')


def _delimiter(header: bytes, asked: Iterable[str]) -> str:
    """`;` for a header that has several fields between semicolons, and none between commas; `asked`: names of columns that are given."""
    text = header.decode(errors="replace").strip()
    return ";" if len(_split(text, ";")) > 1 and len(_split(text, ",")) <= 1 and text not in asked else ","


def _split(header: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([header], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def _advice_for(names: Sequence[str]) -> str:
    """What to do about a header without a column for texts."""
    if names and names[0].lower().startswith("sep=") and not any(names[1:]):
        return "Remove the first line, which is for Excel alone: the next one names the columns."
    if any("\t" in name for name in names):
        return "Fields between tabs are TSV: use --input-format tsv."
    if any(";" in name for name in names):
        return "The fields of CSV are between commas, or between `;` where the header has no comma: save it with one of them."
    return "Name the one with the text: --column text=NAME."


def _text(value: Any, name: str) -> str:
    """The text of a cell; a missing one is empty. Raises `InputError`."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        message = f"The column {clean(name, 40)!r} holds no text but {type(value).__name__}."
        raise InputError(ErrorCode.INPUT_BAD_LINE, message, "Convert the column to text, or name another one with --column.")
    return value


def _seed(text: str) -> int:
    if text.strip().isascii() and text.strip().isdecimal() and len(text) <= len(str(2**63)):
        return int(text)
    raise InputError(ErrorCode.INPUT_BAD_GENERATION, f"The seed is {clean(text, 40)!r}.", "Write a whole number.")


def _voice(speaker: str, voices: Mapping[str, str]) -> str:
    voice = voices.get(speaker) or voices.get("*")
    if voice is None:
        what = f"speaker {clean(speaker, 40)!r}" if speaker else "line, which names no speaker,"
        advice = "Give it one with --voice-for SPEAKER=VOICE, or all the others one with --voice-for '*=VOICE'."
        raise InputError(ErrorCode.INPUT_UNKNOWN_VOICE, f"The {what} has no voice.", advice)
    return voice


def _miscounted(fields: Sequence[str], names: Sequence[str]) -> InputError:
    return InputError(
        ErrorCode.INPUT_BAD_LINE,
        f"The line has {len(fields)} fields, and the header {len(names)}.",
        "Write as many, and put a text with the separator in quotes.",
    )


def _wrong(uri: str, what: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_WRONG_FORMAT, f"The input {f'{uri[:300]!r} ' if uri else ''}{what}.", advice)


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises `config.invalid` for a field that rows do not have."""
    for field in columns:
        if field not in FIELDS:
            known = ", ".join(FIELDS)
            raise ConfigError(ErrorCode.CONFIG_INVALID, f"Rows have no field {field[:40]!r}.", f"The fields are: {known}.")
