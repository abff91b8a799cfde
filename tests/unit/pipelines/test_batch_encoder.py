"""Batches of recordings: which rows share one, and that each thread gets the result of its own row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import cuda_graphs
from pipelines.codec import encoding as encoding_module
from pipelines.codec.encoding import BatchEncoder, Encoding, rounded
from pipelines.recording import Batcher


def test_buckets_are_few_and_at_most_a_quarter_longer() -> None:
    lengths = range(1, 1 << 16)
    assert all(length <= rounded(length) <= 1.25 * length or length < 4 for length in lengths)
    assert {rounded(rounded(length)) for length in lengths} == {rounded(length) for length in lengths}
    assert len({rounded(length) for length in lengths}) < 70


def test_every_thread_gets_the_result_of_its_row_which_is_not_padded_on_a_cpu() -> None:
    shapes: list[tuple[int, ...]] = []

    def encode(rows: Tensor, lengths: Tensor | None) -> Tensor:
        assert lengths is None
        shapes.append(tuple(rows.shape))
        return rows.cumsum(1)

    batches, encoding = BatchEncoder(torch.device("cpu")), Encoding(encode, 100)
    with ThreadPoolExecutor(8) as pool:
        rows = [np.full(10 + index, index, np.float32) for index in range(40)]
        for row, made in zip(rows, pool.map(lambda row: batches(encoding, row).result(), rows)):
            np.testing.assert_array_equal(made.numpy(), row.cumsum())
    assert sorted(shapes) == [(1, 10 + index) for index in range(40)]


def test_waiting_calls_of_a_bucket_run_together_and_share_its_error() -> None:
    batches: list[list[int]] = []
    started, go_on = threading.Event(), threading.Event()

    def run(items: list[int]) -> list[int]:
        batches.append(items)
        started.set()
        go_on.wait()
        if 13 in items:
            raise ValueError("13")
        return [-item for item in items]

    batcher = Batcher[int, int](run, lambda item: item % 2, lambda odd: 2 + odd)  # pyright: ignore[reportArgumentType]
    first = batcher(0)
    started.wait()
    later = {item: batcher(item) for item in (1, 2, 3, 4, 13, 6, 7)}
    go_on.set()
    assert first.result() == 0
    assert [later[item].result() for item in (2, 4, 6, 7)] == [-2, -4, -6, -7]
    for item in (1, 3, 13):
        with pytest.raises(ValueError, match="13"):
            later[item].result()
    assert batches == [[0], [1, 3, 13], [2, 4], [6], [7]]


class Replayed:
    """A graph on a CPU: runs the work on what its memory holds, and writes the result where the first was."""

    def __init__(self, work: Callable[[], None], *_: object) -> None:
        made: list[Tensor] = work.__closure__[0].cell_contents  # pyright: ignore[reportOptionalSubscript]
        work()
        self.result, self.work, self.made = made[-1], work, made

    def replay(self) -> None:
        self.work()
        self.result.copy_(self.made[-1])


def test_batches_of_a_device_have_one_shape_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: rows are filled up with zeros, and only rows that are longer than a batch have no graph."""
    seen: list[tuple[tuple[int, ...], list[int]]] = []

    def encode(rows: Tensor, lengths: Tensor | None) -> Tensor:
        assert lengths is not None
        seen.append((tuple(rows.shape), lengths.tolist()))
        return rows.cumsum(1)

    monkeypatch.setattr(cuda_graphs, "capture", Replayed)
    monkeypatch.setattr(encoding_module, "recorded", MagicMock())
    batches, encoding = BatchEncoder(torch.device("cpu")), Encoding(encode, 64)
    stream = MagicMock(device=torch.device("cpu"))
    batches.graphs = graphs = cuda_graphs.BucketGraphs(stream)
    for lengths in ([13, 14, 13], [14], [30], [100]):
        rows = [np.full(length, place + length, np.float32) for place, length in enumerate(lengths)]
        for row, made in zip(rows, batches.run([(encoding, row) for row in rows]), strict=True):
            np.testing.assert_array_equal(made[: len(row)].numpy(), row.cumsum())
    assert seen[-1] == ((1, 112), [100])
    assert ((4, 14), [13, 14, 13, 14]) in seen
    assert [one for one in seen if one[0][1] == 14][-1] == ((4, 14), [14, 14, 14, 14])
    assert {shape for shape, _ in seen} == {(4, 14), (2, 32), (1, 112)}
    assert len(graphs.graphs) == 2
