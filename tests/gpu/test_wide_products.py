"""SwiGLU of many rows in CUDA C++ on a CUDA device, against float64;
tests/parity/test_wide_products_emulated.py has its small sizes.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_wide_products.py -k small` looks at
their accesses.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.common import captured
from kernels.lm_products import SWIGLU, swiglu
from kernels.lm_triton import add_norm
from tests.support.lm_checks import error, layer_product
from tests.support.lm_tensors import Maker

pytestmark = pytest.mark.gpu
#: Outputs and inner size.
SIZES = {"small": (192, 64), "short": (96, 640), "0.6B": (3072, 1024), "1.7B": (6144, 2048)}


def tensors(rows: int, n: int, inner: int) -> tuple[Tensor, Tensor]:
    maker = Maker("cuda", torch.bfloat16, seed=rows)
    return maker.normal(rows, inner), maker.matrix(2 * n, inner)


def made(x: Tensor, weight: Tensor) -> Tensor:
    return swiglu(
        x,
        weight,
        torch.full((len(x), len(weight) // 2), float("nan"), device="cuda", dtype=x.dtype),
        pdl=True,
    )


@pytest.mark.parametrize("rows", [1, 129, 256, 384, 513, 768, 1024, 2048])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_swiglu_equals_its_twin_and_each_launch_the_one_before(sizes: tuple[int, int], rows: int) -> None:
    x, weight = tensors(rows, *sizes)
    exact = layer_product(x, weight, None, None, SWIGLU, torch.float64)
    plain = error(layer_product(x, weight, None, None, SWIGLU, torch.bfloat16), exact)
    whole = made(x, weight)
    assert error(whole, exact) <= 1.5 * plain
    assert all(torch.equal(made(x, weight), whole) for _ in range(4))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = tensors(1024, 3072, 1024)
    whole = made(x, weight)
    for rows in (slice(0, 1), slice(5, 300), slice(511, 1024)):
        assert torch.equal(made(x[rows], weight), whole[rows])


def test_launches_that_start_early_wait_for_the_norm_before_them() -> None:
    """A chain in a graph: each launch reads the norm of what the one before it wrote, over the norm before
    that."""
    maker = Maker("cuda", torch.bfloat16)
    weights = [maker.matrix(2 * 960, 960) for _ in range(12)]
    norm, first = maker.normal(960, std=0.1, mean=1.0), maker.normal(512, 960)
    normed, y = torch.empty_like(first), torch.empty_like(first)

    def chain(pdl: bool) -> Tensor:
        x = first
        for weight in weights:
            x = swiglu(add_norm(x, None, norm, 1e-6, normed, early=pdl), weight, y, pdl=pdl)
        return x

    wanted = chain(False).clone()
    graph = captured(lambda: chain(True))
    for _ in range(20):
        for buffer in (normed, y):
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)
