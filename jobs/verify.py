"""Is a job's result still what was made: every object against its hash, and a sample of items made again
from their seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from jobs.encoded_audio import encoded_audio
from jobs.layout import PACK_SHA_CHARACTERS, sha256_of_pack
from jobs.ledger.records import QUARANTINE, Artifact, ItemRow, ItemState, Job
from jobs.packs import ArtifactReader, ahead, read_artifact
from jobs.references import load_reference
from jobs.shard_file import ShardLine, ShardLines, read_shard
from jobs.store.base import ObjectInfo, ObjectStore, sha256_of
from jobs.voices import line_in_stored_voice
from jobs.where import Where
from pipelines.audio import decode
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Message, Pipeline, Speech, SynthesisRequest, submit
from pipelines.vad import trim_silence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jobs.ledger import Ledger


_THREADS = 8
_AHEAD = 64


class Fault(StrEnum):
    """What is wrong with an object."""

    MISSING = "missing"
    #: Its content has another hash.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Expected:
    """An object as the ledger knows it."""

    key: str
    sha256: str
    #: `input`, or the artifact's: `audio`, `text`, `quarantine`.
    kind: str = "input"
    #: Of the item that owns it; None for an input.
    index: int | None = None
    #: None where only the items of the job tell it.
    example_id: str | None = None
    #: None for an input.
    bytes: int | None = None
    #: As in `Artifact`.
    pack: str | None = None
    pack_offset: int | None = None

    @property
    def object_key(self) -> str:
        """The key of the object that holds it."""
        return self.pack or self.key

    @property
    def end(self) -> int:
        """How many bytes the pack that holds it has at least."""
        return (self.pack_offset or 0) + (self.bytes or 0)


KINDS = ("input", "audio", "text", QUARANTINE)


def expected_objects(
    ledger: Ledger,
    job_id: str,
    kinds: Collection[str] = KINDS,
    where: Where | None = None,
    *,
    dialogues: bool = False,
) -> Iterator[Expected]:
    """What the ledger says is in the store, in the order of the keys for each kind; a page in memory at a
    time.

    `where`: audio only of items that match, with `dialogues` also of the others of their dialogues.
    """
    if "input" in kinds:
        for key, sha256 in sorted(set(ledger.shard_inputs(job_id).values())):
            yield Expected(key, sha256)
    if "audio" in kinds:
        for row in ledger.items(job_id, state=ItemState.DONE, where=where, dialogues=dialogues):
            if (audio := row.artifact) is not None:
                yield Expected(
                    audio.key,
                    audio.sha256,
                    "audio",
                    row.index,
                    row.example_id,
                    audio.bytes,
                    audio.pack,
                    audio.pack_offset,
                )
    for kind in ("text", QUARANTINE):
        if kind in kinds:
            for found in ledger.artifact_facts(job_id, kind):
                yield Expected(
                    found.key,
                    found.sha256,
                    kind,
                    found.index,
                    None,
                    found.bytes,
                    found.pack,
                    found.pack_offset,
                )


def listed_faults(store: ObjectStore, objects: Iterable[Expected]) -> Iterator[tuple[Expected, Fault]]:
    """What is missing or has another size, from listings of the store: quick, but damage that keeps the
    size is not found.

    Raises `StoreError` when the store cannot be asked.
    """
    # Few, and one shard's items are in several, so their sizes are kept.
    packs: dict[str, dict[str, int]] = {}
    for (folder, packed), inside in groupby(
        objects, lambda expected: (expected.object_key.rpartition("/")[0], expected.pack is not None)
    ):
        sizes = packs.get(folder) or {info.key: info.bytes for info in store.list(f"{folder}/")}
        if packed:
            packs[folder] = sizes
        for expected in inside:
            size = sizes.get(expected.object_key)
            if size is None:
                yield expected, Fault.MISSING
            elif packed:
                if size < expected.end:
                    yield expected, Fault.CHANGED
            elif size != expected.bytes and (expected.bytes is not None or size == 0):
                yield expected, Fault.CHANGED


class ObjectCheck:
    """Goes once over the input of a job's shards, the audio and texts of its items and what is in
    quarantine, and yields what is wrong, in bounded memory.

    A folder's files are read. A bucket's objects are read with `deep`, else their checksum is asked of the
    server. Of a pack whose checksum is another one every member is read.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        job: Job,
        *,
        deep: bool = False,
        kinds: Collection[str] = KINDS,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._job = job
        self._deep = deep
        self._kinds = kinds
        self._packs = _PackChecks(store)
        self._artifacts = ArtifactReader(store)
        #: Objects looked at so far.
        self.objects = 0

    def __iter__(self) -> Iterator[tuple[Expected, Fault]]:
        """Raises `StoreError` when the store cannot be asked."""
        objects = expected_objects(self._ledger, self._job.id, self._kinds)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
            for expected, fault in ahead(threads, self._look, objects, _AHEAD):
                self.objects += 1
                if fault is not None:
                    yield expected, fault

    def _look(self, expected: Expected) -> Fault | None:
        try:
            found = self._sha256(expected)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                return Fault.MISSING
            if error.code in (ErrorCode.STORE_BAD_KEY, ErrorCode.STORE_CONFLICT):
                # A folder or a symbolic link is in its place, or a pack ends before it.
                return Fault.CHANGED
            raise
        if found is None:
            return Fault.MISSING
        return None if found == expected.sha256 else Fault.CHANGED

    def _sha256(self, expected: Expected) -> str | None:
        """The hash of an object, None where it is missing. Where the server says that a whole pack is as
        it was written, that of its members is the one that is known."""
        if expected.pack:
            whole = self._store.remote and not self._deep and self._packs.whole(expected)
            return expected.sha256 if whole else hashlib.sha256(self._artifacts.read(expected)).hexdigest()
        if not self._deep:
            info = self._store.head(expected.key)
            return None if info is None else info.sha256
        with self._store.open(expected.key) as stream:
            return sha256_of(stream)


