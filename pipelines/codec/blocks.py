"""Building blocks of causal codecs: convolutions, and a transformer over a sliding window. Activations are
[rows, steps, channels].

Blocks access earlier steps only through `Past`, so the same code runs whole utterances (no past: zeros) and
chunks of a stream. The blocks are those of the DAC decoder (Kumar et al., 2023), made causal; families define
how their checkpoints name and store them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, linear, pad, scaled_dot_product_attention

from kernels.codec_ops import pack_upsample, snake_beta
from kernels.frame import Layer
from kernels.layers import rms_norm, rope, swiglu
from pipelines.nn.checkpoint import Loader, StackWeights
from pipelines.nn.config_keys import StackShape

CONVNEXT_KERNEL = 7
CONVNEXT_EPS = 1e-6
RESIDUAL_KERNEL = 7
RESIDUAL_DILATIONS = (1, 3, 9)
#: Kernel size of the first and the last convolution of a `ConvStack`.
STACK_KERNEL = 7


class Snake(NamedTuple):
    """x + gain * sin^2(frequency * x) for each channel (Ziyin, Hartwig and Ueda, 2020); its parameters are
    float32 [channels]."""

    frequency: Tensor
    gain: Tensor


class BlockLoader(Loader):
    """Loads the weights of blocks; families add their format of convolutions and snakes."""

    #: The names of a residual unit's first snake, wide convolution, second snake and narrow convolution.
    unit_names: tuple[str, str, str, str]
    #: The names of the scales of a transformer layer: of its attention, and of its MLP.
    scale_names: tuple[str, str]

    def kernel(self, *shape: int) -> Tensor:
        """The weight of the convolution at this prefix, in the shape that `torch.nn` uses."""
        raise NotImplementedError

    def snake(self, channels: int) -> Snake:
        """The activation at this prefix."""
        raise NotImplementedError


class StateSpan(NamedTuple):
    """The part of a row's flat state that holds the last `steps` inputs of a block."""

    at: slice
    steps: int
    channels: int

    def of(self, states: Tensor) -> Tensor:
        """The part of states [B, size], a view [B, steps, channels]."""
        return states[:, self.at].view(-1, self.steps, self.channels)

    def extended(self, x: Tensor, past: Past | None) -> Tensor:
        """x [B, T, C] after the inputs before it, which are zeros without a past: [B, steps + T, C]."""
        return pad(x, (0, 0, self.steps, 0)) if past is None else torch.cat((past.swap(self, x), x), dim=1)


class StateLayout:
    """The layout of the states of all blocks in one flat vector for each row, so that rows are gathered and
    scattered in one copy."""

    size = 0

    def add(self, steps: int, channels: int) -> StateSpan:
        """Reserves room for `steps` inputs of `channels` values."""
        start = self.size
        self.size += steps * channels
        return StateSpan(slice(start, self.size), steps, channels)


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
        steps = x.shape[1]
        history = span.of(self.before)
        kept = span.of(self.after)
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
        span.of(self.after).copy_(kept)
        return span.of(self.before)


