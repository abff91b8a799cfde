"""Triton products of decoding with what is fused into them against float64: on a GPU, or small, with TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.dummy import Maker
from kernels.layers import swiglu
from kernels.lm_products import Norm
from kernels.lm_triton import PLAIN, RESIDUAL, SWIGLU, Tiles, product
from tests.support.lm_checks import error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"),
]
SIZES = [(19, 48, 96)] if INTERPRETED else [(300, 1024, 3072), (512, 1024, 2048), (1024, 2048, 2048)]
TILES = [Tiles(16, 16, 16), Tiles(32, 32, 16)] if INTERPRETED else [
    Tiles(128, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 3, tma=True), Tiles(128, 128, 64, 8, 3, tma=True),
]  # fmt: skip
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter's products do not know bfloat16


class Chain:
    """A product that is added to a residual, the norm of the sum, and a product of that: sizes `width` and `inner`."""

    def __init__(self, rows: int, width: int, inner: int, epilogue: int) -> None:
        maker = Maker(DEVICE, DTYPE, seed=rows)
        self.epilogue, self.eps = epilogue, 1e-3
        self.x, self.first, self.residual = maker.normal(rows, inner), maker.matrix(width, inner), maker.normal(rows, width)
        self.norm, self.second = maker.normal(width, std=0.1, mean=1.0), maker.matrix(2 * inner if epilogue == SWIGLU else inner, width)

    def made(self, tiles: Tiles, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The sum and the second product."""
        x, y = self.x[rows].contiguous(), self.residual[rows].clone()
        parts = -(-y.shape[1] // tiles.n)
        norm = Norm(torch.full_like(y, torch.nan), torch.full((len(y), parts), torch.nan, device=DEVICE), self.eps)
        product(x, self.first, y, tiles, RESIDUAL, extra=y, norm=self.norm, into=norm)
        n = len(self.second) // (2 if self.epilogue == SWIGLU else 1)
        return y, product(norm, self.second, y.new_full((len(y), n), torch.nan), tiles, self.epilogue)

    def truth(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, first, residual, norm, second = (t.to(dtype) for t in (self.x, self.first, self.residual, self.norm, self.second))
        y = functional.linear(x, first) + residual
        wide = y.double() if dtype == torch.float64 else y.float()
        z = functional.linear(norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(dtype), second)
        return y, swiglu(z) if self.epilogue == SWIGLU else z


@pytest.mark.parametrize("epilogue", [PLAIN, SWIGLU], ids=["plain", "swiglu"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_norm_between_products_is_part_of_both(sizes: tuple[int, int, int], tiles: Tiles, epilogue: int) -> None:
    chain = Chain(*sizes, epilogue)
    found = chain.made(tiles)
    for mine, exact, plain in zip(found, chain.truth(torch.float64), chain.truth(DTYPE), strict=True):
        assert error(mine, exact) <= 2 * error(plain, exact)
    for mine, again, some in zip(found, chain.made(tiles), chain.made(tiles, slice(3, 12)), strict=True):
        assert torch.equal(mine, again)
        assert INTERPRETED or torch.equal(mine[3:12], some)  # a CPU's products round differently at another place
