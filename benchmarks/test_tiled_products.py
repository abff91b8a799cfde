"""The products that are timed: small, with plain PyTorch in place of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tiled_products
from benchmarks.tiled_products import Product
from kernels.dummy import Maker
from kernels.layers import rms_norm
from kernels.lm_triton import PLAIN


def added_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """The twin of `kernels.lm_triton.add_norm`."""
    return out.copy_(rms_norm(x.add_(y), weight, eps))


def test_launch_after_launch_multiplies_the_same_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of zeros or of numbers that overflowed take less power, and so less time."""
    monkeypatch.setattr(tiled_products, "SIZES", {"qkv": (96, 64, PLAIN)})
    monkeypatch.setattr(tiled_products, "LAYERS", 3)
    monkeypatch.setattr(tiled_products, "add_norm", added_norm)
    given = Product(Maker("cpu", torch.float32), "qkv", 5)
    exact = rms_norm(given.x, given.norm, 1e-6) @ given.weights[-1].t()
    before = given.x.clone()
    for _ in range(2):
        given.cublas()
        assert torch.equal(given.x, before)
        torch.testing.assert_close(given.y, exact)
