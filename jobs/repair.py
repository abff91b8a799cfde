"""Items are made again, from their lines and the seeds that the ledger knows: a sample, to compare; objects
that are lost or damaged; and the inputs of shards, from their file."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from jobs.dialogue import parse_line
from jobs.encoded_audio import encoded_audio
from jobs.export.manifest import put_manifest, put_shard_manifest
from jobs.input_format import InputFormat
from jobs.input_records import Records
from jobs.layout import (
    CONTENT_TYPES,
    job_manifest_key,
    object_metadata,
    shard_of_input,
)
from jobs.ledger.records import INPUT_FORMAT, Artifact, ItemRow, ItemState, Job
from jobs.packs import read_artifact
from jobs.references import ReferenceReader, load_reference, put_reference
from jobs.shard_file import CONTENT_TYPE, ShardLine, ShardLines, compress, encode_lines, read_shard
from jobs.source import open_source
from jobs.store.base import ObjectStore
from jobs.turns import turns_and_recordings
from jobs.verify import Expected
from jobs.voices import item_request
from pipelines.audio import decode, trim_silence
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, InputError, NightjarError, StoreError, SynthesisError
from pipelines.registry import describe
from pipelines.request import Pipeline, Speech, submit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jobs.ledger import Ledger
    from jobs.settings import Settings


#: Items that are in the engine at once.
_AT_ONCE = 64
#: Above this signal-to-noise ratio two recordings are the same but for rounding; by whether the format is
#: lossy. In a lossy format the least difference of what is encoded makes another file: speech and the same
#: with noise 60 dB below it are 19 to 33 dB apart when they are read back. 0 dB is a difference as loud as
#: the speech.
CLOSE_DB = {False: 40.0, True: 10.0}
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
    #: Signal-to-noise ratio of the new samples against the stored ones; infinite for equal ones, None for
    #: another length.
    snr_db: float | None = None
    #: Why it failed.
    reason: str = ""


def sample_items(ledger: Ledger, job_id: str, count: int) -> list[ItemRow]:
    """Up to `count` items with audio, the same ones each time, in index order."""
    rows = (row for row in ledger.items(job_id, state=ItemState.DONE) if row.artifact is not None)
    chosen = heapq.nsmallest(
        count, rows, key=lambda row: hashlib.blake2b(row.example_id.encode(), digest_size=8).digest()
    )
    return sorted(chosen, key=lambda row: row.index)


def reproduce(
    ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, count: int
) -> Iterator[ReproducedItem]:
    """Synthesizes `count` items of a job again and compares them. An item whose line or audio cannot be
    read has failed."""
    again = _Again(ledger, store, job, pipeline)
    for row in sample_items(ledger, job.id, count):
        # Rows without audio are not in a sample.
        artifact = cast(Artifact, row.artifact)
        try:
            speech = again.speech(again.begun(row, artifact))
            yield _compared(row, artifact, store, encoded_audio(speech, job.spec).data)
        except NightjarError as error:
            yield ReproducedItem(row.index, row.example_id, Match.FAILED, reason=str(error))


@dataclass(frozen=True)
class _Again:
    """Makes items of one job again."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    pipeline: Pipeline

    @cached_property
    def lines(self) -> ShardLines[ShardLine]:
        return ShardLines(self.ledger, self.store, self.job.id, read_shard)

    def begun(self, row: ItemRow, artifact: Artifact) -> Future[Speech]:
        """The speech of an artifact in the making, from the request that the worker made of its line for its
        draw. Raises `InputError` for reference audio that is gone, and `StoreError`."""
        line, job = self.lines.of(row), self.job
        request_id = f"verify/{artifact.kind}/{job.id}/{line.index}"
        generation = line.generation_over(job.spec.generation)

        def load(key: str) -> bytes:
            return load_reference(self.store, job.id, key)

        return submit(self.pipeline, item_request(line, generation, job, request_id, artifact.seed, load))

    def speech(self, making: Future[Speech]) -> Speech:
        """The speech of a request as the worker stored it: without the silence that the job's checks cut
        off. Raises `NightjarError`."""
        try:
            speech = making.result(_TIMEOUT_SECONDS)
        except TimeoutError:
            message = f"It took longer than {_TIMEOUT_SECONDS:.0f} s."
            raise SynthesisError(ErrorCode.SYNTH_TIMEOUT, message) from None
        quality = self.job.spec.quality
        if quality is None or not quality.trim:
            return speech
        samples = trim_silence(speech.samples, speech.sample_rate, quality.trim_keep_ms)
        return dataclasses.replace(speech, samples=samples)

    def mended(self, row: ItemRow, artifact: Artifact, making: Future[Speech] | NightjarError) -> Repaired:
        """Puts what was made in the place of an artifact. It is written before the ledger is told, and told
        only where its bytes are others, so that a repair that was stopped is done again by the next one.
        What was in a pack becomes an object of its own: a pack is written once."""
        try:
            if isinstance(making, NightjarError):
                raise making
            data, facts = self._made(self.speech(making), artifact.kind)
        except NightjarError as error:
            return Repaired(artifact.key, row.example_id, Mended.FAILED, str(error))
        try:
            self.store.delete(artifact.key)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_BAD_KEY:
                raise
            # A folder is in its place; a symbolic link is removed.
            return Repaired(artifact.key, row.example_id, Mended.FAILED, str(error))
        kind = CONTENT_TYPES[artifact.key.rpartition(".")[2]]
        metadata = object_metadata(self.job.spec_sha, artifact.seed)
        self.store.put(artifact.key, data, content_type=kind, metadata=metadata)
        self.store.sync()
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == artifact.sha256:
            if artifact.pack is None:
                return Repaired(artifact.key, row.example_id, Mended.SAME)
            facts = {}
        made = msgspec.structs.replace(
            artifact, sha256=sha256, bytes=len(data), pack=None, pack_offset=None, **facts
        )
        if not self.ledger.replace_artifact(self.job.id, made, artifact.sha256):
            message = f"Another process made {artifact.key} meanwhile."
            raise StoreError(ErrorCode.STORE_CONFLICT, message, "Verify the job again.")
        outcome = Mended.SAME if sha256 == artifact.sha256 else Mended.OTHER
        return Repaired(artifact.key, row.example_id, outcome, relisted=True)

    def _made(self, speech: Speech, kind: str) -> tuple[bytes, dict[str, object]]:
        """The bytes of an artifact, and what the ledger says of them. Raises `SynthesisError`."""
        if kind == "text":
            if speech.text_out is None:
                raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The model wrote no text this time.")
            return speech.text_out.encode(), {}
        if not len(speech.samples) or not np.isfinite(speech.samples).all():
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model made no audio this time.")
        audio = encoded_audio(speech, self.job.spec)
        facts = {name: getattr(audio, name) for name in ("duration_ms", "sample_rate", "samples")}
        return audio.data, {**facts, "meta": dict(speech.meta)}

    def renew_manifest(self, shard_no: int) -> None:
        made = self.ledger.shard_audio(self.job.id, shard_no)
        lines = read_shard(self.store, *self.lines.inputs[shard_no])
        key, sha256 = put_shard_manifest(self.store, self.job, shard_no, made, lines)
        self.ledger.set_shard_manifest(self.job.id, shard_no, key, sha256)


