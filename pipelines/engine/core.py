"""The frame loop without threads: one `step` admits and prefills requests, starts and reads frames, and ends utterances
that run away."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import lacks_memory
from kernels.reference import ENDED, NOT_FINITE
from pipelines.engine.executor import (
    EngineOptions,
    FrameCodes,
    FrameExecutor,
    FrameSettings,
    PendingFrames,
    PrefillRun,
)
from pipelines.engine.runaway import RunawayGuard
from pipelines.engine.scheduler import Finish, FrameReceiver, GenerationRequest, Scheduler, Utterance
from pipelines.engine.state import Placement
from pipelines.engine.turns import Playback, TurnPlanner
from pipelines.errors import ErrorCode, NightjarError, SynthesisError, engine_error
from pipelines.request import IntArray

log = logging.getLogger(__name__)

#: New requests are admitted at once if a sixteenth of all slots is free.
_QUORUM = 16
#: If fewer than an eighth of all slots are free, streams that are far ahead of their playback run too.
_CROWDED = 8
#: While a stream is alive, whole utterances have a quarter of a turn's prefill positions.
_WHOLE_SHARE = 4


class _Turn(NamedTuple):
    batch: list[Utterance]
    #: int64 [rows]: the slots of `batch`, and the values of `Scheduler.runs` at its start.
    slots: IntArray
    runs: IntArray
    pending: PendingFrames
    frames: int
    #: Whether every utterance that needed a frame has a row in it.
    together: bool


def engine_failure(error: Exception) -> SynthesisError:
    """The error of requests that failed because of the engine or the device."""
    return engine_error(
        f"The engine failed: {type(error).__name__}: {error}.",
        "See the log; the request may be tried again.",
    )


class EngineCore:
    """Merges requests into one running batch that they join and leave at any frame. Calls receivers on the
    thread that calls `step`."""

    def __init__(
        self, executor: FrameExecutor, options: EngineOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.executor = executor
        self.options = options
        #: Counts of frames made and of requests that ended.
        self.frames_made = self.requests_done = 0
        self._clock = clock
        self.turns = deque[_Turn]()
        self._since_admission = 0
        #: Maximum rows of a frame.
        self._rows = executor.state.slots - options.spare_slots
        self.planner = TurnPlanner(
            executor.batch_sizes,
            options.frame_seconds,
            executor.reproducible,
            options.chunk_frames,
            options.first_frames,
        )
        self.scheduler = Scheduler(executor.kv, executor.state.slots, options)
        slots = executor.state.slots
        #: [slots]: number of frames read of each slot's utterance, and the number up to which they are only kept.
        self._made = np.zeros(slots, np.int64)
        self._kept_until = np.zeros(slots, np.int64)
        #: int32 [frames, slots, codebooks] and float32 [frames, slots]: the frames that were read, and their log
        #: probabilities. Memory is only used up to the longest utterance.
        self._codes = np.zeros((options.max_context, slots, 0), np.int32)
        self._log_probabilities = np.zeros((options.max_context, slots), np.float32)
        self._guard = RunawayGuard(slots, options.frame_seconds) if options.runaway_guard else None

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or not self.idle)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a request, or text for a running one, arrives."""
        waiting = self.turns or self.scheduler.waiting or self.scheduler.waiting_streams
        return not waiting and all(
            one.text_open and one.starved and one.prefilled == one.last for one in self.scheduler.running
        )

    @property
    def has_streams(self) -> bool:
        """Whether a stream is alive, which means running or waiting."""
        scheduler = self.scheduler
        # In every turn, and a list is faster than `any`.
        return bool(
            scheduler.waiting_streams or [one for one in scheduler.running if one.playback is not None]
        )

    def check(self, request: GenerationRequest) -> None:
        """Raises `SynthesisError` (`synth.oom`) for a request that cannot run even alone. May be called on any
        thread."""
        kv = self.executor.kv
        room = min(kv.pages * kv.page_size, self.options.max_context)
        positions = len(request.prompt) + request.max_tokens - 1
        if positions > room:
            raise SynthesisError(
                ErrorCode.SYNTH_OOM,
                f"The request needs up to {positions} positions; the engine has room for {room}.",
                "Shorten the text or the reference, lower max_seconds, or give the engine more pages.",
            )

    def add(self, request: GenerationRequest, receiver: FrameReceiver) -> None:
        """Queues a request. Raises like `check`."""
        self.check(request)
        playback = Playback(self._clock(), inaudible=request.inaudible) if request.stream else None
        queue = self.scheduler.waiting if playback is None else self.scheduler.waiting_streams
        queue.append(Utterance(request, receiver, playback=playback))

    def append(self, request: GenerationRequest, ids: Sequence[int], final: bool) -> None:
        """Adds text ids to a request with open text; `final` ends the text. Does nothing after the request's
        end."""
        for utterance in self.scheduler.find(request):
            if not utterance.text_open:
                continue
            known = len(utterance.trailing)
            more = np.asarray(ids, np.int64)
            utterance.trailing = np.concatenate((utterance.trailing, more))
            utterance.text_open = not final
            if len(more):
                self.executor.take_text(more)
                if utterance.slot >= 0:
                    self.executor.state.write_trailing(utterance.slot, more, known)

    def abort(self, which: object) -> None:
        """Ends a request, or all requests with this origin or id, with `synth.aborted`."""
        for utterance in self.scheduler.find(which):
            self._fail(utterance, SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))

    def step(self, batch: bool = True) -> bool:
        """Runs one turn: admits, prefills, starts frames and reads finished ones. Returns whether there was
        anything to do.

        Without `batch` only streams run. While a stream is alive, a turn has one frame, which is read at once.
        """
        began = self._clock()
        streams = self.has_streams
        try:
            if streams:
                turn, prefilled = self._stream_turn(batch)
            else:
                self._admit()
                prefilled = self._prefill(self.scheduler.running)
                rows = self.scheduler.ready()[: self._rows]
                turn = self._start_frames(rows, self.options.frames_per_turn, True)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self._shrink(error)
            return True
        if turn is not None:
            self.scheduler.limit.record_success(len(turn.batch) if streams else len(self.scheduler.running))
        lag = 0 if streams or turn is None else self.executor.lag
        read = len(self.turns) > lag
        while len(self.turns) > lag:
            self._read(self.turns.popleft())
        if turn is not None:
            self.planner.record((self._clock() - began) / turn.frames, turn.together)
        return turn is not None or prefilled or read

    def _stream_turn(self, batch: bool) -> tuple[_Turn | None, bool]:
        """Prefills new streams and starts the turn that `TurnPlanner` plans; also returns whether prompts were
        prefilled."""
        scheduler = self.scheduler
        self._place(scheduler.admit_streams())
        prefilled = self._prefill(scheduler.streams)
        streams = [(one, one.playback) for one in scheduler.ready() if one.playback is not None]
        batch = batch and bool(scheduler.whole or scheduler.waiting)
        playbacks = [playback for _, playback in streams]
        crowded = (
            bool(scheduler.waiting_streams)
            or len(scheduler.free_slots) < self.executor.state.slots // _CROWDED
        )
        plan = self.planner.plan(playbacks, self._clock(), batch, crowded)
        rows = [streams[index][0] for index in plan.streams]
        if plan.batch:
            self._admit()
            prefilled = self._prefill(scheduler.whole, _WHOLE_SHARE) or prefilled
            rows += [one for one in scheduler.ready() if one.playback is None]
        return self._start_frames(rows[: self._rows], 1, plan.together), prefilled

    def fail_all(self, error: NightjarError) -> None:
        """Ends all requests with this error."""
        self.turns.clear()
        for utterance in self.scheduler.all():
            self._fail(utterance, error)
        # Keys and values from before a fault are not reused.
        self.scheduler.prefixes.clear()

    def _admit(self) -> None:
        self._since_admission += 1
        scheduler = self.scheduler
        crowded = scheduler.running and scheduler.free_whole_slots < self.executor.state.slots // _QUORUM
        if crowded and self._since_admission < self.options.admit_turns:
            return
        if admitted := scheduler.admit():
            self._since_admission = 0
            self._place(admitted)

    def _place(self, admitted: list[Utterance]) -> None:
        """Writes new requests into their slots. If their prompts cannot be embedded together, embeds each one
        alone; a request whose prompt cannot be embedded fails alone."""
        found: list[Tensor] | list[None] = [None] * len(admitted)
        if len(admitted) > 1:
            try:
                found = self.executor.embed([utterance.request.prompt for utterance in admitted])
            except Exception as error:
                if lacks_memory(error):
                    raise
                log.warning(
                    "prompts could not be embedded together, and are embedded one by one", exc_info=True
                )
        placements = list[Placement]()
        for utterance, embeddings in zip(admitted, found, strict=True):
            request = utterance.request
            last = utterance.last
            try:
                if embeddings is None:
                    (embeddings,) = self.executor.embed([request.prompt])
                utterance.embeddings = embeddings if utterance.prefilled < last else None
                placements.append(
                    Placement(
                        utterance.slot, utterance.pages, request.seed, request.sampling, utterance.trailing,
                        embeddings[last], last, request.drawn,
                    )
                )  # fmt: skip
            except Exception as error:
                if lacks_memory(error):
                    raise
                log.exception("a request could not be admitted")
                self._fail(utterance, engine_failure(error))
                continue
            self._made[utterance.slot] = 0
            self._kept_until[utterance.slot] = request.max_tokens if utterance.playback is None else 0
            if self._guard is not None:
                self._guard.begin(utterance.slot, request.longest)
        if placements:
            self.executor.state.place(placements)

    def _prefill(self, among: Sequence[Utterance], share: int = 1) -> bool:
        """Prefills the chunks that `Scheduler.prefill` plans. Returns whether there were any chunks."""
        if self.scheduler.prefixes.known and (adopted := self.scheduler.adopt_prefixes(among)):
            self.executor.state.write_pages([(one.slot, one.pages, 0) for one in adopted])
        chunks = self.scheduler.prefill(among, share)
        runs = list[PrefillRun]()
        for utterance, count in chunks:
            assert utterance.embeddings is not None, "they are kept until the prompt is prefilled"
            start = utterance.prefilled
            end = utterance.prefilled + count
            runs.append(PrefillRun(utterance.slot, start, utterance.embeddings[start:end]))
            utterance.prefilled = end
            if end == utterance.last:
                utterance.embeddings = None
        # Chunks of one prompt read the pages that earlier chunks wrote, so they run one after another.
        while runs:
            now = dict[int, PrefillRun]()
            later = [run for run in runs if now.setdefault(run.slot, run) is not run]
            self.executor.prefill(list(now.values()))
            runs = later
        for utterance, _ in chunks:
            if utterance.request.prefixes:
                self.scheduler.keep_prefix(utterance)
        return bool(chunks)

    def _start_frames(self, batch: list[Utterance], frames: int, together: bool) -> _Turn | None:
        """Starts up to `frames` frames of a batch; `together`: no other utterance needs a frame."""
        if not batch:
            return None
        count = min(frames, min([one.request.max_tokens - one.started for one in batch]))
        grown = self.scheduler.grow(batch, count)
        if fresh := [(one.slot, pages, len(one.pages) - len(pages)) for one, pages in grown if one.slot >= 0]:
            self.executor.state.write_pages(fresh)
        batch = [one for one in batch if one.slot >= 0]
        if not batch:
            return None
        settings = FrameSettings(
            max([one.last + one.started for one in batch]) + 1, [one.request.sampling for one in batch]
        )
        slots = [one.slot for one in batch]
        pending = self.executor.frames(slots, count, settings)
        for utterance in batch:
            utterance.started += count
        at = np.array(slots)
        turn = _Turn(batch, at, self.scheduler.runs[at], pending, count, together)
        self.turns.append(turn)
        return turn

    def _read(self, turn: _Turn) -> None:
        result = turn.pending()
        slots, count = turn.slots, turn.frames
        if not self._codes.size:
            self._codes = np.zeros((*self._codes.shape[:2], result.codes.shape[2]), np.int32)
        current = self.scheduler.runs[slots] == turn.runs
        made = self._made[slots]
        kept = current & (made + count < self._kept_until[slots]) & ~result.flags.any(axis=0)
        at, made = slots[kept], made[kept]
        for frame in range(count):
            self._codes[made + frame, at] = result.codes[frame, kept]
            self._log_probabilities[made + frame, at] = result.log_probabilities[frame, kept]
        self._made[at] += count
        self.frames_made += count * len(at)
        for row in np.flatnonzero(current & ~kept).tolist():
            self._take(turn.batch[row], result, row)
        if self._guard is None:
            return
        rows = np.flatnonzero(self.scheduler.runs[slots] == turn.runs)
        for index in self._guard.record(slots[rows], result.codes[:, rows, 0]):
            utterance = turn.batch[rows[index]]
            seconds = self._made[utterance.slot] * self.options.frame_seconds
            self._fail(
                utterance,
                SynthesisError(
                    ErrorCode.SYNTH_RUNAWAY,
                    f"After {seconds:.1f} s the speech repeats itself, or is much longer than its text.",
                    "Try another seed.",
                ),
            )

    def _take(self, utterance: Utterance, result: FrameCodes, row: int) -> None:
        """Receives the frames of one row, up to the end of its utterance."""
        slot, flags = utterance.slot, result.flags[:, row]
        codes, log_probabilities = self._codes[:, slot], self._log_probabilities[:, slot]
        made = int(self._made[slot])
        room = utterance.request.max_tokens - made
        count, finish = len(flags), cast("Finish | None", None)
        if count >= room:
            count, finish = room - 1, "length"
        if flags[:room].any():
            flag = int((flags[:room] != 0).argmax())
            if flags[flag] & NOT_FINITE:
                self.scheduler.scrub(utterance)
                self._fail(
                    utterance,
                    SynthesisError(
                        ErrorCode.SYNTH_NAN,
                        "The model's logits hold NaN or infinity.",
                        "Try another seed; if it persists, check the weights or use a wider type.",
                    ),
                )
                return
            if flags[flag] & ENDED:
                count, finish = flag, "eos"
        end = made + count
        codes[made:end] = result.codes[:count, row]
        log_probabilities[made:end] = result.log_probabilities[:count, row]
        self._made[slot] = end
        self.frames_made += count
        if count and utterance.playback is not None:
            self._deliver(utterance, utterance.playback, codes[:end])
        if finish is None:
            return
        whole = codes[:end].astype(np.int64), finish, log_probabilities[:end].astype(np.float64)
        self.scheduler.remove(utterance)
        self.requests_done += 1
        try:
            utterance.receiver.finished(*whole)
        except Exception as error:
            log.exception("a receiver of the engine failed")
            _notify(utterance.receiver.failed, engine_failure(error))

    def _deliver(self, utterance: Utterance, playback: Playback, codes: NDArray[np.int32]) -> None:
        """Delivers whole chunks of a stream. After a restart, frames that were already delivered are made again,
        but not delivered again. codes: all frames read."""
        now, fresh = self._clock(), len(codes) - utterance.delivered
        if playback.awaiting:
            playback.size = self.planner.next_size(playback, now)
        while fresh >= playback.wanted or (fresh > 0 and utterance.starved):
            size = playback.wanted if fresh >= playback.wanted else self.planner.whole_part(fresh)
            chunk = codes[utterance.delivered :][:size].astype(np.int64)
            utterance.delivered += len(chunk)
            fresh -= len(chunk)
            playback.record_chunk(len(chunk), now, self.options.frame_seconds)
            playback.size = self.planner.next_size(playback, now)
            _notify(utterance.receiver.frames, chunk)
        playback.missing = playback.wanted - fresh

    def _fail(self, utterance: Utterance, error: NightjarError) -> None:
        self.scheduler.remove(utterance)
        self.requests_done += 1
        _notify(utterance.receiver.failed, error)

    def _shrink(self, error: RuntimeError) -> None:
        """After an out-of-memory error: restarts all requests, fewer at a time (see `BatchLimit`). A request
        that ran alone fails."""
        self.turns.clear()
        running = self.scheduler.running
        self.scheduler.limit.reduce(len(running))
        log.warning(
            "the device is out of memory with %d requests; %d may run for now: %s",
            len(running),
            self.scheduler.limit.now,
            error,
        )
        if len(running) == 1:
            self._fail(
                running[0],
                SynthesisError(
                    ErrorCode.SYNTH_OOM, f"The device is out of memory: {error}.", "Use a smaller engine."
                ),
            )
        while running:
            self.scheduler.preempt_youngest()
        torch.cuda.empty_cache()


def _notify(call: Callable[[Any], None], what: object) -> None:
    """Calls a receiver; one that raises must not stop the engine."""
    try:
        call(what)
    except Exception:
        log.exception("a receiver of the engine failed")
