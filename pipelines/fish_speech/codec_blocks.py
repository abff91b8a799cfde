"""Building blocks of the codec. Activations are channels-last, [rows, steps, channels], and every block is causal.

A block reaches back in time only through `Past`, so one code path serves whole recordings (no past: zeros) and chunks of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad, scaled_dot_product_attention, silu

from kernels.codec_ops import pack_upsample
from pipelines.fish_speech.config import CodecStackConfig
from pipelines.fish_speech.weights import TensorSource, halves, take_normed

CONVNEXT_KERNEL, CONVNEXT_EPS = 7, 1e-6
RESIDUAL_KERNEL, RESIDUAL_DILATIONS = 7, (1, 3, 9)
SNAKE_EPS = 1e-9
#: Queries that attend at once: the mask of a long recording is otherwise the square of its length.
ATTENTION_STEPS = 1024

_ops = torch.ops.nightjar


@dataclass(frozen=True, slots=True)
class Loader:
    """Takes tensors under one name prefix, in one dtype, onto one device."""

    source: TensorSource
    prefix: str
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.source.take(self.prefix + name, shape, self.dtype, self.device)

    def normed(self, *shape: int) -> Tensor:
        """A convolution's weight, its weight norm folded in."""
        return take_normed(self.source, self.prefix, shape).to(self.device, self.dtype)

    def at(self, prefix: str) -> Loader:
        """The same loader one level down."""
        return Loader(self.source, self.prefix + prefix, self.dtype, self.device)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a block keeps the last `steps` of its inputs in the flat state of one row."""

    offset: int
    steps: int
    channels: int

    @property
    def end(self) -> int:
        return self.offset + self.steps * self.channels


class StateLayout:
    """Lays out what all blocks keep of the past in one flat vector a row, so that rows are gathered and scattered in one copy."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, steps: int, channels: int) -> Slot:
        """Reserves room for `steps` inputs of `channels` values."""
        slot = Slot(self.size, steps, channels)
        self.size = slot.end
        return slot


class Past:
    """What came before a chunk, for a batch of rows.

    `before`: [B, size] state before the chunk; `after`: [B, size], filled during the pass; `positions`: [B] int64, frames already decoded.
    """

    def __init__(self, before: Tensor, positions: Tensor) -> None:
        self.before = before
        self.after = torch.empty_like(before)
        self.positions = positions

    def swap(self, slot: Slot, x: Tensor) -> Tensor:
        """Returns the inputs before x ([B, slot.steps, C]) and keeps the last ones, x: [B, T, C] included, for the next chunk."""
        rows, steps, _ = x.shape
        history = self.before[:, slot.offset : slot.end].view(rows, slot.steps, slot.channels)
        kept = self.after[:, slot.offset : slot.end].view(rows, slot.steps, slot.channels)
        if steps >= slot.steps:
            kept.copy_(x[:, steps - slot.steps :])
        else:
            kept[:, : slot.steps - steps] = history[:, steps:]
            kept[:, slot.steps - steps :] = x
        return history


def extend(slot: Slot, x: Tensor, past: Past | None) -> Tensor:
    """x with its history (or zeros) in front: [B, slot.steps + T, C]."""
    return pad(x, (0, 0, slot.steps, 0)) if past is None else torch.cat((past.swap(slot, x), x), dim=1)


