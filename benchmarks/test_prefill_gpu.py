"""What is timed: rows that are full, of prompts whose pages no other one has."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.prefill_gpu import PAGE, SCRATCH, prompts_of


@pytest.mark.parametrize(("total", "length"), [(512, 36), (512, 228), (64, 64), (10, 36)])
def test_prompts_fill_a_row(total: int, length: int) -> None:
    prompts, pages = prompts_of(total, length, torch.device("cpu"))
    assert int(prompts.counts.sum()) == total
    assert set(prompts.counts.tolist()[:-1]) <= {length}
    _, held, offsets = prompts.places(total, PAGE, SCRATCH)
    cells = (held * PAGE + offsets).tolist()
    assert len(set(cells)) == total
    assert min(cells) >= PAGE
    assert int(held.max()) < pages
