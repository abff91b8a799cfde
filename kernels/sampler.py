"""From logits to a token, for all rows at once, every row with its own settings.

The order is that of the reference: repetition penalty, ban of the end, suppression, temperature, top-k, top-p, softmax, draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.registry import op

#: Probabilities become whole multiples of 2**-30: sums are then exact in any order, and the draw does not depend on the device.
WEIGHT_BITS = 30
_NEVER = float("-inf")


@op("process_first(Tensor logits, Tensor seen, Tensor penalty, Tensor ban_end, int end, int suppress_from) -> Tensor")
def process_first(logits: Tensor, seen: Tensor, penalty: Tensor, ban_end: Tensor, end: int, suppress_from: int) -> Tensor:
    """Codebook-0 logits after the processors that also hold for greedy choice, in float32.

    logits: [n, vocab]; seen: bool [n, vocab], the tokens that the request has drawn so far; penalty: [n]; ban_end: bool [n], rows
    that may not end yet; tokens from `suppress_from` on are never drawn, apart from `end`.
    """
    wide = logits.float()
    factor = penalty[:, None]
    wide = torch.where(seen, torch.where(wide > 0, wide / factor, wide * factor), wide)
    token = torch.arange(wide.shape[1], device=wide.device)
    banned = (token >= suppress_from) & (token != end)
    return wide.masked_fill(banned | ((token == end) & ban_end[:, None]), _NEVER)


def token_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int, any_top_p: bool) -> Tensor:
    """Probabilities after temperature, top-k and top-p, as whole multiples of 2**-30: int64 [n, vocab].

    logits: float32 [n, vocab]; temperature, top_p: float32 [n]; top_k: int64 [n], 0 = off; max_top_k: the largest top_k;
    any_top_p: whether a row has top_p < 1. Ties at the top-k threshold all stay, as in the reference.
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
    # The reference removes a token when it and all less likely ones together have at most 1 - top_p; never the likeliest.
    removed = total.double() <= (1.0 - top_p.double())[:, None] * total[:, -1:].double()
    removed &= (top_p < 1.0)[:, None]
    removed[:, -1] = False
    kept = torch.zeros_like(removed).scatter(1, order, ~removed)
    return _quantized(scaled.masked_fill(~kept, _NEVER).softmax(-1))


def _quantized(probabilities: Tensor) -> Tensor:
    return (probabilities * float(1 << WEIGHT_BITS)).round().long()


def all_finite(logits: Tensor) -> Tensor:
    """Whether a row is free of NaN and infinity: bool [n]. A sum shows both at a fraction of the price of a look at each value."""
    return logits.sum(-1).isfinite()


def draw(weights: Tensor, random: Tensor) -> Tensor:
    """The token at the place `random` / 2**32 of the total weight. weights: int64 [n, vocab]; random: int64 [n] -> int64 [n]."""
    total = weights.cumsum(-1)
    place = (random * total[:, -1]) >> 32
    token = torch.searchsorted(total, place[:, None], right=True)[:, 0]
    return token.clamp(max=weights.shape[1] - 1)


@op(
    "sample(Tensor logits, Tensor random, Tensor temperature, Tensor top_k, Tensor top_p, Tensor greedy, int max_top_k, "
    "bool any_top_p, bool all_greedy) -> Tensor"
)
def sample(
    logits: Tensor,
    random: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    greedy: Tensor,
    max_top_k: int,
    any_top_p: bool,
    all_greedy: bool,
) -> Tensor:
    """One token a row: the likeliest where `greedy`, else a draw by `random`.

    logits: float32 [n, vocab], already penalized and suppressed; random: int64 [n], 32 random bits; greedy: bool [n];
    the other settings as in `token_weights`; returns int64 [n]. A row with NaN gets some token and must be checked for by the caller.
    """
    best = logits.argmax(-1)
    if all_greedy:
        return best
    drawn = draw(token_weights(logits, temperature, top_k, top_p, max_top_k, any_top_p), random)
    return torch.where(greedy, best, drawn)
