"""The engine on a device that exists in simulated time only: what streams' listeners hear, and when,
without a model or a clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.reference import ENDED
from pipelines.engine.buckets import bucket_of, buckets_for
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import FrameCodes, FrameExecutor, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import PagedKV, Placement, SamplingParams
from tests.support.attention_layers import SMALLEST
from tests.support.listened import ListenedCore

FRAME_SECONDS = 0.08
#: Milliseconds of a frame of so many rows, measured on an H200 with the 1.7B.
FRAME_MS = {1: 2.6, 8: 3.1, 32: 4.8, 64: 6.0, 128: 7.5, 256: 10.0, 512: 16.0}
#: Milliseconds of a newcomer's prefill, of each further prompt in it, and of the host in a turn.
PREFILL_MS, COMPANY_MS, HOST_MS = 1.0, 0.4, 0.7
#: From a chunk's frames to its audio: a first chunk's, and a later one's.
CODEC_SECONDS = (0.004, 0.015)
#: Positions of every prompt.
PROMPT = 48


@dataclass(frozen=True, slots=True)
class Words:
    """A prompt."""

    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return PROMPT


class SimulatedSlots:
    """The state of slots, as far as a simulation needs it: how many frames each one's speech has left."""

    def __init__(self, slots: int, frames: dict[int, int]) -> None:
        self.slots = slots
        self.left = [0] * slots
        self.seeds = [0] * slots
        self._frames = frames

    def place(self, newcomers: Sequence[Placement]) -> None:
        for one in newcomers:
            self.left[one.slot] = self._frames[one.seed]
            self.seeds[one.slot] = one.seed

    def write_pages(self, grown: object) -> None:
        """Pages are not written."""

    def write_trailing(self, slot: int, ids: object, start: int) -> None:
        """Text is not written."""


class SimulatedDevice(FrameExecutor):
    """A `FrameExecutor` whose frames and prefills take measured times on a clock of its own."""

    name, reproducible = "simulated", False

    def __init__(self, slots: int, spare_slots: int = 0) -> None:
        """`spare_slots`: slots beside those that have a row in a frame."""
        self.now = 0.0
        #: Rows of all frames together, and how many had a request.
        self.rows = self.taken = 0
        #: Frames of each request by its seed, its last one included, which says that it has ended.
        self.frames_of: dict[int, int] = {}
        #: Codes of codebook 0 of each request by its seed; zeros for others.
        self.codes_of: dict[int, np.ndarray] = {}
        self.batch_sizes = buckets_for(slots)
        self.kv = PagedKV(SMALLEST, (slots + spare_slots) * 8, 64)
        self.state = SimulatedSlots(slots + spare_slots, self.frames_of)  # type: ignore[assignment]
        self._rows = slots
        self._free = 0.0

    def clock(self) -> float:
        return self.now

    def embed(self, prompts: Sequence[object]) -> list[Tensor]:
        return [torch.zeros(PROMPT, 1) for _ in prompts]

    def take_text(self, ids: object) -> None:
        """Text costs nothing."""

    def prepare(self) -> bool:
        return False

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        self._work(PREFILL_MS + COMPANY_MS * (len(runs) - 1))

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        self.now += HOST_MS / 1000
        self.rows += count * self._rows
        self.taken += count * len(slots)
        done = self._work(
            count
            * float(
                np.interp(bucket_of(len(slots), self.batch_sizes), list(FRAME_MS), list(FRAME_MS.values()))
            )
        )
        flags = np.zeros((count, len(slots)), np.uint8)
        codes = np.zeros((count, len(slots), 1), np.int64)
        left = self.state.left
        for row, slot in enumerate(slots):
            if (known := self.codes_of.get(seed := self.state.seeds[slot])) is not None:
                first = self.frames_of[seed] - left[slot]
                codes[:, row, 0] = np.take(known, range(first, first + count), mode="clip")
            left[slot] -= count
            if left[slot] <= 0:
                flags[left[slot] - 1 :, row] = ENDED
        made = FrameCodes(codes, flags, np.zeros(flags.shape, np.float32))

        def pending() -> FrameCodes:
            self.now = max(self.now, done)
            return made

        return pending

    def _work(self, milliseconds: float) -> float:
        self._free = max(self._free, self.now) + milliseconds / 1000
        return self._free


