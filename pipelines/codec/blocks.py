"""Building blocks of causal codecs: convolutions, and a transformer over a sliding window. Activations are
[rows, steps, channels].

Blocks access earlier steps only through `Past`, so the same code runs whole utterances (no past: zeros) and
chunks of a stream. The blocks are those of the DAC decoder (Kumar et al., 2023), made causal; families define
how their checkpoints name and store them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad, scaled_dot_product_attention, silu

from kernels.codec_ops import codec_residual_unit, codec_upsample, pack_upsample, snake_beta
from kernels.layers import rms_norm

CONVNEXT_KERNEL, CONVNEXT_EPS = 7, 1e-6
RESIDUAL_KERNEL, RESIDUAL_DILATIONS = 7, (1, 3, 9)
#: Kernel size of the first and the last convolution of a `ConvStack`.
STACK_KERNEL = 7


class CodecLoader(Protocol):
    """Loads the weights of blocks: a `pipelines.nn.checkpoint.Loader` with a family's format of convolutions
    and snakes."""

    @property
    def unit_names(self) -> tuple[str, str, str, str]:
        """The names of a residual unit's first snake, wide convolution, second snake and narrow convolution."""
        ...

    def __call__(self, name: str, *shape: int) -> Tensor: ...

    def at(self, prefix: str) -> Self:
        """The same loader with a longer prefix."""
        ...

    def kernel(self, *shape: int) -> Tensor:
        """The weight of the convolution at this prefix, in the shape that `torch.nn` uses."""
        ...

    def snake(self, channels: int) -> tuple[Tensor, Tensor]:
        """Frequency and gain of the activation at this prefix, float32 [channels] each."""
        ...


@dataclass(frozen=True, slots=True)
class StateSpan:
    """The part of a row's flat state that holds the last `steps` inputs of a block."""

    offset: int
    steps: int
    channels: int

    @property
    def end(self) -> int:
        return self.offset + self.steps * self.channels


