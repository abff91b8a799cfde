"""Encodes the voice of a recording as global tokens: mel magnitudes, ECAPA-TDNN, a perceiver and a finite
scalar quantizer (FSQ)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.codec.encoding import mel_filters
from pipelines.spark_tts.config import MelConfig, SpeakerConfig

#: Sizes that are constants of the published code (ECAPA_TDNN_GLOB_c512, PerceiverResampler), not of the
#: config.
_WIDTH = 512
_GROUPS = 8
_SQUEEZED = 128
_CONTEXT = 1536
_HEADS = 8
_HEAD_DIM = 64
_DEPTH = 2
_FEED_FORWARD = 4
#: The FSQ of lucidrains limits its input to a range that is a thousandth wider than the levels.
_FSQ_WIDEN = 1.001


class MelMagnitudes:
    """Magnitudes, not their logarithm, in Slaney's mel bands: [batch, samples] -> [batch, mels, samples //
    hop + 1]."""

    def __init__(self, config: MelConfig, sample_rate: int, device: torch.device) -> None:
        self._config = config
        highest = config.sample_rate / 2 if config.mel_fmax is None else config.mel_fmax
        bands = mel_filters(config.n_fft // 2 + 1, config.num_mels, config.mel_fmin, highest, sample_rate)
        self._bands = bands.to(device)
        self._window = torch.hann_window(config.win_length, device=device)

    def __call__(self, samples: Tensor) -> Tensor:
        size = self._config
        spectrum = torch.stft(
            samples,
            size.n_fft,
            size.hop_length,
            size.win_length,
            self._window,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )
        return (spectrum.abs().transpose(1, 2) @ self._bands).transpose(1, 2)


def tdnn(input: int, output: int, kernel: int = 1) -> nn.Sequential:
    """A convolution that keeps the length, ReLU, batch norm."""
    conv = nn.Conv1d(input, output, kernel, padding=kernel // 2)
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), bn=nn.BatchNorm1d(output)))


class Res2Net(nn.Module):
    """Convolves each group of channels except the last, after adding the result of the group before it."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        group = channels // _GROUPS
        self.convs = nn.ModuleList(
            [nn.Conv1d(group, group, 3, padding=dilation, dilation=dilation) for _ in range(_GROUPS - 1)]
        )
        self.bns = nn.ModuleList([nn.BatchNorm1d(group) for _ in range(_GROUPS - 1)])

    def forward(self, x: Tensor) -> Tensor:
        *parts, passing = x.chunk(_GROUPS, dim=1)
        made = list[Tensor]()
        for part, conv, bn in zip(parts, self.convs, self.bns):
            made.append(bn(torch.relu(conv(part + made[-1] if made else part))))
        return torch.cat([*made, passing], dim=1)


