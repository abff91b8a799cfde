"""Prefill attention of many runs in one call equals that of each run alone."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import PackedRuns, paged_prefill_attention


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_packed_runs_equal_runs_alone(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    draw = torch.Generator().manual_seed(0)
    page, heads, kv_heads, dim = 8, 4, 2, 16
    starts, counts = [0, 0, 8, 0, 40], [5, 17, 9, 1, 11]
    k, v = (torch.randn(40, kv_heads, page, dim, generator=draw) for _ in range(2))
    table = torch.zeros(len(starts), 10, dtype=torch.int64)
    free = iter(torch.randperm(39, generator=draw) + 1)
    for run, (start, count) in enumerate(zip(starts, counts)):
        for index in range(-(-(start + count) // page)):
            table[run, index] = next(free)
    q = torch.randn(sum(counts), heads, dim, generator=draw)
    q, k, v, table = (made.to(device) for made in (q, k, v, table))
    lengths = [start + count for start, count in zip(starts, counts)]
    alone = paged_prefill_attention(q, k, v, table, counts, lengths, 0.25)
    packed = PackedRuns(table, starts, counts, page).attend(q, k, v, 0.25)
    torch.testing.assert_close(packed, alone)
