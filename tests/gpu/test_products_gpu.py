"""Products of 17 rows and more in CUDA C++ on a CUDA device, against float64;
tests/parity/test_products_emulated.py has their small ones.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_products_gpu.py -k
small` looks at their accesses, `--tool racecheck` at those of shared memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.common import captured
from kernels.lm_products import PLAIN, RESIDUAL, SWIGLU, TILE_CONFIGS, TileConfig, product, tile_config
from tests.support.lm_checks import error, layer_product
from tests.support.lm_tensors import Maker

pytestmark = pytest.mark.gpu
SIZES = {
    "small": (128, 128, PLAIN), "small residual": (64, 512, RESIDUAL), "qkv": (4096, 1024, PLAIN), "o": (1024, 2048, RESIDUAL),
    "gate and up": (3072, 1024, SWIGLU), "down": (1024, 3072, RESIDUAL), "head": (2048, 1024, PLAIN), "first head": (3072, 1024, PLAIN),
}  # fmt: skip


def tensors(rows: int, n: int, inner: int, epilogue: int) -> tuple[Tensor, Tensor, Tensor | None]:
    maker = Maker("cuda", torch.bfloat16, seed=rows)
    weight = maker.matrix(2 * n if epilogue == SWIGLU else n, inner)
    return maker.normal(rows, inner), weight, maker.normal(rows, n) if epilogue == RESIDUAL else None


def made(x: Tensor, weight: Tensor, extra: Tensor | None, epilogue: int, config: TileConfig) -> Tensor:
    n = len(weight) // (2 if epilogue == SWIGLU else 1)
    y = (
        extra.clone()
        if epilogue == RESIDUAL and extra is not None
        else torch.full((len(x), n), float("nan"), device="cuda", dtype=x.dtype)
    )
    return product(x, weight, y, config, epilogue=epilogue, extra=y if epilogue == RESIDUAL else extra)


@pytest.mark.parametrize("rows", [17, 32, 50, 64, 100, 128, 256])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_every_product_equals_its_twin_and_each_launch_the_one_before(
    sizes: tuple[int, int, int], rows: int
) -> None:
    n, inner, epilogue = sizes
    given = tensors(rows, n, inner, epilogue)
    exact = layer_product(given[0], given[1], None, given[2], epilogue, torch.float64)
    plain = error(layer_product(given[0], given[1], None, given[2], epilogue, torch.bfloat16), exact)
    configs = {
        TileConfig(2, 2),
        TileConfig(8, 2),
        TileConfig(4, 4),
        *([tile_config(rows, len(given[1]), inner)] if (len(given[1]), inner) in TILE_CONFIGS else []),
    }
    for config in (config for config in configs if config.fault(128, len(given[1]), inner) is None):
        found = made(*given, epilogue, config)
        assert error(found, exact) <= 2 * plain, config
        assert all(torch.equal(made(*given, epilogue, config), found) for _ in range(6)), config


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight, _ = tensors(32, 4096, 1024, PLAIN)
    whole = made(x, weight, None, PLAIN, TileConfig(2, 4))
    for rows in (slice(0, 1), slice(5, 22), slice(31, 32)):
        assert torch.equal(made(x[rows], weight, None, PLAIN, TileConfig(2, 4)), whole[rows])


def test_launches_that_start_early_wait_for_those_before_them() -> None:
    """A chain in a graph: each product reads what the one before it wrote."""
    maker, config = Maker("cuda", torch.bfloat16), TileConfig(8, 4)
    weights = [maker.matrix(1024, 1024) for _ in range(12)]
    first = maker.normal(64, 1024)
    buffers = [torch.empty_like(first) for _ in range(2)]

    def chain(pdl: bool) -> Tensor:
        x = first
        for index, weight in enumerate(weights):
            x = product(x, weight, buffers[index % 2], config, pdl=pdl)
        return x

    wanted = chain(False).clone()
    graph = captured(lambda: chain(True))
    for _ in range(20):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(buffers[1], wanted)