class CausalConv:
    """Causal convolution: [B, T, Cin] -> [B, T / stride, Cout], T a multiple of the stride. `groups` = Cin
    makes it depthwise."""

    def __init__(
        self,
        load: BlockLoader,
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
        extended = self.span.extended(x, past).transpose(1, 2)
        return conv1d(extended, self.weight, self.bias, self.stride, groups=self.groups).transpose(1, 2)


class ConvNeXt:
    """ConvNeXt block (Liu et al., 2022): x + gamma * linear(gelu(linear(norm(depthwise(x)))))."""

    def __init__(self, load: BlockLoader, layout: StateLayout, channels: int) -> None:
        self.depthwise = CausalConv(
            load.at("dwconv.conv."), layout, channels, channels, CONVNEXT_KERNEL, groups=channels
        )
        self.norm = load("norm.weight", channels), load("norm.bias", channels)
        self.wide = load("pwconv1.weight", 4 * channels, channels), load("pwconv1.bias", 4 * channels)
        self.narrow = load("pwconv2.weight", channels, 4 * channels), load("pwconv2.bias", channels)
        self.gamma = load("gamma", channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        hidden = layer_norm(self.depthwise(x, past), self.gamma.shape, *self.norm, CONVNEXT_EPS)
        hidden = gelu(linear(hidden, *self.wide))
        return x + self.gamma * linear(hidden, *self.narrow)


class UpsampleLayer:
    """Repeats steps by a transposed convolution whose kernel equals its stride, and so has no past; then a
    ConvNeXt block: [B, T, channels] -> [B, T * factor, channels]."""

    def __init__(self, load: BlockLoader, layout: StateLayout, channels: int, factor: int) -> None:
        weight = load.at("0.conv.").kernel(channels, channels, factor)
        self.weight = weight.permute(2, 1, 0).reshape(factor * channels, channels).contiguous()
        self.bias = load("0.conv.bias", channels).repeat(factor)
        self.factor = factor
        self.block = ConvNeXt(load.at("1."), layout, channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        rows, steps, channels = x.shape
        repeated = linear(x, self.weight, self.bias).view(rows, steps * self.factor, channels)
        return self.block(repeated, past)


class ResidualUnit:
    """x + conv1x1(snake(conv7(snake(x)))), whose wide convolution is dilated and causal: [B, T, channels] ->
    [B, T, channels]. Its state has the inputs before the first snake."""

    def __init__(self, load: BlockLoader, layout: StateLayout, channels: int, dilation: int) -> None:
        first, wide, second, narrow = (load.at(name) for name in load.unit_names)
        self.first = first.snake(channels)
        self.second = second.snake(channels)
        self.wide = wide.kernel(channels, channels, RESIDUAL_KERNEL), wide("bias", channels)
        self.narrow = narrow.kernel(channels, channels, 1).squeeze(2), narrow("bias", channels)
        self.dilation = dilation
        self.span = layout.add((RESIDUAL_KERNEL - 1) * dilation, channels)

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        hidden = snake_beta(self.span.extended(x, past), *self.first).transpose(1, 2)
        hidden = conv1d(hidden, *self.wide, dilation=self.dilation).transpose(1, 2)
        return linear(snake_beta(hidden, *self.second), *self.narrow) + x


class UpsampleBlock:
    """Snake, causal transposed convolution of kernel 2 * rate and stride `rate`, three residual units: [B, T, Cin] ->
    [B, T * rate, Cin / 2]."""

    def __init__(self, load: BlockLoader, layout: StateLayout, channels: int, rate: int) -> None:
        half = channels // 2
        self.snake = load.at("block.0.").snake(channels)
        self.weight = pack_upsample(load.at("block.1.conv.").kernel(channels, half, 2 * rate))
        self.bias = load("block.1.conv.bias", half)
        self.rate = rate
        self.span = layout.add(1, channels)
        self.units = [
            ResidualUnit(load.at(f"block.{i + 2}."), layout, half, dilation)
            for i, dilation in enumerate(RESIDUAL_DILATIONS)
        ]

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        rows, steps, _ = x.shape
        active = snake_beta(self.span.extended(x, past), *self.snake)
        pairs = torch.cat((active[:, :-1], active[:, 1:]), dim=2)
        x = linear(pairs, self.weight.t(), self.bias.repeat(self.rate)).view(rows, steps * self.rate, -1)
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
        load: BlockLoader,
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
        self.snake = load.at(f"{last}.").snake(widths[-1])
        self.head = CausalConv(load.at(f"{last + 1}.conv."), layout, widths[-1], 1, STACK_KERNEL)
        self.tanh = tanh

    def __call__(self, x: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        """`lengths`: the number of samples that are needed of each row; ignored here, all samples are
        made."""
        x = self.stem(x, past)
        for block in self.blocks:
            x = block(x, past)
        samples = self.head(snake_beta(x, *self.snake), past).squeeze(2).float()
        return torch.tanh(samples) if self.tanh else samples.clamp(-1.0, 1.0)


#: Maximum queries that attend at once, so that masks do not grow with the square of a recording's length.
ATTENTION_STEPS = 1024


def window_masks(
    positions: Tensor, window: int, with_past: bool, dtype: torch.dtype
) -> list[tuple[slice, slice, Tensor]]:
    """The masks of causal attention in a window, for all layers of a pass: which queries, the keys that they
    can see, and the mask [B, 1, queries, keys].

    positions: int64 [B, T] of the queries. The keys are those of the same steps, after those of the `window` - 1
    steps before them if `with_past`. Key j is seen by query i if i - window < j <= i and j >= 0. A mask is
    bool; on a GPU it has numbers of type `dtype` that are added, so that it is not converted in every layer.
    """
    keys = positions
    earlier = 0
    steps = positions.shape[1]
    if with_past:
        earlier = window - 1
        keys = torch.cat(
            (positions[:, :1] + torch.arange(-earlier, 0, device=positions.device), positions), dim=1
        )
    masks = list[tuple[slice, slice, Tensor]]()
    for start in range(0, steps, ATTENTION_STEPS):
        end = min(start + ATTENTION_STEPS, steps)
        seen = slice(max(0, start + earlier - window + 1), end + earlier)
        distance = positions[:, start:end, None] - keys[:, None, seen]
        mask = ((distance >= 0) & (distance < window) & (keys[:, None, seen] >= 0)).unsqueeze(1)
        if mask.is_cuda:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        masks.append((slice(start, end), seen, mask))
    return masks


class TransformerLayer:
    """RMSNorm, attention, layer scale; RMSNorm, SwiGLU, layer scale. Its state has the last window - 1 rotated
    keys and values."""

    def __init__(
        self, load: BlockLoader, layout: StateLayout, weights: Layer, shape: StackShape, window: int
    ) -> None:
        self.weights = weights
        self.shape = shape
        self.attention_scale, self.mlp_scale = (load(name, shape.hidden) for name in load.scale_names)
        self.span = layout.add(window - 1, 2 * shape.kv_width)

    def __call__(
        self,
        x: Tensor,
        turns: Tensor,
        masks: Sequence[tuple[slice, slice, Tensor]],
        past: Past | None,
    ) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim]; turns: see `WindowTransformer.turns`, in the type of `x` unless they are
        applied in float32; `masks`: see `window_masks`."""
        weights = self.weights
        shape = self.shape
        split = (-1, self.shape.head_dim)
        heads = linear(rms_norm(x, weights.input_norm, shape.eps), weights.qkv).unflatten(-1, split)
        query, key, value = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
        query, key = (rope(one, turns, turns.dtype != x.dtype) for one in (query, key))
        if past is not None:
            pairs = torch.cat((key, value), dim=2).flatten(2)
            key, value = self.span.extended(pairs, past).unflatten(-1, split).chunk(2, dim=2)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        grouped = shape.heads != shape.kv_heads
        parts = [
            scaled_dot_product_attention(
                query[:, :, at], key[:, :, seen], value[:, :, seen], attn_mask=mask, enable_gqa=grouped
            )
            for at, seen, mask in masks
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        x = x + self.attention_scale * linear(attended.transpose(1, 2).flatten(2), weights.o)
        inner = swiglu(linear(rms_norm(x, weights.post_norm, shape.eps), weights.gate_up))
        return x + self.mlp_scale * linear(inner, weights.down)


class WindowTransformer:
    """A causal sliding-window transformer: [B, T, dim] -> [B, T, dim]. Positions count its steps; the heads of its
    weights have half-split layout.

    `frequencies`: makes those of rotary embedding from their exponents, 0 to 1, float32 [head_dim / 2]. `rounded`:
    whether its cosines and sines are rounded to bfloat16 and then applied in float32, as in training.
    """

    def __init__(
        self,
        load: BlockLoader,
        layout: StateLayout,
        stack: StackWeights,
        shape: StackShape,
        window: int,
        frequencies: Callable[[Tensor], Tensor],
        rounded: bool = False,
    ) -> None:
        self.layers = [
            TransformerLayer(load.at(f"layers.{i}."), layout, layer, shape, window)
            for i, layer in enumerate(stack.layers)
        ]
        self.norm = stack.norm
        self.eps = shape.eps
        self.window = window
        exponents = (
            torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=load.device) / shape.head_dim
        )
        self._frequencies = frequencies(exponents)
        self._rounded = rounded

    def __call__(self, x: Tensor, past: Past | None) -> Tensor:
        offsets = torch.arange(x.shape[1], device=x.device)[None]
        positions = offsets if past is None else past.positions[:, None] + offsets
        turns = self.turns(positions)
        turns = turns if self._rounded else turns.to(x.dtype)
        masks = window_masks(positions, self.window, past is not None, x.dtype)
        for layer in self.layers:
            x = layer(x, turns, masks, past)
        return rms_norm(x, self.norm, self.eps)

    def turns(self, positions: Tensor) -> Tensor:
        """Cosines and sines of rotary embedding side by side, see `kernels.layers.rope`: positions [B, T] ->
        float32 [B, T, head_dim]."""
        angles = positions[..., None].float() * self._frequencies
        made = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return made.bfloat16().float() if self._rounded else made
