"""The last stage: codes of finished utterances become audio in groups, those of streams chunk by chunk
beside them.

All lanes are one loop with two threads: one starts groups on a device, the other sleeps until the samples
of the first are there and hands them on. A lane says who is in the next group, how long it waits for
company, and how it is started.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY, lacks_memory
from kernels.registry import on_device
from pipelines.codec.graphs import Codes, UtteranceGraphs
from pipelines.codec.states import CodecState
from pipelines.codec.transfer import Samples, SamplesOnTheWay, Sender, sent
from pipelines.errors import ErrorCode, NightjarError, SynthesisError

log = logging.getLogger(__name__)

S = TypeVar("S")
Done = Callable[[Samples | NightjarError], None]

#: Groups that a device may have to do at once: one that it decodes, and one that keeps it busy after that.
#: Beside streams whole utterances have one alone.
_MAX_STARTED = 2
#: Beside streams: frames of a batch of whole utterances, so that the device is never filled for long.
_QUANTUM_FRAMES = 4096
#: Utterances wait for company only where more than this many came within the last second: a few would wait
#: for nobody.
FEW_UTTERANCES = 8
#: Streams count as alive for so long after their last chunk: the next one follows in about the time that the
#: chunk plays.
_ALIVE_SECONDS = 1.0


class Decoder(Generic[S]):
    """A codec's decoder, which can go on from a state. A family derives from it."""

    #: What decodes steps of a continuous batch of whole utterances, where it was prepared for one.
    utterances: UtteranceGraphs | None = None

    def new_state(self) -> S:
        """Where a stream starts that follows nothing."""
        raise NotImplementedError

    def decode(self, codes: Sequence[Tensor], states: Sequence[S] | None = None) -> list[Tensor]:
        """Whole utterances [frames, codebooks] -> samples [n] each; `states` are where they start, and are
        not changed."""
        raise NotImplementedError

    def decode_chunk(self, states: Sequence[S], codes: Sequence[Tensor]) -> list[Tensor]:
        """The next frames of streams; moves their states on."""
        raise NotImplementedError

    def company(self, frames: int, last: bool) -> tuple[int, int | None]:
        """What chunks of streams must have in common to be started together, and how many of them may be;
        None: any number."""
        return 0, None

    def start_chunks(
        self, states: Sequence[S], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> SamplesOnTheWay:
        """`decode_chunk` whose samples come later. A `NightjarError` that it raises came before any state
        was moved on."""
        return sent(self.decode_chunk(states, codes))


@dataclass(slots=True, eq=False)
class _Job(Generic[S]):
    """Codes [frames, codebooks] that somebody wants to hear: a whole utterance, or the next frames of a
    stream."""

    codes: Codes
    done: Done
    #: Where it starts; None: at the codec's own beginning. In a continuous batch that of its row, while it
    #: has one.
    state: S | None
    last: bool
    deadline: float
    since: float
    #: In a continuous batch: all of its samples, from when it gets a row; frames that were started, and
    #: samples that are there.
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    started: int = 0
    heard: int = 0
    #: Whether its receiver was told.
    over: bool = False

    def tell(self, outcome: Samples | NightjarError) -> None:
        """Tells its receiver once. One that raises must not stop a lane."""
        if self.over:
            return
        self.over = True
        try:
            self.done(outcome)
        except Exception:
            log.exception("a receiver of audio failed")


@dataclass(frozen=True, slots=True)
class Gathering:
    """How long a lane lets codes wait for company: for so many seconds, until there are so many frames
    together."""

    seconds: float = 0.0
    frames: int = 4096
    #: Whether streams are alive beside it: then groups are started one by one.
    beside_streams: Callable[[], bool] = lambda: False


_ALONE = Gathering()


class Lane(Generic[S]):
    """The loop of all lanes. `done` is called on its threads."""

    #: Of its two threads, and of its CUDA stream.
    _names = "codec-stage", "codec-samples"
    _priority = 0

    def __init__(self, device: torch.device | None = None, gathering: Gathering = _ALONE) -> None:
        self._device, self._gathering = device, gathering
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=self._priority) if on_gpu else None
        #: In the order of arrival.
        self._waiting: deque[_Job[S]] = deque()
        self._waiting_frames = 0
        self._arrivals: deque[float] = deque(maxlen=FEW_UTTERANCES + 1)
        self._started = 0
        self._wake = threading.Condition()
        self._closing = False
        self._under_way: queue.SimpleQueue[
            tuple[Sequence[_Job[S]], SamplesOnTheWay | NightjarError] | None
        ] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in zip((self._start_groups, self._hand_on_groups), self._names)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def behind(self) -> bool:
        """Whether a full batch waits to be started, so that more codes would only wait longer."""
        return self._waiting_frames >= self._gathering.frames

    @property
    def is_current(self) -> bool:
        """Whether this is one of the lane's own threads."""
        return threading.current_thread() in self._threads

    def alive(self) -> bool:
        """Whether codes wait, are decoded, or came lately."""
        lately = bool(self._arrivals) and time.monotonic() < self._arrivals[-1] + _ALIVE_SECONDS
        return bool(self._waiting or self._started) or lately

    def put(
        self, codes: Codes, done: Done, state: S | None = None, last: bool = False, deadline: float = 0.0
    ) -> None:
        """Has an utterance, or the next frames of a stream, decoded."""
        with self._wake:
            if not self._closing:
                now = time.monotonic()
                self._waiting.append(_Job(codes, done, state, last, deadline, now))
                self._waiting_frames += len(codes)
                self._arrivals.append(now)
                self._wake.notify()
                return
        done(SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed before the audio was decoded."))

    def close(self) -> None:
        """Decodes what is queued, then ends the threads. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if not self.is_current:
            for thread in self._threads:
                thread.join()

    def _unstarted(self) -> Sequence[_Job[S]]:
        """What is not started, or not to its end."""
        return self._waiting

    def _company_seconds(self, now: float) -> float:
        """How long the next group waits for company yet, where there is a place on the device."""
        return 0

    def _take(self) -> list[_Job[S]]:
        """Takes the next group out of what waits."""
        raise NotImplementedError

    def _decode(self, group: list[_Job[S]]) -> SamplesOnTheWay:
        """Has the device decode a group."""
        raise NotImplementedError

    def _lost(self, error: Exception) -> bool:
        """Whether a group that failed with this error cannot be tried again."""
        return False

    def _start_groups(self) -> None:
        try:
            with on_device(self._device), torch.cuda.stream(self._stream):
                while self._start_next():
                    pass
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            with self._wake:
                self._closing = True
            self._under_way.put((list(self._unstarted()), failure(error)))
        finally:
            self._under_way.put(None)

    def _start_next(self) -> bool:
        """Starts a group when it is due; a thread that waits keeps nothing of it. False once the lane is
        closed and nothing is left."""
        with self._wake:
            while (seconds := self._patience()) != 0:
                if self._closing and not self._unstarted():
                    return False
                self._wake.wait(seconds)
            self._started += 1
            group = self._take()
            self._waiting_frames -= sum(len(job.codes) for job in group)
        self._start(group)
        return True

    def _patience(self) -> float | None:
        """Seconds until the next group is due; None: there is nothing to decode, or no place on the
        device."""
        if not self._unstarted() or self._started >= (
            1 if self._gathering.beside_streams() else _MAX_STARTED
        ):
            return None
        now = time.monotonic()
        few = len(self._arrivals) <= FEW_UTTERANCES or self._arrivals[0] < now - 1
        return 0 if few or self._closing else max(self._company_seconds(now), 0)

    def _start(self, group: list[_Job[S]]) -> None:
        """Starts a group, or its halves where it fails: one's fault is not the others'."""
        try:
            outcome = self._decode(group)
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            if len(group) > 1 and not self._lost(error):
                self._places(1)
                self._start(group[: len(group) // 2])
                self._start(group[len(group) // 2 :])
                return
            outcome = failure(error)
        self._under_way.put((group, outcome))

    def _places(self, taken: int) -> None:
        """Takes so many places on the device, or gives them back."""
        with self._wake:
            self._started += taken
            self._wake.notify()

    def _hand_on_groups(self) -> None:
        with on_device(self._device):
            while self._hand_on_next():
                pass

    def _hand_on_next(self) -> bool:
        """Hands on the group that was started first; a thread that waits keeps nothing of it. False behind
        the last."""
        started = self._under_way.get()
        if started is not None:
            self._hand_on(*started)
        return started is not None

    def _hand_on(self, group: Sequence[_Job[S]], outcome: SamplesOnTheWay | NightjarError) -> None:
        """Waits for a group's samples and gives them to whoever asked for them, or its error."""
        if isinstance(outcome, SamplesOnTheWay):
            outcome = _waited(outcome)
        self._places(-1)
        if isinstance(outcome, NightjarError):
            for job in group:
                job.tell(outcome)
            return
        for at, job in enumerate(group):
            self._hear(job, outcome, at)
        outcome.release()

    def _hear(self, job: _Job[S], samples: SamplesOnTheWay, at: int) -> None:
        """Hands on the samples of one of a group."""
        job.tell(_read(samples, at))


class StreamLane(Lane[S]):
    """Decodes chunks of streams: earliest deadline first, many of a size at once, of each stream one after
    the other."""

    _names = "codec-streams", "codec-chunks"
    _priority = CHUNK_PRIORITY

    def __init__(self, decoder: Decoder[S], max_rows: int = 64, device: torch.device | None = None) -> None:
        self._decoder, self._max_rows = decoder, max_rows
        super().__init__(device)

    def _take(self) -> list[_Job[S]]:
        """The chunk that is due first, and those of other streams that can share its launch, in the order
        of their deadlines."""
        first_chunks: dict[int, _Job[S]] = {}
        for job in self._waiting:
            first_chunks.setdefault(id(job.state), job)
        heads = sorted(first_chunks.values(), key=lambda job: job.deadline)
        company = [self._decoder.company(len(job.codes), job.last) for job in heads]
        size, most = company[0]
        group = [job for job, (its, _) in zip(heads, company) if its == size][
            : self._max_rows if most is None else most
        ]
        taken = set(group)
        self._waiting = deque(job for job in self._waiting if job not in taken)
        return group

    def _start(self, group: list[_Job[S]]) -> None:
        """Starts the chunks of streams that were not ended meanwhile."""
        if gone := [job for job in group if getattr(job.state, "closed", False)]:
            group = [job for job in group if job not in gone]
            self._places(int(bool(group)))
            self._under_way.put((gone, SynthesisError(ErrorCode.SYNTH_ABORTED, "The stream was ended.")))
        if group:
            super()._start(group)

    def _decode(self, group: list[_Job[S]]) -> SamplesOnTheWay:
        states = [job.state for job in group if job.state is not None]
        return self._decoder.start_chunks(
            states, [torch.from_numpy(job.codes) for job in group], [job.last for job in group]
        )

    def _lost(self, error: Exception) -> bool:
        """States may have been moved on, but for errors of ours."""
        return not isinstance(error, NightjarError)


class UtteranceLane(Lane[S]):
    """Decodes whole utterances in the order of arrival, many at once."""

    def __init__(
        self,
        decoder: Decoder[S],
        max_batch: int = 64,
        device: torch.device | None = None,
        gathering: Gathering = _ALONE,
    ) -> None:
        self._decoder, self._max_batch = decoder, max_batch
        self._sender = Sender()
        super().__init__(device, gathering)

    def _company_seconds(self, now: float) -> float:
        full = len(self._waiting) >= self._max_batch or self.behind
        return 0 if full else self._gathering.seconds - (now - self._waiting[0].since)

    def _take(self) -> list[_Job[S]]:
        """The oldest utterances, up to a full batch."""
        full, small = self._gathering.frames, self._gathering.beside_streams()
        batch: list[_Job[S]] = []
        frames = 0
        while self._waiting and len(batch) < self._max_batch and frames < full:
            count = len(self._waiting[0].codes)
            if batch and small and frames + count > min(full, _QUANTUM_FRAMES):
                break
            batch.append(self._waiting.popleft())
            frames += count
        return batch

    def _decode(self, group: list[_Job[S]]) -> SamplesOnTheWay:
        fresh = self._decoder.new_state()
        states = [fresh if job.state is None else job.state for job in group]
        return self._sender(self._decoder.decode([torch.from_numpy(job.codes) for job in group], states))


class ContinuousLane(Lane[CodecState]):
    """Decodes whole utterances in the order of arrival, many at once, each step the next frames of all
    that have a row.

    A step is started when all rows are taken, `Gathering.seconds` after the last one began, or at once
    where only a few came lately.
    """

    def __init__(
        self, steps: UtteranceGraphs, device: torch.device | None = None, gathering: Gathering = _ALONE
    ) -> None:
        self._steps = steps
        #: Those that have a row; only the thread that starts steps touches them.
        self._inside: list[_Job[CodecState]] = []
        self._last_start = 0.0
        super().__init__(device, gathering)

    def _unstarted(self) -> Sequence[_Job[CodecState]]:
        return [*self._inside, *self._waiting]

    def _company_seconds(self, now: float) -> float:
        full = len(self._waiting) + len(self._inside) >= self._steps.rows
        return 0 if full else self._gathering.seconds - (now - self._last_start)

    def _take(self) -> list[_Job[CodecState]]:
        """Those that waited longest, as many as there are free rows."""
        self._last_start = time.monotonic()
        self._drop()
        return [
            self._waiting.popleft()
            for _ in range(min(self._steps.rows - len(self._inside), len(self._waiting)))
        ]

    def _drop(self) -> None:
        """Takes the rows of those whose receivers were told of a fault meanwhile."""
        for job in self._inside:
            if job.over:
                self._leave(job)
        self._inside = [job for job in self._inside if job.state is not None]

    def _leave(self, job: _Job[CodecState]) -> None:
        if job.state is not None:
            self._steps.leave(job.state)
        job.state = None

    def _start(self, group: list[_Job[CodecState]]) -> None:
        """Starts the next frames of all that have a row, with these newcomers. A step that fails loses the
        states of all of them."""
        for job in group:
            self._join(job)
        inside, frames = self._inside, self._steps.frames
        if not inside:
            self._places(-1)
            return
        parts = [job.codes[job.started : job.started + frames] for job in inside]
        try:
            outcome = self._steps.step([job.state for job in inside if job.state is not None], parts)
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            outcome = failure(error)
        for job, part in zip(inside, parts):
            job.started += len(part)
            if job.started == len(job.codes):
                self._leave(job)
        self._inside = [job for job in inside if job.state is not None]
        self._under_way.put((inside, outcome))

    def _join(self, job: _Job[CodecState]) -> None:
        """Gives a newcomer a row, or tells it why not."""
        if not len(job.codes):
            job.tell(job.samples)
            return
        try:
            job.samples = np.empty(len(job.codes) * self._steps.samples_per_frame, np.float32)
            job.state = self._steps.enter(torch.from_numpy(job.codes), job.state)
            assert job.state is not None, "a row is free"
        except Exception as error:  # noqa: BLE001 (`failure` logs it)
            job.tell(failure(error))
        else:
            self._inside.append(job)

    def _hear(self, job: _Job[CodecState], samples: SamplesOnTheWay, at: int) -> None:
        place = job.samples[job.heard : job.heard + self._steps.frames * self._steps.samples_per_frame]
        job.heard += len(place)
        outcome = _read(samples, at, place)
        if isinstance(outcome, NightjarError):
            job.tell(outcome)
        elif job.heard == len(job.samples):
            job.tell(job.samples)


def _waited(samples: SamplesOnTheWay) -> SamplesOnTheWay | NightjarError:
    """The samples once they are there, or the device's fault."""
    try:
        samples.wait()
    except Exception as error:  # noqa: BLE001 (`failure` logs it)
        return failure(error)
    return samples


def _read(samples: SamplesOnTheWay, at: int, place: Samples | None = None) -> Samples | NightjarError:
    """The samples of one of a group, written to `place` where there is one; or what its receiver is told
    instead."""
    try:
        found = samples.of(at, place)
        finite = bool(np.isfinite(found).all())
    except Exception as error:  # noqa: BLE001 (`failure` logs it)
        return failure(error)
    return (
        found
        if finite
        else SynthesisError(ErrorCode.SYNTH_NAN, "The codec made values that are not numbers.")
    )


def failure(error: Exception) -> NightjarError:
    """What a receiver is told of a fault. Is called where it is caught, and logs what is no error of ours."""
    if isinstance(error, NightjarError):
        return error
    log.exception("the codec failed")
    if lacks_memory(error):
        return SynthesisError(
            ErrorCode.SYNTH_OOM, f"The codec ran out of device memory: {error}.", "Use a smaller engine."
        )
    return SynthesisError(ErrorCode.SYNTH_ENGINE, f"The codec failed: {error}.", "See the log.")


class CodecStage(Generic[S]):
    """Decodes what it is given on threads of its own: a lane of whole utterances, and one of streams that
    never waits for the other.

    `done` is called on a thread of its lane with float32 samples [n], or with the error of that utterance
    alone. On a CUDA `device` each lane has a stream, beside the frames; that of streams goes first. Whole
    utterances wait up to `gather_seconds` for company until they have `gather_frames` frames together,
    where more than a few came within the last second.

    Where the decoder has steps for whole utterances these are a continuous batch, which waits as long at
    most from one step to the next until all of its rows are taken.
    """

    def __init__(
        self,
        decoder: Decoder[S],
        max_batch: int = 64,
        device: torch.device | None = None,
        gather_seconds: float = 0.0,
        gather_frames: int = 4096,
    ) -> None:
        self._streams = StreamLane(decoder, max_batch, device)
        gathering = Gathering(gather_seconds, gather_frames, self._streams.alive)
        self._utterances: Lane[Any]
        if decoder.utterances is not None:
            self._utterances = ContinuousLane(decoder.utterances, device, gathering)
        else:
            self._utterances = UtteranceLane(decoder, max_batch, device, gathering)
        #: Where a stream starts that follows nothing.
        self.new_state = decoder.new_state

    @property
    def behind(self) -> bool:
        """Whether a full batch of whole utterances waits to be started, so that more codes would only wait
        longer."""
        return self._utterances.behind

    @property
    def is_current(self) -> bool:
        """Whether this is a thread of the stage's own, on which `done` is called: were it to wait, the
        stage would not go on."""
        return self._streams.is_current or self._utterances.is_current

    def decode(self, codes: NDArray[np.int64], done: Done, start: S | None = None) -> None:
        """Decodes a whole utterance [frames, codebooks], from the state `start` on when it follows a
        reference."""
        self._utterances.put(codes, done, start)

    def decode_chunk(
        self, codes: NDArray[np.int64], done: Done, state: S, last: bool = False, deadline: float = 0.0
    ) -> None:
        """Decodes the next frames of a stream and moves `state` on; chunks of one stream keep their order.

        `last`: no chunk of this stream follows, so `state` need not be right afterwards. `deadline`:
        earlier ones go first.
        """
        self._streams.put(codes, done, state, last, deadline)

    def end(self, state: S) -> None:
        """Says that the stream of this state is over: no chunk of it is decoded any more, and what it
        holds of the device goes back.

        May be called on any thread and more than once. A state that nobody holds any more needs none of it.
        """
        if callable(close := getattr(state, "close", None)):
            close()

    def close(self) -> None:
        """Decodes what is queued, then ends the threads. May be called more than once."""
        self._streams.close()
        self._utterances.close()
