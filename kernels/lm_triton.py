"""Triton kernels of a decoder layer: its matrix products with their epilogues, and what lies between; each has its twin in PyTorch.

Rounding points are the reference's: every value that it stores in the model's type is rounded here at the same place.
Launchers take `pdl`: the kernel may start while the one before it still runs and waits before it reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

PLAIN, RESIDUAL, SWIGLU = 0, 1, 2


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


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out: Tensor, pdl: bool = False) -> Tensor:
    """x += y (where given, in place), then RMSNorm of x into `out`. x, y, out: contiguous [rows, width]; weight: [width]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](x, x if y is None else y, weight, out, eps, width, block, y is not None, pdl, num_warps=4, **launch(pdl))
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


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: rows and columns of a tile, steps of the inner size, warps, pipeline stages."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4


@triton.jit
def _fetch_ahead(address):
    """Asks for the 128-byte lines at `address` in the L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address.to(tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(
    x, w, extra, y, rows, n,
    K: tl.constexpr, M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr, EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # weights depend on no kernel: their lines are on the way while the kernel before this one ends
        gdc_launch_dependents()
        slab = (tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)) % n
        for start in tl.static_range(0, K // 64, 16):
            first = w + slab[:, None].to(tl.int64) * K + (start + tl.arange(0, 16))[None, :] * 64
            _fetch_ahead(first)
            if EPILOGUE == 2:
                _fetch_ahead(first + n.to(tl.int64) * K)
        gdc_wait()
    m_at = tl.program_id(1) * M_TILE + tl.arange(0, M_TILE)
    n_at = tl.program_id(0) * N_TILE + tl.arange(0, N_TILE)
    k_at = tl.arange(0, K_TILE)
    from_x = x + (m_at % rows)[:, None].to(tl.int64) * K + k_at[None, :]
    from_w = w + (n_at % n)[None, :].to(tl.int64) * K + k_at[:, None]
    total = tl.zeros((M_TILE, N_TILE), tl.float32)
    if EPILOGUE == 2:
        total_up = tl.zeros((M_TILE, N_TILE), tl.float32)
        from_up = from_w + n.to(tl.int64) * K
    for _ in range(0, K, K_TILE):
        a = tl.load(from_x)
        total = tl.dot(a, tl.load(from_w), total, input_precision=PRECISION)
        if EPILOGUE == 2:
            total_up = tl.dot(a, tl.load(from_up), total_up, input_precision=PRECISION)
            from_up += K_TILE
        from_x += K_TILE
        from_w += K_TILE
    kind = x.dtype.element_ty
    inside = (m_at < rows)[:, None] & (n_at < n)[None, :]
    place = m_at[:, None].to(tl.int64) * n + n_at[None, :]
    result = total.to(kind)
    if EPILOGUE == 1:
        result = (result.to(tl.float32) + tl.load(extra + place, mask=inside, other=0.0).to(tl.float32)).to(kind)
    if EPILOGUE == 2:
        gate = result.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind)
        result = (silu.to(tl.float32) * total_up.to(kind).to(tl.float32)).to(kind)
    tl.store(y + place, result, mask=inside)


def product(
    x: Tensor, weight: Tensor, y: Tensor, tiles: Tiles, epilogue: int = PLAIN, extra: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """y = epilogue(x @ weight.T). x: contiguous [rows, inner]; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows
    first; y: [rows, n]; extra: [rows, n] that RESIDUAL adds (may be y itself)."""
    rows, inner = x.shape
    n = y.shape[1]
    grid = (triton.cdiv(n, tiles.n), triton.cdiv(rows, tiles.m))
    precision = "ieee" if x.element_size() == 4 else "tf32"
    _product[grid](
        x, weight, y if extra is None else extra, y, rows, n, inner, tiles.m, tiles.n, tiles.k, epilogue, precision, pdl,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch(pdl),
    )  # fmt: skip
    return y
