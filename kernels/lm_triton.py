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
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.compile_together import on_grid
from kernels.lm_products import Norm

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
    """How a product is cut: rows and columns of a tile, steps of the inner size, warps, pipeline stages, and whether its tiles come through
    the tensor memory accelerator (from Hopper on, in bfloat16)."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 4
    tma: bool = False


@triton.jit
def _tile(matrix, first, k, count, K: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, K_TILE] of a [count, K] matrix; rows beyond it are any."""
    if TMA:
        piece = matrix.load([first, k])
    else:
        at = (first + tl.arange(0, ROWS)) % count
        piece = tl.load(matrix + at[:, None].to(tl.int64) * K + (k + tl.arange(0, K_TILE))[None, :])
    return piece


@triton.jit
def product_kernel(
    x, w, extra, squares, norm, y, weighted, y_squares, rows, n, eps,
    K: tl.constexpr, M_TILE: tl.constexpr, N_TILE: tl.constexpr, K_TILE: tl.constexpr, STAGES: tl.constexpr, EPILOGUE: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PARTS: of `squares` in a row, 0: x comes from no norm. NORM: a norm follows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m, column = tl.program_id(1) * M_TILE, tl.program_id(0) * N_TILE
    weight_rows = 2 * n if EPILOGUE == 2 else n
    total = tl.zeros((M_TILE, N_TILE), tl.float32)
    total_up = tl.zeros((M_TILE, N_TILE), tl.float32)
    for k in tl.range(0, K, K_TILE, num_stages=STAGES):
        a = _tile(x, m, k, rows, K, M_TILE, K_TILE, TMA)
        total = tl.dot(a, _tile(w, column, k, weight_rows, K, N_TILE, K_TILE, TMA).T, total, input_precision=PRECISION)
        if EPILOGUE == 2:
            total_up = tl.dot(a, _tile(w, n + column, k, weight_rows, K, N_TILE, K_TILE, TMA).T, total_up, input_precision=PRECISION)
    m_at, n_at = m + tl.arange(0, M_TILE), column + tl.arange(0, N_TILE)
    inside = (m_at < rows)[:, None] & (n_at < n)[None, :]
    if PARTS > 0:
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        there = (m_at < rows)[:, None] & (part < PARTS)[None, :]
        sums = tl.sum(tl.load(squares + m_at[:, None] * PARTS + part[None, :], mask=there, other=0.0), axis=1)
        scale = tl.math.rsqrt(sums / K + eps)[:, None]
        total *= scale
        total_up *= scale
    kind = y.dtype.element_ty
    place = m_at[:, None].to(tl.int64) * n + n_at[None, :]
    result = total.to(kind)
    if EPILOGUE == 1:
        result = (result.to(tl.float32) + tl.load(extra + place, mask=inside, other=0.0).to(tl.float32)).to(kind)
    if EPILOGUE == 2:
        gate = result.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind)
        result = (silu.to(tl.float32) * total_up.to(kind).to(tl.float32)).to(kind)
    tl.store(y + place, result, mask=inside)
    if NORM:
        wide = result.to(tl.float32)
        gain = tl.load(norm + n_at, mask=n_at < n, other=0.0).to(tl.float32)
        tl.store(weighted + place, (wide * gain[None, :]).to(kind), mask=inside)
        sums = tl.sum(tl.where(inside, wide * wide, 0.0), axis=1)
        tl.store(y_squares + m_at * tl.num_programs(0) + tl.program_id(0), sums, mask=m_at < rows)


def product(
    x: Tensor | Norm,
    weight: Tensor,
    y: Tensor,
    tiles: Tiles,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    norm: Tensor | None = None,
    into: Norm | None = None,
    pdl: bool = False,
) -> Tensor:
    """y = epilogue(x @ weight.T).

    x: contiguous [rows, inner], or a norm of that; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y: [rows, n];
    extra: [rows, n] that RESIDUAL adds (may be y itself); norm: weights [n] of the norm behind y, which fills `into`, whose squares have
    a part for each tile of columns. The inner size is a multiple of the tile's.
    """
    ahead, x = (x, x.weighted) if isinstance(x, Norm) else (None, x)
    rows, inner = x.shape
    n = y.shape[1]
    grid = (triton.cdiv(n, tiles.n), triton.cdiv(rows, tiles.m))
    tma = tiles.tma and x.is_cuda
    on_grid(product_kernel, grid)(
        TensorDescriptor.from_tensor(x, [tiles.m, tiles.k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tiles.n, tiles.k]) if tma else weight,
        y if extra is None else extra, None if ahead is None else ahead.squares, norm, y, None if into is None else into.weighted,
        None if into is None else into.squares, rows, n, 0.0 if ahead is None else ahead.eps,
        inner, tiles.m, tiles.n, tiles.k, tiles.stages, epilogue, 0 if ahead is None else ahead.squares.shape[1], norm is not None,
        "ieee" if x.element_size() == 4 else "tf32", tma, pdl, num_warps=tiles.warps, **launch(pdl),
    )  # fmt: skip
    return y
