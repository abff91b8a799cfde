"""The records of an input, whatever its format: each a dialogue as JSON at the number of its line, those
that were chosen.

A row of a table, a line of text or one of Kaldi's is one text, with what says how it is spoken:

    id,text,voice                       {"example_id": "a1", "messages": [["user", "text", "Good evening."]],
    a1,Good evening.,heart               "generation": {"voice": "heart"}}
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from jobs.dialogue import batch_dialogue, chat_dialogue, chosen_id, clean, custom_id
from jobs.input_format import CONVERT_RETURNS, InputFormat, wrong_format
from jobs.ledger.records import JobSpec, Reading
from jobs.source import (
    BATCH_BYTES,
    BATCH_LINES,
    MAX_LINE_BYTES,
    LineBatch,
    Record,
    Source,
    batches_of,
    overlong,
    reading,
    refused,
)
from jobs.store.base import sha256_of
from pipelines.errors import ConfigError, ErrorCode, InputError
from pipelines.registry import ModelCard

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
#: Records that are put into batches at once.
_PIECE_RECORDS, _PIECE_BYTES = 256, 1 << 16
#: Kaldi's file of speakers, in the folder of its `text`.
SPEAKERS = "utt2spk"
ALL = Reading()
# The csv module refuses fields of more than 128 KiB; a field may be as long as a line, and reach into the
# line after the last full one.
csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
_encode = msgspec.json.Encoder().encode


def reading_of(spec: JobSpec) -> Reading:
    """What of an input a job reads."""
    return ALL if spec.reading is msgspec.UNSET else spec.reading


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one input that a job of this spec and model is made of. They can be read more than
    once, and are the same each time."""

    source: Source
    format: InputFormat
    spec: JobSpec
    card: ModelCard

    @property
    def chosen(self) -> Reading:
        return reading_of(self.spec)

    def batches(
        self, max_lines: int = BATCH_LINES, max_bytes: int = BATCH_BYTES, after_line: int = 0
    ) -> Iterator[LineBatch]:
        """The records after the first `after_line` lines, as `Source.batches`. Raises `InputError` for an
        input that cannot be read."""
        if self.format == "dialogues" and self.chosen.limit is None and self.chosen.sample is None:
            return self.source.batches(max_lines, max_bytes, after_line)
        return batches_of(self._pieces(), max_lines, max_bytes, after_line)

    def _pieces(self) -> Iterator[tuple[list[Record], int]]:
        """The chosen records, some at a time, with their bytes."""
        some: list[Record] = []
        size = 0
        for record in self._chosen_records():
            some.append(record)
            if isinstance(record, bytes):
                size += len(record)
            if size >= _PIECE_BYTES or len(some) == _PIECE_RECORDS:
                yield some, size
                some, size = [], 0
        yield some, size

    def _chosen_records(self) -> Iterator[Record]:
        """All records, blank where they were not chosen; none after the last chosen one of a limit."""
        limit, sample, read = self.chosen.limit, self.chosen.sample, _READERS[self.format]
        if limit is None and sample is None:
            yield from read(self)
            return
        left = total = 0
        if sample is not None:
            total = sum(not _blank(record) for record in read(self))
            left = min(sample, total)
        elif limit is not None:
            total = left = limit
        # Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S: any subset is as likely, in
        # one pass.
        draw = random.Random(f"nightjar.sample:{self.spec.seed}").random
        for record in read(self):
            if _blank(record):
                yield record
                continue
            if not left:
                return
            wanted = left == total or draw() * total < left
            total -= 1
            left -= wanted
            yield record if wanted else b""


def _lines(records: Records) -> Iterator[bytes | None]:
    return chain.from_iterable(lines for lines, _ in records.source.pieces())


def _of_lines(
    records: Records,
    dialogue: Callable[[bytes, int], bytes],
    id_of: Callable[[bytes], str | None] = lambda _: None,
) -> Iterator[Record]:
    """The records of a format with one a line; `id_of` a line that is refused."""
    for number, line in enumerate(_lines(records), 1):
        if line is None or not line or line.isspace():
            yield line
            continue
        try:
            yield dialogue(line, number)
        except InputError as error:
            yield refused(number, error, id_of(line))


