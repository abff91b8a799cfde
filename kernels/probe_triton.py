"""The smallest kernel: Triton can make kernels where this one runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_one(out):
    tl.store(out, 1)


def check() -> None:
    """Compiles and runs a kernel on the current CUDA device. Raises what Triton, its C compiler or the driver raises."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran and did nothing")
