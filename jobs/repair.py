"""Synthesizes items again, from their lines and recorded seeds, to compare a sample and to repair lost or
damaged objects."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from jobs.codes import EXTENSION, codec_of
from jobs.dialogue import spoken_text
from jobs.encoded_audio import JoinedSpeech, stored_files
from jobs.export.manifest import put_manifest, put_shard_manifest
from jobs.layout import job_manifest_key, object_metadata, shard_of_input
from jobs.ledger import Ledger
from jobs.ledger.records import QUARANTINE, WORDS, Artifact, ItemRow, ItemState, Job
from jobs.packs import read_artifact
from jobs.references import load_reference
from jobs.shard_file import ShardLines, read_shard, shard_line
from jobs.spoken_text import pronunciations_of
from jobs.store.base import ObjectStore, sha256_of
from jobs.verify import Expected
from jobs.voices import item_request
from pipelines.audio import decode, trim_silence
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Pipeline, Speech, submit
from pipelines.text_units import parts_of, unit_request

#: Number of items in the engine at once.
_AT_ONCE = 64
#: Whether the format is lossy -> minimum signal-to-noise ratio of two recordings that differ only by
#: rounding. A lossy encoder amplifies small differences: noise at -60 dB gives 19 to 33 dB after decoding. At
#: 0 dB the difference is as loud as the speech.
CLOSE_DB = {False: 40.0, True: 10.0}
_TIMEOUT_SECONDS = 600.0


#: The result of comparing an item's new audio with the stored audio: the same file, byte for byte; equal length, and
#: within `CLOSE_DB`; different; or it could not be synthesized again.
Match = Literal["same", "close", "different", "failed"]


@dataclass(frozen=True, slots=True)
class ReproducedItem:
    """One item of the sample."""

    index: int
    example_id: str
    match: Match
    #: Signal-to-noise ratio of the new samples; infinite for equal ones, None if the lengths differ.
    snr_db: float | None = None
    #: Why it failed.
    reason: str = ""


def sample_items(ledger: Ledger, job_id: str, count: int) -> list[ItemRow]:
    """Up to `count` items with audio in index order, chosen by a hash of their ids."""
    rows = (row for row in ledger.items(job_id, state=ItemState.DONE) if row.artifact is not None)
    chosen = heapq.nsmallest(
        count, rows, key=lambda row: hashlib.blake2b(row.example_id.encode(), digest_size=8).digest()
    )
    return sorted(chosen, key=lambda row: row.index)


def reproduce(
    ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, count: int
) -> Iterator[ReproducedItem]:
    """Synthesizes `count` items of a job again and compares them. If the line or audio of an item cannot be read, its
    match is `FAILED`."""
    again = _Resynthesis(ledger, store, job, pipeline)
    for row in sample_items(ledger, job.id, count):
        # All items of a sample have audio.
        artifact = cast(Artifact, row.artifact)
        ratio, reason = None, ""
        try:
            data, _ = again.encoded(again.start(row, artifact), artifact)
            match, ratio = _compared(artifact, store, data)
        except NightjarError as error:
            match = "failed"
            reason = str(error)
        yield ReproducedItem(row.index, row.example_id, match, ratio, reason)


#: The speech of an item, or the joined speech of its parts.
Started = Future[Speech] | JoinedSpeech


@dataclass(frozen=True)
class _Resynthesis:
    """Synthesizes items of one job again."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    pipeline: Pipeline

    @cached_property
    def lines(self) -> ShardLines:
        return ShardLines(self.ledger, self.store, self.job.id)

    def start_of(self, expected: Expected) -> tuple[ItemRow, Artifact, Started | NightjarError] | None:
        """The item of an object, its artifact, and its started synthesis or error; None: the object does not
        belong to an item."""
        if expected.index is None:
            return None
        artifact = self.ledger.artifacts_of(self.job.id, expected.kind, [expected.index]).get(expected.index)
        if artifact is None:
            return None
        row = next(self.ledger.items(self.job.id, after=expected.index - 1, limit=1))
        try:
            return row, artifact, self.start(row, artifact)
        except NightjarError as error:
            return row, artifact, error

    def start(self, row: ItemRow, artifact: Artifact) -> Started:
        """Starts the synthesis of an artifact with the same requests as the worker, and finishes the one of an
        item that is spoken in parts. Raises `InputError` for missing reference audio, and `StoreError`."""
        line = shard_line(self.lines.of(row))
        job = self.job
        request_id = f"verify/{artifact.kind}/{job.id}/{line.index}"
        generation = line.generation_over(job.spec.generation)
        load = partial(load_reference, self.store, job.id)
        request = item_request(
            line, generation, job, request_id, artifact.seed, load, pronunciations_of(job.spec)
        )
        parts = parts_of(spoken_text(line.messages), self.pipeline.capabilities) if line.role else ()
        if not parts:
            return submit(self.pipeline, request)
        meta: dict[str, Any] = {**artifact.meta}
        if (number := meta.get("part")) is not None:
            part = unit_request(request, parts[number].text, number)
            return submit(self.pipeline, dataclasses.replace(part, seed=artifact.seed))
        redrawn = dict(pair.split(":") for pair in meta["redrawn"].split())
        joined = JoinedSpeech([part.pause for part in parts], job.spec)

        def started(number: int) -> Future[Speech]:
            draw = int(redrawn.get(str(number), meta["first_draw"]))
            whole = dataclasses.replace(request, seed=line.seed(job.spec.seed, draw))
            return submit(self.pipeline, unit_request(whole, parts[number].text, number))

        numbers = iter(range(len(parts)))
        while some := list(islice(numbers, _AT_ONCE)):
            for number, one in zip(some, [started(number) for number in some], strict=True):
                joined.add(number, self.speech(one))
        return joined

    def speech(self, started: Future[Speech]) -> Speech:
        """The speech as a worker stores it, trimmed if the job's checks say so. Raises `NightjarError`."""
        try:
            speech = started.result(_TIMEOUT_SECONDS)
        except TimeoutError:
            raise SynthesisError(
                ErrorCode.SYNTH_TIMEOUT, f"It took longer than {_TIMEOUT_SECONDS:.0f} s."
            ) from None
        quality = self.job.spec.quality
        if quality is None or not quality.trim:
            return speech
        return trim_silence(speech, quality.trim_keep_ms)

    def replace(self, row: ItemRow, artifact: Artifact, started: Started | NightjarError) -> Repaired:
        """Replaces an artifact with the new speech. The object is written first. The ledger is updated after
        it, and only if the bytes differ, so the next repair repeats an interrupted one. A member of a pack
        becomes a separate object, because packs are write-once."""
        repaired = partial(Repaired, artifact.key, row.example_id)
        try:
            if isinstance(started, NightjarError):
                raise started
            data, facts = self.encoded(started, artifact)
        except NightjarError as error:
            return repaired("failed", str(error))
        try:
            self.store.delete(artifact.key)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_BAD_KEY:
                raise
            # There is a folder in its place; a symbolic link would have been deleted.
            return repaired("failed", str(error))
        self.store.put(artifact.key, data, metadata=object_metadata(self.job.spec_sha, artifact.seed))
        self.store.sync()
        sha256 = sha256_of(data)
        if sha256 == artifact.sha256:
            if artifact.pack is None:
                return repaired("same")
            facts = {}
        made = msgspec.structs.replace(
            artifact, sha256=sha256, bytes=len(data), pack=None, pack_offset=None, **facts
        )
        if not self.ledger.replace_artifact(self.job.id, made, artifact.sha256):
            raise StoreError(
                ErrorCode.STORE_CONFLICT,
                f"Another process replaced {artifact.key} meanwhile.",
                "Verify the job again.",
            )
        return repaired("same" if sha256 == artifact.sha256 else "other", entry_changed=True)

    def encoded(self, started: Started, artifact: Artifact) -> tuple[bytes, dict[str, object]]:
        """The bytes of an artifact, and its other columns in the ledger. Raises `NightjarError`."""
        if isinstance(started, JoinedSpeech):
            audio, words = started.encoded()
            return (words, {}) if artifact.kind == WORDS else (audio.data.read(), audio.facts)
        spec = self.job.spec
        kind = artifact.kind
        codec = codec_of(spec.model) if spec.output else None
        for made, content, facts in stored_files(self.speech(started), spec, codec):
            if made == (spec.main_kind if kind == QUARANTINE else kind):
                return content, facts
        message = f"The model returned no {kind} this time."
        if kind == WORDS:
            message = "The times of words come from the aligner, which repairs do not use."
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, message)

    def renew_manifest(self, shard_no: int) -> None:
        made = self.ledger.shard_audio(self.job.id, shard_no)
        key, sha256 = put_shard_manifest(
            self.store, self.job, shard_no, made, read_shard(self.store, *self.lines.inputs[shard_no])
        )
        self.ledger.set_shard_manifest(self.job.id, shard_no, key, sha256)


