"""From what the engine made to an item's outcome: checks and writes, on a few threads, so that no engine waits for a disk."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import msgspec
import structlog

from jobs.ledger.records import Done, Failed, Outcome
from jobs.ledger.states import LASTING_OUTAGES
from jobs.quality import Quality
from jobs.store.base import ObjectStore
from pipelines.audio_format import LOSSY
from pipelines.errors import ErrorCode, ModelError, NightjarError
from pipelines.request import Generation, Speech, SynthesisRequest
from worker.artifact_writer import ArtifactWriter, text_only
from worker.leases import GoneReason, HeldLease, LeaseGoneError, RetryNote
from worker.pack_writer import PackWriter
from worker.quality.meters import Utterance
from worker.quality.pool import Measured, MeterPool, MeterTask
from worker.quality.verdict import CheckedDraw, History, check_draw, check_speech, failed_draw, meters_of, trimmed, with_readings

log = structlog.get_logger(__name__)

#: Files need processor time. S3 mostly waits for the network: for 500 objects a second that each take 0.1 s, 50 threads.
FOLDER_THREADS, S3_THREADS = 2, 64
#: MP3 and Opus take a second of a core for one to two minutes of speech, so that two threads would hold a GPU back.
LOSSY_THREADS = max(FOLDER_THREADS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What the engine made of one draw of an item."""

    held: HeldLease
    store: ObjectStore
    index: int
    example_id: str
    request: SynthesisRequest
    #: Speech, or why the engine made none.
    made: Speech | NightjarError
    engine_ms: int
    #: What the line asks for, for pipelines that do not say what they spoke.
    text: str = ""
    #: The name of the stored voice, which the request has as a recording.
    stored_voice: str | None = None
    draw: int = 0
    #: The number of the last draw that the item may have.
    last_draw: int = 0
    #: Whether draws differ by more than noise: the model samples, and was not asked to be greedy.
    sampled: bool = True
    history: History = field(default_factory=History)
    #: Whether the work on its shard has ended.
    over: Callable[[], bool] = lambda: False
    #: What stores the artifacts of its shard, in a job with packs.
    packs: PackWriter | None = None

    @property
    def quality(self) -> Quality | None:
        return self.held.lease.job.spec.quality

    @property
    def asked(self) -> Generation:
        """The settings as the job says them: with the name of a stored voice."""
        generation = self.request.generation
        return generation if self.stored_voice is None else msgspec.structs.replace(generation, voice=self.stored_voice)

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def abandoned(self) -> bool:
        """Whether nobody wants the outcome any more."""
        return self.held.gone not in (None, GoneReason.DRAINED) or self.over()


class Redraw(NamedTuple):
    """The draw did not pass its checks, and the item may have another one."""

    history: History


class _Step(NamedTuple):
    """Work for a thread of the writer."""

    result: EngineResult
    written: Future[Outcome | Redraw]
    #: None, or a future: the answer comes with a later step.
    run: Callable[[], Outcome | Redraw | Future[Done] | None]