@dataclass(slots=True)
class Listener:
    """What the listener of one stream had: times in seconds, waits before chunks that came too late."""

    came: float
    first: float = -1.0
    #: When everything is heard that was handed on.
    until: float = 0.0
    frames: int = 0
    underruns: list[float] = field(default_factory=list)
    over: bool = False

    def hear(self, frames: int, now: float) -> None:
        arrives = now + CODEC_SECONDS[self.frames > 0]
        if not self.frames:
            self.first = self.until = arrives
        elif arrives > self.until:
            self.underruns.append(arrives - self.until)
        self.frames += frames
        self.until += frames * FRAME_SECONDS


class Simulation:
    """An engine, its streams and its batch work; `run` lets it go on until everything that came is over."""

    def __init__(self, slots: int = 512, stream_slots: int = 0, spare_slots: int = 0) -> None:
        self.device = SimulatedDevice(slots, spare_slots)
        sizes = EngineOptions(
            slots, (slots + spare_slots) * 8, 64, 512, frames_per_turn=2, admit_turns=4, frame_seconds=FRAME_SECONDS,
            stream_slots=stream_slots, spare_slots=spare_slots,
        )  # fmt: skip
        self.core = ListenedCore(self.device, sizes, self, self.device.clock)  # pyright: ignore[reportArgumentType]
        self.listeners: dict[GenerationRequest, Listener] = {}
        #: Frames of whole utterances that are over, and how many were given.
        self.batch_frames = 0
        self.batch_given = 0
        self._events: list[tuple[float, int, int]] = []
        self._sent = 0
        #: Called when a stream is over, with the time.
        self.then: Callable[[float], None] = lambda _: None

    def arrive(self, times: Iterable[float], frames: Callable[[], int]) -> None:
        """Streams that come at these times."""
        for time in times:
            self._sent += 1
            heapq.heappush(self._events, (time, self._sent, frames()))

    def run(self, until: float = float("inf"), batch: Callable[[], int] | None = None) -> None:
        """Goes on until this time, or until nothing is left; `batch` gives the frames of whole utterances,
        of which some always wait."""
        while self.device.now < until and (self._events or self.core.busy or batch):
            if not (self.core.busy or batch):
                self.device.now = max(self.device.now, self._events[0][0])
            while self._events and self._events[0][0] <= self.device.now:
                came, seed, frames = heapq.heappop(self._events)
                self.listeners[self.add(seed, frames, stream=True)] = Listener(came)
            while batch and len(self.core.scheduler.waiting) < 32:
                self._sent += 1
                self.add(self._sent, batch(), stream=False)
                self.batch_given += 1
            self.core.step()

    def add(self, seed: int, frames: int, stream: bool) -> GenerationRequest:
        request = GenerationRequest(str(seed), Words(), SamplingParams(), seed, 400, stream)
        self.device.frames_of[seed] = frames + 1
        self.core.add(request)
        return request

    def frames(self, request: GenerationRequest, codes: np.ndarray) -> None:
        if request.stream:
            self.listeners[request].hear(len(codes), self.device.now)

    def finished(self, request: GenerationRequest, codes: np.ndarray, finish: str) -> None:
        if not request.stream:
            self.batch_frames += len(codes)
            return
        listener = self.listeners[request]
        if len(codes) > listener.frames:
            listener.hear(len(codes) - listener.frames, self.device.now)
        listener.over = True
        self.then(self.device.now)

    def failed(self, request: GenerationRequest, error: Exception) -> None:
        raise error

    def first_chunk_ms(self, percent: float) -> float:
        """This percentile of the time from a request to its first audio."""
        return 1000 * float(
            np.percentile(
                [one.first - one.came for one in self.listeners.values() if one.first >= 0], percent
            )
        )

    def underruns(self) -> int:
        return sum(bool(one.underruns) for one in self.listeners.values())

    def most_listeners(self) -> int:
        """The largest number of streams that were heard at one time."""
        ends = [(one.first, 1) for one in self.listeners.values()] + [
            (one.until, -1) for one in self.listeners.values()
        ]
        return int(np.cumsum([step for _, step in sorted(ends)]).max())
