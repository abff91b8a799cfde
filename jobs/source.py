"""Reads the input of a job as lines: from a file, standard input or S3, plain or compressed. Recognizes its format
by its first bytes: dialogues, chat messages, an OpenAI batch, plain text, a table, rows of JSON, Lhotse's cuts or
Kaldi's `text`."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, NamedTuple, cast

import zstandard

from jobs.dialogue import BAD_JSON, decode_object
from jobs.formatting import printable
from jobs.ledger.records import RejectedLine
from jobs.settings import S3Settings
from jobs.store import is_remote
from jobs.store.base import sha256_of
from jobs.store.s3 import open_s3_object
from pipelines.errors import ErrorCode, InputError, StoreError, input_too_long

InputFormat = Literal[
    "dialogues",
    "messages",
    "openai-batch",
    "rows",
    "lhotse",
    "text",
    "csv",
    "tsv",
    "kaldi",
    "parquet",
    "arrow",
]
#: The values of `--input-format`; `format_of` recognizes `auto`.
AskedFormat = Literal["auto", InputFormat]

#: Format -> its name in messages.
FORMAT_NAMES = {
    "dialogues": "dialogues (JSONL)",
    "messages": "chat messages (JSONL with `role` and `content`)",
    "openai-batch": "an OpenAI batch",
    "rows": "rows (JSONL with `text`)",
    "lhotse": "Lhotse's cuts (JSONL with `supervisions`)",
    "text": "plain text with one sentence per line",
    "csv": "CSV",
    "tsv": "TSV",
    "kaldi": "Kaldi's `text`",
    "parquet": "Parquet",
    "arrow": "Arrow",
}
#: Formats whose records are rows with columns or keys.
TABLES = ("rows", "lhotse", "csv", "tsv", "parquet", "arrow")
#: Usual names of the column or key that contains the text.
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
_BINARY = ("parquet", "arrow")
#: Formats that the first bytes identify with certainty.
_CERTAIN = ("dialogues", "messages", "openai-batch", "rows", "lhotse", *_BINARY)
_BY_EXTENSION: dict[str, InputFormat] = {".txt": "text", ".csv": "csv", ".tsv": "tsv"}
_EXAMINED_LINES = 64
#: The command that converts a file whose lines end with CR alone, as old Macintosh programs write them.
CONVERT_RETURNS = r"`tr '\r' '\n' < OLD > NEW`"
_UTF_16_AND_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
#: Maximum bytes of a line. A longer line is refused, and its bytes are not kept in memory.
MAX_LINE_BYTES = 1 << 20
#: Maximum number of blank lines, and its increase for each other line: a small compressed file can contain
#: billions.
MAX_BLANK_LINES, MAX_BLANK_LINES_EACH = 1_000_000, 10
#: Size of a batch of lines.
BATCH_LINES, BATCH_BYTES = 10_000, 16 << 20
#: Number of lines that are added to a batch before its bytes are counted again.
_LINES_AT_ONCE = 16
_CHUNK_BYTES = 1 << 20
#: zstd expands 4 bytes to at most 128 KiB, so one piece expands to less than 32 MiB.
_ZSTD_PIECE_BYTES = 1 << 10
_ZSTD_MAX_WINDOW_BYTES = 1 << 27
_BOM = b"\xef\xbb\xbf"


#: One line of an input: its bytes, its dialogue as JSON, or its rejection. None: the line is too long. Blank
#: lines are skipped.
Record = bytes | RejectedLine | None


class LineBatch(NamedTuple):
    """The records of consecutive lines, or rows of Parquet. `first`: the number of the first line, counted
    from 1."""

    first: int
    lines: Sequence[Record]


@dataclass(eq=False)
class Source:
    """An input that can be read more than once. Made by `open_source`."""

    #: All files, of which only a dataset of Hugging Face has several.
    files: Sequence[BinaryIO]
    #: An absolute path, `-`, or an `s3://` address.
    uri: str
    #: The folder to which paths in the lines are relative.
    folder: Path

    def __post_init__(self) -> None:
        files = self.files
        #: The open file, not decompressed, for formats without lines.
        self.file = files[0]
        with input_errors(self.uri):
            self._identity = self._stat()
            self.bytes = sum(size for size, _ in self._identity)
            for one in files:
                one.seek(0)
            hashes = [sha256_of(one) for one in files]
            #: Hex SHA-256 of the file, before decompression; of several files, the one of their hashes.
            self.sha256 = hashes[0] if len(files) == 1 else sha256_of(" ".join(hashes).encode())

    def lines(self) -> Iterator[bytes | None]:
        """The lines, decompressed; a line longer than `MAX_LINE_BYTES` is None.

        Raises `input.unreadable` if the content cannot be read, is a damaged compressed file, or consists
        mostly of blank lines.
        """
        blank_left = MAX_BLANK_LINES
        with input_errors(self.uri):
            self.file.seek(0)
            for lines in split_lines(decompressed(self.file)):
                blank = len([line for line in lines if line is not None and (not line or line.isspace())])
                blank_left += (len(lines) - blank) * MAX_BLANK_LINES_EACH - blank
                if blank_left < 0:
                    reason = f"has more than {MAX_BLANK_LINES:,} blank lines, and few other lines"
                    raise _unreadable(self.uri, reason, "Remove them.")
                yield from lines

    def head(self) -> bytes:
        """The first bytes, decompressed. Raises `input.unreadable`."""
        with input_errors(self.uri):
            self.file.seek(0)
            return decompressed(self.file).read(MAX_LINE_BYTES).removeprefix(_BOM)[:MAX_LINE_BYTES]

    @property
    def bytes_read(self) -> int:
        """Number of bytes that have been read, before decompression."""
        return sum(one.tell() for one in self.files)

    def check_unchanged(self) -> None:
        """Raises `input.unreadable` if the file has changed since it was opened."""
        if self._stat() != self._identity:
            raise _unreadable(
                self.uri, "changed while it was read", "Submit it again when it is no longer written to."
            )

    def _stat(self) -> list[tuple[int, int]]:
        found = [os.fstat(one.fileno()) for one in self.files]
        return [(one.st_size, one.st_mtime_ns) for one in found]


def batches_of(
    records: Iterator[Record], max_lines: int, max_bytes: int, after_line: int = 0
) -> Iterator[LineBatch]:
    """Yields the records after line `after_line` in batches of up to `max_lines`, and about `max_bytes`."""
    batch: list[Record] = []
    size = 0
    next(islice(records, after_line, after_line), None)
    while some := list(islice(records, min(_LINES_AT_ONCE, max_lines - len(batch)))):
        batch += some
        size += sum(len(record) for record in some if isinstance(record, bytes))
        if len(batch) == max_lines or size >= max_bytes:
            yield LineBatch(after_line + 1, batch)
            after_line += len(batch)
            batch = []
            size = 0
    if batch:
        yield LineBatch(after_line + 1, batch)


def split_lines(stream: BinaryIO) -> Iterator[list[bytes | None]]:
    """Yields lists of lines, without their newlines; a line that is too long is None. A byte order mark at
    the start is dropped."""
    tail, skipping = b"", False
    chunk = stream.read(_CHUNK_BYTES).removeprefix(_BOM)
    while chunk:
        whole = (tail + chunk).split(b"\n")
        tail = whole.pop()
        if whole:
            parts: list[bytes | None] = [*whole]
            if skipping or max(map(len, whole)) > MAX_LINE_BYTES:
                parts = [part if len(part) <= MAX_LINE_BYTES else None for part in whole]
                parts[0] = None if skipping else parts[0]
                skipping = False
            yield parts
        if skipping or len(tail) > MAX_LINE_BYTES:
            tail, skipping = b"", True
        chunk = stream.read(_CHUNK_BYTES)
    if skipping or tail:
        yield [None if skipping else tail]


def decompressed(file: BinaryIO) -> BinaryIO:
    """The content of a plain, gzip or zstd file, recognized by its first bytes. The memory of a read is
    bounded for every ratio of compression."""
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file, mode="rb"))
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        return cast(BinaryIO, _ZstdReader(file))
    return file


class _ZstdReader:
    """Reads all frames of a zstd file, and detects a truncated last frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""

    def read(self, size: int = -1, /) -> bytes:
        """Returns about `size` bytes, or all for -1; empty at the end."""
        out = io.BytesIO()
        while size < 0 or out.tell() < size:
            piece = self._input or self._file.read(_ZSTD_PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is truncated")
                break
            frame = self._frame or self._context.decompressobj()
            out.write(frame.decompress(piece))
            self._frame = None if frame.eof else frame
            self._input = frame.unused_data if frame.eof else b""
        return out.getvalue()


@contextmanager
def open_source(address: str, s3: S3Settings | None = None) -> Generator[Source]:
    """Opens a path, `-` (standard input) or `s3://bucket/key`; a folder is a dataset of Hugging Face. An input
    that cannot be read twice is first copied to a temporary file. Raises `input.unreadable`, or `StoreError`
    if S3 cannot be reached."""
    path = Path(address).absolute()
    uri = str(path)
    folder = path.parent
    is_file = False
    with ExitStack() as opened:
        with input_errors(address):
            if is_remote(address) or address == "-":
                uri = address
                folder = Path.cwd()
                files = [
                    sys.stdin.buffer if address == "-" else opened.enter_context(open_s3_object(address, s3))
                ]
            else:
                files = [opened.enter_context(one.open("rb")) for one in dataset_files(path) or [path]]
                is_file = stat.S_ISREG(os.fstat(files[0].fileno()).st_mode)
            if not is_file:
                copy = opened.enter_context(tempfile.TemporaryFile(prefix="nightjar-input-"))
                shutil.copyfileobj(files[0], copy, _CHUNK_BYTES)
                copy.flush()
                files = [copy]
        yield Source(files, uri, folder)


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a dataset that `save_to_disk` of Hugging Face `datasets` wrote; empty for any other
    path. Raises `input.unreadable` for a folder with several splits, or that cannot be read.

    Source: `datasets.Dataset.save_to_disk` and `datasets.DatasetDict.save_to_disk`.
    """
    with input_errors(str(folder)):
        if (folder / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(str(state.parent) for state in folder.glob("*/state.json")))
            raise _unreadable(
                str(folder), "is a dataset with several splits", f"Give one: {printable(splits, 500)}."
            )
        state = folder / "state.json"
        listed = state.read_text() if state.is_file() else ""
        return [folder / name for name in re.findall(r'"filename": "([^"/]+)"', listed)]


def check_source(source: str) -> str:
    """Checks that an input has a valid name, can be read and is not a device, and returns its name. Raises
    `input.unreadable`."""
    try:
        source.encode()
    except UnicodeEncodeError:
        raise InputError(
            ErrorCode.INPUT_UNREADABLE, "The input's name is not UTF-8.", "Rename the file."
        ) from None
    with input_errors(source):
        if source == "-" or is_remote(source) or dataset_files(Path(source)):
            return source
        mode = os.stat(source).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            open(source, "rb").close()
        elif not stat.S_ISFIFO(mode):
            raise _unreadable(source, "is a device", "Give a file, or `-` for standard input.")
    return source


def rejected_line(line: int, error: InputError, example_id: str | None = None) -> RejectedLine:
    """The record of a line that is rejected with this error. `example_id`: its id, if that is valid."""
    return RejectedLine(line, error.code, printable(str(error), 500), example_id)


def line_too_long() -> InputError:
    """The error of a line of more than `MAX_LINE_BYTES`."""
    return input_too_long(
        f"The line is longer than {MAX_LINE_BYTES >> 20} MiB.",
        "Split its text into several lines.",
    )


def empty_input() -> InputError:
    """The error of an input without any record."""
    return InputError(
        ErrorCode.INPUT_NO_ITEMS,
        "The input is empty.",
        "Give at least one record: a line with a dialogue or a sentence, or a row.",
    )


@contextmanager
def input_errors(uri: str) -> Generator[None]:
    """Raises errors of opening and reading an input as `input.unreadable`."""
    try:
        yield
    except StoreError as error:
        if error.code is ErrorCode.STORE_UNREACHABLE:
            raise
        raise _unreadable(uri, f"cannot be read: {error.message.rstrip('.')}", error.advice) from error
    except EOFError as error:
        raise _unreadable(uri, "is a truncated compressed file", "Copy it again.") from error
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise _unreadable(uri, f"is a damaged compressed file ({error})", "Copy it again.") from error
    except IsADirectoryError as error:
        raise _unreadable(
            uri,
            "is a folder",
            "Give one file, plain, .gz or .zst; for a Kaldi folder, its `text`; of a dataset of Hugging Face, a folder that `save_to_disk` wrote.",
        ) from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unreadable(uri, f"cannot be read: {reason}", "Check the path and its permissions.") from error


def _unreadable(uri: str, reason: str, advice: str) -> InputError:
    return InputError(ErrorCode.INPUT_UNREADABLE, f"The input {uri[:300]!r} {reason}.", advice)


def format_of(source: Source, asked: AskedFormat) -> InputFormat:
    """The format of an input: the requested one, or for `auto` the recognized one. JSON is recognized by the
    first lines, Parquet by the first bytes, and other formats by the extension of the name.

    Raises `input.wrong_format`, with the likely format, if the format is not recognized, and for an input
    that is clearly not in the requested format.
    """
    if asked in ("dialogues", "openai-batch"):
        return asked
    head = source.head()
    uri = source.uri
    looks = _looks_like(head)
    if not {looks, asked} & {*_BINARY}:
        _check_lines(uri, head)
    if asked != "auto":
        other = looks in _CERTAIN and (asked not in _CERTAIN or looks in _BINARY)
        if looks is not None and looks != asked and (other or asked in _BINARY):
            raise wrong_format(
                uri,
                f"is not {FORMAT_NAMES[asked]}; it looks like {FORMAT_NAMES[looks]}",
                f"Use --input-format {looks}, or leave it out.",
            )
        return asked
    named = _BY_EXTENSION.get(_extension(uri))
    if looks in _CERTAIN:
        return looks
    if head.startswith(_UTF_16_AND_32) or (named is None and b"\0" in head):
        raise wrong_format(
            uri,
            "is binary, or UTF-16 or UTF-32",
            "Convert it, for example with `iconv -f UTF-16 -t UTF-8`, or use a format that docs/submit.md lists.",
        )
    if named is not None:
        return named
    if looks is None:
        # The input is empty, or JSON of another kind, whose lines are later refused one by one with reasons.
        return "dialogues"
    if PurePosixPath(uri).name == "text":
        looks = "kaldi"
    raise wrong_format(
        uri, f"is not JSON; it looks like {FORMAT_NAMES[looks]}", f"If it is, use --input-format {looks}."
    )


def _check_lines(uri: str, head: bytes) -> None:
    """Raises `input.wrong_format` for an input without one record per line."""
    text = head.lstrip()
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        raise wrong_format(
            uri,
            "is one JSON array; it needs one object per line",
            "Convert it: `jq -c '.[]' OLD > NEW.jsonl`.",
        )
    if text.partition(b"\n")[0].strip() == b"{":
        raise wrong_format(
            uri,
            "is JSON with objects on several lines; it needs one object per line",
            "Convert it: `jq -c . OLD > NEW.jsonl`.",
        )
    if b"\n" not in head and b"\r" in head.rstrip():
        raise wrong_format(
            uri,
            "has lines that end with CR alone; lines must end with LF, or with CR LF",
            f"Convert it: {CONVERT_RETURNS}.",
        )


def _looks_like(head: bytes) -> InputFormat | None:
    """The format that the first bytes of an input look like; None: empty, or JSON of an unknown kind."""
    if head.startswith(b"PAR1"):
        return "parquet"
    # Arrow's format of files, and its format of streams.
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    lines = [line for line in map(bytes.strip, head.split(b"\n")[:_EXAMINED_LINES]) if line]
    for line in lines:
        if line.startswith(b"{") and (kind := _json_kind(line)) is not None:
            return kind
    if not lines or any(line.startswith((b"{", b"[")) for line in lines):
        return None
    first = lines[0]
    if b"\t" in first:
        return "tsv"
    return "csv" if b" " not in first and (b"," in first or b";" in first) else "text"


def _json_kind(line: bytes) -> InputFormat | None:
    try:
        found = decode_object(line)
    except BAD_JSON:
        return None
    if "custom_id" in found:
        return "openai-batch"
    if "messages" in found:
        return "messages" if bytes(found["messages"]).lstrip(b"[ \t").startswith(b"{") else "dialogues"
    if found.keys() & {"supervisions", "tracks"} or found.keys() >= {"recording_id", "start", "duration"}:
        return "lhotse"
    return "rows" if found.keys() & {*TEXT_COLUMNS} else None


def _extension(uri: str) -> str:
    """The extension of a name, without that of a compression: `.csv` for `data.CSV.gz`."""
    path = PurePosixPath(uri.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def wrong_format(uri: str, what: str, advice: str) -> InputError:
    """The error of an input in a wrong format. `uri`: its name, empty for records of a Python program."""
    return InputError(
        ErrorCode.INPUT_WRONG_FORMAT, f"The input {f'{uri[:300]!r} ' if uri else ''}{what}.", advice
    )
