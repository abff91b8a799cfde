"""The persistent kernel of the code predictor on a CUDA device: as in
tests/parity/test_persistent_emulated.py, and at published sizes.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_persistent_gpu.py -k
small` looks at its accesses, `--tool racecheck` at those of shared memory.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.lm_persistent import FAILED, Predictor, PredictorRun, Trial
from tests.support import persistent_kit, persistent_talker_kit
from tests.support.lm_tensors import SMALL, Shape
from tests.support.persistent_kit import (
    GOLDEN,
    SMALLEST,
    Case,
    Made,
    case,
    last_logits,
    launched,
    run_of,
    twin,
)

pytestmark = pytest.mark.gpu

SHAPES = [
    pytest.param(SMALLEST, id="small"),
    pytest.param(GOLDEN, id="small golden"),
    pytest.param(SMALL, id="published"),
]
TALKERS = [pytest.param(persistent_talker_kit.SMALL_TALKER, id="small"), pytest.param(SMALL, id="published")]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch):
    persistent_kit.add_small(monkeypatch)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.inference_mode():
        yield


def equal(one: Made, other: Made) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in Made.__slots__)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_logits_are_as_near_to_the_truth_as_those_of_plain_products(
    shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert float((made.inputs.float() - forced.inputs.float()).norm()) <= 1e-3 * float(
        forced.inputs.float().norm()
    )


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
    run = run_of(one, patience=200_000, trial=Trial(silent=77))
    assert int(launched(run, one).flags[0]) & FAILED
    # Who needs nothing of the silent block in exchange 1 waits in exchange 2 for those who do, and may lose
    # patience first.
    assert re.search(r"of the predictor waited too long for exchange [12]\.", str(run.fault))
    assert int(launched(run_of(one), one).flags[0]) == 0


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("trial", [Trial(starved=77), Trial(keeping=77)])
def test_a_wait_for_weights_ends_in_a_fault_and_the_next_launches_are_right(trial: Trial, rows: int) -> None:
    one = case(SMALL, rows, device="cuda")
    wanted = launched(run_of(one), one)
    run = run_of(one, patience=200_000, trial=trial)
    assert int(launched(run, one).flags[0]) & FAILED
    assert "Block 77 of the predictor waited too long for the weights after exchange" in str(run.fault)
    assert equal(launched(run_of(one), one), wanted)
    step = persistent_talker_kit.case(SMALL, rows, device="cuda")
    talker = persistent_talker_kit.run_of(step, patience=200_000, trial=trial)
    persistent_talker_kit.launched(talker, step)
    assert "Block 77 of the talker waited too long for the weights after exchange" in str(
        talker.predictor_run.fault
    )


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("longest", [40, 600, 2500])
@pytest.mark.parametrize("shape", TALKERS)
def test_the_talkers_state_is_as_near_to_the_truth_as_that_of_plain_products(
    shape: Shape, rows: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = persistent_talker_kit.case(shape, rows, longest=longest, device="cuda")
    run = persistent_talker_kit.run_of(one)
    made = persistent_talker_kit.launched(run, one)
    assert run.predictor_run.fault is None
    plain = persistent_talker_kit.twin(one)
    persistent_talker_kit.exact(monkeypatch)
    truth = persistent_talker_kit.twin(one)
    for name in ("hidden", "keys", "values"):
        mine, theirs, right = (getattr(which, name).float() for which in (made, plain, truth))
        assert float((mine - right).norm()) <= 2 * float((theirs - right).norm()), name


def test_the_talkers_launches_give_the_same_bits_with_stumbling_blocks_too() -> None:
    one = persistent_talker_kit.case(SMALL, 2, longest=600, device="cuda")
    first, stumbling = (
        persistent_talker_kit.run_of(one),
        persistent_talker_kit.run_of(one, trial=Trial(seed=1, delay=64)),
    )
    wanted = persistent_talker_kit.launched(first, one)
    for _ in range(10):
        for run in (first, stumbling):
            made = persistent_talker_kit.launched(run, one)
            assert all(
                torch.equal(getattr(made, name), getattr(wanted, name))
                for name in ("hidden", "keys", "values")
            )
    assert (first.predictor_run.fault, stumbling.predictor_run.fault) == (None, None)


def test_a_silent_block_of_the_talker_ends_in_a_fault() -> None:
    one = persistent_talker_kit.case(SMALL, 1, device="cuda")
    run = persistent_talker_kit.run_of(one, patience=200_000, trial=Trial(silent=77))
    persistent_talker_kit.launched(run, one)
    assert re.search(
        r"of the talker waited too long for exchange \d\.", str(run.predictor_run.fault)
    )  # whoever lost patience first


def test_two_engines_at_once_make_what_each_makes_alone() -> None:
    ones = [case(SMALL, rows, device="cuda") for rows in (1, 2)]
    runs = [run_of(one) for one in ones]
    wanted = [launched(run, one) for run, one in zip(runs, ones)]
    torch.cuda.synchronize()

    def work(run: PredictorRun, one: Case) -> list[Made]:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            made = [launched(run, one) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
            return made

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, runs, ones))
    for made, alone in zip(found, wanted):
        assert all(equal(one, alone) for one in made)
    assert [run.fault for run in runs] == [None, None]


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
