"""How tokens and codes are drawn, in the order of the model owner: filters on the raw logits, then temperature, then one draw.

The token that crosses top_p is dropped, and nothing is renormalized before the temperature: vLLM's own sampler does neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.philox import philox

#: Tokens back in which repetition-aware sampling looks, and the settings of its second draw.
WINDOW = 10
RETRY_TEMPERATURE, RETRY_TOP_P = 1.0, 0.9
#: The smallest temperature; below it a draw is greedy anyway.
_COLDEST = 1e-5
_MASK = 0xFFFFFFFF
#: Of a random word, as many bits as float32 holds together with a half.
_NOISE_BITS = 23
#: Tells these draws from others of one seed.
_DOMAIN = 0x46495348


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are drawn: float32 [n], float32 [n], int64 [n] (0: all)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest candidates of every row, likeliest first: each [n, ranks]."""

    #: float32, raw.
    logits: Tensor
    #: int64, where a candidate stands in its row.
    order: Tensor
    #: float32, the probability of a candidate and all likelier ones, over all that the row holds.
    cumulative: Tensor


def ranked(logits: Tensor, most: int) -> Ranked:
    """logits: [n, vocabulary]; `most`: ranks to keep, 0 for all."""
    wide = logits.float()
    if 0 < most < wide.shape[1]:
        best, order = wide.topk(most, dim=-1)
    else:
        best, order = wide.sort(dim=-1, descending=True, stable=True)
    return Ranked(best, order, wide.softmax(-1).gather(1, order).cumsum(-1))


def probabilities(candidates: Ranked, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """float32 [n, ranks] in the order of the candidates; 0 for what the filters drop. Settings are those of `Settings`."""
    rank = torch.arange(candidates.logits.shape[1], device=candidates.logits.device)[None]
    dropped = (candidates.cumulative > top_p[:, None]) | ((rank >= top_k[:, None]) & (top_k > 0)[:, None])
    dropped &= rank > 0
    scaled = candidates.logits / temperature.clamp(min=_COLDEST)[:, None]
    return scaled.masked_fill(dropped, float("-inf")).softmax(-1)


def draw(candidates: Ranked, chances: Tensor, uniform: Tensor) -> Tensor:
    """One candidate a row by argmax(p / -log(u)): chances, uniform (within (0, 1)): float32 [n, ranks] -> int64 [n]."""
    best = (chances / -uniform.log()).argmax(-1, keepdim=True)
    return candidates.order.gather(1, best)[:, 0]


def repetition_aware(first: Tensor, second: Tensor, window: Tensor, semantic: range) -> Tensor:
    """The first draw, or the second one where the first is a semantic token that was spoken a moment ago.

    first, second: int64 [n], ids; window: int64 [n, WINDOW], the ids before, 0 where there are none yet.
    """
    speech = (first >= semantic.start) & (first < semantic.stop)
    return torch.where(speech & (window == first[:, None]).any(-1), second, first)


def uniform_noise(seeds: Tensor, frames: Tensor, streams: int, ranks: int) -> Tensor:
    """float32 [n, streams, ranks] within (0, 1): a function of seed, frame, stream and rank alone (Philox4x32-10).

    seeds: int64 [n] >= 0; frames: int64 [n].
    """
    device = seeds.device
    stream = torch.arange(streams, device=device)[None, :, None]
    block = torch.arange(-(-ranks // 4), device=device)[None, None]
    counter = (frames[:, None, None], stream, block, torch.full_like(block, _DOMAIN))
    key = (seeds[:, None, None] & _MASK, seeds[:, None, None] >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1).flatten(2)[..., :ranks]
    return ((words >> (32 - _NOISE_BITS)).float() + 0.5) / (1 << _NOISE_BITS)