class ResultWriter:
    """A few threads that check and write what engines made. They wait for a store that is away while the item's lease lives."""

    def __init__(self, on_retry: RetryNote = lambda _: None, max_backlog: int = 256, meters: MeterPool | None = None) -> None:
        self.max_backlog = max_backlog
        self._on_retry = on_retry
        self._meters = meters or MeterPool()
        self._queue: queue.SimpleQueue[_Step | Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def serve(self, store: ObjectStore, audio_format: str) -> None:
        """Makes sure that there are enough threads for this store and for audio of this format."""
        wanted = max(S3_THREADS if store.remote else FOLDER_THREADS, LOSSY_THREADS if audio_format in LOSSY else 0)
        with self._lock:
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name=f"writer-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def full(self) -> bool:
        """Whether so many results wait that the engine should get no more requests. Draws that wait for meters do not count."""
        return self._queue.qsize() >= self.max_backlog

    def submit(self, result: EngineResult) -> Future[Outcome | Redraw]:
        """Checks and writes a result. The future has the item's outcome, or `Redraw`.

        It raises `LeaseGoneError` where the lease ended first, `CancelledError` where nobody wants the outcome any more, and the
        `NightjarError` of an outage that stops the whole shard.
        """
        written: Future[Outcome | Redraw] = Future()
        checked = result.quality is not None and not text_only(result.made)
        self._queue.put(_Step(result, written, (lambda: self._check(result, written)) if checked else (lambda: self._write(result))))
        return written

    def run(self, work: Callable[[], None]) -> None:
        """Has a thread of the writer call `work`, which may wait for the store and raises nothing."""
        self._queue.put(work)

    def close(self) -> None:
        """Writes what was submitted, then ends the threads. Draws that wait for meters are dropped."""
        self._meters.close()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            if isinstance(step, _Step):
                self._take(step)
            else:
                step()

    def _take(self, step: _Step) -> None:
        try:
            answer = self._answer(step)
        except CancelledError:
            step.written.cancel()
        except (LeaseGoneError, NightjarError) as error:
            step.written.set_exception(error)
        else:
            if isinstance(answer, Future):
                waiting = _without_samples(step.result)
                answer.add_done_callback(lambda stored: self._queue.put(_Step(waiting, step.written, stored.result)))
            elif answer is not None:
                step.written.set_result(answer)

    def _answer(self, step: _Step) -> Outcome | Redraw | Future[Done] | None:
        """The answer of a step. An error that is the item's own is its outcome."""
        try:
            return step.run()
        except (CancelledError, LeaseGoneError, ModelError):
            raise
        except NightjarError as error:
            if error.code in LASTING_OUTAGES:
                raise
            return _failed(step.result, error.code, error.message)
        except Exception as error:
            log.exception("result not written", index=step.result.index)
            return _failed(step.result, ErrorCode.SYNTH_ENGINE, f"The audio could not be encoded or stored: {error!r}")

    def _write(self, result: EngineResult) -> Outcome | Future[Done]:
        """The outcome of an item without quality checks."""
        if isinstance(result.made, NightjarError):
            raise result.made
        if not text_only(result.made):
            check_speech(result.made)
        return self._stored(result, Done(result.index, (), result.engine_ms), result.made, result.seed, result.draw)

    def _stored(self, result: EngineResult, done: Done, speech: Speech, seed: int, draw: int) -> Done | Future[Done]:
        """The outcome with the artifacts of the draw that it keeps, once these are stored."""
        writer = self._artifacts(result)
        if result.packs is None:
            return msgspec.structs.replace(done, artifacts=writer.write(speech, seed, draw))
        return result.packs.add(done, writer.encode(speech, seed, draw), result.example_id)

    def _check(self, result: EngineResult, written: Future[Outcome | Redraw]) -> Outcome | Redraw | Future[Done] | None:
        """The outcome of a draw that the worker's own checks decide; None while meters measure it."""
        quality, made = cast(Quality, result.quality), result.made
        if isinstance(made, NightjarError):
            return self._decide(result, failed_draw(result.draw, result.seed, made))
        speech = trimmed(made, quality)
        text = speech.text_out or speech.text or result.text
        checked = check_draw(result.draw, result.seed, speech, quality, text, result.asked)
        if not checked.passed or not (meters := meters_of(quality)):
            return self._decide(result, checked)
        # While the draw waits, the pool alone holds its samples, in memory or in a file.
        waiting = _without_samples(replace(result, made=speech))
        checked = replace(checked, speech=None)
        utterance = Utterance(
            speech.samples, speech.sample_rate, text, result.request.generation.language or "", _reference(result.request)
        )
        # The item itself: a request's id is another one in each attempt and draw.
        item = f"{result.held.lease.job.id}/{result.index}"
        measured = self._meters.submit(MeterTask(meters, utterance, lambda: waiting.abandoned, item))
        measured.add_done_callback(
            lambda done: self._queue.put(_Step(waiting, written, lambda: self._judge(waiting, checked, done.result())))
        )
        return None

    def _judge(self, result: EngineResult, checked: CheckedDraw, measured: Measured) -> Outcome | Redraw | Future[Done]:
        """The outcome of a draw that was measured."""
        speech = replace(cast(Speech, result.made), samples=measured.samples)
        return self._decide(result, with_readings(replace(checked, speech=speech), measured.readings, cast(Quality, result.quality)))

    def _decide(self, result: EngineResult, checked: CheckedDraw) -> Outcome | Redraw | Future[Done]:
        """Writes a draw that passed. After one that did not, asks for another; after the last, or two alike, ends the item."""
        history = result.history.after(checked, result.engine_ms)
        if checked.passed:
            done = Done(result.index, (), history.engine_ms, history.draws)
            return self._stored(result, done, cast(Speech, checked.speech), result.seed, result.draw)
        if result.draw < result.last_draw and not result.history.ended_by(checked, result.sampled):
            return Redraw(history)
        return self._give_up(result, history)

    def _give_up(self, result: EngineResult, history: History) -> Outcome | Future[Done]:
        """The outcome of an item without a draw that passed: its best draw is kept, or goes to quarantine while the item fails."""
        best = cast(CheckedDraw, history.best)
        record, speech = best.record, best.speech
        if speech is None:
            return Failed(result.index, cast(ErrorCode, record.code), best.message, history.draws, engine_ms=history.engine_ms)
        if cast(Quality, result.quality).on_fail == "keep" and record.scores:
            done = Done(result.index, (), history.engine_ms, history.draws_with(record.draw))
            return self._stored(result, done, speech, record.seed, record.draw)
        artifact = self._artifacts(result).quarantine(speech, record.seed, record.draw)
        message = f"None of {len(history.draws)} draws passed; the best: {best.message}"
        return Failed(result.index, cast(ErrorCode, record.code), message, history.draws, (artifact,), history.engine_ms)

    def _artifacts(self, result: EngineResult) -> ArtifactWriter:
        return ArtifactWriter(result.held, result.store, result.index, result.example_id, self._on_retry)


def _without_samples(result: EngineResult) -> EngineResult:
    """The result while it waits: its speech says what it was and holds no samples."""
    speech = cast(Speech, result.made)
    return replace(result, made=replace(speech, samples=speech.samples[:0].copy()))


def _failed(result: EngineResult, code: ErrorCode, message: str) -> Failed:
    """The outcome of an item whose last draw has no verdict; its time in the engine counts."""
    return Failed(result.index, code, message, result.history.draws, engine_ms=result.history.engine_ms + result.engine_ms)


def _reference(request: SynthesisRequest) -> bytes | None:
    """The encoded file of the voice that a request clones."""
    return next((message.content for message in request.messages if isinstance(message.content, bytes)), None)
