"""The twins of the codec's ops against plain float64 arithmetic, written from the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv_transpose1d

from kernels.codec_ops import codec_residual_unit, codec_upsample, pack_upsample, snake_beta, snake_parameters


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def snake64(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    x, alpha, beta = x.double(), alpha.double(), beta.double()
    return x + torch.sin(x * alpha.exp()) ** 2 / (beta.exp() + 1e-9)


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


def test_snake_is_the_formula_and_leaves_zero_at_zero() -> None:
    x, alpha, beta = rand(2, 5, 6, scale=3.0), rand(6, seed=1), rand(6, seed=2)
    frequency, gain = snake_parameters(alpha, beta)
    torch.testing.assert_close(
        snake_beta(x, frequency, gain).double(), snake64(x, alpha, beta), atol=2e-6, rtol=2e-6
    )
    assert not snake_beta(torch.zeros(1, 2, 6), frequency, gain).any()


def test_snake_in_bfloat16_rounds_once() -> None:
    x, alpha, beta = rand(2, 50, 6).bfloat16(), rand(6, seed=1), rand(6, seed=2)
    result = snake_beta(x, *snake_parameters(alpha, beta))
    assert result.dtype == torch.bfloat16
    exact = snake64(x, alpha, beta)
    assert ((result.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize("steps", [1, 5, 70])
def test_residual_unit(dilation: int, steps: int) -> None:
    channels, taps = 6, 7
    snakes, (w1, b1, w2, b2) = residual_arguments(channels, taps)
    x, history = rand(2, steps, channels, seed=11), rand(2, (taps - 1) * dilation, channels, seed=12)
    first, second = snake_parameters(*snakes[:2]), snake_parameters(*snakes[2:])
    arguments = (*first, w1, b1, *second, w2, b2, dilation)
    exact = residual64(x, history, snakes, [w1, b1, w2, b2], dilation)
    torch.testing.assert_close(
        codec_residual_unit(x, history, *arguments).double(), exact, atol=5e-6, rtol=1e-5
    )
    silent = torch.zeros_like(history)
    assert torch.equal(codec_residual_unit(x, None, *arguments), codec_residual_unit(x, silent, *arguments))


def test_residual_unit_takes_weights_of_any_strides() -> None:
    snakes, (w1, b1, w2, b2) = residual_arguments(4)
    first, second = snake_parameters(*snakes[:2]), snake_parameters(*snakes[2:])
    tap_major = w1.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    x = rand(1, 9, 4)
    plain = codec_residual_unit(x, None, *first, w1, b1, *second, w2, b2, 3)
    torch.testing.assert_close(
        codec_residual_unit(x, None, *first, tap_major, b1, *second, w2.T.contiguous().T, b2, 3), plain
    )


@pytest.mark.parametrize("rate", [2, 3, 8])
def test_upsample_is_the_trimmed_transposed_convolution(rate: int) -> None:
    channels_in, channels_out, steps = 6, 3, 11
    weight, bias = rand(channels_in, channels_out, 2 * rate), rand(channels_out, seed=3)
    alpha, beta = rand(channels_in, seed=1), rand(channels_in, seed=2)
    x, history = rand(2, steps, channels_in), rand(2, 1, channels_in, seed=4)
    arguments = (*snake_parameters(alpha, beta), pack_upsample(weight), bias, rate)

    def reference(inputs: Tensor) -> Tensor:
        full = conv_transpose1d(
            snake64(inputs, alpha, beta).transpose(1, 2), weight.double(), bias.double(), stride=rate
        )
        return full[:, :, :-rate].transpose(1, 2)

    torch.testing.assert_close(
        codec_upsample(x, None, *arguments).double(), reference(x), atol=2e-5, rtol=1e-5
    )
    continued = codec_upsample(x, history, *arguments)
    torch.testing.assert_close(
        continued.double(), reference(torch.cat((history, x), dim=1))[:, rate:], atol=2e-5, rtol=1e-5
    )
