"""Triton kernels of a decoder layer: its matrix products with their epilogues, and what lies between; each has its twin in PyTorch.

Rounding points are the reference's: every value that it stores in the model's type is rounded here at the same place.
Launchers take `pdl`: the kernel may start while the one before it still runs and waits before it reads anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# ruff: noqa: N803, N806
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false


_LOG2E = tl.constexpr(1.4426950408889634)


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


@triton.jit
def _normed_rope(head, weight, table, eps, D: tl.constexpr):
    """RMSNorm over one head of D values at `head`, then rope with `table` [cos | sin]; returns [D] in the storage type."""
    at = tl.arange(0, D)
    across = (at + D // 2) % D
    value = tl.load(head + at)
    turned = tl.load(head + across)
    wide = value.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide) / D + eps)
    return _rotate(value, turned, rstd, weight, table, at, across, D)


@triton.jit
def _rotate(value, turned, rstd, weight, table, at, across, D: tl.constexpr):
    kind = value.dtype
    scale = tl.load(weight + at).to(tl.float32)
    scale_turned = tl.load(weight + across).to(tl.float32)
    cos = tl.load(table + at % (D // 2)).to(tl.float32)
    sin = tl.load(table + D // 2 + at % (D // 2)).to(tl.float32)
    sign = tl.where(at < D // 2, -1.0, 1.0)
    value = ((value.to(tl.float32) * rstd).to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
    turned = ((turned.to(tl.float32) * rstd).to(kind).to(tl.float32) * scale_turned).to(kind).to(tl.float32)
    return ((value * cos).to(kind).to(tl.float32) + sign * (turned * sin).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _decode_attention(
    qkv, q_weight, k_weight, table, k_cache, v_cache, page_table, positions, slots, out, partial, state, arrivals,
    eps, scale, page_stride, head_stride, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = 16
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + slot).to(tl.int32)
    at = tl.arange(0, D)
    across = (at + D // 2) % D
    lane = tl.arange(0, ROWS)
    used = lane < GROUP
    base = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    angles = table + position.to(tl.int64) * D
    query = base + (kv_head * GROUP + lane[:, None]) * D
    value = tl.load(query + at[None, :], mask=used[:, None], other=0.0)
    turned = tl.load(query + across[None, :], mask=used[:, None], other=0.0)
    wide = value.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    q = _rotate(value, turned, rstd[:, None], q_weight, angles, at[None, :], across[None, :], D)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, D), tl.float32)
    if split == 0:
        key = _normed_rope(base + (HEADS + kv_head) * D, k_weight, angles, eps, D)
        fresh = tl.load(base + (HEADS + KV_HEADS + kv_head) * D + at)
        page = tl.load(page_table + slot * table_width + position // PAGE).to(tl.int64)
        target = page * page_stride + kv_head * head_stride + (position % PAGE) * D + at
        tl.store(k_cache + target, key)
        tl.store(v_cache + target, fresh)
        top = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * (scale * _LOG2E)
        total = tl.full((ROWS,), 1.0, tl.float32)
        mixed = tl.zeros((ROWS, D), tl.float32) + fresh.to(tl.float32)[None, :]

    tiles = tl.cdiv(tl.cdiv(position, BLOCK), SPLITS)
    begin = split * tiles * BLOCK
    end = tl.minimum(begin + tiles * BLOCK, position)
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        if BLOCK <= PAGE:
            page = tl.load(page_table + slot * table_width + start // PAGE).to(tl.int64)
            place = page * page_stride + kv_head * head_stride + (offsets % PAGE).to(tl.int64) * D
        else:
            page = tl.load(page_table + slot * table_width + offsets // PAGE, mask=offsets < end, other=0).to(tl.int64)
            place = page * page_stride + kv_head * head_stride + (offsets % PAGE) * D
        inside = offsets < end
        k = tl.load(k_cache + place[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_cache + place[:, None] + at[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - peak)
        weights = tl.exp2(scores - peak[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        top = peak

    result = out + row.to(tl.int64) * HEADS * D + (kv_head * GROUP + lane[:, None]) * D + at[None, :]
    if SPLITS == 1:
        tl.store(result, (mixed / total[:, None]).to(q.dtype), mask=used[:, None])
    else:
        group = row * KV_HEADS + kv_head
        mine = (group * SPLITS + split).to(tl.int64) * GROUP
        tl.store(partial + (mine + lane[:, None]) * D + at[None, :], mixed, mask=used[:, None])
        tl.store(state + (mine + lane) * 2, top, mask=used)
        tl.store(state + (mine + lane) * 2 + 1, total, mask=used)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + group, 0)
            mixed = tl.zeros((ROWS, D), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            for other in range(SPLITS):
                theirs = (group * SPLITS + other).to(tl.int64) * GROUP
                peak_there = tl.load(state + (theirs + lane) * 2, mask=used, other=0.0, cache_modifier=".cg")
                sum_there = tl.load(state + (theirs + lane) * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
                there = tl.load(partial + (theirs + lane[:, None]) * D + at[None, :], mask=used[:, None], other=0.0, cache_modifier=".cg")
                peak = tl.maximum(top, peak_there)
                shrink = tl.exp2(top - peak)
                grow = tl.exp2(peak_there - peak)
                total = total * shrink + sum_there * grow
                mixed = mixed * shrink[:, None] + there * grow[:, None]
                top = peak
            tl.store(result, (mixed / total[:, None]).to(q.dtype), mask=used[:, None])


class SplitScratch:
    """Partial results of split attention, for at most `groups` (rows * kv heads) and `splits`; shared by all layers of a stream."""

    def __init__(self, groups: int, splits: int, group_size: int, head_dim: int, device: torch.device) -> None:
        self.partial = torch.empty(groups * splits * group_size * head_dim, device=device, dtype=torch.float32)
        self.state = torch.empty(groups * splits * group_size * 2, device=device, dtype=torch.float32)
        self.arrivals = torch.zeros(groups, device=device, dtype=torch.int32)


def decode_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope_table: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_table: Tensor, positions: Tensor, slots: Tensor, scale: float, out: Tensor, scratch: SplitScratch,
    splits: int = 1, block: int = 64, warps: int = 4, stages: int = 3, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """q/k norm, rope, append of the new key and value, attention over the row's pages, the new position included.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim]; k_cache, v_cache: [pages, kv_heads, page_size, head_dim] of one layer;
    page_table: int32 [slots, pages of a slot]; positions: int32 [slots], where the new token goes; slots: int32 [rows];
    splits: programs a row and kv head share its positions, their results added in order; out: [rows, heads * head_dim].
    """
    _, kv_heads, page_size, head_dim = k_cache.shape
    if page_size & (page_size - 1):
        raise ValueError(f"a page must have a power of two of positions, not {page_size}: blocks of positions would cross pages")
    heads = out.shape[1] // head_dim
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32"
    _decode_attention[(kv_heads, qkv.shape[0], splits)](
        qkv, q_weight, k_weight, rope_table, k_cache, v_cache, page_table, positions, slots, out,
        scratch.partial, scratch.state, scratch.arrivals, eps, scale, k_cache.stride(0), k_cache.stride(1), page_table.shape[1],
        heads, kv_heads, head_dim, page_size, block, splits, precision, pdl, num_warps=warps, num_stages=stages, **launch(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _predictor_attention(
    qkv, q_weight, k_weight, table, k_cache, v_cache, out, rows, position, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    at = tl.arange(0, D)
    cache = (row * KV_HEADS + kv_head) * SPAN * D + at
    base = qkv + row * WIDTH
    target = out + row * HEADS * D
    if FIRST:  # two tokens a row: all first tokens, then all second ones; the first attends to itself alone
        key0 = _normed_rope(base + (HEADS + kv_head) * D, k_weight, table, eps, D)
        value0 = tl.load(base + (HEADS + KV_HEADS + kv_head) * D + at)
        tl.store(k_cache + cache, key0)
        tl.store(v_cache + cache, value0)
        for head in tl.static_range(GROUP):
            tl.store(target + (kv_head * GROUP + head) * D + at, value0)
        base += rows * WIDTH
        target += rows * HEADS * D
        angles = table + D
        here = 1
    else:
        angles = table + position * D
        here = position
    key = _normed_rope(base + (HEADS + kv_head) * D, k_weight, angles, eps, D)
    value = tl.load(base + (HEADS + KV_HEADS + kv_head) * D + at)
    tl.store(k_cache + cache + here * D, key)
    tl.store(v_cache + cache + here * D, value)
    if not FIRST:
        step = tl.arange(0, SPAN)
        past = step[:, None] * D
        seen = step < position
        keys = tl.load(k_cache + cache[None, :] + past, mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_cache + cache[None, :] + past, mask=seen[:, None], other=0.0).to(tl.float32)
    for head in tl.static_range(GROUP):
        q = _normed_rope(base + (kv_head * GROUP + head) * D, q_weight, angles, eps, D).to(tl.float32)
        newest = tl.sum(q * key.to(tl.float32)) * scale
        if FIRST:
            oldest = tl.sum(q * key0.to(tl.float32)) * scale
            top = tl.maximum(newest, oldest)
            share = tl.exp(newest - top)
            share0 = tl.exp(oldest - top)
            mixed = (share * value.to(tl.float32) + share0 * value0.to(tl.float32)) / (share + share0)
        else:
            scores = tl.where(seen, tl.sum(q[None, :] * keys, axis=1) * scale, float("-inf"))
            top = tl.maximum(newest, tl.max(scores))
            share = tl.exp(newest - top)
            shares = tl.exp(scores - top)
            mixed = (share * value.to(tl.float32) + tl.sum(shares[:, None] * values, axis=0)) / (share + tl.sum(shares))
        tl.store(target + (kv_head * GROUP + head) * D + at, mixed.to(value.dtype))


def predictor_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope_table: Tensor, k_cache: Tensor, v_cache: Tensor, position: int,
    scale: float, out: Tensor, warps: int = 1, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of the code predictor over its at most 16 positions, with q/k norm, rope and append.

    qkv: [rows, ...] for one token a row at `position` >= 2, or [2 * rows, ...] for the frame's first two (`position` 0): all first
    tokens, then all second ones; k_cache, v_cache: [rows, kv_heads, span, head_dim] of one layer; out: as many rows as qkv.
    """
    rows, kv_heads, span, head_dim = k_cache.shape
    rows = min(rows, qkv.shape[0] // 2 if position == 0 else qkv.shape[0])
    heads = out.shape[1] // head_dim
    _predictor_attention[(rows, kv_heads)](
        qkv, q_weight, k_weight, rope_table, k_cache, v_cache, out, rows, position, eps, scale,
        heads, kv_heads, head_dim, span, position == 0, pdl, num_warps=warps, **launch(pdl),
    )  # fmt: skip
    return out


# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportCallIssue=false


PLAIN, RESIDUAL, SWIGLU = 0, 1, 2


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
