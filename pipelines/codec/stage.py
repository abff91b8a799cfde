"""The last stage, on its own thread: codes of finished utterances become audio in batches, those of streams chunk by chunk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.errors import ErrorCode, NightjarError, SynthesisError

log = logging.getLogger(__name__)

#: Batches that a device may have to do at once: one that it decodes, and one that keeps it busy after that.
_MAX_STARTED = 2
#: How often the stage looks whether a device is done, a hundredth of what it takes for a full batch.
_LOOK_SECONDS = 0.001
S = TypeVar("S")
Samples = NDArray[np.float32]
Done = Callable[[Samples | NightjarError], None]


class Decoder(Protocol[S]):
    """A codec decoder that can go on from a state."""

    def new_state(self) -> S: ...

    def decode(self, codes: Sequence[Tensor], states: Sequence[S] | None = None) -> list[Tensor]:
        """Whole utterances [frames, codebooks] -> samples [n] each; `states` are where they start, and are not changed."""
        ...

    def decode_chunk(self, states: Sequence[S], codes: Sequence[Tensor]) -> list[Tensor]:
        """The next frames of streams; moves their states on."""
        ...


@dataclass(slots=True)
class _Job(Generic[S]):
    codes: Tensor
    state: S | None
    done: Done
    #: Whether `state` belongs to a stream and moves on.
    streamed: bool
    #: When `state` is written, where it was last written on another stream of the device.
    ready: torch.cuda.Event | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Started(Generic[S]):
    """A batch that the device may still be decoding, and its samples on their way to the host."""

    jobs: list[_Job[S]]
    #: Samples [n] of each on the host; they share one buffer there, which is pinned where the device writes it.
    waves: list[Tensor]
    #: After which the samples are on the host; None where they are at once.
    there: torch.cuda.Event | None
    #: What all of its jobs are told instead.
    error: NightjarError | None = None

    @property
    def over(self) -> bool:
        """Whether nobody needs to wait for the samples; a fault of the device shows when they are handed on."""
        try:
            return self.there is None or self.there.query()
        except RuntimeError:
            return True


class CodecStage(Generic[S]):
    """Decodes what it is given in the order of arrival, many at once; chunks of streams go first.

    `done` is called on the stage's thread with float32 samples [n], or with the error of that utterance alone.
    On a CUDA `device` the stage has a stream of its own, beside the frames, and starts the next batch, if there is one, before the last is
    done. Whole utterances wait up to `gather_seconds` for company until they have `gather_frames` frames together.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        max_batch: int = 64,
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
    ) -> None:
        self._decoder = decoder
        self._max_batch = max_batch
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._gather_seconds = gather_seconds
        self._gather_frames = gather_frames
        self._jobs: deque[_Job[S]] = deque()
        self._waiting_frames = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="codec-stage", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> bool:
        """Whether a full batch waits to be started, so that more codes would only wait longer."""
        return self._waiting_frames >= self._gather_frames

    @property
    def is_current(self) -> bool:
        """Whether this is the stage's own thread, on which `done` is called: were it to wait, the stage would not go on."""
        return threading.current_thread() is self._thread

    def new_state(self) -> S:
        """Where a stream starts that follows nothing."""
        return self._decoder.new_state()

    def decode(self, codes: NDArray[np.int64], done: Done, start: S | None = None) -> None:
        """Decodes a whole utterance [frames, codebooks], from the state `start` on when it follows a reference."""
        self._put(_Job(torch.from_numpy(codes), start, done, False, self._written(start)))

    def decode_chunk(self, codes: NDArray[np.int64], done: Done, state: S, last: bool = False, deadline: float = 0.0) -> None:
        """Decodes the next frames of a stream and moves `state` on; chunks of one stream keep their order.

        `last`: no chunk of this stream follows, so `state` need not be right afterwards. `deadline`: earlier ones may go first.
        """
        self._put(_Job(torch.from_numpy(codes), state, done, True, self._written(state)))

    def close(self) -> None:
        """Decodes what is queued, then ends the thread. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if not self.is_current:
            self._thread.join()

    def _written(self, state: S | None) -> torch.cuda.Event | None:
        """The moment after which a state made on the caller's stream can be read on the stage's."""
        if state is None or self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _put(self, job: _Job[S]) -> None:
        with self._wake:
            closed = self._closing
            if not closed:
                self._jobs.append(job)
                self._waiting_frames += len(job.codes)
                self._wake.notify()
        if closed:
            job.done(SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed before the audio was decoded."))

    def _run(self) -> None:
        started: deque[_Started[S]] = deque()
        while self._turn(started):
            pass

    def _turn(self, started: deque[_Started[S]]) -> bool:
        """Starts what is due and hands on what is over; False once the stage is closed and nothing is left."""
        with self._wake:
            while not (self._due(len(started)) or (started and started[0].over)):
                if self._closing and not started:
                    return False
                self._wake.wait(_LOOK_SECONDS if started else self._patience())
            over = started.popleft() if started and started[0].over else None
            batch = self._take() if self._due(len(started)) else []
        with torch.cuda.stream(self._stream):
            if over is not None and started:
                # The device has more to do meanwhile.
                self._hand_on(over)
                over = None
            following = self._start(batch) if batch else None
            if over is not None:
                self._hand_on(over)
            if following is not None and (started or not following.over):
                started.append(following)
            elif following is not None:
                self._hand_on(following)
        return True

    def _due(self, started: int) -> bool:
        """Whether the next batch should be started beside so many others."""
        if not self._jobs or started >= _MAX_STARTED:
            return False
        return self._closing or self._patience() == 0

    def _patience(self) -> float | None:
        """Seconds until the next batch should be decoded; None: there is nothing to decode."""
        if not self._jobs:
            return None
        enough = len(self._jobs) >= self._max_batch or self.behind
        if enough or not self._gather_seconds or any(job.streamed for job in self._jobs):
            return 0
        return max(self._gather_seconds - (time.monotonic() - self._jobs[0].since), 0)

    def _take(self) -> list[_Job[S]]:
        """The next batch: one chunk of every waiting stream, or else whole utterances."""
        streams: dict[int, _Job[S]] = {}
        for job in self._jobs:
            if job.streamed:
                streams.setdefault(id(job.state), job)
        batch = list(streams.values())[: self._max_batch] or self._utterances()
        chosen = {id(job) for job in batch}
        self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
        self._waiting_frames -= sum(len(job.codes) for job in batch)
        return batch

    def _utterances(self) -> list[_Job[S]]:
        """The oldest whole utterances, up to a full batch."""
        batch: list[_Job[S]] = []
        frames = 0
        for job in self._jobs:
            if len(batch) == self._max_batch or frames >= self._gather_frames:
                break
            batch.append(job)
            frames += len(job.codes)
        return batch

    def _start(self, batch: list[_Job[S]]) -> _Started[S] | None:
        """Has the device decode a batch; None when everybody of a broken one was told. One utterance's fault is not the others'."""
        try:
            return self._sent(batch, self._waves(batch))
        except Exception as error:
            if len(batch) > 1 and not batch[0].streamed:
                half = len(batch) // 2
                for part in (batch[:half], batch[half:]):
                    if (started := self._start(part)) is not None:
                        self._hand_on(started)
                return None
            log.exception("the codec failed")
            return _Started(batch, [], None, _failure(error))

    def _sent(self, batch: list[_Job[S]], waves: list[Tensor]) -> _Started[S]:
        """Samples on their way to the host, which does not wait for them."""
        if self._stream is None:
            return _Started(batch, [wave.float().cpu() for wave in waves], None)
        # One pinned buffer for all: the sizes of batches come again, those of utterances hardly, and pinning anew makes the device wait.
        lengths = [len(wave) for wave in waves]
        sent = list(torch.empty(sum(lengths), dtype=torch.float32, pin_memory=True).split(lengths))
        for samples, wave in zip(sent, waves):
            samples.copy_(wave, non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        return _Started(batch, sent, there)

    def _hand_on(self, started: _Started[S]) -> None:
        """Waits for a batch's samples and gives them to whoever asked for them, or its error."""
        error = started.error
        try:
            if started.there is not None:
                started.there.synchronize()
        except Exception as fault:
            log.exception("the codec failed")
            error = _failure(fault)
        for at, job in enumerate(started.jobs):
            _tell(job, error or _samples(started, at))

    def _waves(self, batch: list[_Job[S]]) -> list[Tensor]:
        codes = [job.codes for job in batch]
        for job in batch:
            if job.ready is not None:
                torch.cuda.current_stream().wait_event(job.ready)
        if batch[0].streamed:
            return self._decoder.decode_chunk([_known(job.state) for job in batch], codes)
        if all(job.state is None for job in batch):
            return self._decoder.decode(codes)
        fresh: Any = self._decoder.new_state()
        return self._decoder.decode(codes, [fresh if job.state is None else job.state for job in batch])


