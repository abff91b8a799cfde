"""Prefill attention of many requests in a few calls, for devices where calls cost more than padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.registry import to_device


class PackedRuns:
    """Runs of new positions of several requests, packed one after the other, over pages as in `paged_prefill_attention`.

    Runs whose contexts have like numbers of pages are padded to one length and share a call, with the same indices for all layers.
    """

    def __init__(self, table: Tensor, starts: Sequence[int], counts: Sequence[int], page_size: int) -> None:
        """table: int64 [runs, pages], the pages of each run in order; starts, counts: first position and positions of each run."""
        pages = [-(-(start + count) // page_size) for start, count in zip(starts, counts)]
        sizes: dict[int, list[int]] = {}
        for run, used in enumerate(pages):
            sizes.setdefault(used.bit_length(), []).append(run)
        first = np.cumsum([0, *counts])
        self._groups = [
            _Group(table, members, first, starts, counts, max(pages[run] for run in members), page_size) for members in sizes.values()
        ]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """q: [n, heads, head_dim]; caches of one layer: [pages, kv_heads, page_size, head_dim]; returns [n, heads * head_dim]."""
        out = torch.empty_like(q).flatten(1)
        for group in self._groups:
            group.attend(q, k_cache, v_cache, scale, out)
        return out


class _Group:
    """Runs padded to the longest of them."""

    def __init__(
        self,
        table: Tensor,
        members: list[int],
        first: np.ndarray,
        starts: Sequence[int],
        counts: Sequence[int],
        pages: int,
        page_size: int,
    ) -> None:
        new = max(counts[run] for run in members)
        steps = np.arange(new)
        count = np.array([counts[run] for run in members])[:, None]
        real = steps < count
        tokens = np.where(real, first[members][:, None] + steps, 0)
        limits = np.array([starts[run] for run in members])[:, None] + steps
        parts = [np.array(members), tokens.ravel(), limits.ravel(), np.flatnonzero(real), tokens[real]]
        sent = to_device(torch.from_numpy(np.concatenate(parts)), table.device).split([part.size for part in parts])
        rows = len(members)
        self._pages = table[sent[0], :pages]
        self._tokens = sent[1].view(rows, new)
        self._seen = (torch.arange(pages * page_size, device=table.device) <= sent[2].view(rows, new, 1))[:, None]
        self._cells, self._targets = sent[3], sent[4]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
        rows, new = self._tokens.shape
        heads, kv_heads = q.shape[1], k_cache.shape[1]
        groups = heads // kv_heads
        k, v = (cache[self._pages].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
        # The heads of a group see the same keys: they stand as queries of one head.
        asked = q[self._tokens].view(rows, new, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = functional.scaled_dot_product_attention(asked, k, v, self._seen.repeat(1, 1, groups, 1), scale=scale)
        packed = found.unflatten(2, (groups, new)).permute(0, 3, 1, 2, 4).reshape(rows * new, -1)
        out[self._targets] = packed[self._cells]
