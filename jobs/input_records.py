"""The records of an input, whatever its format: each a dialogue as JSON at the number of its line, those that were chosen."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from jobs.chat_messages import chat_dialogue
from jobs.input_format import InputFormat
from jobs.ledger.records import Reading
from jobs.source import BATCH_BYTES, BATCH_LINES, LineBatch, Source, reading
from jobs.tables import Record, csv_records, decoded, one_line, parquet_records, row_dialogue, tsv_records
from pipelines.errors import ErrorCode, InputError

#: Kaldi's file of speakers, in the folder of its `text`.
SPEAKERS = "utt2spk"
ALL = Reading()


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Records of consecutive lines, or rows of Parquet; `first` counts from 1. A line without a record is blank."""

    first: int
    lines: list[Record]


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one input that its job is made of. They can be read more than once, and are the same each time."""

    source: Source
    format: InputFormat
    chosen: Reading
    #: Of the choice of a sample.
    seed: int

    def batches(self, max_lines: int = BATCH_LINES, max_bytes: int = BATCH_BYTES, after_line: int = 0) -> Iterator[LineBatch | RecordBatch]:
        """The records after the first `after_line` lines, as `Source.batches`. Raises `InputError` for an input that cannot be read."""
        if self.format in ("dialogues", "openai-batch") and self.chosen.limit is None and self.chosen.sample is None:
            yield from self.source.batches(max_lines, max_bytes, after_line)
            return
        waiting: list[Record] = []
        size = 0
        for record in islice(self._chosen(), after_line, None):
            waiting.append(record)
            size += len(record) if isinstance(record, bytes) else 0
            if len(waiting) == max_lines or size >= max_bytes:
                yield RecordBatch(after_line + 1, waiting)
                after_line += len(waiting)
                waiting, size = [], 0
        if waiting:
            yield RecordBatch(after_line + 1, waiting)

    def _chosen(self) -> Iterator[Record]:
        """All records, blank where they were not chosen; none after the last chosen one of a limit."""
        limit, sample = self.chosen.limit, self.chosen.sample
        left = total = 0
        if sample is not None:
            total = sum(not _blank(record) for record in self._all())
            left = min(sample, total)
        elif limit is not None:
            total = left = limit
        # Knuth, The Art of Computer Programming, volume 2, 3.4.2, algorithm S: any subset is as likely, in one pass.
        draw = random.Random(f"nightjar.sample:{self.seed}").random
        for record in self._all():
            if (limit is None and sample is None) or _blank(record):
                yield record
                continue
            if not left:
                return
            wanted = left == total or draw() * total < left
            total -= 1
            left -= wanted
            yield record if wanted else b""

    def _all(self) -> Iterator[Record]:
        uri = self.source.uri
        if self.format == "parquet":
            with reading(uri):
                self.source.file.seek(0)
            yield from parquet_records(self.source.file, self.chosen, uri)
            return
        lines = self._lines()
        if self.format == "csv":
            yield from csv_records(lines, self.chosen, uri)
        elif self.format == "tsv":
            yield from tsv_records(lines, self.chosen, uri)
        elif self.format == "kaldi":
            yield from self._of_lines(lines, _KaldiLines(self.source, self.chosen).dialogue)
        elif self.format == "text":
            yield from self._of_lines(lines, self._sentence)
        elif self.format == "messages":
            yield from self._of_lines(lines, chat_dialogue)
        else:
            yield from lines

    def _lines(self) -> Iterator[bytes | None]:
        for batch in self.source.batches(BATCH_LINES, BATCH_BYTES):
            yield from batch.lines

    def _of_lines(self, lines: Iterator[bytes | None], dialogue: Callable[[bytes, int], bytes]) -> Iterator[Record]:
        for number, line in enumerate(lines, 1):
            if line is None or not line or line.isspace():
                yield line
                continue
            try:
                yield dialogue(line, number)
            except InputError as error:
                yield error

    def _sentence(self, line: bytes, number: int) -> bytes:
        return row_dialogue({"text": one_line(line).strip()}, number, self.chosen.voices)


class _KaldiLines:
    """Lines of Kaldi's `text`: an utterance's id and its words; its speaker is in `utt2spk`, which has the same order.

    Source: https://kaldi-asr.org/doc/data_prep.html, where both are sorted by the utterance's id as bytes.
    """

    def __init__(self, source: Source, chosen: Reading) -> None:
        self._voices = chosen.voices
        self._speakers = _speaker_lines(source) if chosen.voices is not None else iter(())
        self._at: tuple[bytes, str] | None = None

    def dialogue(self, line: bytes, number: int) -> bytes:
        utterance, *words = line.split(None, 1)
        values = {"id": decoded(utterance), "text": one_line(words[0]).strip() if words else ""}
        if self._voices is not None:
            values["speaker"] = self._speaker(utterance)
        return row_dialogue(values, number, self._voices)

    def _speaker(self, utterance: bytes) -> str:
        while self._at is None or self._at[0] < utterance:
            self._at = next(self._speakers, None)
            if self._at is None:
                self._at = (b"\xff" * 8, "")
        if self._at[0] == utterance:
            return self._at[1]
        message = f"The utterance has no speaker in {SPEAKERS}."
        raise InputError(ErrorCode.INPUT_BAD_LINE, message, "Add it, and sort both files by the id as bytes, as `LC_ALL=C sort` does.")


def speakers_sha256(source: Source) -> str:
    """Hex SHA-256 of the `utt2spk` beside an input. Raises `input.unreadable`."""
    path = source.folder / SPEAKERS
    with reading(str(path)), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _speaker_lines(source: Source) -> Iterator[tuple[bytes, str]]:
    path = source.folder / SPEAKERS
    with reading(str(path)), path.open("rb") as file:
        for line in iter(lambda: file.readline(1 << 16), b""):
            words = line.split()
            if len(words) == 2:
                yield words[0], words[1].decode(errors="replace")


def _blank(record: Record) -> bool:
    return isinstance(record, bytes) and (not record or record.isspace())
