"""The last part of BiCodec: vectors at 50 Hz to a waveform, by transposed convolutions and residual units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipelines.spark_tts.blocks import Snake, WNConv1d, WNConvTranspose1d, masked
from pipelines.spark_tts.config import WaveConfig

_DILATIONS = (1, 3, 9)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            [
                Snake(channels),
                WNConv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
                Snake(channels),
                WNConv1d(channels, channels, 1),
            ]
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: [batch, channels, steps], zero behind the end of each row; so is the result."""
        first, wide, second, narrow = self.block
        return masked(x + narrow(second(wide(first(x)))), mask)


class UpBlock(nn.Module):
    """`rate` times the steps, half the channels."""

    def __init__(self, channels: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        up = WNConvTranspose1d(channels, channels // 2, kernel, stride=rate, padding=(kernel - rate) // 2)
        self.block = nn.ModuleList([Snake(channels), up, *(ResidualUnit(channels // 2, dilation) for dilation in _DILATIONS)])

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
        blocks = [UpBlock(wide, kernel, rate) for wide, kernel, rate in zip(channels, config.kernels, config.rates)]
        first = WNConv1d(config.input, config.channels, 7, padding=3)
        self.model = nn.ModuleList([first, *blocks, Snake(channels[-1]), WNConv1d(channels[-1], 1, 7, padding=3)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = masked(self.model[0](masked(x, mask)), mask)
        for block in self.model[1:-2]:
            x, mask = block(x, mask)
        return torch.tanh(self.model[-1](self.model[-2](x)))[:, 0]
