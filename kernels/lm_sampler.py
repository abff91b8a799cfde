# ruff: noqa: N803
# pyright: reportIndexIssue=false, reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""A Triton kernel that draws one codebook of all rows in one launch: logits processors, top-k, top-p, draw, and the
next inputs from the drawn codes.

`kernels.sampler` defines the results: probabilities are whole multiples of 2**-30, so that sums are exact in any
order, and each (seed, frame, codebook) has one Philox word. Thresholds are found by bisection over the bits of
ordered integers, without a sort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.frame import DrawRules, Feedback
from kernels.lm_cuda import LAST, MIDDLE
from kernels.lm_triton import gdc_launch_dependents, gdc_wait
from kernels.sampler import RETRY_TEMPERATURE, RETRY_TOP_P
from kernels.triton_launch import pdl_options, power_from

_GRID = tl.constexpr(float(1 << 30))
_WHOLE = tl.constexpr(float(1 << 23))
_RETRY_TEMPERATURE = tl.constexpr(RETRY_TEMPERATURE)
_RETRY_TOP_P = tl.constexpr(RETRY_TOP_P)
#: The text embedding in the next input: none, indexed by the request's text id, or indexed by code 0.
_NO_TEXT, _TEXT_BY_ID, _TEXT_BY_CODE = range(3)


@triton.jit
def _philox_word(seed, frame, codebook):
    """Word 0 of Philox4x32-10 at counter (frame, codebook, 0, 0), key = seed; all int64 scalars that hold
    32-bit words."""
    mask = 0xFFFFFFFF
    k0 = (seed & mask).to(tl.uint64)
    k1 = ((seed >> 32) & mask).to(tl.uint64)
    c0 = (frame & mask).to(tl.uint64)
    c1 = codebook.to(tl.uint64)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        low = c0 * 0xD2511F53
        high = c2 * 0xCD9E8D57
        c0 = ((high >> 32) ^ c1 ^ k0) & mask
        c2 = ((low >> 32) ^ c3 ^ k1) & mask
        c1 = high & mask
        c3 = low & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return c0.to(tl.int64)


@triton.jit
def _quantized(share, KIND: tl.constexpr = tl.int64):
    scaled = share * _GRID
    near = (scaled + _WHOLE) - _WHOLE
    return tl.where(scaled < _WHOLE, near, scaled).to(KIND)