class SqueezeExcitation(nn.Module):
    """Weights channels by a function of the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(channels, _SQUEEZED)
        self.linear2 = nn.Linear(_SQUEEZED, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.linear2(torch.relu(self.linear1(x.mean(dim=2)))))[:, :, None]


class SeRes2Net(nn.Module):
    """1x1, Res2Net, 1x1, squeeze and excitation, residual: [B, channels, T] -> [B, channels, T]."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.se_res2block = nn.Sequential(
            tdnn(channels, channels),
            Res2Net(channels, dilation),
            tdnn(channels, channels),
            SqueezeExcitation(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.se_res2block(x) + x


class Ecapa(nn.Module):
    """ECAPA-TDNN (Desplanques et al. 2020, arXiv 2005.07143) as in WeSpeaker, up to its pooling, which is not
    used: [B, bands, T] -> [B, 1536, T]."""

    def __init__(self, bands: int) -> None:
        super().__init__()
        self.layer1 = tdnn(bands, _WIDTH, 5)
        self.layer2, self.layer3, self.layer4 = (SeRes2Net(_WIDTH, dilation) for dilation in (2, 3, 4))
        self.conv = nn.Conv1d(3 * _WIDTH, _CONTEXT, 1)

    def forward(self, x: Tensor) -> Tensor:
        second = self.layer2(self.layer1(x))
        third = self.layer3(second)
        return torch.relu(self.conv(torch.cat((second, third, self.layer4(third)), dim=1)))


class PerceiverAttention(nn.Module):
    """The latents attend to themselves and to the context."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = _HEADS * _HEAD_DIM
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        key, value = self.to_kv(torch.cat((latents, context), dim=1)).chunk(2, dim=-1)
        heads = [
            x.unflatten(-1, (_HEADS, _HEAD_DIM)).transpose(1, 2) for x in (self.to_q(latents), key, value)
        ]
        return self.to_out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class FeedForward(nn.ModuleList):
    def __init__(self, dim: int) -> None:
        inner = int(dim * _FEED_FORWARD * 2 / 3)
        super().__init__([nn.Linear(dim, 2 * inner), nn.Identity(), nn.Linear(inner, dim)])

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self[0](x).chunk(2, dim=-1)
        return self[2](value * functional.gelu(gate))


class RmsNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1) * math.sqrt(x.shape[-1]) * self.gamma


class Perceiver(nn.Module):
    """Maps a context of any length to a fixed number of latents: [batch, steps, 1536] -> [batch, latents,
    dim]."""

    def __init__(self, dim: int, latents: int) -> None:
        super().__init__()
        self.proj_context = nn.Linear(_CONTEXT, dim)
        self.latents = nn.Parameter(torch.empty(latents, dim))
        self.layers = nn.ModuleList(
            [nn.ModuleList([PerceiverAttention(dim), FeedForward(dim)]) for _ in range(_DEPTH)]
        )
        self.norm = RmsNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        context = self.proj_context(x)
        latents = self.latents.expand(len(x), -1, -1)
        for attention, feed_forward in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            latents = attention(latents, context) + latents
            latents = feed_forward(latents) + latents
        return self.norm(latents)


class Fsq(nn.Module):
    """Finite scalar quantization (Mentzer et al., 2023): each of a few dimensions is rounded to one of an
    even number of levels."""

    def __init__(self, dim: int, levels: Sequence[int]) -> None:
        super().__init__()
        self.project_in = nn.Linear(dim, len(levels))
        self.project_out = nn.Linear(len(levels), dim)
        self._levels = tuple(levels)

    def indices(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, dim] -> int64 [batch, tokens]."""
        z = self.project_in(x)
        whole, basis = _digits(self._levels, z.device)
        levels = whole.to(z.dtype)
        half = (levels - 1) * _FSQ_WIDEN / 2
        digits = (torch.tanh(z + torch.atanh(0.5 / half)) * half - 0.5).round() + levels / 2
        return (digits.long() * basis).sum(-1)

    def vectors(self, indices: Tensor) -> Tensor:
        """int64 [batch, tokens] -> [batch, tokens, dim]."""
        levels, basis = _digits(self._levels, indices.device)
        digits = indices[..., None] // basis % levels
        return self.project_out(((digits - levels // 2) / (levels // 2)).to(self.project_out.weight.dtype))


@lru_cache(maxsize=8)
def _digits(levels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels of each dimension and the weight of its digit, int64. They are cached, because the host
    would wait while they are made on a GPU."""
    weights = [math.prod(levels[:index]) for index in range(len(levels))]
    return torch.tensor(levels, device=device), torch.tensor(weights, device=device)


class SpeakerEncoder(nn.Module):
    """Maps a recording's mel magnitudes to global tokens, and global tokens to the vector that conditions the
    decoder."""

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        self.speaker_encoder = Ecapa(config.input_dim)
        self.perceiver_sampler = Perceiver(config.latent_dim, config.token_num)
        self.quantizer = Fsq(config.latent_dim, config.fsq_levels)
        self.project = nn.Linear(config.latent_dim * config.token_num, config.out_dim)

    def tokens(self, mel: Tensor) -> Tensor:
        """mel: [batch, mels, steps] -> int64 [batch, tokens]."""
        return self.quantizer.indices(self.perceiver_sampler(self.context(mel)))

    def context(self, mel: Tensor) -> Tensor:
        """mel: [batch, mels, steps] -> [batch, steps, 1536]."""
        return self.speaker_encoder(mel).transpose(1, 2)

    def vector(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] -> [batch, output]. The published projection flattens the latent's dimension
        before that of the tokens."""
        return self.project(self.quantizer.vectors(tokens).transpose(1, 2).flatten(1))
