"""Products of 17 rows and more in CUDA C++, run on a CPU by the emulator, against their twin in float64."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries, cuda_driver, lm_products, toolchain
from kernels.layers import rms_norm, swiglu
from kernels.lm_products import BIAS, PLAIN, RESIDUAL, SWIGLU, Cut, Products, cut_for, has_product, product, room_for
from tests.support.cuda_emulated import Kernel, KernelError, build, guarded

BF16, EPS = torch.bfloat16, 1e-6


@cache
def library():
    return build(binaries.SOURCES / "products.cu", lm_products.kernel_names())


def emulated_map(address: int, sizes: tuple[int, int, int], box: tuple[int, int, int]) -> bytes:
    """`TensorMap` of the emulator."""
    return struct.pack("P3q3i", address, *sizes, *box).ljust(128, b"\0")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    monkeypatch.setattr(lm_products, "_stream", lambda _: 0)
    monkeypatch.setattr(cuda_driver, "tensor_map", emulated_map)

    def choose(seed: int) -> None:
        monkeypatch.setattr(lm_products, "_kernel", lambda name, _: Kernel(library(), name, 0, seed))

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
    epilogue: int = PLAIN

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, weight, and what is added."""
        draw = torch.Generator().manual_seed(self.rows + self.inner + self.n)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std).to(BF16))

        weight = normal(2 * self.n if self.epilogue == SWIGLU else self.n, self.inner, std=self.inner**-0.5)
        extra = {RESIDUAL: (self.rows, self.n), BIAS: (self.n,)}.get(self.epilogue)
        return normal(self.rows, self.inner), weight, None if extra is None else normal(*extra)

    def made(self, cut: Cut, rows: slice = slice(None), **options: bool | Tensor) -> Tensor:
        """Rows of the product, [rows, n]; a residual is added in place, as in a frame."""
        x, weight, extra = self.tensors()
        x = guarded(x[rows])
        if self.epilogue == RESIDUAL and extra is not None:
            extra = guarded(extra[rows])
        y = extra if self.epilogue == RESIDUAL and extra is not None else guarded(torch.full((len(x), self.n), float("nan"), dtype=BF16))
        return product(x, weight, y, cut, epilogue=self.epilogue, extra=extra, **options)  # pyright: ignore[reportArgumentType]

    def truth(self, dtype: torch.dtype) -> Tensor:
        x, weight, extra = (None if t is None else t.to(dtype) for t in self.tensors())
        assert x is not None and weight is not None  # noqa: PT018
        y = functional.linear(x, weight)
        if self.epilogue == SWIGLU:
            return swiglu(y)
        return y if extra is None else y + extra


CASES = [
    (Case(17, 64, 64), Cut(1, 1, 2)),
    (Case(32, 256, 128), Cut(1, 2, 3)),
    (Case(29, 320, 64, BIAS), Cut(1, 1, 2)),
    (Case(31, 1024, 64, RESIDUAL), Cut(1, 8, 2)),
    (Case(32, 256, 96, SWIGLU), Cut(1, 4, 2)),
    (Case(64, 512, 64, RESIDUAL), Cut(1, 8, 8)),
    (Case(61, 192, 128, SWIGLU), Cut(2, 1, 3)),
    (Case(64, 256, 128), Cut(2, 2, 2)),
    (Case(40, 128, 256, BIAS), Cut(2, 2, 2)),
    (Case(128, 256, 64, RESIDUAL), Cut(1, 2, 2)),
    (Case(101, 256, 64, SWIGLU), Cut(1, 4, 2)),
    (Case(128, 512, 128, RESIDUAL), Cut(2, 8, 2)),
    (Case(140, 128, 64), Cut(1, 1, 2)),
    (Case(250, 128, 64, RESIDUAL), Cut(1, 2, 2)),
    (Case(19, 64, 128, RESIDUAL), Cut(2, 1, 4)),
]


