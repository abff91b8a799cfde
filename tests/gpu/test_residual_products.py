"""Residual products of many rows in CUDA C++ on a CUDA device, against float64;
tests/parity/test_residual_products_emulated.py has its small sizes.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_residual_products.py -k small` looks at
their accesses.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.common import captured
from kernels.lm_products import SPLITS, add_product
from kernels.lm_triton import add_norm
from tests.support.lm_checks import error
from tests.support.lm_tensors import Maker

pytestmark = pytest.mark.gpu
#: Outputs and inner size.
SIZES = {"small": (128, 512), "O": (1024, 2048), "down": (1024, 3072), "1.7B": (2048, 6144)}


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("rows", [1, 129, 384, 512, 1000, 2048])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_a_product_equals_its_twin_and_each_launch_the_one_before(
    sizes: tuple[int, int], rows: int, splits: int
) -> None:
    maker, (n, inner) = Maker("cuda", torch.bfloat16, seed=rows), sizes
    x, a, weight = maker.normal(rows, n), maker.normal(rows, inner), maker.matrix(n, inner)
    exact = x.double() + a.double() @ weight.double().t()
    found = add_product(x.clone(), a, weight, splits, pdl=True)
    assert error(found, exact) <= 1.5 * error(x + a @ weight.t(), exact)
    assert all(torch.equal(add_product(x.clone(), a, weight, splits, pdl=True), found) for _ in range(4))


@pytest.mark.parametrize("splits", SPLITS)
def test_launches_that_start_early_wait_for_the_norm_before_them(splits: int) -> None:
    """A chain in a graph: each launch adds to x a product of the norm of what the one before it wrote."""
    maker = Maker("cuda", torch.bfloat16)
    weights = [maker.matrix(1024, 1024) for _ in range(12)]
    norm, first = maker.normal(1024, std=0.1, mean=1.0), maker.normal(512, 1024)
    x, normed = torch.empty_like(first), torch.empty_like(first)

    def chain(pdl: bool) -> None:
        x.copy_(first)
        for weight in weights:
            add_product(x, add_norm(x, None, norm, 1e-6, normed, pdl=pdl), weight, splits, pdl=pdl)

    chain(False)
    wanted = x.clone()
    graph = captured(lambda: chain(True))
    for _ in range(20):
        normed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(x, wanted)
