"""BiCodec's wave generator, as a plain module and on the codec's fused ops.

Fused ops are channels-last, and each applies the snake of the op that reads its result. They are causal, but
the generator is centred. The input of an op therefore has margins of zeros before and after its steps. The op
takes both margins together for history, and so reads as many steps after a step as before it. Rows of
different lengths are zero after their ends, as with the masks of the plain module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels.codec_ops import pack_centred_upsample
from pipelines.codec import blocks
from pipelines.codec.fused import (
    HEADROOM,
    FusedBlock,
    Reader,
    UnitParts,
    margined,
    tap_major,
    uses_fused_ops,
)
from pipelines.spark_tts.config import WaveConfig

SNAKE_EPS = 1e-9
_DILATIONS = (1, 3, 9)


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x: [batch, channels, steps] with zeros after the end of each row."""
    return x if mask is None else x * mask


class Snake(nn.Module):
    """x + sin^2(alpha x) / alpha, by channel (Ziyin, Hartwig and Ueda, 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, channels, steps]."""
        return torch.addcmul(x, (self.alpha + SNAKE_EPS).reciprocal(), torch.sin(self.alpha * x).square_())

    def fused(self) -> blocks.Snake:
        """The snake for fused ops."""
        alpha = self.alpha.float().flatten()
        return blocks.Snake(alpha, 1.0 / (alpha + SNAKE_EPS))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                Snake(channels),
                nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
                Snake(channels),
                nn.Conv1d(channels, channels, 1),
            ]
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [batch, channels, steps], zero after the end of each row, like the result."""
        first, wide, second, narrow = self.block
        return masked(x + narrow(second(wide(first(x)))), mask)


class UpBlock(nn.Module):
    """Upsampling to `rate` times the steps and half the channels."""

    def __init__(self, channels: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        up = nn.ConvTranspose1d(channels, channels // 2, kernel, stride=rate, padding=(kernel - rate) // 2)
        self.block = nn.ModuleList(
            [Snake(channels), up, *(ResidualUnit(channels // 2, dilation) for dilation in _DILATIONS)]
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if mask is not None:
            mask = mask.repeat_interleave(self.rate, dim=2)
        x = masked(self.block[1](self.block[0](x)), mask)
        for unit in self.block[2:]:
            x = unit(x, mask)
        return x, mask


class WaveGenerator(nn.Module):
    """[batch, input, steps] -> [batch, samples per step * steps] within [-1, 1]."""

    def __init__(self, config: WaveConfig) -> None:
        super().__init__()
        channels = [config.channels >> index for index in range(len(config.rates) + 1)]
        blocks = [
            UpBlock(wide, kernel, rate)
            for wide, kernel, rate in zip(channels, config.kernel_sizes, config.rates)
        ]
        first = nn.Conv1d(config.input_channel, config.channels, 7, padding=3)
        self.model = nn.ModuleList(
            [first, *blocks, Snake(channels[-1]), nn.Conv1d(channels[-1], 1, 7, padding=3)]
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = masked(self.model[0](masked(x, mask)), mask)
        for block in self.model[1:-2]:
            x, mask = block(x, mask)
        return torch.tanh(self.model[-1](self.model[-2](x)))[:, 0]


#: Steps that a convolution reads on either side: in the stem, the head and a residual unit at dilation 1; and
#: in a transposed convolution.
_REACH = 3
_UP_REACH = 1

_ops: Any = torch.ops.nightjar


def prepared(wave: WaveGenerator, dtype: torch.dtype, fused: bool | None = None) -> WaveGenerator | FusedWave:
    """Prepares a generator that was loaded in float32 to run in `dtype`: on fused ops, or converted in place.

    `fused`: see `pipelines.codec.fused.uses_fused_ops`. Raises ValueError like `FusedWave`.
    """
    device = next(wave.parameters()).device
    return FusedWave(wave, dtype) if uses_fused_ops(device, dtype, fused) else wave.to(dtype)


class FusedWave:
    """Computes the result of a `WaveGenerator` in `dtype`. Does not keep the module, which is in float32.

    Raises ValueError if a transposed convolution reads more than an input and its two neighbours.
    """

    def __init__(self, wave: WaveGenerator, dtype: torch.dtype) -> None:
        model: Any = wave.model
        stem, *ups, snake, head = model
        self._stem = tap_major(stem.weight.to(dtype)), stem.bias.float()
        readers = [Reader(up.block[0].fused(), margin=_UP_REACH) for up in ups]
        readers.append(Reader(snake.fused(), margin=_REACH))
        self._entry = readers[0]
        self._blocks = [_block(up, after, dtype) for up, after in zip(ups, readers[1:])]
        self._head = (head.weight[0].T / HEADROOM).to(dtype).contiguous(), head.bias.float() / HEADROOM

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, input, steps] in `dtype`; mask: as for the plain module. Returns float32 [batch, samples per
        step * steps] within [-1, 1]."""
        steps = x.shape[2]
        lead = 2 * _REACH
        entry = self._entry
        # Full rows have ends too, so that kernels are compiled only for rows with ends.
        ends = (
            x.new_full((len(x),), steps, dtype=torch.int32)
            if mask is None
            else mask.sum(dim=(1, 2), dtype=torch.int32)
        )
        a = margined(x, steps, x.shape[1], _REACH)
        a[:, _REACH : _REACH + steps] = masked(x, mask).transpose(1, 2)
        following, ahead, offset = entry.buffer(a, steps, None)
        after = (following, offset, *entry.snake)
        _ops.codec_active_conv(a, lead, *self._stem, lead + 1, 1, None, None, *after, ends=ends)
        for block in self._blocks:
            before = ends
            ends = ends * block.rate
            following, ahead = block(following, ahead, None, before, ends)
        return torch.tanh(_ops.codec_head(following, ahead, *self._head) * HEADROOM)


def _block(block: UpBlock, after: Reader, dtype: torch.dtype) -> FusedBlock:
    parts: Any = block.block
    _, up, *units = parts
    readers = list[Reader]()
    made = list[UnitParts]()
    for unit in units:
        first, wide, inner, narrow = unit.block
        readers.append(Reader(first.fused(), margin=wide.padding[0]))
        weights = (wide.weight.to(dtype), wide.bias), (narrow.weight[:, :, 0].to(dtype), narrow.bias)
        made.append((*weights, wide.dilation[0], inner.fused()))
    packed = pack_centred_upsample(up.weight, block.rate).to(dtype), up.bias
    return FusedBlock(packed, block.rate, made, [*readers, after])
