"""Passes of a codec as CUDA graphs: one launch for many rows, whose states lie in an arena and whose samples in pinned memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import GraphPool, capture
from kernels.toolchain import triton_fault
from pipelines.codec.blocks import Past
from pipelines.codec.states import Arena, CodecShape, CodecState
from pipelines.codec.transfer import Samples

log = logging.getLogger(__name__)

Codes = NDArray[np.integer[Any]]

#: Launches whose samples have a place on the host at once; more get theirs when they are needed.
_BUFFERS = 4
#: Bytes of a launch for a sample of one row, and for a value of its state: measured, and counted (before, after, one layer's part).
_SAMPLE_BYTES, _STATE_COPIES = 700, 3


class Buffer:
    """Memory of the host for one launch: what it reads, int64, and its samples; pinned for a CUDA device."""

    def __init__(self, inputs: int, samples: int, pin: bool) -> None:
        self.inputs = torch.zeros(inputs, dtype=torch.int64, pin_memory=pin)
        self.samples = torch.zeros(samples, dtype=torch.float32, pin_memory=pin)
        #: The same memory.
        self.read, self.heard = self.inputs.numpy(), self.samples.numpy()


class ChunkGraphs:
    """Decodes the next frames of rows whose states are in its arena. One thread at a time may use it.

    All work is on one CUDA stream, so that what a row held before is read before the next one's values are written.
    A launch reads one tensor: row numbers, positions (frames decoded before) and codes of its rows.
    """

    def __init__(
        self, run: Callable[[Tensor, Past], Tensor], shape: CodecShape, states: int, rows: Mapping[int, Sequence[int]], priority: int = 0
    ) -> None:
        """`run`: one pass, codes [B, T, codebooks] -> samples [B, T * samples_per_frame]. `states`: rows of the arena.

        `rows`: for each number of frames of a launch the numbers of rows that it may have, the smallest first. A launch of fewer rows is
        filled up with one that is nobody's. `priority`: of the CUDA stream.
        """
        self._run, self._shape = run, shape
        on_gpu = shape.device.type == "cuda"
        self._stream = torch.cuda.Stream(shape.device, priority=priority) if on_gpu else None
        self._pool = GraphPool()
        self._rows = rows
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        inputs = max(self._inputs_of(*size) for size in self.sizes)
        samples = max(rows * frames for rows, frames in self.sizes) * shape.samples_per_frame
        with torch.inference_mode(), self.on_stream():
            self.arena = Arena(states, shape.state_size, shape.dtype, shape.device)
            self._inputs = torch.zeros(inputs, dtype=torch.int64, device=shape.device)
            self._samples = torch.zeros(samples, dtype=torch.float32, device=shape.device)
        self._buffers = deque(self._new_buffer() for _ in range(_BUFFERS))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(rows, frames) of all graphs, the largest first."""
        return sorted(((rows, frames) for frames, counts in self._rows.items() for rows in counts), key=lambda size: -size[0] * size[1])

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work in this block is on the CUDA stream of the graphs."""
        with torch.cuda.stream(self._stream):
            yield

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compiles what launches need and captures all of them; the largest first, whose memory the others use too."""
        if triton_fault() is None:
            with import_module("kernels.triton_launch").compiled_together(), self.on_stream():
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

    def take_back(self, buffers: Sequence[Any]) -> None:
        """Takes buffers back whose samples were read, so that other launches write them."""
        self._buffers.extend(buffers)

    def graph(self, rows: int, frames: int) -> Callable[[], None]:
        """What decodes the chunks that were sent, on the current CUDA stream: a graph, or single ops where there is none of this size.

        It reads what was last sent for a launch of this size: of another size the row numbers lie elsewhere.
        """
        return self._graphs.get((rows, frames)) or partial(self._work, rows, frames)

    def launch(self, states: Sequence[CodecState], codes: Sequence[Codes], frames: int) -> Buffer:
        """One launch for streams whose chunks have at most so many frames; its samples are on their way to the buffer."""
        rows = next(rows for rows in self._rows[frames] if rows >= len(states))
        buffer = self._free_buffer()
        used = self._inputs_of(rows, frames)
        self._pack(buffer.read[:used], rows, frames, states, codes)
        self._inputs[:used].copy_(buffer.inputs[:used], non_blocking=True)
        self.graph(rows, frames)()
        self._fetch(buffer, len(states) * frames * self._shape.samples_per_frame)
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

    def _fetch(self, buffer: Buffer, samples: int) -> None:
        """Sends so many samples on their way to the host."""
        buffer.samples[:samples].copy_(self._samples[:samples], non_blocking=True)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats this work."""
        if self._stream is None:
            return work
        return capture(work, self._pool, self._stream).replay

    def heard(self, buffer: Buffer, row: int, frames: int, taken: int) -> Samples:
        """Where the samples of one stream will be."""
        each = self._shape.samples_per_frame
        return buffer.heard[row * frames * each : (row * frames + taken) * each]

    def _inputs_of(self, rows: int, frames: int) -> int:
        return rows * (2 + frames * self._codes_per_frame)

    @property
    def _codes_per_frame(self) -> int:
        return self._shape.codes_per_frame

    def _new_buffer(self) -> Buffer:
        return Buffer(len(self._inputs), len(self._samples), self._stream is not None)

    def _free_buffer(self) -> Buffer:
        try:
            return self._buffers.popleft()
        except IndexError:
            return self._new_buffer()


def launch_bytes(shape: CodecShape, states: int, rows: int, frames: int) -> int:
    """Bytes of device memory of an arena of so many states and graphs of at most so many rows, and frames of all rows together."""
    state = shape.state_size * shape.dtype.itemsize
    return (states + 1) * state + frames * shape.samples_per_frame * _SAMPLE_BYTES + rows * _STATE_COPIES * state
