"""The voice of a recording as global tokens: mel magnitudes, ECAPA-TDNN, a perceiver and a finite scalar
quantizer (FSQ)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.nn.speaker import Ecapa, EcapaConfig, mel_bands
from pipelines.spark_tts.config import MelConfig, SpeakerConfig

#: Sizes that the published code fixes (ECAPA_TDNN_GLOB_c512, PerceiverResampler), beside the config.
_WIDTH, _CONTEXT = 512, 1536
_HEADS, _HEAD_DIM, _DEPTH, _FEED_FORWARD = 8, 64, 2, 4
#: lucidrains' FSQ bounds its input a thousandth wider than the levels.
_FSQ_WIDEN = 1.001


class MelMagnitudes:
    """Magnitudes, not their logarithm, in Slaney's mel bands: [batch, samples] -> [batch, mels, samples //
    hop + 1]."""

    def __init__(self, config: MelConfig, sample_rate: int, device: torch.device) -> None:
        self._config = config
        self._bands = mel_bands(
            config.n_fft, config.num_mels, config.mel_fmin, config.highest, sample_rate
        ).to(device)
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


def ecapa(bands: int) -> Ecapa:
    """The published network, whose pooling is not used."""
    widths = (_WIDTH, _WIDTH, _WIDTH, _WIDTH, _CONTEXT)
    return Ecapa(
        EcapaConfig(
            bands, widths, (5, 3, 3, 3, 1), (1, 2, 3, 4, 1), groups=8, squeezed=128, speechbrain=False
        )
    )


#: Where the published network has other names than ours, as for `pipelines.nn.checkpoint.fill_module`.
PUBLISHED = {
    r"^(speaker_encoder\.)first": r"\1layer1",
    r"blocks\.(\d+)": lambda found: f"layer{int(found[1]) + 2}.se_res2block",
    r"\.before": ".0",
    r"\.groups\.(\d+)\.(conv|bn)": r".1.\2s.\1",
    r"\.after": ".2",
    r"\.squeeze": ".3.linear1",
    r"\.excite": ".3.linear2",
    r"^(speaker_encoder\.)last": r"\1conv",
}


class PerceiverAttention(nn.Module):
    """The latents look at themselves and at the context."""

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
    """A context of any length to a fixed number of latents: [batch, steps, 1536] -> [batch, latents, dim]."""

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
    """The levels of each dimension and the weight of its digit, int64; kept, since making them on a GPU
    makes the host wait."""
    weights = [math.prod(levels[:index]) for index in range(len(levels))]
    return torch.tensor(levels, device=device), torch.tensor(weights, device=device)


class SpeakerEncoder(nn.Module):
    """A recording's mel magnitudes to global tokens, and global tokens to the vector that the decoder is
    conditioned on."""

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        self.speaker_encoder = ecapa(config.input)
        self.perceiver_sampler = Perceiver(config.latent, config.tokens)
        self.quantizer = Fsq(config.latent, config.levels)
        self.project = nn.Linear(config.latent * config.tokens, config.output)

    def tokens(self, mel: Tensor) -> Tensor:
        """mel: [batch, mels, steps] -> int64 [batch, tokens]."""
        return self.quantizer.indices(self.perceiver_sampler(self.context(mel)))

    def context(self, mel: Tensor) -> Tensor:
        """mel: [batch, mels, steps] -> [batch, steps, 1536]."""
        return self.speaker_encoder(mel).transpose(1, 2)

    def vector(self, tokens: Tensor) -> Tensor:
        """int64 [batch, tokens] -> [batch, output]. The published projection takes the latent index first,
        then the token's."""
        return self.project(self.quantizer.vectors(tokens).transpose(1, 2).flatten(1))
