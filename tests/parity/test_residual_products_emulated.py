"""Residual products of many rows in CUDA C++, run on a CPU by the emulator, against their twin in float64."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries, lm_products, toolchain
from kernels.lm_products import SPLITS, add_product, has_residual, splits_for
from tests.support.cuda_emulated import choose_order, guarded
from tests.support.fake_gpus import FakeGpus

BF16 = torch.bfloat16
#: Clusters that an H200 holds at once, by parts.
CLUSTERS = {4: 30, 8: 15}


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    return choose_order(monkeypatch)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Case:
    """A product of `rows` x `inner` activations and `n` outputs, which is added to x."""

    rows: int
    inner: int
    n: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, whose rows differ in size by orders of magnitude; a; weight."""
        draw = torch.Generator().manual_seed(self.rows + self.inner + self.n)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std).to(BF16))

        size = 10.0 ** torch.arange(-2, 3).repeat(self.rows)[: self.rows, None]
        x = guarded((torch.randn((self.rows, self.n), generator=draw) * size).to(BF16))
        return x, normal(self.rows, self.inner), normal(self.n, self.inner, std=self.inner**-0.5)

    def made(self, splits: int, rows: slice = slice(None)) -> Tensor:
        """The new x, [rows, n]."""
        x, a, weight = self.tensors()
        return add_product(guarded(x[rows]), guarded(a[rows]), weight, splits)

    def truth(self, dtype: torch.dtype) -> Tensor:
        x, a, weight = (t.to(dtype) for t in self.tensors())
        return x + functional.linear(a, weight)


CASES = [
    (Case(128, 256, 128), 4),
    (Case(129, 1792, 128), 4),
    (Case(200, 512, 256), 4),
    (Case(17, 3072, 128), 4),
    (Case(128, 512, 128), 8),
    (Case(120, 1024, 256), 8),
    (Case(145, 3584, 128), 8),
]


@pytest.mark.parametrize(("case", "splits"), CASES, ids=str)
def test_a_product_equals_its_twin_whatever_the_order_of_threads(
    case: Case, splits: int, emulated: Callable[[int], None]
) -> None:
    exact, plain = case.truth(torch.float64), case.truth(BF16)
    found = case.made(splits)
    for some in (
        slice(0, None, 5),
        slice(4, None, 5),
    ):  # small rows have an error of their own beside large ones
        assert error(found[some], exact[some]) <= 1.2 * error(plain[some], exact[some])
    for seed in (case.rows, case.inner, case.n):
        emulated(seed)
        assert torch.equal(case.made(splits), found)


@pytest.mark.parametrize("splits", SPLITS)
def test_a_row_has_the_same_bits_in_any_company(splits: int, emulated: Callable[[int], None]) -> None:
    case = Case(260, 512, 128)
    whole = case.made(splits)
    for rows in (slice(0, 1), slice(5, 140), slice(131, 260)):
        assert torch.equal(case.made(splits, rows), whole[rows])


@pytest.mark.parametrize("splits", SPLITS)
def test_the_product_is_rounded_before_it_is_added(splits: int, emulated: Callable[[int], None]) -> None:
    """Sums of whole multiples of a power of two are the same in any order."""
    x, a, weight = Case(140, 512, 128).tensors()
    a, weight = (guarded(t.mul(16).round().div(16)) for t in (a, weight))
    product = (a.float() @ weight.float().t()).to(BF16)
    expected = (x.float() + product.float()).to(BF16)
    assert torch.equal(add_product(x, a, weight, splits), expected)


def test_it_writes_rows_of_a_wider_tensor_and_none_behind_them(emulated: Callable[[int], None]) -> None:
    case = Case(140, 256, 128)
    x, a, weight = case.tensors()
    wide = guarded(torch.full((150, 192), float("nan"), dtype=BF16))
    wide[:140, 16:144] = x
    add_product(wide[:140, 16:144], a, weight, 4)
    assert torch.equal(wide[:140, 16:144], case.made(4))
    assert wide[:, :16].isnan().all()
    assert wide[:, 144:].isnan().all()
    assert wide[140:].isnan().all()


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((1024, 2048), {65: 8, 128: 8, 129: 4, 256: 4, 384: 4, 385: None, 512: None}),
        ((1024, 3072), {128: 8, 256: 4, 384: 4, 512: None}),
        ((2048, 2048), {128: 4, 129: None, 256: None}),
        ((2048, 6144), {128: 4, 256: None}),
    ],
    ids=str,
)
def test_products_whose_tiles_run_at_once_are_cut_into_the_most_parts(
    sizes: tuple[int, int], splits: dict[int, int | None]
) -> None:
    assert has_residual(*sizes)
    assert {rows: splits_for(rows, *sizes, CLUSTERS) for rows in splits} == splits


def test_devices_of_one_kind_cut_alike_though_some_hold_a_cluster_more() -> None:
    """So that they give the same bits. Which multiprocessors of a chip work differs, and so how many
    clusters fit."""
    for clusters in ({4: 28, 8: 14}, {4: 33, 8: 16}):
        for sizes in ((1024, 3072), (2048, 6144)):
            for rows in range(128, 640, 128):
                assert splits_for(rows, *sizes, clusters) == splits_for(rows, *sizes, CLUSTERS)


def test_an_inner_size_that_does_not_fall_into_so_many_parts_has_fewer() -> None:
    assert splits_for(128, 1024, 768, CLUSTERS) == 4
    assert splits_for(128, 1024, 640, CLUSTERS) is None
    assert not has_residual(1024, 640)
    assert not has_residual(1000, 1024)
    assert not has_residual(2560, 9728), "Fish's down was not measured"


def test_what_a_kernel_cannot_do_is_refused(emulated: Callable[[int], None]) -> None:
    x, a, weight = Case(140, 256, 128).tensors()
    with pytest.raises(ValueError, match="4 or 8 splits, not 2"):
        add_product(x, a, weight, 2)
    with pytest.raises(ValueError, match="128 outputs of 256 values do not fall into tiles of 128 x 512"):
        add_product(x, a, weight, 8)
    with pytest.raises(ValueError, match="120 outputs"):
        add_product(x[:, :120], a, weight[:120], 4)
    with pytest.raises(ValueError, match="128 weight rows do not give 139 rows of 128"):
        add_product(x[:139], a, weight, 4)
    with pytest.raises(ValueError, match="contiguous"):
        add_product(x, torch.cat((a, a), 1)[:, :256], weight, 4)
    for shape, columns in (
        ((140, 132), slice(0, 128)),
        ((140, 136), slice(4, 132)),
        ((140, 256), slice(0, None, 2)),
    ):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            add_product(torch.empty(shape, dtype=BF16)[:, columns], a, weight, 4)


def test_they_spill_no_registers_and_products_overlap() -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    source = str(binaries.SOURCES / "residual_products.cu")
    said = subprocess.run([*command, source], capture_output=True, text=True, check=True, timeout=240).stderr
    names = list(lm_products.RESIDUAL_PRODUCTS.kernels)
    assert sorted(re.findall(r"entry function '(\w+)'", said)) == names
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0] * (2 * len(names)), said
    assert "warning" not in said.lower(), said
