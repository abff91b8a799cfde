"""From what the engine made to an item's outcome: checks, encodes and stores, on a few threads, so that no
engine waits for a disk."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from jobs.dialogue import spoken_text
from jobs.layout import CONTENT_TYPES, item_key, object_metadata, put_numbered
from jobs.ledger.records import QUARANTINE, Artifact, Done, Failed, Job, Outcome
from jobs.shard_file import ShardLine
from jobs.store.base import ObjectStore
from jobs.voices import stored_voice_of
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Handle, Speech, SynthesisRequest
from worker.leases import GoneReason, HeldLease
from worker.pack_writer import EncodedArtifact, PackWriter
from worker.quality.meters import Utterance
from worker.quality.pool import Measured, MeterPool, MeterTask
from worker.quality.verdict import (
    CheckedDraw,
    History,
    check_draw,
    check_speech,
    failed_draw,
    meters_of,
    trimmed,
    with_readings,
)

#: Files need processor time. S3 mostly waits for the network: for 500 objects a second that each take 0.1 s,
#: 50 threads.
FOLDER_THREADS, S3_THREADS = 2, 64
#: MP3 and Opus take a second of a core for one to two minutes of speech, so that two threads would hold a GPU
#: back.
LOSSY_THREADS = max(FOLDER_THREADS, len(os.sched_getaffinity(0)))


@dataclass(slots=True, eq=False)
class ItemDraw:
    """A draw of an item, from its plan to its outcome."""

    line: ShardLine
    number: int = 0
    #: The number of the last draw that the item may have.
    last: int = 0
    #: The item's draws before this one.
    history: History = field(default_factory=History)
    #: Set when it is fed.
    request: SynthesisRequest = field(init=False)
    #: What ends it, once the pipeline has taken it.
    handle: Handle | None = None
    #: Whether draws differ by more than noise: the model samples, and was not asked to be greedy.
    sampled: bool = True
    #: When the engine took it, by the worker's clock and by the engine's timer.
    started_at: float = 0.0
    entered_at: float = 0.0
    #: Its share of the engine's time.
    engine_ms: int = 0


#: What became of a draw: an outcome of its item, the draws so far where another one is to follow, or an
#: error.
Answer = Outcome | History | BaseException


@dataclass(frozen=True, slots=True)
class ShardOutput:
    """Where the results of a leased shard go."""

    held: HeldLease
    store: ObjectStore
    #: What stores the artifacts, in a job with packs; None: each is an object of its own.
    packs: PackWriter | None
    #: Takes what became of a draw, from any thread.
    answer: Callable[[ItemDraw, Answer], None]
    #: Whether the work on the shard has ended.
    over: Callable[[], bool] = lambda: False

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants outcomes any more."""
        return self.held.gone not in (None, GoneReason.DRAINED) or self.over()


#: The work on a draw. It yields what it waits for without a thread, and returns what became of the draw.
_Path = Generator[Future[Any], Future[Any] | None, Outcome | History | Future[Done]]


class ResultWriter:
    """A few threads that check and store what engines made. They wait for a store that is away while the
    item's lease lives."""

    def __init__(self, max_backlog: int = 256, meters: MeterPool | None = None) -> None:
        self.max_backlog = max_backlog
        self._meters = meters or MeterPool()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def serve(self, store: ObjectStore, audio_format: str) -> None:
        """Makes sure that there are enough threads for this store and for audio of this format."""
        wanted = max(
            S3_THREADS if store.remote else FOLDER_THREADS, LOSSY_THREADS if audio_format in LOSSY else 0
        )
        with self._lock:
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name=f"writer-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def full(self) -> bool:
        """Whether so many results wait that the engine should get no more requests. Draws that wait for
        meters do not count."""
        return self._queue.qsize() >= self.max_backlog

    def submit(self, shard: ShardOutput, draw: ItemDraw, made: Speech | NightjarError) -> None:
        """Checks and stores what the engine made; `shard.answer` gets what becomes of it.

        `LeaseGoneError` where the lease ended first, `CancelledError` where nobody wants the outcome any
        more, and any other error.
        """
        self._queue.put(partial(self._step, shard, draw, self._outcome(shard, draw, made)))

    def run(self, work: Callable[[], None]) -> None:
        """Has a thread of the writer call `work`, which may wait for the store and raises nothing."""
        self._queue.put(work)

    def close(self) -> None:
        """Stores what was submitted, then ends the threads. Draws that wait for meters are dropped."""
        self._meters.close()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _step(self, shard: ShardOutput, draw: ItemDraw, path: _Path, came: Future[Any] | None = None) -> None:
        """Goes on with a draw until it waits for something, or has its answer."""
        try:
            waits_for = path.send(came)
        except StopIteration as end:
            answer: Outcome | History | Future[Done] = end.value
            if isinstance(answer, Future):
                answer.add_done_callback(
                    lambda stored: shard.answer(draw, stored.exception() or stored.result())
                )
            else:
                shard.answer(draw, answer)
        except Exception as error:  # noqa: BLE001 - the shard's to judge
            shard.answer(draw, error)
        else:
            waits_for.add_done_callback(
                lambda done: self._queue.put(partial(self._step, shard, draw, path, done))
            )

    def _outcome(self, shard: ShardOutput, draw: ItemDraw, made: Speech | NightjarError) -> _Path:
        """The one path from what the engine made to an item's outcome.

        | the draw | the item |
        |---|---|
        | has no checks, or passed them | `Done`, once its artifacts are stored |
        | did not pass, and another one may | `History`: it is drawn again |
        | was the last one, and the job keeps the best | `Done` with the best draw's artifacts |
        | was the last one | `Failed`, the best draw's audio in quarantine |
        """
        job, index = shard.held.lease.job, draw.line.index
        quality = job.spec.quality
        if quality is None or text_only(made):
            # An engine's error comes here only where a job has checks; it is a draw that did not pass them.
            speech = cast(Speech, made)
            if not text_only(speech):
                check_speech(speech)
            return _stored(
                shard, draw, Done(index, (), draw.engine_ms), speech, draw.request.seed, draw.number
            )
        if isinstance(made, NightjarError):
            checked = failed_draw(draw.number, draw.request.seed, made)
        else:
            speech = trimmed(made, quality)
            text = speech.text_out or speech.text or spoken_text(draw.line.messages)
            generation, voice = draw.request.generation, stored_voice_of(draw.line, job.spec)
            # As the job says it: with the name of a stored voice, which the request has as a recording.
            asked = generation if voice is None else msgspec.structs.replace(generation, voice=voice)
            checked = check_draw(draw.number, draw.request.seed, speech, quality, text, asked)
            if checked.passed and (meters := meters_of(quality)):
                utterance = Utterance(
                    speech.samples,
                    speech.sample_rate,
                    text,
                    generation.language or "",
                    _reference(draw.request),
                )
                # While the draw waits, the pool alone holds its samples, in memory or in a file.
                made = speech = replace(speech, samples=np.empty(0, np.float32))
                checked = replace(checked, speech=None)
                # The item itself: a request's id is another one in each attempt and draw.
                task = MeterTask(meters, utterance, lambda: shard.abandoned, f"{job.id}/{index}")
                measuring = self._meters.submit(task)
                del task, utterance
                measured: Measured = cast(Future[Any], (yield measuring)).result()
                checked = replace(checked, speech=replace(speech, samples=measured.samples))
                checked = with_readings(checked, measured.readings, quality)
        history = draw.history.after(checked, draw.engine_ms)
        if (
            not checked.passed
            and draw.number < draw.last
            and not draw.history.ended_by(checked, draw.sampled)
        ):
            return history
        best = checked if checked.passed else cast(CheckedDraw, history.best)
        record, speech = best.record, best.speech
        if best.passed or (quality.on_fail == "keep" and record.scores):
            done = Done(index, (), history.engine_ms, history.draws_with(record.draw))
            return _stored(shard, draw, done, cast(Speech, speech), record.seed, record.draw)
        message, artifacts = best.message, ()
        if speech is not None:
            message = f"None of {len(history.draws)} draws passed; the best: {message}"
            artifacts = _put(shard, _encoded(job, draw.line, speech, record.seed, record.draw, QUARANTINE))
        return Failed(
            index, cast(ErrorCode, record.code), message, history.draws, artifacts, history.engine_ms
        )


