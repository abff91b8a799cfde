"""Draws tokens from logits, for all rows at once with the settings of each row, and computes the random numbers
of the draws.

The order is that of the published models: repetition penalty, ban of the end, suppression, temperature,
top-k, top-p, softmax, draw. Random numbers are counter-based: Philox4x32-10 in integer arithmetic, which gives
equal numbers on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: The settings with which code 0 is drawn again if a recent frame has the same one (`kernels.frame.DrawRules.window`).
RETRY_TEMPERATURE = 1.0
RETRY_TOP_P = 0.9
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x, computed from 16-bit halves so that no product exceeds int64."""
    upper = factor * (x >> 16)
    lower = factor * (x & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    All tensors are int64 that hold 32-bit words and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def frame_noise(seeds: Tensor, frames: Tensor, codebooks: int) -> Tensor:
    """The random word of every codebook, for one frame of each row: word 0 of Philox at counter (frame, codebook,
    0, 0), key = seed.

    seeds: [n] int64 >= 0; frames: [n] int64; returns int64 [n, codebooks] in [0, 2**32). The words depend only
    on seed, frame and codebook, not on the row, the batch, the device or earlier draws.
    """
    codebook = torch.arange(codebooks, device=seeds.device)[None]
    zero = torch.zeros_like(codebook)
    return philox((frames[:, None], codebook, zero, zero), (seeds[:, None] & _MASK, seeds[:, None] >> 32))[0]


class DrawFlags(NamedTuple):
    """Properties of a batch's settings that are known on the host and let the sampler skip steps."""

    max_top_k: int
    any_top_p: bool
    all_greedy: bool

    @classmethod
    def of(cls, settings: Sequence[tuple[float, int, float]]) -> DrawFlags:
        """The flags of rows, each given as (temperature, top_k, top_p)."""
        drawn = [(top_k, top_p) for temperature, top_k, top_p in settings if temperature > 0]
        return cls(
            max_top_k=max((k for k, _ in drawn), default=0),
            any_top_p=any(p < 1 for _, p in drawn),
            all_greedy=not drawn,
        )


#: Probabilities are rounded to whole multiples of 2**-30. Their sums are then exact in any order, so that a draw
#: does not depend on the device.
WEIGHT_BITS = 30
_NEVER = float("-inf")


def process_first(
    logits: Tensor, seen: Tensor, penalty: Tensor, ban_end: Tensor, ends: Sequence[int], suppress_from: int
) -> Tensor:
    """Logits of codebook 0, in float32, after the steps that also apply to greedy choice: penalty, ban of the end,
    suppression.

    logits: [n, vocab]; seen: bool [n, vocab], the tokens that the request has drawn so far; penalty: [n];
    ban_end: bool [n], rows that must not end yet; suppress_from: tokens from this one on, except `ends`, are
    never drawn.
    """
    wide = logits.float()
    factor = penalty[:, None]
    wide = torch.where(seen, torch.where(wide > 0, wide / factor, wide * factor), wide)
    token = torch.arange(wide.shape[1], device=wide.device)
    is_end = is_one_of(token, ends)
    return wide.masked_fill(((token >= suppress_from) & ~is_end) | (is_end & ban_end[:, None]), _NEVER)


def log_probability(logits: Tensor, drawn: Tensor, ends: Sequence[int], suppress_from: int) -> Tensor:
    """The natural logarithm of the model's own probability of each drawn token: float32 [n].

    The distribution is the softmax of the raw logits at temperature 1, over the tokens that can be drawn
    (`process_first`), before the penalty, the ban of the end, top-k and top-p. logits: [n, vocab]; drawn: int64 [n].
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    never = (token >= suppress_from) & ~is_one_of(token, ends)
    return logits.float().masked_fill(never, _NEVER).log_softmax(-1).gather(1, drawn[:, None])[:, 0]


def is_one_of(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """Whether each token is one of `ends`: bool, with the shape of `tokens`."""
    return torch.stack([tokens == end for end in ends]).any(0)


def token_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int, any_top_p: bool
) -> Tensor:
    """Probabilities after temperature, top-k and top-p, as whole multiples of 2**-30: int64 [n, vocab].

    logits: float32 [n, vocab]; temperature, top_p: float32 [n]; top_k: int64 [n], 0 = off; max_top_k: the
    largest top_k; any_top_p: whether a row has top_p < 1. All tokens that equal the top-k threshold are kept, as
    in the published models.
    """
    scaled = logits / temperature[:, None]
    if max_top_k:
        best = scaled.topk(min(max_top_k, scaled.shape[1]), dim=-1).values
        least = best.gather(1, (top_k[:, None] - 1).clamp(0, best.shape[1] - 1))
        scaled = scaled.masked_fill((scaled < least) & (top_k > 0)[:, None], _NEVER)
    weights = _quantized(scaled.softmax(-1))
    if not any_top_p:
        return weights
    ascending, order = weights.sort(dim=-1, stable=True)
    total = ascending.cumsum(-1)
    # The published models remove a token if it and all less likely ones together have a probability of 1 - top_p or
    # less, but never the likeliest.
    removed = total.double() <= (1.0 - top_p.double())[:, None] * total[:, -1:].double()
    removed &= (top_p < 1.0)[:, None]
    removed[:, -1] = False
    kept = torch.zeros_like(removed).scatter(1, order, ~removed)
    return _quantized(scaled.masked_fill(~kept, _NEVER).softmax(-1))


def nucleus_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`token_weights` in the order of `DrawRules.nucleus_first`: int64 [n, vocab].

    By the probabilities without temperature, a token is removed if it and all likelier ones together have more
    than top_p, or if top_k tokens or more are likelier; of equal tokens the first one counts as likelier. The
    likeliest token is always kept.
    """
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    mass = _quantized(logits.softmax(-1)).gather(1, order).cumsum(-1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    removed = mass.double() > top_p.double()[:, None] * mass[:, -1:].double()
    removed |= (rank >= top_k[:, None]) & (top_k > 0)[:, None]
    removed[:, 0] = False
    kept = torch.zeros_like(removed).scatter(1, order, ~removed)
    return _quantized((logits / temperature[:, None]).masked_fill(~kept, _NEVER).softmax(-1))


def _quantized(probabilities: Tensor) -> Tensor:
    return (probabilities * float(1 << WEIGHT_BITS)).round().long()


def all_finite(logits: Tensor) -> Tensor:
    """Whether a row has neither NaN nor infinity: bool [n]. The sum of a row shows both, and takes a fraction of
    the time of a check of each value."""
    return logits.sum(-1).isfinite()


def draw(weights: Tensor, random: Tensor) -> Tensor:
    """The token at the place `random` / 2**32 of the total weight. weights: int64 [n, vocab]; random:
    int64 [n] -> int64 [n]."""
    total = weights.cumsum(-1)
    place = (random * total[:, -1]) >> 32
    return torch.searchsorted(total, place[:, None], right=True)[:, 0].clamp(max=weights.shape[1] - 1)


def sample(
    logits: Tensor, random: Tensor, settings: Sequence[Tensor], flags: DrawFlags, nucleus_first: bool = False
) -> Tensor:
    """One token per row: the likeliest if the row is greedy, otherwise one drawn with `random`.

    logits: float32 [n, vocab], already penalized and suppressed; random: int64 [n], 32 random bits;
    settings: temperature, top_k and top_p as in `token_weights`, or in `nucleus_weights` with `nucleus_first`,
    and greedy, bool [n]; flags: `DrawFlags.of` the rows' settings; returns int64 [n]. A row with NaN gets an
    arbitrary token, so the caller must check for NaN.
    """
    best = logits.argmax(-1)
    if flags.all_greedy:
        return best
    temperature, top_k, top_p, greedy = settings
    if nucleus_first:
        weights = nucleus_weights(logits, temperature, top_k, top_p)
    else:
        weights = token_weights(logits, temperature, top_k, top_p, flags.max_top_k, flags.any_top_p)
    return torch.where(greedy, best, draw(weights, random))
