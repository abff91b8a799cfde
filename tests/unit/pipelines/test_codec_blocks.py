"""Blocks of a codec against plain float64 arithmetic, written from the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv_transpose1d

from tests.support.codec_blocks import past_of, rand, residual_unit, snake64, upsampling


def residual64(
    x: Tensor, history: Tensor, snakes: list[Tensor], weights: list[Tensor], dilation: int
) -> Tensor:
    """Step by step: x[t] + W2 snake(b1 + sum_j W1[j] snake(x[t - (k - 1 - j) * dilation])) + b2."""
    w1, b1, w2, b2 = (w.double() for w in weights)
    taps = w1.shape[2]
    active = snake64(torch.cat((history, x), dim=1), snakes[0], snakes[1])
    out = torch.empty_like(x, dtype=torch.float64)
    for t in range(x.shape[1]):
        total = b1 + sum(active[:, t + j * dilation] @ w1[:, :, j].T for j in range(taps))
        out[:, t] = x[:, t].double() + snake64(total, snakes[2], snakes[3]) @ w2.T + b2
    return out


def residual_arguments(channels: int, taps: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    snakes = [rand(channels, seed=i, scale=0.3) for i in range(4)]
    weights = [
        rand(channels, channels, taps, seed=5) / math.sqrt(channels * taps),
        rand(channels, seed=6),
        rand(channels, channels, seed=7) / math.sqrt(channels),
        rand(channels, seed=8),
    ]
    return snakes, weights


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize("steps", [1, 5, 70])
def test_residual_unit(dilation: int, steps: int) -> None:
    channels, taps = 6, 7
    snakes, weights = residual_arguments(channels, taps)
    x, history = rand(2, steps, channels, seed=11), rand(2, (taps - 1) * dilation, channels, seed=12)
    unit = residual_unit(snakes, weights, dilation)
    exact = residual64(x, history, snakes, weights, dilation)
    torch.testing.assert_close(unit(x, past_of(unit.span, history)).double(), exact, atol=5e-6, rtol=1e-5)
    silent = torch.zeros_like(history)
    assert torch.equal(unit(x, None), unit(x, past_of(unit.span, silent)))


def test_residual_unit_takes_weights_of_any_strides() -> None:
    snakes, (w1, b1, w2, b2) = residual_arguments(4)
    tap_major = w1.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    x = rand(1, 9, 4)
    plain = residual_unit(snakes, (w1, b1, w2, b2), 3)(x, None)
    strided = residual_unit(snakes, (tap_major, b1, w2.T.contiguous().T, b2), 3)
    torch.testing.assert_close(strided(x, None), plain)


@pytest.mark.parametrize("rate", [2, 3, 8])
def test_upsample_is_the_trimmed_transposed_convolution(rate: int) -> None:
    channels_in, channels_out, steps = 6, 3, 11
    weight, bias = rand(channels_in, channels_out, 2 * rate), rand(channels_out, seed=3)
    alpha, beta = rand(channels_in, seed=1), rand(channels_in, seed=2)
    x, history = rand(2, steps, channels_in), rand(2, 1, channels_in, seed=4)
    block = upsampling((alpha, beta), weight, bias, rate)

    def reference(inputs: Tensor) -> Tensor:
        full = conv_transpose1d(
            snake64(inputs, alpha, beta).transpose(1, 2), weight.double(), bias.double(), stride=rate
        )
        return full[:, :, :-rate].transpose(1, 2)

    torch.testing.assert_close(block(x, None).double(), reference(x), atol=2e-5, rtol=1e-5)
    continued = block(x, past_of(block.span, history))
    torch.testing.assert_close(
        continued.double(), reference(torch.cat((history, x), dim=1))[:, rate:], atol=2e-5, rtol=1e-5
    )
