"""Reads the records of an input in any format. There is one record for each line: its dialogue as JSON.

A row of a table, a line of text or a line of Kaldi's `text` becomes a dialogue of one text with its voice
settings:

    id,text,voice                       {"example_id": "a1", "messages": [["user", "text", "Good evening."]],
    a1,Good evening.,heart               "generation": {"voice": "heart"}}
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from jobs.dialogue import batch_dialogue, chat_dialogue, clean, custom_id, row_dialogue
from jobs.input_format import CONVERT_RETURNS, InputFormat, wrong_format
from jobs.ledger.records import JobSpec, Reading
from jobs.source import (
    MAX_LINE_BYTES,
    Record,
    Source,
    input_errors,
    line_too_long,
    open_source,
    rejected_line,
)
from jobs.voice_pool import VoiceDraws, voice_of_speaker
from pipelines.errors import ErrorCode, InputError, bad_line, invalid, missing_library
from pipelines.registry import ModelCard

#: Field of a row -> names of its column. The first one that the table has is used; `--column FIELD=NAME`
#: selects another column.
FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "transcription", "transcript"),
    "id": ("id",),
    "example_id": ("example_id",),
    "voice": ("voice",),
    "speaker": ("speaker", "speaker_id"),
    "language": ("language",),
    "instruct": ("instruct",),
    "seed": ("seed",),
    "reference_audio": ("reference_audio",),
    "reference_text": ("reference_text",),
}
#: Maximum number of lines of a quoted field, which may contain line ends.
MAX_RECORD_LINES = 1000
#: Rows of Parquet that are read at once.
_ROWS = 256
#: Kaldi's file of speakers, in the folder of its `text`.
SPEAKERS = "utt2spk"
#: How a job reads its input if no option changes that: all records, and the usual columns.
ALL = Reading()
# The csv module refuses fields of more than 128 KiB by default.
csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_LINE_BYTES))
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Records:
    """The records of one input for a job of this spec and model. They can be read more than once, with the
    same result."""

    source: Source
    format: InputFormat
    spec: JobSpec
    card: ModelCard

    @property
    def chosen(self) -> Reading:
        return self.spec.reading or ALL

    @cached_property
    def voice_of(self) -> Callable[[str], str | None] | None:
        """The voice of a speaker, see `voice_of_speaker`."""
        return voice_of_speaker(self.spec)

    def lines(self) -> Iterator[Record]:
        """Yields the records of all lines, with voices of the job's pool. With `limit` or `sample`, records that
        are not chosen are blank, and none follow the last chosen one. Raises `InputError` for an input that
        cannot be read."""
        everything = self.chosen.limit is None and self.chosen.sample is None
        records = _READERS[self.format](self) if everything else self._chosen_lines()
        if not self.spec.pool:
            return records
        draws = VoiceDraws(self.spec.pool, self.spec.seed)
        return (draws.in_record(record, self.spec.speak) for record in records)

    def _chosen_lines(self) -> Iterator[Record]:
        limit, sample, read = self.chosen.limit, self.chosen.sample, _READERS[self.format]
        total = limit if sample is None else sum(not _blank(record) for record in read(self))
        left = total = total or 0
        if sample is not None:
            left = min(sample, total)
        # Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S: all subsets are equally
        # likely, and one pass is enough.
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


def _of_lines(
    records: Records,
    dialogue: Callable[[bytes, int], bytes],
    id_of: Callable[[bytes], str | None] = lambda _: None,
) -> Iterator[Record]:
    """Yields the records of a format with one record per line. `dialogue` converts a line; `id_of` reads the
    id of a rejected line."""
    for number, line in enumerate(records.source.lines(), 1):
        if line is None or not line or line.isspace():
            yield line
            continue
        try:
            yield dialogue(line, number)
        except InputError as error:
            yield rejected_line(number, error, id_of(line))


def _kaldi(records: Records) -> Iterator[Record]:
    """Yields the records of Kaldi's `text`. A line is the id and the words of an utterance; its speaker is in
    `utt2spk`, which has the same order.

    Source: https://kaldi-asr.org/doc/data_prep.html, where both are sorted by the utterance's id as bytes.
    """
    voice_of = records.voice_of
    speakers = _speaker_lines(records.source)
    at = (b"", "")

    def dialogue(line: bytes, number: int) -> bytes:
        nonlocal at
        utterance, *words = line.split(None, 1)
        values = {"id": decoded(utterance), "text": one_line(words[0]).strip() if words else ""}
        if voice_of is not None:
            while at[0] < utterance:
                at = next(speakers, (b"\xff" * 8, ""))
            if at[0] != utterance:
                advice = "Add it, and sort both files by the id as bytes, as `LC_ALL=C sort` does."
                raise bad_line(f"The utterance has no speaker in {SPEAKERS}.", advice)
            values["speaker"] = at[1]
        return row_dialogue(values, number, voice_of)

    return _of_lines(records, dialogue)


def speakers_sha256(source: Source) -> str:
    """Hex SHA-256 of the `utt2spk` in the folder of an input. Raises `input.unreadable`."""
    with open_source(str(source.folder / SPEAKERS)) as speakers:
        return speakers.sha256


def _speaker_lines(source: Source) -> Iterator[tuple[bytes, str]]:
    with open_source(str(source.folder / SPEAKERS)) as speakers:
        for line in speakers.lines():
            words = (line or b"").split()
            if len(words) == 2:
                yield words[0], words[1].decode(errors="replace")


def _blank(record: Record) -> bool:
    return isinstance(record, bytes) and (not record or record.isspace())


class Columns:
    """Finds the columns of a table, and converts its rows."""

    def __init__(
        self,
        names: Sequence[str],
        chosen: Reading,
        uri: str,
        voice_of: Callable[[str], str | None] | None,
    ) -> None:
        """Raises `input.wrong_format` for a table without the needed columns, or with two columns of the same
        name."""
        wanted = chosen.columns or {}
        shown = ", ".join(repr(clean(name, 40)) for name in names[:20]) or "none"
        #: Field -> name of its column.
        self.of: dict[str, str] = {}
        for field, usual in FIELDS.items():
            if field in wanted and wanted[field] not in names:
                raise wrong_format(
                    uri, f"has no column {clean(wanted[field], 40)!r}", f"Its columns are: {shown}."
                )
            found = [name for name in ((wanted[field],) if field in wanted else usual) if name in names]
            if not found or (field == "example_id" and "id" in wanted):
                continue
            if names.count(found[0]) > 1:
                raise wrong_format(uri, f"has two columns {clean(found[0], 40)!r}", "Rename one of them.")
            self.of[field] = found[0]
        self.chat = "text" not in self.of and "messages" in names
        if self.chat:
            if voice_of is not None:
                advice = "Leave --voice-for and --voices-by out."
                raise wrong_format(uri, "has chats, which name no speakers", advice)
            self.of["messages"] = "messages"
        elif "text" not in self.of:
            advice = "Give the column with the text: --column text=NAME."
            raise wrong_format(uri, f"has no column `text`; its columns are: {shown}", advice)
        self._voice_of = voice_of

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
            cells = {field: cell(name) for field, name in self.of.items()}
            if self.chat:
                given = {field: value for field, value in cells.items() if value != ""}
                return chat_dialogue(_encode(given), number)
            values = {field: _text(value, self.of[field]) for field, value in cells.items()}
            return row_dialogue(values, number, self._voice_of)
        except (UnicodeError, TypeError, ValueError) as error:
            raise bad_line(f"The row cannot be read: {clean(str(error), 200)}.", "Correct it.") from None


#: (number of a row's first line, its fields or its error, number of its further lines); a blank line has no
#: fields.
_Row = tuple[int, list[str] | InputError, int]


def _table(rows: Iterator[_Row], records: Records) -> Iterator[Record]:
    """Yields the records of a table with a header, one for each line: a row for its first line, and blank
    records for its further lines, the header and blank lines. Raises `input.wrong_format`."""
    columns: Columns | None = None
    names: list[str] = []
    for number, fields, more in rows:
        if isinstance(fields, InputError):
            if columns is None:
                raise wrong_format(records.source.uri, "has no readable header", str(fields))
            yield rejected_line(number, fields)
        elif not fields:
            yield b""
        elif columns is None:
            names = [name.strip() for name in fields]
            columns = Columns(names, records.chosen, records.source.uri, records.voice_of)
            yield b""
        elif len(fields) == len(names):
            yield columns.record(dict(zip(names, fields)).__getitem__, number)
        else:
            message = f"The line has {len(fields)} fields, but the header has {len(names)}."
            advice = "Use the same number of fields, and put a text that contains the separator in quotes."
            yield rejected_line(number, bad_line(message, advice))
        for _ in range(more):
            yield b""


def _csv(records: Records) -> Iterator[Record]:
    """CSV with a header (RFC 4180), separated by commas, or by semicolons if the header has no comma."""
    header = records.source.head().lstrip().partition(b"\n")[0]
    delimiter = ";" if b";" in header and b"," not in header else ","
    return _table(_csv_rows(records.source.lines(), delimiter=delimiter), records)


def _tsv(records: Records) -> Iterator[Record]:
    """TSV with a header, without quoting. Lines of only tabs and spaces, which spreadsheets leave below a
    table, count as blank."""
    rows = _csv_rows(records.source.lines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return _table(
        (
            (number, [] if isinstance(fields, list) and not "".join(fields).strip() else fields, more)
            for number, fields, more in rows
        ),
        records,
    )


def _parquet(records: Records) -> Iterator[Record]:
    """Yields the rows of a Parquet file as dialogues. Only the needed columns are read, some rows at a time.

    Raises `input.unreadable`, `input.wrong_format`, and `config.missing_library` without pyarrow.
    """
    uri, file = records.source.uri, records.source.file
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_library("Reading Parquet", "pyarrow", "export") from None
    try:
        file.seek(0)
        # Streamed by pages, because a row group may not fit into memory.
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        columns = Columns(table.schema_arrow.names, records.chosen, uri, records.voice_of)
        rows = (
            batch.slice(place, 1)
            for batch in table.iter_batches(_ROWS, columns=[*columns.of.values()], use_threads=False)
            for place in range(batch.num_rows)
        )
        for number, row in enumerate(rows, 1):
            yield columns.record(lambda name, row=row: row.column(name)[0].as_py(), number)
    except (pyarrow.ArrowException, OSError) as error:
        with input_errors(uri):
            raise ValueError(clean(str(error), 200)) from error


#: Format -> the reader of all its records; `limit` and `sample` are applied afterwards.
_READERS: dict[InputFormat, Callable[[Records], Iterator[Record]]] = {
    "dialogues": lambda records: records.source.lines(),
    "messages": lambda records: _of_lines(records, chat_dialogue),
    "openai-batch": lambda records: _of_lines(
        records, lambda line, _: batch_dialogue(line, records.card, records.spec.format), custom_id
    ),
    "text": lambda records: _of_lines(
        records,
        lambda line, number: row_dialogue({"text": one_line(line).strip()}, number, records.voice_of),
    ),
    "csv": _csv,
    "tsv": _tsv,
    "kaldi": _kaldi,
    "parquet": _parquet,
}


def _csv_rows(lines: Iterator[bytes | None], **dialect: Any) -> Iterator[_Row]:
    """Yields the rows of CSV. If a row is invalid, only its first line is rejected, and its further lines are
    read again as new rows."""
    #: Lines to read before the next one of `lines`, in reverse order.
    again: list[bytes | None] = []
    number, reader = 1, None
    taken: list[bytes | None] = []
    while True:
        taken.clear()
        reader = reader or csv.reader(_recorded(again, lines, taken), strict=True, **dialect)
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
            message = f"The line is not CSV: {clean(str(error), 200)}."
            advice = 'In a quoted field, write each quote twice: "".'
            found = _bare_return() if bare else bad_line(message, advice)
        if isinstance(found, InputError):
            again += reversed(taken[1:])
            del taken[1:]
            reader = None
        yield number, found, len(taken) - 1
        number += len(taken)


def _recorded(
    again: list[bytes | None], lines: Iterator[bytes | None], taken: list[bytes | None]
) -> Iterator[str]:
    """Yields lines to the `csv` module, and appends them to `taken`, so that it has the lines of the current
    row."""
    size = 0
    while True:
        if not taken:
            size = 0
        elif len(taken) >= MAX_RECORD_LINES or size > MAX_LINE_BYTES:
            raise bad_line(
                f"A quote opens a field and is not closed within {MAX_RECORD_LINES:,} lines or {MAX_LINE_BYTES >> 20} MiB.",
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
    """The text of a line. Raises `InputError` for a line that is too long, not UTF-8, or contains a NUL."""
    if line is None:
        raise line_too_long()
    if b"\0" in line:
        raise bad_line(
            "The line contains a NUL byte; the file may be binary or UTF-16.", "Write it as UTF-8."
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        message = f"The line is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}."
        advice = "Convert the file, for example with `iconv -f LATIN1 -t UTF-8`."
        raise bad_line(message, advice) from None


def one_line(line: bytes | None) -> str:
    """Like `decoded`, without the line end. Also raises `InputError` for a line with a carriage return
    inside."""
    text = decoded(line).rstrip("\r\n")
    if "\r" in text:
        raise _bare_return()
    return text


def _bare_return() -> InputError:
    message = "The line contains a carriage return (CR) that is not a line end: lines must end with LF, or with CR LF."
    return bad_line(message, f"If it is meant as a line end, convert the file: {CONVERT_RETURNS}.")


def _text(value: Any, name: str) -> str:
    """The text of a cell; empty for a missing value. Raises `InputError`."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        message = f"The column {clean(name, 40)!r} contains {type(value).__name__}, not text."
        raise bad_line(message, "Convert the column to text, or select another one with --column.")
    return str(value)


def check_columns(columns: Mapping[str, str]) -> None:
    """Raises `config.invalid` for a field that rows do not have."""
    for field in columns:
        if field not in FIELDS:
            raise invalid(f"Rows have no field {field[:40]!r}.", f"The fields are: {', '.join(FIELDS)}.")
