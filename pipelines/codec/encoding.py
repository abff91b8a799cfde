"""Encodes recordings in batches, with the same result for a recording in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import GraphPool, capture
from kernels.registry import on_device
from pipelines.codec.transfer import recorded
from pipelines.recording import Batcher

Row = NDArray[Any]

#: cuDNN's convolutions are those of float32, and the same in every run.
EXACT = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
#: Maximum graphs; batches of further buckets are launched op by op.
_MAX_GRAPHS = 128


def rounded(length: int) -> int:
    """The bucket of a length: at most a quarter above it, so that there are few."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


class Encoding(NamedTuple):
    """One encoder. `encode`: rows [rows, width, ...] of these lengths, int64 [rows] (None: no row is padded) ->
    [rows, ...], without waiting for the device."""

    encode: Callable[[Tensor, Tensor | None], Tensor]
    #: Maximum steps of a batch, with padding; a longer row is a batch of its own.
    steps: int
    #: The padded length of a row.
    bucket: Callable[[int], int] = rounded
    #: Maximum rows of a batch.
    most: int = 1 << 16
    #: Whether `encode` itself fills batches up where it works on all rows together.
    fills: bool = False

    def rows(self, width: int) -> int:
        """Rows of a full batch."""
        return max(min(self.steps // width, self.most), 1)


class BatchEncoder:
    """Encodes the rows of several threads in batches, on one thread.

    On a CUDA device rows are padded to the length of their bucket, and all batches of a bucket have equally many
    rows and are one graph launch, so a result does not depend on other rows. Elsewhere each row is encoded alone
    and without padding: in a batch it is rounded differently, and on a CPU a batch is not faster.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = GraphPool()
        #: By encoding, rows and width: the graph, and the memory of its rows, lengths and results.
        self.graphs: dict[tuple[Encoding, int, int], tuple[Tensor, Tensor, torch.cuda.CUDAGraph, Tensor]] = {}
        self._batcher = Batcher[tuple[Encoding, Row], Tensor](
            self.run,
            lambda item: (item[0], item[0].bucket(len(item[1]))),
            lambda bucket: bucket[0].rows(bucket[1]),
        )

    def __call__(self, encoding: Encoding, row: Row) -> Tensor:
        """Encodes a row, [length, ...], to a result on the host. Results of padding may follow its own ones."""
        return self._batcher((encoding, row))

    @torch.inference_mode()
    def run(self, items: Sequence[tuple[Encoding, Row]]) -> Sequence[Tensor]:
        encoding, rows = items[0][0], [row for _, row in items]
        if self.stream is None:
            return [encoding.encode(torch.from_numpy(row)[None], None)[0] for row in rows]
        width = encoding.bucket(len(rows[0]))
        count = encoding.rows(width)
        if encoding.fills:
            count = min(count, 1 << (len(rows) - 1).bit_length())
        padded = np.zeros((count, width, *rows[0].shape[1:]), rows[0].dtype)
        lengths = np.full(len(padded), width)
        for place, row in enumerate(rows):
            padded[place, : len(row)], lengths[place] = row, len(row)
        inputs = torch.from_numpy(padded), torch.from_numpy(lengths)
        with on_device(self._device), torch.cuda.stream(self.stream):
            made = self._encoded(encoding, *inputs)[: len(rows)]
            recorded().synchronize()
            return [*made.cpu()]

    def _encoded(self, encoding: Encoding, rows: Tensor, lengths: Tensor) -> Tensor:
        """The results of a batch, [rows, ...], until the next batch."""
        count, width = rows.shape[:2]
        key = encoding, count, width
        if key not in self.graphs:
            places = rows.to(self._device), lengths.to(self._device)
            work = partial(encoding.encode, *places)
            if width > encoding.steps or len(self.graphs) == _MAX_GRAPHS:
                return work()
            assert self.stream is not None
            made: list[Tensor] = []
            graph = capture(lambda: made.append(work()), self._pool, self.stream)
            self.graphs[key] = *places, graph, made[-1]
        into, lengths_into, graph, result = self.graphs[key]
        into.copy_(rows)
        lengths_into.copy_(lengths)
        graph.replay()
        return result