def _compared(row: ItemRow, artifact: Artifact, store: ObjectStore, data: bytes) -> ReproducedItem:
    if hashlib.sha256(data).hexdigest() == artifact.sha256:
        return ReproducedItem(row.index, row.example_id, Match.SAME, math.inf)
    before, rate = decode(read_artifact(store, artifact))
    after, rate_after = decode(data)
    if (rate, len(before)) != (rate_after, len(after)):
        return ReproducedItem(row.index, row.example_id, Match.DIFFERENT)
    ratio = snr_db(before, after)
    lossy = artifact.key.rpartition(".")[2] in LOSSY
    match = Match.CLOSE if ratio >= CLOSE_DB[lossy] else Match.DIFFERENT
    return ReproducedItem(row.index, row.example_id, match, ratio)


def snr_db(signal: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """10 log10 of the power of `signal` over that of its difference to `other`; both [samples], as long as
    each other."""
    noise = float(np.sum(np.square(signal.astype(np.float64) - other)))
    power = float(np.sum(np.square(signal.astype(np.float64))))
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(power / noise) if power else -math.inf


class Mended(StrEnum):
    """What became of an object that was lost or damaged."""

    #: The same bytes as before.
    SAME = "same"
    #: Other bytes of the same seed; the ledger knows their hash now.
    OTHER = "other"
    #: It could not be made again.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Repaired:
    """One object that was to be made again."""

    key: str
    example_id: str
    outcome: Mended
    #: Why it failed.
    reason: str = ""
    #: Whether the ledger and the manifests say something else of it now.
    relisted: bool = False


_NO_ITEM = "It does not belong to an item: the same `nightjar run INPUT` writes it again, or submit the input under another --idempotency-key."


def mend(
    ledger: Ledger,
    store: ObjectStore,
    job: Job,
    pipeline: Pipeline,
    lost: Iterable[Expected],
    on_repaired: Callable[[Repaired], None] = lambda _: None,
) -> Counter[str]:
    """Makes lost objects of a job again, and manifests where they say something else of them now; inputs
    cannot be made of anything else. Counts by `Mended`. Raises `StoreError` when the store fails."""
    again = _Again(ledger, store, job, pipeline)
    counts: Counter[str] = Counter()
    relisted = inputs_lost = False
    renewed: int | None = None
    left = iter(lost)
    try:
        while some := list(islice(left, _AT_ONCE)):
            begun = [_begun(again, expected) for expected in some]
            for expected, making in zip(some, begun):
                if making is None:
                    repaired = Repaired(expected.key, expected.example_id or "", Mended.FAILED, _NO_ITEM)
                else:
                    row, artifact, _ = making
                    repaired = again.mended(*making)
                    if repaired.relisted and artifact.kind == "audio":
                        # A repair that is stopped leaves no ended shard with the manifest of before.
                        if renewed not in (None, row.shard_no):
                            again.renew_manifest(renewed)
                        renewed = row.shard_no
                counts[repaired.outcome.value] += 1
                relisted |= repaired.relisted
                # Nothing makes an input again here, and the manifest says its texts.
                inputs_lost |= shard_of_input(repaired.key, job.id) is not None
                on_repaired(repaired)
    finally:
        if renewed is not None:
            again.renew_manifest(renewed)
    if job.state.final and not inputs_lost:
        lacking = store.head(job_manifest_key(job.id)) is None and ledger.status(job.id).items.done > 0
        if relisted or lacking:
            put_manifest(ledger, store, job.id)
    return counts


def _begun(
    again: _Again, expected: Expected
) -> tuple[ItemRow, Artifact, Future[Speech] | NightjarError] | None:
    """The item of an object, its artifact, and its speech in the making; None: it does not belong to an
    item."""
    ledger, job_id, index = again.ledger, again.job.id, expected.index
    found = {} if index is None else ledger.artifacts_of(job_id, expected.kind, [index])
    if index is None or (artifact := found.get(index)) is None:
        return None
    row = next(ledger.items(job_id, after=index - 1, limit=1))
    try:
        return row, artifact, again.begun(row, artifact)
    except NightjarError as error:
        return row, artifact, error


def restore_inputs(
    settings: Settings, ledger: Ledger, store: ObjectStore, job: Job, source: str, lost: Collection[str]
) -> None:
    """Writes the inputs under the keys `lost` again, with the reference audio of their lines.

    A line that the ledger has is not judged again: what is refused today may have been accepted then.
    Raises `store.missing` where the lines do not come out as they were staged, `InputError` where the file
    or its reference audio cannot be read.
    """
    inputs = {no: place for no, place in ledger.shard_inputs(job.id).items() if place[0] in lost}
    lines: dict[int, list[bytes]] = {no: [] for no in inputs}
    # Of lines with one id the first that was not refused became items; all of a dialogue's are in one shard.
    wanted = {row.example_id: row for row in ledger.items(job.id) if row.shard_no in lines and not row.turn}
    refused = {line.line for line in ledger.rejected_lines(job.id)}
    written_as = cast("InputFormat", job.labels.get(INPUT_FORMAT, "dialogues"))
    with open_source(source, settings.s3) as opened:
        reader = ReferenceReader(opened.folder, settings.audio_roots, store)
        key_of = reader.keys(partial(put_reference, store, job.id))
        records = Records(opened, written_as, job.spec, describe(job.spec.model))
        for number, line in enumerate(records.lines(), 1):
            if not isinstance(line, bytes) or number in refused:
                continue
            try:
                dialogue, raw = parse_line(line.strip())
            except InputError:
                continue
            if (row := wanted.pop(dialogue.example_id, None)) is not None:
                turns, heard = turns_and_recordings(dialogue.messages, job.spec.speak)
                references = {place: key_of(dialogue.messages[place][2]) for place in heard}
                lines[row.shard_no] += encode_lines(row.index, number, raw, references, turns)
    for no, (key, sha256) in inputs.items():
        data = compress(lines[no])
        if hashlib.sha256(data).hexdigest() != sha256:
            message = (
                f"The input {key} of job {job.id} is lost and does not come out as it was: the file, its "
                "reference audio or the programs that write it are others by now."
            )
            advice = "Submit the file again under an --idempotency-key of its own."
            raise StoreError(ErrorCode.STORE_MISSING, message, advice)
        store.delete(key)
        store.put(key, data, content_type=CONTENT_TYPE)
    store.sync()
