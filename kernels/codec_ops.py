"""Ops of a codec's decoder: their interface in `torch.library`, each with its plain PyTorch twin.

All activations are channels-last: [rows, steps, channels]. Every op of the convolution stack is causal: step
t reads steps <= t. Steps before the first one are zero, as are inputs that were zero before a snake, since
snake(0) = 0.

Snake parameters are float32: `frequency` = exp(alpha) and `gain` = 1 /
(exp(beta) + 1e-9). Weights may have any strides; results have the dtype of `x`. The twins run on every
device that has no kernel.

The ops before the stack (products, attention in a window, depthwise convolution) compute in float32 and
round once, unlike a sequence of single ops. The scales of a norm are folded into the weights of the next
product, and the scales of a layer into those of the previous one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, layer_norm, pad, silu

from kernels.layers import rope
from kernels.registry import op


def snake_parameters(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the stored logarithms of a SnakeBeta activation into (frequency [C], gain [C]), both float32."""
    return alpha.float().exp(), 1.0 / (beta.float().exp() + 1e-9)


def snake_beta(x: Tensor, frequency: Tensor, gain: Tensor) -> Tensor:
    """SnakeBeta (Ziyin et al. 2020, arXiv 2006.08195): x + gain * sin^2(frequency * x).

    x: [..., C]; frequency, gain: [C] float32. Computed in float32 and rounded once. Returns [..., C].
    """
    wide = x.float()
    return wide.addcmul(gain, (wide * frequency).sin_().square_()).to(x.dtype)


