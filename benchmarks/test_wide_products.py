"""The products that are timed: small, with plain PyTorch in place of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import wide_products
from benchmarks.wide_products import Product
from kernels.dummy import Maker
from kernels.layers import rms_norm, swiglu
from kernels.lm_wide import Cut


def added_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor, early: bool = False) -> Tensor:
    """The twin of `kernels.lm_triton.add_norm`."""
    return out.copy_(rms_norm(x.add_(y), weight, eps))


@pytest.mark.parametrize("is_swiglu", [False, True], ids=["plain", "swiglu"])
def test_launch_after_launch_multiplies_the_same_activations(is_swiglu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of zeros or of numbers that overflowed take less power, and so less time."""

    def product(x: Tensor, weight: Tensor, y: Tensor, swiglu: bool, cut: Cut, pdl: bool) -> Tensor:
        z = x @ weight.t()
        return y.copy_(wide_products.layers.swiglu(z) if swiglu else z)

    monkeypatch.setattr(wide_products, "SIZES", {"one": (96, 64, is_swiglu)})
    monkeypatch.setattr(wide_products, "add_norm", added_norm)
    monkeypatch.setattr(wide_products, "swiglu", lambda both, out: out.copy_(swiglu(both)))
    monkeypatch.setattr(wide_products, "product", product)
    given = Product(Maker("cpu", torch.float32), "one", 5, 3)
    exact = rms_norm(given.x, given.norm, 1e-6) @ given.weights[-1].t()
    exact, before = swiglu(exact) if is_swiglu else exact, given.x.clone()
    for launches in (given.cublas, lambda: given.ours(Cut(96, 1))) * 2:
        launches()
        assert torch.equal(given.x, before)
        torch.testing.assert_close(given.y, exact)