def _compared(artifact: Artifact, store: ObjectStore, data: bytes) -> tuple[Match, float | None]:
    """The result of comparing new data with an artifact, and its `ReproducedItem.snr_db`."""
    if sha256_of(data) == artifact.sha256:
        return "same", math.inf
    if artifact.key.endswith(EXTENSION):
        return "different", None
    before, rate = decode(read_artifact(store, artifact))
    after, rate_after = decode(data)
    if (rate, len(before)) != (rate_after, len(after)):
        return "different", None
    ratio = snr_db(before, after)
    lossy = artifact.key.rpartition(".")[2] in LOSSY
    return "close" if ratio >= CLOSE_DB[lossy] else "different", ratio


def snr_db(signal: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """10 log10 of the power of `signal` over that of its difference to `other`; both [samples] of equal length."""
    noise = float(np.sum(np.square(signal.astype(np.float64) - other)))
    power = float(np.sum(np.square(signal.astype(np.float64))))
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(power / noise) if power else -math.inf


#: The outcome of the repair of an object: the same bytes as before; other bytes from the same seed, whose hash the ledger
#: has now; or it could not be repaired.
RepairOutcome = Literal["same", "other", "failed"]


class Repaired(NamedTuple):
    """A repaired object, or one whose repair failed."""

    key: str
    example_id: str
    outcome: RepairOutcome
    #: Why it failed.
    reason: str = ""
    #: Whether its entry in the ledger changed, so that manifests must be rewritten.
    entry_changed: bool = False


_NO_ITEM = "It does not belong to an item: repeat the same `nightjar run INPUT`, or submit the input with another --idempotency-key."


def repair_objects(
    ledger: Ledger,
    store: ObjectStore,
    job: Job,
    pipeline: Pipeline,
    lost: Iterable[Expected],
    on_repaired: Callable[[Repaired], None] = lambda _: None,
) -> Counter[str]:
    """Repairs lost objects of a job, except inputs, and rewrites manifests if needed. Returns the number of objects by
    `RepairOutcome`. Raises `StoreError` if the store fails."""
    again = _Resynthesis(ledger, store, job, pipeline)
    counts = Counter[str]()
    entries_changed = inputs_lost = False
    renewed: int | None = None
    left = iter(lost)
    try:
        while some := list(islice(left, _AT_ONCE)):
            started = [again.start_of(expected) for expected in some]
            for expected, item in zip(some, started):
                if item is None:
                    repaired = Repaired(expected.key, expected.example_id or "", "failed", _NO_ITEM)
                else:
                    row, artifact, _ = item
                    repaired = again.replace(*item)
                    if repaired.entry_changed and artifact.kind == job.spec.main_kind:
                        # An interrupted repair must not leave a finished shard with an old manifest.
                        if renewed not in (None, row.shard_no):
                            again.renew_manifest(renewed)
                        renewed = row.shard_no
                counts[repaired.outcome] += 1
                entries_changed |= repaired.entry_changed
                # A manifest contains the texts of the inputs, which cannot be repaired here.
                inputs_lost |= shard_of_input(repaired.key, job.id) is not None
                on_repaired(repaired)
    finally:
        if renewed is not None:
            again.renew_manifest(renewed)
    if job.state.final and not inputs_lost:
        is_missing = store.head(job_manifest_key(job.id)) is None and ledger.status(job.id).items.done > 0
        if entries_changed or is_missing:
            put_manifest(ledger, store, job.id)
    return counts
