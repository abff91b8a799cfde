"""Reads the records of an input in any format. There is one record for each line: its dialogue as JSON.

A row of a table, a line of text or a line of Kaldi's `text` becomes a dialogue of one text with its voice
settings:

    id,text,voice                       {"example_id": "a1", "messages": [["user", "text", "Good evening."]],
    a1,Good evening.,heart               "generation": {"voice": "heart"}}
"""

from __future__ import annotations

import csv
import mmap
import random
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from jobs.columns import Columns, csv_dialect, row_converter
from jobs.dialogue import (
    BAD_JSON,
    LINE_KEYS,
    VoiceOf,
    batch_dialogue,
    chat_dialogue,
    custom_id,
    decode_line,
    decode_object,
    row_dialogue,
)
from jobs.formatting import JsonObject, printable
from jobs.ledger.records import JobSpec, Reading
from jobs.source import (
    CONVERT_RETURNS,
    MAX_LINE_BYTES,
    InputFormat,
    Record,
    Source,
    input_errors,
    line_too_long,
    open_source,
    rejected_line,
    wrong_format,
)
from jobs.voices import VoiceDraws, voice_of_speaker
from pipelines.errors import ErrorCode, InputError, bad_line, missing_library
from pipelines.registry import ModelCard

if TYPE_CHECKING:
    import pyarrow

#: Maximum number of lines of a quoted field, which may contain line ends.
MAX_RECORD_LINES = 1000
#: Rows of a table that are read at once.
ROWS = 256
#: Kaldi's file of speakers, in the folder of its `text`.
SPEAKERS = "utt2spk"
#: How a job reads its input if no option changes that: all records, and the usual columns.
ALL = Reading()
_ROW_SHAPE = "A line is one JSON object with `text`, and `id` (text or a number) if it has an id."
_encode = msgspec.json.encode


@dataclass(frozen=True)
class Records:
    """The records of one input for a job of this spec and model. They can be read more than once, with the
    same result."""

    source: Source
    format: InputFormat
    spec: JobSpec
    card: ModelCard
    #: Columns that were left out because JSON cannot contain their values; known once they are read.
    left_out: set[str] = field(default_factory=set, compare=False)

    @property
    def chosen(self) -> Reading:
        return self.spec.reading or ALL

    @cached_property
    def voice_of(self) -> VoiceOf:
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
        limit = self.chosen.limit
        sample = self.chosen.sample
        read = _READERS[self.format]
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
        if line is None or _blank(line):
            yield line
            continue
        try:
            yield dialogue(line, number)
        except InputError as error:
            yield rejected_line(number, error, id_of(line))


def _kaldi(records: Records) -> Iterator[Record]:
    """Yields the records of Kaldi's `text`. A line is the id and the words of an utterance. The values of the
    utterance and of its speaker in the other files of the folder are metadata under the names of the files.

    Source: https://kaldi-asr.org/doc/data_prep.html.
    """
    voice_of = records.voice_of
    folder = records.source.folder
    needed = {*_beside(records.source), *([SPEAKERS] if voice_of else ())}
    # A database without a name is a temporary file: memory stays bounded for any number of lines.
    with closing(sqlite3.connect("")) as known:
        known.execute(
            "CREATE TABLE known (id TEXT, file TEXT, value TEXT, PRIMARY KEY (id, file)) WITHOUT ROWID"
        )
        for name in needed:
            with open_source(str(folder / name)) as file:
                words = ((line or b"").decode(errors="replace").split(None, 1) for line in file.lines())
                rows = ((two[0], name, two[1].strip()) for two in words if len(two) == 2)
                known.executemany("INSERT OR REPLACE INTO known VALUES (?, ?, ?)", rows)

        def values_of(id: str, files: str) -> dict[str, str]:
            query = "SELECT file, value FROM known WHERE id = ? AND file GLOB ? ORDER BY file"
            return dict(known.execute(query, (id, files)))

        def dialogue(line: bytes, number: int) -> bytes:
            utterance, *words = one_line(line).split(None, 1)
            metadata = values_of(utterance, "utt2*")
            speaker = metadata.get(SPEAKERS, "")
            if voice_of is not None and not speaker:
                raise bad_line(f"The utterance has no speaker in {SPEAKERS}.", "Add it.")
            values = {"id": utterance, "text": " ".join(words).strip(), "speaker": speaker}
            metadata |= values_of(speaker, "spk2*")
            kept = {name: value for name, value in metadata.items() if records.chosen.keeps(name)}
            return row_dialogue(values, number, voice_of, kept)

        yield from _of_lines(records, dialogue)


def _beside(source: Source) -> list[str]:
    """The names of Kaldi's files of utterances and of speakers in the folder of an input that is a file."""
    if Path(source.uri).parent != source.folder:
        return []
    with input_errors(source.uri):
        names = sorted(path.name for path in source.folder.iterdir() if path.is_file())
    return [name for name in names if re.fullmatch(r"(utt|spk)2\w+", name) and name != "spk2utt"]


