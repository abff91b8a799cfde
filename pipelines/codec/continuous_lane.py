"""Codes of whole utterances become audio as a continuous batch: one joins a free row at any step and leaves it at its end."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.registry import on_device
from pipelines.codec.chunk_graphs import Codes
from pipelines.codec.lane import Arrivals, Done, failure, fault_of, received, tell, too_late
from pipelines.codec.transfer import Samples, SamplesOnTheWay
from pipelines.errors import NightjarError

log = logging.getLogger(__name__)

#: Steps that a device may have to do at once: one that it decodes, and one that keeps it busy after that. Beside streams one alone.
_MAX_STARTED = 2

T = TypeVar("T")


class Steps(Protocol[T]):
    """What decodes the next frames of many utterances at once; see `pipelines.codec.utterance_graphs.UtteranceGraphs`."""

    @property
    def rows(self) -> int:
        """Utterances of a step at most."""
        ...

    @property
    def frames(self) -> int:
        """Frames of each of them; the end of an utterance may have fewer."""
        ...

    @property
    def samples_per_frame(self) -> int: ...

    def enter(self, codes: Tensor, start: T | None) -> T | None:
        """The state of an utterance, where there is room for it. Raises a `NightjarError` for codes that cannot be."""
        ...

    def leave(self, state: T) -> None:
        """Gives back what the state holds."""
        ...

    def step(self, states: Sequence[T], codes: Sequence[Codes]) -> SamplesOnTheWay:
        """Starts the next frames of each; moves the states on."""
        ...


@dataclass(slots=True, eq=False)
class _Utterance(Generic[T]):
    codes: Tensor
    #: The same memory.
    values: Codes
    start: T | None
    done: Done
    #: Those that it will have, from when it gets a row.
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    state: T | None = None
    #: Frames that were started, and samples that are there.
    started: int = 0
    heard: int = 0
    #: Whether its receiver was told.
    over: bool = False

    def tell(self, outcome: Samples | NightjarError) -> None:
        self.over = True
        tell(self.done, outcome)


class ContinuousLane(Generic[T]):
    """Decodes whole utterances in the order of arrival, many at once, each step the next frames of all that have a row.

    One thread starts steps; another sleeps until the samples of the first are there, and calls `done` for those that are complete. A step
    is started when all rows are taken, `gather_seconds` after the last one began, or at once where only a few came lately. While
    `streams_alive` steps are started one by one.
    """

    def __init__(
        self,
        steps: Steps[T],
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
        streams_alive: Callable[[], bool] = lambda: False,
    ) -> None:
        self._steps = steps
        self._device = device
        self._gather_seconds, self._gather_frames = gather_seconds, gather_frames
        self._streams_alive = streams_alive
        self._waiting: deque[_Utterance[T]] = deque()
        self._waiting_frames = 0
        self._arrivals = Arrivals()
        #: Those that have a row; only the thread that starts steps touches them.
        self._inside: list[_Utterance[T]] = []
        self._started = 0
        self._last_start = 0.0
        self._wake = threading.Condition()
        self._closing = False
        self._under_way: queue.SimpleQueue[tuple[list[_Utterance[T]], SamplesOnTheWay | NightjarError] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._start_steps, "codec-stage"), (self._hand_on_steps, "codec-samples"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def behind(self) -> bool:
        """Whether so much waits for a row that more codes would only wait longer."""
        return self._waiting_frames >= self._gather_frames

    @property
    def is_current(self) -> bool:
        """Whether this is one of the lane's own threads."""
        return threading.current_thread() in self._threads

    def put(self, codes: Tensor, done: Done, start: T | None = None) -> None:
        """Has an utterance [frames, codebooks] decoded."""
        with self._wake:
            closed = self._closing
            if not closed:
                self._waiting.append(_Utterance(codes, codes.numpy(), start, done))
                self._waiting_frames += len(codes)
                self._arrivals.note(time.monotonic())
                self._wake.notify()
        if closed:
            done(too_late())

    def close(self) -> None:
        """Decodes what is queued, then ends the threads. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if not self.is_current:
            for thread in self._threads:
                thread.join()

    def _start_steps(self) -> None:
        try:
            with on_device(self._device):
                while self._start_next():
                    pass
        except Exception as error:
            log.exception("the codec failed")
            with self._wake:
                self._closing = True
            self._under_way.put(([*self._inside, *self._waiting], failure(error)))
        finally:
            self._under_way.put(None)

    def _start_next(self) -> bool:
        """Starts a step when it is due. False once the lane is closed and nothing is left."""
        if not self._due():
            return False
        self._drop()
        for one in self._joining():
            self._join(one)
        if not self._inside:
            self._step_over()
        else:
            self._step()
        return True

    def _due(self) -> bool:
        """Waits until a step is due, and counts it as started; False once the lane is closed and nothing is left."""
        with self._wake:
            while (seconds := self._patience()) != 0:
                if self._closing and not (self._waiting or self._inside):
                    return False
                self._wake.wait(seconds)
            self._started += 1
            self._last_start = time.monotonic()
            return True

    def _patience(self) -> float | None:
        """Seconds until the next step is due; None: there is nothing to decode, or no place on the device."""
        if not (self._waiting or self._inside) or self._started >= (1 if self._streams_alive() else _MAX_STARTED):
            return None
        now = time.monotonic()
        if self._closing or self._arrivals.few(now) or len(self._waiting) + len(self._inside) >= self._steps.rows:
            return 0
        return max(self._gather_seconds - (now - self._last_start), 0)

    def _drop(self) -> None:
        """Takes the rows of those whose receivers were told of a fault meanwhile."""
        for one in self._inside:
            if one.over and one.state is not None:
                self._steps.leave(one.state)
                one.state = None
        self._inside = [one for one in self._inside if one.state is not None]

    def _joining(self) -> list[_Utterance[T]]:
        """Those that waited longest, as many as there are free rows."""
        with self._wake:
            count = min(self._steps.rows - len(self._inside), len(self._waiting))
            joining = [self._waiting.popleft() for _ in range(count)]
            self._waiting_frames -= sum(len(one.codes) for one in joining)
        return joining

    def _join(self, one: _Utterance[T]) -> None:
        if not len(one.codes):
            one.tell(one.samples)
            return
        try:
            one.samples = np.empty(len(one.codes) * self._steps.samples_per_frame, np.float32)
            one.state = self._steps.enter(one.codes, one.start)
            assert one.state is not None, "a row is free"
        except Exception as error:
            if not isinstance(error, NightjarError):
                log.exception("the codec failed")
            one.tell(failure(error))
        else:
            one.start = None
            self._inside.append(one)

    def _step(self) -> None:
        """Starts the next frames of all that have a row. A step that fails is told to all of them: their states are lost."""
        group, frames = self._inside, self._steps.frames
        parts = [one.values[one.started : one.started + frames] for one in group]
        try:
            outcome = self._steps.step([one.state for one in group if one.state is not None], parts)
        except Exception as error:
            log.exception("the codec failed")
            outcome = failure(error)
        for one, part in zip(group, parts):
            one.started += len(part)
            if one.started == len(one.codes) and one.state is not None:
                self._steps.leave(one.state)
                one.state = None
        self._inside = [one for one in group if one.state is not None]
        self._under_way.put((group, outcome))

    def _step_over(self) -> None:
        with self._wake:
            self._started -= 1
            self._wake.notify()

    def _hand_on_steps(self) -> None:
        with on_device(self._device):
            while self._hand_on_next():
                pass

    def _hand_on_next(self) -> bool:
        """Hands on the step that was started first. False behind the last."""
        step = self._under_way.get()
        if step is not None:
            self._hand_on(*step)
        return step is not None

    def _hand_on(self, group: list[_Utterance[T]], outcome: SamplesOnTheWay | NightjarError) -> None:
        """Waits for a step's samples, and tells those that are complete or that a fault has hit."""
        if isinstance(outcome, NightjarError):
            self._step_over()
            _tell_all(group, outcome)
            return
        error = fault_of(outcome)
        self._step_over()
        if error is not None:
            _tell_all(group, error)
            return
        for at, one in enumerate(group):
            if not one.over:
                self._hear(one, outcome, at)
        outcome.release()

    def _hear(self, one: _Utterance[T], samples: SamplesOnTheWay, at: int) -> None:
        place = one.samples[one.heard : one.heard + self._steps.frames * self._steps.samples_per_frame]
        one.heard += len(place)
        if (error := received(samples, at, place)) is not None:
            one.tell(error)
        elif one.heard == len(one.samples):
            one.tell(one.samples)


def _tell_all(group: Sequence[_Utterance[T]], error: NightjarError) -> None:
    """Tells all whose receivers were told nothing yet."""
    for one in group:
        if not one.over:
            one.tell(error)
