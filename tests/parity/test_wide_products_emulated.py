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
    (Case(260, 384, 256), Cut(256, 2)),
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


@pytest.mark.parametrize("is_swiglu", HEIGHTS, ids=["plain", "swiglu"])
def test_a_row_has_the_same_bits_in_any_company_and_in_every_cut(is_swiglu: bool, emulated: Callable[[int], None]) -> None:
    case = Case(300, 320, 768, is_swiglu)
    whole = case.made(None)
    for height in HEIGHTS[is_swiglu]:
        for rows in (slice(0, 1), slice(5, 140), slice(171, 300)):
            assert torch.equal(case.made(Cut(height, 2), rows), whole[rows])
        assert torch.equal(case.made(Cut(height, 4)), whole)


def test_gate_and_up_are_rounded_where_the_launches_of_a_frame_round_them(emulated: Callable[[int], None]) -> None:
    """The twin of the same sums: those of gate and up as plain products, whose order is the same."""
    case = Case(140, 128, 96, True)
    x, weight = case.tensors()
    sums = product(x, weight, torch.empty(140, 192, dtype=BF16), cut=Cut(64, 1))
    gate = sums[:, :96].float()
    silu = (gate / (1.0 + torch.exp(-gate))).to(BF16)
    assert torch.equal(case.made(Cut(192, 1)), (silu.float() * sums[:, 96:].float()).to(BF16))


def test_it_writes_rows_of_a_wider_tensor_and_none_behind_them(emulated: Callable[[int], None]) -> None:
    case, cut = Case(140, 128, 128), Cut(128, 2)
    x, weight = case.tensors()
    y = guarded(torch.full((150, 160), float("nan"), dtype=BF16))
    product(x, weight, y[:140, 16:144], cut=cut)
    assert torch.equal(y[:140, 16:144], case.made(cut))
    assert y[:, :16].isnan().all()
    assert y[:, 144:].isnan().all()
    assert y[140:].isnan().all()


@pytest.mark.parametrize(
    ("rows", "n", "swiglu", "cut", "blocks"),
    [
        (128, 3072, True, Cut(96, 1), 64),
        (256, 3072, True, Cut(96, 2), 128),
        (384, 3072, True, Cut(192, 1), 96),
        (512, 3072, True, Cut(192, 2), 128),
        (1024, 3072, True, Cut(192, 2), 128),
        (256, 4096, False, Cut(64, 2), 128),
        (512, 4096, False, Cut(128, 2), 128),
        (1024, 4096, False, Cut(256, 2), 128),
        (640, 3072, True, Cut(96, 1), 107),
    ],
)
def test_tiles_fall_evenly_to_the_blocks_of_a_hopper(rows: int, n: int, swiglu: bool, cut: Cut, blocks: int) -> None:
    assert cut_for(rows, n, swiglu, 132) == cut
    assert cut.grid(rows, n, swiglu, 132) == blocks


def test_what_a_kernel_cannot_do_is_refused(emulated: Callable[[int], None]) -> None:
    x, weight = Case(140, 128, 128).tensors()
    y = torch.zeros(140, 128, dtype=BF16)
    for cut, is_swiglu, said in (
        (Cut(96, 1), False, "64 or 128 or 256 rows of weights"),
        (Cut(64, 3), False, "1, 2 or 4 blocks"),
        (Cut(96, 1), True, "128 outputs of 128 values do not fall"),
    ):
        with pytest.raises(ValueError, match=said):
            product(x, weight, y, swiglu=is_swiglu, cut=cut)
    with pytest.raises(ValueError, match="72 outputs of 128 values do not fall"):
        product(x, weight[:72], y[:, :72])
    with pytest.raises(ValueError, match="128 weight rows do not give 140 rows of 64"):
        product(x, weight, y[:, :64], cut=Cut(64, 1))
    with pytest.raises(ValueError, match="contiguous"):
        product(x[:, :64], weight[:, :64].contiguous(), y, cut=Cut(64, 1))
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        product(x, weight[:64], torch.zeros(140, 66, dtype=BF16)[:, 2:], cut=Cut(64, 1))


def test_its_kernels_spill_no_registers_and_products_overlap() -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    source = str(binaries.SOURCES / "wide_products.cu")
    said = subprocess.run([*command, source], capture_output=True, text=True, check=True, timeout=240).stderr
    assert sorted(re.findall(r"entry function '(\w+)'", said)) == sorted(NAMES)
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0] * (2 * len(NAMES)), said
    assert "warning" not in said.lower(), said
