"""Prefill of padded or packed prompts in fused kernels: writes the keys and values of all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels import lm_products
from kernels.attention import PackedPrompts, attend_padded, padded_places
from kernels.cuda_driver import processors
from kernels.frame import StackTensors
from kernels.lm_attention import QueryTiles, packed_attention
from kernels.lm_triton import add_norm, norm_rope_append, swiglu


def prefill_padded(
    embeddings: Tensor,
    pages: Tensor,
    counts: Tensor,
    start: int,
    stack: StackTensors,
    k_cache: Tensor,
    v_cache: Tensor,
    scratch: int,
) -> None:
    """Writes the keys and values of all layers for padded prompts. The last layer computes nothing else.

    embeddings: [runs, new, hidden], which are not changed; caches: [layers, pages, kv_heads, page_size,
    head_dim]; pages, counts, start: as in `kernels.attention.padded_places`.
    """
    runs, new, hidden = embeddings.shape
    places = padded_places(pages, counts, new, start, k_cache.shape[3], scratch)

    def attend(layer: int, q: Tensor) -> Tensor:
        return attend_padded(q, k_cache[layer], v_cache[layer], pages, start, stack.scale)

    _write(embeddings.reshape(runs * new, hidden), places, stack, k_cache, v_cache, attend)


def prefill_packed(
    embeddings: Tensor,
    prompts: PackedPrompts,
    stack: StackTensors,
    k_cache: Tensor,
    v_cache: Tensor,
    scratch: int,
) -> None:
    """`prefill_padded` for packed prompts of any lengths and first positions. Only the end of the row is padding.

    embeddings: [total, hidden], all finite, which are not changed. The launches depend only on `total` and on the
    number of runs, so they can be captured as a graph.
    """
    places = prompts.places(len(embeddings), k_cache.shape[3], scratch)
    tiles = QueryTiles(prompts, len(embeddings), stack.heads, stack.kv_heads)
    # Attention writes nothing after the last run. Zeros there keep the scratch page finite in all layers.
    mixed = embeddings.new_zeros(len(embeddings), stack.heads * stack.head_dim)

    def attend(layer: int, q: Tensor) -> Tensor:
        return packed_attention(q, k_cache[layer], v_cache[layer], prompts, tiles, stack.scale, mixed)

    _write(embeddings, places, stack, k_cache, v_cache, attend)


def _write(
    embeddings: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    stack: StackTensors,
    k_cache: Tensor,
    v_cache: Tensor,
    attend: Callable[[int, Tensor], Tensor],
) -> None:
    """Runs all layers over embeddings [n, hidden] at these places. attend: (layer, q [n, heads, head_dim]) -> [n,
    heads * head_dim].

    The products with `o` and `down` add to the residual within cuBLAS, which rounds once less than the twin.
    """
    positions, held, offsets = places
    x = embeddings.clone()
    normed = torch.empty_like(x)
    q = x.new_empty(len(x), stack.heads, k_cache.shape[4])
    wide = _fills(len(x), stack.layers[0].down)
    for index, layer in enumerate(stack.layers):
        add_norm(x, None, layer.input_norm, stack.eps, normed)
        packed = linear(normed, layer.qkv, layer.qkv_bias)
        norm_rope_append(packed, layer, stack, positions, k_cache[index], v_cache[index], held, offsets, q)
        if index == len(stack.layers) - 1:
            return
        x.addmm_(attend(index, q), layer.o.t())
        add_norm(x, None, layer.post_norm, stack.eps, normed, early=wide and x.is_cuda)
        act = x.new_empty(len(x), layer.down.shape[1])
        if wide:
            lm_products.swiglu(normed, layer.gate_up, act, pdl=True)
        else:
            swiglu(linear(normed, layer.gate_up), act)
        x.addmm_(act, layer.down.t())


def _fills(rows: int, down: Tensor) -> bool:
    """Whether `lm_products.swiglu` supports gate and up of a layer with this `down`, and is faster for this
    number of rows."""
    return lm_products.supports_swiglu(down) and lm_products.fills(
        rows, down.shape[1], processors(down.device.index or 0)
    )