@triton.jit
def _ordered(value, HALF: tl.constexpr):
    """Maps values to integers in the same order. HALF: to 16 bits, which suffice for bfloat16 values."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if HALF:
        order = order >> 16
    return order


@triton.jit
def _weights(value, at, temperature, top_k, top_p, VOCAB: tl.constexpr):
    """`kernels.sampler.token_weights` of one row's logits `value`, which are -inf where there is no code: int32, in
    which the sum of a row fits.

    Each bisection ends as soon as no further step can change which codes are kept.
    """
    order = _ordered(tl.math.div_rn(value, tl.zeros_like(value) + temperature), False)
    count = tl.where(top_k > 0, tl.minimum(top_k, VOCAB), VOCAB).to(tl.int32)
    inside = tl.sum((order >= 0).to(tl.int32))
    threshold = tl.where(inside >= count, 0, -(1 << 31)).to(tl.int32)
    inside = tl.where(inside >= count, inside, order.numel).to(tl.int32)
    step = tl.full((), 1 << 30, tl.int32)
    while (inside != count) & (count < VOCAB) & (step > 0):
        found = tl.sum((order >= threshold + step).to(tl.int32))
        threshold = tl.where(found >= count, threshold + step, threshold)
        inside = tl.where(found >= count, found, inside)
        step = step >> 1
    # The bits of a value follow from its order, so only the order is kept.
    scaled = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    likely = tl.where((order >= threshold) & (at < VOCAB), tl.exp(scaled - tl.max(scaled)), 0.0)
    weights = _quantized(likely / tl.sum(likely), tl.int32)
    if top_p < 1.0:
        total = tl.sum(weights).to(tl.int64)
        limit = (1.0 - top_p.to(tl.float64)) * total.to(tl.float64)
        below = tl.full((), -1, tl.int32)
        mass, more = total * 0, total
        step = tl.full((), 1 << 30, tl.int32)
        # The codes with a weight of `below` or less together have `mass`, which is within the limit. With the next
        # candidates they have `more`, which exceeds it. Each candidate has a weight of at least `below` + 1. So if the
        # difference is less than twice that, there is only one candidate, and the bisection ends.
        while (more - mass >= 2 * (below.to(tl.int64) + 1)) & (step > 0):
            found = tl.sum(tl.where(weights <= below + step, weights, 0)).to(tl.int64)
            fits = found.to(tl.float64) <= limit
            below = tl.where(fits, below + step, below)
            mass = tl.where(fits, found, mass)
            more = tl.where(fits, more, found)
            step = step >> 1
        edge = tl.min(tl.where(weights <= below, 0x7FFFFFFF, weights))
        removed = weights <= below
        room = (limit.to(tl.int64) - mass) // edge
        if room > 0:
            tied = (weights == edge) & (at < VOCAB)
            removed |= tied & (tl.cumsum(tied.to(tl.int32), 0) <= room)
        likeliest = tl.max(tl.where((weights == tl.max(weights)) & (at < VOCAB), at, -1))
        likely = tl.where(removed & (at != likeliest), 0.0, likely)
        weights = _quantized(likely / tl.sum(likely), tl.int32)
    return weights


@triton.jit
def _nucleus_weights(value, at, temperature, top_k, top_p, VOCAB: tl.constexpr, HALF: tl.constexpr):
    """`kernels.sampler.nucleus_weights` of one row. The kept codes are the first ones of the sorted codes: all above
    a threshold, and the first of those equal to it."""
    scaled = tl.math.div_rn(value, tl.zeros_like(value) + temperature)
    likely = tl.exp(value - tl.max(value))
    share = _quantized(likely / tl.sum(likely))
    order = _ordered(value, HALF)
    limit = top_p.to(tl.float64) * tl.sum(share).to(tl.float64)
    count = tl.where(top_k > 0, tl.minimum(top_k, VOCAB), VOCAB).to(tl.int32)
    width: tl.constexpr = 15 if HALF else 31
    edge = tl.where(_too_many(share, order, 0, limit, count), 0, -(1 << width)).to(tl.int32)
    for step in range(width):
        candidate = edge + (tl.full((), 1, tl.int32) << (width - 1 - step))
        edge = tl.where(_too_many(share, order, candidate, limit, count), candidate, edge)
    above = order > edge
    tied = (order == edge) & (at < VOCAB)
    rank = tl.cumsum(tied.to(tl.int64), 0)
    mass = tl.sum(tl.where(above, share, 0)) + share * rank
    kept = above | (tied & (mass.to(tl.float64) <= limit) & (tl.sum(above.to(tl.int32)) + rank <= count))
    kept |= at == tl.argmax(value, 0)
    likely = tl.where(kept, tl.exp(scaled - tl.max(scaled)), 0.0)
    return _quantized(likely / tl.sum(likely))


@triton.jit
def _too_many(share, order, least, limit, count):
    """Whether the codes whose order is at least `least` together have more than `limit`, or are more than `count`."""
    inside = order >= least
    return (tl.sum(tl.where(inside, share, 0)).to(tl.float64) > limit) | (tl.sum(inside.to(tl.int32)) > count)


@triton.jit
def _row_weights(
    value, at, temperature, top_k, top_p, VOCAB: tl.constexpr, HALF: tl.constexpr, NUCLEUS: tl.constexpr
):
    if NUCLEUS:
        weights = _nucleus_weights(value, at, temperature, top_k, top_p, VOCAB, HALF)
    else:
        weights = _weights(value, at, temperature, top_k, top_p, VOCAB)
    return weights


@triton.jit
def _drawn_again(
    value, at, top_k, seed, frame, codebook, VOCAB: tl.constexpr, HALF: tl.constexpr, NUCLEUS: tl.constexpr
):
    """A second draw, with the settings of a retry and the random word of `codebook`."""
    top_p = tl.full((), _RETRY_TOP_P, tl.float32)
    weights = _row_weights(value, at, _RETRY_TEMPERATURE, top_k, top_p, VOCAB, HALF, NUCLEUS)
    place = (_philox_word(seed, frame, frame * 0 + codebook) * tl.sum(weights)) >> 32
    return tl.sum((tl.cumsum(weights, 0) <= place).to(tl.int64))


@triton.jit
def draw_code(
    logits, rows, codes, finite, flags, seeds, top_k, min_new, starts, trailing, frames, positions, temperature, top_p, penalty, greedy,
    seen, hidden, inputs, table, text, x, state_inputs, log_probabilities, table_starts, recent,
    end, suppress_from, dead, count, VOCAB: tl.constexpr, codebook, CODEBOOKS: tl.constexpr, WIDTH: tl.constexpr, TALKER: tl.constexpr,
    trailing_width, COPY_HIDDEN: tl.constexpr, STAGE: tl.constexpr, BLOCK: tl.constexpr, SPREAD: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr, OTHER_END: tl.constexpr, NUCLEUS: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    TEXT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    at = tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=0.0).to(tl.float32)
    fine = tl.min((tl.abs(value) < float("inf")).to(tl.int32))
    frame = tl.load(frames + slot)
    value = tl.where(at < VOCAB, value, float("-inf"))
    draws_first: tl.constexpr = STAGE == 0 or STAGE == 3
    if draws_first:
        if WINDOW > 0:
            back = tl.arange(0, WINDOW_BLOCK)
            latest = tl.load(recent + slot * WINDOW + back, mask=back < WINDOW, other=-1)
        banned = (at >= suppress_from) & (at != end)
        if OTHER_END >= 0:
            banned &= at != OTHER_END
        value = tl.where(banned, float("-inf"), value)
        peak = tl.max(value)
        log_total = peak + tl.log(tl.sum(tl.exp(value - peak)))
        factor = tl.load(penalty + slot)
        drawn_before = tl.load(seen + slot * VOCAB + at, mask=at < VOCAB, other=0) != 0
        spread = tl.zeros_like(value) + factor
        value = tl.where(
            drawn_before, tl.where(value > 0, tl.math.div_rn(value, spread), value * spread), value
        )
        early = (at == end) & (frame < tl.load(min_new + slot))
        if OTHER_END >= 0:
            early |= (at == OTHER_END) & (frame < tl.load(min_new + slot))
        value = tl.where(early, float("-inf"), value)
    else:
        fine = fine & tl.load(finite + row)
    if tl.load(greedy + slot) != 0:
        code = tl.argmax(value, 0).to(tl.int64)
    else:
        own = (tl.load(temperature + slot), tl.load(top_k + slot), tl.load(top_p + slot))
        weights = _row_weights(value, at, own[0], own[1], own[2], VOCAB, HALF, NUCLEUS)
        total = tl.cumsum(weights, 0)
        word = _philox_word(tl.load(seeds + slot), frame, frame * 0 + codebook)
        place = (word * tl.sum(weights)) >> 32
        code = tl.sum((total <= place.to(weights.dtype)).to(weights.dtype)).to(tl.int64)
        if draws_first and WINDOW > 0:  # noqa: SIM102 - a compile-time condition needs its own `if`
            if tl.max((latest == code).to(tl.int32)) != 0:
                code = _drawn_again(
                    value,
                    at,
                    tl.load(top_k + slot),
                    tl.load(seeds + slot),
                    frame,
                    CODEBOOKS,
                    VOCAB,
                    HALF,
                    NUCLEUS,
                )
    code = tl.maximum(tl.minimum(code, VOCAB - 1), 0)
    tl.store(codes + row * CODEBOOKS + codebook, code)
    if draws_first:
        own_logit = tl.load(logits + row.to(tl.int64) * VOCAB + code).to(tl.float32)
        tl.store(log_probabilities + row, own_logit - log_total)

    if STAGE < 2:
        tl.store(finite + row, fine)
        wide = tl.arange(0, SPREAD)
        inside = wide < WIDTH
        fed = tl.load(inputs + (tl.load(starts + codebook) + code) * WIDTH + wide, mask=inside)
        target = x + row.to(tl.int64) * WIDTH + wide
        if STAGE == 0:
            tl.store(target + count * WIDTH, fed, mask=inside)
            if COPY_HIDDEN:
                tl.store(target, tl.load(hidden + row.to(tl.int64) * WIDTH + wide, mask=inside), mask=inside)
            tl.store(seen + slot * VOCAB + code, 1)
        else:
            tl.store(target, fed, mask=inside)
    else:
        if STAGE == 3:
            first = code
            tl.store(seen + slot * VOCAB + code, 1)
        else:
            first = tl.load(codes + row * CODEBOOKS)
        ended = tl.where(first == end, 1, 0)
        if OTHER_END >= 0:
            ended = tl.where(first == OTHER_END, 1, ended)
        tl.store(flags + row, (ended + tl.where(fine != 0, 0, 2)).to(tl.uint8))
        across = tl.arange(0, SPREAD)
        inside = across < TALKER
        rows_of = starts if table_starts is None else table_starts
        total_embedding = tl.load(
            table + (tl.load(rows_of + codebook) + code) * TALKER + across, mask=inside, other=0.0
        ).to(tl.float32)
        for other in range(CODEBOOKS - 1):
            drawn = tl.load(codes + row * CODEBOOKS + other) + tl.load(rows_of + other)
            total_embedding += tl.load(table + drawn * TALKER + across, mask=inside, other=0.0).to(tl.float32)
        kind = state_inputs.dtype.element_ty
        if TEXT == 0:
            summed = total_embedding
        else:
            word_id = (
                tl.load(trailing + slot * trailing_width + tl.minimum(frame, trailing_width - 1))
                if TEXT == 1
                else first
            )
            summed = total_embedding.to(kind).to(tl.float32)
            summed += tl.load(text + word_id * TALKER + across, mask=inside, other=0.0).to(tl.float32)
        if SCALE != 1.0:
            summed = summed.to(kind).to(tl.float32) * SCALE
        tl.store(state_inputs + slot * TALKER + across, summed.to(kind), mask=inside)
        if WINDOW > 0:
            tl.store(
                recent + slot * WINDOW + frame % WINDOW, tl.where((frame > 0) & (slot != dead), first, -1)
            )
        if slot != dead:
            tl.store(positions + slot, tl.load(positions + slot) + 1)
            tl.store(frames + slot, frame + 1)


def draw(
    pointers: Sequence[Tensor],
    numbers: Sequence[int],
    stage: int,
    pdl: bool,
    rules: DrawRules,
    feedback: Feedback,
    recent: Tensor,
) -> None:
    """`kernels.lm_cuda.draw` in Triton, for any sizes and rules, also in float32. Takes the same pointers and numbers
    in the same order.

    recent: int64 [slots, window].
    """
    logits = pointers[0]
    starts = pointers[8]
    count, vocab, _, _, width, talker = numbers[3:9]
    by = _NO_TEXT if feedback.text is None else _TEXT_BY_CODE if feedback.text_by_code else _TEXT_BY_ID
    # A thread has up to 32 codes of a row, so that nearly all of them stay in registers.
    warps = min(32, max(4, 1 << ((vocab - 1) // 1024).bit_length()))
    half = stage in (MIDDLE, LAST) and logits.dtype == torch.bfloat16
    draw_code[(count,)](
        *pointers, None if feedback.starts is starts else feedback.starts, recent if rules.window else None, *numbers, stage,
        power_from(vocab), power_from(max(width, talker)), half, pdl, rules.ends[1] if len(rules.ends) > 1 else -1, rules.nucleus_first,
        rules.window, power_from(max(rules.window, 1)), by, feedback.scale, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
