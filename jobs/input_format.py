"""The formats of inputs: dialogues, chat messages, an OpenAI batch, plain text, a table, rows of JSON, Lhotse's
cuts or Kaldi's `text`, recognized by their first bytes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from jobs.dialogue import BAD_JSON, decode_object
from pipelines.errors import ErrorCode, InputError

if TYPE_CHECKING:
    from jobs.source import Source

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
FORMAT_NAMES: dict[InputFormat, str] = {
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
TABLES: tuple[InputFormat, ...] = ("rows", "lhotse", "csv", "tsv", "parquet", "arrow")
#: Usual names of the column or key that contains the text.
TEXT_COLUMNS = ("text", "sentence", "transcription", "transcript")
_BINARY: tuple[InputFormat, ...] = ("parquet", "arrow")
#: Formats that the first bytes identify with certainty.
_CERTAIN: tuple[InputFormat, ...] = ("dialogues", "messages", "openai-batch", "rows", "lhotse", *_BINARY)
_BY_EXTENSION: dict[str, InputFormat] = {".txt": "text", ".csv": "csv", ".tsv": "tsv"}
_EXAMINED_LINES = 64
#: The command that converts a file whose lines end with CR alone, as old Macintosh programs write them.
CONVERT_RETURNS = r"`tr '\r' '\n' < OLD > NEW`"
_UTF_16_AND_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")


def format_of(source: Source, asked: AskedFormat) -> InputFormat:
    """The format of an input: the requested one, or for `auto` the recognized one. JSON is recognized by the
    first lines, Parquet by the first bytes, and other formats by the extension of the name.

    Raises `input.wrong_format`, with the likely format, if the format is not recognized, and for an input
    that is clearly not in the requested format.
    """
    if asked in ("dialogues", "openai-batch"):
        return asked
    head, uri = source.head(), source.uri
    looks = _looks_like(head)
    if not {looks, asked} & {*_BINARY}:
        _check_lines(uri, head)
    if asked != "auto":
        other = looks in _CERTAIN and (asked not in _CERTAIN or looks in _BINARY)
        if looks is not None and looks != asked and (other or asked in _BINARY):
            message = f"is not {FORMAT_NAMES[asked]}; it looks like {FORMAT_NAMES[looks]}"
            raise wrong_format(uri, message, f"Use --input-format {looks}, or leave it out.")
        return asked
    named = _BY_EXTENSION.get(_extension(uri))
    if looks in _CERTAIN:
        return looks
    if head.startswith(_UTF_16_AND_32) or (named is None and b"\0" in head):
        advice = "Convert it, for example with `iconv -f UTF-16 -t UTF-8`, or use a format that docs/submit.md lists."
        raise wrong_format(uri, "is binary, or UTF-16 or UTF-32", advice)
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