def _known(state: S | None) -> S:
    assert state is not None
    return state


def _samples(started: _Started[Any], at: int) -> Samples | NightjarError:
    """What one job of a batch is told."""
    try:
        # The pinned memory goes back; whoever asked keeps the samples.
        samples = started.waves[at].numpy() if started.there is None else started.waves[at].numpy().copy()
        finite = bool(np.isfinite(samples).all())
    except Exception as error:
        log.exception("the codec's samples could not be read")
        return _failure(error)
    return samples if finite else SynthesisError(ErrorCode.SYNTH_NAN, "The codec made values that are not numbers.")


def _tell(job: _Job[Any], outcome: Samples | NightjarError) -> None:
    """A receiver that raises must not stop the stage."""
    try:
        job.done(outcome)
    except Exception:
        log.exception("a receiver of audio failed")


def _failure(error: Exception) -> NightjarError:
    if isinstance(error, NightjarError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return SynthesisError(ErrorCode.SYNTH_OOM, f"The codec ran out of device memory: {error}.", "Use a smaller engine.")
    return SynthesisError(ErrorCode.SYNTH_ENGINE, f"The codec failed: {error}.", "See the log.")


#: Lengths are filled up to a multiple of this, which bounds the number of shapes that kernels and libraries meet.
LENGTH_STEP = 8
#: Frames that a batch costs at least, however small (its launches), and that each batch costs beside its own.
MIN_FRAMES, BATCH_COST = 600, 100
#: Rows of every batch in reproducible mode.
FIXED_ROWS = 8


def round_up(frames: int) -> int:
    """The length that an utterance of so many frames is filled up to."""
    return -(-frames // LENGTH_STEP) * LENGTH_STEP


def longest_first(lengths: Sequence[int], max_frames: int) -> list[list[int]]:
    """Indices of utterances in batches of at most `max_frames` padded frames, the longest first, so that neighbours are alike."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= max_frames:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def cheapest(lengths: Sequence[int], max_frames: int, pass_frames: int) -> list[list[int]]:
    """The cut of utterances into batches that costs the least by the figures above; empty ones are left out.

    A batch is as wide as its longest utterance and has at most `max_frames` frames, of which a row counts at most `pass_frames`:
    longer ones are decoded in passes of that many. The longest utterances come first.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    widths = [round_up(lengths[i]) for i in order]
    # best[end]: the least cost of the first `end` utterances, and where their last batch begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        choices: list[tuple[int, int]] = []
        for begin in range(end - 1, -1, -1):
            rows, width = end - begin, widths[begin]
            if rows > 1 and rows * min(width, pass_frames) > max_frames:
                break
            choices.append((best[begin][0] + max(rows * width, MIN_FRAMES) + BATCH_COST, begin))
        best.append(min(choices))
    batches: list[list[int]] = []
    end = len(order)
    while end:
        begin = best[end][1]
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of at most `FIXED_ROWS` utterances of one filled-up length: the shape that an utterance meets depends on its length only."""
    sizes: dict[int, list[int]] = {}
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        sizes.setdefault(round_up(lengths[i]), []).append(i)
    return [same[start : start + FIXED_ROWS] for same in sizes.values() for start in range(0, len(same), FIXED_ROWS)]
