"""BiCodec's wave generator, as a plain module and on the codec's fused ops.

Fused ops are channels-last, and each applies the snake of the op that reads its result. They are causal, but
the generator is centred. The input of an op therefore has margins of zeros before and after its steps. The op
takes both margins together for history, and so reads as many steps after a step as before it. Rows of
different lengths are zero after their ends, as with the masks of the plain module.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.codec_ops import pack_centred_upsample
from pipelines.codec import blocks
from pipelines.codec.fused import HEADROOM, FusedUnit, tap_major, uses_fused_ops
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
_REACH, _UP_REACH = 3, 1

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
        self._dtype = dtype
        self._stem, self._stem_bias = tap_major(stem.weight.to(dtype)), stem.bias.float()
        readers = [_Reader(up.block[0].fused(), _UP_REACH) for up in ups] + [_Reader(snake.fused(), _REACH)]
        self._entry = readers[0]
        self._blocks = [_Block(up, after, dtype) for up, after in zip(ups, readers[1:])]
        self._head, self._head_bias = (
            (head.weight[0].T / HEADROOM).to(dtype).contiguous(),
            head.bias.float() / HEADROOM,
        )

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [batch, input, steps]; mask: as for the plain module. Returns float32 [batch, samples per step *
        steps] within [-1, 1]."""
        steps = x.shape[2]
        # Full rows have ends too, so that kernels are compiled only for rows with ends.
        ends = (
            x.new_full((len(x),), steps, dtype=torch.int32)
            if mask is None
            else mask.sum(dim=(1, 2), dtype=torch.int32)
        )
        a = _margined(x, steps, x.shape[1], _REACH, self._dtype)
        a[:, _REACH : _REACH + steps] = masked(x, mask).transpose(1, 2)
        entry, taps = self._entry, 2 * _REACH + 1
        following = entry.input(a, steps)
        after = (following, entry.lead, *entry.snake)
        _ops.codec_active_conv(
            a, 2 * _REACH, self._stem, self._stem_bias, taps, 1, None, None, *after, ends=ends
        )
        for block in self._blocks:
            following, ends = block(following, ends)
        return torch.tanh(_ops.codec_head(following, 2 * _REACH, self._head, self._head_bias) * HEADROOM)


class _Reader(NamedTuple):
    """The op that reads a result: its snake, which the op before it applies, and `reach`, the number of steps
    that it reads on either side."""

    snake: blocks.Snake
    reach: int

    def input(self, like: Tensor, steps: int) -> Tensor:
        """An input that is still to be filled, [batch, reach + steps + reach, channels]; its margins are
        zero."""
        return _margined(like, steps, len(self.snake.gain), self.reach, like.dtype)

    @property
    def lead(self) -> int:
        """Number of values in a row before its first step."""
        return self.reach * len(self.snake.gain)


class _Block:
    """Transposed convolution and residual units."""

    def __init__(self, block: UpBlock, after: _Reader, dtype: torch.dtype) -> None:
        parts: Any = block.block
        _, up, *units = parts
        self._rate = block.rate
        self._weight = pack_centred_upsample(up.weight, block.rate).to(dtype)
        self._bias = up.bias.float().repeat(block.rate)
        readers = [_Reader(unit.block[0].fused(), unit.block[1].padding[0]) for unit in units] + [after]
        self._first = readers[0]
        self._snake = [values.repeat(block.rate) for values in self._first.snake]
        self._units: list[tuple[FusedUnit, int, _Reader]] = []
        for unit, (reader, following) in zip(units, pairwise(readers)):
            _, wide, inner, narrow = unit.block
            weights = (wide.weight.to(dtype), wide.bias), (narrow.weight[:, :, 0].to(dtype), narrow.bias)
            fused = FusedUnit(*weights, wide.dilation[0], inner.fused(), following.snake)
            self._units.append((fused, reader.reach, following))

    def __call__(self, a: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Activated [batch, 1 + steps + 1, 2 * channels] and the rows' ends -> the next op's input and the
        ends there."""
        steps = (a.shape[1] - 2 * _UP_REACH) * self._rate
        following = self._first.input(a, steps)
        x = a.new_empty(len(a), steps, following.shape[2])
        after, taps = (following, self._first.lead, *self._snake), 2 * _UP_REACH + 1
        _ops.codec_active_conv(
            a, 2 * _UP_REACH, self._weight, self._bias, taps, 1, None, x, *after, ends=ends
        )
        ends = ends * self._rate
        for unit, reach, reader in self._units:
            a, following = following, reader.input(a, steps)
            raw = None if reader is self._units[-1][2] else torch.empty_like(x)
            unit(a, 2 * reach, x, raw, following, reader.lead, ends)
            x = x if raw is None else raw
        return following, ends


def _margined(like: Tensor, steps: int, channels: int, margin: int, dtype: torch.dtype) -> Tensor:
    """[batch, margin + steps + margin, channels] on the device of `like`, with zero margins and uninitialized
    steps."""
    made = like.new_empty(len(like), steps + 2 * margin, channels, dtype=dtype)
    made[:, :margin], made[:, margin + steps :] = 0, 0
    return made
