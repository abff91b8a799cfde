"""What Python has instead of a file (dialogues, sentences, rows, a dataset, supervisions), written down as
a file of dialogues."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from jobs.dialogue import chat_dialogue, chosen_id, clean
from jobs.input_records import Columns, row_dialogue
from jobs.ledger.records import Reading
from jobs.own_files import own_path
from jobs.store import is_remote
from pipelines.errors import ErrorCode, InputError, StoreError

#: Folder of a home's state for inputs that were no file.
INPUTS = "inputs"
_encode = msgspec.json.Encoder().encode
#: The name of an input that is no file.
_NAMED = ""


def written_input(records: Iterable[Any], chosen: Reading, state_folder: Path) -> Path:
    """The file of these records, named by its content, so that the same records are the same job.

    A record is a text, a dialogue or chat (a mapping with `messages`), a row (a mapping with a `text`, or
    the columns that `chosen` names), or an object with `id` and `text`, such as a supervision of Lhotse,
    or a cut with supervisions. Relative paths of audio start in the working directory. Raises `InputError`
    for a record that is none of these, with its number, and for what is no collection of records, and
    `StoreError` (`store.forbidden`) for a folder that cannot be written.
    """
    _check_collection(records)
    folder = own_path(state_folder / INPUTS / "input", depth=3).parent
    digest = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
    except OSError as error:
        message = f"The folder {folder} cannot be written: {error.strerror}."
        raise StoreError(
            ErrorCode.STORE_FORBIDDEN, message, "Give a folder that you may write as `out`."
        ) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            for line in islice(_lines(records, chosen), chosen.limit):
                file.write(line)
                digest.update(line)
        path = folder / f"{digest.hexdigest()[:32]}.jsonl"
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def _check_collection(records: Any) -> None:
    """Raises `InputError` for what gives the names of its parts where records are meant, and for what
    gives nothing."""
    kind = type(records).__name__
    if isinstance(records, Mapping):
        advice = "Give one of its values, such as a split of a dataset, or put a single record into a list."
        raise InputError(
            ErrorCode.INPUT_WRONG_FORMAT, f"A {kind} is a mapping, not a list of records.", advice
        )
    if hasattr(records, "iterrows"):
        raise InputError(
            ErrorCode.INPUT_WRONG_FORMAT,
            f"A {kind} gives its columns, and no records.",
            'Give its rows: to_dict("records").',
        )
    if not isinstance(records, Iterable):
        raise InputError(
            ErrorCode.INPUT_WRONG_FORMAT,
            f"A value of type {kind} is not a list of records.",
            "Give a path, or a list of texts or mappings.",
        )


def _lines(records: Iterable[Any], chosen: Reading) -> Iterator[bytes]:
    converter = _Converter(chosen)
    for number, record in enumerate(_rows(records, chosen), 1):
        try:
            yield converter.dialogue(record, number) + b"\n"
        except InputError as error:
            raise InputError(error.code, f"Record {number}: {error.message}", error.advice) from None
        except (TypeError, ValueError) as error:
            message = f"Record {number} cannot be written as JSON: {clean(str(error), 200)}."
            raise InputError(ErrorCode.INPUT_BAD_LINE, message, "Give texts, numbers and lists.") from None


def _rows(records: Iterable[Any], chosen: Reading) -> Iterator[Any]:
    """The records; of a dataset of Hugging Face without the columns that are not needed, whose audio would
    be decoded."""
    if hasattr(records, "column_names") and hasattr(records, "select_columns"):
        names: Sequence[str] = records.column_names  # pyright: ignore[reportAttributeAccessIssue]
        if "messages" not in names:
            records = records.select_columns(Columns(list(names), chosen, _NAMED).read)  # pyright: ignore[reportAttributeAccessIssue]
    for record in records:
        supervisions = getattr(record, "supervisions", None)
        if supervisions is None:
            yield record
        else:
            yield from supervisions


class _Converter:
    """Makes dialogues of records; the columns of rows are looked up once for rows of one shape."""

    def __init__(self, chosen: Reading) -> None:
        self._chosen = chosen
        self._names: list[str] = []
        self._columns: Columns | None = None

    def dialogue(self, record: Any, number: int) -> bytes:
        """The dialogue of a record as JSON. Raises `InputError`."""
        if isinstance(record, str):
            return row_dialogue({"text": str(record)}, number, self._chosen.voices)
        if isinstance(record, Mapping):
            return self._of_mapping(record, number)
        text = getattr(record, "text", None)
        if not isinstance(text, str):
            message = (
                f"A value of type {type(record).__name__} is not a text, a dialogue, a row or a supervision."
            )
            raise InputError(
                ErrorCode.INPUT_BAD_LINE, message, "Give texts, or mappings with `text` or `messages`."
            )
        values = {
            "text": text,
            "id": str(getattr(record, "id", "") or ""),
            "speaker": str(getattr(record, "speaker", "") or ""),
        }
        return row_dialogue(values, number, self._chosen.voices)

    def _of_mapping(self, record: Mapping[str, Any], number: int) -> bytes:
        messages = record.get("messages")
        if messages is None:
            return self._of_row(record, number)
        if not isinstance(messages, list | tuple) or any(
            isinstance(message, str) or not isinstance(message, Collection) for message in messages
        ):
            advice = "Write them as [role, modality, content], or as mappings with `role` and `content`."
            raise InputError(ErrorCode.INPUT_BAD_LINE, "`messages` is not a list of messages.", advice)
        if messages and isinstance(messages[0], Mapping):
            return _absolute(msgspec.json.decode(chat_dialogue(_encode(record), number)))
        named = chosen_id(record.get("example_id"), record.get("id"))
        return _absolute(
            {"example_id": f"line-{number}", **record, **({} if named is None else {"example_id": named})}
        )

    def _of_row(self, record: Mapping[str, Any], number: int) -> bytes:
        names = list(record)
        if self._columns is None or names != self._names:
            self._names, self._columns = names, Columns(names, self._chosen, _NAMED)
        found = self._columns.dialogue(record, number)
        if isinstance(found, bytes):
            return _absolute(msgspec.json.decode(found)) if "reference_audio" in self._columns.of else found
        raise found or InputError(ErrorCode.INPUT_TOO_LONG, "The record is too long.", "Split it.")


def _absolute(dialogue: Mapping[str, Any]) -> bytes:
    """The dialogue as JSON, with paths of audio that lead on from the working directory. Raises
    `InputError`."""
    messages = [list(message) for message in dialogue["messages"]]
    for message in messages:
        if (
            len(message) == 3
            and message[1] == "audio"
            and isinstance(message[2], str)
            and not is_remote(message[2])
        ):
            message[2] = os.path.abspath(message[2])
    try:
        return _encode({**dialogue, "messages": messages})
    except (TypeError, ValueError) as error:
        raise InputError(
            ErrorCode.INPUT_BAD_LINE,
            f"It cannot be written as JSON: {error}.",
            "Give texts, numbers and lists.",
        ) from None