def text_only(made: Speech | NightjarError) -> bool:
    """Whether the model was asked for text without audio."""
    return isinstance(made, Speech) and made.text_out is not None and made.meta.get("mode") == "text_only"


def _reference(request: SynthesisRequest) -> bytes | None:
    """The encoded file of the voice that a request clones."""
    return next((message.content for message in request.messages if isinstance(message.content, bytes)), None)


def _stored(
    shard: ShardOutput, draw: ItemDraw, done: Done, speech: Speech, seed: int, number: int
) -> Done | Future[Done]:
    """The outcome with the artifacts of the draw that is kept, once these are stored."""
    artifacts = _encoded(shard.held.lease.job, draw.line, speech, seed, number)
    if shard.packs is not None:
        return shard.packs.add(done, artifacts, draw.line.example_id)
    return msgspec.structs.replace(done, artifacts=_put(shard, artifacts))


def _encoded(
    job: Job, line: ShardLine, speech: Speech, seed: int, number: int, kind: str = "audio"
) -> list[EncodedArtifact]:
    """The audio of a draw, and its text where the model wrote one, which does not go into quarantine; the
    text alone where no audio was asked for."""
    # Costs half a second at the first item; a worker that waits for work need not pay it.
    from jobs.encoded_audio import encoded_audio

    found: list[EncodedArtifact] = []
    if not text_only(speech):
        encoded = encoded_audio(speech, job.spec)
        made = Artifact(
            index=line.index,
            kind=kind,
            key=item_key(job.id, kind, line.index, line.example_id, job.spec.format, number),
            sha256="",
            bytes=len(encoded.data),
            duration_ms=encoded.duration_ms,
            sample_rate=encoded.sample_rate,
            samples=encoded.samples,
            seed=seed,
            meta=dict(speech.meta),
        )
        found.append(EncodedArtifact(made, encoded.data))
    if speech.text_out is not None and kind != QUARANTINE:
        key, data = (
            item_key(job.id, "text", line.index, line.example_id, "txt", number),
            speech.text_out.encode(),
        )
        made = Artifact(
            line.index, "text", key, "", len(data), duration_ms=0, sample_rate=0, samples=0, seed=seed
        )
        found.append(EncodedArtifact(made, data))
    return found


def _put(shard: ShardOutput, artifacts: list[EncodedArtifact]) -> tuple[Artifact, ...]:
    """Puts each artifact under its key, or under the next number where something else stands: a power cut
    may have damaged it, or the engine may have rounded otherwise. Waits for a store that is away for as
    long as the lease lives."""
    stored: list[Artifact] = []
    for made, data in artifacts:
        content_type = CONTENT_TYPES[made.key.rpartition(".")[2]]
        metadata = object_metadata(shard.held.lease.job.spec_sha, made.seed)
        put = shard.held.retrying(partial(put_numbered, shard.store, made.key, data, content_type, metadata))
        stored.append(msgspec.structs.replace(made, key=put.info.key, sha256=put.info.sha256))
    return tuple(stored)
