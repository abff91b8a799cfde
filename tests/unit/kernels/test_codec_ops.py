"""SnakeBeta against plain float64 arithmetic, written from the definition."""

from __future__ import annotations

import torch

from kernels.codec_ops import snake_beta, snake_parameters
from tests.support.codec_blocks import rand, snake64


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
