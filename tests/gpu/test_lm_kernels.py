"""The fused frame's kernels against their twins in float64 and float32, on a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels import lm_cuda
from kernels.lm_frame import FusedFrame, Plan, plan_for
from tests.support import lm_checks
from tests.support.lm_checks import clone_state
from tests.support.lm_tensors import SMALL, TINY, Maker, Shape

pytestmark = pytest.mark.gpu

FEW = dataclasses.replace(SMALL, layers=4)
LARGE = dataclasses.replace(SMALL, layers=3, hidden=2048, inter=6144)


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield


CHECKS = [
    lm_checks.check_skinny,
    lm_checks.check_draw,
    lm_checks.check_attention,
    lm_checks.check_predictor_attention,
]


@pytest.fixture
def maker() -> Maker:
    return Maker("cuda", torch.bfloat16, seed=1)


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_are_within_twice_the_error_of_plain_bfloat16(check, maker: Maker) -> None:
    assert check(maker)


@pytest.mark.parametrize("splits", [1, 3])
def test_float32_frames_draw_the_codes_of_the_twin(splits: int) -> None:
    plan = Plan(splits=((99, splits),))
    assert lm_checks.check_frame(
        Maker("cuda", torch.float32, seed=2), TINY, 5, plan, f"{splits} splits", exact=True
    )


@pytest.mark.parametrize(
    ("shape", "batch", "plan"),
    [
        (FEW, 6, plan_for(8)),
        (FEW, 29, Plan()),
        (FEW, 70, plan_for(128)),
        (LARGE, 6, plan_for(8)),
        (LARGE, 29, plan_for(32)),
        *(
            (FEW, batch, plan_for(batch)._replace(products=products))
            for batch in (32, 33, 62, 64)
            for products in (False, True)
        ),
    ],
)
def test_bfloat16_frames_are_within_twice_the_error_of_the_twin(
    shape: Shape, batch: int, plan: Plan, maker: Maker
) -> None:
    assert lm_checks.check_frame(maker, shape, batch, plan, f"{batch} rows")


def test_frames_are_the_same_bits_twice_and_in_any_order_of_rows(maker: Maker) -> None:
    weights, batch = maker.frame(FEW), 30
    first = maker.state(FEW, batch, batch * 20, 16, maker.integers(0, 200, batch))
    k, v = maker.caches(FEW, batch * 20, 16)
    found = []
    for order in (
        torch.arange(batch, device="cuda"),
        torch.randperm(batch, device="cuda"),
        torch.arange(batch, device="cuda"),
    ):
        state = clone_state(first)
        runner = FusedFrame(weights, state, k.clone(), v.clone(), batch, plan_for(batch))
        frames = []
        for _ in range(3):
            codes = torch.zeros(batch, FEW.codebooks, dtype=torch.int64, device="cuda")
            runner.run(order, codes, torch.zeros(batch, dtype=torch.uint8, device="cuda"))
            frames.append(codes[order.argsort()])
        found.append(torch.stack(frames))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_row_with_nan_is_reported_and_its_neighbours_go_on(maker: Maker) -> None:
    weights, batch = maker.frame(FEW), 5
    state = maker.state(FEW, batch, batch * 20, 16, maker.integers(0, 200, batch))
    clean = clone_state(state)
    k, v = maker.caches(FEW, batch * 20, 16)
    rows, results = torch.arange(batch, device="cuda"), []
    state.inputs[2] = float("nan")
    for one in (state, clean):
        codes, flags = (
            torch.zeros(batch, 16, dtype=torch.int64, device="cuda"),
            torch.zeros(batch, dtype=torch.uint8, device="cuda"),
        )
        FusedFrame(weights, one, k.clone(), v.clone(), batch, plan_for(batch)).run(rows, codes, flags)
        results.append((codes, flags))
    assert (results[0][1] & 2).tolist() == [0, 0, 2, 0, 0]
    others = torch.tensor([0, 1, 3, 4], device="cuda")
    assert torch.equal(results[0][0][others], results[1][0][others])
    assert int(results[0][0].min()) >= 0
    assert int(results[0][0].max()) < FEW.vocab


def test_two_gpus_of_one_process_make_the_same_frames() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for device in (0, 1, 0, 1):
        with torch.cuda.device(device):
            here = Maker(f"cuda:{device}", torch.bfloat16, seed=1)
            assert lm_checks.check_skinny(here)
            assert lm_checks.check_frame(here, FEW, 6, plan_for(8), f"device {device}")


def test_products_of_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found: list[torch.Tensor] = []
    for device in (0, 1):
        x, weight = (
            torch.randn(size, 1024, generator=torch.Generator().manual_seed(3)).bfloat16()
            for size in (4, 2048)
        )
        y = torch.zeros(4, 2048, dtype=torch.bfloat16, device=f"cuda:{device}")
        for current in (0, 1):
            with torch.cuda.device(current):
                lm_cuda.skinny(x.to(y.device), weight.to(y.device), y)
                assert torch.cuda.current_device() == current
            torch.cuda.synchronize(device)
            found.append(y.cpu().clone())
    assert all(torch.equal(one, found[0]) for one in found)
    assert found[0].abs().sum() > 0
