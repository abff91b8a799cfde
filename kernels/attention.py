"""Attention over paged keys and values. A request has one query in decoding, and a run of queries (consecutive
new positions) in prefill.

In prefill, on devices where calls cost more than padding, many requests share a few calls: their runs are
padded to one length, or packed, that is, concatenated in one row of positions.

The pages of one layer are [pages, kv_heads, page_size, head_dim]; a row of a page table lists a request's
pages in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.registry import to_device


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
) -> Tensor:
    """Attention of one new position per row over that row's pages, including the new position.

    q: [n, heads, head_dim]; page_table: [n, pages of a row]; lengths: [n], 0 for an unused row, whose result
    is undefined; max_length: at least the largest of `lengths`; returns [n, heads * head_dim]. On CPU every
    row is computed separately, so that its bits do not depend on other rows.
    """
    if q.device.type == "cpu":
        out = torch.zeros_like(q)
        for row, length in enumerate(lengths.tolist()):
            if length:
                query = q[row].clone()[:, None]
                out[row] = _attend(query, k_cache, v_cache, page_table[row], length, scale)[:, 0]
        return out.flatten(1)
    return rows_together(q, k_cache, v_cache, page_table, lengths, max_length, scale)


def rows_together(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
) -> Tensor:
    """`paged_decode_attention` for all rows in one call, with contexts padded to `max_length`."""
    pages = page_table[:, : -(-max_length // k_cache.shape[2])]
    seen = torch.arange(max_length, device=q.device) < lengths.clamp(min=1)[:, None]
    return _attend_together(q[:, None], k_cache, v_cache, pages, seen[:, None], scale)


def _attend_together(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, seen: Tensor, scale: float
) -> Tensor:
    """Attention of runs of the same length over their pages. The heads of a group share their keys, so their
    queries are computed as if they were all queries of one head.

    q: [runs, new, heads, head_dim]; pages: [runs, pages of a run]; seen: bool [runs or 1, new, positions],
    which of the first `positions` each query sees; later positions are ignored. Returns [runs * new, heads *
    head_dim].
    """
    runs, new, heads, _ = q.shape
    k, v = (cache[pages].transpose(1, 2).flatten(2, 3)[:, :, : seen.shape[2]] for cache in (k_cache, v_cache))
    groups = heads // k.shape[1]
    asked = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    found = functional.scaled_dot_product_attention(
        asked, k, v, seen.repeat(1, groups, 1)[:, None], scale=scale
    )
    return found.unflatten(2, (groups, new)).permute(0, 3, 1, 2, 4).reshape(runs * new, -1)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    rows: list[int],
    lengths: list[int],
    scale: float,
) -> Tensor:
    """Causal attention of packed runs of new positions, each over its own pages.

    q: [n, heads, head_dim], run i after run i - 1; page_table: [runs, pages of a run]; rows: number of new
    positions of each run; lengths: number of positions of each run in its pages, including the new ones;
    returns [n, heads * head_dim].
    """
    parts = []
    for run, (new, length) in enumerate(zip(q.split(rows), lengths)):
        at = torch.arange(length, device=q.device)
        seen = at <= at[length - new.shape[0] :, None]
        queries = new.transpose(0, 1).contiguous()
        found = _attend(queries, k_cache, v_cache, page_table[run], length, scale, seen)
        parts.append(found.transpose(0, 1).flatten(1))
    return torch.cat(parts)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    length: int,
    scale: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of one request over the first `length` keys and values of its pages. q: [heads, n,
    head_dim]; pages: [pages of the request]; seen: [n, length]."""
    used = pages[: -(-length // k_cache.shape[2])]
    # Each [kv_heads, length, head_dim].
    k, v = (
        cache[used].transpose(0, 1).flatten(1, 2)[:, :length].contiguous() for cache in (k_cache, v_cache)
    )
    heads, rows, head_dim = q.shape
    grouped = q.reshape(k.shape[0], -1, head_dim)
    scores = torch.matmul(grouped, k.transpose(1, 2)).float() * scale
    if seen is not None:
        scores = scores.masked_fill(~seen.repeat(heads // k.shape[0], 1), float("-inf"))
    return torch.matmul(scores.softmax(-1).to(v.dtype), v).reshape(heads, rows, head_dim)


def padded_places(
    pages: Tensor, counts: Tensor, new: int, start: int, page_size: int, scratch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Position, page and offset of each of the padded new positions, [runs * new]; padding goes to the scratch
    page.

    pages: [runs, (start + new) / page_size]; counts: [runs], number of real new positions of each run.
    """
    runs = len(pages)
    steps = torch.arange(new, device=pages.device)
    owned = pages[:, start // page_size :].repeat_interleave(page_size, dim=1)
    held = torch.where(steps < counts[:, None], owned, scratch)
    positions = (start + steps).repeat(runs)
    return positions, held.flatten(), positions % page_size


def attend_padded(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, start: int, scale: float
) -> Tensor:
    """Causal attention of padded new positions over their pages.

    q: [runs * new, heads, head_dim], at the positions from `start`; caches of one layer: [pages, kv_heads,
    page_size, head_dim]; pages: [runs, (start + new) / page_size]. Returns [runs * new, heads * head_dim],
    which is undefined in rows of padding.
    """
    asked = q.view(len(pages), -1, *q.shape[1:])
    if not start:
        k, v = (cache[pages].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
        found = functional.scaled_dot_product_attention(
            asked.transpose(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return found.transpose(1, 2).reshape(len(q), -1)
    new = asked.shape[1]
    seen = torch.arange(start + new, device=q.device) <= start + torch.arange(new, device=q.device)[:, None]
    return _attend_together(asked, k_cache, v_cache, pages, seen[None], scale)


class PackedPrompts(NamedTuple):
    """Chunks of prompts (runs), concatenated in one row of positions. The numbers are tensors of the device, so
    that a captured graph reads them again at each replay.

    table: int64 [slots, pages of a slot]; owners, starts, counts: int64 [runs], for each run its slot, the
    position of its first token in the prompt, and its number of tokens, 0 for an unused run. Starts and counts
    may have any value.
    """

    table: Tensor
    owners: Tensor
    starts: Tensor
    counts: Tensor

    def firsts(self) -> Tensor:
        """The first index of each run in the row, and the end of the last run: int64 [runs + 1]."""
        return functional.pad(self.counts.cumsum(0), (1, 0))

    def places(self, total: int, page_size: int, scratch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Position, page and offset of each of `total` tokens, [total]; tokens after the last run go to the
        scratch page."""
        firsts = self.firsts()
        token = torch.arange(total, device=self.counts.device)
        run = torch.searchsorted(firsts[1:], token, right=True).clamp(max=len(self.counts) - 1)
        real = token < firsts[-1]
        positions = torch.where(real, self.starts[run] + token - firsts[run], 0)
        pages = torch.where(real, self.table[self.owners[run], positions // page_size], scratch)
        return positions, pages, positions % page_size


class PackedRuns:
    """Causal attention of packed runs, as in `paged_prefill_attention`, in fewer calls.

    Runs with similar numbers of pages form a group, which is padded to one length and computed in one call. The
    indices are computed once for all layers.
    """

    def __init__(self, table: Tensor, starts: Sequence[int], counts: Sequence[int], page_size: int) -> None:
        """table: int64 [runs, pages], the pages of each run in order; starts, counts: the first position and the
        number of new positions of each run."""
        start = np.array(starts)[:, None]
        count = np.array(counts)[:, None]
        first = np.cumsum(count)[:, None] - count
        pages = -(-(start + count) // page_size)[:, 0]
        _, sizes = np.frexp(pages)
        #: For each group: its pages, the rows of its tokens in `q` [runs, steps], which positions each token
        #: sees, the indices of steps that are not padding, and the rows of these in the result.
        self._groups = list[tuple[Tensor, ...]]()
        for size in np.unique(sizes):
            (runs,) = np.nonzero(sizes == size)
            steps = np.arange(count[runs].max())
            real = steps < count[runs]
            tokens = np.where(real, first[runs] + steps, 0)
            parts = [runs, tokens.ravel(), (start[runs] + steps).ravel(), np.flatnonzero(real), tokens[real]]
            sent = to_device(np.concatenate(parts), table.device)
            members, token, limits, cells, targets = sent.split([part.size for part in parts])
            owned = table[members, : pages[runs].max()]
            position = torch.arange(owned.shape[1] * page_size, device=table.device)
            seen = position <= limits.view(*real.shape, 1)
            self._groups.append((owned, token.view(real.shape), seen, cells, targets))

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """q: [n, heads, head_dim]; caches of one layer: [pages, kv_heads, page_size, head_dim]; returns
        [n, heads * head_dim]."""
        out = torch.empty_like(q).flatten(1)
        for pages, tokens, seen, cells, targets in self._groups:
            out[targets] = _attend_together(q[tokens], k_cache, v_cache, pages, seen, scale)[cells]
        return out
