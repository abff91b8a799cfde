"""The records of an input, whatever its format: each a dialogue as JSON at the number of its line, those
that were chosen.

A row of a table, a line of text or one of Kaldi's is one text, with what says how it is spoken:

    id,text,voice                       {"example_id": "a1", "messages": [["user", "text", "Good evening."]],
    a1,Good evening.,heart               "generation": {"voice": "heart"}}
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from jobs.dialogue import chat_dialogue, chosen_id, clean
from jobs.input_format import CONVERT_RETURNS, InputFormat, wrong_format
from jobs.ledger.records import Reading
from jobs.source import BATCH_BYTES, BATCH_LINES, MAX_LINE_BYTES, LineBatch, Record, Source, reading
from jobs.store.base import sha256_of
from pipelines.errors import ConfigError, ErrorCode, InputError

#: Field of a row -> the columns that hold it, the first that a table has; `--column FIELD=NAME` names
#: another.
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
#: Kaldi's file of speakers, in the folder of its `text`.
SPEAKERS = "utt2spk"
ALL = Reading()
# The csv module refuses fields of more than 128 KiB; a field may be as long as a line, and reach into the
# line after the last full one.
csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one input that its job is made of. They can be read more than once, and are the same
    each time."""

    source: Source
    format: InputFormat
    chosen: Reading
    #: Of the choice of a sample.
    seed: int

    def batches(
        self, max_lines: int = BATCH_LINES, max_bytes: int = BATCH_BYTES, after_line: int = 0
    ) -> Iterator[LineBatch]:
        """The records after the first `after_line` lines, as `Source.batches`. Raises `InputError` for an
        input that cannot be read."""
        if (
            self.format in ("dialogues", "openai-batch")
            and self.chosen.limit is None
            and self.chosen.sample is None
        ):
            yield from self.source.batches(max_lines, max_bytes, after_line)
            return
        waiting: list[Record] = []
        size = 0
        for record in islice(self._chosen(), after_line, None):
            waiting.append(record)
            size += len(record) if isinstance(record, bytes) else 0
            if len(waiting) == max_lines or size >= max_bytes:
                yield LineBatch(after_line + 1, waiting)
                after_line += len(waiting)
                waiting, size = [], 0
        if waiting:
            yield LineBatch(after_line + 1, waiting)

    def _chosen(self) -> Iterator[Record]:
        """All records, blank where they were not chosen; none after the last chosen one of a limit."""
        limit, sample = self.chosen.limit, self.chosen.sample
        left = total = 0
        if sample is not None:
            total = sum(not _blank(record) for record in self._all())
            left = min(sample, total)
        elif limit is not None:
            total = left = limit
        # Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S: any subset is as likely, in
        # one pass.
        draw = random.Random(f"nightjar.sample:{self.seed}").random
        for record in self._all():
            if (limit is None and sample is None) or _blank(record):
                yield record
                continue
            if not left:
                return
            wanted = left == total or draw() * total < left
            total -= 1
            left -= wanted
            yield record if wanted else b""

    def _all(self) -> Iterator[Record]:
        if self.format in _READERS:
            yield from _READERS[self.format](self.source, self.chosen)
        else:
            yield from _lines(self.source)


def _lines(source: Source) -> Iterator[bytes | None]:
    for batch in source.line_batches(BATCH_LINES, BATCH_BYTES):
        yield from batch


def _of_lines(source: Source, dialogue: Callable[[bytes, int], bytes]) -> Iterator[Record]:
    """The records of a format with one a line."""
    for number, line in enumerate(_lines(source), 1):
        if line is None or not line or line.isspace():
            yield line
            continue
        try:
            yield dialogue(line, number)
        except InputError as error:
            yield error


def _sentences(source: Source, chosen: Reading) -> Iterator[Record]:
    return _of_lines(
        source, lambda line, number: row_dialogue({"text": one_line(line).strip()}, number, chosen.voices)
    )


def _kaldi(source: Source, chosen: Reading) -> Iterator[Record]:
    """Lines of Kaldi's `text`: an utterance's id and its words; its speaker is in `utt2spk`, which has the
    same order.

    Source: https://kaldi-asr.org/doc/data_prep.html, where both are sorted by the utterance's id as bytes.
    """
    speakers = _speaker_lines(source) if chosen.voices is not None else iter(())
    at = (b"", "")

    def dialogue(line: bytes, number: int) -> bytes:
        nonlocal at
        utterance, *words = line.split(None, 1)
        values = {"id": decoded(utterance), "text": one_line(words[0]).strip() if words else ""}
        if chosen.voices is not None:
            while at[0] < utterance:
                at = next(speakers, (b"\xff" * 8, ""))
            if at[0] != utterance:
                message = f"The utterance has no speaker in {SPEAKERS}."
                advice = "Add it, and sort both files by the id as bytes, as `LC_ALL=C sort` does."
                raise InputError(ErrorCode.INPUT_BAD_LINE, message, advice)
            values["speaker"] = at[1]
        return row_dialogue(values, number, chosen.voices)

    return _of_lines(source, dialogue)


