"""The frame loop: one `step` admits, prefills, starts frames and reads those that are done. No threads."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import lacks_memory
from kernels.reference import ENDED, NOT_FINITE
from kernels.sampler import DrawFlags
from pipelines.engine.executor import EngineOptions, FrameExecutor, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.scheduler import Finish, FrameReceiver, GenerationRequest, Scheduler, Utterance
from pipelines.engine.state import Placement
from pipelines.engine.turns import Listening, TurnPlanner
from pipelines.errors import ErrorCode, NightjarError, SynthesisError

log = logging.getLogger(__name__)

#: This share of all slots is enough to let newcomers in at once.
_QUORUM = 16
#: When fewer than this share of all slots are free, streams that are ahead of their listeners go on too.
_CROWDED = 8
#: While a stream is alive, whole utterances have this part of a turn's prefill.
_WHOLE_SHARE = 4


@dataclass(frozen=True, slots=True)
class _Turn:
    batch: list[tuple[Utterance, int]]
    pending: PendingFrames
    frames: int
    #: Whether everybody who needed a frame took part.
    together: bool


def engine_failure(error: Exception) -> SynthesisError:
    """The error for requests that a fault of the engine or the device ended."""
    message = f"The engine failed: {type(error).__name__}: {error}."
    return SynthesisError(ErrorCode.SYNTH_ENGINE, message, "See the log; the request may be tried again.")


class EngineCore:
    """Merges requests into one running batch that they join and leave at any frame. Receivers are told by
    whoever calls `step`."""

    def __init__(
        self, executor: FrameExecutor, options: EngineOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.executor = executor
        self.options = options
        #: Frames that were made, and requests that are over.
        self.frames_made = self.requests_done = 0
        self._clock = clock
        self._turns: deque[_Turn] = deque()
        self._since_admission = 0
        self._drawn: tuple[list[Utterance], DrawFlags, DrawFlags] | None = None
        #: Rows of a frame at most.
        self._rows = executor.state.slots - options.spare_slots
        self.planner = TurnPlanner(
            executor.batch_sizes,
            options.frame_seconds,
            executor.reproducible,
            options.chunk_frames,
            options.first_frames,
        )
        self.scheduler = Scheduler(executor.kv, executor.state.slots, options)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or not self.idle)

    @property
    def idle(self) -> bool:
        """Whether nothing can be done before something comes: a request, or text for those that run."""
        waiting = self._turns or self.scheduler.waiting or self.scheduler.waiting_streams
        return not waiting and all(
            one.starved and one.prefilled == one.last for one in self.scheduler.running
        )

    @property
    def has_streams(self) -> bool:
        """Whether a stream is alive, running or waiting."""
        return bool(self.scheduler.waiting_streams or self.scheduler.streams)

    def check(self, request: GenerationRequest) -> None:
        """Raises `SynthesisError` (`synth.oom`) for a request that could not run even alone; may be called
        from any thread."""
        kv = self.executor.kv
        room = min(kv.pages * kv.page_size, self.options.max_context)
        if request.positions > room:
            raise SynthesisError(
                ErrorCode.SYNTH_OOM,
                f"The request needs up to {request.positions} positions; the engine has room for {room}.",
                "Shorten the text or the reference, lower max_seconds, or give the engine more pages.",
            )

    def add(self, request: GenerationRequest, receiver: FrameReceiver) -> None:
        """Puts a request into the queue. Raises as `check` does."""
        self.check(request)
        listening = Listening(self._clock(), unheard=request.unheard) if request.stream else None
        queue = self.scheduler.waiting if listening is None else self.scheduler.waiting_streams
        queue.append(Utterance(request, receiver, listening=listening))

    def append(self, request: GenerationRequest, ids: Sequence[int], final: bool) -> None:
        """Adds text ids to a request whose text is open; `final` ends its text. Does nothing when the
        request is over."""
        for utterance in self.scheduler.find(request):
            if not utterance.text_open:
                continue
            known, more = len(utterance.trailing), np.asarray(ids, np.int64)
            utterance.trailing = np.concatenate((utterance.trailing, more))
            utterance.text_open = not final
            if len(more):
                self.executor.take_text(more)
                if utterance.slot >= 0:
                    self.executor.state.write_trailing(utterance.slot, more, known)

    def abort(self, which: object) -> None:
        """Ends a request, or all requests with this origin or id, wherever they are; their receivers hear
        `synth.aborted`."""
        for utterance in self.scheduler.find(which):
            self._fail(utterance, SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))

    def step(self, batch: bool = True) -> bool:
        """One turn: admit, prefill, start frames, and read what is old enough. Returns whether there was
        anything to do.

        Without `batch` only streams go on. While a stream is alive a turn has one frame, which is read at
        once.
        """
        began, streams = self._clock(), self.has_streams
        try:
            turn, prefilled = self._stream_turn(batch) if streams else self._whole_turn()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self._shrink(error)
            return True
        if turn is not None:
            self.scheduler.limit.went_well(len(turn.batch) if streams else len(self.scheduler.running))
        lag = 0 if streams or turn is None else self.executor.lag
        read = len(self._turns) > lag
        while len(self._turns) > lag:
            self._read(self._turns.popleft())
        if turn is not None:
            self.planner.took((self._clock() - began) / turn.frames, turn.together)
        return turn is not None or prefilled or read

    def _whole_turn(self) -> tuple[_Turn | None, bool]:
        """Starts a turn of whole utterances; also returns whether prompts were prefilled."""
        self._admit()
        prefilled = self._prefill()
        return self._start_frames(
            self.scheduler.ready()[: self._rows], self.options.frames_per_turn, True
        ), prefilled

    def _stream_turn(self, batch: bool) -> tuple[_Turn | None, bool]:
        """Starts the turn that `TurnPlanner` plans, after newcomers among the streams were prefilled; also
        returns whether prompts were."""
        scheduler = self.scheduler
        self._place(scheduler.admit_streams())
        prefilled = self._prefill(scheduler.streams)
        streams = [one for one in scheduler.ready() if one.listening is not None]
        batch = batch and bool(scheduler.whole or scheduler.waiting)
        listening = [one.listening for one in streams if one.listening is not None]
        crowded = (
            bool(scheduler.waiting_streams) or scheduler.free_slots < self.executor.state.slots // _CROWDED
        )
        plan = self.planner.plan(listening, self._clock(), batch, crowded)
        rows = [streams[index] for index in plan.streams]
        if plan.batch:
            self._admit()
            prefilled = self._prefill(scheduler.whole, _WHOLE_SHARE) or prefilled
            rows += [one for one in scheduler.ready() if one.listening is None]
        return self._start_frames(rows[: self._rows], 1, plan.together), prefilled

    def fail_all(self, error: NightjarError) -> None:
        """Ends every request, running or waiting, with this error."""
        self._turns.clear()
        for utterance in self.scheduler.all():
            self._fail(utterance, error)
        # What was computed before a fault is not trusted.
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
        """Writes newcomers into their slots; where their prompts cannot be embedded together, each is
        embedded alone."""
        found: list[Tensor] | list[None] = [None] * len(admitted)
        if len(admitted) > 1:
            try:
                found = self.executor.embed_all([utterance.request.prompt for utterance in admitted])
            except Exception as error:
                if lacks_memory(error):
                    raise
                log.warning(
                    "prompts could not be embedded together, and are embedded one by one", exc_info=True
                )
        placements = [
            self._placement(utterance, embeddings)
            for utterance, embeddings in zip(admitted, found, strict=True)
        ]
        if known := [placement for placement in placements if placement is not None]:
            self.executor.state.place(known)

    def _placement(self, utterance: Utterance, embeddings: Tensor | None) -> Placement | None:
        """What goes into the utterance's slot; None when its prompt broke, which ends it alone."""
        request, last = utterance.request, len(utterance.request.prompt) - 1
        try:
            if embeddings is None:
                embeddings = self.executor.embed(request.prompt)
            utterance.embeddings = embeddings if utterance.prefilled < last else None
            embedding, trailing = embeddings[last], utterance.trailing
            return Placement(
                utterance.slot,
                utterance.pages,
                request.seed,
                request.sampling,
                trailing,
                embedding,
                last,
                request.drawn,
            )
        except Exception as error:
            if lacks_memory(error):
                raise
            log.exception("a request could not be let in")
            self._fail(utterance, engine_failure(error))
            return None

    def _prefill(self, among: Sequence[Utterance] | None = None, share: int = 1) -> bool:
        """Prefills chunks of prompts, as `Scheduler.prefill` plans them; whether there were any."""
        if adopted := self.scheduler.adopt_prefixes(among):
            self.executor.state.write_pages([(one.slot, one.pages, 0) for one in adopted])
        chunks = self.scheduler.prefill(among, share)
        runs: list[PrefillRun] = []
        for utterance, count in chunks:
            embeddings = utterance.embeddings
            if embeddings is None:
                continue
            start, end = utterance.prefilled, utterance.prefilled + count
            runs.append(PrefillRun(utterance.slot, start, embeddings[start:end]))
            utterance.prefilled = end
            if utterance.prefilled == utterance.last:
                utterance.embeddings = None
        there_were_any = bool(runs)
        # Chunks of one prompt read the pages that earlier chunks wrote: they go one after the other.
        while runs:
            now: dict[int, PrefillRun] = {}
            later = [run for run in runs if now.setdefault(run.slot, run) is not run]
            self.executor.prefill(list(now.values()))
            runs = later
        for utterance, _ in chunks:
            if utterance.request.prefixes:
                self.scheduler.keep_prefix(utterance)
        return there_were_any

    def _start_frames(self, batch: list[Utterance], frames: int, together: bool) -> _Turn | None:
        """Starts up to so many frames of these; `together`: everybody who needs a frame is among them."""
        if not batch:
            return None
        count = min(frames, min([one.request.max_tokens - one.started for one in batch]))
        grown = self.scheduler.grow(batch, count)
        if fresh := [(one.slot, pages, len(one.pages) - len(pages)) for one, pages in grown if one.slot >= 0]:
            self.executor.state.write_pages(fresh)
        batch = [one for one in batch if one.slot >= 0]
        if not batch:
            return None
        settings = FrameSettings(max([one.last + one.started for one in batch]) + 1, *self._draw_flags(batch))
        pending = self.executor.frames([one.slot for one in batch], count, settings)
        for utterance in batch:
            utterance.started += count
        turn = _Turn([(one, one.run) for one in batch], pending, count, together)
        self._turns.append(turn)
        return turn

    def _draw_flags(self, batch: list[Utterance]) -> tuple[DrawFlags, DrawFlags]:
        """What the samplers need for a batch; most turns have the batch of the turn before."""
        if self._drawn is None or self._drawn[0] != batch:
            samplings = [one.request.sampling for one in batch]
            first = DrawFlags.of([(s.temperature, s.top_k, s.top_p) for s in samplings])
            residual = DrawFlags.of(
                [(s.residual_temperature, s.residual_top_k, s.residual_top_p) for s in samplings]
            )
            self._drawn = batch, first, residual
        return self._drawn[1:]

    def _read(self, turn: _Turn) -> None:
        result = turn.pending()
        told, count = set(np.flatnonzero(result.flags.any(axis=0)).tolist()), turn.frames
        for row, ((utterance, run), codes) in enumerate(zip(turn.batch, result.codes.swapaxes(0, 1))):
            if utterance.run != run:
                continue
            if (
                row in told
                or utterance.listening is not None
                or utterance.made + count >= utterance.request.max_tokens
            ):
                self._take(utterance, codes, result.flags[:, row] if row in told else None)
            else:  # most rows of most turns
                utterance.parts.append(codes)
                utterance.made += count
                self.frames_made += count

    def _take(self, utterance: Utterance, codes: NDArray[np.int64], flags: NDArray[np.uint8] | None) -> None:
        """The frames of one utterance, up to its end; `flags` is None when there are none."""
        room = utterance.request.max_tokens - utterance.made
        finish: Finish | None = None
        if len(codes) >= room:
            codes, finish = codes[: room - 1], "length"
        if flags is not None:
            flag = int((flags[:room] != 0).argmax())
            if flags[flag] & NOT_FINITE:
                self._fail_not_finite(utterance)
                return
            if flags[flag] & ENDED:
                codes, finish = codes[:flag], "eos"
        self._keep(utterance, codes)
        if finish is not None:
            self._finish(utterance, finish)

    def _fail_not_finite(self, utterance: Utterance) -> None:
        self.scheduler.scrub(utterance)
        advice = "Try another seed; if it persists, check the weights or use a wider type."
        self._fail(
            utterance, SynthesisError(ErrorCode.SYNTH_NAN, "The model's logits hold NaN or infinity.", advice)
        )

    def _keep(self, utterance: Utterance, codes: NDArray[np.int64]) -> None:
        """Adds frames, and hands on whole chunks of a stream (a restart makes some again that were handed
        on before)."""
        if not len(codes):
            return
        utterance.parts.append(codes)
        utterance.made += len(codes)
        self.frames_made += len(codes)
        if utterance.listening is not None:
            self._keep_stream(utterance, utterance.listening, utterance.made - utterance.delivered)

    def _keep_stream(self, utterance: Utterance, listening: Listening, fresh: int) -> None:
        now = self._clock()
        if listening.awaiting:
            listening.size = self.planner.next_size(listening, now)
        while fresh >= listening.wanted or (fresh > 0 and utterance.starved):
            size = listening.wanted if fresh >= listening.wanted else self.planner.whole_part(fresh)
            # A part has one frame or more.
            chunk = np.concatenate(utterance.parts[-fresh:])[-fresh:][:size]
            utterance.delivered += len(chunk)
            fresh -= len(chunk)
            listening.handed_on(len(chunk), now, self.options.frame_seconds)
            listening.size = self.planner.next_size(listening, now)
            _tell(utterance.receiver.frames, chunk)
        listening.missing = listening.wanted - fresh

    def _finish(self, utterance: Utterance, finish: Finish) -> None:
        self.scheduler.remove(utterance)
        codes = np.concatenate(utterance.parts) if utterance.parts else np.zeros((0, 0), np.int64)
        self.requests_done += 1
        try:
            utterance.receiver.finished(codes, finish)
        except Exception as error:
            log.exception("a receiver of the engine failed")
            _tell(utterance.receiver.failed, engine_failure(error))

    def _fail(self, utterance: Utterance, error: NightjarError) -> None:
        if utterance.slot >= 0:
            self.scheduler.remove(utterance)
        else:
            self.scheduler.forget(utterance)
        self.requests_done += 1
        _tell(utterance.receiver.failed, error)

    def _shrink(self, error: RuntimeError) -> None:
        """After running out of device memory: all start again, fewer at a time (see `BatchLimit`); one
        alone fails."""
        self._turns.clear()
        running = self.scheduler.running
        self.scheduler.limit.drop(len(running))
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


def _tell(call: Callable[[Any], None], what: object) -> None:
    """A receiver that raises must not stop the engine."""
    try:
        call(what)
    except Exception:
        log.exception("a receiver of the engine failed")
