"""Padded prefill on fused Triton kernels; `kernels.prefill` says what it means."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lm_frame import StackTensors
from kernels.lm_triton import add_norm, swiglu
from kernels.prefill import attend_padded, places
from kernels.prefill_triton import norm_rope_append


def prefill_padded(
    embeddings: Tensor, pages: Tensor, counts: Tensor, start: int, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, scratch: int
) -> None:
    """Writes keys and values of all layers; the last layer stops there.

    embeddings: [runs, new, hidden], kept as they are; caches: [layers, pages, kv_heads, page_size, head_dim].
    """
    runs, new, hidden = embeddings.shape
    positions, held, offsets = places(pages, counts, new, start, k_cache.shape[3], scratch)
    x = embeddings.reshape(runs * new, hidden).clone()
    normed, pending = torch.empty_like(x), None
    q = x.new_empty(runs * new, stack.heads, k_cache.shape[4])
    for index, layer in enumerate(stack.layers):
        input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down = layer
        packed = torch.mm(add_norm(x, pending, input_norm, stack.eps, normed), qkv.t())
        keys, values = k_cache[index], v_cache[index]
        norm_rope_append(packed, q_norm, k_norm, stack.eps, stack.rope_table, positions, keys, values, held, offsets, q)
        if index == len(stack.layers) - 1:
            return
        pending = torch.mm(attend_padded(q, keys, values, pages, start, stack.scale), o.t())
        both = torch.mm(add_norm(x, pending, post_norm, stack.eps, normed), gate_up.t())
        act = both.new_empty(len(both), down.shape[1])
        pending = torch.mm(swiglu(both, act), down.t())
