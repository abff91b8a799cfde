"""Passes of a codec as CUDA graphs: one launch for many rows, whose states lie in an arena and whose
samples in pinned memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY, GraphPool, capture
from kernels.toolchain import triton_fault
from pipelines.codec.batches import FIXED_ROWS
from pipelines.codec.blocks import Past
from pipelines.codec.states import Arena, CodecShape, CodecState
from pipelines.codec.transfer import Samples, SamplesOnTheWay, recorded

log = logging.getLogger(__name__)

Codes = NDArray[np.integer[Any]]
#: One pass: codes [B, T, codebooks] -> samples [B, T * samples_per_frame].
Run = Callable[[Tensor, Past], Tensor]

#: Launches whose samples have a place on the host at once; more get theirs when they are needed.
_BUFFERS = 4
#: Bytes of a launch for a sample of one row, and for a value of its state: measured, and counted (before,
#: after, one layer's part).
_SAMPLE_BYTES, _STATE_COPIES = 700, 3

#: Streams and frames that a graph is captured for. Fewer streams are filled up with a row that is nobody's.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FRAMES = (1, 2, 4, 8, 12)
#: Frames of all streams of one launch: it bounds how long a first chunk may wait for the device, and the
#: memory of a launch.
GROUP_FRAMES = 512

#: Frames of a step of whole utterances: the last step of one is filled up, and a state is read and written
#: once a step.
STEP_FRAMES = 16
#: A step of few utterances has a half, a quarter ... of the rows, so many times halved at most.
_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of the host for one launch, pinned for a CUDA device: what it reads, int64, and its samples,
    float32."""

    inputs: Tensor
    samples: Tensor


