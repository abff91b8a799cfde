"""Prefill in fused kernels, padded and packed, and the one between a layer's projection and its attention, whose twin is
`kernels.layers.qk_norm_rope_append`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import lm_products
from kernels.attention import attend_padded, padded_places
from kernels.cuda_driver import processors
from kernels.frame import StackTensors
from kernels.lm_triton import add_norm, swiglu
from kernels.varlen_attention import PackedPrompts
from kernels.varlen_triton import QueryTiles, packed_attention

# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false


@triton.jit
def _norm_rope_append(
    qkv, q_weight, k_weight, table, positions, pages, offsets, out, k_cache, v_cache, eps, page_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    cell = tl.load(pages + row) * page_stride + tl.load(offsets + row) * D
    head = tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, D)[None, :]
    across = (at + D // 2) % D
    base = qkv + row * ((HEADS + 2 * KV_HEADS) * D) + head * D
    inside = head < HEADS + 2 * KV_HEADS
    value = tl.load(base + at, mask=inside, other=0.0)
    turned = tl.load(base + across, mask=inside, other=0.0)
    kind = value.dtype
    wide = value.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
    if q_weight is not None:
        scale = tl.where(head < HEADS, tl.load(q_weight + at), tl.load(k_weight + at)).to(tl.float32)
        scale_turned = tl.where(head < HEADS, tl.load(q_weight + across), tl.load(k_weight + across)).to(tl.float32)
    cos = tl.load(table + position * D + at % (D // 2)).to(tl.float32)
    sin = tl.load(table + position * D + D // 2 + at % (D // 2)).to(tl.float32)
    sign = tl.where(at < D // 2, -1.0, 1.0)
    # Rounded wherever the twin stores a value in the model's type.
    if q_weight is not None:
        straight = ((wide * rstd).to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
        crossed = ((turned.to(tl.float32) * rstd).to(kind).to(tl.float32) * scale_turned).to(kind).to(tl.float32)
    else:
        straight = wide
        crossed = turned.to(tl.float32)
    if WIDE:
        rotated = (straight * cos + sign * (crossed * sin)).to(kind)
    else:
        rotated = ((straight * cos).to(kind).to(tl.float32) + sign * (crossed * sin).to(kind).to(tl.float32)).to(kind)
    tl.store(out + row * (HEADS * D) + head * D + at, rotated, mask=head < HEADS)
    key = head - HEADS
    tl.store(k_cache + cell + key * head_stride + at, rotated, mask=(key >= 0) & (key < KV_HEADS))
    tl.store(v_cache + cell + (key - KV_HEADS) * head_stride + at, value, mask=inside & (key >= KV_HEADS))


def norm_rope_append(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, rope_table: Tensor, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, pages: Tensor, offsets: Tensor, out: Tensor, wide_rope: bool = False,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope_append` into `out` [n, heads, head_dim]; qkv and caches contiguous, head_dim a power of two."""
    _, kv_heads, page_size, head_dim = k_cache.shape
    rows, heads, _ = out.shape
    _norm_rope_append[(rows,)](
        qkv, q_weight, k_weight, rope_table, positions, pages, offsets, out, k_cache, v_cache, eps, kv_heads * page_size * head_dim,
        page_size * head_dim, heads, kv_heads, head_dim, triton.next_power_of_2(heads + 2 * kv_heads), wide_rope, num_warps=4,
    )  # fmt: skip
    return out


def prefill_padded(
    embeddings: Tensor, pages: Tensor, counts: Tensor, start: int, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, scratch: int
) -> None:
    """Writes keys and values of all layers; the last layer stops there.

    embeddings: [runs, new, hidden], kept as they are; caches: [layers, pages, kv_heads, page_size, head_dim].
    """
    runs, new, hidden = embeddings.shape
    places = padded_places(pages, counts, new, start, k_cache.shape[3], scratch)

    def attend(layer: int, q: Tensor) -> Tensor:
        return attend_padded(q, k_cache[layer], v_cache[layer], pages, start, stack.scale)

    _write(embeddings.reshape(runs * new, hidden), places, stack, k_cache, v_cache, attend)


def prefill_packed(embeddings: Tensor, prompts: PackedPrompts, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, scratch: int) -> None:
    """`prefill_padded` of prompts one after the other, of any lengths and from any position on: only what is behind them is padding.

    embeddings: [total, hidden], finite everywhere, kept as they are. What it launches depends on `total` and on the number of runs only.
    """
    places = prompts.places(len(embeddings), k_cache.shape[3], scratch)
    tiles = QueryTiles(prompts, len(embeddings), stack.heads, stack.kv_heads)
    # Behind the last run nothing is written: zeros stay there in all layers, so that the scratch page stays finite.
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
    """All layers over embeddings [n, hidden] at these places; attend: (layer, q [n, heads, head_dim]) -> [n, heads * head_dim].

    O and down add what they make to the residual themselves (cuBLAS's beta), with one rounding less than the twin.
    """
    positions, held, offsets = places
    x = embeddings.clone()
    normed = torch.empty_like(x)
    q = x.new_empty(len(x), stack.heads, k_cache.shape[4])
    wide = _fills(len(x), stack.layers[0].down)
    for index, layer in enumerate(stack.layers):
        ready, weight = add_norm(x, None, layer.input_norm, stack.eps, normed), layer.qkv.t()
        packed = torch.mm(ready, weight) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, ready, weight)
        norm_rope_append(
            packed, layer.q_norm, layer.k_norm, stack.eps, stack.rope_table, positions, k_cache[index], v_cache[index], held, offsets, q,
            stack.wide_rope,
        )  # fmt: skip
        if index == len(stack.layers) - 1:
            return
        x.addmm_(attend(index, q), layer.o.t())
        add_norm(x, None, layer.post_norm, stack.eps, normed, early=wide and x.is_cuda)
        act = x.new_empty(len(x), layer.down.shape[1])
        if wide:
            lm_products.swiglu(normed, layer.gate_up, act, pdl=True)
        else:
            swiglu(torch.mm(normed, layer.gate_up.t()), act)
        x.addmm_(act, layer.down.t())


def _fills(rows: int, down: Tensor) -> bool:
    """Whether `lm_products.swiglu` knows gate and up of a layer with this `down`, and is worth its launch for so many rows."""
    return lm_products.serves_swiglu(down) and lm_products.fills(rows, down.shape[1], processors(down.device.index or 0))
