"""Sends every dialogue of a source that has no good answer yet to a server: many at once, in bounded memory."""

from __future__ import annotations

import asyncio
import base64
import binascii
import fcntl
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from jobs.dialogue import clean, parse_dialogue
from jobs.evaluation.client import Answer, ChatClient, Question, RequestOptions, question
from jobs.line_check import duplicate, overlong
from jobs.references import ReferenceReader
from jobs.source import Source
from pipelines.errors import ConfigError, ErrorCode, InputError

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


class _Head(msgspec.Struct, frozen=True):
    """The first line of a file of answers."""

    schema: str
    #: `RequestOptions.view`
    options: dict[str, Any] = msgspec.field(name="manner")


_encode = msgspec.json.Encoder().encode


class AnswerFile:
    """Appends records to a file; a context manager that holds the file's lock.

    An existing file is continued: good answers stay, failed ones are dropped and asked again.
    """

    def __init__(self, path: Path, options: RequestOptions) -> None:
        """Entering raises `ConfigError` for another kind of file, for other options, and while another run writes the file."""
        self.path = path
        self._head = _encode(_Head(SCHEMA, options.view())) + b"\n"
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
        """Writes one record; a killed process leaves it whole or not at all."""
        self._file.write(_encode(record) + b"\n")
        self._file.flush()
        self._count(record)

    def put_audio(self, line: int, example_id: str, data: bytes) -> str:
        """Writes a WAV file and returns its path relative to the folder of the answers.

        The name holds the id too: when the input has changed since, another dialogue may be in this line.
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
        """The file with its head and its good answers, open for more."""
        unfinished = self.path.with_name(self.path.name + ".part")
        with unfinished.open("wb") as kept:
            kept.write(self._head)
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
            raise _invalid(f"{self.path} is not a file of answers.", "Give another --to; this file stays as it is.")
        own = msgspec.json.decode(self._head, type=_Head).options
        if head.options != own:
            names = ", ".join(sorted(name for name in {*head.options, *own} if head.options.get(name) != own.get(name)))
            raise _invalid(f"{self.path} was written with other settings ({names}).", "Give another --to, or the same settings.")

    def _good(self, raw: bytes) -> Record | None:
        """The record of a line that is kept: complete, good, and with its audio."""
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
            raise _invalid(f"Another run is writing {path}.", "Wait until it ends, or give another --to.") from None
        except FileNotFoundError:
            # Its last owner has just removed it.
            pass
        lock.close()


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)


_BATCH_LINES, _BATCH_BYTES = 256, 1 << 20
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@dataclass(slots=True)
class Tally:
    """How far a run is."""

    ok: int = 0
    no_audio: int = 0
    failed: int = 0
    #: Of them, those that an earlier run had answered.
    skipped: int = 0
    codes: Counter[str] = field(default_factory=Counter[str])
    #: Seconds of each answer of this run.
    seconds: list[float] = field(default_factory=list[float])

    @property
    def total(self) -> int:
        return self.ok + self.no_audio + self.failed

    def skip(self, outcome: Outcome) -> None:
        """Counts an answer of an earlier run."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.skipped += 1

    def add(self, record: Record) -> None:
        """Counts a record of this run."""
        setattr(self, record.outcome, getattr(self, record.outcome) + 1)
        if record.code:
            self.codes[record.code] += 1
        if record.seconds is not None and record.outcome != "failed":
            self.seconds.append(record.seconds)


class Evaluation:
    """One run. `tally` can be read meanwhile."""

    def __init__(self, client: ChatClient, options: RequestOptions, reader: ReferenceReader, answers: AnswerFile) -> None:
        self._client = client
        self._options = options
        self._reader = reader
        self._answers = answers
        self._seen: set[str] = set()
        self.tally = Tally()

    async def run(self, source: Source, connections: int, on_record: Callable[[Tally], None]) -> Tally:
        """Sends requests until the source ends; `on_record` is called after every record. Raises `server.unreachable`."""
        pending: set[asyncio.Task[Record | None]] = set()
        try:
            for line, raw in _lines(source):
                if len(pending) >= connections:
                    pending = await self._take(pending, on_record)
                pending.add(asyncio.create_task(self._answer(line, raw)))
            while pending:
                pending = await self._take(pending, on_record)
        finally:
            # After an error or Ctrl-C nobody waits for the answers that are under way.
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return self.tally

    async def _take(
        self, pending: set[asyncio.Task[Record | None]], on_record: Callable[[Tally], None]
    ) -> set[asyncio.Task[Record | None]]:
        done, left = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if (record := task.result()) is not None:
                self._answers.add(record)
                self.tally.add(record)
                on_record(self.tally)
        return left

    async def _answer(self, line: int, raw: bytes | None) -> Record | None:
        """The record of a line; None where an earlier run got a good answer."""
        example_id = ""
        try:
            if raw is None:
                raise overlong()
            dialogue = parse_dialogue(raw)
            example_id = dialogue.example_id
            # Tasks begin in the order of the lines, so the first line of an id is the one that counts.
            if example_id in self._seen:
                raise duplicate(example_id)
            self._seen.add(example_id)
            if (outcome := self._answers.done.get(example_id)) is not None:
                self.tally.skip(outcome)
                return None
            asked = await asyncio.to_thread(question, dialogue, self._options, self._reader)
        except InputError as error:
            message = clean(str(error))
            return Record(example_id=example_id, line=line, outcome="failed", code=error.code.value, message=message)
        begin = time.monotonic()
        answer = await self._client.ask(asked.body)
        return await asyncio.to_thread(self._record, line, example_id, asked, answer, time.monotonic() - begin)

    def _record(self, line: int, example_id: str, asked: Question, answer: Answer, seconds: float) -> Record:
        common: dict[str, Any] = {"example_id": example_id, "line": line, "seed": asked.seed, "attempts": answer.attempts}
        common |= {"seconds": round(seconds, 3), "reference": asked.reference}
        if answer.completion is None:
            return Record(outcome="failed", code=answer.code, message=clean(answer.message), **common)
        choice = answer.completion["choices"][0]
        text = choice["message"].get("content") or ""
        common |= {"text": text, "finish_reason": choice.get("finish_reason"), "usage": answer.completion.get("usage")}
        common["equal"] = None if asked.reference is None else _plain(text) == _plain(asked.reference)
        audio = choice["message"].get("audio")
        if "vllm_xargs" not in asked.body:
            return Record(outcome="ok", **common)
        if not audio:
            code = ErrorCode.SYNTH_NO_AUDIO.value
            return Record(outcome="no_audio", code=code, message="The model ended after its text.", **common)
        try:
            data = base64.b64decode(audio["data"], validate=True)
        except (binascii.Error, ValueError, KeyError, TypeError):
            return Record(outcome="failed", code=ErrorCode.SYNTH_ENGINE.value, message="The audio is not valid base64.", **common)
        return Record(outcome="ok", audio=self._answers.put_audio(line, example_id, data), **common)


def _lines(source: Source) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 1."""
    for batch in source.batches(_BATCH_LINES, _BATCH_BYTES):
        for number, raw in enumerate(batch.lines, batch.first):
            if raw is None or raw.strip():
                yield number, raw


def _plain(text: str) -> str:
    """A text without the model's thoughts, in one case and with single spaces."""
    return " ".join(_THINKING.sub(" ", text).casefold().split())
