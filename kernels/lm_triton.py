"""Triton kernels between the matrix products of a decoder layer; each has its twin in PyTorch.

Rounding points are the reference's: every value that it stores in the model's type is rounded here at the same place.
Launchers take `pdl`: the kernel may start while the one before it still runs and waits before it reads anything.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false


def launch(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that waits by itself for the one before it."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _add_norm(x, y, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    scale = tl.load(weight + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(y + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + row * WIDTH + at, value, mask=inside)
    wide = value.to(tl.float32)
    normed = (wide * tl.math.rsqrt(tl.sum(wide * wide) / WIDTH + eps)).to(value.dtype)
    tl.store(out + row * WIDTH + at, (normed.to(tl.float32) * scale.to(tl.float32)).to(value.dtype), mask=inside)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out: Tensor, pdl: bool = False, early: bool = False) -> Tensor:
    """x += y (where given, in place), then RMSNorm of x into `out`. x, y, out: contiguous [rows, width]; weight: [width]; early: the kernel
    behind may start early, even if this one does not."""
    rows, width = x.shape
    block, added = triton.next_power_of_2(width), y is not None
    _add_norm[(rows,)](x, x if y is None else y, weight, out, eps, width, block, added, pdl or early, num_warps=4, **launch(pdl))
    return out


@triton.jit
def _swiglu(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=at < WIDTH, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=at < WIDTH, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * WIDTH + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=at < WIDTH)


def swiglu(gate_up: Tensor, out: Tensor, pdl: bool = False) -> Tensor:
    """silu(gate) * up. gate_up: contiguous [rows, 2 * width]; out: [rows, width]."""
    rows, width = out.shape
    _swiglu[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024, pdl, num_warps=4, **launch(pdl))
    return out