def pack_upsample(weight: Tensor) -> Tensor:
    """Packs a causal transposed convolution of kernel 2 * rate and stride `rate` as one matrix product, whose
    output steps t * rate + j depend only on the inputs t - 1 and t.

    weight: [Cin, Cout, 2 * rate]. Returns [2 * Cin, rate * Cout]: the first Cin rows multiply the previous
    input, the others the current one.
    """
    channels_in, channels_out, kernel = weight.shape
    halves = weight.reshape(channels_in, channels_out, 2, kernel // 2)
    return (
        halves.flip(2).permute(2, 0, 3, 1).reshape(2 * channels_in, kernel // 2 * channels_out).contiguous()
    )


def pack_centred_upsample(weight: Tensor, rate: int) -> Tensor:
    """Packs a transposed convolution of stride `rate` and padding (kernel - rate) / 2 as a convolution of
    three taps.

    weight: [Cin, Cout, kernel]. Output step t * rate + j is the sum over d in -1, 0, 1 of x[t + d] @ w[j +
    padding - d * rate], where that tap exists. Returns [3 * Cin, rate * Cout], d = -1 first, for
    `codec_active_conv`. Raises ValueError if the padding is no whole number, is below 0, or is above `rate`, in
    which case more than two neighbours would be read.
    """
    channels_in, channels_out, kernel = weight.shape
    padding, odd = divmod(kernel - rate, 2)
    if odd or not 0 <= padding <= rate:
        raise ValueError(
            f"a transposed convolution of kernel {kernel} and rate {rate} needs more or less than an input and its two neighbours"
        )
    thirds = pad(weight, (rate - padding, rate - padding)).reshape(channels_in, channels_out, 3, rate)
    return thirds.flip(2).permute(2, 0, 3, 1).reshape(3 * channels_in, rate * channels_out).contiguous()


@op(
    "codec_active_conv(Tensor a, int lead, Tensor weight, Tensor bias, int taps, int dilation, Tensor? residual,"
    " Tensor(a!)? raw, Tensor(b!)? active, int active_lead, Tensor? frequency, Tensor? gain, *, Tensor? ends=None,"
    " bool open_ends=False) -> ()"
)
def codec_active_conv(
    a: Tensor,
    lead: int,
    weight: Tensor,
    bias: Tensor,
    taps: int,
    dilation: int,
    residual: Tensor | None,
    raw: Tensor | None,
    active: Tensor | None,
    active_lead: int,
    frequency: Tensor | None,
    gain: Tensor | None,
    *,
    ends: Tensor | None = None,
    open_ends: bool = False,
) -> None:
    """A dilated causal convolution as one matrix product; the result goes to `raw` and, through the next
    snake, to `active`.

    a: [B, lead + T, C], already activated, with `lead` steps of history in front (0 or enough for all taps);
    weight: [taps * C, N], oldest tap first; bias, frequency, gain: float32 [N]; residual (added), raw: T * N
    values per row; active: in each row `active_lead` values, T * N results, and perhaps more values; only the
    results are written. A transposed convolution of stride `rate` is the case taps = 2, N = rate * Cout.

    `ends` (int32 [B], in steps): `active` is zero from step ends[row] on, and `raw` may hold anything there.
    With `open_ends` both may hold anything there, because steps after an end may be left unwritten to save
    work. Causal ops read them only for results after the end. Steps of `a` and `residual` after an end do not
    affect steps before it.

    A centred convolution reads the same number of steps on both sides: `a` has zeros for half of the reach
    before the T steps and for the other half after them, and `lead` counts both.
    """
    reach = (taps - 1) * dilation
    rows = a.shape[0]
    channels = a.shape[2]
    extended = (pad(a, (0, 0, reach - lead, 0)) if lead < reach else a[:, lead - reach :]).float()
    steps = extended.shape[1] - reach
    total = bias.expand(rows, steps, -1)
    for tap, part in enumerate(weight.float().split(channels)):
        total = total + extended[:, tap * dilation : tap * dilation + steps] @ part
    if residual is not None:
        total = total + residual.view_as(total)
    after_end = None if ends is None else (torch.arange(steps, device=a.device) >= ends[:, None])[:, :, None]
    kept = after_end if open_ends else None
    if raw is not None:
        _write(total, raw.view_as(total), kept)
    if active is not None and frequency is not None and gain is not None:
        result = snake_beta(total, frequency, gain)
        if after_end is not None and not open_ends:
            result = result.masked_fill(after_end, 0.0)
        count = result[0].numel()
        place = active.view(rows, -1)[:, active_lead : active_lead + count].unflatten(1, total.shape[1:])
        _write(result, place, kept)


@op(
    "codec_active_unit(Tensor a, int lead, Tensor residual, Tensor weight1, Tensor bias1, Tensor frequency1, Tensor gain1,"
    " Tensor weight2, Tensor bias2, int dilation, Tensor(a!)? raw, Tensor(b!)? active, int active_lead,"
    " Tensor? frequency2, Tensor? gain2, *, Tensor? ends=None, bool open_ends=False, Tensor? packed=None) -> ()"
)
def codec_active_unit(
    a: Tensor,
    lead: int,
    residual: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    frequency1: Tensor,
    gain1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    dilation: int,
    raw: Tensor | None,
    active: Tensor | None,
    active_lead: int,
    frequency2: Tensor | None,
    gain2: Tensor | None,
    *,
    ends: Tensor | None = None,
    open_ends: bool = False,
    packed: Tensor | None = None,
) -> None:
    """A residual unit, conv1x1(snake(conv_k(a))) + x, whose k-tap convolution is dilated and causal, and the first snake
    of the next op.

    a: [B, lead + T, C] = snake(x) after its history; residual: x, [B, T, C]; weight1: [taps * C, C], oldest
    tap first; weight2: [C, C], input channel first; packed: both weights again, as
    `kernels.codec_cuda.chosen` packs them for its kernels; everything else as in `codec_active_conv`.
    """
    taps = weight1.shape[0] // a.shape[2]
    hidden = torch.empty_like(residual)
    codec_active_conv(a, lead, weight1, bias1, taps, dilation, None, None, hidden, 0, frequency1, gain1)
    after = (raw, active, active_lead, frequency2, gain2)
    codec_active_conv(hidden, 0, weight2, bias2, 1, 1, residual, *after, ends=ends, open_ends=open_ends)


@op("codec_head(Tensor a, int lead, Tensor weight, Tensor bias, *, Tensor? ends=None) -> Tensor")
def codec_head(a: Tensor, lead: int, weight: Tensor, bias: Tensor, *, ends: Tensor | None = None) -> Tensor:
    """The last convolution: a [B, lead + T, C], activated; weight [taps, C], oldest tap first; bias [1] ->
    float32 [B, T] in [-1, 1].

    If `ends` (int32 [B], in steps) is given, the result may hold anything from step ends[row] on.
    """
    wave = torch.empty(a.shape[0], a.shape[1] - lead, 1, dtype=torch.float32, device=a.device)
    column = weight.reshape(-1, 1)
    taps = weight.shape[0]
    codec_active_conv(
        a, lead, column, bias.float(), taps, 1, None, wave, None, 0, None, None, ends=ends, open_ends=True
    )
    return wave.squeeze(2).clamp(-1.0, 1.0)


def _write(value: Tensor, place: Tensor, kept: Tensor | None) -> None:
    """Writes a result [B, T, N] into `place`, except where `kept`, bool [B, T, 1], is true."""
    place.copy_(value if kept is None else torch.where(kept, place, value.to(place.dtype)))


#: The activation that `codec_product` applies before it adds the residual.
PLAIN = 0
SWIGLU = 1
GELU = 2


@op(
    "codec_product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, float? eps, int activation) -> Tensor"
)
def codec_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    activation: int,
) -> Tensor:
    """residual + activation(norm(x) @ weight + bias), where norm is RMSNorm without a weight, and the
    identity if `eps` is None.

    x: [..., K]; weight: [K, N], input channel first; bias: float32 [N]; residual: [..., N]. For SWIGLU
    weight is [K, 2 * N], the gate's columns first, and there is no bias. Returns [..., N].
    """
    wide = x.float()
    total = wide @ weight.float()
    if eps is not None:
        total = total * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if bias is not None:
        total = total + bias
    if activation == SWIGLU:
        gate, up = total.chunk(2, dim=-1)
        total = silu(gate) * up
    elif activation == GELU:
        total = gelu(total)
    if residual is not None:
        total = total + residual.float()
    return total.to(x.dtype)


@op(
    "codec_window_attention(Tensor qkv, Tensor? past, Tensor(a!)? kept, Tensor? positions, Tensor cosine, Tensor sine, int heads,"
    " int kv_heads, int window) -> Tensor"
)
def codec_window_attention(
    qkv: Tensor,
    past: Tensor | None,
    kept: Tensor | None,
    positions: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    heads: int,
    kv_heads: int,
    window: int,
) -> Tensor:
    """Rotary embedding and causal attention in a window: query i sees the keys i - window < j <= i that
    exist.

    qkv: [B, T, (heads + 2 * kv_heads) * D], half-split layout; cosine, sine: float32 [B or 1, T, D / 2].
    past: [B, (window - 1) * 2 * kv_heads * D], the rotated keys, then the values, of the steps before, oldest
    first; positions: int64 [B], the number of steps decoded before, of which `past` has up to window - 1; kept:
    `past` of the next chunk, which is written. All three are given, or none. Returns [B, T, heads * D].
    """
    rows, steps, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    earlier = 0
    queries, keys, values = qkv.float().view(rows, steps, -1, dim).split((heads, kv_heads, kv_heads), dim=2)
    angles = torch.cat((cosine, sine), dim=-1)
    queries, keys = (rope(one, angles).to(qkv.dtype).float() for one in (queries, keys))
    if past is not None and kept is not None and positions is not None:
        earlier = window - 1
        before = past.float().view(rows, earlier, 2, kv_heads, dim)
        pairs = torch.cat((before, torch.stack((keys, values), dim=2)), dim=1)
        kept.view(rows, earlier, 2, kv_heads, dim).copy_(pairs[:, steps:])
        keys, values = pairs.unbind(2)
    key_at = torch.arange(earlier + steps, device=qkv.device)
    distance = key_at[earlier:, None] - key_at
    seen = ((distance >= 0) & (distance < window)).expand(rows, 1, -1, -1)
    if positions is not None:
        seen = seen & (key_at - earlier >= -positions[:, None])[:, None, None]
    group = heads // kv_heads
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys.repeat_interleave(group, dim=2)) / math.sqrt(dim)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return (
        torch.einsum("bhqk,bkhd->bqhd", shares, values.repeat_interleave(group, dim=2))
        .reshape(rows, steps, -1)
        .to(qkv.dtype)
    )


@op("codec_depthwise_norm(Tensor x, Tensor? history, Tensor weight, Tensor bias, float eps) -> Tensor")
def codec_depthwise_norm(
    x: Tensor, history: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """A causal depthwise convolution, then LayerNorm without weight and bias.

    x: [B, T, C]; history: [B, taps - 1, C], the preceding inputs, or None for zeros; weight: float32 [taps, C],
    oldest tap first; bias: float32 [C]. Returns [B, T, C].
    """
    taps, channels = weight.shape
    extended = pad(x, (0, 0, taps - 1, 0)) if history is None else torch.cat((history, x), dim=1)
    made = conv1d(extended.float().transpose(1, 2), weight.T[:, None], bias, groups=channels).transpose(1, 2)
    return layer_norm(made, (channels,), eps=eps).to(x.dtype)
