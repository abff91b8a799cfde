"""Passes of a codec as CUDA graphs: one launch for many rows, with states in an arena and samples in pinned
memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY, GraphPool, capture
from kernels.toolchain import triton_fault
from pipelines.codec.batches import FIXED_ROWS
from pipelines.codec.blocks import Past
from pipelines.codec.states import Arena, CodecShape, CodecState
from pipelines.codec.transfer import PendingSamples, Samples, recorded
from pipelines.engine.buckets import Buckets, bucket_of

Codes = NDArray[np.integer[Any]]
#: One pass: codes [B, T, codebooks] -> samples [B, T * samples_per_frame].
Run = Callable[[Tensor, Past], Tensor]

#: Number of host buffers allocated in advance, one for each launch; more are allocated when needed.
_BUFFERS = 4
#: Device memory of a launch: bytes for each sample of a row (measured), and number of copies of a row's state
#: (before, after, one layer's part).
_SAMPLE_BYTES = 700
_STATE_COPIES = 3

#: Numbers of streams and frames that graphs are captured for. Smaller batches are padded with an unused row.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FRAMES = (1, 2, 4, 8, 12)
#: Maximum frames of one launch, all streams together: bounds how long a first chunk waits for the device, and
#: the memory of a launch.
GROUP_FRAMES = 512

#: Frames of a step of whole utterances. An utterance's last step is padded, and its state is read and written
#: once a step.
STEP_FRAMES = 16
#: The number of rows is halved up to this many times for steps of fewer utterances.
_HALVINGS = 4


class Buffer(NamedTuple):
    """Memory for one launch, on the device or pinned on the host: its inputs (int64) and its samples
    (float32)."""

    inputs: Tensor
    samples: Tensor


class ChunkGraphs:
    """Decodes the next frames of rows whose states are in its arena. One thread at a time may use it.

    All work is on one CUDA stream, so that a row's old state is read before its next owner's is written. A
    launch reads one tensor: row numbers, positions (frames decoded before) and codes of its rows.
    """

    def __init__(
        self, run: Run, shape: CodecShape, states: int, rows: Mapping[int, Sequence[int]], priority: int = 0
    ) -> None:
        """`states`: number of rows of the arena. `priority`: priority of the CUDA stream.

        `rows`: the numbers of rows that a launch can have, ascending, for each number of frames. Smaller
        launches are padded with an unused row.
        """
        self._run = run
        self._shape = shape
        self._rows = rows
        self._on_gpu = shape.device.type == "cuda"
        self._stream = torch.cuda.Stream(shape.device, priority=priority) if self._on_gpu else None
        self._pool = GraphPool()
        #: The graphs of each number of frames by their rows.
        self.graphs = {
            frames: Buckets(counts, f"streams of {frames} frames") for frames, counts in rows.items()
        }
        #: (rows, frames) of all graphs, the largest first.
        self.sizes = sorted(
            ((count, frames) for frames, counts in rows.items() for count in counts),
            key=lambda size: -size[0] * size[1],
        )
        with torch.inference_mode(), self.on_stream():
            self.arena = Arena(states, shape.state_size, shape.dtype, shape.device)
            self._on_device = self._buffer(shape.device)
        self.buffers = deque(self._buffer() for _ in range(_BUFFERS))

    def on_stream(self) -> Any:
        """A context manager that makes the CUDA stream of the graphs the current one."""
        return torch.cuda.stream(self._stream)

    @torch.inference_mode()
    def prepare(self, few: bool = False) -> Self:
        """Compiles the kernels and captures graphs, the largest first, so that the others reuse its memory: all
        of them, or only `few`, which hold every launch; the others are then captured by need."""
        sizes = [
            (rows, frames) for rows, frames in self.sizes if not few or rows in self.graphs[frames].first
        ]
        if triton_fault() is None:
            with import_module("kernels.triton_launch").compiled_together(), self.on_stream():
                for size in sizes:
                    self._work(*size)
        for rows, frames in sizes:
            self.graphs[frames].attempt(rows, partial(self._captured, frames))
        if self._stream is not None:
            # Frees memory that was only needed before the captures.
            self._stream.synchronize()
            torch.cuda.empty_cache()
        return self

    def _captured(self, frames: int, rows: int) -> Callable[[], None]:
        with self.on_stream():
            # A capture runs on the unused row.
            inputs = np.zeros(self._inputs_of(rows, frames), np.int64)
            inputs[:rows] = self.arena.dead
            self._on_device.inputs[: len(inputs)].copy_(torch.from_numpy(inputs))
        work = partial(self._work, rows, frames)
        return work if self._stream is None else capture(work, self._pool, self._stream).replay

    def recycle(self, buffers: Sequence[Buffer]) -> None:
        """Returns buffers whose samples were read, so that other launches can use them."""
        self.buffers.extend(buffers)

    def launch(
        self, states: Sequence[CodecState], codes: Sequence[Codes], frames: int
    ) -> tuple[Buffer, list[Samples]]:
        """Starts one launch for chunks of up to `frames` frames. Returns its buffer, and for each chunk the
        part of the buffer that receives its samples."""
        graphs = self.graphs[frames]
        count = len(states)
        # Without memory for a graph, it is launched op by op.
        rows = graphs.choose(count, partial(self._captured, frames)) or bucket_of(count, graphs.sizes)
        buffer = self.buffers.popleft() if self.buffers else self._buffer()
        used = self._inputs_of(rows, frames)
        each = self._shape.samples_per_frame
        # Unused rows are at position 0, so that they read no state.
        inputs = buffer.inputs.numpy()[:used]
        inputs[:] = 0
        inputs[:rows] = self.arena.dead
        packed = inputs[2 * rows :].reshape(rows, frames, -1)
        for at, (state, one) in enumerate(zip(states, codes)):
            assert state.row is not None, "a stream of the graphs has a row"
            inputs[at], inputs[rows + at] = state.row.number, state.frames
            packed[at, : len(one)] = one
        self._on_device.inputs[:used].copy_(buffer.inputs[:used], non_blocking=True)
        graphs.captured.get(rows, partial(self._work, rows, frames))()
        samples = len(states) * frames * each
        buffer.samples[:samples].copy_(self._on_device.samples[:samples], non_blocking=True)
        for state, one in zip(states, codes):
            state.frames += len(one)
        received = buffer.samples.numpy()
        return buffer, [
            received[row * frames * each : (row * frames + len(one)) * each] for row, one in enumerate(codes)
        ]

    def _work(self, rows: int, frames: int) -> None:
        """The work of a graph, all of it on the device."""
        used = self._inputs_of(rows, frames)
        numbers, positions, codes = self._on_device.inputs[:used].split([rows, rows, used - 2 * rows])
        # The state that an earlier owner left in a row is replaced with zeros, since 0 * NaN is NaN.
        before = self.arena.values.index_select(0, numbers).masked_fill_((positions == 0)[:, None], 0)
        past = Past(before, positions)
        waves = self._run(codes.view(rows, frames, -1), past)
        self.arena.values.index_copy_(0, numbers, past.after)
        self._on_device.samples[: waves.numel()].view_as(waves).copy_(waves)

    def _inputs_of(self, rows: int, frames: int) -> int:
        return rows * (2 + frames * self._shape.codes_per_frame)

    def _buffer(self, device: torch.device | None = None) -> Buffer:
        """A buffer for the largest launch, on the device or the host."""
        inputs = max(self._inputs_of(*size) for size in self.sizes)
        samples = max(rows * frames for rows, frames in self.sizes) * self._shape.samples_per_frame
        place = {"device": device, "pin_memory": device is None and self._on_gpu}
        return Buffer(
            torch.zeros(inputs, dtype=torch.int64, **place),
            torch.zeros(samples, dtype=torch.float32, **place),
        )


@lru_cache(4096)
def pieces(frames: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Cuts a chunk into sizes that have a graph: (frames of the chunk, frames of the graph) of each piece.

    Only the last chunk of a stream may be padded, since its state is not used afterwards.
    """
    found = list[tuple[int, int]]()
    while frames:
        filled = next((size for size in FRAMES if size >= frames), None) if last else None
        size = filled or max(size for size in FRAMES if size <= frames)
        found.append((min(frames, size), size))
        frames -= found[-1][0]
    return tuple(found)