class _PackChecks:
    """What the server says of packs; each is asked for once. Safe to use from several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, ObjectInfo | None] = {}
        self._lock = threading.Lock()

    def whole(self, expected: Expected) -> bool:
        """Whether the pack has the hash that its key says, and is as long as the member needs."""
        pack = expected.object_key
        with self._lock:
            if pack not in self._known:
                self._known[pack] = self._store.head(pack)
            info = self._known[pack]
        return (
            info is not None
            and info.sha256[:PACK_SHA_CHARACTERS] == sha256_of_pack(pack)
            and expected.end <= info.bytes
        )


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
    lines = ShardLines(ledger, store, job.id, read_shard)
    for row in sample_items(ledger, job.id, count):
        # Rows without audio are not in a sample.
        artifact = cast(Artifact, row.artifact)
        try:
            speech = made_again(submit(pipeline, request_of(store, job, lines.of(row), artifact.seed)), job)
            yield _compared(
                row, artifact, store, encoded_audio(speech, job.spec).data, CLOSE_DB[job.spec.format in LOSSY]
            )
        except NightjarError as error:
            yield ReproducedItem(row.index, row.example_id, Match.FAILED, reason=str(error))


def request_of(
    store: ObjectStore, job: Job, line: ShardLine, seed: int, purpose: str = "verify"
) -> SynthesisRequest:
    """The request that the worker made of this line for the draw with this seed, which is its artifact's;
    `purpose` keeps requests of one line apart. Raises `InputError` for reference audio that is gone, and
    `StoreError`."""

    def loaded(message: Message) -> Message:
        if message.role != "user" or message.modality != "audio" or not isinstance(message.content, str):
            return message
        return msgspec.structs.replace(message, content=load_reference(store, job.id, message.content))

    messages, generation = line_in_stored_voice(
        line, line.generation_over(job.spec.generation), job.spec, job.id
    )
    return SynthesisRequest(
        f"{purpose}/{job.id}/{line.index}", tuple([loaded(message) for message in messages]), generation, seed
    )


def made_again(future: Future[Speech], job: Job) -> Speech:
    """The speech of a request as the worker stored it: without the silence that the job's checks cut off.
    Raises `NightjarError`."""
    try:
        speech = future.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise SynthesisError(
            ErrorCode.SYNTH_TIMEOUT, f"It took longer than {_TIMEOUT_SECONDS:.0f} s."
        ) from None
    quality = job.spec.quality
    if quality is None or not quality.trim:
        return speech
    return dataclasses.replace(
        speech, samples=trim_silence(speech.samples, speech.sample_rate, quality.trim_keep_ms)
    )


def _compared(
    row: ItemRow, artifact: Artifact, store: ObjectStore, data: bytes, close_db: float
) -> ReproducedItem:
    if hashlib.sha256(data).hexdigest() == artifact.sha256:
        return ReproducedItem(row.index, row.example_id, Match.SAME, math.inf)
    before, rate = decode(read_artifact(store, artifact))
    after, rate_after = decode(data)
    if (rate, len(before)) != (rate_after, len(after)):
        return ReproducedItem(row.index, row.example_id, Match.DIFFERENT)
    ratio = snr_db(before, after)
    return ReproducedItem(
        row.index, row.example_id, Match.CLOSE if ratio >= close_db else Match.DIFFERENT, ratio
    )


def snr_db(signal: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """10 log10 of the power of `signal` over that of its difference to `other`; both [samples], as long as
    each other."""
    noise = float(np.sum(np.square(signal.astype(np.float64) - other)))
    power = float(np.sum(np.square(signal.astype(np.float64))))
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(power / noise) if power else -math.inf
