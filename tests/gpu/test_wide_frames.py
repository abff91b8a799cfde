"""Fused frames of more than 512 rows against their twin: on a GPU, or small, with TRITON_INTERPRET=1, on a
CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.lm_frame import Plan
from tests.support import lm_checks
from tests.support.lm_tensors import TINY, Maker

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]


#: Slots of the frame, which has two rows more, of no slot.
SLOTS = 1010 if INTERPRETED else 1022
#: Rows that the interpreter runs, which takes milliseconds for each: some, the first ones behind 512, and the
#: last ones.
SOME = (*range(0, SLOTS, 43), 511, 512, 513, SLOTS - 1, SLOTS, SLOTS + 1)


def run_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no programs for other rows than `SOME`."""
    rows = SLOTS + 2

    def programs(count: int, *more: int) -> Iterable[int]:
        return (
            [at + row for at in range(0, count, rows) for row in SOME]
            if count in (rows, 2 * rows)
            else range(count, *more)
        )

    monkeypatch.setattr("triton.runtime.interpreter.range", programs, raising=False)


@torch.inference_mode()
def test_float32_frames_of_more_rows_than_the_largest_default_bucket_draw_the_codes_of_the_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {
        "hidden": 32,
        "inter": 32,
        "width": 32,
        "width_inter": 32,
        "vocab": 32,
        "control": 8,
        "codes": 16,
        "codebooks": 2,
    }
    shape = dataclasses.replace(TINY, layers=1, predictor_layers=1, heads=2, kv_heads=1, head_dim=16, **small)
    torch.backends.cuda.matmul.allow_tf32 = False
    maker = Maker("cpu" if INTERPRETED else "cuda", torch.float32, seed=4)
    plan = Plan(splits=((1 << 30, 1),), pdl=not INTERPRETED)
    if INTERPRETED:
        run_some(monkeypatch)
    assert lm_checks.check_frame(
        maker, shape, SLOTS, plan, "wide", True, 1, 14, SOME if INTERPRETED else None
    )
