"""Products of many rows in CUDA C++ on a CUDA device, against float64; tests/parity/test_wide_products_emulated.py has their small ones.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_wide_products.py -k small` looks at their accesses.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.gpu import captured
from kernels.dummy import Maker
from kernels.lm_products import PLAIN, SWIGLU
from kernels.lm_triton import add_norm
from kernels.lm_wide import HEIGHTS, Cut, product
from tests.support.lm_checks import error, layer_product

pytestmark = pytest.mark.gpu
#: Outputs, inner size, SwiGLU.
SIZES = {
    "small": (128, 128, False), "small swiglu": (192, 64, True), "qkv": (4096, 1024, False), "gate and up": (3072, 1024, True),
    "gate and up of 1.7B": (6144, 2048, True),
}  # fmt: skip


def tensors(rows: int, n: int, inner: int, swiglu: bool) -> tuple[Tensor, Tensor]:
    maker = Maker("cuda", torch.bfloat16, seed=rows)
    return maker.normal(rows, inner), maker.matrix(2 * n if swiglu else n, inner)


def made(x: Tensor, weight: Tensor, swiglu: bool, cut: Cut | None, pdl: bool = True) -> Tensor:
    n = len(weight) // (2 if swiglu else 1)
    return product(x, weight, torch.full((len(x), n), float("nan"), device="cuda", dtype=x.dtype), swiglu=swiglu, cut=cut, pdl=pdl)


@pytest.mark.parametrize("rows", [1, 129, 200, 256, 384, 513, 1024])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_every_product_equals_its_twin_and_each_launch_the_one_before(sizes: tuple[int, int, bool], rows: int) -> None:
    n, inner, swiglu = sizes
    x, weight = tensors(rows, n, inner, swiglu)
    epilogue = SWIGLU if swiglu else PLAIN
    exact = layer_product(x, weight, None, None, epilogue, torch.float64)
    plain = error(layer_product(x, weight, None, None, epilogue, torch.bfloat16), exact)
    whole = made(x, weight, swiglu, None)
    assert error(whole, exact) <= 1.5 * plain
    for cut in (Cut(height, cluster) for height in HEIGHTS[swiglu] for cluster in (1, 2, 4)):
        assert all(torch.equal(made(x, weight, swiglu, cut), whole) for _ in range(4)), cut


@pytest.mark.parametrize("swiglu", HEIGHTS, ids=["plain", "swiglu"])
def test_a_row_has_the_same_bits_in_any_company(swiglu: bool) -> None:
    x, weight = tensors(1024, 3072, 1024, swiglu)
    whole = made(x, weight, swiglu, None)
    for rows in (slice(0, 1), slice(5, 300), slice(511, 1024)):
        assert torch.equal(made(x[rows], weight, swiglu, None), whole[rows])


def test_launches_that_start_early_wait_for_the_norm_before_them() -> None:
    """A chain in a graph: each product reads the norm of what the one before it wrote, over the norm before that."""
    maker = Maker("cuda", torch.bfloat16)
    weights = [maker.matrix(1024, 1024) for _ in range(12)]
    norm, first = maker.normal(1024, std=0.1, mean=1.0), maker.normal(512, 1024)
    normed, y = torch.empty_like(first), torch.empty_like(first)

    def chain(pdl: bool) -> Tensor:
        x = first
        for weight in weights:
            x = product(add_norm(x, None, norm, 1e-6, normed, early=pdl), weight, y, pdl=pdl)
        return x

    wanted = chain(False).clone()
    graph = captured(lambda: chain(True))
    for _ in range(20):
        for buffer in (normed, y):
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)
