"""Encodes recordings in batches, with the same result for a recording in any batch, and filters of their
spectra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cuda_graphs import BucketGraphs
from kernels.registry import on_device
from pipelines.codec.transfer import recorded
from pipelines.recording import Batcher

Row = NDArray[Any]

#: cuDNN's convolutions are those of float32, and the same in every run.
EXACT = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)


def rounded(length: int) -> int:
    """The bucket of a length: at most a quarter above it, so that there are few."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step


def mel_filters(bins: int, bands: int, lowest: float, highest: float, sample_rate: int) -> Tensor:
    """Triangular filters of equal area on Slaney's mel scale (Auditory Toolbox, 1998), between two frequencies in
    Hz: float32 [bins, bands]."""
    step = math.log(6.4) / 27

    def mels(hz: float) -> float:
        return 3 * hz / 200 if hz < 1000 else 15 + math.log(hz / 1000) / step

    places = np.linspace(mels(lowest), mels(highest), bands + 2)
    hz = np.where(places < 15, 200 * places / 3, 1000 * np.exp(step * (places - 15)))
    slopes = hz - np.linspace(0, sample_rate // 2, bins)[:, None]
    widths = np.diff(hz)
    filters = np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]).clip(min=0)
    return torch.from_numpy(filters * (2 / (hz[2:] - hz[:-2]))).float()


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
        self.graphs = BucketGraphs(torch.cuda.Stream(device)) if device.type == "cuda" else None
        self._batcher = Batcher[tuple[Encoding, Row], Tensor](
            self.run,
            lambda item: (item[0], item[0].bucket(len(item[1]))),
            lambda bucket: bucket[0].rows(bucket[1]),
        )

    def __call__(self, encoding: Encoding, row: Row, patience: float = 0.0) -> Future[Tensor]:
        """Encodes a row, [length, ...], to a result on the host. Results of padding may follow its own ones.
        `patience`: see `Batcher`."""
        return self._batcher((encoding, row), patience)

    @torch.inference_mode()
    def run(self, items: Sequence[tuple[Encoding, Row]]) -> Sequence[Tensor]:
        encoding = items[0][0]
        rows = [row for _, row in items]
        if (graphs := self.graphs) is None:
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
        with on_device(self._device), torch.cuda.stream(graphs.stream):
            if width > encoding.steps:
                made = encoding.encode(*(one.to(self._device) for one in inputs))
            else:
                made = graphs((encoding, count, width), encoding.encode, *inputs)
            recorded().synchronize()
            return [*made[: len(rows)].cpu()]
