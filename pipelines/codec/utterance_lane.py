"""Codes of whole utterances become audio in batches, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from kernels.registry import on_device
from pipelines.codec.lane import Arrivals, Decoder, Done, S, failure, outcome_of, tell, too_late
from pipelines.codec.transfer import SamplesOnTheWay, Sender
from pipelines.errors import NightjarError

log = logging.getLogger(__name__)

#: Batches that a device may have to do at once: one that it decodes, and one that keeps it busy after that. Beside streams one alone.
_MAX_STARTED = 2
#: Beside streams: frames of a batch, so that the device is never filled for long.
_QUANTUM_FRAMES = 4096
#: How often the lane looks whether a device is done, a hundredth of what it takes for a full batch.
_LOOK_SECONDS = 0.001


@dataclass(slots=True)
class _Job(Generic[S]):
    codes: Tensor
    #: Where it starts; None: at the codec's own beginning.
    state: S | None
    done: Done
    since: float


@dataclass(slots=True)
class _Started(Generic[S]):
    """A batch that the device may still be decoding."""

    jobs: list[_Job[S]]
    samples: SamplesOnTheWay
    #: What all of its jobs are told instead.
    error: NightjarError | None = None


class UtteranceLane(Generic[S]):
    """Decodes whole utterances in the order of arrival, many at once.

    `done` is called on the lane's thread. On a CUDA `device` it has a CUDA stream of its own, and starts the next batch, if there is one,
    before the last is done. Utterances wait up to `gather_seconds` for company until they have `gather_frames` frames together, unless only
    a few came lately. While `streams_alive` batches are small, and started one by one.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        max_batch: int = 64,
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
        streams_alive: Callable[[], bool] = lambda: False,
    ) -> None:
        self._decoder = decoder
        self._max_batch = max_batch
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._gather_seconds = gather_seconds
        self._gather_frames = gather_frames
        self._streams_alive = streams_alive
        self._sender = Sender()
        self._jobs: deque[_Job[S]] = deque()
        self._arrivals = Arrivals()
        self._waiting_frames = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="codec-stage", daemon=True)
        self._thread.start()

    @property
    def behind(self) -> bool:
        """Whether a full batch waits to be started."""
        return self._waiting_frames >= self._gather_frames

    @property
    def is_current(self) -> bool:
        """Whether this is the lane's own thread."""
        return threading.current_thread() is self._thread

    def put(self, codes: Tensor, done: Done, start: S | None = None) -> None:
        """Has an utterance [frames, codebooks] decoded."""
        job = _Job(codes, start, done, time.monotonic())
        with self._wake:
            closed = self._closing
            if not closed:
                self._jobs.append(job)
                self._arrivals.note(job.since)
                self._waiting_frames += len(codes)
                self._wake.notify()
        if closed:
            done(too_late())

    def close(self) -> None:
        """Decodes what is queued, then ends the thread. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        started: deque[_Started[S]] = deque()
        with on_device(self._device):
            while self._turn(started):
                pass

    def _turn(self, started: deque[_Started[S]]) -> bool:
        """Starts what is due and hands on what is over; False once the lane is closed and nothing is left."""
        with self._wake:
            while not (self._due(len(started)) or (started and started[0].samples.over)):
                if self._closing and not started:
                    return False
                self._wake.wait(_LOOK_SECONDS if started else self._patience())
            over = started.popleft() if started and started[0].samples.over else None
            batch = self._take() if self._due(len(started)) else []
        with torch.cuda.stream(self._stream):
            if over is not None and started:
                # The device has more to do meanwhile.
                self._hand_on(over)
                over = None
            following = self._start(batch) if batch else None
            if over is not None:
                self._hand_on(over)
            if following is not None and (started or not following.samples.over):
                started.append(following)
            elif following is not None:
                self._hand_on(following)
        return True

    def _due(self, started: int) -> bool:
        """Whether the next batch should be started beside so many others."""
        if not self._jobs or started >= (1 if self._streams_alive() else _MAX_STARTED):
            return False
        return self._closing or self._patience() == 0

    def _patience(self) -> float | None:
        """Seconds until the next batch should be decoded; None: there is nothing to decode."""
        if not self._jobs:
            return None
        now = time.monotonic()
        if self._arrivals.few(now) or len(self._jobs) >= self._max_batch or self.behind:
            return 0
        return max(self._gather_seconds - (now - self._jobs[0].since), 0)

    def _take(self) -> list[_Job[S]]:
        """The oldest utterances, up to a full batch."""
        most = min(self._gather_frames, _QUANTUM_FRAMES) if self._streams_alive() else None
        batch: list[_Job[S]] = []
        frames = 0
        while self._jobs and len(batch) < self._max_batch and frames < self._gather_frames:
            count = len(self._jobs[0].codes)
            if batch and most is not None and frames + count > most:
                break
            batch.append(self._jobs.popleft())
            frames += count
        self._waiting_frames -= frames
        return batch

    def _start(self, batch: list[_Job[S]]) -> _Started[S] | None:
        """Has the device decode a batch; None when everybody of a broken one was told. One utterance's fault is not the others'."""
        try:
            return _Started(batch, self._sent(self._waves(batch)))
        except Exception as error:
            if len(batch) > 1:
                half = len(batch) // 2
                for part in (batch[:half], batch[half:]):
                    if (started := self._start(part)) is not None:
                        self._hand_on(started)
                return None
            log.exception("the codec failed")
            return _Started(batch, SamplesOnTheWay([]), failure(error))

    def _sent(self, waves: list[Tensor]) -> SamplesOnTheWay:
        return self._sender(waves)

    def _waves(self, batch: list[_Job[S]]) -> list[Tensor]:
        codes = [job.codes for job in batch]
        if all(job.state is None for job in batch):
            return self._decoder.decode(codes)
        fresh: Any = self._decoder.new_state()
        return self._decoder.decode(codes, [fresh if job.state is None else job.state for job in batch])

    def _hand_on(self, started: _Started[S]) -> None:
        """Waits for a batch's samples and gives them to whoever asked for them, or its error."""
        error = started.error
        try:
            started.samples.wait()
        except Exception as fault:
            log.exception("the codec failed")
            error = failure(fault)
        for at, job in enumerate(started.jobs):
            tell(job.done, error or outcome_of(started.samples, at))
