"""From speech to stored object: check, encode, put. Runs on a few threads so that no engine ever waits for a disk or a network."""

from __future__ import annotations

import hashlib
import io
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from jobs.layout import CONTENT_TYPES, audio_key, object_metadata, quarantine_key, text_key
from jobs.ledger.records import QUARANTINE, Artifact, Done, Failed, Outcome
from jobs.ledger.states import LASTING_OUTAGES
from jobs.quality import Quality
from jobs.store.base import ObjectStore, PutResult
from pipelines.errors import ErrorCode, ModelError, NightjarError, StoreError
from pipelines.request import Speech, SynthesisRequest
from worker.leases import GoneReason, HeldLease, LeaseGoneError, WaitNote
from worker.quality.checks import check_speech
from worker.quality.metrics import Readings, Sample
from worker.quality.pool import MeterPool, MeterTask
from worker.quality.verdict import CheckedDraw, History, check_draw, failed_draw, kept, meters_of, trimmed, with_readings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.audio import AudioFormat

log = structlog.get_logger(__name__)

#: Files need processor time, S3 mostly waits for the network.
FOLDER_THREADS, S3_THREADS = 2, 16


class Destination(Protocol):
    """Where outcomes go."""

    @property
    def over(self) -> bool:
        """Whether the work has ended, and takes no outcome any more."""
        ...

    def settle(self, outcome: Outcome) -> None: ...

    def forget(self, index: int) -> None:
        """The item has no outcome here: its lease was gone before it was stored."""
        ...

    def interrupt(self, index: int, error: NightjarError) -> None:
        """The item cannot be stored now, nor can the others of its shard."""
        ...

    def redraw(self, index: int, history: History) -> None:
        """The item's draw did not pass its checks: the next one is wanted."""
        ...


@dataclass(frozen=True, slots=True)
class SpeechToStore:
    """One draw of an item on its way to the store."""

    held: HeldLease
    store: ObjectStore
    index: int
    example_id: str
    request: SynthesisRequest
    #: Speech, or why the engine made none.
    made: Speech | NightjarError
    engine_ms: int
    destination: Destination
    #: What the line asks for, for pipelines that do not say what they spoke.
    text: str = ""
    draw: int = 0
    #: The last one there may be.
    last_draw: int = 0
    #: Whether draws differ by more than noise: the model samples, and was not asked to be greedy.
    sampled: bool = True
    history: History = field(default_factory=History)

    @property
    def quality(self) -> Quality | None:
        return self.held.lease.job.spec.quality

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def dropped(self) -> bool:
        """Whether nobody wants the outcome any more."""
        return self.held.gone not in (None, GoneReason.DRAINED) or self.destination.over


