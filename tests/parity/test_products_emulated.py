"""Products of 17 rows and more in CUDA C++, run on a CPU by the emulator, against their twin in float64."""

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
from kernels.layers import swiglu
from kernels.lm_products import (
    PLAIN,
    RESIDUAL,
    SWIGLU,
    TILE_CONFIGS,
    Norm,
    TileConfig,
    block_rows_for,
    product,
    tile_config,
)
from tests.support.cuda_emulated import KernelError, choose_order, guarded
from tests.support.fake_gpus import FakeGpus

BF16 = torch.bfloat16


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    return choose_order(monkeypatch)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Case:
    """A product of `rows` x `inner` activations and `n` outputs."""

    rows: int
    inner: int
    n: int
    epilogue: int = PLAIN

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight, and what is added."""
        draw = torch.Generator().manual_seed(self.rows + self.inner + self.n)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std).to(BF16))

        weight = normal(2 * self.n if self.epilogue == SWIGLU else self.n, self.inner, std=self.inner**-0.5)
        extra = (self.rows, self.n) if self.epilogue == RESIDUAL else None
        return normal(self.rows, self.inner), weight, None if extra is None else normal(*extra)

    def made(self, config: TileConfig, rows: slice = slice(None)) -> Tensor:
        """Rows of the product, [rows, n]; a residual is added in place, as in a frame."""
        x, weight, extra = self.tensors()
        x = guarded(x[rows])
        if self.epilogue == RESIDUAL and extra is not None:
            extra = guarded(extra[rows])
        y = (
            extra
            if self.epilogue == RESIDUAL and extra is not None
            else guarded(torch.full((len(x), self.n), float("nan"), dtype=BF16))
        )
        return product(x, weight, y, config, epilogue=self.epilogue, extra=extra)

    def truth(self, dtype: torch.dtype) -> Tensor:
        x, weight, extra = (None if t is None else t.to(dtype) for t in self.tensors())
        assert x is not None and weight is not None  # noqa: PT018
        y = functional.linear(x, weight)
        if self.epilogue == SWIGLU:
            return swiglu(y)
        return y if extra is None else y + extra


CASES = [
    (Case(17, 64, 64), TileConfig(1, 2)),
    (Case(32, 256, 128), TileConfig(2, 3)),
    (Case(31, 1024, 64, RESIDUAL), TileConfig(8, 2)),
    (Case(32, 256, 96, SWIGLU), TileConfig(4, 2)),
    (Case(64, 512, 64, RESIDUAL), TileConfig(8, 8)),
    (Case(61, 320, 64, SWIGLU), TileConfig(1, 3)),
    (Case(40, 256, 256), TileConfig(2, 2)),
    (Case(128, 256, 64, RESIDUAL), TileConfig(2, 2)),
    (Case(101, 256, 64, SWIGLU), TileConfig(4, 2)),
    (Case(128, 512, 64, RESIDUAL), TileConfig(8, 2)),
    (Case(140, 128, 64), TileConfig(1, 2)),
    (Case(250, 128, 64, RESIDUAL), TileConfig(2, 2)),
]


@pytest.mark.parametrize(("case", "config"), CASES, ids=str)
def test_every_product_equals_its_twin(
    case: Case, config: TileConfig, emulated: Callable[[int], None]
) -> None:
    exact = case.truth(torch.float64)
    allowed = 2 * error(case.truth(BF16), exact)
    found = case.made(config)
    assert error(found, exact) <= allowed
    emulated(case.rows)
    assert torch.equal(case.made(config), found)


@pytest.mark.parametrize(("case", "config"), [CASES[2], CASES[4], CASES[6]], ids=str)
def test_the_order_of_threads_changes_no_bit(
    case: Case, config: TileConfig, emulated: Callable[[int], None]
) -> None:
    runs: list[Tensor] = []
    for seed in range(8):
        emulated(seed)
        runs.append(case.made(config))
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_a_row_has_the_same_bits_in_any_company(emulated: Callable[[int], None]) -> None:
    case, config = Case(32, 256, 64, RESIDUAL), TileConfig(4, 2)
    whole = case.made(config)
    for rows in (slice(0, 1), slice(5, 22), slice(31, 32)):
        assert torch.equal(case.made(config, rows), whole[rows])


@dataclass(frozen=True)
class Normed:
    """A product, what it is added to, a norm of the sum, and a product of that."""

    rows: int
    inner: int
    width: int
    n: int
    epilogue: int = PLAIN
    eps: float = 1e-6

    def tensors(self) -> tuple[Tensor, ...]:
        """x, weights, extra; the norm's weights; the second product's. Rows differ in size by orders of
        magnitude."""
        draw = torch.Generator().manual_seed(self.rows + self.width)

        def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std + mean).to(BF16))

        size = 10.0 ** torch.arange(-3, 4).repeat(self.rows)[: self.rows, None]
        extra = guarded((torch.randn((self.rows, self.width), generator=draw) * size).to(BF16))
        second = normal(2 * self.n if self.epilogue == SWIGLU else self.n, self.width, std=self.width**-0.5)
        return (
            normal(self.rows, self.inner),
            normal(self.width, self.inner, std=self.inner**-0.5),
            extra,
            normal(self.width, mean=1.0),
            second,
        )

    def made(
        self, configs: tuple[TileConfig, TileConfig], rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """The sum, [rows, width], and the second product, [rows, n]."""
        x, weight, extra, weights, second = self.tensors()
        x, y = guarded(x[rows]), guarded(extra[rows])
        squares = guarded(torch.full((len(x), self.width // 64), float("nan")))
        norm = Norm(guarded(torch.full_like(y, float("nan"))), squares, self.eps)
        product(x, weight, y, configs[0], epilogue=RESIDUAL, extra=y, norm=weights, into=norm)
        z = guarded(torch.full((len(x), self.n), float("nan"), dtype=BF16))
        return y, product(norm, second, z, configs[1], epilogue=self.epilogue)

    def truth(self, dtype: torch.dtype) -> Tensor:
        x, weight, extra, weights, second = (t.to(dtype) for t in self.tensors())
        y = functional.linear(x, weight) + extra
        wide = y if dtype == torch.float64 else y.float()
        normed = weights * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(dtype)
        z = functional.linear(normed, second)
        return swiglu(z) if self.epilogue == SWIGLU else z


NORMED = [
    (Normed(17, 64, 256, 64), (TileConfig(1, 2), TileConfig(1, 2))),
    (Normed(32, 512, 256, 96, SWIGLU), (TileConfig(8, 2), TileConfig(2, 3))),
    (Normed(61, 256, 512, 64, SWIGLU), (TileConfig(4, 2), TileConfig(4, 2))),
    (Normed(64, 128, 256, 128), (TileConfig(2, 2), TileConfig(2, 2))),
    (Normed(101, 128, 256, 64), (TileConfig(2, 2), TileConfig(1, 2))),
    (Normed(140, 64, 256, 64, eps=0.1), (TileConfig(1, 2), TileConfig(4, 2))),
]


@pytest.mark.parametrize(("case", "configs"), NORMED, ids=str)
def test_a_norm_between_products_is_part_of_both(
    case: Normed, configs: tuple[TileConfig, TileConfig], emulated: Callable[[int], None]
) -> None:
    exact, plain = case.truth(torch.float64), case.truth(BF16)
    y, z = case.made(configs)
    for row in range(case.rows):  # a small row beside a large one has an error of its own
        assert error(z[row], exact[row]) <= 2 * max(error(plain[row], exact[row]), 2**-8), row
    assert error(z, exact) <= 1.2 * error(plain, exact)
    emulated(case.rows)
    again = case.made(configs)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], z)
    some = case.made(configs, slice(3, 12))
    assert torch.equal(some[0], y[3:12])
    assert torch.equal(some[1], z[3:12])


def test_what_a_norm_between_products_cannot_be_is_refused() -> None:
    case = Normed(20, 64, 256, 64)
    x, weight, y, weights, _ = case.tensors()
    norm, config = Norm(torch.empty_like(y), torch.empty(20, 4), case.eps), TileConfig(1, 2)
    with pytest.raises(ValueError, match="needs its weights, a residual"):
        product(x, weight, y, config, norm=weights, into=norm)
    with pytest.raises(ValueError, match="needs its weights, a residual"):
        product(x, weight, y, config, epilogue=RESIDUAL, extra=y, into=norm)
    with pytest.raises(ValueError, match="20 x 4"):
        product(
            x,
            weight,
            y,
            config,
            epilogue=RESIDUAL,
            extra=y,
            norm=weights,
            into=Norm(norm.weighted, torch.empty(20, 8), case.eps),
        )
    with pytest.raises(ValueError, match="multiple of 256"):
        product(Norm(x, torch.empty(20, 1), case.eps), weight, y, config)


def test_it_writes_rows_of_a_wider_tensor(emulated: Callable[[int], None]) -> None:
    case, config = Case(20, 128, 64), TileConfig(2, 2)
    x, weight, _ = case.tensors()
    y = guarded(torch.full((20, 96), float("nan"), dtype=BF16))
    product(x, weight, y[:, 16:80], config)
    assert torch.equal(y[:, 16:80], case.made(config))
    assert y[:, :16].isnan().all()
    assert y[:, 80:].isnan().all()


def test_what_lies_outside_of_a_tensor_is_never_touched(emulated: Callable[[int], None]) -> None:
    x, weight, _ = Case(20, 128, 64).tensors()
    y = guarded(torch.zeros(20, 64, dtype=BF16))
    with pytest.raises(KernelError, match="outside of a tensor"):
        product(x, weight, y, TileConfig(1, 2), epilogue=RESIDUAL, extra=guarded(y[:19]))
    with pytest.raises(ValueError, match="64 outputs"):
        product(x, weight, y, TileConfig(1, 2), epilogue=SWIGLU)
    with pytest.raises(ValueError, match="contiguous"):
        product(x[:, :64], weight[:, :64].contiguous(), y, TileConfig(1, 2))


@pytest.mark.parametrize(
    ("config", "said"),
    [(TileConfig(4, 2), "64 x 256"), (TileConfig(1, 1), "stages"), (TileConfig(1, 17), "stages")],
)
def test_cuts_that_a_kernel_does_not_have_are_refused(config: TileConfig, said: str) -> None:
    x, weight, _ = Case(20, 128, 64).tensors()
    with pytest.raises(ValueError, match=said):
        product(x, weight, torch.zeros(20, 64, dtype=BF16), config)


@pytest.mark.parametrize("rows", [17, 64, 128])
@pytest.mark.parametrize("sizes", TILE_CONFIGS, ids=str)
def test_measured_cuts_fit_whatever_the_rows(sizes: tuple[int, int], rows: int) -> None:
    assert tile_config(rows, *sizes).fault(block_rows_for(rows), *sizes) is None


def test_its_kernels_spill_no_registers_and_products_overlap() -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    said = subprocess.run(
        [*command, str(binaries.SOURCES / "products.cu")],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stderr
    names = lm_products.PRODUCTS.kernels
    assert sorted(re.findall(r"entry function '(\w+)'", said)) == sorted(names)
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0] * (2 * len(names)), said
    assert "warning" not in said.lower(), said
