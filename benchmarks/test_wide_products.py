"""What is timed: small, with plain PyTorch in place of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import wide_products
from benchmarks.random_models.frames import Maker, Shape
from benchmarks.wide_products import Product
from kernels import lm_products
from kernels.layers import rms_norm, swiglu


def added_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor, early: bool = False) -> Tensor:
    """The twin of `kernels.lm_triton.add_norm`."""
    return out.copy_(rms_norm(x.add_(y), weight, eps))


def test_launch_after_launch_multiplies_the_same_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of zeros or of numbers that overflowed take less power, and so less time."""

    def wide(x: Tensor, weight: Tensor, y: Tensor, pdl: bool) -> Tensor:
        return y.copy_(wide_products.layers.swiglu(x @ weight.t()))

    monkeypatch.setattr(wide_products, "add_norm", added_norm)
    monkeypatch.setattr(wide_products, "swiglu", lambda both, out: out.copy_(swiglu(both)))
    monkeypatch.setattr(lm_products, "swiglu", wide)
    given = Product(Maker("cpu", torch.float32), Shape(hidden=64, inter=96), 5, 3)
    exact, before = swiglu(rms_norm(given.x, given.norm, 1e-6) @ given.weights[-1].t()), given.x.clone()
    for launches in (given.cublas, given.ours) * 2:
        launches()
        assert torch.equal(given.x, before)
        torch.testing.assert_close(given.y, exact)
