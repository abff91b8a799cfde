"""The path from the engine's result to an item's outcome: checks, encodes and stores on a few threads, so that the
engine never waits for a disk."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from jobs.checks import ALIGNER, CHECKS, Quality
from jobs.dialogue import spoken_text
from jobs.encoded_audio import EncodedAudio, JoinedSpeech, stored_files
from jobs.export.items import TRANSCRIBED
from jobs.layout import item_key, object_metadata, put_numbered
from jobs.ledger.records import QUARANTINE, WORDS, Artifact, Done, Draw, Failed, JobSpec, Outcome, Score
from jobs.shard_file import ShardLine
from jobs.spec import is_sampled
from jobs.store.base import ObjectStore
from jobs.voices import stored_voice_of
from pipelines.audio import trim_silence
from pipelines.audio_format import LOSSY
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Handle, Meta, Speech, SynthesisRequest
from pipelines.text_units import TextPart
from worker.quality.meters import Reading, Readings, Utterance
from worker.quality.process import MeterPool, MeterTask
from worker.quality.verdict import CheckedDraw, History, check_draw, check_speech, failed_draw, judged

if TYPE_CHECKING:
    from worker.shard_run import ShardRun

#: Number of threads per kind of store. Threads for folders need processor time; those for S3 mostly wait: 500 objects
#: per second that take 0.1 s each need 50 threads.
FOLDER_THREADS, S3_THREADS = 2, 64
#: Number of threads for MP3 and Opus. Encoding one to two minutes of speech takes one second of a core, so two threads
#: would slow down a GPU.
LOSSY_THREADS = max(FOLDER_THREADS, len(os.sched_getaffinity(0)))
#: Number of waiting results at which the engine gets no more requests.
MAX_BACKLOG = 256


@dataclass(slots=True, eq=False)
class ItemDraw:
    """A draw of an item, from its planning to its outcome."""

    line: ShardLine
    number: int = 0
    #: Number of the last permitted draw of the item.
    last: int = 0
    #: The earlier draws of the item.
    history: History = field(default_factory=History)
    #: For an item that is spoken in parts: these, and the number of the part that is drawn.
    long: LongItem | None = None
    part: int = 0
    #: Set when the draw is fed to the engine.
    request: SynthesisRequest = field(init=False)
    #: The handle of the request, once the pipeline has accepted it.
    handle: Handle | None = None
    #: Whether draws differ by sampling: the model samples, and the request is not greedy.
    sampled: bool = True
    #: The start in the engine in seconds, by the worker's clock (`started_at`) and in the engine timer's virtual time.
    started_at: float = 0.0
    entered_at: float = 0.0
    #: The draw's share of the engine's time.
    engine_ms: int = 0

    def following(self, history: History) -> ItemDraw:
        """The draw after this one."""
        return ItemDraw(self.line, self.number + 1, self.last, history, self.long, self.part)

    @property
    def spent_ms(self) -> int:
        """The share of the engine's time of all draws of the item so far."""
        return self.history.engine_ms + self.engine_ms if self.long is None else self.long.engine_ms

    @property
    def where(self) -> str:
        """The beginning of a message about the draw: its part, if the item has parts."""
        return "" if self.long is None else f"Part {self.part + 1} of {len(self.long.parts)}: "


class PartKept:
    """A part of an item was kept, and others are missing."""


#: The scores of the checks that ran before the meters, and the readings of the meters.
Measured = tuple[Mapping[str, Score], Future[Readings]]
#: The result of a draw: the outcome of its item, the history if another draw must follow, or an error.
Answer = Outcome | History | PartKept | BaseException


