"""The energy counter of a real board."""

from __future__ import annotations

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from pipelines.energy import board_joules

pytestmark = pytest.mark.gpu
SECONDS, LEAST_WATTS, MOST_WATTS = 2.0, 20.0, 2000.0


def watts(work: bool) -> float:
    """Mean power by the counter while products run, or nothing does."""
    rows = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    before, began = board_joules(), time.monotonic()
    assert before is not None
    while time.monotonic() < began + SECONDS:
        if work:
            for _ in range(20):
                rows @ rows
            torch.cuda.synchronize()
        time.sleep(0.001)
    after, took = board_joules(), time.monotonic() - began
    assert after is not None
    return (after - before) / took


def test_work_takes_more_power_than_rest() -> None:
    torch.zeros(1, device="cuda")
    rest, work = watts(work=False), watts(work=True)
    assert LEAST_WATTS < rest < work < MOST_WATTS
    assert work > 1.3 * rest
