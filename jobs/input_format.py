"""How an input is written: dialogues, chat messages, an OpenAI batch, plain text, a table or Kaldi's
`text`, told apart by its start."""

from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

import msgspec

from pipelines.errors import ErrorCode, InputError

if TYPE_CHECKING:
    from jobs.source import Source

InputFormat = Literal["dialogues", "messages", "openai-batch", "text", "csv", "tsv", "kaldi", "parquet"]
#: What a person may ask for: `auto` is one of the others, as `recognized` finds it.
AskedFormat = Literal[
    "auto", "dialogues", "messages", "openai-batch", "text", "csv", "tsv", "kaldi", "parquet"
]

#: A format in the words of an error.
WORDS: dict[InputFormat, str] = {
    "dialogues": "dialogues (JSONL)",
    "messages": "chat messages (JSONL with `role` and `content`)",
    "openai-batch": "an OpenAI batch",
    "text": "plain text, a sentence a line",
    "csv": "CSV",
    "tsv": "TSV",
    "kaldi": "Kaldi's `text`",
    "parquet": "Parquet",
}
_JSON: tuple[InputFormat, ...] = ("dialogues", "messages", "openai-batch")
_BY_EXTENSION: dict[str, InputFormat] = {".txt": "text", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
_LINES_LOOKED_AT = 64
#: What a person does with a file whose lines end with CR alone, as old programs of the Macintosh write them.
CONVERT_RETURNS = r"`tr '\r' '\n' < OLD > NEW`"
_UTF_16_AND_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")


class _Keys(msgspec.Struct, frozen=True):
    """The keys by which kinds of JSON lines are told apart."""

    custom_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_keys = msgspec.json.Decoder(_Keys).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def recognized(source: Source) -> InputFormat:
    """The format of an input: by its first lines where they are JSON, by its first bytes where it is
    Parquet, else by its name.

    Raises `input.wrong_format`, which says what the input looks like, where none of these decides.
    """
    head, uri = source.head(), source.uri
    looks = _looks_like(head)
    if looks == "parquet":
        return looks
    _check_lines(uri, head)
    if looks in _JSON:
        return looks
    if head.startswith(_UTF_16_AND_32):
        raise wrong_format(
            uri,
            "is not UTF-8 but UTF-16 or UTF-32",
            "Convert it, for example with `iconv -f UTF-16 -t UTF-8`.",
        )
    named = _BY_EXTENSION.get(_extension(uri))
    if named == "parquet":
        raise wrong_format(
            uri,
            "is no Parquet file",
            "Give the file that its name promises, or name its format with --input-format.",
        )
    if named is not None:
        return named
    if b"\0" in head:
        raise wrong_format(
            uri, "is binary", "Give a file of lines, or Parquet; see docs/submit.md for the formats."
        )
    if looks is None:
        # Nothing, or JSON of another kind: the lines themselves are refused, each with its reason.
        return "dialogues"
    if PurePosixPath(uri).name == "text":
        looks = "kaldi"
    raise wrong_format(
        uri, f"holds no JSON; it looks like {WORDS[looks]}", f"If it is, say so: --input-format {looks}."
    )


def check_format(source: Source, format: InputFormat) -> None:
    """Raises `input.wrong_format` for an input that is plainly not of the format it was said to be."""
    head, uri = source.head(), source.uri
    looks = _looks_like(head)
    if "parquet" not in (looks, format):
        _check_lines(uri, head)
    wrong = looks is not None and looks != format and "parquet" in (looks, format)
    if looks in _JSON and format not in _JSON:
        wrong = True
    if wrong and looks is not None:
        raise wrong_format(
            source.uri,
            f"is not {WORDS[format]}; it looks like {WORDS[looks]}",
            f"Use --input-format {looks}, or leave it out.",
        )


def _check_lines(uri: str, head: bytes) -> None:
    """Raises `input.wrong_format` for an input whose records are plainly not in lines of their own."""
    text = head.lstrip()
    if text.startswith(b"[") and text[1:].lstrip().startswith(b"{"):
        raise wrong_format(
            uri, "is one JSON array; one object a line is read", "Convert it: `jq -c '.[]' OLD > NEW.jsonl`."
        )
    if text.partition(b"\n")[0].strip() == b"{":
        raise wrong_format(
            uri,
            "is JSON with objects of several lines; one object a line is read",
            "Convert it: `jq -c . OLD > NEW.jsonl`.",
        )
    if b"\n" not in head and b"\r" in head.rstrip():
        raise wrong_format(
            uri,
            "has lines that end with CR alone; lines end with LF, or with CR LF",
            f"Convert it: {CONVERT_RETURNS}.",
        )


def _looks_like(head: bytes) -> InputFormat | None:
    """The format that the first bytes of an input look like; None: they are empty, or JSON of no known
    kind."""
    if head.startswith(b"PAR1"):
        return "parquet"
    lines = [line.strip() for line in head.split(b"\n")[:_LINES_LOOKED_AT]]
    lines = [line for line in lines if line]
    for line in lines:
        if line.startswith(b"{") and (kind := _json_kind(line)) is not None:
            return kind
    if not lines or any(line.startswith((b"{", b"[")) for line in lines):
        return None
    # The last one may be cut off.
    whole = lines[:-1] or lines
    marks: dict[str, InputFormat] = {"\t": "tsv", ",": "csv", ";": "csv"}
    for mark, kind in marks.items():
        counts = [_fields(line, mark) for line in whole]
        if counts[0] > 1 and 2 * counts.count(counts[0]) > len(counts):
            return kind
    return "text"


def _fields(line: bytes, mark: str) -> int:
    """How many fields a line has; 0: it is no CSV, whose fields in quotes may hold the mark."""
    if mark == "\t":
        return line.count(b"\t") + 1
    with suppress(csv.Error):
        return len(next(csv.reader([line.decode(errors="replace")], delimiter=mark), []))
    return 0


def _json_kind(line: bytes) -> InputFormat | None:
    try:
        keys = _decode_keys(line)
        if keys.custom_id is not msgspec.UNSET:
            return "openai-batch"
        if keys.messages is msgspec.UNSET:
            return None
        first = next((bytes(message) for message in _decode_list(keys.messages)), b"[")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return "messages" if first.startswith(b"{") else "dialogues"


def _extension(uri: str) -> str:
    """`.csv` of `data.CSV.gz`."""
    path = PurePosixPath(uri.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def wrong_format(uri: str, what: str, advice: str) -> InputError:
    """The error of an input that is not of its format; without a name it is a person's records."""
    return InputError(
        ErrorCode.INPUT_WRONG_FORMAT, f"The input {f'{uri[:300]!r} ' if uri else ''}{what}.", advice
    )
