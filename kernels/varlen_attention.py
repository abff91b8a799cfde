"""Prefill attention of many requests in a few calls, for devices where calls cost more than padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import paged_prefill_attention
from kernels.registry import to_device


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Chunks of prompts one after the other in one row of positions, as tensors of the device: what a graph reads anew at each replay.

    table: int64 [slots, pages of a slot]; owners, starts, counts: int64 [runs], of each chunk the slot, the position of its first token in
    the prompt, and its tokens, 0 for a run that is not in use. Any start and any count will do.
    """

    table: Tensor
    owners: Tensor
    starts: Tensor
    counts: Tensor

    def firsts(self) -> Tensor:
        """Where each run begins in the row, and where the last one ends: int64 [runs + 1]."""
        return torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))

    def places(self, total: int, page_size: int, scratch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Position, page and offset of each of `total` tokens, [total]; what lies behind the last run goes to the scratch page."""
        firsts, token = self.firsts(), torch.arange(total, device=self.counts.device)
        run = torch.searchsorted(firsts[1:], token, right=True).clamp(max=len(self.counts) - 1)
        real = token < firsts[-1]
        positions = torch.where(real, self.starts[run] + token - firsts[run], 0)
        pages = torch.where(real, self.table[self.owners[run], positions // page_size], scratch)
        return positions, pages, positions % page_size


def attend_packed(q: Tensor, k_cache: Tensor, v_cache: Tensor, prompts: PackedPrompts, scale: float) -> Tensor:
    """Causal attention of packed prompts over their pages, which hold the new positions too: the twin of `kernels.varlen_triton`.

    q: [total, heads, head_dim]; caches of one layer: [pages, kv_heads, page_size, head_dim]. Returns [total, heads * head_dim], zeros
    behind the last run. Reads the runs on the host.
    """
    used = [(run, start, count) for run, (start, count) in enumerate(zip(prompts.starts.tolist(), prompts.counts.tolist())) if count]
    counts, out = [count for _, _, count in used], torch.zeros_like(q).flatten(1)
    if counts:
        tables = prompts.table[prompts.owners[[run for run, _, _ in used]]]
        lengths = [start + count for _, start, count in used]
        out[: sum(counts)] = paged_prefill_attention(q[: sum(counts)], k_cache, v_cache, tables, counts, lengths, scale)
    return out


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
