"""From speech to stored object: check, encode, put. Runs on a few threads so that no engine ever waits for a disk or a network."""

from __future__ import annotations

import hashlib
import io
import math
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from jobs.artifacts import audio_key, text_key
from jobs.ledger.records import Artifact, Done, Failed, Outcome
from jobs.ledger.states import LASTING_OUTAGES
from jobs.store.base import ObjectStore, PutResult
from pipelines.errors import ErrorCode, NightjarError, StoreError, SynthesisError
from pipelines.request import Speech
from worker.leases import HeldLease, LeaseGoneError, WaitNote

if TYPE_CHECKING:
    from pipelines.audio import AudioFormat

log = structlog.get_logger(__name__)

#: Files need processor time, S3 mostly waits for the network.
FOLDER_THREADS, S3_THREADS = 2, 16

#: -60 dBFS: below this peak a recording of speech holds none.
SILENT_PEAK = 1e-3

#: Of `spec_sha` in an object's metadata: with more, no ext4 inode has room for the metadata and each file takes a block for it.
SPEC_SHA_CHARACTERS = 16

CONTENT_TYPES = {"wav": "audio/wav", "flac": "audio/flac"}


class Destination(Protocol):
    """Where outcomes go."""

    def settle(self, outcome: Outcome) -> None: ...

    def forget(self, index: int) -> None:
        """The item has no outcome here: its lease was gone before it was stored."""
        ...

    def interrupt(self, index: int, error: NightjarError) -> None:
        """The item cannot be stored now, nor can the others of its shard."""
        ...


@dataclass(frozen=True, slots=True)
class SpeechToStore:
    """One made item on its way to the store."""

    held: HeldLease
    store: ObjectStore
    index: int
    example_id: str
    seed: int
    speech: Speech
    engine_ms: int
    destination: Destination


def check_speech(speech: Speech) -> None:
    """Raises `SynthesisError`: `synth.no_audio` for no samples, `synth.nan` for NaN or infinity, `synth.silent` for silence."""
    if len(speech.samples) == 0:
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The engine returned no samples.")
    peak = max(float(speech.samples.max()), -float(speech.samples.min()))
    if not math.isfinite(peak):
        raise SynthesisError(ErrorCode.SYNTH_NAN, "The audio holds values that are not numbers.")
    if peak < SILENT_PEAK:
        raise SynthesisError(ErrorCode.SYNTH_SILENT, f"The audio is silent: its peak is {peak:.2g} of full scale.")


class Storer:
    """A few threads that store speeches. A store that fails for a while is waited for while the item's lease lives."""

    def __init__(self, on_retry: WaitNote = lambda _: None, max_backlog: int = 256) -> None:
        self.max_backlog = max_backlog
        self._on_retry = on_retry
        self._queue: queue.SimpleQueue[SpeechToStore | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def serve(self, store: ObjectStore) -> None:
        """Makes sure that there are threads enough for this store."""
        wanted = S3_THREADS if store.url.startswith("s3://") else FOLDER_THREADS
        with self._lock:
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name=f"storer-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def full(self) -> bool:
        """Whether so many speeches wait that no more should be asked of the engine."""
        return self._queue.qsize() >= self.max_backlog

    def submit(self, item: SpeechToStore) -> None:
        self._queue.put(item)

    def close(self) -> None:
        """Stores what was submitted, then ends the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                item.destination.settle(self._outcome(item))
            except LeaseGoneError:
                item.destination.forget(item.index)
            except NightjarError as error:
                item.destination.interrupt(item.index, error)

    def _outcome(self, item: SpeechToStore) -> Outcome:
        try:
            check_speech(item.speech)
            audio = self._store_audio(item)
            text = item.speech.text_out
            artifacts = (audio,) if text is None else (audio, self._store_text(item, text))
            return Done(item.index, artifacts, item.engine_ms)
        except NightjarError as error:
            if error.code in LASTING_OUTAGES:
                raise
            return Failed(item.index, error.code, error.message)
        except LeaseGoneError:
            raise
        except Exception as error:
            log.exception("storing failed", index=item.index)
            return Failed(item.index, ErrorCode.SYNTH_ENGINE, f"The audio could not be encoded or stored: {error!r}")

    def _store_audio(self, item: SpeechToStore) -> Artifact:
        # Costs half a second at the first item; a worker that waits for work need not pay it.
        from pipelines.audio import encode

        job = item.held.lease.job
        speech = item.speech
        data = encode(speech.samples, speech.sample_rate, cast("AudioFormat", job.spec.format))
        key = audio_key(job.id, item.index, item.example_id, job.spec.format)
        result = self._put(item, key, data, CONTENT_TYPES[job.spec.format])
        samples, sample_rate = len(speech.samples), speech.sample_rate
        if not result.created and result.info.sha256 != hashlib.sha256(data).hexdigest():
            samples, sample_rate = item.held.retrying(lambda: _measure(item.store, key), self._on_retry)
        return Artifact(
            index=item.index,
            kind="audio",
            key=key,
            sha256=result.info.sha256,
            bytes=result.info.bytes,
            duration_ms=round(samples * 1000 / sample_rate),
            sample_rate=sample_rate,
            samples=samples,
            seed=item.seed,
            meta=dict(speech.meta),
        )

    def _store_text(self, item: SpeechToStore, text: str) -> Artifact:
        """What a model wrote beside its speech."""
        key = text_key(item.held.lease.job.id, item.index, item.example_id)
        info = self._put(item, key, text.encode(), "text/plain; charset=utf-8").info
        return Artifact(item.index, "text", key, info.sha256, info.bytes, duration_ms=0, sample_rate=0, samples=0, seed=item.seed)

    def _put(self, item: SpeechToStore, key: str, data: bytes, content_type: str) -> PutResult:
        """Writes once; what an earlier holder of this shard left there is adopted. Raises `store.conflict` for another spec's."""
        spec_sha = item.held.lease.job.spec_sha[:SPEC_SHA_CHARACTERS]
        metadata = {"seed": str(item.seed), "spec_sha": spec_sha}
        result = item.held.retrying(lambda: item.store.put(key, data, content_type=content_type, metadata=metadata), self._on_retry)
        if result.info.metadata.get("spec_sha", spec_sha) != spec_sha:
            raise StoreError(
                ErrorCode.STORE_CONFLICT, f"Another job's object stands under {key}.", "Use another store or prefix for this job."
            )
        return result


def _measure(store: ObjectStore, key: str) -> tuple[int, int]:
    """(samples, sample rate) of an audio object."""
    import soundfile

    info = soundfile.info(io.BytesIO(store.get(key)))
    return int(info.frames), int(info.samplerate)
