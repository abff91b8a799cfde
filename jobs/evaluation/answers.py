"""The file of answers: one JSON object a line, of which no line is ever half, and which a later run continues."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from pipelines.errors import ConfigError, ErrorCode

SCHEMA, RECORD_SCHEMA = "nightjar.evaluation/1", "nightjar.answer/1"

Outcome = Literal["ok", "no_audio", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one dialogue ended."""

    schema: str = RECORD_SCHEMA
    example_id: str
    #: Its line in the input, from 1.
    line: int
    outcome: Outcome
    text: str | None = None
    #: The WAV, as a path from the folder of this file.
    audio: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    seed: int | None = None
    #: From the first request to the answer, with every wait between.
    seconds: float | None = None
    attempts: int | None = None
    #: What the dialogue expects, and whether the text after any `<think>` part is that, up to case and white space.
    reference: str | None = None
    equal: bool | None = None
    code: str | None = None
    message: str | None = None


class _Head(msgspec.Struct, kw_only=True):
    schema: str
    manner: dict[str, Any]


_encode = msgspec.json.Encoder().encode


class AnswerFile:
    """Appends records; a context manager that holds the file's lock.

    A run that finds a file goes on with it: good answers stay, failed ones are dropped to be asked again.
    """

    def __init__(self, path: Path, manner: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a file of another kind, of other settings, or that another run writes."""
        self.path = path
        self._manner = dict(manner)
        self.audio_folder = path.with_name(path.name + ".audio")
        #: Ids that have a good answer, with its outcome.
        self.done: dict[str, Outcome] = {}
        self.equal = [0, 0]

    def __enter__(self) -> AnswerFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        try:
            self._file = self._continued()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._unlock()

    def _unlock(self) -> None:
        os.unlink(self._lock.name)
        self._lock.close()

    def add(self, record: Record) -> None:
        """Writes one record, whole or not at all as far as a killed process goes."""
        self._file.write(_encode(record) + b"\n")
        self._file.flush()
        self._count(record)

    def put_audio(self, line: int, example_id: str, data: bytes) -> str:
        """Writes a WAV; its path from the folder of the answers. It is there before the record that names it.

        The name is of the id too: where the input has grown since, another dialogue stands in this line.
        """
        self.audio_folder.mkdir(exist_ok=True)
        path = self.audio_folder / f"{line:08d}-{hashlib.sha256(example_id.encode()).hexdigest()[:16]}.wav"
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(data)
        unfinished.replace(path)
        return f"{self.audio_folder.name}/{path.name}"

    def _count(self, record: Record) -> None:
        if record.outcome != "failed":
            self.done[record.example_id] = record.outcome
        if record.equal is not None:
            self.equal[0] += record.equal
            self.equal[1] += 1

    def _continued(self) -> Any:
        """The file with its header and its good answers, open for more."""
        unfinished = self.path.with_name(self.path.name + ".part")
        with unfinished.open("wb") as kept:
            kept.write(_encode({"schema": SCHEMA, "manner": self._manner}) + b"\n")
            if self.path.exists():
                with self.path.open("rb") as before:
                    self._check_head(before.readline())
                    for raw in before:
                        if (record := self._good(raw)) is not None:
                            self._count(record)
                            kept.write(raw)
        unfinished.replace(self.path)
        return self.path.open("ab")

    def _check_head(self, raw: bytes) -> None:
        try:
            head = msgspec.json.decode(raw, type=_Head)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            head = None
        if head is None or head.schema != SCHEMA:
            raise _invalid(f"{self.path} is no file of answers.", "Give another --to; nothing is written over.")
        mine = msgspec.json.decode(_encode(self._manner))
        if head.manner != mine:
            names = ", ".join(sorted(name for name in {*head.manner, *mine} if head.manner.get(name) != mine.get(name)))
            raise _invalid(f"{self.path} was made with other settings ({names}).", "Give another --to, or the settings it was made with.")

    def _good(self, raw: bytes) -> Record | None:
        """The record of a line worth keeping: whole, good, and with its audio in place."""
        if not raw.endswith(b"\n"):
            return None
        try:
            record = msgspec.json.decode(raw, type=Record)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        if record.outcome == "failed" or (record.audio is not None and not (self.path.parent / record.audio).is_file()):
            return None
        return record


def _locked(path: Path) -> BinaryIO:
    """The lock of an answer file, beside it. Raises `ConfigError` when another run has it."""
    name = path.with_name(path.name + ".lock")
    while True:
        lock = name.open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), name.stat()):
                return lock
        except BlockingIOError:
            lock.close()
            raise _invalid(f"Another run writes {path}.", "Wait for it, or give another --to.") from None
        except FileNotFoundError:
            # Its last owner has just taken it away.
            pass
        lock.close()


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)
