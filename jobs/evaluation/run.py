"""Asks a server every dialogue of a source that has no good answer yet, many at once and in bounded memory."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from jobs.dialogue import Dialogue, clean, parse_dialogue
from jobs.evaluation.answers import AnswerFile, Record
from jobs.evaluation.client import Answer, ChatClient
from jobs.evaluation.question import Manner, Question, question
from jobs.line_check import duplicate
from jobs.references import ReferenceReader
from jobs.source import MAX_LINE_BYTES, Source
from pipelines.errors import ErrorCode, InputError

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

    def add(self, record: Record) -> None:
        setattr(self, record.outcome, getattr(self, record.outcome) + 1)
        if record.code:
            self.codes[record.code] += 1
        if record.seconds is not None and record.outcome != "failed":
            self.seconds.append(record.seconds)


class Evaluation:
    """One run. `tally` may be read while it goes on."""

    def __init__(self, client: ChatClient, manner: Manner, reader: ReferenceReader, answers: AnswerFile) -> None:
        self._client = client
        self._manner = manner
        self._reader = reader
        self._answers = answers
        self._seen: set[str] = set()
        self.tally = Tally()

    async def run(self, source: Source, connections: int, told: Callable[[Tally], None]) -> Tally:
        """Asks until the source is at its end; `told` hears of every record. Raises `server.unreachable`."""
        pending: set[asyncio.Task[Record]] = set()
        try:
            for line, raw in _lines(source):
                if len(pending) >= connections:
                    pending = await self._take(pending, told)
                if (work := self._begun(line, raw)) is not None:
                    pending.add(asyncio.create_task(work))
            while pending:
                pending = await self._take(pending, told)
        finally:
            # On the way out of an error or of Ctrl-C nobody waits for the answers that are under way.
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return self.tally

    async def _take(self, pending: set[asyncio.Task[Record]], told: Callable[[Tally], None]) -> set[asyncio.Task[Record]]:
        done, left = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            record = task.result()
            self._answers.add(record)
            self.tally.add(record)
            told(self.tally)
        return left

    def _begun(self, line: int, raw: bytes | None) -> Coroutine[Any, Any, Record] | None:
        """What is to be done for a line; None where it has a good answer."""
        example_id = ""
        try:
            if raw is None:
                message = f"The line is longer than {MAX_LINE_BYTES >> 20} MiB."
                raise InputError(ErrorCode.INPUT_TOO_LONG, message, "Split its text into several lines.")
            dialogue = parse_dialogue(raw)
            example_id = dialogue.example_id
            if example_id in self._seen:
                raise duplicate(example_id)
        except InputError as error:
            return _refused(line, example_id, error)
        self._seen.add(example_id)
        if (outcome := self._answers.done.get(example_id)) is not None:
            setattr(self.tally, outcome, getattr(self.tally, outcome) + 1)
            self.tally.skipped += 1
            return None
        return self._asked(line, dialogue)

    async def _asked(self, line: int, dialogue: Dialogue) -> Record:
        try:
            asked = await asyncio.to_thread(question, dialogue, self._manner, self._reader)
        except InputError as error:
            return _failed(line, dialogue.example_id, error)
        begin = time.monotonic()
        answer = await self._client.ask(asked.body)
        return await asyncio.to_thread(self._record, line, dialogue.example_id, asked, answer, time.monotonic() - begin)

    def _record(self, line: int, example_id: str, asked: Question, answer: Answer, seconds: float) -> Record:
        facts: dict[str, Any] = {"example_id": example_id, "line": line, "seed": asked.seed, "attempts": answer.attempts}
        facts |= {"seconds": round(seconds, 3), "reference": asked.reference}
        if answer.completion is None:
            return Record(outcome="failed", code=answer.code, message=clean(answer.message), **facts)
        choice = answer.completion["choices"][0]
        text = choice["message"].get("content") or ""
        facts |= {"text": text, "finish_reason": choice.get("finish_reason"), "usage": answer.completion.get("usage")}
        facts["equal"] = None if asked.reference is None else _plain(text) == _plain(asked.reference)
        audio = choice["message"].get("audio")
        if "vllm_xargs" not in asked.body:
            return Record(outcome="ok", **facts)
        if not audio:
            code = ErrorCode.SYNTH_NO_AUDIO.value
            return Record(outcome="no_audio", code=code, message="The model ended after its text.", **facts)
        try:
            data = base64.b64decode(audio["data"], validate=True)
        except (binascii.Error, ValueError, KeyError, TypeError):
            return Record(outcome="failed", code=ErrorCode.SYNTH_ENGINE.value, message="The audio of the answer is no base64.", **facts)
        return Record(outcome="ok", audio=self._answers.put_audio(line, example_id, data), **facts)


def _lines(source: Source) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers from 1."""
    for batch in source.batches(_BATCH_LINES, _BATCH_BYTES):
        for number, raw in enumerate(batch.lines, batch.first):
            if raw is None or raw.strip():
                yield number, raw


async def _refused(line: int, example_id: str, error: InputError) -> Record:
    return _failed(line, example_id, error)


def _failed(line: int, example_id: str, error: InputError) -> Record:
    return Record(example_id=example_id, line=line, outcome="failed", code=error.code.value, message=clean(str(error)))


def _plain(text: str) -> str:
    """A text without the model's thoughts, in one case and with single spaces."""
    return " ".join(_THINKING.sub(" ", text).casefold().split())
