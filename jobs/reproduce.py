"""Does a job give the same audio again? A sample of its items is synthesized with their seeds and compared with the store."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from jobs.ledger.records import Artifact, ItemRow, ItemState, Job
from jobs.references import load_reference
from jobs.shard_file import ShardLine, read_shard
from jobs.store.base import ObjectStore
from pipelines.audio import decode, encode
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Message, Pipeline, Speech, SynthesisRequest
from pipelines.vad import trim_silence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jobs.ledger import Ledger
    from pipelines.audio import AudioFormat

#: Above this signal-to-noise ratio two recordings are the same but for rounding.
CLOSE_DB = 40.0
_TIMEOUT_SECONDS = 600.0


class Match(StrEnum):
    """How the new audio of an item compares."""

    #: The same file, byte for byte.
    SAME = "same"
    #: As long, and no further off than `CLOSE_DB`.
    CLOSE = "close"
    DIFFERENT = "different"
    #: It could not be synthesized again.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReproducedItem:
    """One item of the sample."""

    index: int
    example_id: str
    match: Match
    #: Signal-to-noise ratio of the new samples against the stored ones; infinite for equal ones, None for another length.
    snr_db: float | None = None
    #: Why it failed.
    reason: str = ""


def sample_items(ledger: Ledger, job_id: str, count: int) -> list[ItemRow]:
    """Up to `count` items with audio, the same ones each time, in index order."""
    rows = (row for row in ledger.items(job_id, state=ItemState.DONE) if row.artifact is not None)
    chosen = heapq.nsmallest(count, rows, key=lambda row: hashlib.blake2b(row.example_id.encode(), digest_size=8).digest())
    return sorted(chosen, key=lambda row: row.index)


def reproduce(ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, count: int) -> Iterator[ReproducedItem]:
    """Synthesizes `count` items of a job again and compares them. An item whose line or audio cannot be read has failed."""
    inputs = ledger.shard_inputs(job.id)
    rows = sample_items(ledger, job.id, count)
    lines: dict[int, ShardLine] = {}
    unread: dict[int, StoreError] = {}
    indexes = {row.index for row in rows}
    for shard_no in {row.shard_no for row in rows}:
        try:
            lines |= {line.index: line for line in read_shard(store, *inputs[shard_no]) if line.index in indexes}
        except StoreError as error:
            unread[shard_no] = error
    for row in rows:
        # Rows without audio are not in a sample.
        artifact = cast(Artifact, row.artifact)
        try:
            if row.shard_no in unread:
                raise unread[row.shard_no]
            speech = made_again(pipeline.submit(request_of(store, job, lines[row.index], artifact.seed)), job)
            data = encode(speech.samples, speech.sample_rate, cast("AudioFormat", job.spec.format))
            reproduced = _compared(row, artifact, store, data, speech)
        except NightjarError as error:
            reproduced = ReproducedItem(row.index, row.example_id, Match.FAILED, reason=str(error))
        yield reproduced


def request_of(store: ObjectStore, job: Job, line: ShardLine, seed: int, purpose: str = "verify") -> SynthesisRequest:
    """The request that the worker made of this line for the draw with this seed, which is its artifact's; `purpose` keeps
    requests of one line apart. Raises `InputError` for
    reference audio that is gone, and `StoreError`."""

    def loaded(message: Message) -> Message:
        if message.role != "user" or message.modality != "audio" or not isinstance(message.content, str):
            return message
        return msgspec.structs.replace(message, content=load_reference(store, job.id, message.content))

    generation = line.generation_over(job.spec.generation)
    return SynthesisRequest(f"{purpose}/{job.id}/{line.index}", tuple([loaded(message) for message in line.messages]), generation, seed)


def made_again(future: Future[Speech], job: Job) -> Speech:
    """The speech of a request as the worker stored it: without the silence that the job's checks cut off. Raises `NightjarError`."""
    try:
        speech = future.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise SynthesisError(ErrorCode.SYNTH_TIMEOUT, f"It took longer than {_TIMEOUT_SECONDS:.0f} s.") from None
    quality = job.spec.quality
    if quality is None or not quality.trim:
        return speech
    return dataclasses.replace(speech, samples=trim_silence(speech.samples, speech.sample_rate, quality.trim_keep_ms))


def _compared(row: ItemRow, artifact: Artifact, store: ObjectStore, data: bytes, speech: Speech) -> ReproducedItem:
    if hashlib.sha256(data).hexdigest() == artifact.sha256:
        return ReproducedItem(row.index, row.example_id, Match.SAME, math.inf)
    before, rate = decode(store.get(artifact.key))
    after, _ = decode(data)
    if rate != speech.sample_rate or len(before) != len(after):
        return ReproducedItem(row.index, row.example_id, Match.DIFFERENT)
    ratio = snr_db(before, after)
    return ReproducedItem(row.index, row.example_id, Match.CLOSE if ratio >= CLOSE_DB else Match.DIFFERENT, ratio)


def snr_db(signal: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """10 log10 of the power of `signal` over that of its difference to `other`; both [samples], as long as each other."""
    noise = float(np.sum(np.square(signal.astype(np.float64) - other)))
    power = float(np.sum(np.square(signal.astype(np.float64))))
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(power / noise) if power else -math.inf
