"""Batches of recordings: which rows share one, and that each thread gets the result of its own row."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

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
        for row, made in zip(rows, pool.map(lambda row: batches(encoding, row), rows)):
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

    batcher = Batcher[int, int](run, lambda item: item % 2, rows=lambda odd: 2 + odd, name="test")  # pyright: ignore[reportArgumentType]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(batcher, 0)
        started.wait()
        later = {}
        for count, item in enumerate((1, 2, 3, 4, 13, 6, 7), 1):
            later[item] = pool.submit(batcher, item)
            while len(batcher._waiting) < count:
                pass
        go_on.set()
        assert first.result() == 0
        assert [later[item].result() for item in (2, 4, 6, 7)] == [-2, -4, -6, -7]
        for item in (1, 3, 13):
            with pytest.raises(ValueError, match="13"):
                later[item].result()
    assert batches == [[0], [1, 3, 13], [2, 4], [6], [7]]