class ChunkGraphs:
    """Decodes the next frames of rows whose states are in its arena. One thread at a time may use it.

    All work is on one CUDA stream, so that what a row held before is read before the next one's values are
    written. A launch reads one tensor: row numbers, positions (frames decoded before) and codes of its
    rows.
    """

    def __init__(
        self, run: Run, shape: CodecShape, states: int, rows: Mapping[int, Sequence[int]], priority: int = 0
    ) -> None:
        """`states`: rows of the arena. `priority`: of the CUDA stream.

        `rows`: for each number of frames of a launch the numbers of rows that it may have, the smallest
        first. A launch of fewer rows is filled up with one that is nobody's.
        """
        self._run, self._shape, self._rows = run, shape, rows
        self._on_gpu = shape.device.type == "cuda"
        self._stream = torch.cuda.Stream(shape.device, priority=priority) if self._on_gpu else None
        self._pool = GraphPool()
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        #: (rows, frames) of all graphs, the largest first.
        self.sizes = sorted(
            ((count, frames) for frames, counts in rows.items() for count in counts),
            key=lambda size: -size[0] * size[1],
        )
        with torch.inference_mode(), self.on_stream():
            self.arena = Arena(states, shape.state_size, shape.dtype, shape.device)
            self._here = self._buffer(shape.device)
        self._buffers = deque(self._buffer() for _ in range(_BUFFERS))

    def on_stream(self) -> Any:
        """Work in a block `with` this is on the CUDA stream of the graphs."""
        return torch.cuda.stream(self._stream)

    @torch.inference_mode()
    def prepare(self) -> Self:
        """Compiles what launches need and captures all of them; the largest first, whose memory the others
        use too."""
        if triton_fault() is None:
            with import_module("kernels.triton_launch").compiled_together(), self.on_stream():
                for size in self.sizes:
                    self._work(*size)
        for rows, frames in self.sizes:
            with self.on_stream():
                # What a capture runs is no stream's.
                inputs = np.zeros(self._inputs_of(rows, frames), np.int64)
                inputs[:rows] = self.arena.dead
                self._here.inputs[: len(inputs)].copy_(torch.from_numpy(inputs))
            work = partial(self._work, rows, frames)
            try:
                self._graphs[rows, frames] = (
                    work if self._stream is None else capture(work, self._pool, self._stream).replay
                )
            except torch.OutOfMemoryError:
                log.warning(
                    "there is no memory for a graph of %d streams of %d frames; it is launched op by op",
                    rows,
                    frames,
                )
        if self._stream is not None:
            # What ran before the captures took memory that nobody needs now.
            self._stream.synchronize()
            torch.cuda.empty_cache()
        return self

    def take_back(self, buffers: Sequence[Buffer]) -> None:
        """Takes buffers back whose samples were read, so that other launches write them."""
        self._buffers.extend(buffers)

    def graph(self, rows: int, frames: int) -> Callable[[], None]:
        """What decodes the chunks that were sent, on the current CUDA stream: a graph, or single ops where
        there is none of this size.

        It reads what was last sent for a launch of this size: of another size the row numbers lie elsewhere.
        """
        return self._graphs.get((rows, frames)) or partial(self._work, rows, frames)

    def launch(
        self, states: Sequence[CodecState], codes: Sequence[Codes], frames: int
    ) -> tuple[Buffer, list[Samples]]:
        """One launch for streams whose chunks have at most so many frames: where the samples of each will
        be, and in which buffer."""
        rows = next(rows for rows in self._rows[frames] if rows >= len(states))
        buffer = self._buffers.popleft() if self._buffers else self._buffer()
        used, each = self._inputs_of(rows, frames), self._shape.samples_per_frame
        self._pack(buffer.inputs.numpy()[:used], rows, frames, states, codes)
        self._here.inputs[:used].copy_(buffer.inputs[:used], non_blocking=True)
        self.graph(rows, frames)()
        self._fetch(buffer, len(states) * frames * each)
        for state, one in zip(states, codes):
            state.frames += len(one)
        heard = buffer.samples.numpy()
        return buffer, [
            heard[row * frames * each : (row * frames + len(one)) * each] for row, one in enumerate(codes)
        ]

    def _pack(
        self, inputs: Codes, rows: int, frames: int, states: Sequence[CodecState], codes: Sequence[Codes]
    ) -> None:
        """Writes what a launch reads: rows that are nobody's stand at their beginning, so that they read
        nothing."""
        inputs[:] = 0
        inputs[:rows] = self.arena.dead
        packed = inputs[2 * rows :].reshape(rows, frames, -1)
        for at, (state, one) in enumerate(zip(states, codes)):
            assert state.row is not None, "a stream of the graphs has a row"
            inputs[at], inputs[rows + at] = state.row.number, state.frames
            packed[at, : len(one)] = one

    def _work(self, rows: int, frames: int) -> None:
        """What a graph does, all of it on the device."""
        used = self._inputs_of(rows, frames)
        numbers, positions, codes = self._here.inputs[:used].split([rows, rows, used - 2 * rows])
        # What a row held before its stream is not read, whatever it is: it is replaced, since nothing times
        # NaN is NaN.
        before = self.arena.values.index_select(0, numbers).masked_fill_((positions == 0)[:, None], 0)
        past = Past(before, positions)
        waves = self._run(codes.view(rows, frames, -1), past)
        self.arena.values.index_copy_(0, numbers, past.after)
        self._here.samples[: waves.numel()].view_as(waves).copy_(waves)

    def _fetch(self, buffer: Buffer, samples: int) -> None:
        """Sends so many samples on their way to the host."""
        buffer.samples[:samples].copy_(self._here.samples[:samples], non_blocking=True)

    def _inputs_of(self, rows: int, frames: int) -> int:
        return rows * (2 + frames * self._shape.codes_per_frame)

    def _buffer(self, device: torch.device | None = None) -> Buffer:
        """Room for the largest launch, on the device or the host."""
        inputs = max(self._inputs_of(*size) for size in self.sizes)
        samples = max(rows * frames for rows, frames in self.sizes) * self._shape.samples_per_frame
        place: Any = {"device": device, "pin_memory": device is None and self._on_gpu}
        return Buffer(
            torch.zeros(inputs, dtype=torch.int64, **place),
            torch.zeros(samples, dtype=torch.float32, **place),
        )


