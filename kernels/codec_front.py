"""Ops of a codec in front of its convolution stack: products, attention in a window, depthwise convolution; each with its PyTorch twin.

They compute in float32 and round once, where the single ops round at every step. Scales of a norm or of a layer stand in the weights of
the next or the last product, which is the same function. Activations are channels-last.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, pad, silu

from kernels.registry import op

#: What `codec_product` does with its result before it adds the residual.
PLAIN, SWIGLU, GELU = 0, 1, 2


@op("codec_product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float? eps, int activation) -> Tensor")
def codec_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float | None, activation: int) -> Tensor:
    """residual + activation(norm(x) @ weight + bias), where norm is RMSNorm without a weight, and nothing where `eps` is None.

    x: [..., K]; weight: [K, N], input channel first; bias: float32 [N]; residual: [..., N]. For SWIGLU weight is [K, 2 * N], the gate's
    columns first, and there is no bias. Returns [..., N].
    """
    wide = x.float()
    total = wide @ weight.float()
    if eps is not None:
        total = total * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if bias is not None:
        total = total + bias
    if activation == SWIGLU:
        gate, up = total.chunk(2, dim=-1)
        total = silu(gate) * up
    elif activation == GELU:
        total = gelu(total)
    if residual is not None:
        total = total + residual.float()
    return total.to(x.dtype)


@op(
    "codec_window_attention(Tensor qkv, Tensor? past, Tensor(a!)? kept, Tensor? positions, Tensor cosine, Tensor sine, int heads,"
    " int kv_heads, int window) -> Tensor"
)
def codec_window_attention(
    qkv: Tensor,
    past: Tensor | None,
    kept: Tensor | None,
    positions: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    kv_heads: int,
    window: int,
) -> Tensor:
    """Rotary embedding and causal attention in a window: query i sees the keys i - window < j <= i, of those that are there.

    qkv: [B, T, (heads + 2 * kv_heads) * D], half-split layout; cosine, sine: float32 [B or 1, T, D / 2]. past: [B, (window - 1) * 2 *
    kv_heads * D], the rotated keys, then the values, of the steps before, oldest first, of which those of `positions` (int64 [B], steps
    decoded before) are there; kept: the same for the next chunk, written. All three or none of them. Returns [B, T, heads * D].
    """
    rows, steps, width = qkv.shape
    dim, earlier = width // (heads + 2 * kv_heads), 0
    queries, keys, values = qkv.float().view(rows, steps, -1, dim).split((heads, kv_heads, kv_heads), dim=2)
    queries, keys = (_rotated(one, cosine, sine).to(qkv.dtype).float() for one in (queries, keys))
    if past is not None and kept is not None and positions is not None:
        earlier = window - 1
        before = past.float().view(rows, earlier, 2, kv_heads, dim)
        pairs = torch.cat((before, torch.stack((keys, values), dim=2)), dim=1)
        kept.view(rows, earlier, 2, kv_heads, dim).copy_(pairs[:, steps:])
        keys, values = pairs.unbind(2)
    query_at, key_at = torch.arange(steps, device=qkv.device) + earlier, torch.arange(earlier + steps, device=qkv.device)
    distance = query_at[:, None] - key_at
    seen = ((distance >= 0) & (distance < window)).expand(rows, 1, -1, -1)
    if positions is not None:
        seen = seen & (key_at - earlier >= -positions[:, None])[:, None, None]
    group = heads // kv_heads
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys.repeat_interleave(group, dim=2)) / math.sqrt(dim)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, values.repeat_interleave(group, dim=2)).reshape(rows, steps, -1).to(qkv.dtype)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [B, T, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.unsqueeze(2), sine.unsqueeze(2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@op("codec_depthwise_norm(Tensor x, Tensor? history, Tensor weight, Tensor bias, float eps) -> Tensor")
def codec_depthwise_norm(x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """A causal depthwise convolution, then LayerNorm without weight and bias.

    x: [B, T, C]; history: [B, taps - 1, C], the inputs before, or None: zeros; weight: float32 [taps, C], oldest tap first; bias:
    float32 [C]. Returns [B, T, C].
    """
    taps, channels = weight.shape
    extended = pad(x, (0, 0, taps - 1, 0)) if history is None else torch.cat((history, x), dim=1)
    made = conv1d(extended.float().transpose(1, 2), weight.T[:, None], bias, groups=channels).transpose(1, 2)
    return layer_norm(made, (channels,), eps=eps).to(x.dtype)
