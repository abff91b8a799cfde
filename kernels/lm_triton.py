"""Triton kernels between the matrix products of a decoder layer. `kernels.layers` has the same operations in plain
PyTorch, the reference.

They round at the same places as the reference, that is, every value that it stores in the model's type is
rounded here too. With `pdl` a kernel may start while the previous one still runs; it waits for that one
before it reads its results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.frame import Layer, StackTensors
from kernels.triton_launch import pdl_options

# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false


@triton.jit
def _add_norm(
    x, y, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
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
        value = (
            value.to(tl.float32) + tl.load(y + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(x + row * WIDTH + at, value, mask=inside)
    wide = value.to(tl.float32)
    normed = (wide * tl.math.rsqrt(tl.sum(wide * wide) / WIDTH + eps)).to(value.dtype)
    tl.store(
        out + row * WIDTH + at, (normed.to(tl.float32) * scale.to(tl.float32)).to(value.dtype), mask=inside
    )


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    pdl: bool = False,
    early: bool = False,
) -> Tensor:
    """x += y (in place, if y is given), then RMSNorm of x into `out`. x, y, out: contiguous [rows, width];
    weight: [width]; early: the next kernel may start early, even if this one does not."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    added = y is not None
    _add_norm[(rows,)](
        x,
        x if y is None else y,
        weight,
        out,
        eps,
        width,
        block,
        added,
        pdl or early,
        num_warps=4,
        **pdl_options(pdl),
    )
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
    tl.store(
        out + row * WIDTH + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=at < WIDTH
    )


def swiglu(gate_up: Tensor, out: Tensor, pdl: bool = False) -> Tensor:
    """silu(gate) * up. gate_up: contiguous [rows, 2 * width]; out: [rows, width]."""
    rows, width = out.shape
    _swiglu[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024, pdl, num_warps=4, **pdl_options(pdl))
    return out


@triton.jit
def normed_rope(head, weight, table, eps, D: tl.constexpr, WIDE: tl.constexpr):
    """RMSNorm, if there is a weight, of one head of D values at `head`, then rotary embedding with `table` [cos |
    sin]; returns [D] in the storage type."""
    at = tl.arange(0, D)
    across = (at + D // 2) % D
    value = tl.load(head + at)
    turned = tl.load(head + across)
    wide = value.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide) / D + eps)
    return rotated(value, turned, rstd, weight, table, at, across, D, WIDE)


@triton.jit
def rotated(
    value,
    turned,
    rstd,
    weight,
    table,
    at,
    across,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    first=None,
    other=None,
):
    """Rotary embedding of `value`, after its multiplication by rstd and the norm's weight if there is a weight.
    `turned` has, at the place of each element, the element of the head's other half.

    WIDE: products stay in float32 until the end, as with `StackTensors.wide_rope`; first: the heads to which
    `weight` belongs; other: the weight of the other heads.
    """
    kind = value.dtype
    if weight is not None:
        scale = tl.load(weight + at)
        scale_turned = tl.load(weight + across)
        if first is not None:
            scale = tl.where(first, scale, tl.load(other + at))
            scale_turned = tl.where(first, scale_turned, tl.load(other + across))
        scale = scale.to(tl.float32)
        scale_turned = scale_turned.to(tl.float32)
    cos = tl.load(table + at % (D // 2)).to(tl.float32)
    sin = tl.load(table + D // 2 + at % (D // 2)).to(tl.float32)
    sign = tl.where(at < D // 2, -1.0, 1.0)
    if weight is not None:
        value = ((value.to(tl.float32) * rstd).to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
        turned = (
            ((turned.to(tl.float32) * rstd).to(kind).to(tl.float32) * scale_turned).to(kind).to(tl.float32)
        )
    else:
        value = value.to(tl.float32)
        turned = turned.to(tl.float32)
    if WIDE:
        placed = (value * cos + sign * (turned * sin)).to(kind)
    else:
        placed = ((value * cos).to(kind).to(tl.float32) + sign * (turned * sin).to(kind).to(tl.float32)).to(
            kind
        )
    return placed


@triton.jit
def _norm_rope_append(
    qkv, q_weight, k_weight, table, positions, pages, offsets, out, k_cache, v_cache, eps, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    cell = tl.load(pages + row) * page_stride + tl.load(offsets + row) * D
    head = tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, D)[None, :]
    across = (at + D // 2) % D
    base = qkv + row * ((HEADS + 2 * KV_HEADS) * D) + head * D
    inside = head < HEADS + 2 * KV_HEADS
    value = tl.load(base + at, mask=inside, other=0.0)
    turned = tl.load(base + across, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    placed = rotated(
        value, turned, rstd, q_weight, table + position * D, at, across, D, WIDE, head < HEADS, k_weight
    )
    tl.store(out + row * (HEADS * D) + head * D + at, placed, mask=head < HEADS)
    key = head - HEADS
    tl.store(k_cache + cell + key * head_stride + at, placed, mask=(key >= 0) & (key < KV_HEADS))
    tl.store(v_cache + cell + (key - KV_HEADS) * head_stride + at, value, mask=inside & (key >= KV_HEADS))


def norm_rope_append(
    qkv: Tensor,
    layer: Layer,
    stack: StackTensors,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    offsets: Tensor,
    out: Tensor,
) -> Tensor:
    """`qk_norm_rope_append`, which writes the queries into `out` [n, heads, head_dim]. qkv and the caches are
    contiguous, and head_dim is a power of two."""
    _, kv_heads, page_size, head_dim = k_cache.shape
    rows, heads, _ = out.shape
    _norm_rope_append[(rows,)](
        qkv, layer.q_norm, layer.k_norm, stack.rope_table, positions, pages, offsets, out, k_cache, v_cache, stack.eps,
        kv_heads * page_size * head_dim, page_size * head_dim, heads, kv_heads, head_dim, triton.next_power_of_2(heads + 2 * kv_heads),
        stack.wide_rope, num_warps=4,
    )  # fmt: skip
    return out
