"""The building blocks of BiCodec, named as in the published checkpoint so that its tensors fit by name.

A `mask` ([batch, 1, steps], 1 where a row has audio, 0 behind its end, None when all rows are equally long) makes a padded
row equal to the row alone: every convolution sees zeros behind the end, as its own padding would be.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.spark_tts.config import VocosConfig

_LAYER_NORM_EPS = 1e-6
SNAKE_EPS = 1e-9


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x: [batch, channels, steps] with zeros behind the end of each row."""
    return x if mask is None else x * mask


class Snake(nn.Module):
    """x + sin^2(alpha x) / alpha, by channel (Ziyin, Hartwig and Ueda, 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, channels, steps]."""
        return torch.addcmul(x, (self.alpha + SNAKE_EPS).reciprocal(), torch.sin(self.alpha * x).square_())


class AdaLayerNorm(nn.Module):
    """A layer norm whose scale and shift are linear in a condition."""

    def __init__(self, condition: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(condition, dim)
        self.shift = nn.Linear(condition, dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: [batch, steps, dim]; condition: [batch, condition]."""
        normed = functional.layer_norm(x, x.shape[-1:], eps=_LAYER_NORM_EPS)
        return normed * self.scale(condition)[:, None] + self.shift(condition)[:, None]


class ConvNeXt(nn.Module):
    """A ConvNeXt block of Vocos (Siuzdak, 2023): depthwise convolution over time, then a gated feed-forward by step."""

    def __init__(self, dim: int, intermediate: int, condition: int | None) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = _norm(dim, condition)
        self.pwconv1 = nn.Linear(dim, intermediate)
        self.pwconv2 = nn.Linear(intermediate, dim)
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor, mask: Tensor | None, condition: Tensor | None) -> Tensor:
        """x: [batch, dim, steps]; condition: [batch, condition]."""
        inner = _normed(self.norm, self.dwconv(masked(x, mask)).transpose(1, 2), condition)
        inner = self.pwconv2(functional.gelu(self.pwconv1(inner)))
        return x + (self.gamma * inner).transpose(1, 2)


class Vocos(nn.Module):
    """A stack of ConvNeXt blocks: [batch, input, steps] -> [batch, steps, dim]. Not causal."""

    def __init__(self, input: int, dim: int, intermediate: int, layers: int, condition: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Conv1d(input, dim, 7, padding=3)
        self.norm = _norm(dim, condition)
        self.convnext = nn.ModuleList([ConvNeXt(dim, intermediate, condition) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(dim, eps=_LAYER_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor | None = None, condition: Tensor | None = None) -> Tensor:
        x = _normed(self.norm, self.embed(masked(x, mask)).transpose(1, 2), condition).transpose(1, 2)
        for block in self.convnext:
            x = block(x, mask, condition)
        return self.final_layer_norm(x.transpose(1, 2))


class Encoder(nn.Module):
    """Features of wav2vec2 to what the semantic tokens are chosen by: [batch, steps, input] -> [batch, steps, output]."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__()
        self.encoder = Vocos(config.input, config.dim, config.intermediate, config.layers)
        self.downsample = _samplings(config)
        self.project = nn.Linear(config.dim, config.output)

    def forward(self, features: Tensor) -> Tensor:
        x = self.encoder(features.transpose(1, 2))
        for block in self.downsample:
            x = block(x, None)
        return self.project(x)


class Prenet(nn.Module):
    """Semantic vectors under a voice to what the wave is made of: [batch, input, steps] -> [batch, output, steps]."""

    def __init__(self, config: VocosConfig, condition: int) -> None:
        super().__init__()
        self.linear_pre = nn.Linear(config.input, config.dim)
        self.downsample = _samplings(config)
        self.vocos_backbone = Vocos(config.dim, config.dim, config.intermediate, config.layers, condition)
        self.linear = nn.Linear(config.dim, config.output)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None = None) -> Tensor:
        """condition: [batch, condition], the voice."""
        y = self.linear_pre(x.transpose(1, 2))
        for block in self.downsample:
            y = block(y, mask)
        return self.linear(self.vocos_backbone(y.transpose(1, 2), mask, condition)).transpose(1, 2)


class Sampling(nn.Sequential):
    """The published sampling block at ratio 1, which returns three times its input, and the Vocos behind it."""

    def __init__(self, config: VocosConfig) -> None:
        super().__init__(nn.Identity(), Vocos(config.dim, config.dim, config.intermediate, 2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x: [batch, steps, dim]."""
        return self[1](3 * x.transpose(1, 2), mask)


def _samplings(config: VocosConfig) -> nn.ModuleList:
    return nn.ModuleList([Sampling(config) for _ in config.ratios])


def _norm(dim: int, condition: int | None) -> nn.Module:
    return nn.LayerNorm(dim, eps=_LAYER_NORM_EPS) if condition is None else AdaLayerNorm(condition, dim)


def _normed(norm: nn.Module, x: Tensor, condition: Tensor | None) -> Tensor:
    return norm(x, condition) if isinstance(norm, AdaLayerNorm) else norm(x)
