# ruff: noqa: N803
"""Triton kernels of the codec's layers before the convolution stack, and their launches on a GPU. `kernels.codec_ops`
has the same operations in plain PyTorch (their twins)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codec_launch import Tile
from kernels.codec_ops import GELU, SWIGLU
from kernels.codec_triton import _product
from kernels.registry import on_gpu
from kernels.triton_launch import INTERPRETED, on_grid, pieces, power_from

#: The tiles of products; no others were tried. SwiGLU needs two accumulators, so its tile has half the columns.
PRODUCT = Tile(128, 128, 64, 3, 8)
PRODUCT_SWIGLU = Tile(128, 64, 64, 3, 8)
#: Queries and keys per tile of attention; steps per tile of the depthwise convolution; rows whose scales one program
#: computes.
QUERIES = 64
KEYS = 32
STEPS = 4
SCALED = 8


@triton.jit(do_not_specialize=["rows"])
def scales_kernel(x, out, rows, eps, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """The factor by which RMSNorm multiplies each row of x [rows, K]."""
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    depth = tl.arange(0, BK)
    inside = (at < rows)[:, None] & (depth < K)[None, :]
    value = tl.load(x + at.to(tl.int64)[:, None] * K + depth[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.math.rsqrt(tl.sum(value * value, axis=1) / K + eps), mask=at < rows)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    scales,
    w,
    bias,
    residual,
    out,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    CURVED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """[rows, K] @ [K, N], then scales of the rows, bias, activation and residual.

    The loop must use a tile of x for products only. If it also computed the sum of squares from it, Triton would
    keep one buffer less than the products in flight need, and overwrite data that they still read.
    """
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    width: tl.constexpr = 2 * N if GATED else N
    pid = tl.program_id(0)
    first = pid // (GROUP * n_tiles) * GROUP
    size = tl.minimum(tl.cdiv(rows, BM) - first, GROUP)
    start = (first + pid % (GROUP * n_tiles) % size) * BM
    columns = pid % (GROUP * n_tiles) // size * BN + tl.arange(0, BN)
    at = start + tl.arange(0, BM)
    depth = tl.arange(0, BK)
    x_at = x + at.to(tl.int64)[:, None] * K + depth[None, :]
    w_at = w + depth[:, None] * width + columns[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if GATED:
        up = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        piece = tl.load(x_at + k, mask=(at < rows)[:, None], other=0.0)
        total = _product(
            piece, tl.load(w_at + k * width, mask=(columns < N)[None, :], other=0.0), total, FAST
        )
        if GATED:
            up = _product(
                piece, tl.load(w_at + k * width + N, mask=(columns < N)[None, :], other=0.0), up, FAST
            )
    if scales is not None:
        scale = tl.load(scales + at, mask=at < rows, other=0.0)[:, None]
        total *= scale
        if GATED:
            up *= scale
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    if CURVED:
        total = 0.5 * total * (1.0 + tl.math.erf(total * 0.7071067811865476))
    inside = (at < rows)[:, None] & (columns < N)[None, :]
    place = at.to(tl.int64)[:, None] * N + columns[None, :]
    if residual is not None:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend(queries_low, queries_high, low, high, values, seen, top, share, total, scale, FAST: tl.constexpr):
    """One step of online softmax over a block of keys, given as both halves [BK, D / 2], and values [BK, D]. Returns
    the new maximum, the sum of weights, and the weighted sum of values."""
    score = _product(queries_low, tl.trans(low), tl.zeros(seen.shape, dtype=tl.float32), FAST)
    score = tl.where(seen, _product(queries_high, tl.trans(high), score, FAST) * scale, -1e30)
    higher = tl.maximum(top, tl.max(score, axis=1))
    shares = tl.where(seen, tl.exp(score - higher[:, None]), 0.0)
    fade = tl.exp(top - higher)
    return (
        higher,
        share * fade + tl.sum(shares, axis=1),
        _product(shares.to(values.dtype), values, total * fade[:, None], FAST),
    )


@triton.jit
def _turned(base, at, inside, half, cosine, sine, H: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves of a head after rotary embedding, for the steps `at`: [BLOCK, H] each."""
    place = base + at[:, None] * WIDTH + half[None, :]
    low = tl.load(place, mask=inside[:, None], other=0.0)
    high = tl.load(place + H, mask=inside[:, None], other=0.0)
    c = tl.load(cosine + at[:, None] * H + half[None, :], mask=inside[:, None], other=0.0)
    s = tl.load(sine + at[:, None] * H + half[None, :], mask=inside[:, None], other=0.0)
    wide_low = low.to(tl.float32)
    wide_high = high.to(tl.float32)
    return (wide_low * c - wide_high * s).to(low.dtype), (wide_high * c + wide_low * s).to(low.dtype)