class CausalConv:
    """Causal convolution: [B, T, Cin] -> [B, T / stride, Cout], T a multiple of the stride. `groups` = Cin makes it depthwise."""

    def __init__(
        self, load: Loader, layout: StateLayout, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        self.weight = load.normed(channels_out, channels_in // groups, kernel)
        self.bias = load("bias", channels_out)
        self.stride = stride
        self.groups = groups
        self.slot = layout.add(kernel - stride, channels_in)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        extended = extend(self.slot, x, past).transpose(1, 2)
        return conv1d(extended, self.weight, self.bias, self.stride, groups=self.groups).transpose(1, 2)


class Repeat:
    """Transposed convolution whose kernel equals its stride: every step becomes `factor` steps of its own. Needs no past."""

    def __init__(self, load: Loader, channels: int, factor: int) -> None:
        weight = load.normed(channels, channels, factor)
        self.weight = weight.permute(2, 1, 0).reshape(factor * channels, channels).contiguous()
        self.bias = load("bias", channels).repeat(factor)
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        rows, steps, channels = x.shape
        return linear(x, self.weight, self.bias).view(rows, steps * self.factor, channels)


class ConvNeXt:
    """ConvNeXt block (Liu et al. 2022): x + gamma * linear(gelu(linear(norm(depthwise(x)))))."""

    def __init__(self, load: Loader, layout: StateLayout, channels: int) -> None:
        self.depthwise = CausalConv(load.at("dwconv.conv."), layout, channels, channels, CONVNEXT_KERNEL, groups=channels)
        self.norm_weight = load("norm.weight", channels)
        self.norm_bias = load("norm.bias", channels)
        self.wide_weight = load("pwconv1.weight", 4 * channels, channels)
        self.wide_bias = load("pwconv1.bias", 4 * channels)
        self.narrow_weight = load("pwconv2.weight", channels, 4 * channels)
        self.narrow_bias = load("pwconv2.bias", channels)
        self.gamma = load("gamma", channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        hidden = layer_norm(self.depthwise(x, past), self.norm_weight.shape, self.norm_weight, self.norm_bias, CONVNEXT_EPS)
        hidden = gelu(linear(hidden, self.wide_weight, self.wide_bias))
        return x + self.gamma * linear(hidden, self.narrow_weight, self.narrow_bias)


class Snake:
    """x + sin^2(alpha x) / (alpha + 1e-9) by channel, its parameters made ready in float32."""

    def __init__(self, load: Loader, channels: int) -> None:
        self.frequency = load("alpha", 1, channels, 1).float().flatten()
        self.gain = 1.0 / (self.frequency + SNAKE_EPS)

    def __call__(self, x: Tensor) -> Tensor:
        return _ops.snake_beta(x, self.frequency, self.gain)


class ResidualUnit:
    """x + conv1x1(snake(conv7_dilated(snake(x)))), one op."""

    def __init__(self, load: Loader, layout: StateLayout, channels: int, dilation: int) -> None:
        self.first, self.second = Snake(load.at("block.0."), channels), Snake(load.at("block.2."), channels)
        self.weight1 = load.at("block.1.conv.").normed(channels, channels, RESIDUAL_KERNEL)
        self.bias1 = load("block.1.conv.bias", channels)
        self.weight2 = load.at("block.3.conv.").normed(channels, channels, 1).squeeze(2)
        self.bias2 = load("block.3.conv.bias", channels)
        self.dilation = dilation
        self.slot = layout.add((RESIDUAL_KERNEL - 1) * dilation, channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.slot, x)
        one = (self.first.frequency, self.first.gain, self.weight1, self.bias1)
        two = (self.second.frequency, self.second.gain, self.weight2, self.bias2)
        return _ops.codec_residual_unit(x, history, *one, *two, self.dilation)


class UpsampleBlock:
    """Snake, transposed convolution by `rate`, three residual units: [B, T, Cin] -> [B, T * rate, Cin / 2]."""

    def __init__(self, load: Loader, layout: StateLayout, channels: int, rate: int) -> None:
        half = channels // 2
        self.snake = Snake(load.at("block.0."), channels)
        self.weight = pack_upsample(load.at("block.1.conv.").normed(channels, half, 2 * rate))
        self.bias = load("block.1.conv.bias", half)
        self.rate = rate
        self.slot = layout.add(1, channels)
        self.units = [ResidualUnit(load.at(f"block.{i + 2}."), layout, half, dilation) for i, dilation in enumerate(RESIDUAL_DILATIONS)]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.slot, x)
        x = _ops.codec_upsample(x, history, self.snake.frequency, self.snake.gain, self.weight, self.bias, self.rate)
        for unit in self.units:
            x = unit(x, past)
        return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: normalized in float32, cast back, then weighted (the reference's order)."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for half-split heads, rounded to bfloat16 as in training: positions [B, T] -> two of [B, 1, T, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / base**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary embedding to x: [B, heads, T, head_dim], in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


class TransformerLayer:
    """One layer of a sliding-window transformer; it keeps the last window - 1 rotated keys and values."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecStackConfig) -> None:
        dim, inner = config.dim, config.intermediate
        self.config = config
        self.norm1 = load("attention_norm.weight", dim)
        self.norm2 = load("ffn_norm.weight", dim)
        query, key, value = load("attention.wqkv.weight", 3 * dim, dim).chunk(3)
        self.qkv = torch.cat([halves(query, config.head_dim), halves(key, config.head_dim), value])
        self.out = load("attention.wo.weight", dim, dim)
        self.gate_up = torch.cat([load(f"feed_forward.{name}.weight", inner, dim) for name in ("w1", "w3")])
        self.down = load("feed_forward.w2.weight", dim, inner)
        self.scale1 = load("attention_layer_scale.gamma", dim)
        self.scale2 = load("ffn_layer_scale.gamma", dim)
        self.slot = layout.add(config.window - 1, 2 * dim)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor, past: Past | None) -> Tensor:
        eps = self.config.eps
        x = x + self.scale1 * self._attention(rms_norm(x, self.norm1, eps), cosine, sine, positions, past)
        gate, up = linear(rms_norm(x, self.norm2, eps), self.gate_up).chunk(2, dim=-1)
        return x + self.scale2 * linear(silu(gate) * up, self.down)

    def _attention(self, x: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor, past: Past | None) -> Tensor:
        query, key, value = linear(x, self.qkv).chunk(3, dim=-1)
        query = rotate(self._heads(query), cosine, sine)
        key = rotate(self._heads(key), cosine, sine)
        if past is not None:
            pairs = torch.cat((key.transpose(1, 2).flatten(2), value), dim=-1)
            flat_key, value = torch.cat((past.swap(self.slot, pairs), pairs), dim=1).chunk(2, dim=-1)
            key = self._heads(flat_key)
        attended = attend(query, key, self._heads(value), positions, self.config.window)
        return linear(attended.transpose(1, 2).flatten(2), self.out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, window: int) -> Tensor:
    """Causal attention in a window: key j of query i iff i - window < j <= i and j >= 0.

    query: [B, heads, T, head_dim]; key, value: those of the same steps, behind the ones of earlier steps where there are any;
    positions: [B, T] of the queries. Returns [B, heads, T, head_dim].
    """
    steps, earlier = query.shape[2], key.shape[2] - query.shape[2]
    parts: list[Tensor] = []
    for start in range(0, steps, ATTENTION_STEPS):
        end = min(start + ATTENTION_STEPS, steps)
        first = max(0, start + earlier - window + 1)
        at = torch.arange(start + earlier, end + earlier, device=query.device)[:, None]
        of = torch.arange(first, end + earlier, device=query.device)[None]
        distance = at - of
        there = positions[:, :1, None] + of - earlier >= 0
        mask = ((distance >= 0) & (distance < window) & there).unsqueeze(1)
        seen = slice(first, end + earlier)
        parts.append(scaled_dot_product_attention(query[:, :, start:end], key[:, :, seen], value[:, :, seen], attn_mask=mask))
    return torch.cat(parts, dim=2)


class WindowTransformer:
    """A causal sliding-window transformer: [B, T, dim] -> [B, T, dim]. Positions count its own steps."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecStackConfig) -> None:
        self.config = config
        self.norm = load("norm.weight", config.dim)
        self.layers = [TransformerLayer(load.at(f"layers.{i}."), layout, config) for i in range(config.layers)]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        offsets = torch.arange(x.shape[1], device=x.device)[None]
        positions = offsets if past is None else past.positions[:, None] + offsets
        cosine, sine = rotary(positions, self.config.head_dim, self.config.rope_base)
        for layer in self.layers:
            x = layer(x, cosine, sine, positions, past)
        return rms_norm(x, self.norm, self.config.eps)