def _batch(records: Records) -> Iterator[Record]:
    card, encoding = records.card, records.spec.format
    return _of_lines(records, lambda line, _: batch_dialogue(line, card, encoding), custom_id)


def _sentences(records: Records) -> Iterator[Record]:
    voices = records.chosen.voices
    return _of_lines(
        records, lambda line, number: row_dialogue({"text": one_line(line).strip()}, number, voices)
    )


def _kaldi(records: Records) -> Iterator[Record]:
    """Lines of Kaldi's `text`: an utterance's id and its words; its speaker is in `utt2spk`, which has the
    same order.

    Source: https://kaldi-asr.org/doc/data_prep.html, where both are sorted by the utterance's id as bytes.
    """
    voices = records.chosen.voices
    speakers = _speaker_lines(records.source)
    at = (b"", "")

    def dialogue(line: bytes, number: int) -> bytes:
        nonlocal at
        utterance, *words = line.split(None, 1)
        values = {"id": decoded(utterance), "text": one_line(words[0]).strip() if words else ""}
        if voices is not None:
            while at[0] < utterance:
                at = next(speakers, (b"\xff" * 8, ""))
            if at[0] != utterance:
                message = f"The utterance has no speaker in {SPEAKERS}."
                advice = "Add it, and sort both files by the id as bytes, as `LC_ALL=C sort` does."
                raise InputError(ErrorCode.INPUT_BAD_LINE, message, advice)
            values["speaker"] = at[1]
        return row_dialogue(values, number, voices)

    return _of_lines(records, dialogue)


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

    def _id(self, cell: Callable[[str], Any]) -> str | None:
        """The id of a row. Raises `InputError` where its columns differ."""
        ids = [_text(cell(name), name) or None for name in self._ids]
        return chosen_id(ids[-1], ids[0]) if ids else None

    def record(self, cell: Callable[[str], Any], number: int) -> Record:
        """The dialogue of a row, or why there is none."""
        try:
            return self.dialogue(cell, number)
        except InputError as error:
            return refused(number, error)

    def dialogue(self, cell: Callable[[str], Any], number: int) -> bytes:
        """The dialogue of a row, whose cells are read by their columns' names: a bad value is this row's
        fault alone. Raises `InputError`."""
        try:
            if self.chat:
                return chat_dialogue(_encode({"messages": cell("messages"), "id": self._id(cell)}), number)
            values = {field: _text(cell(name), name) for field, name in self.of.items()}
            if len(self._ids) > 1:
                values["id"] = self._id(cell) or ""
            return row_dialogue(values, number, self._voices)
        except (UnicodeError, TypeError, ValueError) as error:
            message = f"The row cannot be read: {clean(str(error), 200)}."
            raise InputError(ErrorCode.INPUT_BAD_LINE, message, "Correct it.") from None


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


def _table(rows: Iterator[_Row], records: Records) -> Iterator[Record]:
    """The records of a table with a header, one for each of its lines: the lines of a row after its first,
    the header and blank lines are blank. Raises `input.wrong_format`."""
    columns: Columns | None = None
    names: list[str] = []
    for number, fields, more in rows:
        if isinstance(fields, InputError):
            if columns is None:
                raise wrong_format(records.source.uri, "has no header that can be read", str(fields))
            yield refused(number, fields)
        elif not fields:
            yield b""
        elif columns is None:
            names = [name.strip() for name in fields]
            columns = Columns(names, records.chosen, records.source.uri)
            yield b""
        elif len(fields) == len(names):
            yield columns.record(dict(zip(names, fields)).__getitem__, number)
        else:
            message = f"The line has {len(fields)} fields, and the header {len(names)}."
            advice = "Write as many, and put a text with the separator in quotes."
            yield refused(number, InputError(ErrorCode.INPUT_BAD_LINE, message, advice))
        for _ in range(more):
            yield b""


def _csv(records: Records) -> Iterator[Record]:
    """CSV with a header (RFC 4180): fields are between commas, or between semicolons, where the header has
    these and no comma."""
    return _table(_csv_rows(_lines(records)), records)


