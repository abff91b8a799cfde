"""The last stage of an engine: decodes codes to audio, whole utterances in groups and streams chunk by chunk.

A lane is a queue of codes with two threads: one starts groups of them on a device, the other waits for the
samples of the oldest group and delivers them. A lane chooses the next group, how long it waits for more
codes, and how it is started.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY, lacks_memory
from kernels.registry import on_device
from pipelines.audio import Samples
from pipelines.codec.graphs import Codes, UtteranceGraphs
from pipelines.codec.transfer import PendingSamples, Sender, sent
from pipelines.errors import ErrorCode, NightjarError, SynthesisError, engine_error

log = logging.getLogger(__name__)

T = TypeVar("T")
Done = Callable[[Samples | NightjarError], None]
#: The state of a stream or an utterance, which only a family's decoder reads.
State = Any

#: Maximum number of groups of a lane on a device at once: one that is being decoded, and one that follows
#: without a pause. While streams are alive, whole utterances have only one.
_MAX_STARTED = 2
#: Maximum frames of a batch of whole utterances while streams are alive, so that the device is never occupied
#: for long.
QUANTUM_FRAMES = 4096
#: A lane is quiet, and starts groups without waiting for more codes, unless more than this many utterances
#: arrived within the last second.
QUIET_ARRIVALS = 8
#: Streams count as alive for this long after their last chunk: the next chunk follows in about the time that
#: the last one plays.
_ALIVE_SECONDS = 1.0


class Decoder:
    """A codec's decoder, which can continue from a state. Families derive from it."""

    #: The graphs that decode whole utterances in a continuous batch, if the decoder was prepared for it.
    utterances: UtteranceGraphs | None = None

    def new_state(self) -> State:
        """The state before the first frame of a stream."""
        raise NotImplementedError

    def decode(self, codes: Sequence[Tensor], states: Sequence[State | None] | None = None) -> list[Tensor]:
        """Decodes whole utterances [frames, codebooks] into samples [n] each; `states` are their initial
        states (None: a new state), and are not changed."""
        raise NotImplementedError

    def decode_chunk(self, states: Sequence[State], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decodes the next frames of streams and advances their states."""
        raise NotImplementedError

    def batch_key(self, frames: int, last: bool) -> tuple[int, int | None]:
        """The key that chunks of streams share if they can be started together, and the maximum number of
        them; None: any number."""
        return 0, None

    def start_chunks(
        self, states: Sequence[State], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> PendingSamples:
        """Starts `decode_chunk` without waiting for its samples. If it raises a `NightjarError`, no state
        was advanced."""
        return sent(self.decode_chunk(states, codes))


@dataclass(slots=True, eq=False)
class Job:
    """Codes [frames, codebooks] to decode: a whole utterance, or the next frames of a stream."""

    codes: Codes
    done: Done
    #: The state from which it starts; None: the codec's initial state. In a continuous batch: the state of
    #: its row while it has a row.
    state: State | None
    last: bool
    deadline: float
    since: float
    #: In a continuous batch: the buffer of all its samples once it has a row, the number of frames started,
    #: and the number of samples received.
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    started: int = 0
    received: int = 0
    #: Whether its receiver was notified.
    notified: bool = False

    def notify(self, outcome: Samples | NightjarError) -> None:
        """Notifies its receiver once. A receiver that raises must not stop the lane."""
        if self.notified:
            return
        self.notified = True
        try:
            self.done(outcome)
        except Exception:
            log.exception("a receiver of audio failed")


class Gathering(NamedTuple):
    """How long codes wait so that more of them are decoded together: at most `seconds`, or until `frames`
    frames are waiting."""

    seconds: float = 0.0
    frames: int = 4096
    #: Whether streams are alive; then groups are started one by one.
    beside_streams: Callable[[], bool] = lambda: False
    #: The clock of arrivals and waits, in seconds.
    monotonic: Callable[[], float] = time.monotonic


_NO_GATHERING = Gathering()

#: A group that was started, and its samples or its error.
Started = tuple[Sequence[Job], PendingSamples | NightjarError]


class Lane:
    """The part that all lanes share. Calls `done` on its own threads."""

    #: Names of its two threads, and the priority of its CUDA stream.
    _names = "codec-stage", "codec-samples"
    _priority = 0
    #: Maximum time that `put` waits.
    hold_seconds = 0.0

    def __init__(self, device: torch.device | None, gathering: Gathering = _NO_GATHERING) -> None:
        self._device = device
        self.gathering = gathering
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=self._priority) if on_gpu else None
        #: Jobs that are not started, in the order of arrival.
        self._waiting = deque[Job]()
        self.waiting_frames = 0
        #: Jobs of which a part is started; only the thread that starts groups uses them.
        self._inside = list[Job]()
        self._arrivals: deque[float] = deque(maxlen=QUIET_ARRIVALS + 1)
        self._started = 0
        #: Set whenever a group was started.
        self._has_started = threading.Event()
        self._wake = threading.Condition()
        self._closing = False
        #: What was started, in order; None at the end.
        self._pending: queue.SimpleQueue[list[Started] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in zip((self._start_groups, self._deliver_groups), self._names)
        ]
        for thread in self.threads:
            thread.start()

    def alive(self) -> bool:
        """Whether codes are waiting, being decoded, or arrived within the last second."""
        lately = bool(self._arrivals) and self.gathering.monotonic() < self._arrivals[-1] + _ALIVE_SECONDS
        return bool(self._waiting or self._started) or lately

    def put(
        self, codes: Codes, done: Done, state: State | None = None, last: bool = False, deadline: float = 0.0
    ) -> None:
        """Queues an utterance, or the next frames of a stream. If they are its first ones and the lane of streams is
        idle, waits until they are started: the engine's next frame would else delay them."""
        with self._wake:
            is_held = not (deadline or self._waiting or self._started)
            if is_open := not self._closing:
                now = self.gathering.monotonic()
                self._waiting.append(Job(codes, done, state, last, deadline, now))
                self.waiting_frames += len(codes)
                self._arrivals.append(now)
                self._has_started.clear()
                self._wake.notify()
        if is_open:
            self._has_started.wait(self.hold_seconds * is_held)
        else:
            done(
                SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed before the audio was decoded.")
            )

    def close(self) -> None:
        """Decodes all queued codes, then ends the threads. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()

    def _gather_seconds(self, now: float) -> float:
        """How much longer the next group waits for more codes."""
        return 0

    def _take(self) -> list[Job]:
        """Removes the next group from the queue."""
        raise NotImplementedError

    def _decode(self, group: list[Job]) -> PendingSamples:
        """Starts a group on the device."""
        raise NotImplementedError

    def _is_final(self, error: Exception) -> bool:
        """Whether a group that failed with this error cannot be retried."""
        return False

    def _start_groups(self) -> None:
        try:
            with on_device(self._device), torch.cuda.stream(self._stream):
                while self._start_next():
                    pass
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            with self._wake:
                self._closing = True
            self._pending.put([([*self._inside, *self._waiting], failure(error))])
        finally:
            self._pending.put(None)

    def _start_next(self) -> bool:
        """Starts a group when it is due; keeps no reference to it afterwards. Returns False if the lane is
        closed and empty."""
        with self._wake:
            while (seconds := self._seconds_until_due()) != 0:
                if self._closing and not (self._inside or self._waiting):
                    return False
                self._wake.wait(seconds)
            self._started += 1
            group = self._take()
            self.waiting_frames -= sum(len(job.codes) for job in group)
        self._pending.put(self._start(group))
        self._has_started.set()
        return True

    def _seconds_until_due(self) -> float | None:
        """Seconds until the next group is due; None: nothing is waiting, or the maximum number of groups is
        on the device."""
        maximum = 1 if self.gathering.beside_streams() else _MAX_STARTED
        if not (self._inside or self._waiting) or self._started >= maximum:
            return None
        now = self.gathering.monotonic()
        is_quiet = len(self._arrivals) <= QUIET_ARRIVALS or self._arrivals[0] < now - 1
        return 0 if is_quiet or self._closing else max(self._gather_seconds(now), 0)

    def _start(self, group: list[Job]) -> list[Started]:
        """Starts a group. If that fails, starts its halves: one faulty job must not fail the others."""
        try:
            return [(group, self._decode(group))]
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            if len(group) < 2 or self._is_final(error):
                return [(group, failure(error))]
        half = len(group) // 2
        return self._start(group[:half]) + self._start(group[half:])

    def _deliver_groups(self) -> None:
        with on_device(self._device):
            while self._deliver_next():
                pass

    def _deliver_next(self) -> bool:
        """Waits for the samples of what was started first, and passes them or their error to the receivers;
        keeps no reference to them afterwards. Returns False after the last ones."""
        if (started := self._pending.get()) is None:
            return False
        outcomes = [_attempt(one.wait) if isinstance(one, PendingSamples) else one for _, one in started]
        with self._wake:
            self._started -= 1
            self._wake.notify()
        for (group, _), outcome in zip(started, outcomes):
            for at, job in enumerate(group):
                if isinstance(outcome, NightjarError):
                    job.notify(outcome)
                else:
                    self._receive(job, outcome, at)
            if isinstance(outcome, PendingSamples):
                outcome.release()
        return True

    def _receive(self, job: Job, samples: PendingSamples, at: int) -> None:
        """Receives the samples of one job of a group."""
        job.notify(_attempt(lambda: samples.of(at)))


class StreamLane(Lane):
    """Decodes chunks of streams, the earliest deadline first and chunks of one size together; chunks of one
    stream keep their order."""

    _names = "codec-streams", "codec-chunks"
    _priority = CHUNK_PRIORITY
    hold_seconds = 0.001

    def __init__(self, decoder: Decoder, max_rows: int, device: torch.device | None) -> None:
        self._decoder = decoder
        self._max_rows = max_rows
        super().__init__(device)

    def _take(self) -> list[Job]:
        """Removes the chunk with the earliest deadline, and chunks of other streams that can share its
        launch, in the order of their deadlines."""
        first_chunks = dict[int, Job]()
        for job in self._waiting:
            first_chunks.setdefault(id(job.state), job)
        heads = sorted(first_chunks.values(), key=lambda job: job.deadline)
        keys = [self._decoder.batch_key(len(job.codes), job.last) for job in heads]
        first, maximum = keys[0]
        group = [job for job, (key, _) in zip(heads, keys) if key == first][
            : self._max_rows if maximum is None else maximum
        ]
        taken = set(group)
        self._waiting = deque(job for job in self._waiting if job not in taken)
        return group

    def _start(self, group: list[Job]) -> list[Started]:
        """Starts the chunks of streams that have not ended."""
        ended = [job for job in group if getattr(job.state, "closed", False)]
        group = [job for job in group if job not in ended]
        error = SynthesisError(ErrorCode.SYNTH_ABORTED, "The stream was ended.")
        return [(ended, error), *(super()._start(group) if group else ())]

    def _decode(self, group: list[Job]) -> PendingSamples:
        states = [job.state for job in group if job.state is not None]
        return self._decoder.start_chunks(
            states, [torch.from_numpy(job.codes) for job in group], [job.last for job in group]
        )

    def _is_final(self, error: Exception) -> bool:
        """States may have been advanced, except by a `NightjarError`."""
        return not isinstance(error, NightjarError)


class UtteranceLane(Lane):
    """Decodes whole utterances in groups, in the order of arrival."""

    def __init__(
        self,
        decoder: Decoder,
        max_batch: int,
        device: torch.device | None,
        gathering: Gathering,
    ) -> None:
        self._decoder = decoder
        self._max_batch = max_batch
        self._send = Sender() if device is not None and device.type == "cuda" else sent
        super().__init__(device, gathering)

    def _gather_seconds(self, now: float) -> float:
        full = len(self._waiting) >= self._max_batch or self.waiting_frames >= self.gathering.frames
        return 0 if full else self.gathering.seconds - (now - self._waiting[0].since)

    def _take(self) -> list[Job]:
        """Removes the oldest utterances, up to a full batch."""
        full = self.gathering.frames
        small = self.gathering.beside_streams()
        batch = list[Job]()
        frames = 0
        while self._waiting and len(batch) < self._max_batch and frames < full:
            count = len(self._waiting[0].codes)
            if batch and small and frames + count > min(full, QUANTUM_FRAMES):
                break
            batch.append(self._waiting.popleft())
            frames += count
        return batch

    def _decode(self, group: list[Job]) -> PendingSamples:
        codes = [torch.from_numpy(job.codes) for job in group]
        return self._send(self._decoder.decode(codes, [job.state for job in group]))


class ContinuousLane(Lane):
    """Decodes whole utterances as a continuous batch, in the order of arrival; each step decodes the next
    frames of every utterance that has a row.

    A step starts when all rows are taken, `Gathering.seconds` after the start of the last one, or at once
    while the lane is quiet.
    """

    def __init__(self, steps: UtteranceGraphs, device: torch.device | None, gathering: Gathering) -> None:
        self._steps = steps
        self._last_start = 0.0
        super().__init__(device, gathering)

    def _gather_seconds(self, now: float) -> float:
        full = len(self._waiting) + len(self._inside) >= self._steps.rows
        return 0 if full else self.gathering.seconds - (now - self._last_start)

    def _take(self) -> list[Job]:
        """Frees the rows of failed jobs, which were notified before their end. Removes the jobs that waited
        longest, one for each free row."""
        self._last_start = self.gathering.monotonic()
        for job in self._inside:
            if job.notified:
                self._leave(job)
        self._inside = [job for job in self._inside if job.state is not None]
        free = self._steps.rows - len(self._inside)
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _leave(self, job: Job) -> None:
        if job.state is not None:
            self._steps.leave(job.state)
        job.state = None

    def _start(self, group: list[Job]) -> list[Started]:
        """Gives these jobs rows and starts a step. A step that fails loses the states of all its jobs."""
        for job in group:
            self._join(job)
        inside = self._inside
        frames = self._steps.frames
        if not inside:
            return []
        parts = [job.codes[job.started : job.started + frames] for job in inside]
        states = [job.state for job in inside if job.state is not None]
        outcome = _attempt(lambda: self._steps.step(states, parts))
        for job, part in zip(inside, parts):
            job.started += len(part)
            if job.started == len(job.codes):
                self._leave(job)
        self._inside = [job for job in inside if job.state is not None]
        return [(inside, outcome)]

    def _join(self, job: Job) -> None:
        """Gives a job a row, or notifies its receiver of the error."""
        if not len(job.codes):
            job.notify(job.samples)
            return
        try:
            job.samples = np.empty(len(job.codes) * self._steps.samples_per_frame, np.float32)
            job.state = self._steps.enter(torch.from_numpy(job.codes), job.state)
            assert job.state is not None, "a row is free"
            self._inside.append(job)
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            job.notify(failure(error))

    def _receive(self, job: Job, samples: PendingSamples, at: int) -> None:
        place = job.samples[job.received : job.received + self._steps.frames * self._steps.samples_per_frame]
        job.received += len(place)
        outcome = _attempt(lambda: samples.of(at, place))
        if isinstance(outcome, NightjarError):
            job.notify(outcome)
        elif job.received == len(job.samples):
            job.notify(job.samples)


def _attempt(call: Callable[[], T]) -> T | NightjarError:
    """The result of a call, or its `failure`."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (`failure` logs it)
        return failure(error)


def failure(error: Exception) -> NightjarError:
    """The error that receivers get for an exception; logs it unless it is a `NightjarError`. Must be called
    where it is caught."""
    if isinstance(error, NightjarError):
        return error
    log.exception("the codec failed")
    if lacks_memory(error):
        return SynthesisError(
            ErrorCode.SYNTH_OOM, f"The codec ran out of device memory: {error}.", "Use a smaller engine."
        )
    return engine_error(f"The codec failed: {error}.", "See the log.")


class CodecStage:
    """Decodes codes on its own threads: one lane for whole utterances, and one for streams, which never waits
    for the other lane.

    Calls `done` on a thread of the lane with float32 samples [n], or with the error of that utterance. On a
    CUDA `device` each lane has its own CUDA stream; the lane of streams has priority. Whole utterances wait
    up to `gather_seconds` until `gather_frames` frames are waiting, unless the lane is quiet.

    If the decoder has graphs for whole utterances (`Decoder.utterances`), these form a continuous batch,
    which waits up to `gather_seconds` between steps until all of its rows are taken.
    """

    def __init__(
        self,
        decoder: Decoder | None = None,
        max_batch: int = 64,
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
    ) -> None:
        #: Whether it decodes at all; a pipeline that was opened for codes alone has no decoder.
        self.decodes = decoder is not None
        decoder = decoder or Decoder()
        self._streams = StreamLane(decoder, max_batch, device)
        gathering = Gathering(gather_seconds, gather_frames, self._streams.alive)
        self._utterances: Lane = (
            UtteranceLane(decoder, max_batch, device, gathering)
            if decoder.utterances is None
            else ContinuousLane(decoder.utterances, device, gathering)
        )
        #: Makes the state before the first frame of a stream.
        self.new_state = decoder.new_state
        #: Decodes a whole utterance [frames, codebooks]: codes, `done`, and the initial state if it follows a
        #: reference.
        self.decode: Callable[..., None] = self._utterances.put
        #: Decodes the next frames of a stream and advances its state; chunks of one stream keep their order. If
        #: `last`, no chunk of this stream follows, so the state may be wrong afterwards. Chunks with an earlier
        #: `deadline` are decoded first.
        self.decode_chunk = self._streams.put

    @property
    def is_backlogged(self) -> bool:
        """Whether a full batch of whole utterances is waiting to be started, so that more codes would only wait
        longer."""
        return self._utterances.waiting_frames >= self._utterances.gathering.frames

    @property
    def is_current(self) -> bool:
        """Whether this is one of the stage's own threads, which call `done` and must not block."""
        return threading.current_thread() in (*self._streams.threads, *self._utterances.threads)

    def end(self, state: State) -> None:
        """Ends the stream of this state: no further chunk of it is decoded, and its device memory is released.

        May be called on any thread and more than once. It is optional: an unreferenced state releases its
        memory too.
        """
        if callable(close := getattr(state, "close", None)):
            close()

    def close(self) -> None:
        """Decodes all queued codes, then ends the threads. May be called more than once."""
        self._streams.close()
        self._utterances.close()
