"""Chunks of streams become audio at once, the most urgent first, on threads and a CUDA stream of their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY
from kernels.registry import on_device
from pipelines.codec.lane import Decoder, Done, S, failure, fault_of, outcome_of, tell, too_late
from pipelines.codec.transfer import SamplesOnTheWay, sent
from pipelines.errors import ErrorCode, NightjarError, SynthesisError

log = logging.getLogger(__name__)

#: Groups that a device may have to do at once: one that it decodes, and one that keeps it busy after that.
_MAX_STARTED = 2
#: Streams count as alive for so long after their last chunk: the next one follows in about the time that the chunk plays.
_ALIVE_SECONDS = 1.0
S_contra = TypeVar("S_contra", contravariant=True)


@runtime_checkable
class ChunkStarter(Protocol[S_contra]):
    """A decoder that starts chunks without waiting for their samples."""

    def company(self, frames: int, last: bool) -> tuple[int, int | None]:
        """What chunks must have in common to be started together, and how many of them may be; None: any number."""
        ...

    def start_chunks(self, states: Sequence[S_contra], codes: Sequence[Tensor], last: Sequence[bool]) -> SamplesOnTheWay:
        """The next frames of streams; moves their states on. A `NightjarError` that it raises came before any was moved."""
        ...


class _Launched(Generic[S]):
    """The chunks of a decoder that is no `ChunkStarter`: any streams together."""

    def __init__(self, decoder: Decoder[S]) -> None:
        self._decoder = decoder

    def company(self, frames: int, last: bool) -> tuple[int, int | None]:
        return 0, None

    def start_chunks(self, states: Sequence[S], codes: Sequence[Tensor], last: Sequence[bool]) -> SamplesOnTheWay:
        return sent(self._decoder.decode_chunk(states, codes))


@dataclass(slots=True)
class _Chunk(Generic[S]):
    codes: Tensor
    state: S
    done: Done
    last: bool
    #: Deadline, then order of arrival.
    rank: tuple[float, int]

    @property
    def over(self) -> bool:
        """Whether its stream was closed, so that nobody needs it."""
        return getattr(self.state, "closed", False)


class StreamLane(Generic[S]):
    """Decodes chunks of streams: earliest deadline first, many of a size at once, of each stream one after the other.

    One thread starts groups on a CUDA stream of high priority; another sleeps until the samples of the first are there, then calls `done`.
    """

    def __init__(self, decoder: Decoder[S], max_rows: int = 64, device: torch.device | None = None) -> None:
        self._starter = cast("ChunkStarter[S]", decoder) if isinstance(decoder, ChunkStarter) else _Launched(decoder)
        self._max_rows = max_rows
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=CHUNK_PRIORITY) if device is not None and device.type == "cuda" else None
        #: Chunks of each stream in their order.
        self._waiting: dict[int, deque[_Chunk[S]]] = {}
        self._arrivals = 0
        self._started = 0
        self._last_arrival = -_ALIVE_SECONDS
        self._wake = threading.Condition()
        self._closing = False
        self._under_way: queue.SimpleQueue[tuple[list[_Chunk[S]], SamplesOnTheWay | NightjarError] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._start_groups, "codec-streams"), (self._hand_on_groups, "codec-chunks"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this is one of the lane's own threads."""
        return threading.current_thread() in self._threads

    def alive(self) -> bool:
        """Whether a chunk waits, is decoded, or came lately."""
        return bool(self._waiting or self._started) or time.monotonic() < self._last_arrival + _ALIVE_SECONDS

    def put(self, codes: Tensor, done: Done, state: S, last: bool, deadline: float) -> None:
        """Has the next frames of a stream decoded."""
        with self._wake:
            closed = self._closing
            if not closed:
                self._arrivals += 1
                self._last_arrival = time.monotonic()
                chunk = _Chunk(codes, state, done, last, (deadline, self._arrivals))
                self._waiting.setdefault(id(state), deque()).append(chunk)
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

    def _start_groups(self) -> None:
        with on_device(self._device), torch.cuda.stream(self._stream):
            while self._start_next():
                pass
        self._under_way.put(None)

    def _start_next(self) -> bool:
        """Starts a group when there is one; a thread that waits keeps nothing of it. False once the lane is closed and nothing is left."""
        group = self._next_group()
        if group is not None:
            self._start(group)
        return group is not None

    def _next_group(self) -> list[_Chunk[S]] | None:
        """Waits for a place on the device and for chunks; None once the lane is closed and nothing is left."""
        with self._wake:
            while not (self._waiting and self._started < _MAX_STARTED):
                if self._closing and not self._waiting:
                    return None
                self._wake.wait()
            self._started += 1
            return self._take()

    def _take(self) -> list[_Chunk[S]]:
        """The chunk that is due first, and those of other streams that can share its launch, in the order of their deadlines."""
        heads = sorted((chunks[0] for chunks in self._waiting.values()), key=lambda chunk: chunk.rank)
        size, most = self._starter.company(len(heads[0].codes), heads[0].last)
        alike = [chunk for chunk in heads if self._starter.company(len(chunk.codes), chunk.last)[0] == size]
        group = alike[: self._max_rows if most is None else most]
        for chunk in group:
            chunks = self._waiting[id(chunk.state)]
            chunks.popleft()
            if not chunks:
                del self._waiting[id(chunk.state)]
        return group

    def _start(self, group: list[_Chunk[S]]) -> None:
        """Has the device decode a group. One stream's fault is not the others'."""
        wanted = [chunk for chunk in group if not chunk.over]
        if gone := [chunk for chunk in group if chunk.over]:
            self._send(gone, SynthesisError(ErrorCode.SYNTH_ABORTED, "The stream was ended."), more=bool(wanted))
        if wanted:
            self._start_wanted(wanted)

    def _start_wanted(self, group: list[_Chunk[S]]) -> None:
        try:
            samples = self._starter.start_chunks(
                [chunk.state for chunk in group], [chunk.codes for chunk in group], [chunk.last for chunk in group]
            )
        except Exception as error:
            if isinstance(error, NightjarError) and len(group) > 1:
                # No state was moved on: each is tried by itself.
                for at, chunk in enumerate(group, 1):
                    with self._wake:
                        self._started += at < len(group)
                    self._start_wanted([chunk])
                return
            log.exception("the codec failed")
            self._send(group, failure(error))
        else:
            self._send(group, samples)

    def _send(self, group: list[_Chunk[S]], outcome: SamplesOnTheWay | NightjarError, more: bool = False) -> None:
        """Leaves a group to the thread that hands on; `more`: the rest of the group follows, so one more is started."""
        if more:
            with self._wake:
                self._started += 1
        self._under_way.put((group, outcome))

    def _hand_on_groups(self) -> None:
        with on_device(self._device):
            while self._hand_on_next():
                pass

    def _hand_on_next(self) -> bool:
        """Hands on the group that was started first; a thread that waits keeps nothing of it. False behind the last."""
        started = self._under_way.get()
        if started is not None:
            self._hand_on(*started)
        return started is not None

    def _hand_on(self, group: list[_Chunk[S]], outcome: SamplesOnTheWay | NightjarError) -> None:
        """Waits for a group's samples and gives them to whoever asked for them, or its error."""
        error = None if isinstance(outcome, NightjarError) else fault_of(outcome)
        with self._wake:
            self._started -= 1
            self._wake.notify()
        for at, chunk in enumerate(group):
            tell(chunk.done, outcome if isinstance(outcome, NightjarError) else error or outcome_of(outcome, at))
        if error is None and isinstance(outcome, SamplesOnTheWay):
            outcome.release()
