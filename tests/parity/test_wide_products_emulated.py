"""SwiGLU of many rows in CUDA C++, run on a CPU by the emulator, against its twin in float64."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries, layers, toolchain
from kernels.lm_products import blocks_of, fills, swiglu
from pipelines.engine.buckets import BUCKETS, WIDE_BUCKETS
from tests.support.cuda_emulated import choose_order, guarded
from tests.support.fake_gpus import FakeGpus

BF16 = torch.bfloat16
#: Multiprocessors of the device, so that a block has several tiles.
PROCESSORS = 2


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    gpus.processors = PROCESSORS
    return choose_order(monkeypatch)


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


@dataclass(frozen=True)
class Case:
    """SwiGLU of `rows` x `inner` activations and `n` outputs."""

    rows: int
    inner: int
    n: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        """x and weight."""
        draw = torch.Generator().manual_seed(self.rows + self.inner + self.n)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return guarded((torch.randn(shape, generator=draw) * std).to(BF16))

        return normal(self.rows, self.inner), normal(2 * self.n, self.inner, std=2 * self.inner**-0.5)

    def made(self, rows: slice = slice(None)) -> Tensor:
        """Its rows, [rows, n]."""
        x, weight = self.tensors()
        x = guarded(x[rows])
        return swiglu(x, weight, guarded(torch.full((len(x), self.n), float("nan"), dtype=BF16)))

    def truth(self, dtype: torch.dtype) -> Tensor:
        return layers.swiglu(functional.linear(*(t.to(dtype) for t in self.tensors())))


CASES = [Case(129, 64, 96), Case(200, 448, 192), Case(513, 128, 96), Case(260, 384, 192)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_swiglu_equals_its_twin_whatever_the_order_of_threads(
    case: Case, emulated: Callable[[int], None]
) -> None:
    exact = case.truth(torch.float64)
    found = case.made()
    assert error(found, exact) <= 1.2 * error(case.truth(BF16), exact)
    for seed in (case.rows, case.inner, case.n):
        emulated(seed)
        assert torch.equal(case.made(), found)


def test_a_row_has_the_same_bits_in_any_company(emulated: Callable[[int], None]) -> None:
    case = Case(300, 320, 192)
    whole = case.made()
    for rows in (slice(0, 1), slice(5, 140), slice(171, 300)):
        assert torch.equal(case.made(rows), whole[rows])


def test_gate_and_up_are_rounded_where_the_launches_of_a_frame_round_them(
    emulated: Callable[[int], None],
) -> None:
    """Sums of whole multiples of a power of two are the same in any order."""
    case = Case(140, 128, 96)
    x, weight = (guarded(t.mul(16).round().div(16)) for t in case.tensors())
    gate, up = (x.float() @ weight.float().t()).to(BF16).float().chunk(2, dim=1)
    silu = (gate / (1.0 + torch.exp(-gate))).to(BF16)
    assert torch.equal(swiglu(x, weight, torch.empty(140, 96, dtype=BF16)), (silu.float() * up).to(BF16))


def test_it_writes_rows_of_a_wider_tensor_and_none_behind_them(emulated: Callable[[int], None]) -> None:
    case = Case(140, 128, 96)
    x, weight = case.tensors()
    y = guarded(torch.full((150, 128), float("nan"), dtype=BF16))
    swiglu(x, weight, y[:140, 16:112])
    assert torch.equal(y[:140, 16:112], case.made())
    assert y[:, :16].isnan().all()
    assert y[:, 112:].isnan().all()
    assert y[140:].isnan().all()


@pytest.mark.parametrize(
    ("rows", "n", "blocks"),
    [(384, 3072, 96), (512, 3072, 128), (640, 3072, 80), (1024, 3072, 128), (512, 6144, 128)],
)
def test_tiles_fall_evenly_to_the_blocks_of_a_hopper(rows: int, n: int, blocks: int) -> None:
    assert blocks_of(rows, n, 132) == blocks


@pytest.mark.parametrize(
    ("n", "filled"), [(3072, {512, 1024}), (6144, {512, 768, 1024})], ids=["0.6B", "1.7B"]
)
def test_a_hopper_is_filled_where_few_multiprocessors_idle_in_the_last_turn(n: int, filled: set[int]) -> None:
    assert {rows for rows in (*BUCKETS, *WIDE_BUCKETS) if fills(rows, n, 132)} == filled


def test_rows_that_cublas_does_faster_fill_nothing() -> None:
    assert not fills(256, 6144, 128)
    assert fills(257, 6144, 192)


def test_what_a_kernel_cannot_do_is_refused(emulated: Callable[[int], None]) -> None:
    x, weight = Case(140, 128, 96).tensors()
    y = torch.zeros(140, 96, dtype=BF16)
    with pytest.raises(ValueError, match="72 outputs of 128 values do not fall"):
        swiglu(x, weight[:144], y[:, :72])
    with pytest.raises(ValueError, match="96 outputs of 96 values do not fall"):
        swiglu(x[:, :96].contiguous(), weight[:, :96].contiguous(), y)
    with pytest.raises(ValueError, match="96 weight rows do not give 140 rows of 96"):
        swiglu(x, weight[:96], y)
    with pytest.raises(ValueError, match="contiguous"):
        swiglu(x[:, :64], weight[:, :64].contiguous(), y)
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        swiglu(x, weight, torch.zeros(140, 98, dtype=BF16)[:, 2:])


def test_it_spills_no_registers_and_products_overlap() -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    source = str(binaries.SOURCES / "wide_products.cu")
    said = subprocess.run([*command, source], capture_output=True, text=True, check=True, timeout=240).stderr
    assert re.findall(r"entry function '(\w+)'", said) == ["wide_swiglu"]
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0, 0], said
    assert "warning" not in said.lower(), said
