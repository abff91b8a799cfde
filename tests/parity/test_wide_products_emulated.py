"""Products of many rows in CUDA C++, run on a CPU by the emulator, against their twin in float64."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries, cuda_driver, lm_wide, toolchain
from kernels.layers import swiglu
from kernels.lm_wide import HEIGHTS, Cut, cut_for, kernel_name, product
from tests.support.cuda_emulated import Kernel, build, guarded

BF16 = torch.bfloat16
NAMES = [kernel_name(height, swiglu) for swiglu, heights in HEIGHTS.items() for height in heights]
#: Multiprocessors of the device, so that a block has several tiles.
PROCESSORS = 4


@cache
def library():
    return build(binaries.SOURCES / "wide_products.cu", NAMES)


def emulated_map(address: int, sizes: tuple[int, int, int], box: tuple[int, int, int]) -> bytes:
    """`TensorMap` of the emulator."""
    return struct.pack("P3q3i", address, *sizes, *box).ljust(128, b"\0")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    monkeypatch.setattr(lm_wide, "_stream", lambda _: 0)
    monkeypatch.setattr(lm_wide, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(cuda_driver, "tensor_map", emulated_map)

    def choose(seed: int) -> None:
        monkeypatch.setattr(lm_wide, "_kernel", lambda height, swiglu, _: Kernel(library(), kernel_name(height, swiglu), 0, seed))

    choose(0)
    return choose


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Case:
    """A product of `rows` x `inner` activations and `n` outputs."""

    rows: int
    inner: int
    n: int
    swiglu: bool = False

    def tensors(self) -> tuple[Tensor, Tensor]:
        """x and weight."""
        draw = torch.Generator().manual_seed(self.rows + self.inner + self.n)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std).to(BF16))

        return normal(self.rows, self.inner), normal((2 if self.swiglu else 1) * self.n, self.inner, std=2 * self.inner**-0.5)

    def made(self, cut: Cut | None, rows: slice = slice(None)) -> Tensor:
        """Rows of the product, [rows, n]."""
        x, weight = self.tensors()
        x = guarded(x[rows])
        y = guarded(torch.full((len(x), self.n), float("nan"), dtype=BF16))
        return product(x, weight, y, swiglu=self.swiglu, cut=cut)

    def truth(self, dtype: torch.dtype) -> Tensor:
        x, weight = (t.to(dtype) for t in self.tensors())
        y = functional.linear(x, weight)
        return swiglu(y) if self.swiglu else y


CASES = [
    (Case(129, 64, 128), Cut(64, 1)),
    (Case(200, 320, 192), Cut(64, 2)),
    (Case(256, 640, 128), Cut(128, 2)),
    (Case(513, 64, 128), Cut(128, 4)),
    (Case(129, 576, 96, True), Cut(96, 1)),
    (Case(200, 256, 48, True), Cut(96, 2)),
    (Case(256, 384, 192, True), Cut(192, 2)),
    (Case(513, 64, 96, True), Cut(96, 4)),
    (Case(513, 128, 96, True), Cut(192, 4)),
    (Case(130, 448, 192, True), Cut(192, 1)),
]


@pytest.mark.parametrize(("case", "cut"), CASES, ids=str)
def test_every_product_equals_its_twin_whatever_the_order_of_threads(case: Case, cut: Cut, emulated: Callable[[int], None]) -> None:
    exact = case.truth(torch.float64)
    found = case.made(cut)
    assert error(found, exact) <= 1.2 * error(case.truth(BF16), exact)
    for seed in (case.rows, case.inner):
        emulated(seed)
        assert torch.equal(case.made(cut), found)
