"""Chunks of many streams as CUDA graphs: one launch for a batch, its states in an arena, its samples in pinned memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import CHUNK_PRIORITY, capture
from kernels.toolchain import triton_fault
from pipelines.codec.batches import FIXED_ROWS
from pipelines.codec.blocks import Past
from pipelines.codec.states import Arena, CodecShape, CodecState
from pipelines.codec.transfer import Samples

log = logging.getLogger(__name__)

Codes = NDArray[np.integer[Any]]

#: Streams and frames that a graph is captured for. Fewer streams are filled up with a row that is nobody's.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FRAMES = (1, 2, 4, 8, 12)
#: Frames of all streams of one launch: it bounds how long a first chunk may wait for the device, and the memory of a launch.
GROUP_FRAMES = 512
#: Launches whose samples have a place on the host at once; more get theirs when they are needed.
_BUFFERS = 4
#: Bytes of a launch for a sample of one stream, and for a value of its state: measured, and counted (before, after, one layer's part).
_SAMPLE_BYTES, _STATE_COPIES = 700, 3


@lru_cache(4096)
def pieces(frames: int, last: bool) -> tuple[tuple[int, int], ...]:
    """Cuts a chunk into sizes that have a graph: frames of the chunk, and frames of the graph, for each in turn.

    Only the last chunk of a stream may be filled up: what its state is afterwards matters to nobody.
    """
    found: list[tuple[int, int]] = []
    while frames:
        filled = next((size for size in FRAMES if size >= frames), None) if last else None
        size = filled or max(size for size in FRAMES if size <= frames)
        found.append((min(frames, size), size))
        frames -= found[-1][0]
    return tuple(found)


class _Buffer:
    """Memory of the host for one launch: what it reads, int64, and its samples; pinned for a CUDA device."""

    def __init__(self, inputs: int, samples: int, pin: bool) -> None:
        self.inputs = torch.zeros(inputs, dtype=torch.int64, pin_memory=pin)
        self.samples = torch.zeros(samples, dtype=torch.float32, pin_memory=pin)
        #: The same memory.
        self.read, self.heard = self.inputs.numpy(), self.samples.numpy()


class StreamGraphs:
    """Decodes chunks of streams whose states are in its arena. One thread at a time may use it.

    All work is on one CUDA stream of high priority, so that what a row held before is read before the next stream's values are written.
    A launch reads one tensor: row numbers, positions (frames decoded before) and codes of its streams.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Past], Tensor],
        shape: CodecShape,
        streams: int,
        fixed: bool = False,
        group_frames: int = GROUP_FRAMES,
    ) -> None:
        """`run`: one pass, codes [B, T, codebooks] -> samples [B, T * samples_per_frame]. `fixed`: all launches have `FIXED_ROWS` rows."""
        self._run, self._shape = run, shape
        on_gpu = shape.device.type == "cuda"
        self._stream = torch.cuda.Stream(shape.device, priority=CHUNK_PRIORITY) if on_gpu else None
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        most = next((rows for rows in ROWS if rows >= streams), ROWS[-1])
        counts = (FIXED_ROWS,) if fixed else tuple(rows for rows in ROWS if rows <= most)
        #: The numbers of rows of launches of so many frames.
        self._rows = {frames: [rows for rows in counts if rows * frames <= group_frames] or [counts[0]] for frames in FRAMES}
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        inputs = max(self._inputs_of(*size) for size in self.sizes)
        samples = max(rows * frames for rows, frames in self.sizes) * shape.samples_per_frame
        with torch.inference_mode(), self.on_stream():
            self.arena = Arena(streams, shape.state_size, shape.dtype, shape.device)
            self._inputs = torch.zeros(inputs, dtype=torch.int64, device=shape.device)
            self._samples = torch.zeros(samples, dtype=torch.float32, device=shape.device)
        self._buffers = deque(self._new_buffer() for _ in range(_BUFFERS))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(rows, frames) of all graphs, the largest first."""
        return sorted(((rows, frames) for frames, counts in self._rows.items() for rows in counts), key=lambda size: -size[0] * size[1])

    def company(self, frames: int, last: bool) -> tuple[int, int]:
        """Frames of the first launch of a chunk, and how many streams can share it."""
        size = next((size for _, size in pieces(frames, last)), FRAMES[0])
        return size, self._rows[size][-1]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work in this block is on the CUDA stream of the graphs."""
        with torch.cuda.stream(self._stream):
            yield

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compiles what launches need and captures all of them; the largest first, whose memory the others use too."""
        if triton_fault() is None:
            with import_module("kernels.compile_together").compiled_together(), self.on_stream():
                for size in self.sizes:
                    self._work(*size)
        for rows, frames in self.sizes:
            with self.on_stream():
                # What a capture runs is no stream's.
                inputs = np.zeros(self._inputs_of(rows, frames), np.int64)
                inputs[:rows] = self.arena.dead
                self._inputs[: len(inputs)].copy_(torch.from_numpy(inputs))
            try:
                self._graphs[rows, frames] = self._captured(lambda rows=rows, frames=frames: self._work(rows, frames))
            except torch.OutOfMemoryError:
                log.warning("there is no memory for a graph of %d streams of %d frames; it is launched op by op", rows, frames)
        if self._stream is not None:
            # What ran before the captures took memory that nobody needs now.
            self._stream.synchronize()
            torch.cuda.empty_cache()

    def replay(self, states: Sequence[CodecState], codes: Sequence[Tensor], last: Sequence[bool]) -> tuple[list[list[Samples]], list[Any]]:
        """Launches the next frames of streams that have a row, on the current CUDA stream, and moves their states on.

        codes: one [n, codebooks] each, on the host. Returns for each stream the parts of its samples, on their way to the host, and the
        buffers that they lie in, for `take_back` once they were read.
        """
        parts: list[list[Samples]] = [[] for _ in codes]
        buffers: list[Any] = []
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
                    taken = [plans[index][turn][0] for index in group]
                    some = [left[index][:count] for index, count in zip(group, taken)]
                    buffer = self._launch([states[index] for index in group], some, frames)
                    buffers.append(buffer)
                    for row, (index, count) in enumerate(zip(group, taken)):
                        parts[index].append(self._heard(buffer, row, frames, count))
                        left[index] = left[index][count:]
        return parts, buffers

    def take_back(self, buffers: Sequence[Any]) -> None:
        """Takes buffers back whose samples were read, so that other launches write them."""
        self._buffers.extend(buffers)

    def graph(self, rows: int, frames: int) -> Callable[[], None]:
        """What decodes the chunks that were sent, on the current CUDA stream: a graph, or single ops where there is none of this size."""
        return self._graphs.get((rows, frames)) or partial(self._work, rows, frames)

    def _launch(self, states: Sequence[CodecState], codes: Sequence[Codes], frames: int) -> _Buffer:
        """One launch for streams whose chunks have at most so many frames; its samples are on their way to the buffer."""
        rows = next(rows for rows in self._rows[frames] if rows >= len(states))
        buffer = self._free_buffer()
        used = self._inputs_of(rows, frames)
        self._pack(buffer.read[:used], rows, frames, states, codes)
        self._inputs[:used].copy_(buffer.inputs[:used], non_blocking=True)
        self.graph(rows, frames)()
        heard = len(states) * frames * self._shape.samples_per_frame
        buffer.samples[:heard].copy_(self._samples[:heard], non_blocking=True)
        for state, one in zip(states, codes):
            state.frames += len(one)
        return buffer

    def _pack(self, inputs: Codes, rows: int, frames: int, states: Sequence[CodecState], codes: Sequence[Codes]) -> None:
        """Writes what a launch reads: rows that are nobody's stand at their beginning, so that they read nothing."""
        inputs[:] = 0
        inputs[:rows] = self.arena.dead
        packed = inputs[2 * rows :].reshape(rows, frames, -1)
        for at, (state, one) in enumerate(zip(states, codes)):
            assert state.row is not None, "a stream of the graphs has a row"
            inputs[at], inputs[rows + at] = state.row.number, state.frames
            packed[at, : len(one)] = one

    def _work(self, rows: int, frames: int) -> None:
        """What a graph does, all of it on the device."""
        numbers, positions, codes = self._inputs[: self._inputs_of(rows, frames)].split([rows, rows, rows * frames * self._codes_per_frame])
        # What a row held before its stream is not read, whatever it is: it is replaced, since nothing times NaN is NaN.
        before = self.arena.values.index_select(0, numbers).masked_fill_((positions == 0)[:, None], 0)
        past = Past(before, positions)
        waves = self._run(codes.view(rows, frames, -1), past)
        self.arena.values.index_copy_(0, numbers, past.after)
        self._samples[: waves.numel()].view_as(waves).copy_(waves)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats this work."""
        if self._stream is None:
            return work
        return capture(work, self._pool, self._stream).replay

    def _heard(self, buffer: _Buffer, row: int, frames: int, taken: int) -> Samples:
        """Where the samples of one stream will be."""
        each = self._shape.samples_per_frame
        return buffer.heard[row * frames * each : (row * frames + taken) * each]

    def _inputs_of(self, rows: int, frames: int) -> int:
        return rows * (2 + frames * self._codes_per_frame)

    @property
    def _codes_per_frame(self) -> int:
        return self._shape.codes_per_frame

    def _new_buffer(self) -> _Buffer:
        return _Buffer(len(self._inputs), len(self._samples), self._stream is not None)

    def _free_buffer(self) -> _Buffer:
        try:
            return self._buffers.popleft()
        except IndexError:
            return self._new_buffer()


def graph_bytes(shape: CodecShape, streams: int) -> int:
    """Bytes of device memory of the graphs of so many streams: their arena, and what one launch has at once."""
    state = shape.state_size * shape.dtype.itemsize
    launched = GROUP_FRAMES * shape.samples_per_frame * _SAMPLE_BYTES + min(max(streams, 1), ROWS[-1]) * _STATE_COPIES * state
    return (streams + 1) * state + launched