def speakers_sha256(source: Source) -> str:
    """Hex SHA-256 of the `utt2spk` beside an input. Raises `input.unreadable`."""
    path = source.folder / SPEAKERS
    with reading(str(path)), path.open("rb") as file:
        return sha256_of(file)


def _speaker_lines(source: Source) -> Iterator[tuple[bytes, str]]:
    path = source.folder / SPEAKERS
    with reading(str(path)), path.open("rb") as file:
        for line in iter(lambda: file.readline(1 << 16), b""):
            words = line.split()
            if len(words) == 2:
                yield words[0], words[1].decode(errors="replace")


def _blank(record: Record) -> bool:
    return isinstance(record, bytes) and (not record or record.isspace())


class Columns:
    """The columns of one table, and what is made of a row."""

    def __init__(self, names: Sequence[str], chosen: Reading, uri: str) -> None:
        """Raises `input.wrong_format` for a table without the columns that are needed, or with two of one
        name."""
        wanted = chosen.columns or {}
        shown = ", ".join(repr(clean(name, 40)) for name in names[:20]) or "none"
        self.of: dict[str, str] = {}
        self._ids: list[str] = []
        for field, usual in FIELDS.items():
            if field in wanted and wanted[field] not in names:
                raise wrong_format(
                    uri, f"has no column {clean(wanted[field], 40)!r}", f"Its columns are: {shown}."
                )
            found = [name for name in ((wanted[field],) if field in wanted else usual) if name in names]
            if field == "id":
                self._ids = found
            if found:
                self.of[field] = found[0]
                if names.count(found[0]) > 1:
                    raise wrong_format(uri, f"has two columns {clean(found[0], 40)!r}", "Rename one of them.")
        self.chat = "text" not in self.of and "messages" in names
        if "text" not in self.of and not self.chat:
            raise wrong_format(uri, f"has no column `text`; its columns are: {shown}", _advice_for(names))
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
            return InputError(
                ErrorCode.INPUT_BAD_LINE, f"The row cannot be read: {clean(str(error), 200)}.", "Correct it."
            )


def row_dialogue(values: Mapping[str, str], number: int, voices: Mapping[str, str] | None) -> bytes:
    """The dialogue of the fields of a row, those of `FIELDS`; an empty one counts as none. Raises
    `InputError`."""
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


#: Number of a row's first line, its fields or why it has none, and how many lines of it follow; a blank line
#: has no fields.
_Row = tuple[int, list[str] | InputError, int]


def _table(rows: Iterator[_Row], source: Source, chosen: Reading) -> Iterator[Record]:
    """The records of a table with a header, one for each of its lines: the lines of a row after its first,
    the header and blank lines are blank. Raises `input.wrong_format`."""
    columns: Columns | None = None
    names: list[str] = []
    for number, fields, more in rows:
        if isinstance(fields, InputError):
            if columns is None:
                raise wrong_format(source.uri, "has no header that can be read", str(fields))
            yield fields
        elif not fields:
            yield b""
        elif columns is None:
            names = [name.strip() for name in fields]
            columns = Columns(names, chosen, source.uri)
            yield b""
        elif len(fields) == len(names):
            yield columns.dialogue(dict(zip(names, fields)), number)
        else:
            message = f"The line has {len(fields)} fields, and the header {len(names)}."
            yield InputError(
                ErrorCode.INPUT_BAD_LINE,
                message,
                "Write as many, and put a text with the separator in quotes.",
            )
        for _ in range(more):
            yield b""


def _csv(source: Source, chosen: Reading) -> Iterator[Record]:
    """CSV with a header (RFC 4180): fields are between commas, or between semicolons, where the header has
    these and no comma."""
    return _table(_CsvLines(_lines(source), chosen).rows(), source, chosen)


def _tsv(source: Source, chosen: Reading) -> Iterator[Record]:
    """TSV with a header: fields are between tabs, and quotes are characters like others."""

    def rows() -> Iterator[_Row]:
        for number, line in enumerate(_lines(source), 1):
            try:
                text = one_line(line)
                yield number, text.split("\t") if text.strip() else [], 0
            except InputError as error:
                yield number, error, 0

    return _table(rows(), source, chosen)


def _parquet(source: Source, chosen: Reading) -> Iterator[Record]:
    """The rows of a Parquet file; only the columns that are needed are read, some rows at a time.

    Raises `input.unreadable`, `input.wrong_format`, and `config.missing_library` without pyarrow.
    """
    uri = source.uri
    with reading(uri):
        source.file.seek(0)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        message = "Reading Parquet needs the library pyarrow."
        raise ConfigError(
            ErrorCode.CONFIG_MISSING_LIBRARY,
            message,
            "Install Nightjar with its extra `export` (docs/install.md).",
        ) from None
    try:
        # A stream of pages: a row group may be larger than the memory.
        table = parquet.ParquetFile(source.file, pre_buffer=False, buffer_size=1 << 20)
        columns = Columns(table.schema_arrow.names, chosen, uri)
        number = 0
        for batch in table.iter_batches(_ROWS, columns=columns.read, use_threads=False):
            for place in range(batch.num_rows):
                number += 1
                yield columns.dialogue(_BatchRow(batch, place), number)
    except (pyarrow.ArrowException, OSError) as error:
        with reading(uri):
            raise ValueError(clean(str(error), 200)) from error


