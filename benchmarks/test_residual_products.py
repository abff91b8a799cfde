"""What is timed: small, with plain PyTorch in place of the kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import residual_products
from benchmarks.random_models.frames import Maker
from benchmarks.residual_products import Product, table
from kernels.layers import rms_norm


def added_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, out: Tensor, pdl: bool = False
) -> Tensor:
    """The twin of `kernels.lm_triton.add_norm`."""
    return out.copy_(rms_norm(x if y is None else x.add_(y), weight, eps))


def added_product(x: Tensor, a: Tensor, weight: Tensor, splits: int, **_) -> Tensor:
    """The twin of `kernels.lm_products.add_product`."""
    return x.add_(a @ weight.t())


def test_all_that_is_timed_adds_the_same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_products, "add_norm", added_norm)
    monkeypatch.setattr(residual_products, "add_product", added_product)
    given = Product(Maker("cpu", torch.float32), 5, 128, 256, 3)
    start = given.x.clone()
    exact = start + sum(given.a @ weight.t() for weight in given.weights)
    for launches in (given.cublas, partial(given.ours, 4), partial(given.ours, 8, around=False)):
        given.x.copy_(start)
        launches()
        torch.testing.assert_close(given.x, exact)
    torch.testing.assert_close(given.h, rms_norm(exact, given.norm, 1e-6))


def test_the_table_has_a_line_for_each_product_that_was_timed() -> None:
    row = {
        "part": "products",
        "rows": 512,
        "product": "O 0.6B",
        "cut": None,
        "needed": 32,
        "cublas": 9.1,
        "split_4": 6.0,
    }
    lines = table([{"part": "check"}, row, row | {"cut": 4}]).splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["512", "O", "0.6B", cut, "32", "9.10", "6.00"] for cut in ("-", "4")
    ]