@pytest.mark.parametrize(("case", "cut"), CASES, ids=str)
def test_every_product_equals_its_twin(case: Case, cut: Cut, emulated: Callable[[int], None]) -> None:
    exact = case.truth(torch.float64)
    allowed = 2 * error(case.truth(BF16), exact)
    found = case.made(cut, ahead=guarded(torch.zeros(3, 1000, dtype=BF16)))
    assert error(found, exact) <= allowed
    emulated(case.rows)
    assert torch.equal(case.made(cut), found)
    assert torch.equal(case.made(replace(cut, boxed=True)), found)


@pytest.mark.parametrize(("case", "cut"), [CASES[3], CASES[5], CASES[7]], ids=str)
def test_the_order_of_threads_changes_no_bit(case: Case, cut: Cut, emulated: Callable[[int], None]) -> None:
    runs: list[Tensor] = []
    for seed in range(8):
        emulated(seed)
        runs.append(case.made(cut))
    assert all(torch.equal(runs[0], other) for other in runs[1:])


class Normed:
    """Rows of x, whose squares a residual product writes, and a product of their norm."""

    def __init__(self, rows: int, inner: int, n: int) -> None:
        draw = torch.Generator().manual_seed(rows + inner)

        def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std + mean).to(BF16))

        self.a, self.first, self.before = normal(rows, 64), normal(inner, 64, std=0.2), normal(rows, inner)
        self.second, self.norm = normal(n, inner, std=inner**-0.5), normal(inner, std=0.1, mean=1.0)

    def made(self, first: Cut, second: Cut) -> tuple[Tensor, Tensor, Tensor]:
        """x, the sums of its squares, and the product."""
        rows, inner = self.before.shape
        x, y = guarded(self.before), guarded(torch.full((rows, len(self.second)), float("nan"), dtype=BF16))
        sums = guarded(torch.full((rows, inner // 64), float("nan")))
        product(self.a, self.first, x, first, epilogue=RESIDUAL, extra=x, sums=sums)
        return x, sums, product(x, self.second, y, second, norm=self.norm, eps=EPS, squares=sums)


@pytest.mark.parametrize(
    ("rows", "inner", "n", "first", "second"),
    [
        (29, 128, 64, Cut(1, 1, 2), Cut(1, 2, 8)),
        (32, 768, 64, Cut(2, 1, 2), Cut(1, 1, 9)),
        (61, 512, 128, Cut(2, 1, 2), Cut(2, 1, 5)),
        (128, 512, 64, Cut(1, 1, 2), Cut(1, 2, 3)),
        (130, 256, 64, Cut(2, 1, 2), Cut(1, 1, 3)),
    ],
)
def test_a_product_norms_its_rows_by_the_squares_that_another_one_writes(
    rows: int, inner: int, n: int, first: Cut, second: Cut, emulated: Callable[[int], None]
) -> None:
    case = Normed(rows, inner, n)
    x, sums, y = case.made(first, second)
    assert error(sums, x.double().square().view(rows, -1, 64).sum(-1)) < 1e-6
    exact = (case.norm.double() * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)) @ case.second.double().T
    assert error(y, exact) <= 1.5 * error(functional.linear(rms_norm(x, case.norm, EPS), case.second), exact)
    for seed in (1, 2):
        emulated(seed)
        assert all(torch.equal(one, other) for one, other in zip(case.made(first, second), (x, sums, y)))


def test_norms_without_squares_are_refused(emulated: Callable[[int], None]) -> None:
    case = Normed(20, 128, 64)
    y, squares = torch.zeros(20, 64, dtype=BF16), torch.zeros(20, 2)
    for cut, options, said in (
        (Cut(1, 1, 7), {"norm": case.norm, "squares": squares}, "at least 8 stages"),
        (Cut(1, 1, 8), {"norm": case.norm}, "needs the squares"),
        (Cut(1, 1, 8), {"norm": case.norm, "squares": squares[:, :1]}, r"tensor of \(20, 2\)"),
        (Cut(1, 1, 2), {"sums": squares[:, :1].contiguous()}, "only RESIDUAL"),
    ):
        with pytest.raises(ValueError, match=said):
            product(case.before, case.second, y, cut, **options)


def test_a_row_has_the_same_bits_in_any_company(emulated: Callable[[int], None]) -> None:
    case, cut = Case(32, 256, 64, RESIDUAL), Cut(1, 4, 2)
    whole = case.made(cut)
    for rows in (slice(0, 1), slice(5, 22), slice(31, 32)):
        assert torch.equal(case.made(cut, rows), whole[rows])


def test_it_takes_rows_of_wider_tensors(emulated: Callable[[int], None]) -> None:
    case, cut = Case(20, 128, 64), Cut(1, 2, 2)
    x, weight, _ = case.tensors()
    wide, y = guarded(torch.zeros(20, 200, dtype=BF16)), guarded(torch.full((20, 96), float("nan"), dtype=BF16))
    wide[:, :128] = x
    product(wide[:, :128], weight, y[:, 16:80], cut)
    assert torch.equal(y[:, 16:80], case.made(cut))
    assert y[:, :16].isnan().all()
    assert y[:, 80:].isnan().all()


def test_what_lies_outside_of_a_tensor_is_never_touched(emulated: Callable[[int], None]) -> None:
    x, weight, _ = Case(20, 128, 64).tensors()
    y = guarded(torch.zeros(20, 64, dtype=BF16))
    with pytest.raises(KernelError, match="outside of a tensor"):
        product(x, weight, y, Cut(1, 1, 2), epilogue=RESIDUAL, extra=guarded(y[:19]))
    with pytest.raises(ValueError, match="64 outputs"):
        product(x, weight, y, Cut(1, 1, 2), epilogue=SWIGLU)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        product(x[:, 4:68], weight[:, :64].contiguous(), y, Cut(1, 1, 2))


@pytest.mark.parametrize(
    ("cut", "said"), [(Cut(2, 1, 2), "tiles of 128 x 64"), (Cut(1, 4, 2), "64 x 256"), (Cut(1, 1, 1), "stages"), (Cut(1, 1, 17), "stages")]
)
def test_cuts_that_a_kernel_does_not_have_are_refused(cut: Cut, said: str) -> None:
    x, weight, _ = Case(20, 128, 64).tensors()
    with pytest.raises(ValueError, match=said):
        product(x, weight, torch.zeros(20, 64, dtype=BF16), cut)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [17, 64, 128, 256])
@pytest.mark.parametrize(
    "sizes",
    [
        (4096, 1024),
        (1024, 2048),
        (6144, 1024),
        (1024, 3072),
        (3072, 1024),
        (2048, 1024),
        (4096, 2048),
        (2048, 2048),
        (12288, 2048),
        (2048, 6144),
        (3072, 2048),
        (1152, 896),
        (896, 896),
        (9728, 896),
        (896, 4864),
        (6144, 2560),
        (2560, 4096),
        (19456, 2560),
        (2560, 9728),
    ],
    ids=str,
)
def test_every_size_of_the_models_has_a_cut(sizes: tuple[int, int], rows: int, normed: bool) -> None:
    """Qwen3-TTS of 0.6B and of 1.7B; SparkTTS and Fish S2 Pro. What is normed is no wider than a model."""
    normed = normed and sizes[1] <= 2560
    assert cut_for(rows, *sizes, normed).fault(room_for(rows), *sizes, normed) is None
    assert Products({"o": Cut(1, 1, 16)}).cut("o", rows, *sizes, normed).fault(room_for(rows), *sizes, normed) is None


def test_other_sizes_have_none() -> None:
    assert not has_product(80, 64)
    assert not has_product(64, 80)
    assert has_product(64, 128)
    wanted = Cut(2, 2, 4)
    assert Products({"qkv": wanted}).cut("qkv", 32, 4096, 1024) == wanted


def test_its_kernels_spill_no_registers_and_products_overlap() -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    said = subprocess.run([*command, str(binaries.SOURCES / "products.cu")], capture_output=True, text=True, check=True, timeout=240).stderr
    names = lm_products.kernel_names()
    assert sorted(re.findall(r"entry function '(\w+)'", said)) == sorted(names)
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0] * (2 * len(names)), said
    assert "warning" not in said.lower(), said