class _BatchRow(Mapping[str, Any]):
    """One row of a batch, read where it is asked for: a bad value is that row's fault alone."""

    def __init__(self, batch: Any, place: int) -> None:
        self._batch, self._place = batch, place

    def __getitem__(self, name: str) -> Any:
        return self._batch.column(name)[self._place].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return self._batch.num_columns


_READERS: dict[InputFormat, Callable[[Source, Reading], Iterator[Record]]] = {
    "messages": lambda source, _: _of_lines(source, chat_dialogue),
    "text": _sentences,
    "csv": _csv,
    "tsv": _tsv,
    "kaldi": _kaldi,
    "parquet": _parquet,
}


class _CsvLines:
    """Lines as the `csv` module pulls them, a record at a time; those of a record that turns out to be
    none are read again."""

    def __init__(self, lines: Iterator[bytes | None], chosen: Reading) -> None:
        self._lines = lines
        self._again: list[bytes | None] = []
        self._taken: list[bytes | None] = []
        self._bytes = 0
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

    def rows(self) -> Iterator[_Row]:
        """The rows."""
        number = 1
        while True:
            self._taken, self._bytes = [], 0
            try:
                found: list[str] | InputError = next(self._reader)
            except StopIteration:
                return
            except InputError as error:
                found = error
            except csv.Error as error:
                found = (
                    _bare_return()
                    if any(b"\r" in (line or b"").rstrip(b"\r") for line in self._taken)
                    else _not_csv(error)
                )
            if isinstance(found, InputError):
                self._again += reversed(self._taken[1:])
                self._taken = self._taken[:1]
                self._reader = csv.reader(self, delimiter=self._delimiter, strict=True)
            yield number, found, len(self._taken) - 1
            number += len(self._taken)


def decoded(line: bytes | None) -> str:
    """The text of a line. Raises `InputError` for one that is too long, is not UTF-8, or holds a NUL."""
    if line is None:
        raise InputError(
            ErrorCode.INPUT_TOO_LONG,
            f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.",
            "Split its text into several lines.",
        )
    if b"\0" in line:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            "The line holds a NUL byte; the file may be binary or UTF-16.",
            "Write the file as UTF-8.",
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f"The line is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}."
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            message,
            "Convert the file, for example with `iconv -f LATIN1 -t UTF-8`.",
        ) from None


def one_line(line: bytes | None) -> str:
    """As `decoded`, without the end of the line. Raises `InputError` also for one that holds ends of lines
    of another kind."""
    text = decoded(line).rstrip("\r\n")
    if "\r" in text:
        raise _bare_return()
    return text


def _bare_return() -> InputError:
    message = "The line holds a carriage return (CR) that ends no line: lines end with LF, or with CR LF."
    return InputError(
        ErrorCode.INPUT_BAD_LINE,
        message,
        f"If it stands for the end of a line, convert the file: {CONVERT_RETURNS}.",
    )


def _not_csv(error: csv.Error) -> InputError:
    message = f"The line is not CSV: {clean(str(error), 200)}."
    return InputError(ErrorCode.INPUT_BAD_LINE, message, 'Double the quotes in a field in quotes: "".')


def _delimiter(header: bytes, asked: Iterable[str]) -> str:
    """`;` for a header that has several fields between semicolons, and none between commas; `asked`: names
    of columns that are given."""
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
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            message,
            "Convert the column to text, or name another one with --column.",
        )
    return value


def _seed(text: str) -> int:
    if text.strip().isascii() and text.strip().isdecimal() and len(text) <= len(str(2**63)):
        return int(text)
    raise InputError(
        ErrorCode.INPUT_BAD_GENERATION, f"The seed is {clean(text, 40)!r}.", "Write a whole number."
    )


def _voice(speaker: str, voices: Mapping[str, str]) -> str:
    voice = voices.get(speaker) or voices.get("*")
    if voice is None:
        what = f"speaker {clean(speaker, 40)!r}" if speaker else "line, which names no speaker,"
        advice = (
            "Give it one with --voice-for SPEAKER=VOICE, or all the others one with --voice-for '*=VOICE'."
        )
        raise InputError(ErrorCode.INPUT_UNKNOWN_VOICE, f"The {what} has no voice.", advice)
    return voice


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises `config.invalid` for a field that rows do not have."""
    for field in columns:
        if field not in FIELDS:
            known = ", ".join(FIELDS)
            raise ConfigError(
                ErrorCode.CONFIG_INVALID, f"Rows have no field {field[:40]!r}.", f"The fields are: {known}."
            )
