"""The Triton kernel of causal attention of packed prompts over paged keys and values; its twin is `kernels.varlen_attention.attend_packed`.

Nothing is read on the host: a captured launch serves any lengths, any first positions and any pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.varlen_attention import PackedPrompts

# ruff: noqa: N803, N806
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportCallIssue=false, reportAssignmentType=false

_LOG2E = tl.constexpr(1.4426950408889634)
#: Queries of a program, over all heads that share a kv head: as many rows as a product should have.
_QUERIES = 64
#: Keys of a step: a page's, as far as a product of the device knows that number.
_LEAST_KEYS, _KEYS = 16, 64


class QueryTiles:
    """Which tokens each program takes: some that follow each other in one run, so that they see the same pages.

    run, at: int64 [tiles], the run and the first token; run is -1 for a program that has none. Made on the device, once for all layers.
    """

    def __init__(self, prompts: PackedPrompts, total: int, heads: int, kv_heads: int) -> None:
        #: Query heads of a kv head, filled up to a power of two, and tokens of a program.
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
            if BLOCK <= PAGE:
                page = tl.load(pages + step // PAGE).to(tl.int64)
            else:
                page = tl.load(pages + offsets // PAGE, mask=inside, other=0).to(tl.int64)
            cell = page * page_stride + kv_head * head_stride + (offsets % PAGE).to(tl.int64) * D
            k = tl.load(k_cache + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
            v = tl.load(v_cache + cell[:, None] + at[None, :], mask=inside[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
            scores = tl.where(inside[None, :] & (offsets[None, :] <= position[:, None]), scores, float("-inf"))
            peak = tl.maximum(top, tl.max(scores, axis=1))
            shrink = tl.exp2(top - peak)
            weights = tl.exp2(scores - peak[:, None])
            total = total * shrink + tl.sum(weights, axis=1)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
            top = peak
        tl.store(out + place[:, None] + at[None, :], (mixed / total[:, None]).to(query.dtype), mask=used[:, None])


def packed_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, prompts: PackedPrompts, tiles: QueryTiles, scale: float, out: Tensor
) -> Tensor:
    """`kernels.varlen_attention.attend_packed` into `out` [total, heads * head_dim], of which it writes the tokens of runs only.

    q, caches and table contiguous; a page has a power of two of positions.
    """
    _, kv_heads, page_size, head_dim = k_cache.shape
    heads = q.shape[1]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    _packed_attention[(kv_heads, len(tiles.run))](
        q, k_cache, v_cache, prompts.table, prompts.owners, prompts.starts, tiles.firsts, tiles.run, tiles.at, out, scale,
        k_cache.stride(0), k_cache.stride(1), prompts.table.stride(0), heads, kv_heads, head_dim, page_size, tiles.rows, tiles.group,
        max(_LEAST_KEYS, min(page_size, _KEYS)), precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
