"""Prefill of padded prompts: PyTorch ops as the twin, and fused kernels between the matrix products on a GPU.

Both do the same for `runs` prompts of one padded length, new positions from `start` on, and depend on shapes alone, so that a call
can be captured; they write keys and values and return nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def places(pages: Tensor, counts: Tensor, new: int, start: int, page_size: int, scratch: int) -> tuple[Tensor, Tensor, Tensor]:
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
