# ruff: noqa: N803
"""Triton kernels of the codec's convolution stack, for sm_80 and newer. On sm_90 the tensor memory accelerator
(TMA) copies the tiles.

Activations are channels-last bfloat16. Every convolution is one matrix product over (tap, channel). The rows of a
tile are steps of one row of the batch, shifted by (taps - 1 - tap) * dilation for each tap. Each kernel also applies
the *next* snake activation and writes its result in addition to the raw one, so that the snake of each value is
computed only once.

An activated input is [rows, lead + steps, channels] with `lead` steps of history in front. Steps before its first one
read as zero, which is right for whole utterances, because snake(0) = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _snake(x, frequency, gain, FAST: tl.constexpr):
    phase = x * frequency
    if FAST:
        # One special-function instruction. Its absolute error, 2^-20 near zero and 2^-15 at 300, is far below the
        # rounding error of bfloat16.
        sine = tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=f,f", [phase], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        sine = tl.sin(phase)
    return x + gain * sine * sine


@triton.jit
def _product(a, b, total, FAST: tl.constexpr):
    """total + a @ b. Triton's interpreter multiplies in float32, because it cannot multiply in bfloat16."""
    return tl.dot(a, b, total) if FAST else tl.dot(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit
def _steps(
    a,
    row,
    start,
    k,
    steps,
    lead,
    shift,
    C: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
):
    """The piece [BM, BK] of an activated input that begins at step start - shift and channel k."""
    if TMA:
        piece = a.load([row, lead + start - shift, k]).reshape(BM, BK)
    else:
        at = start - shift + tl.arange(0, BM)
        inside = (at >= -lead) & (at < steps)
        base = a + row.to(tl.int64) * (lead + steps) * C
        piece = tl.load(
            base + (lead + at)[:, None] * C + (k + tl.arange(0, BK))[None, :], mask=inside[:, None], other=0.0
        )
    return piece


@triton.jit
def _weights(w, k, n, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    """The piece [BK, BN] of a [K, N] matrix that begins at row k and column n; columns beyond N read as zero."""
    if TMA:
        piece = w.load([k, n])
    else:
        columns = n + tl.arange(0, BN)
        at = w + (k + tl.arange(0, BK))[:, None] * N + columns[None, :]
        piece = tl.load(at, mask=columns[None, :] < N, other=0.0)
    return piece


@triton.jit
def _write(
    value,
    row,
    start,
    n,
    steps,
    bias,
    residual,
    raw,
    active,
    stride,
    frequency,
    gain,
    ends,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    FAST: tl.constexpr,
):
    """Adds bias and residual to a tile [BM, BN] of products. Writes the sum into `raw` and its snake into `active`, if
    these are given; the snake is zero after the row's end."""
    at = start + tl.arange(0, BM)
    columns = n + tl.arange(0, BN)
    inside = (at < steps)[:, None] & (columns < N)[None, :]
    place = at[:, None] * N + columns[None, :]
    value += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    if residual is not None:
        value += tl.load(residual + row.to(tl.int64) * steps * N + place, mask=inside, other=0.0).to(
            tl.float32
        )
    if raw is not None:
        tl.store(raw + row.to(tl.int64) * steps * N + place, value.to(tl.bfloat16), mask=inside)
    if active is not None:
        f = tl.load(frequency + columns, mask=columns < N, other=0.0)[None, :]
        g = tl.load(gain + columns, mask=columns < N, other=0.0)[None, :]
        to = active + row.to(tl.int64) * stride + place
        value = _snake(value, f, g, FAST)
        if ends is not None:
            value = tl.where((at < tl.load(ends + row))[:, None], value, 0.0)
        tl.store(to, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _after_end(ends, row, start):
    """Whether a tile starts after the end of its row."""
    return start >= tl.load(ends + row)


@triton.jit
def _rounds(ends, row, start, count: tl.constexpr):
    """The number of pieces from which a tile's product is summed: `count`, or 0 if the tile starts after the end of
    its row."""
    rounds = count
    if ends is not None:
        rounds = tl.where(start < tl.load(ends + row), count, 0)
    return rounds


# `rows` only determines the number of programs. If Triton specialized kernels by it, the first batches would wait
# seconds for compilations.
@triton.jit(do_not_specialize=["rows"])
def conv_kernel(
    a,
    w,
    bias,
    residual,
    raw,
    active,
    stride,
    frequency,
    gain,
    ends,
    rows,
    steps,
    lead,
    DILATION: tl.constexpr,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    OPEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
):
    """[rows, lead + steps, C] -> [rows, steps, N]: a dilated causal convolution with TAPS taps, then bias, residual
    and the next snake.

    With OPEN a tile that starts after the end of its row is not written.
    """
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    row_tiles = tl.cdiv(steps, BM)
    pid = tl.program_id(0)
    first = pid // (GROUP * n_tiles) * GROUP
    size = tl.minimum(rows * row_tiles - first, GROUP)
    tile_m = first + pid % (GROUP * n_tiles) % size
    n = pid % (GROUP * n_tiles) // size * BN
    row = tile_m // row_tiles
    start = tile_m % row_tiles * BM
    if OPEN and _after_end(ends, row, start):
        return
    zeros = None if OPEN else ends
    chunks: tl.constexpr = C // BK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for i in tl.range(0, _rounds(zeros, row, start, TAPS * chunks), num_stages=STAGES):
        shift = (TAPS - 1 - i // chunks) * DILATION
        piece = _steps(a, row, start, i % chunks * BK, steps, lead, shift, C, BM, BK, TMA)
        total = _product(piece, _weights(w, i * BK, n, N, BK, BN, TMA), total, FAST)
    _write(
        total,
        row,
        start,
        n,
        steps,
        bias,
        residual,
        raw,
        active,
        stride,
        frequency,
        gain,
        zeros,
        N,
        BM,
        BN,
        FAST,
    )


@triton.jit(do_not_specialize=["rows"])
def unit_kernel(
    a,
    w0,
    w1,
    bias1,
    frequency1,
    gain1,
    w2,
    bias2,
    residual,
    raw,
    active,
    stride,
    frequency2,
    gain2,
    ends,
    rows,
    steps,
    lead,
    DILATION: tl.constexpr,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    OPEN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    FAST: tl.constexpr,
):
    """A whole residual unit: dilated convolution, snake, 1x1 convolution, residual, next snake.

    One program has all C = N0 + N1 channels of a step, in two pieces whose widths are powers of two. Both w0 and w1
    are the first weight; with TMA, w0 reads N0 columns at once and w1 N1. OPEN: as for `conv_kernel`.
    """
    row_tiles = tl.cdiv(steps, BM)
    pid = tl.program_id(0)
    row = pid // row_tiles
    start = pid % row_tiles * BM
    if OPEN and _after_end(ends, row, start):
        return
    zeros = None if OPEN else ends
    chunks: tl.constexpr = C // BK
    left = tl.zeros((BM, N0), dtype=tl.float32)
    right = tl.zeros((BM, N1), dtype=tl.float32)
    for i in tl.range(0, _rounds(zeros, row, start, TAPS * chunks), num_stages=STAGES):
        shift = (TAPS - 1 - i // chunks) * DILATION
        piece = _steps(a, row, start, i % chunks * BK, steps, lead, shift, C, BM, BK, TMA)
        left = _product(piece, _weights(w0, i * BK, 0, C, BK, N0, TMA), left, FAST)
        right = _product(piece, _weights(w1, i * BK, N0, C, BK, N1, TMA), right, FAST)
    n0 = tl.arange(0, N0)
    n1 = N0 + tl.arange(0, N1)
    left = _snake(
        left + tl.load(bias1 + n0)[None, :],
        tl.load(frequency1 + n0)[None, :],
        tl.load(gain1 + n0)[None, :],
        FAST,
    )
    right = _snake(
        right + tl.load(bias1 + n1)[None, :],
        tl.load(frequency1 + n1)[None, :],
        tl.load(gain1 + n1)[None, :],
        FAST,
    )
    hidden0 = left.to(tl.bfloat16)
    hidden1 = right.to(tl.bfloat16)
    out = _product(hidden0, _weights(w2, 0, 0, C, N0, N0, False), tl.zeros((BM, N0), dtype=tl.float32), FAST)
    out = _product(hidden1, _weights(w2, N0, 0, C, N1, N0, False), out, FAST)
    _write(
        out,
        row,
        start,
        0,
        steps,
        bias2,
        residual,
        raw,
        active,
        stride,
        frequency2,
        gain2,
        zeros,
        C,
        BM,
        N0,
        FAST,
    )
    # Never fewer than 64 columns: with 32, ptxas 12.8 computes the upper half of a shared-memory descriptor
    # wrongly.
    n1p: tl.constexpr = N1 if N1 > 64 else 64
    out = _product(
        hidden0, _weights(w2, 0, N0, C, N0, n1p, False), tl.zeros((BM, n1p), dtype=tl.float32), FAST
    )
    out = _product(hidden1, _weights(w2, N0, N0, C, N1, n1p, False), out, FAST)
    _write(
        out,
        row,
        start,
        N0,
        steps,
        bias2,
        residual,
        raw,
        active,
        stride,
        frequency2,
        gain2,
        zeros,
        C,
        BM,
        n1p,
        FAST,
    )


@triton.jit
def head_products_kernel(
    a,
    w,
    out,
    ends,
    count,
    lead,
    TAPS: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    ROOM: tl.constexpr,
    FAST: tl.constexpr,
):
    """The product of every step with every tap of the last convolution: [count, C] x [TAPS, C] -> float32 [count,
    ROOM].

    With `ends` the rows are on the second axis of the grid, `count` is the number of steps per row, and tiles that
    start after an end are not written.
    """
    start = tl.program_id(0).to(tl.int64) * BM
    if ends is not None:
        row = tl.program_id(1)
        if _after_end(ends, row, start - lead):
            return
        a += row.to(tl.int64) * count * C
        out += row.to(tl.int64) * count * ROOM
    at = start + tl.arange(0, BM)
    tap = tl.arange(0, 16)
    total = tl.zeros((BM, 16), dtype=tl.float32)
    for k in tl.static_range(0, C, BK):
        channel = k + tl.arange(0, BK)
        piece = tl.load(a + at[:, None] * C + channel[None, :], mask=(at < count)[:, None], other=0.0)
        weight = tl.load(w + tap[None, :] * C + channel[:, None], mask=(tap < TAPS)[None, :], other=0.0)
        total = _product(piece, weight, total, FAST)
    tl.store(
        out + at[:, None] * ROOM + tap[None, :], total, mask=(at < count)[:, None] & (tap < TAPS)[None, :]
    )


@triton.jit
def head_sum_kernel(
    products, bias, out, ends, steps, lead, TAPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """For each step, sums the products of `head_products_kernel` that belong to it: float32 [rows, steps], clamped to
    [-1, 1].

    Samples after `ends` may be left unwritten.
    """
    row = tl.program_id(1)
    start = tl.program_id(0) * BLOCK
    if ends is not None and _after_end(ends, row, start):
        return
    at = start + tl.arange(0, BLOCK)
    base = products + row.to(tl.int64) * (lead + steps) * ROOM
    wave = tl.zeros((BLOCK,), dtype=tl.float32) + tl.load(bias)
    for tap in tl.static_range(TAPS):
        moved = lead + at - (TAPS - 1 - tap)
        wave += tl.load(base + moved * ROOM + tap, mask=(moved >= 0) & (at < steps), other=0.0)
    # NaN is kept, so that the codec stage notices it.
    wave = tl.maximum(wave, -1.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        out + row.to(tl.int64) * steps + at,
        tl.minimum(wave, 1.0, propagate_nan=tl.PropagateNan.ALL),
        mask=at < steps,
    )