@triton.jit
def window_kernel(
    qkv,
    past,
    kept,
    positions,
    cosine,
    sine,
    out,
    steps,
    past_stride,
    kept_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    EARLIER: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Rotary embedding and attention of one head for a tile of queries. The first head of a group also writes `kept`,
    the keys and values that the next chunk needs.

    H is half the width of a head.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    group: tl.constexpr = HEADS // KV_HEADS
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * H
    pair: tl.constexpr = 2 * KV_HEADS * 2 * H
    kv = head // group
    half = tl.arange(0, H)
    whole = tl.arange(0, 2 * H)
    at = tile * BM + tl.arange(0, BM)
    inside = at < steps
    base = qkv + row * steps * width
    own_keys = base + (HEADS + kv) * 2 * H
    own_values = base + (HEADS + KV_HEADS + kv) * 2 * H
    cosine += row * table_stride
    sine += row * table_stride
    queries_low, queries_high = _turned(base + head * 2 * H, at, inside, half, cosine, sine, H, width)
    top = tl.full((BM,), -1e30, dtype=tl.float32)
    share = tl.zeros((BM,), dtype=tl.float32)
    total = tl.zeros((BM, 2 * H), dtype=tl.float32)
    if past is not None:
        there = EARLIER - tl.load(positions + row)
        old_keys = past + row * past_stride + kv * 2 * H
        for start in tl.range(tl.minimum(tile * BM, EARLIER) // BK * BK, EARLIER, BK):
            j = start + tl.arange(0, BK)
            old = (j < EARLIER)[:, None]
            low = tl.load(old_keys + j[:, None] * pair + half[None, :], mask=old, other=0.0)
            high = tl.load(old_keys + j[:, None] * pair + H + half[None, :], mask=old, other=0.0)
            values = tl.load(
                old_keys + KV_HEADS * 2 * H + j[:, None] * pair + whole[None, :], mask=old, other=0.0
            )
            seen = (j[None, :] >= at[:, None]) & (j < EARLIER)[None, :] & (j >= there)[None, :]
            top, share, total = _attend(
                queries_low, queries_high, low, high, values, seen, top, share, total, scale, FAST
            )
    begin = tl.maximum(tile * BM - EARLIER, 0) // BK * BK
    for start in tl.range(begin, tl.minimum(steps, tile * BM + BM), BK):
        j = start + tl.arange(0, BK)
        low, high = _turned(own_keys, j, j < steps, half, cosine, sine, H, width)
        values = tl.load(
            own_values + j[:, None] * width + whole[None, :], mask=(j < steps)[:, None], other=0.0
        )
        distance = at[:, None] - j[None, :]
        seen = (distance >= 0) & (distance <= EARLIER)
        top, share, total = _attend(
            queries_low, queries_high, low, high, values, seen, top, share, total, scale, FAST
        )
    to = out + row * steps * (HEADS * 2 * H) + head * 2 * H
    tl.store(
        to + at[:, None] * (HEADS * 2 * H) + whole[None, :],
        (total / share[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None],
    )
    if kept is not None:  # noqa: SIM102 - known at compile time, unlike the next condition
        if head % group == 0:
            new_keys = kept + row * kept_stride + kv * 2 * H
            slot = at - steps + EARLIER
            stays = (inside & (slot >= 0))[:, None]
            low, high = _turned(own_keys, at, inside, half, cosine, sine, H, width)
            tl.store(new_keys + slot[:, None] * pair + half[None, :], low, mask=stays)
            tl.store(new_keys + slot[:, None] * pair + H + half[None, :], high, mask=stays)
            values = tl.load(
                own_values + at[:, None] * width + whole[None, :], mask=inside[:, None], other=0.0
            )
            tl.store(new_keys + KV_HEADS * 2 * H + slot[:, None] * pair + whole[None, :], values, mask=stays)
            if tile == 0:
                gap: tl.constexpr = KV_HEADS * 2 * H
                for start in tl.range(steps, EARLIER, BK):
                    j = start + tl.arange(0, BK)
                    moves = (j < EARLIER)[:, None]
                    source = past + row * past_stride + kv * 2 * H + j[:, None] * pair + whole[None, :]
                    target = new_keys + (j - steps)[:, None] * pair + whole[None, :]
                    tl.store(target, tl.load(source, mask=moves, other=0.0), mask=moves)
                    tl.store(target + gap, tl.load(source + gap, mask=moves, other=0.0), mask=moves)


@triton.jit
def depthwise_norm_kernel(
    x,
    history,
    weight,
    bias,
    out,
    steps,
    history_stride,
    eps,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """A causal depthwise convolution for a tile of steps with all channels, then LayerNorm."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.arange(0, BC)
    known = channel < C
    total = tl.zeros((BM, BC), dtype=tl.float32) + tl.load(bias + channel, mask=known, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        moved = at - (TAPS - 1 - tap)
        inside = ((moved >= 0) & (moved < steps))[:, None] & known[None, :]
        value = tl.load(
            x + row * steps * C + moved[:, None] * C + channel[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if history is not None:
            before = (moved < 0)[:, None] & known[None, :]
            place = history + row * history_stride + (moved + TAPS - 1)[:, None] * C + channel[None, :]
            value += tl.load(place, mask=before, other=0.0).to(tl.float32)
        total += value * tl.load(weight + tap * C + channel, mask=known, other=0.0)[None, :]
    mean = tl.sum(total, axis=1) / C
    centred = tl.where(known[None, :], total - mean[:, None], 0.0)
    scale = tl.math.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)
    place = row * steps * C + at[:, None] * C + channel[None, :]
    tl.store(
        out + place,
        (centred * scale[:, None]).to(out.dtype.element_ty),
        mask=(at < steps)[:, None] & known[None, :],
    )


@on_gpu("codec_product", lambda _, weight, *__: len(weight) % 16 == 0)
def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    activation: int,
) -> Tensor:
    """`codec_product`, for K that is a multiple of 16."""
    gated = activation == SWIGLU
    depth, wide = weight.shape
    columns = wide // 2 if gated else wide
    x, count = x.contiguous(), x.numel() // depth
    out = x.new_empty(*x.shape[:-1], columns)
    tile = PRODUCT_SWIGLU if gated else PRODUCT
    tall = min(tile.rows, max(64, power_from(count)))
    scales = None if eps is None else _scales(x, count, depth, eps)
    on_grid(product_kernel, (pieces(count, tall) * pieces(columns, tile.columns),))(
        x, scales, weight, bias, residual, out, count, K=depth, N=columns, GATED=gated, CURVED=activation == GELU, BM=tall, BN=tile.columns,
        BK=min(tile.depth, depth & -depth), GROUP=8, STAGES=tile.stages, FAST=not INTERPRETED, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _scales(x: Tensor, rows: int, depth: int, eps: float) -> Tensor:
    """The scales of RMSNorm, float32 [rows]. x: [rows, depth]."""
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    wide = power_from(depth)
    on_grid(scales_kernel, (pieces(rows, SCALED),))(
        x, out, rows, eps, K=depth, BM=SCALED, BK=wide, num_warps=4
    )
    return out


def _attention_fits(qkv: Tensor, *rest: object) -> bool:
    *_, heads, kv_heads, window = rest
    dim = qkv.shape[2] // (heads + 2 * kv_heads)
    return dim >= 32 and dim & (dim - 1) == 0 and window > 1


@on_gpu("codec_window_attention", _attention_fits)
def window_attention(
    qkv: Tensor,
    past: Tensor | None,
    kept: Tensor | None,
    positions: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    kv_heads: int,
    window: int,
) -> Tensor:
    """`codec_window_attention`, for heads whose width is a power of two, 32 or more."""
    rows, steps, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    qkv = qkv.contiguous()
    cosine = cosine.contiguous()
    sine = sine.contiguous()
    out = qkv.new_empty(rows, steps, heads * dim)
    queries = min(QUERIES, max(16, power_from(steps)))
    strides = (
        0 if past is None else past.stride(0),
        0 if kept is None else kept.stride(0),
        0 if len(cosine) == 1 else cosine.stride(0),
    )
    on_grid(window_kernel, (pieces(steps, queries), heads, rows))(
        qkv, past, kept, positions, cosine, sine, out, steps, *strides, 1 / math.sqrt(dim), HEADS=heads, KV_HEADS=kv_heads, H=dim // 2,
        EARLIER=window - 1, BM=queries, BK=KEYS, FAST=not INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


@on_gpu("codec_depthwise_norm")
def depthwise_norm(x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`codec_depthwise_norm`."""
    rows, steps, channels = x.shape
    x, out = x.contiguous(), torch.empty(rows, steps, channels, dtype=x.dtype, device=x.device)
    on_grid(depthwise_norm_kernel, (pieces(steps, STEPS), rows))(
        x, history, weight, bias, out, steps, 0 if history is None else history.stride(0), eps, TAPS=len(weight), C=channels, BM=STEPS,
        BC=power_from(channels), num_warps=4,
    )  # fmt: skip
    return out
