"""Building blocks of the codec decoder. Activations are channels-last, [rows, steps, channels], and every block is causal.

A block reaches back in time only through `Past`, so one code path serves whole utterances (no past: zeros) and chunks of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad, scaled_dot_product_attention, silu

from kernels.codec_ops import pack_upsample, snake_parameters
from pipelines.qwen3_tts.codec_config import CodecDecoderConfig

CONVNEXT_KERNEL = 7
CONVNEXT_EPS = 1e-6
RESIDUAL_KERNEL = 7
RESIDUAL_DILATIONS = (1, 3, 9)
STACK_KERNEL = 7

_ops = torch.ops.nightjar


class TensorSource(Protocol):
    """Where weights come from: a `Checkpoint`, or anything that makes tensors by name and shape."""

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Loader:
    """Takes tensors under one name prefix, in one dtype, onto one device."""

    source: TensorSource
    prefix: str
    dtype: torch.dtype
    device: torch.device

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.source.take(self.prefix + name, shape, self.dtype, self.device)

    def at(self, prefix: str) -> Loader:
        """The same loader one level down."""
        return Loader(self.source, self.prefix + prefix, self.dtype, self.device)

    def float(self) -> Loader:
        """The same loader in float32."""
        return Loader(self.source, self.prefix, torch.float32, self.device)


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


def _extend(slot: Slot, x: Tensor, past: Past | None) -> Tensor:
    """x with its history (or zeros) in front: [B, slot.steps + T, C]."""
    return pad(x, (0, 0, slot.steps, 0)) if past is None else torch.cat((past.swap(slot, x), x), dim=1)


class CausalConv:
    """Causal convolution of stride 1: [B, T, Cin] -> [B, T, Cout]. `groups` = Cin makes it depthwise."""

    def __init__(self, load: Loader, layout: StateLayout, channels_in: int, channels_out: int, kernel: int, groups: int = 1) -> None:
        self.weight = load("weight", channels_out, channels_in // groups, kernel)
        self.bias = load("bias", channels_out)
        self.groups = groups
        self.slot = layout.add(kernel - 1, channels_in)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        extended = _extend(self.slot, x, past).transpose(1, 2)
        return conv1d(extended, self.weight, self.bias, groups=self.groups).transpose(1, 2)


class Repeat:
    """Transposed convolution whose kernel equals its stride: every step becomes `factor` steps of its own. Needs no past."""

    def __init__(self, load: Loader, channels: int, factor: int) -> None:
        weight = load("weight", channels, channels, factor)
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
    """SnakeBeta activation with its parameters made ready (float32)."""

    def __init__(self, load: Loader, channels: int) -> None:
        self.frequency, self.gain = snake_parameters(load.float()("alpha", channels), load.float()("beta", channels))

    def __call__(self, x: Tensor) -> Tensor:
        return _ops.snake_beta(x, self.frequency, self.gain)


class ResidualUnit:
    """x + conv1x1(snake(conv7_dilated(snake(x)))), one op."""

    def __init__(self, load: Loader, layout: StateLayout, channels: int, dilation: int) -> None:
        self.first = Snake(load.at("act1."), channels)
        self.second = Snake(load.at("act2."), channels)
        self.weight1 = load("conv1.conv.weight", channels, channels, RESIDUAL_KERNEL)
        self.bias1 = load("conv1.conv.bias", channels)
        self.weight2 = load("conv2.conv.weight", channels, channels, 1).squeeze(2)
        self.bias2 = load("conv2.conv.bias", channels)
        self.dilation = dilation
        self.slot = layout.add((RESIDUAL_KERNEL - 1) * dilation, channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.slot, x)
        first, second = self.first, self.second
        return _ops.codec_residual_unit(
            x,
            history,
            first.frequency,
            first.gain,
            self.weight1,
            self.bias1,
            second.frequency,
            second.gain,
            self.weight2,
            self.bias2,
            self.dilation,
        )


class UpsampleBlock:
    """Snake, transposed convolution by `rate`, three residual units: [B, T, Cin] -> [B, T * rate, Cin / 2]."""

    def __init__(self, load: Loader, layout: StateLayout, channels: int, rate: int) -> None:
        half = channels // 2
        self.snake = Snake(load.at("block.0."), channels)
        self.weight = pack_upsample(load("block.1.conv.weight", channels, half, 2 * rate))
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


class ConvStack:
    """From the upsampled output of the transformer to the waveform: [B, T, latent_dim] -> float32 [B, T * rates] in [-1, 1]."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecDecoderConfig) -> None:
        widths = [config.decoder_dim >> i for i in range(len(config.upsample_rates) + 1)]
        last = len(widths)
        self.stem = CausalConv(load.at("0.conv."), layout, config.latent_dim, config.decoder_dim, STACK_KERNEL)
        self.blocks = [UpsampleBlock(load.at(f"{i + 1}."), layout, widths[i], rate) for i, rate in enumerate(config.upsample_rates)]
        self.snake = Snake(load.at(f"{last}."), widths[-1])
        self.head = CausalConv(load.at(f"{last + 1}.conv."), layout, widths[-1], 1, STACK_KERNEL)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        x = self.stem(x, past)
        for block in self.blocks:
            x = block(x, past)
        return self.head(self.snake(x), past).squeeze(2).float().clamp(-1.0, 1.0)


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding, half-split layout, computed in float32: positions [B, T] -> two of [B, 1, T, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary embedding to x: [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: normalised in float32, cast back, then weighted (the reference's order)."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class TransformerLayer:
    """One layer of the sliding-window transformer; it keeps the last window - 1 rotated keys and values."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecDecoderConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.widths = (queries, keys, keys)
        self.grouped = queries != keys
        self.norm1 = load("input_layernorm.weight", hidden)
        self.norm2 = load("post_attention_layernorm.weight", hidden)
        attention = load.at("self_attn.")
        self.qkv = torch.cat([attention(f"{name}_proj.weight", width, hidden) for name, width in zip("qkv", self.widths)])
        self.out = attention("o_proj.weight", hidden, queries)
        self.qkv_bias = self.out_bias = None
        if config.attention_bias:
            self.qkv_bias = torch.cat([attention(f"{name}_proj.bias", width) for name, width in zip("qkv", self.widths)])
            self.out_bias = attention("o_proj.bias", hidden)
        self.gate_up = torch.cat([load(f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")])
        self.down = load("mlp.down_proj.weight", hidden, inner)
        self.scale1 = load("self_attn_layer_scale.scale", hidden)
        self.scale2 = load("mlp_layer_scale.scale", hidden)
        self.slot = layout.add(config.sliding_window - 1, 2 * keys)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor, past: Past | None) -> Tensor:
        x = x + self.scale1 * self._attention(rms_norm(x, self.norm1, self.eps), cosine, sine, mask, past)
        gate, up = linear(rms_norm(x, self.norm2, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + self.scale2 * linear(silu(gate) * up, self.down)

    def _attention(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor, past: Past | None) -> Tensor:
        query, key, value = linear(x, self.qkv, self.qkv_bias).split(self.widths, dim=-1)
        query = rotate(self._heads(query), cosine, sine)
        key = rotate(self._heads(key), cosine, sine)
        if past is not None:
            flat_key = key.transpose(1, 2).flatten(2)
            pairs = _extend(self.slot, torch.cat((flat_key, value), dim=-1), past)
            flat_key, value = pairs.chunk(2, dim=-1)
            key = self._heads(flat_key)
        attended = scaled_dot_product_attention(query, key, self._heads(value), attn_mask=mask, enable_gqa=self.grouped)
        return linear(attended.transpose(1, 2).flatten(2), self.out, self.out_bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SlidingTransformer:
    """The decoder's transformer at frame rate: [B, T, latent_dim] -> [B, T, latent_dim]."""

    def __init__(self, load: Loader, layout: StateLayout, config: CodecDecoderConfig) -> None:
        self.config = config
        latent, hidden = config.latent_dim, config.hidden_size
        self.in_weight, self.in_bias = load("input_proj.weight", hidden, latent), load("input_proj.bias", hidden)
        self.out_weight, self.out_bias = load("output_proj.weight", latent, hidden), load("output_proj.bias", latent)
        self.norm = load("norm.weight", hidden)
        self.layers = [TransformerLayer(load.at(f"layers.{i}."), layout, config) for i in range(config.num_hidden_layers)]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        config = self.config
        offsets = torch.arange(x.shape[1], device=x.device)
        positions = offsets[None] if past is None else past.positions[:, None] + offsets
        cosine, sine = rotary(positions, config.head_dim, config.rope_theta, x.dtype)
        mask = window_mask(positions, config.sliding_window, with_past=past is not None)
        if x.is_cuda:
            # Added once, instead of made anew from truths in every layer.
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -torch.inf)
        x = linear(x, self.in_weight, self.in_bias)
        for layer in self.layers:
            x = layer(x, cosine, sine, mask, past)
        return linear(rms_norm(x, self.norm, config.rms_norm_eps), self.out_weight, self.out_bias)


def window_mask(positions: Tensor, window: int, with_past: bool) -> Tensor:
    """Which keys a query sees: key j of query i iff i - window < j <= i and j >= 0.

    positions: [B, T] of the queries. Keys are the queries' own positions, after the window - 1 positions before them where `with_past`.
    Returns bool [B, 1, T, keys].
    """
    keys = positions
    if with_past:
        before = torch.arange(1 - window, 0, device=positions.device)
        keys = torch.cat((positions[:, :1] + before, positions), dim=1)
    distance = positions[:, :, None] - keys[:, None, :]
    return ((distance >= 0) & (distance < window) & (keys[:, None, :] >= 0)).unsqueeze(1)