class ResultWriter:
    """A few threads that check and store the results of engines. They wait for an unreachable store until the item's
    lease ends."""

    def __init__(self, meters: MeterPool | None = None) -> None:
        self.meters = meters or MeterPool()
        #: Threads that may wait for the store.
        self.threads = DaemonThreads(0, "writer")

    def ensure_threads(self, store: ObjectStore, audio_format: str) -> None:
        """Adds threads if this store or audio format needs more."""
        wanted = S3_THREADS if store.remote else FOLDER_THREADS
        self.threads.count = max(self.threads.count, wanted, LOSSY_THREADS if audio_format in LOSSY else 0)

    def close(self) -> None:
        """Stores the submitted results, then ends the threads. Draws that wait for meters are dropped."""
        self.meters.close()
        self.threads.shutdown(wait=True)

    def work(
        self, shard: ShardRun, draw: ItemDraw, made: Speech | NightjarError, measured: Measured | None = None
    ) -> None:
        """Checks and stores a result of the engine, and passes the answer to `shard.settle`. An error is passed as the
        answer too: `LeaseGoneError` if the lease ended first, `CancelledError` if the outcome is no longer needed, or any
        other error. `measured`: once the meters have measured the speech.
        """
        try:
            answer = self._outcome(shard, draw, made, measured)
        except Exception as error:  # noqa: BLE001 - handled by the shard
            answer = error
        if isinstance(answer, Future):
            answer.add_done_callback(lambda stored: shard.settle(draw, stored.exception() or stored.result()))
        elif answer is not None:
            shard.settle(draw, answer)

    def _outcome(
        self, shard: ShardRun, draw: ItemDraw, made: Speech | NightjarError, measured: Measured | None
    ) -> Outcome | History | PartKept | Future[Done] | None:
        """The answer for a result of the engine; None if meters must measure it first.

        | the draw | the item |
        |---|---|
        | has no checks, or passed them | `Done`, once its artifacts are stored |
        | failed, and draws are left | `History`: another draw follows |
        | failed as the last one, and the job keeps the best | `Done` with the best draw's artifacts |
        | failed as the last one | `Failed`, with the best draw's audio in quarantine |
        """
        job = shard.held.lease.job
        index = draw.line.index
        seed = draw.request.seed
        quality = job.spec.quality
        history = draw.history
        text_only = (
            isinstance(made, Speech) and made.text_out is not None and made.meta.get("mode") == "text_only"
        )
        if isinstance(made, NightjarError):
            # Only jobs with checks pass failures of the engine to the writer; they count as failed draws.
            assert quality is not None
            checked = failed_draw(draw.number, seed, made)
        elif quality is None or text_only:
            if not text_only:
                check_speech(made)
            return _stored(shard, draw, Done(index, (), draw.spent_ms), made, seed, draw.number)
        elif measured is not None:
            before = measured[0]
            readings = measured[1].result()
            aligned = readings.get(ALIGNER)
            if job.spec.timestamps is True and not made.words and isinstance(aligned, Reading):
                made = replace(made, words=aligned.words)
            checked = judged(draw.number, seed, made, quality, readings, before)
        else:
            checked = self._checked(shard, draw, made, quality)
            if checked is None:
                return None
        record = checked.record
        if record.code is None:
            done = Done(index, (), draw.spent_ms, (*history.draws, record))
            return _stored(shard, draw, done, checked.speech, seed, draw.number)
        after = history.after(checked, draw.engine_ms)
        if draw.number < draw.last and not history.ended_by(checked, draw.sampled):
            return after
        best = cast(CheckedDraw, after.best)
        draws = after.draws
        if quality.on_fail == "keep" and best.record.scores:
            draws = [msgspec.structs.replace(one, kept=one.draw == best.record.draw) for one in draws]
            outcome = Done(index, (), draw.spent_ms, tuple(draws))
        else:
            intro = "" if best.speech is None else f"None of {len(draws)} draws passed; the best: "
            code = cast(ErrorCode, best.record.code)
            outcome = Failed(index, code, draw.where + intro + best.message, draws, (), draw.spent_ms)
        return _stored(shard, draw, outcome, best.speech, best.record.seed, best.record.draw)

    def _checked(self, shard: ShardRun, draw: ItemDraw, made: Speech, quality: Quality) -> CheckedDraw | None:
        """The verdict of the checks that need no model; None if the draw passed them and meters measure it next, after
        which `work` is called with their readings."""
        job = shard.held.lease.job
        request = draw.request
        line = draw.line
        speech = trim_silence(made, quality.trim_keep_ms) if quality.trim else made
        text = speech.text_out or speech.text or spoken_text(request.messages)
        generation = request.generation
        if job.spec.stored_voices is not msgspec.UNSET and (voice := stored_voice_of(line, job.spec)):
            # The request has the stored voice only as a recording, so its name is set here.
            generation = msgspec.structs.replace(generation, voice=voice)
        checked = check_draw(draw.number, request.seed, speech, quality, text, generation)
        meters = quality.costly
        if meters and not is_sampled(quality, job.spec.seed, line.example_id):
            # The times of words are needed of every item.
            needed = job.spec.timestamps is True and not made.words
            meters = {name: meters[name] for name in (ALIGNER,) if needed and name in meters}
        if checked.record.code is not None or not meters:
            return checked
        recordings = (one.content for one in request.messages if isinstance(one.content, bytes))
        utterance = Utterance(
            speech.samples, speech.sample_rate, text, generation.language or "", next(recordings, None)
        )
        # The item has its own id here, because request ids differ between attempts and draws.
        item = f"{job.id}/{line.index}"
        measuring = self.meters.submit(
            MeterTask(meters, utterance, lambda: shard.abandoned, item, quality.bounds)
        )
        scores = checked.record.scores
        measuring.add_done_callback(
            lambda done: self.threads.submit(self.work, shard, draw, speech, (scores, done))
        )
        return None