def speakers_sha256(source: Source) -> str:
    """Hex SHA-256 of the `utt2spk` in the folder of an input. Raises `input.unreadable`."""
    with open_source(str(source.folder / SPEAKERS)) as speakers:
        return speakers.sha256


def _kept(line: bytes, chosen: Reading) -> bytes:
    """A line without the keys that are not to become metadata. A line that is not JSON stays as it is."""
    try:
        found = decode_object(line)
    except BAD_JSON:
        return line
    kept = {key: value for key, value in found.items() if key in LINE_KEYS or chosen.keeps(key)}
    return line if len(kept) == len(found) else _encode(kept)


def _blank(record: Record) -> bool:
    return isinstance(record, bytes) and not record.strip()


def _table(records: Records) -> Iterator[Record]:
    """Yields the records of a table with a header, one for each line: a row for its first line, and blank
    records for its further lines, the header and blank lines. In TSV lines of only tabs and spaces, which
    spreadsheets leave below a table, count as blank. Raises `input.wrong_format`."""
    columns: Columns | None = None
    names: list[str] = []
    header = records.source.head().lstrip().partition(b"\n")[0].decode(errors="replace")
    tabs = records.format == "tsv"
    for number, fields, more in _csv_rows(records.source.lines(), csv_dialect(header, tabs=tabs)):
        if isinstance(fields, InputError):
            if columns is None:
                raise wrong_format(records.source.uri, "has no readable header", str(fields))
            yield rejected_line(number, fields)
        elif not fields or (tabs and not "".join(fields).strip()):
            yield b""
        elif columns is None:
            names = [name.strip() or f"column {place}" for place, name in enumerate(fields, 1)]
            columns = Columns(names, records.chosen, records.source.uri, records.voice_of, records.left_out)
            yield b""
        elif len(fields) == len(names):
            yield columns.record(dict(zip(names, fields)).__getitem__, number)
        else:
            message = f"The line has {len(fields)} fields, but the header has {len(names)}."
            advice = "Use the same number of fields, and put a text that contains the separator in quotes."
            yield rejected_line(number, bad_line(message, advice))
        for _ in range(more):
            yield b""


class _Cut(msgspec.Struct, frozen=True):
    supervisions: list[dict[str, msgspec.Raw]] = []
    tracks: list[_Track] = []


class _Track(msgspec.Struct, frozen=True):
    cut: _Cut = _Cut()


_decode_cut = msgspec.json.Decoder(_Cut).decode


def supervision_rows(line: bytes) -> Iterator[JsonObject]:
    """The supervisions of a cut of Lhotse as rows, or the row of a supervision. A row has `id`, `text`,
    `speaker`, the other keys in `supervision`, and the other keys of the cut in `cut`. Raises `InputError`.

    Source: lhotse 1.33, `MonoCut.to_dict`, `MixedCut.to_dict` and `SupervisionSegment.to_dict`.
    """
    shape = "A line is the JSON of a cut with `supervisions`, or of a supervision."
    whole = decode_line(decode_object, line, shape)
    cut = decode_line(_decode_cut, line, shape)
    own = {key: value for key, value in whole.items() if key not in ("supervisions", "tracks")}
    listed = [*cut.supervisions, *(found for track in cut.tracks for found in track.cut.supervisions)]
    if "recording_id" in whole:
        listed = [whole]
        own = {}
    if not listed:
        raise bad_line("The cut has no supervisions.", shape)
    for supervision in listed:
        row = {key: supervision.pop(key) for key in ("id", "text", "speaker") if key in supervision}
        yield row | {"supervision": supervision} | ({"cut": own} if own else {})


def _json_rows(records: Records, rows_of: Callable[[bytes], Iterable[JsonObject]]) -> Iterator[Record]:
    """Yields the records of lines of JSON, each of which has one row or more. A number is that of a row."""
    dialogue = row_converter(records.chosen, records.voice_of, records.left_out)
    number = 0
    for line in records.source.lines():
        found = [line]
        if line is not None and not _blank(line):
            try:
                found = [*rows_of(line)]
            except InputError as error:
                found = [rejected_line(number + 1, error)]
        for row in found:
            number += 1
            try:
                yield dialogue(row, number) if isinstance(row, dict) else row
            except InputError as error:
                if error.code is ErrorCode.INPUT_WRONG_FORMAT:
                    error = bad_line(error.message, error.advice)
                yield rejected_line(number, error)


