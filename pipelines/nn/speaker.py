"""What speaker encoders have in common: Slaney's mel bands, and the network of ECAPA-TDNN."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn


@lru_cache(maxsize=4)
def mel_bands(n_fft: int, bands: int, low: float, high: float, sample_rate: int) -> Tensor:
    """Triangular filters of equal area on Slaney's mel scale (Auditory Toolbox, 1998): float32 [n_fft // 2
    + 1, bands]."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(
        n_fft // 2 + 1, bands, low, high, sample_rate, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(filters).float()


@dataclass(frozen=True, slots=True)
class EcapaConfig:
    """`channels`, `kernels`, `dilations`: of the first convolution, of each block, and of the convolution
    over what all blocks made."""

    bands: int
    channels: Sequence[int]
    kernels: Sequence[int]
    dilations: Sequence[int]
    #: Groups of channels in a block, and the channels that its weights are squeezed to.
    groups: int
    squeezed: int
    #: Wired as in SpeechBrain: no norms, edges reflect, the first group passes a block's middle as it is, and
    #: convolutions weigh channels. Else as in WeSpeaker: batch norms, silent edges, the last group passes,
    #: and linear layers weigh channels.
    speechbrain: bool

    def conv(self, input: int, output: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
        """A convolution that keeps the length."""
        border = (kernel - 1) * dilation // 2
        edges: Literal["reflect", "zeros"] = "reflect" if self.speechbrain and border else "zeros"
        return nn.Conv1d(input, output, kernel, padding=border, dilation=dilation, padding_mode=edges)

    def tdnn(self, input: int, output: int, kernel: int = 1, dilation: int = 1) -> nn.Sequential:
        """Convolution, ReLU, batch norm, in this order."""
        bn = nn.Identity() if self.speechbrain else nn.BatchNorm1d(output)
        return nn.Sequential(
            OrderedDict(conv=self.conv(input, output, kernel, dilation), relu=nn.ReLU(), bn=bn)
        )


class SeRes2Net(nn.Module):
    """1x1, Res2Net over groups of channels, 1x1, squeeze and excitation, residual: [B, channels, T] -> [B,
    channels, T]."""

    def __init__(self, config: EcapaConfig, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.config = config
        group = channels // config.groups
        self.before, self.after = config.tdnn(channels, channels), config.tdnn(channels, channels)
        self.groups = nn.ModuleList(
            [config.tdnn(group, group, kernel, dilation) for _ in range(config.groups - 1)]
        )
        layer = config.conv if config.speechbrain else nn.Linear
        self.squeeze, self.excite = layer(channels, config.squeezed), layer(config.squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.after(self.res2net(self.before(x)))
        mean = hidden.mean(dim=2, keepdim=True)
        if not self.config.speechbrain:
            mean = mean[:, :, 0]
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(mean))))
        return hidden * gate.view(*hidden.shape[:2], 1) + x

    def res2net(self, x: Tensor) -> Tensor:
        """Each group of channels but one is convolved on top of the one before."""
        parts = list(x.chunk(self.config.groups, dim=1))
        passing = parts.pop(0 if self.config.speechbrain else -1)
        made: list[Tensor] = []
        for conv, part in zip(self.groups, parts):
            made.append(conv(part + made[-1] if made else part))
        return torch.cat([passing, *made] if self.config.speechbrain else [*made, passing], dim=1)


class Ecapa(nn.Module):
    """ECAPA-TDNN (Desplanques et al. 2020, arXiv 2005.07143) up to its pooling: [B, bands, T] -> [B,
    channels[-1], T]."""

    def __init__(self, config: EcapaConfig) -> None:
        super().__init__()
        self.config = config
        widths, kernels, dilations = config.channels, config.kernels, config.dilations
        self.first = config.tdnn(config.bands, widths[0], kernels[0], dilations[0])
        self.blocks = nn.ModuleList(
            [SeRes2Net(config, *sizes) for sizes in zip(widths[1:-1], kernels[1:-1], dilations[1:-1])]
        )
        self.last = config.conv(sum(widths[1:-1]), widths[-1], kernels[-1], dilations[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        outputs: list[Tensor] = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.relu(self.last(torch.cat(outputs, dim=1)))