class StateLayout:
    """The layout of the states of all blocks in one flat vector for each row, so that rows are gathered and
    scattered in one copy."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, steps: int, channels: int) -> StateSpan:
        """Reserves room for `steps` inputs of `channels` values."""
        span = StateSpan(self.size, steps, channels)
        self.size = span.end
        return span


class Past:
    """The states of a batch of rows before and after a chunk.

    `before`: [B, size] states before the chunk; `after`: [B, size], filled during the pass; `positions`: [B]
    int64, frames already decoded.
    """

    def __init__(self, before: Tensor, positions: Tensor) -> None:
        self.before = before
        self.after = torch.empty_like(before)
        self.positions = positions

    def swap(self, span: StateSpan, x: Tensor) -> Tensor:
        """Returns the span.steps inputs before x [B, T, C] as [B, span.steps, C]. Stores the inputs that come
        before the next chunk: the last span.steps, up to the end of x."""
        rows, steps, _ = x.shape
        history = self.before[:, span.offset : span.end].view(rows, span.steps, span.channels)
        kept = self.after[:, span.offset : span.end].view(rows, span.steps, span.channels)
        if steps >= span.steps:
            kept.copy_(x[:, steps - span.steps :])
        else:
            kept[:, : span.steps - steps] = history[:, steps:]
            kept[:, span.steps - steps :] = x
        return history


class PastOfEnds(Past):
    """The past of a first chunk whose rows have different lengths: `after` has their states at their own ends,
    [B] int64, and zeros in blocks that did not run."""

    def __init__(self, size: int, ends: Tensor, dtype: torch.dtype) -> None:
        super().__init__(
            torch.zeros(len(ends), size, dtype=dtype, device=ends.device), torch.zeros_like(ends)
        )
        self.after.zero_()
        self._ends = ends

    def swap(self, span: StateSpan, x: Tensor) -> Tensor:
        steps = self._ends[:, None, None] + torch.arange(-span.steps, 0, device=x.device)[:, None]
        kept = x.gather(1, steps.clamp(min=0).expand(-1, -1, span.channels)).masked_fill_(steps < 0, 0)
        self.after[:, span.offset : span.end] = kept.flatten(1)
        return self.before[:, span.offset : span.end].view_as(kept)


class CausalConv:
    """Causal convolution: [B, T, Cin] -> [B, T / stride, Cout], T a multiple of the stride. `groups` = Cin
    makes it depthwise."""

    def __init__(
        self,
        load: CodecLoader,
        layout: StateLayout,
        channels_in: int,
        channels_out: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        self.weight = load.kernel(channels_out, channels_in // groups, kernel)
        self.bias = load("bias", channels_out)
        self.stride = stride
        self.groups = groups
        self.span = layout.add(kernel - stride, channels_in)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        extended = (
            pad(x, (0, 0, self.span.steps, 0))
            if past is None
            else torch.cat((past.swap(self.span, x), x), dim=1)
        )
        return conv1d(
            extended.transpose(1, 2), self.weight, self.bias, self.stride, groups=self.groups
        ).transpose(1, 2)


class Repeat:
    """Transposed convolution whose kernel equals its stride: every step becomes `factor` steps, without a
    past."""

    def __init__(self, load: CodecLoader, channels: int, factor: int) -> None:
        weight = load.kernel(channels, channels, factor)
        self.weight = weight.permute(2, 1, 0).reshape(factor * channels, channels).contiguous()
        self.bias = load("bias", channels).repeat(factor)
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        rows, steps, channels = x.shape
        return linear(x, self.weight, self.bias).view(rows, steps * self.factor, channels)


class ConvNeXt:
    """ConvNeXt block (Liu et al., 2022): x + gamma * linear(gelu(linear(norm(depthwise(x)))))."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int) -> None:
        self.depthwise = CausalConv(
            load.at("dwconv.conv."), layout, channels, channels, CONVNEXT_KERNEL, groups=channels
        )
        self.norm_weight = load("norm.weight", channels)
        self.norm_bias = load("norm.bias", channels)
        self.wide_weight = load("pwconv1.weight", 4 * channels, channels)
        self.wide_bias = load("pwconv1.bias", 4 * channels)
        self.narrow_weight = load("pwconv2.weight", channels, 4 * channels)
        self.narrow_bias = load("pwconv2.bias", channels)
        self.gamma = load("gamma", channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        hidden = layer_norm(
            self.depthwise(x, past), self.norm_weight.shape, self.norm_weight, self.norm_bias, CONVNEXT_EPS
        )
        hidden = gelu(linear(hidden, self.wide_weight, self.wide_bias))
        return x + self.gamma * linear(hidden, self.narrow_weight, self.narrow_bias)


class UpsampleLayers:
    """Repeats steps by each factor in turn, followed by a ConvNeXt block each: [B, T, channels] -> [B, T *
    factors, channels]."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int, factors: Sequence[int]) -> None:
        self.layers = [
            (
                Repeat(load.at(f"{i}.0.conv."), channels, factor),
                ConvNeXt(load.at(f"{i}.1."), layout, channels),
            )
            for i, factor in enumerate(factors)
        ]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        for repeat, convnext in self.layers:
            x = convnext(repeat(x), past)
        return x


class Snake:
    """x + gain * sin^2(frequency * x) for each channel (Ziyin, Hartwig and Ueda, 2020); its parameters are
    float32 [channels]."""

    def __init__(self, load: CodecLoader, channels: int) -> None:
        self.frequency, self.gain = load.snake(channels)

    def __call__(self, x: Tensor) -> Tensor:
        return snake_beta(x, self.frequency, self.gain)


class ResidualUnit:
    """x + conv1x1(snake(conv7_dilated(snake(x)))), one op."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int, dilation: int) -> None:
        first, wide, second, narrow = (load.at(name) for name in load.unit_names)
        self.first, self.second = Snake(first, channels), Snake(second, channels)
        self.weight1 = wide.kernel(channels, channels, RESIDUAL_KERNEL)
        self.bias1 = wide("bias", channels)
        self.weight2 = narrow.kernel(channels, channels, 1).squeeze(2)
        self.bias2 = narrow("bias", channels)
        self.dilation = dilation
        self.span = layout.add((RESIDUAL_KERNEL - 1) * dilation, channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.span, x)
        one = (self.first.frequency, self.first.gain, self.weight1, self.bias1)
        two = (self.second.frequency, self.second.gain, self.weight2, self.bias2)
        return codec_residual_unit(x, history, *one, *two, self.dilation)


class UpsampleBlock:
    """Snake, transposed convolution by `rate`, three residual units: [B, T, Cin] -> [B, T * rate, Cin /
    2]."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int, rate: int) -> None:
        half = channels // 2
        self.snake = Snake(load.at("block.0."), channels)
        self.weight = pack_upsample(load.at("block.1.conv.").kernel(channels, half, 2 * rate))
        self.bias = load("block.1.conv.bias", half)
        self.rate = rate
        self.span = layout.add(1, channels)
        self.units = [
            ResidualUnit(load.at(f"block.{i + 2}."), layout, half, dilation)
            for i, dilation in enumerate(RESIDUAL_DILATIONS)
        ]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.span, x)
        x = codec_upsample(
            x, history, self.snake.frequency, self.snake.gain, self.weight, self.bias, self.rate
        )
        for unit in self.units:
            x = unit(x, past)
        return x


class ConvStack:
    """From upsampled latents to the waveform: [B, T, latent] -> float32 [B, T * rates] in [-1, 1].

    `width`: channels of the first block's input; each block halves the number. `tanh`: whether samples are
    limited by tanh, as in training, or clamped.
    """

    #: Whether samples that are not needed take almost no time.
    skips_padding = False

    def __init__(
        self,
        load: CodecLoader,
        layout: StateLayout,
        latent: int,
        width: int,
        rates: Sequence[int],
        tanh: bool,
    ) -> None:
        widths = [width >> i for i in range(len(rates) + 1)]
        last = len(widths)
        self.stem = CausalConv(load.at("0.conv."), layout, latent, width, STACK_KERNEL)
        self.blocks = [
            UpsampleBlock(load.at(f"{i + 1}."), layout, widths[i], rate) for i, rate in enumerate(rates)
        ]
        self.snake = Snake(load.at(f"{last}."), widths[-1])
        self.head = CausalConv(load.at(f"{last + 1}.conv."), layout, widths[-1], 1, STACK_KERNEL)
        self.tanh = tanh

    def __call__(self, x: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """`lengths`: the number of samples that are needed of each row; ignored here, all samples are
        made."""
        x = self.stem(x, past)
        for block in self.blocks:
            x = block(x, past)
        samples = self.head(self.snake(x), past).squeeze(2).float()
        return torch.tanh(samples) if self.tanh else samples.clamp(-1.0, 1.0)


#: Maximum queries that attend at once, so that masks do not grow with the square of a recording's length.
ATTENTION_STEPS = 1024

#: Positions int64 [B, T] and the type of the activations -> cosines and sines, [B, 1, T, head_dim] each.
Rotary = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angles of rotary embedding in half-split layout: positions [B, T], frequencies float32 [head_dim /
    2] -> [B, 1, T, head_dim]."""
    found = positions[:, None, :, None].float() * frequencies
    return torch.cat((found, found), dim=-1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies rotary embedding to x: [B, heads, T, head_dim], in the type of the cosines."""
    wide = x.to(cosine.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def window_mask(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """The mask of the keys that a query attends to: key j for query i if i - window < j <= i and j >= 0.

    queries: positions [B, T]; keys: positions [B, K]. Returns bool [B, 1, T, K].
    """
    distance = queries[:, :, None] - keys[:, None, :]
    return ((distance >= 0) & (distance < window) & (keys[:, None, :] >= 0)).unsqueeze(1)


class WindowAttention:
    """Causal attention in a window, with masks made once for all layers of a pass.

    positions: int64 [B, T] of the queries. Keys and values are those of the same steps, preceded by those of
    the `window` - 1 steps before them if `with_past`.
    """

    def __init__(self, positions: Tensor, window: int, with_past: bool, dtype: torch.dtype) -> None:
        keys, earlier, steps = positions, 0, positions.shape[1]
        if with_past:
            earlier = window - 1
            keys = torch.cat(
                (positions[:, :1] + torch.arange(-earlier, 0, device=positions.device), positions), dim=1
            )
        self._parts: list[tuple[slice, slice, Tensor]] = []
        for start in range(0, steps, ATTENTION_STEPS):
            end = min(start + ATTENTION_STEPS, steps)
            seen = slice(max(0, start + earlier - window + 1), end + earlier)
            mask = window_mask(positions[:, start:end], keys[:, seen], window)
            if mask.is_cuda:
                # The mask as numbers that are added, so that it is not converted in every layer.
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, -torch.inf
                )
            self._parts.append((slice(start, end), seen, mask))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [B, heads, T, head_dim]; key, value: [B, kv_heads, earlier + T, head_dim]. Returns [B,
        heads, T, head_dim]."""
        grouped = query.shape[1] != key.shape[1]
        parts = [
            scaled_dot_product_attention(
                query[:, :, at], key[:, :, seen], value[:, :, seen], attn_mask=mask, enable_gqa=grouped
            )
            for at, seen, mask in self._parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv`: [(heads + 2 * kv_heads) * head_dim, dim], its heads in half-split layout;
    `gate_up`: [2 * intermediate, dim]."""

    norm1: Tensor
    qkv: Tensor
    out: Tensor
    scale1: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    scale2: Tensor


class TransformerLayer:
    """RMSNorm, attention, layer scale; RMSNorm, SwiGLU, layer scale. Its state has the last window - 1 rotated
    keys and values."""

    def __init__(
        self,
        weights: LayerWeights,
        layout: StateLayout,
        head_dim: int,
        kv_width: int,
        window: int,
        eps: float,
    ) -> None:
        self.weights, self.eps = weights, eps
        self.head_dim, self.kv_width = head_dim, kv_width
        self._widths = (len(weights.qkv) - 2 * kv_width, kv_width, kv_width)
        self.span = layout.add(window - 1, 2 * kv_width)

    def __call__(
        self, x: Tensor, cosine: Tensor, sine: Tensor, attend: WindowAttention, past: Past | None
    ) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]."""
        weights = self.weights
        x = x + weights.scale1 * self._attention(
            rms_norm(x, weights.norm1, self.eps), cosine, sine, attend, past
        )
        gate, up = linear(rms_norm(x, weights.norm2, self.eps), weights.gate_up).chunk(2, dim=-1)
        return x + weights.scale2 * linear(silu(gate) * up, weights.down)

    def _attention(
        self, x: Tensor, cosine: Tensor, sine: Tensor, attend: WindowAttention, past: Past | None
    ) -> Tensor:
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
    """A causal sliding-window transformer: [B, T, dim] -> [B, T, dim]. Positions count its steps."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        layout: StateLayout,
        norm: Tensor,
        head_dim: int,
        kv_width: int,
        window: int,
        eps: float,
        rotary: Rotary,
    ) -> None:
        self.layers = [TransformerLayer(one, layout, head_dim, kv_width, window, eps) for one in layers]
        self.norm, self.eps = norm, eps
        self.window, self.rotary = window, rotary

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        offsets = torch.arange(x.shape[1], device=x.device)[None]
        positions = offsets if past is None else past.positions[:, None] + offsets
        cosine, sine = self.rotary(positions, x.dtype)
        attend = WindowAttention(positions, self.window, past is not None, x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine, attend, past)
        return rms_norm(x, self.norm, self.eps)