@lru_cache(4096)
def pieces(frames: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Cuts a chunk into sizes that have a graph: frames of the chunk, and frames of the graph, for each in
    turn.

    Only the last chunk of a stream may be filled up: what its state is afterwards matters to nobody.
    """
    found: list[tuple[int, int]] = []
    while frames:
        filled = next((size for size in FRAMES if size >= frames), None) if last else None
        size = filled or max(size for size in FRAMES if size <= frames)
        found.append((min(frames, size), size))
        frames -= found[-1][0]
    return tuple(found)


class StreamGraphs(ChunkGraphs):
    """Decodes chunks of streams, on a CUDA stream of high priority, in sizes that bound how long a first
    chunk waits."""

    def __init__(
        self, run: Run, shape: CodecShape, streams: int, fixed: bool = False, group_frames: int = GROUP_FRAMES
    ) -> None:
        """`streams`: rows of the arena. `fixed`: all launches have `FIXED_ROWS` rows."""
        most = next((rows for rows in ROWS if rows >= streams), ROWS[-1])
        counts = (FIXED_ROWS,) if fixed else tuple(rows for rows in ROWS if rows <= most)
        rows = {
            frames: [rows for rows in counts if rows * frames <= group_frames] or [counts[0]]
            for frames in FRAMES
        }
        super().__init__(run, shape, streams, rows, CHUNK_PRIORITY)

    def company(self, frames: int, last: bool) -> tuple[int, int]:
        """Frames of the first launch of a chunk, and how many streams can share it."""
        size = next((size for _, size in pieces(frames, last)), FRAMES[0])
        return size, self._rows[size][-1]

    def replay(
        self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> tuple[list[list[Samples]], list[Buffer]]:
        """Launches the next frames of streams that have a row, on the current CUDA stream, and moves their
        states on.

        codes: one [n, codebooks] each, on the host. Returns for each stream the parts of its samples, on
        their way to the host, and the buffers that they lie in, for `take_back` once they were read.
        """
        parts: list[list[Samples]] = [[] for _ in codes]
        buffers: list[Buffer] = []
        plans = [pieces(len(one), final) for one, final in zip(codes, last)]
        left = [one.numpy() for one in codes]
        for turn in range(max(map(len, plans), default=0)):
            alike: dict[int, list[int]] = {}
            for index, plan in enumerate(plans):
                if turn < len(plan):
                    alike.setdefault(plan[turn][1], []).append(index)
            for frames, same in alike.items():
                limit = self._rows[frames][-1]
                for start in range(0, len(same), limit):
                    group = same[start : start + limit]
                    some = [left[index][: plans[index][turn][0]] for index in group]
                    buffer, heard = self.launch([states[index] for index in group], some, frames)
                    buffers.append(buffer)
                    for index, one, samples in zip(group, some, heard):
                        parts[index].append(samples)
                        left[index] = left[index][len(one) :]
        return parts, buffers


class UtteranceGraphs(ChunkGraphs):
    """Decodes the next frames of up to `rows` utterances, each in a row of its own from its first frame to
    its last.

    The machinery is that of streams, of which this is a second set: a step fills the device for tens of
    milliseconds, which a chunk of a stream may not wait for, and an arena, its buffers and its graphs
    belong to one CUDA stream.
    """

    def __init__(
        self,
        run: Run,
        shape: CodecShape,
        rows: int,
        frames: int = STEP_FRAMES,
        fixed: bool = False,
        check: Callable[[Sequence[Tensor]], None] = lambda _: None,
    ) -> None:
        """`fixed`: every step has all rows, so that an utterance meets the same kernels in any company.
        `check` raises for wrong codes."""
        counts = (
            (rows,) if fixed else tuple(sorted({max(rows >> halved, 1) for halved in range(_HALVINGS + 1)}))
        )
        super().__init__(run, shape, rows, {frames: counts})
        self.rows, self.frames, self.samples_per_frame = rows, frames, shape.samples_per_frame
        self._check = check

    @torch.inference_mode()
    def enter(self, codes: Tensor, start: CodecState | None) -> CodecState | None:
        """The state, in a row of its own, of an utterance [frames, codebooks] that follows `start`, which
        stays as it is.

        None where all rows are taken. Raises `SynthesisError` (`synth.engine`) for codes of another shape
        or outside the codebooks.
        """
        self._check([codes])
        state = CodecState() if start is None else start.copy()
        with self.on_stream():
            return state if state.enter(self.arena) else None

    def leave(self, state: CodecState) -> None:
        """Gives the row back. What was started for it before is decoded."""
        state.close()

    @torch.inference_mode()
    def step(self, states: Sequence[CodecState], codes: Sequence[Codes]) -> SamplesOnTheWay:
        """Starts a step and moves the states on. codes: [n, codebooks] each, n at most `frames`; fewer
        only at the end of an utterance."""
        with self.on_stream():
            buffer, heard = self.launch(states, codes, self.frames)
            event = recorded() if self._on_gpu else None
        return SamplesOnTheWay([[samples] for samples in heard], event, lambda: self.take_back([buffer]))


def _launch_bytes(shape: CodecShape, states: int, rows: int, frames: int) -> int:
    """Bytes of device memory of an arena of so many states and graphs of at most so many rows, and frames
    of all rows together."""
    state = shape.state_size * shape.dtype.itemsize
    return (
        (states + 1) * state + frames * shape.samples_per_frame * _SAMPLE_BYTES + rows * _STATE_COPIES * state
    )


def stream_bytes(shape: CodecShape, streams: int) -> int:
    """Bytes of device memory of the graphs of so many streams: their arena, and what one launch has at
    once."""
    return _launch_bytes(shape, streams, min(max(streams, 1), ROWS[-1]), GROUP_FRAMES)


def utterance_bytes(shape: CodecShape, rows: int, frames: int = STEP_FRAMES) -> int:
    """Bytes of device memory of the graphs of so many rows: their arena, and what one step has at once."""
    return _launch_bytes(shape, rows, rows, rows * frames)