class Storer:
    """A few threads that check and store speeches. A store that fails for a while is waited for while the item's lease lives."""

    def __init__(self, on_retry: WaitNote = lambda _: None, max_backlog: int = 256, meters: MeterPool | None = None) -> None:
        self.max_backlog = max_backlog
        self._on_retry = on_retry
        self._meters = meters or MeterPool()
        self._queue: queue.SimpleQueue[tuple[SpeechToStore, Callable[[SpeechToStore], Outcome | None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def serve(self, store: ObjectStore) -> None:
        """Makes sure that there are threads enough for this store."""
        wanted = S3_THREADS if store.remote else FOLDER_THREADS
        with self._lock:
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name=f"storer-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def full(self) -> bool:
        """Whether so many speeches wait that no more should be asked of the engine. Those that wait for meters do not count."""
        return self._queue.qsize() >= self.max_backlog

    def submit(self, item: SpeechToStore) -> None:
        checked = item.quality is not None and not _text_only(item.made)
        self._queue.put((item, self._checked if checked else self._stored))

    def close(self) -> None:
        """Stores what was submitted, then ends the threads. What waits for meters is dropped."""
        self._meters.close()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            item, step = entry
            try:
                outcome = self._guarded(item, step)
                if outcome is not None:
                    item.destination.settle(outcome)
            except LeaseGoneError:
                item.destination.forget(item.index)
            except NightjarError as error:
                item.destination.interrupt(item.index, error)

    def _guarded(self, item: SpeechToStore, step: Callable[[SpeechToStore], Outcome | None]) -> Outcome | None:
        try:
            return step(item)
        except ModelError:
            raise
        except NightjarError as error:
            if error.code in LASTING_OUTAGES:
                raise
            return _failed(item, error.code, error.message)
        except LeaseGoneError:
            raise
        except Exception as error:
            log.exception("storing failed", index=item.index)
            return _failed(item, ErrorCode.SYNTH_ENGINE, f"The audio could not be encoded or stored: {error!r}")

    def _stored(self, item: SpeechToStore) -> Outcome:
        """The outcome of an item without quality checks."""
        if isinstance(item.made, NightjarError):
            raise item.made
        if not _text_only(item.made):
            check_speech(item.made)
        return Done(item.index, self._artifacts(item, item.made, item.seed, item.draw), item.engine_ms)

    def _checked(self, item: SpeechToStore) -> Outcome | None:
        """The outcome of a draw that the cheap checks decide; None while meters look at it, or another draw is wanted."""
        quality, made = cast(Quality, item.quality), item.made
        if isinstance(made, NightjarError):
            return self._decided(item, failed_draw(item.draw, item.seed, made))
        speech = trimmed(made, quality)
        text = speech.text_out or speech.text or item.text
        checked = check_draw(item.draw, item.seed, speech, quality, text, item.request.generation)
        if not checked.passed or not (meters := meters_of(quality)):
            return self._decided(item, checked)
        # While the draw waits, the pool alone holds its samples, in memory or in a file.
        unheard = replace(speech, samples=speech.samples[:0].copy())
        light, verdict = replace(item, made=unheard), replace(checked, speech=None)
        sample = Sample(speech.samples, speech.sample_rate, text, item.request.generation.language or "", _reference(item.request))

        def done(samples: NDArray[np.float32], readings: Readings | NightjarError) -> None:
            heard = replace(verdict, speech=replace(unheard, samples=samples))
            self._queue.put((light, lambda waiting: self._measured(waiting, heard, readings)))

        forgotten = lambda: light.destination.forget(light.index)  # noqa: E731
        # The item itself: a request's id is another one in each attempt and draw.
        name = f"{item.held.lease.job.id}/{item.index}"
        self._meters.submit(MeterTask(meters, sample, lambda: light.dropped, done, forgotten, name))
        return None

    def _measured(self, item: SpeechToStore, checked: CheckedDraw, readings: Readings | NightjarError) -> Outcome | None:
        if isinstance(readings, NightjarError):
            raise readings
        return self._decided(item, with_readings(checked, readings, cast(Quality, item.quality)))

    def _decided(self, item: SpeechToStore, checked: CheckedDraw) -> Outcome | None:
        """Stores a draw that passed, asks for another after one that did not, and ends the item after the last, or after two alike."""
        history = item.history.after(checked, item.engine_ms)
        if checked.passed:
            speech = cast(Speech, checked.speech)
            artifacts = self._artifacts(item, speech, item.seed, item.draw)
            return Done(item.index, artifacts, history.engine_ms, history.draws)
        if item.draw < item.last_draw and not item.history.ended_by(checked, item.sampled):
            item.destination.redraw(item.index, history)
            return None
        return self._given_up(item, history)

    def _given_up(self, item: SpeechToStore, history: History) -> Outcome:
        """The best draw of an item none of whose draws passed is kept, or goes to quarantine while the item fails."""
        best = cast(CheckedDraw, history.best)
        record, speech = best.record, best.speech
        if speech is None:
            return Failed(item.index, cast(ErrorCode, record.code), best.message, history.draws, engine_ms=history.engine_ms)
        if cast(Quality, item.quality).on_fail == "keep" and record.scores:
            artifacts = self._artifacts(item, speech, record.seed, record.draw)
            return Done(item.index, artifacts, history.engine_ms, kept(history.draws, record.draw))
        job = item.held.lease.job
        key = quarantine_key(job.id, item.index, item.example_id, job.spec.format, record.draw)
        artifact = self._store_audio(item, QUARANTINE, key, speech, record.seed)
        message = f"None of {len(history.draws)} draws passed; the best: {best.message}"
        return Failed(item.index, cast(ErrorCode, record.code), message, history.draws, (artifact,), history.engine_ms)

    def _artifacts(self, item: SpeechToStore, speech: Speech, seed: int, draw: int) -> tuple[Artifact, ...]:
        """Stores an item's audio, and its text where the model wrote one; the text alone where nothing else was asked for."""
        job = item.held.lease.job
        if speech.text_out is not None and _text_only(speech):
            return (self._store_text(item, speech.text_out, seed, draw),)
        key = audio_key(job.id, item.index, item.example_id, job.spec.format, draw)
        audio = self._store_audio(item, "audio", key, speech, seed)
        return (audio,) if speech.text_out is None else (audio, self._store_text(item, speech.text_out, seed, draw))

    def _store_audio(self, item: SpeechToStore, kind: str, key: str, speech: Speech, seed: int) -> Artifact:
        # Costs half a second at the first item; a worker that waits for work need not pay it.
        from pipelines.audio import encode

        audio_format = item.held.lease.job.spec.format
        data = encode(speech.samples, speech.sample_rate, cast("AudioFormat", audio_format))
        result = self._put(item, key, data, CONTENT_TYPES[audio_format], seed)
        samples, sample_rate = len(speech.samples), speech.sample_rate
        if not result.created and result.info.sha256 != hashlib.sha256(data).hexdigest():
            if (measured := item.held.retrying(lambda: _measure(item.store, key), self._on_retry)) is not None:
                samples, sample_rate = measured
            else:
                # No artifact names it, since the item is open: what a power cut left of an earlier holder's is replaced.
                item.held.retrying(lambda: item.store.delete(key), self._on_retry)
                result = self._put(item, key, data, CONTENT_TYPES[audio_format], seed)
        return Artifact(
            index=item.index,
            kind=kind,
            key=key,
            sha256=result.info.sha256,
            bytes=result.info.bytes,
            duration_ms=round(samples * 1000 / sample_rate),
            sample_rate=sample_rate,
            samples=samples,
            seed=seed,
            meta=dict(speech.meta),
        )

    def _store_text(self, item: SpeechToStore, text: str, seed: int, draw: int) -> Artifact:
        """What a model wrote beside its speech."""
        key = text_key(item.held.lease.job.id, item.index, item.example_id, draw)
        data = text.encode()
        info = self._put(item, key, data, CONTENT_TYPES["txt"], seed).info
        if data and not info.bytes:
            item.held.retrying(lambda: item.store.delete(key), self._on_retry)
            info = self._put(item, key, data, CONTENT_TYPES["txt"], seed).info
        return Artifact(item.index, "text", key, info.sha256, info.bytes, duration_ms=0, sample_rate=0, samples=0, seed=seed)

    def _put(self, item: SpeechToStore, key: str, data: bytes, content_type: str, seed: int) -> PutResult:
        """Writes once; what an earlier holder of this shard left there is adopted. Raises `store.conflict` for another spec's."""
        metadata = object_metadata(item.held.lease.job.spec_sha, seed)
        spec_sha = metadata["spec_sha"]
        result = item.held.retrying(lambda: item.store.put(key, data, content_type=content_type, metadata=metadata), self._on_retry)
        if result.info.metadata.get("spec_sha", spec_sha) != spec_sha:
            raise StoreError(
                ErrorCode.STORE_CONFLICT, f"Another job's object stands under {key}.", "Use another store or prefix for this job."
            )
        return result


def _failed(item: SpeechToStore, code: ErrorCode, message: str) -> Failed:
    """The outcome of an item whose last draw has no verdict, but took its time in the engine."""
    return Failed(item.index, code, message, item.history.draws, engine_ms=item.history.engine_ms + item.engine_ms)


def _reference(request: SynthesisRequest) -> bytes | None:
    """The encoded file of the voice that a request clones."""
    return next((message.content for message in request.messages if isinstance(message.content, bytes)), None)


def _text_only(made: Speech | NightjarError) -> bool:
    """Whether no audio was asked for."""
    return isinstance(made, Speech) and made.text_out is not None and made.meta.get("mode") == "text_only"


def _measure(store: ObjectStore, key: str) -> tuple[int, int] | None:
    """(samples, sample rate) of an audio object; None for one that is no whole file."""
    import soundfile

    data = store.get(key)
    # A WAV file says its own length; one that was cut would be read as a shorter one.
    if data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 != len(data):
        return None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames = len(file.read())
            return (frames, file.samplerate) if frames == file.frames else None
    except soundfile.SoundFileError:
        return None
