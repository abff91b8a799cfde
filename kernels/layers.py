"""The operations of a decoder layer other than its matrix products and attention, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.frame import Layer, StackTensors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension with the rounding of the published model: computed in float32, rounded to
    the input's type, then multiplied by the weight.

    x: [..., width]; weight: [width].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up: [..., 2 * width], the gate's values first -> [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rope_table(
    positions: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Cosines and sines side by side, [positions, head_dim]; computed in float32 and then cast, as in the
    published model."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device=device, dtype=dtype)


def rope(x: Tensor, table: Tensor, wide: bool = False) -> Tensor:
    """Rotary embedding: rotates the two halves of every head. `wide`: computes in float32 and rounds once.

    x: [..., heads, head_dim]; table: [..., head_dim], the rows of `rope_table` for each token.
    """
    kind = x.dtype
    if wide:
        x = x.float()
        table = table.float()
    cos, sin = table.unsqueeze(-2).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(kind)


def qk_norm_rope_append(
    qkv: Tensor,
    layer: Layer,
    stack: StackTensors,
    angles: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    offsets: Tensor,
) -> Tensor:
    """Normalizes (if the layer of the stack has norms) and rotates the heads of packed projections, writes keys and values into
    their pages, and returns the queries.

    qkv: [n, (heads + 2 * kv_heads) * head_dim]; angles: [n, head_dim], the rows of `rope_table` at their
    positions; pages, offsets: [n], each token's page and its place there; k_cache, v_cache: [pages, kv_heads,
    page_size, head_dim] of one layer; returns [n, heads, head_dim].
    """
    kv_heads = k_cache.shape[1]
    heads = qkv.view(qkv.shape[0], -1, k_cache.shape[3])
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, stack.eps)
        k = rms_norm(k, layer.k_norm, stack.eps)
    k_cache[pages, :, offsets] = rope(k, angles, stack.wide_rope)
    v_cache[pages, :, offsets] = v
    return rope(q, angles, stack.wide_rope)