def _tsv(records: Records) -> Iterator[Record]:
    """TSV with a header: fields are between tabs, and quotes are characters like others."""

    def rows() -> Iterator[_Row]:
        for number, line in enumerate(_lines(records), 1):
            try:
                text = one_line(line)
                yield number, text.split("\t") if text.strip() else [], 0
            except InputError as error:
                yield number, error, 0

    return _table(rows(), records)


def _parquet(records: Records) -> Iterator[Record]:
    """The rows of a Parquet file; only the columns that are needed are read, some rows at a time.

    Raises `input.unreadable`, `input.wrong_format`, and `config.missing_library` without pyarrow.
    """
    uri, file = records.source.uri, records.source.file
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        message = "Reading Parquet needs the library pyarrow."
        advice = "Install Nightjar with its extra `export` (docs/install.md)."
        raise ConfigError(ErrorCode.CONFIG_MISSING_LIBRARY, message, advice) from None
    try:
        file.seek(0)
        # A stream of pages: a row group may be larger than the memory.
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        columns = Columns(table.schema_arrow.names, records.chosen, uri)
        rows = (
            batch.slice(place, 1)
            for batch in table.iter_batches(_ROWS, columns=columns.read, use_threads=False)
            for place in range(batch.num_rows)
        )
        for number, row in enumerate(rows, 1):
            yield columns.record(lambda name, row=row: row.column(name)[0].as_py(), number)
    except (pyarrow.ArrowException, OSError) as error:
        with reading(uri):
            raise ValueError(clean(str(error), 200)) from error


#: How the records of each format are read, with those of `limit` and `sample` among them.
_READERS: dict[InputFormat, Callable[[Records], Iterator[Record]]] = {
    "dialogues": _lines,
    "messages": lambda records: _of_lines(records, chat_dialogue),
    "openai-batch": _batch,
    "text": _sentences,
    "csv": _csv,
    "tsv": _tsv,
    "kaldi": _kaldi,
    "parquet": _parquet,
}


def _csv_rows(lines: Iterator[bytes | None]) -> Iterator[_Row]:
    """The rows of CSV; lines of a row that turns out to be none are read again."""
    #: To read before `lines`, the next one at the end.
    again: list[bytes | None] = []
    for line in lines:
        again.append(line)
        if line is None or line.strip():
            break
    again.reverse()
    header = (again and again[0]) or b""
    delimiter = ";" if b";" in header and b"," not in header else ","
    number, reader = 1, None
    taken: list[bytes | None] = []
    while True:
        taken.clear()
        reader = reader or csv.reader(_taken(again, lines, taken), delimiter=delimiter, strict=True)
        try:
            found: list[str] | InputError = next(reader)
        except StopIteration:
            return
        except InputError as error:
            if error.code is ErrorCode.INPUT_UNREADABLE:
                raise
            found = error
        except csv.Error as error:
            bare = any(b"\r" in (line or b"").rstrip(b"\r") for line in taken)
            found = _bare_return() if bare else _not_csv(error)
        if isinstance(found, InputError):
            again += reversed(taken[1:])
            del taken[1:]
            reader = None
        yield number, found, len(taken) - 1
        number += len(taken)


def _taken(
    again: list[bytes | None], lines: Iterator[bytes | None], taken: list[bytes | None]
) -> Iterator[str]:
    """Lines as the `csv` module pulls them for one row, which are kept in `taken`."""
    size = 0
    while True:
        if not taken:
            size = 0
        elif len(taken) >= MAX_RECORD_LINES or size > MAX_LINE_BYTES:
            raise InputError(
                ErrorCode.INPUT_BAD_LINE,
                f"A quote opens a field, and does not close within {MAX_RECORD_LINES:,} lines or {MAX_LINE_BYTES >> 20} MiB.",
                'Close it, or double it: "".',
            )
        try:
            line = again.pop() if again else next(lines)
        except StopIteration:
            return
        taken.append(line)
        size += len(line or b"")
        yield decoded(line) + "\n"


def decoded(line: bytes | None) -> str:
    """The text of a line. Raises `InputError` for one that is too long, is not UTF-8, or holds a NUL."""
    if line is None:
        raise overlong()
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