def _stored(
    shard: ShardRun, draw: ItemDraw, outcome: Done | Failed, speech: Speech | None, seed: int, number: int
) -> Outcome | PartKept | Future[Done]:
    """Stores the artifacts of the kept draw and returns the outcome with them. They are the audio or the codes, if any,
    and codes beside audio, the text that the model wrote and the times of the words, which are not stored for a failed
    part of an item.

    Each is stored under its key, or under the next number if that key has another object, for example one that was
    damaged by a power cut or rounded differently. Waits for an unreachable store until the lease ends.
    """
    if speech is None:
        return outcome
    job = shard.held.lease.job
    line = draw.line
    packs = shard.packs
    failed = isinstance(outcome, Failed)
    #: Kind, content, size in bytes, and other columns of each artifact.
    made: list[tuple[str, Any, int, dict[str, Any]]] = []
    if draw.long is not None and isinstance(outcome, Done):
        if (whole := draw.long.keep(draw.part, outcome, speech, number)) is None:
            return PartKept()
        # An object of its own in a job with packs too, since it may be larger than memory.
        outcome, audio, words, meta, seed = whole
        packs = None
        number = outcome.draws[-1].draw if outcome.draws else number
        made.append(("audio", audio.data, audio.size, {**audio.facts, "meta": meta}))
        if words:
            made.append((WORDS, words, len(words), {"meta": meta}))
    else:
        if draw.long is not None:
            speech = replace(speech, meta={**speech.meta, "part": draw.part})
        for kind, data, facts in stored_files(speech, job.spec, shard.codec):
            if facts or not failed or draw.long is None:
                made.append((QUARANTINE if failed and facts else kind, data, len(data), facts))
    artifacts: list[tuple[Artifact, Any]] = []
    for kind, data, size, facts in made:
        key = item_key(job.id, kind, line.index, line.example_id, job.spec.extension(kind), number)
        known = {"duration_ms": 0, "sample_rate": 0, "samples": 0, "seed": seed, **facts}
        artifacts.append((Artifact(line.index, kind, key, "", size, **known), data))
    if packs is not None and isinstance(outcome, Done):
        return packs.add(outcome, artifacts, line.example_id)
    stored: list[Artifact] = []
    for artifact, data in artifacts:
        with nullcontext() if isinstance(data, bytes) else data:
            metadata = object_metadata(job.spec_sha, seed)
            put = shard.held.retrying(partial(put_numbered, shard.store, artifact.key, data, metadata))
        stored.append(msgspec.structs.replace(artifact, key=put.key, sha256=put.sha256))
    return msgspec.structs.replace(outcome, artifacts=tuple(stored))


class LongItem:
    """An item whose text is too long for one request: its parts are drawn and checked one by one, and joined.
    Thread-safe."""

    def __init__(
        self, parts: Sequence[TextPart], first: int, spec: JobSpec, seed: Callable[[int], int]
    ) -> None:
        """`first`: number of the first draw; `seed`: the item's seed for a draw, from which those of the parts
        derive."""
        self.parts = parts
        self._first = first
        self._seed = seed
        #: Total time of its draws in the engine.
        self.engine_ms = 0
        self._speech = JoinedSpeech([part.pause for part in parts], spec)
        #: Number of a part -> the number of its kept draw, and all its draws.
        self._kept: dict[int, tuple[int, Sequence[Draw]]] = {}
        self._lock = threading.Lock()

    def keep(
        self, part: int, done: Done, speech: Speech, draw: int
    ) -> tuple[Done, EncodedAudio[BinaryIO], bytes, Meta, int] | None:
        """Keeps a draw of a part. None: other parts are missing; otherwise the outcome of the item with its
        audio, the times of its words (empty: not known), the facts of the audio, and its seed."""
        with self._lock:
            self._kept[part] = draw, done.draws
        if not self._speech.add(part, speech):
            return None
        kept = [self._kept[number] for number in range(len(self.parts))]
        later = " ".join(f"{number}:{one}" for number, (one, _) in enumerate(kept) if one != self._first)
        meta = {"parts": len(kept), "first_draw": self._first, "redrawn": later}
        audio, words = self._speech.encoded()
        draws = tuple(self._joined([draws for _, draws in kept])) if done.draws else ()
        return Done(done.index, (), self.engine_ms, draws), audio, words, meta, self._seed(self._first)

    def _joined(self, parts: Sequence[Sequence[Draw]]) -> Iterator[Draw]:
        """The draws of the item: in each, every part has its draw of that number, or its kept one if no other
        followed. A score is the worst one of any part."""
        for place in range(count := max(map(len, parts))):
            chosen = [
                draws[place] if place < len(draws) - 1 else next(draw for draw in draws if draw.kept)
                for draws in parts
            ]
            names = dict.fromkeys(name for draw in chosen for name in draw.scores)
            scores = {
                name: _worst(name, [draw.scores.get(name, Score(None)) for draw in chosen]) for name in names
            }
            code = next((draw.code for draw in chosen if draw.code is not None), None)
            milliseconds = sum(draw.duration_ms for draw in chosen)
            number = self._first + place
            yield Draw(number, self._seed(number), code, place == count - 1, milliseconds, scores)


def _worst(name: str, scores: Sequence[Score]) -> Score:
    """The worst of the scores of parts; its detail names the part, or is the whole transcript."""
    bad = CHECKS[name].bad if name in CHECKS else "low"

    def badness(part: int) -> tuple[bool, float]:
        value = scores[part].value
        far = -math.inf if value is None else {"low": -value, "high": value, "both": abs(value - 1)}[bad]
        return scores[part].passed is False, far

    part = max(range(len(scores)), key=badness)
    detail = f"part {part + 1}: {scores[part].detail}".removesuffix(": ")
    if name in TRANSCRIBED:
        detail = " ".join(score.detail for score in scores)
    return msgspec.structs.replace(scores[part], detail=detail)
