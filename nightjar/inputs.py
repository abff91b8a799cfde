"""Inputs from Python objects (dialogues, sentences, rows, a dataset, supervisions), written as a file of
dialogues."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from jobs.columns import Columns, json_value, row_converter
from jobs.dialogue import VoiceOf, chat_dialogue, chosen_id, row_dialogue
from jobs.formatting import printable
from jobs.input_records import ROWS, bytes_columns, cells_of, left_out_note, supervision_rows
from jobs.ledger.records import JobSpec, Reading
from jobs.own_files import own_path
from jobs.source import wrong_format
from jobs.store import is_remote
from jobs.voices import voice_of_speaker
from pipelines.errors import ErrorCode, InputError, StoreError, bad_line, missing_library

#: Name of the folder for inputs from Python objects, within the state folder.
INPUTS = "inputs"
_encode = msgspec.json.encode


def written_input(
    records: Iterable[Any], spec: JobSpec, state_folder: Path, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Writes these records into a file and returns its path. The file is named after the hash of its content, so
    that equal records give the same job. `say` is called with a note about columns that are left out.

    A record is a text, a dialogue or chat (a mapping with `messages`), a row (a mapping with `text` or with
    the columns that `spec` names), an object with `id` and `text`, such as a supervision of Lhotse, or a
    cut with supervisions. The rows of a table of pandas, pyarrow or Hugging Face `datasets` are records.
    Relative paths of audio are relative to the working directory. Raises `InputError`
    for any other record, with the record's number in the message, and for an object that is not a
    collection of records; `StoreError` (`store.forbidden`) for a folder that cannot be written.
    """
    _check_collection(records)
    chosen = spec.reading or Reading()
    voice_of = voice_of_speaker(spec)
    folder = state_folder / INPUTS
    for place in (state_folder, folder):
        own_path(place / "input")
    digest = hashlib.sha256()
    left_out = set[str]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
    except OSError as error:
        raise StoreError(
            ErrorCode.STORE_FORBIDDEN,
            f"The folder {folder} cannot be written: {error.strerror}.",
            "Give a writable folder as `out`.",
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            for line in islice(_lines(records, chosen, voice_of, left_out), chosen.limit):
                file.write(line)
                digest.update(line)
        path = folder / f"{digest.hexdigest()[:32]}.jsonl"
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    if note := left_out_note(left_out):
        say(note)
    return path


def _check_collection(records: Any) -> None:
    """Raises `InputError` for an object that is not iterable, and for a mapping, which iterates over names instead
    of records."""
    if isinstance(records, Mapping) or not (
        isinstance(records, Iterable) or hasattr(records, "__arrow_c_stream__")
    ):
        raise InputError(
            ErrorCode.INPUT_WRONG_FORMAT,
            f"A {type(records).__name__} is not a list of records.",
            "Give a path, a table, or a list of texts or mappings. For a DatasetDict, give one of its splits.",
        )


def _lines(records: Iterable[Any], chosen: Reading, voice_of: VoiceOf, left_out: set[str]) -> Iterator[bytes]:
    of_row = row_converter(chosen, voice_of, left_out)
    for number, record in enumerate(_rows(records, chosen, left_out), 1):
        try:
            yield _absolute(_dialogue(record, number, voice_of, of_row)) + b"\n"
        except InputError as error:
            raise InputError(error.code, f"Record {number}: {error.message}", error.advice) from None
        except (TypeError, ValueError) as error:
            raise bad_line(
                f"Record {number} cannot be written as JSON: {printable(str(error), 200)}.",
                "Give texts, numbers and lists.",
            ) from None


def _rows(records: Any, chosen: Reading, left_out: set[str]) -> Iterator[Any]:
    """The records: rows of a table, supervisions of cuts, or what the collection contains."""
    schema, batches = _table(records)
    if schema is not None:
        left_out.update(bytes_columns(schema))
        names = [name for name in schema.names if name not in left_out]
        if "messages" not in names or "text" in {*names, *(chosen.columns or ())}:
            names = Columns(schema.names, chosen, "", None, left_out).names
        for cell in cells_of(batches(names)):
            yield {name: cell(name) for name in names}
        return
    for record in records:
        if hasattr(record, "to_dict") and (
            hasattr(record, "supervisions") or hasattr(record, "recording_id")
        ):
            # The samples of a cut that is in memory are no metadata.
            record = getattr(record, "drop_in_memory_data", lambda record=record: record)()
            yield from supervision_rows(_encode(record.to_dict()))
        else:
            yield record


def _table(records: Any) -> tuple[Any, Callable[[list[str]], Iterator[Any]]]:
    """The Arrow schema of a table of pandas, Hugging Face `datasets`, pyarrow or another library with Arrow's
    interface of streams, and its batches with some columns; None: another collection. Audio is not decoded."""
    if hasattr(records, "iterrows"):
        # The index would be another column.
        records = records.reset_index(drop=True)
    if getattr(records, "features", None) and hasattr(records, "with_format"):
        rows = records.with_format("arrow")
        return records.features.arrow_schema, lambda names: (
            batch for table in rows.select_columns(names).iter(ROWS) for batch in table.to_batches()
        )
    # A column of texts, such as a Series, is a list of them.
    if hasattr(records, "__arrow_c_stream__") and not hasattr(records, "dtype"):
        try:
            import pyarrow

            reader = pyarrow.RecordBatchReader.from_stream(records)
        except ImportError:
            raise missing_library("Reading a table", "pyarrow", "export") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise wrong_format(
                "",
                f"is no table: {printable(str(error), 200)}",
                "Give each column one type, or leave the column out.",
            ) from None
        return reader.schema, lambda names: (batch.select(names) for batch in reader)
    return None, iter


def _dialogue(
    record: Any, number: int, voice_of: VoiceOf, of_row: Callable[[Mapping[str, Any], int], bytes]
) -> bytes:
    """The dialogue of a record as JSON. Raises `InputError`, and TypeError for values that JSON cannot represent."""
    if isinstance(record, str):
        return row_dialogue({"text": str(record)}, number, voice_of)
    if not isinstance(record, Mapping):
        if not isinstance(getattr(record, "text", None), str):
            kind = type(record).__name__
            raise bad_line(
                f"A value of type {kind} is not a text, a dialogue, a row or a supervision.",
                "Give texts, or mappings with `text` or `messages`.",
            )
        found = {key: getattr(record, key, None) for key in ("text", "id", "speaker")}
        record = {key: str(value) for key, value in found.items() if value}
    messages = record.get("messages")
    if messages is None:
        return of_row(record, number)
    if voice_of is not None:
        raise InputError(
            ErrorCode.INPUT_WRONG_FORMAT,
            "A dialogue names no speaker.",
            "Give rows with `text` and `speaker`, or leave `voice_for` and `voices_by` out.",
        )
    if not isinstance(messages, list | tuple) or any(
        isinstance(message, str) or not isinstance(message, Collection) for message in messages
    ):
        raise bad_line(
            "`messages` is not a list of messages.",
            "Write them as [role, modality, content], or as mappings with `role` and `content`.",
        )
    record = json_value(record)
    if messages and isinstance(messages[0], Mapping):
        return chat_dialogue(_encode(record), number)
    named = chosen_id(record.get("example_id"), record.get("id"))
    return _encode({**record, "example_id": f"line-{number}" if named is None else named})


def _absolute(line: bytes) -> bytes:
    """The dialogue with absolute paths of audio."""
    if b'"audio"' not in line:
        return line
    dialogue = msgspec.json.decode(line)
    for message in dialogue["messages"]:
        is_audio = isinstance(message, list) and len(message) == 3 and message[1] == "audio"
        if is_audio and isinstance(message[2], str) and not is_remote(message[2]):
            message[2] = os.path.abspath(message[2])
    return _encode(dialogue)