class StreamGraphs(ChunkGraphs):
    """Decodes chunks of streams on a CUDA stream of high priority; the sizes of its launches bound how long a
    first chunk waits."""

    def __init__(self, run: Run, shape: CodecShape, streams: int, fixed: bool) -> None:
        """`streams`: number of rows of the arena. `fixed`: all launches have `FIXED_ROWS` rows."""
        largest = next((rows for rows in ROWS if rows >= streams), ROWS[-1])
        counts = (FIXED_ROWS,) if fixed else tuple(rows for rows in ROWS if rows <= largest)
        rows = {
            frames: [rows for rows in counts if rows * frames <= GROUP_FRAMES] or [counts[0]]
            for frames in FRAMES
        }
        super().__init__(run, shape, streams, rows, CHUNK_PRIORITY)

    def batch_key(self, frames: int, last: bool) -> tuple[int, int]:
        """The number of frames of a chunk's first launch, and how many streams can share that launch."""
        size = next((size for _, size in pieces(frames, last)), FRAMES[0])
        return size, self._rows[size][-1]

    def replay(
        self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> tuple[list[list[Samples]], list[Buffer]]:
        """Launches the next frames of streams that have a row, on the current CUDA stream, and advances their
        states.

        codes: [n, codebooks] of each stream, on the host. Returns the parts of each stream's samples, whose transfer
        has started, and the buffers that hold them, which are passed to `recycle` after the samples were
        read.
        """
        parts: list[list[Samples]] = [[] for _ in codes]
        buffers = list[Buffer]()
        plans = [pieces(len(one), final) for one, final in zip(codes, last)]
        left = [one.numpy() for one in codes]
        for turn in range(max(map(len, plans), default=0)):
            by_size = dict[int, list[int]]()
            for index, plan in enumerate(plans):
                if turn < len(plan):
                    by_size.setdefault(plan[turn][1], []).append(index)
            for frames, same in by_size.items():
                limit = self._rows[frames][-1]
                for start in range(0, len(same), limit):
                    group = same[start : start + limit]
                    some = [left[index][: plans[index][turn][0]] for index in group]
                    buffer, received = self.launch([states[index] for index in group], some, frames)
                    buffers.append(buffer)
                    for index, one, samples in zip(group, some, received):
                        parts[index].append(samples)
                        left[index] = left[index][len(one) :]
        return parts, buffers


class UtteranceGraphs(ChunkGraphs):
    """Decodes the next frames of up to `rows` utterances, each in its own row from its first frame to its
    last.

    It is separate from the graphs of streams because a step occupies the device for tens of milliseconds,
    which a chunk of a stream must not wait for, and an arena, its buffers and its graphs belong to one CUDA
    stream.
    """

    def __init__(
        self,
        run: Run,
        shape: CodecShape,
        rows: int,
        frames: int,
        fixed: bool = False,
        check: Callable[[Sequence[Tensor]], None] = lambda _: None,
        make_values: Callable[[Sequence[CodecState]], None] = lambda _: None,
    ) -> None:
        """`fixed`: every step has all rows, so that the kernels do not depend on the other utterances. `check`
        raises for invalid codes. `make_values` makes the values of states that have only codes."""
        counts = (
            (rows,) if fixed else tuple(sorted({max(rows >> halved, 1) for halved in range(_HALVINGS + 1)}))
        )
        super().__init__(run, shape, rows, {frames: counts})
        self.rows = rows
        self.frames = frames
        self.samples_per_frame = shape.samples_per_frame
        self._check = check
        self._make_values = make_values

    @torch.inference_mode()
    def enter(self, codes: Tensor, start: CodecState | None) -> CodecState | None:
        """Gives an utterance [frames, codebooks] a row. Returns its state, a copy of `start`; None if all rows
        are taken.

        Raises `SynthesisError` (`synth.engine`) for codes of another shape or outside the codebooks.
        """
        self._check([codes])
        with self.on_stream():
            state = CodecState() if start is None else start.copy()
            self._make_values([state])
            return state if state.enter(self.arena) else None

    def leave(self, state: CodecState) -> None:
        """Releases the row. Frames already started are decoded."""
        state.close()

    @torch.inference_mode()
    def step(self, states: Sequence[CodecState], codes: Sequence[Codes]) -> PendingSamples:
        """Starts a step and advances the states. codes: [n, codebooks] each, where n is `frames`, or less for
        the last step of an utterance."""
        with self.on_stream():
            buffer, received = self.launch(states, codes, self.frames)
            event = recorded() if self._on_gpu else None
        return PendingSamples([[samples] for samples in received], event, lambda: self.recycle([buffer]))


def _launch_bytes(shape: CodecShape, states: int, rows: int, frames: int) -> int:
    """Bytes of device memory of an arena and of graphs; `rows`, `frames`: rows of the largest launch, and
    frames of all its rows together."""
    state = shape.state_size * shape.dtype.itemsize
    return (
        (states + 1) * state + frames * shape.samples_per_frame * _SAMPLE_BYTES + rows * _STATE_COPIES * state
    )


def stream_bytes(shape: CodecShape, streams: int) -> int:
    """Bytes of device memory of `StreamGraphs`."""
    return _launch_bytes(shape, streams, min(streams, ROWS[-1]), GROUP_FRAMES)


def utterance_bytes(shape: CodecShape, rows: int, frames: int = STEP_FRAMES) -> int:
    """Bytes of device memory of `UtteranceGraphs`."""
    return _launch_bytes(shape, rows, rows, rows * frames)
