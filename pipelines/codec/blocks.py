"""Building blocks of causal codecs. Activations are channels-last, [rows, steps, channels].

A block reaches back in time only through `Past`, so one code path serves whole utterances (no past: zeros) and chunks of a stream.
The blocks are those of the DAC decoder (Kumar et al., 2023), made causal; a family says how its checkpoint names and stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad

from kernels.codec_ops import pack_upsample

CONVNEXT_KERNEL, CONVNEXT_EPS = 7, 1e-6
RESIDUAL_KERNEL, RESIDUAL_DILATIONS = 7, (1, 3, 9)
#: Taps of the first and the last convolution of a `ConvStack`.
STACK_KERNEL = 7

_ops = torch.ops.nightjar


class CodecLoader(Protocol):
    """How blocks get their weights: a `pipelines.nn.checkpoint.Loader` that knows how a family stores convolutions and snakes."""

    @property
    def unit_names(self) -> tuple[str, str, str, str]:
        """Where a residual unit keeps its first snake, wide convolution, second snake and narrow convolution."""
        ...

    def __call__(self, name: str, *shape: int) -> Tensor: ...

    def at(self, prefix: str) -> Self:
        """The same loader one level down."""
        ...

    def kernel(self, *shape: int) -> Tensor:
        """The weight of the convolution at this place, in the shape that `torch.nn` gives it."""
        ...

    def snake(self, channels: int) -> tuple[Tensor, Tensor]:
        """Frequency and gain of the activation at this place, float32 [channels] each."""
        ...


@dataclass(frozen=True, slots=True)
class StateSpan:
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

    def add(self, steps: int, channels: int) -> StateSpan:
        """Reserves room for `steps` inputs of `channels` values."""
        span = StateSpan(self.size, steps, channels)
        self.size = span.end
        return span


class Past:
    """What came before a chunk, for a batch of rows.

    `before`: [B, size] state before the chunk; `after`: [B, size], filled during the pass; `positions`: [B] int64, frames already decoded.
    """

    def __init__(self, before: Tensor, positions: Tensor) -> None:
        self.before = before
        self.after = torch.empty_like(before)
        self.positions = positions

    def swap(self, span: StateSpan, x: Tensor) -> Tensor:
        """Returns the inputs before x ([B, span.steps, C]) and keeps the last ones, x: [B, T, C] included, for the next chunk."""
        rows, steps, _ = x.shape
        history = self.before[:, span.offset : span.end].view(rows, span.steps, span.channels)
        kept = self.after[:, span.offset : span.end].view(rows, span.steps, span.channels)
        if steps >= span.steps:
            kept.copy_(x[:, steps - span.steps :])
        else:
            kept[:, : span.steps - steps] = history[:, steps:]
            kept[:, span.steps - steps :] = x
        return history


class CausalConv:
    """Causal convolution: [B, T, Cin] -> [B, T / stride, Cout], T a multiple of the stride. `groups` = Cin makes it depthwise."""

    def __init__(
        self, load: CodecLoader, layout: StateLayout, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        self.weight = load.kernel(channels_out, channels_in // groups, kernel)
        self.bias = load("bias", channels_out)
        self.stride = stride
        self.groups = groups
        self.span = layout.add(kernel - stride, channels_in)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        extended = pad(x, (0, 0, self.span.steps, 0)) if past is None else torch.cat((past.swap(self.span, x), x), dim=1)
        return conv1d(extended.transpose(1, 2), self.weight, self.bias, self.stride, groups=self.groups).transpose(1, 2)


class Repeat:
    """Transposed convolution whose kernel equals its stride: every step becomes `factor` steps of its own. Needs no past."""

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


class UpsampleLayers:
    """Steps repeated by each factor in turn, a ConvNeXt block behind each: [B, T, channels] -> [B, T * factors, channels]."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int, factors: Sequence[int]) -> None:
        self.layers = [
            (Repeat(load.at(f"{i}.0.conv."), channels, factor), ConvNeXt(load.at(f"{i}.1."), layout, channels))
            for i, factor in enumerate(factors)
        ]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        for repeat, convnext in self.layers:
            x = convnext(repeat(x), past)
        return x


class Snake:
    """x + gain * sin^2(frequency * x) by channel (Ziyin, Hartwig and Ueda, 2020); its parameters are float32 [channels]."""

    def __init__(self, load: CodecLoader, channels: int) -> None:
        self.frequency, self.gain = load.snake(channels)

    def __call__(self, x: Tensor) -> Tensor:
        return _ops.snake_beta(x, self.frequency, self.gain)


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
        return _ops.codec_residual_unit(x, history, *one, *two, self.dilation)


class UpsampleBlock:
    """Snake, transposed convolution by `rate`, three residual units: [B, T, Cin] -> [B, T * rate, Cin / 2]."""

    def __init__(self, load: CodecLoader, layout: StateLayout, channels: int, rate: int) -> None:
        half = channels // 2
        self.snake = Snake(load.at("block.0."), channels)
        self.weight = pack_upsample(load.at("block.1.conv.").kernel(channels, half, 2 * rate))
        self.bias = load("block.1.conv.bias", half)
        self.rate = rate
        self.span = layout.add(1, channels)
        self.units = [ResidualUnit(load.at(f"block.{i + 2}."), layout, half, dilation) for i, dilation in enumerate(RESIDUAL_DILATIONS)]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        history = None if past is None else past.swap(self.span, x)
        x = _ops.codec_upsample(x, history, self.snake.frequency, self.snake.gain, self.weight, self.bias, self.rate)
        for unit in self.units:
            x = unit(x, past)
        return x


class ConvStack:
    """From upsampled latents to the waveform: [B, T, latent] -> float32 [B, T * rates] in [-1, 1].

    `width`: channels of the first block, halved by each. `tanh`: whether samples pass it, as training had it; else they are cut off.
    """

    #: Whether samples that nobody wants cost next to nothing.
    skips_padding = False

    def __init__(self, load: CodecLoader, layout: StateLayout, latent: int, width: int, rates: Sequence[int], tanh: bool) -> None:
        widths = [width >> i for i in range(len(rates) + 1)]
        last = len(widths)
        self.stem = CausalConv(load.at("0.conv."), layout, latent, width, STACK_KERNEL)
        self.blocks = [UpsampleBlock(load.at(f"{i + 1}."), layout, widths[i], rate) for i, rate in enumerate(rates)]
        self.snake = Snake(load.at(f"{last}."), widths[-1])
        self.head = CausalConv(load.at(f"{last + 1}.conv."), layout, widths[-1], 1, STACK_KERNEL)
        self.tanh = tanh

    def __call__(self, x: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """`lengths`: samples of each row that are wanted; here all are made."""
        x = self.stem(x, past)
        for block in self.blocks:
            x = block(x, past)
        samples = self.head(self.snake(x), past).squeeze(2).float()
        return torch.tanh(samples) if self.tanh else samples.clamp(-1.0, 1.0)
