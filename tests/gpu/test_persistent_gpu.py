"""The persistent kernel of the code predictor on a CUDA device: as in tests/parity/test_persistent_emulated.py, and at published sizes.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_persistent_gpu.py -k small` looks at its accesses, `--tool racecheck`
at those of shared memory.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.dummy import SMALL, Shape
from kernels.lm_persistent import FAILED, Predictor, PredictorRun, Trial
from tests.support import persistent_kit
from tests.support.persistent_kit import GOLDEN, SMALLEST, Made, case, last_logits, launched, run_of, twin

pytestmark = pytest.mark.gpu

SHAPES = [pytest.param(SMALLEST, id="small"), pytest.param(GOLDEN, id="small golden"), pytest.param(SMALL, id="published")]


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.inference_mode():
        yield


def equal(one: Made, other: Made) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in Made.__slots__)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_logits_are_as_near_to_the_truth_as_those_of_plain_products(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(shape, rows, device="cuda")
    run = run_of(one)
    made = launched(run, one)
    assert (run.fault, made.flags.tolist()) == (None, [0] * rows)
    forced, plain = twin(one, made.codes)
    persistent_kit.exact(monkeypatch)
    _, truth = twin(one, made.codes)
    assert float((last_logits(run, one) - truth[-1]).norm()) <= 2 * float((plain[-1] - truth[-1]).norm())
    for name in ("positions", "frames"):
        assert torch.equal(getattr(made, name), getattr(forced, name))
    assert float((made.inputs.float() - forced.inputs.float()).norm()) <= 1e-3 * float(forced.inputs.float().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_launches_give_the_same_bits_with_stumbling_blocks_too(shape: Shape) -> None:
    one = case(shape, 2, device="cuda")
    first, stumbling = run_of(one), run_of(one, trial=Trial(seed=1, delay=64))
    wanted = launched(first, one)
    for _ in range(20):
        assert equal(launched(first, one), wanted)
        assert equal(launched(stumbling, one), wanted)
    assert (first.fault, stumbling.fault) == (None, None)


def test_a_block_that_says_nothing_ends_in_a_fault_and_the_device_lives_on() -> None:
    one = case(SMALL, 1, device="cuda")
    run = run_of(one, patience=20_000, trial=Trial(silent=77))
    assert int(launched(run, one).flags[0]) & FAILED
    assert "waited in vain for exchange 1." in str(run.fault)
    assert int(launched(run_of(one), one).flags[0]) == 0


def test_two_gpus_of_one_process_have_kernels_of_their_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    found = []
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(device):
            one = case(SMALL, 1, greedy=True, device=device)
            cpu = case(SMALL, 1, greedy=True)
            for name in ("hidden", "first"):
                getattr(one, name).copy_(getattr(cpu, name))
            found.append(launched(PredictorRun(Predictor(one.weights), 1), one))
            assert int(found[-1].flags[0]) == 0
