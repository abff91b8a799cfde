"""A codec's causal transformer over a sliding window, channels-last; it streams through `Past` as the convolutions do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from kernels.layers import rms_norm
from pipelines.codec.blocks import Past, StateLayout

#: Queries that attend at once: the mask of a long recording is otherwise the square of its length.
ATTENTION_STEPS = 1024

#: Positions int64 [B, T] and the type of the activations -> cosines and sines, two of [B, 1, T, head_dim].
Rotary = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angles of rotary embedding in half-split layout: positions [B, T], frequencies float32 [head_dim / 2] -> [B, 1, T, head_dim]."""
    found = positions[:, None, :, None].float() * frequencies
    return torch.cat((found, found), dim=-1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary embedding to x: [B, heads, T, head_dim], in the type of the cosines."""
    wide = x.to(cosine.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def window_mask(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Which keys a query sees: key j of query i iff i - window < j <= i and j >= 0.

    queries: positions [B, T]; keys: positions [B, K]. Returns bool [B, 1, T, K].
    """
    distance = queries[:, :, None] - keys[:, None, :]
    return ((distance >= 0) & (distance < window) & (keys[:, None, :] >= 0)).unsqueeze(1)


class WindowAttention:
    """Causal attention in a window, its masks made once for all layers of a pass.

    positions: int64 [B, T] of the queries. Keys and values are those of the same steps, behind those of the `window` - 1 steps before
    them where `with_past`.
    """

    def __init__(self, positions: Tensor, window: int, with_past: bool, dtype: torch.dtype) -> None:
        keys, earlier, steps = positions, 0, positions.shape[1]
        if with_past:
            earlier = window - 1
            keys = torch.cat((positions[:, :1] + torch.arange(-earlier, 0, device=positions.device), positions), dim=1)
        self._parts: list[tuple[slice, slice, Tensor]] = []
        for start in range(0, steps, ATTENTION_STEPS):
            end = min(start + ATTENTION_STEPS, steps)
            seen = slice(max(0, start + earlier - window + 1), end + earlier)
            mask = window_mask(positions[:, start:end], keys[:, seen], window)
            if mask.is_cuda:
                # Added once, instead of made anew from truths in every layer.
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self._parts.append((slice(start, end), seen, mask))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [B, heads, T, head_dim]; key, value: [B, kv_heads, earlier + T, head_dim]. Returns [B, heads, T, head_dim]."""
        grouped = query.shape[1] != key.shape[1]
        parts = [
            scaled_dot_product_attention(query[:, :, at], key[:, :, seen], value[:, :, seen], attn_mask=mask, enable_gqa=grouped)
            for at, seen, mask in self._parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv`: [(heads + 2 * kv_heads) * head_dim, dim], its heads in half-split layout; `gate_up`: [2 * intermediate, dim]."""

    norm1: Tensor
    qkv: Tensor
    out: Tensor
    scale1: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    scale2: Tensor


class TransformerLayer:
    """RMSNorm, attention, layer scale; RMSNorm, SwiGLU, layer scale. It keeps the last window - 1 rotated keys and values."""

    def __init__(self, weights: LayerWeights, layout: StateLayout, head_dim: int, kv_width: int, window: int, eps: float) -> None:
        self.weights, self.eps = weights, eps
        self.head_dim, self.kv_width = head_dim, kv_width
        self._widths = (len(weights.qkv) - 2 * kv_width, kv_width, kv_width)
        self.span = layout.add(window - 1, 2 * kv_width)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: WindowAttention, past: Past | None) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]."""
        weights = self.weights
        x = x + weights.scale1 * self._attention(rms_norm(x, weights.norm1, self.eps), cosine, sine, attend, past)
        gate, up = linear(rms_norm(x, weights.norm2, self.eps), weights.gate_up).chunk(2, dim=-1)
        return x + weights.scale2 * linear(silu(gate) * up, weights.down)

    def _attention(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: WindowAttention, past: Past | None) -> Tensor:
        weights = self.weights
        query, key, value = linear(x, weights.qkv).split(self._widths, dim=-1)
        query = rotate(self._heads(query), cosine, sine)
        key = rotate(self._heads(key), cosine, sine)
        if past is not None:
            pairs = torch.cat((key.transpose(1, 2).flatten(2), value), dim=-1)
            flat_key, value = torch.cat((past.swap(self.span, pairs), pairs), dim=1).chunk(2, dim=-1)
            key = self._heads(flat_key)
        attended = attend(query, key, self._heads(value))
        return linear(attended.transpose(1, 2).flatten(2), weights.out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class WindowTransformer:
    """A causal sliding-window transformer: [B, T, dim] -> [B, T, dim]. Positions count its own steps."""

    def __init__(self, layers: Sequence[TransformerLayer], norm: Tensor, eps: float, window: int, rotary: Rotary) -> None:
        self.layers, self.norm, self.eps = layers, norm, eps
        self.window, self.rotary = window, rotary

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        offsets = torch.arange(x.shape[1], device=x.device)[None]
        positions = offsets if past is None else past.positions[:, None] + offsets
        cosine, sine = self.rotary(positions, x.dtype)
        attend = WindowAttention(positions, self.window, past is not None, x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine, attend, past)
        return rms_norm(x, self.norm, self.eps)
