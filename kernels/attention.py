"""Attention over paged keys and values: one query a request while decoding, a run of queries a request in prefill.

Pages are [pages, kv_heads, page_size, head_dim] of one layer; a page table row lists a request's pages in order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.registry import op


@op(
    "paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor lengths, int max_length, "
    "float scale) -> Tensor"
)
def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, max_length: int, scale: float
) -> Tensor:
    """Attention of one new position a row over that row's pages, the new position included.

    q: [n, heads, head_dim]; page_table: [n, pages of a row]; lengths: [n], 0 for a row that is not in use (its result means
    nothing); max_length: at least the largest of `lengths`; returns [n, heads * head_dim].
    On CPU every row is computed alone, so that a row's bits do not depend on its neighbours.
    """
    if q.device.type == "cpu":
        return _rows_alone(q, k_cache, v_cache, page_table, lengths, scale)
    return rows_together(q, k_cache, v_cache, page_table, lengths, max_length, scale)


def rows_together(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, max_length: int, scale: float
) -> Tensor:
    """`paged_decode_attention` for all rows in one call, over contexts filled up to `max_length`."""
    pages = page_table[:, : -(-max_length // k_cache.shape[2])]
    k, v = (cache[pages].transpose(1, 2).flatten(2, 3)[:, :, :max_length] for cache in (k_cache, v_cache))
    seen = torch.arange(max_length, device=q.device) < lengths.clamp(min=1)[:, None]
    # The heads of a group see the same keys: they stand as queries of one head.
    groups = q.unflatten(1, (k_cache.shape[1], -1))
    return functional.scaled_dot_product_attention(groups, k, v, seen[:, None, None], scale=scale).flatten(1)


def _rows_alone(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths.tolist()):
        if length:
            k, v = gather_pages(k_cache, v_cache, page_table[row], length)
            out[row] = _attend(q[row].clone()[:, None], k, v, scale, None)[:, 0]
    return out.flatten(1)


@op(
    "paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, int[] rows, int[] lengths, float scale) -> Tensor"
)
def paged_prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: list[int], lengths: list[int], scale: float
) -> Tensor:
    """Causal attention of packed runs of new positions, each over its own pages.

    q: [n, heads, head_dim], run i after run i - 1; page_table: [runs, pages of a run]; rows: new positions of each run;
    lengths: positions of each run in its pages, the new ones included; returns [n, heads * head_dim].
    """
    parts = []
    for run, (new, length) in enumerate(zip(q.split(rows), lengths)):
        k, v = gather_pages(k_cache, v_cache, page_table[run], length)
        at = torch.arange(length, device=q.device)
        seen = at <= at[length - new.shape[0] :, None]
        parts.append(_attend(new.transpose(0, 1).contiguous(), k, v, scale, seen).transpose(0, 1).flatten(1))
    return torch.cat(parts)


def gather_pages(k_cache: Tensor, v_cache: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a request, each [kv_heads, length, head_dim]."""
    used = pages[: -(-length // k_cache.shape[2])]
    k, v = (cache[used].transpose(0, 1).flatten(1, 2)[:, :length].contiguous() for cache in (k_cache, v_cache))
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    """Grouped-query attention of one request. q: [heads, n, head_dim]; k, v: [kv_heads, length, head_dim]; seen: [n, length]."""
    heads, rows, head_dim = q.shape
    grouped = q.reshape(k.shape[0], -1, head_dim)
    scores = torch.matmul(grouped, k.transpose(1, 2)).float() * scale
    if seen is not None:
        groups = heads // k.shape[0]
        scores = scores.masked_fill(~seen.repeat(groups, 1), float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v).reshape(heads, rows, head_dim)


def padded_places(pages: Tensor, counts: Tensor, new: int, start: int, page_size: int, scratch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Position, page and offset of each of the padded new positions, [runs * new]; what a run does not have goes to the scratch page.

    pages: [runs, (start + new) / page_size]; counts: [runs], new positions of each run.
    """
    runs = len(pages)
    steps = torch.arange(new, device=pages.device)
    owned = pages[:, start // page_size :].repeat_interleave(page_size, dim=1)
    held = torch.where(steps < counts[:, None], owned, scratch)
    positions = (start + steps).repeat(runs)
    return positions, held.flatten(), positions % page_size


def attend_padded(q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of padded new positions over their pages.

    q: [runs * new, heads, head_dim], at positions `start` and on; caches of one layer: [pages, kv_heads, page_size, head_dim]; pages:
    [runs, (start + new) / page_size]. Returns [runs * new, heads * head_dim]; rows beyond a run's own positions mean nothing.
    """
    runs = len(pages)
    k, v = (cache[pages].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
    asked = q.view(runs, -1, *q.shape[1:]).transpose(1, 2)
    if not start:
        found = functional.scaled_dot_product_attention(asked, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return found.transpose(1, 2).reshape(len(q), -1)
    # The heads of a group see the same keys: they stand as queries of one head.
    groups, new = q.shape[1] // k.shape[1], asked.shape[2]
    seen = torch.arange(k.shape[2], device=q.device) <= start + torch.arange(new, device=q.device)[:, None]
    grouped = asked.unflatten(1, (k.shape[1], groups)).flatten(2, 3)
    found = functional.scaled_dot_product_attention(grouped, k, v, seen.repeat(groups, 1), scale=scale)
    return found.unflatten(2, (groups, new)).permute(0, 3, 1, 2, 4).reshape(len(q), -1)
