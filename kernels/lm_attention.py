"""Triton kernels of attention. In decoding, one kernel computes norm and rotary embedding of the new heads,
appends keys and values, and attends to all positions. In prefill, one kernel attends over packed prompts.

The kernels round at the same places as `kernels.layers`. Those of a layer of a stack have its norms of the heads, if
there are any, and its rotary embedding. `pdl` is as in `kernels.lm_triton`. The launch for packed prompts reads no lengths, positions or pages on the
host, so a captured launch works for any of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import PackedPrompts
from kernels.frame import Layer, StackTensors
from kernels.lm_triton import gdc_launch_dependents, gdc_wait, normed_rope, rotated
from kernels.triton_launch import pdl_options

# ruff: noqa: N803, N806
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

_LOG2E = tl.constexpr(1.4426950408889634)


class AttentionTile(NamedTuple):
    """How programs read the positions of a row and kv head: positions per step, warps, and pipeline stages.

    splits: (maximum number of rows, number of programs that share the positions), in ascending order; the first
    entry whose maximum is not exceeded applies.
    """

    block: int
    warps: int
    stages: int
    splits: tuple[tuple[int, int], ...]


#: The fastest measured tiles (docs/adr/0007): `_FEW` for up to this number of query heads per kv head, and `_MANY` for
#: more.
_FEW_HEADS = 2
_FEW = AttentionTile(16, 1, 5, ((8, 8), (32, 4), (1 << 30, 1)))
_MANY = AttentionTile(64, 4, 3, ((2, 8), (16, 4), (32, 2), (1 << 30, 1)))
#: Minimum positions per step, because it is the smallest size of a product.
_MIN_BLOCK = 16


def attention_tile(group: int, page_size: int) -> AttentionTile:
    """The tile for `group` query heads per kv head and this page size; a step has one page or less."""
    tile = _FEW if group <= _FEW_HEADS else _MANY
    return tile._replace(block=max(_MIN_BLOCK, min(tile.block, page_size)))


@triton.jit
def _attend(
    q, k_cache, v_cache, pages, start, offsets, inside, seen, top, total, mixed, scale, page_stride, head_at,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of online softmax for queries `q` [ROWS, D]: adds the keys and values at `offsets` [BLOCK], which
    begin at `start`. Returns the new maximum, the sum of weights, and the weighted sum of values.

    pages: a request's pages in order; inside: [BLOCK], which offsets exist; seen: [ROWS or 1, BLOCK], which of them
    each query sees. Weights are computed as powers of two.
    """
    if BLOCK <= PAGE:
        page = tl.load(pages + start // PAGE).to(tl.int64)
    else:
        page = tl.load(pages + offsets // PAGE, mask=inside, other=0).to(tl.int64)
    cell = page * page_stride + head_at + (offsets % PAGE).to(tl.int64) * D
    place = cell[:, None] + tl.arange(0, D)[None, :]
    k = tl.load(k_cache + place, mask=inside[:, None], other=0.0)
    v = tl.load(v_cache + place, mask=inside[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - peak)
    weights = tl.exp2(scores - peak[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    return peak, total, tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)


@triton.jit
def _decode_attention(
    qkv, q_weight, k_weight, table, k_cache, v_cache, page_table, positions, slots, out, partial, state, arrivals,
    eps, scale, page_stride, head_stride, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = 16  # `kernels.frame.LARGEST_GROUP`
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
    q = rotated(value, turned, rstd[:, None], q_weight, angles, at[None, :], across[None, :], D, WIDE)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, D), tl.float32)
    if split == 0:
        key = normed_rope(base + (HEADS + kv_head) * D, k_weight, angles, eps, D, WIDE)
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
        inside = offsets < end
        top, total, mixed = _attend(
            q, k_cache, v_cache, page_table + slot * table_width, start, offsets, inside, inside[None, :], top, total, mixed, scale,
            page_stride, kv_head * head_stride, D, PAGE, BLOCK, PRECISION,
        )  # fmt: skip

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
                sum_there = tl.load(
                    state + (theirs + lane) * 2 + 1, mask=used, other=0.0, cache_modifier=".cg"
                )
                there = tl.load(
                    partial + (theirs + lane[:, None]) * D + at[None, :],
                    mask=used[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                peak = tl.maximum(top, peak_there)
                shrink = tl.exp2(top - peak)
                grow = tl.exp2(peak_there - peak)
                total = total * shrink + sum_there * grow
                mixed = mixed * shrink[:, None] + there * grow[:, None]
                top = peak
            tl.store(result, (mixed / total[:, None]).to(q.dtype), mask=used[:, None])


class SplitScratch:
    """Memory for the partial results of split attention, for up to `groups` (rows * kv heads) and `splits`. All
    layers of a stream share it."""

    def __init__(
        self, groups: int, splits: int, group_size: int, head_dim: int, device: torch.device
    ) -> None:
        self.partial = torch.empty(
            groups * splits * group_size * head_dim, device=device, dtype=torch.float32
        )
        self.state = torch.empty(groups * splits * group_size * 2, device=device, dtype=torch.float32)
        self.arrivals = torch.zeros(groups, device=device, dtype=torch.int32)


def decode_attention(
    qkv: Tensor, layer: Layer, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, positions: Tensor, slots: Tensor,
    out: Tensor, scratch: SplitScratch, tile: AttentionTile, splits: int = 1, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Computes norm (if the layer has norms) and rotary embedding of queries and keys, appends the new key and value,
    and attends over the row's pages, including the new position.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim]; k_cache, v_cache: [pages, kv_heads, page_size,
    head_dim] of one layer; page_table: int32 [slots, pages of a slot]; positions: int32 [slots], the position of
    the new token; slots: int32 [rows]; splits: number of programs that share the positions of a row and kv head,
    whose results are added in order; out: [rows, heads * head_dim].
    """
    _, kv_heads, page_size, head_dim = k_cache.shape
    if page_size & (page_size - 1):
        raise ValueError(
            f"the number of positions of a page must be a power of two, not {page_size}; otherwise blocks would cross pages"
        )
    heads = out.shape[1] // head_dim
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32"
    _decode_attention[(kv_heads, qkv.shape[0], splits)](
        qkv, layer.q_norm, layer.k_norm, stack.rope_table, k_cache, v_cache, page_table, positions, slots, out,
        scratch.partial, scratch.state, scratch.arrivals, stack.eps, stack.scale, k_cache.stride(0), k_cache.stride(1), page_table.shape[1],
        heads, kv_heads, head_dim, page_size, tile.block, splits, precision, pdl, stack.wide_rope, num_warps=tile.warps,
        num_stages=tile.stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _predictor_attention(
    qkv, q_weight, k_weight, table, k_cache, v_cache, out, rows, position, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr,
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
    if FIRST:  # two tokens per row: all first tokens, then all second ones; the first attends only to itself
        key0 = normed_rope(base + (HEADS + kv_head) * D, k_weight, table, eps, D, WIDE)
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
    key = normed_rope(base + (HEADS + kv_head) * D, k_weight, angles, eps, D, WIDE)
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
        q = normed_rope(base + (kv_head * GROUP + head) * D, q_weight, angles, eps, D, WIDE).to(tl.float32)
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
            mixed = (share * value.to(tl.float32) + tl.sum(shares[:, None] * values, axis=0)) / (
                share + tl.sum(shares)
            )
        tl.store(target + (kv_head * GROUP + head) * D + at, mixed.to(value.dtype))


def predictor_attention(
    qkv: Tensor, layer: Layer, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, position: int, out: Tensor, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of the depth (the code predictor) over the positions of one frame, with norm (if the layer has norms)
    and rotary embedding of queries and keys, and the append of the new ones.

    qkv: [rows, ...] for one token per row at `position` >= 2; or, with `position` 0, [2 * rows, ...] for the
    frame's first two tokens: first those of all rows at position 0, then those at position 1. k_cache, v_cache:
    [rows, kv_heads, span, head_dim] of one layer; out has as many rows as qkv.
    """
    rows, kv_heads, span, head_dim = k_cache.shape
    rows = min(rows, qkv.shape[0] // 2 if position == 0 else qkv.shape[0])
    heads = out.shape[1] // head_dim
    _predictor_attention[(rows, kv_heads)](
        qkv, layer.q_norm, layer.k_norm, stack.rope_table, k_cache, v_cache, out, rows, position, stack.eps, stack.scale,
        heads, kv_heads, head_dim, span, position == 0, pdl, stack.wide_rope, num_warps=1, **pdl_options(pdl),
    )  # fmt: skip
    return out


#: Queries of a program, counting all query heads of its kv head; they are the rows of a product.
_QUERIES = 64
#: A step reads the keys of one page, within this minimum and maximum.
_MIN_KEYS = 16
_MAX_KEYS = 64


class QueryTiles:
    """The tokens of each program, which are consecutive tokens of one run, so that they see the same pages.

    run, at: int64 [tiles], the run and the first token; run is -1 for a program without tokens. They are computed
    on the device, once for all layers.
    """

    def __init__(self, prompts: PackedPrompts, total: int, heads: int, kv_heads: int) -> None:
        #: Query heads per kv head, rounded up to a power of two, and tokens per program (`rows`).
        self.group = triton.next_power_of_2(heads // kv_heads)
        self.rows = max(_QUERIES // self.group, 1)
        self.firsts = prompts.firsts()
        each = (prompts.counts + (self.rows - 1)) // self.rows
        ends = each.cumsum(0)
        # Every run can have one tile that is not full.
        tile = torch.arange(-(-total // self.rows) + len(each), device=ends.device)
        run = torch.searchsorted(ends, tile, right=True).clamp(max=len(each) - 1)
        self.at = self.firsts[run] + (tile - (ends[run] - each[run])) * self.rows
        self.run = torch.where(tile < ends[-1], run, -1)


@triton.jit
def _packed_attention(
    q, k_cache, v_cache, page_table, owners, starts, firsts, tile_run, tile_at, out, scale, page_stride, head_stride, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    SHARED: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    run = tl.load(tile_run + tile)
    if run >= 0:
        first = tl.load(firsts + run)
        end = tl.load(firsts + run + 1)
        begin = tl.load(tile_at + tile)
        start = tl.load(starts + run)
        pages = page_table + tl.load(owners + run) * table_width
        at = tl.arange(0, D)
        lane = tl.arange(0, ROWS * GROUP)
        token = begin + lane // GROUP
        used = (token < end) & (lane % GROUP < SHARED)
        place = token * (HEADS * D) + (kv_head * SHARED + lane % GROUP) * D
        query = tl.load(q + place[:, None] + at[None, :], mask=used[:, None], other=0.0)
        position = (start + token - first).to(tl.int32)
        length = (start + tl.minimum(begin + ROWS, end) - first).to(tl.int32)
        top = tl.full((ROWS * GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS * GROUP,), tl.float32)
        mixed = tl.zeros((ROWS * GROUP, D), tl.float32)
        for step in range(0, length, BLOCK):
            offsets = step + tl.arange(0, BLOCK)
            inside = offsets < length
            seen = inside[None, :] & (offsets[None, :] <= position[:, None])
            top, total, mixed = _attend(
                query, k_cache, v_cache, pages, step, offsets, inside, seen, top, total, mixed, scale, page_stride, kv_head * head_stride,
                D, PAGE, BLOCK, PRECISION,
            )  # fmt: skip
        tl.store(
            out + place[:, None] + at[None, :], (mixed / total[:, None]).to(query.dtype), mask=used[:, None]
        )


def packed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prompts: PackedPrompts,
    tiles: QueryTiles,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Causal attention of packed prompts over their pages, which already hold the new positions. Writes into `out`
    [total, heads * head_dim], except for rows after the last run.

    q: [total, heads, head_dim]. q, caches and page table are contiguous; the page size is a power of two.
    """
    _, kv_heads, page_size, head_dim = k_cache.shape
    heads = q.shape[1]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _packed_attention[(kv_heads, len(tiles.run))](
        q, k_cache, v_cache, prompts.table, prompts.owners, prompts.starts, tiles.firsts, tiles.run, tiles.at, out, scale,
        k_cache.stride(0), k_cache.stride(1), prompts.table.stride(0), heads, kv_heads, head_dim, page_size, tiles.rows, tiles.group,
        max(_MIN_KEYS, min(page_size, _MAX_KEYS)), precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