def _arrow(records: Records) -> Iterator[Record]:
    """Yields the rows of a Parquet file, or of Arrow files such as a dataset of Hugging Face, as dialogues. Only the
    needed columns are read, some rows at a time.

    Raises `input.unreadable`, `input.wrong_format`, and `config.missing_library` without pyarrow.
    """
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise missing_library("Reading Parquet", "pyarrow", "export") from None
    source = records.source
    left_out = records.left_out

    def opened(file: BinaryIO) -> ipc.RecordBatchStreamReader:
        # Mapped, because a batch with audio may not fit into memory.
        data = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        # The format of files is that of streams between eight bytes and a footer.
        return ipc.open_stream(data[8:] if data[:6].to_pybytes() == b"ARROW1" else data)

    def checked(columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
        for batch in chain.from_iterable(map(opened, source.files)):
            chosen = batch.select(columns)
            chosen.validate(full=True)
            yield chosen

    try:
        if records.format == "parquet":
            source.file.seek(0)
            # Streamed by pages, because a row group may not fit into memory.
            table = parquet.ParquetFile(source.file, pre_buffer=False, buffer_size=1 << 20)
            schema = table.schema_arrow
            read = partial(table.iter_batches, ROWS, use_threads=False)
        else:
            schema = opened(source.file).schema
            read = checked
        left_out.update(bytes_columns(schema))
        columns = Columns(schema.names, records.chosen, source.uri, records.voice_of, left_out)
        for number, cell in enumerate(cells_of(read(columns=columns.names)), 1):
            yield columns.record(cell, number)
    except (pyarrow.ArrowException, OSError) as error:
        with input_errors(source.uri):
            raise ValueError(printable(str(error), 200)) from error


def bytes_columns(schema: pyarrow.Schema) -> set[str]:
    """The columns of a table with bytes, such as audio and images, which JSON cannot contain."""

    def has_bytes(kind: pyarrow.DataType) -> bool:
        parts = [kind.field(place).type for place in range(kind.num_fields)]
        return any(map(has_bytes, parts)) if parts else "binary" in str(kind)

    return {field.name for field in schema if has_bytes(field.type)}


def left_out_note(names: Iterable[str]) -> str:
    """The note about columns that JSON cannot contain; empty if there are none."""
    shown = ", ".join(repr(printable(name, 40)) for name in sorted(names)[:20])
    return f"Columns with audio or other bytes are left out: {shown}." if shown else ""


def cells_of(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Callable[[str], Any]]:
    """Yields for each row the function that reads a value by its column's name."""
    for batch in batches:
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        for place in range(batch.num_rows):
            yield lambda name, arrays=arrays, place=place: arrays[name][place].as_py()


#: Format -> the reader of all its records; `limit` and `sample` are applied afterwards.
_READERS: dict[InputFormat, Callable[[Records], Iterator[Record]]] = {
    "dialogues": lambda records: (
        _of_lines(records, lambda line, _: _kept(line, records.chosen))
        if records.chosen.keep is not None or records.chosen.drop
        else records.source.lines()
    ),
    "messages": lambda records: _of_lines(
        records, lambda line, number: chat_dialogue(_kept(line, records.chosen), number)
    ),
    "openai-batch": lambda records: _of_lines(
        records, lambda line, _: batch_dialogue(line, records.card, records.spec.format), custom_id
    ),
    "text": lambda records: _of_lines(
        records, lambda line, number: row_dialogue({"text": one_line(line).strip()}, number, records.voice_of)
    ),
    # Such as a manifest of NeMo.
    "rows": lambda records: _json_rows(records, lambda line: [decode_line(decode_object, line, _ROW_SHAPE)]),
    "lhotse": lambda records: _json_rows(records, supervision_rows),
    "csv": _table,
    "tsv": _table,
    "kaldi": _kaldi,
    "parquet": _arrow,
    "arrow": _arrow,
}


def _csv_rows(
    lines: Iterator[bytes | None], dialect: JsonObject
) -> Iterator[tuple[int, list[str] | InputError, int]]:
    """Yields (number of its first line, its fields or its error, number of its further lines) of each row of CSV; a
    blank line has no fields. If a row is invalid, only its first line is rejected, and its further lines are read
    again as new rows."""
    #: Lines to read before the next one of `lines`, in reverse order.
    again: list[bytes | None] = []
    number, reader = 1, None
    taken: list[bytes | None] = []
    while True:
        taken.clear()
        reader = reader or csv.reader(_recorded(again, lines, taken), **dialect)
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
            message = f"The line is not CSV: {printable(str(error), 200)}."
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
        raise bad_line(
            f"The line is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02x}.",
            "Convert the file, for example with `iconv -f LATIN1 -t UTF-8`.",
        ) from None


def one_line(line: bytes | None) -> str:
    """Like `decoded`, without the line end. Also raises `InputError` for a line with a carriage return
    inside."""
    text = decoded(line).rstrip("\r\n")
    if "\r" in text:
        raise _bare_return()
    return text


def _bare_return() -> InputError:
    return bad_line(
        "The line contains a carriage return (CR) that is not a line end: lines must end with LF, or with CR LF.",
        f"If it is meant as a line end, convert the file: {CONVERT_RETURNS}.",
    )
