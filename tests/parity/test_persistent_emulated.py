"""The persistent kernel of the code predictor, on a CPU: its frames against the twin's, in many orders of
threads, and what goes wrong."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import lm_persistent
from kernels.frame import DepthTensors
from kernels.lm_persistent import FAILED, Predictor, TileConfig, Trial, kernel_name, predictor_config
from kernels.reference import ENDED, NOT_FINITE
from tests.support import cuda_emulated, persistent_kit
from tests.support.fake_gpus import FakeGpus
from tests.support.lm_checks import vary_draws
from tests.support.lm_tensors import SMALL, Maker, Shape
from tests.support.persistent_kit import (
    GOLDEN,
    LEAST,
    ODD,
    SHARED,
    SMALLEST,
    Emulated,
    Made,
    case,
    last_logits,
    launched,
    run_of,
    twin,
)

PUBLISHED_CONFIGS = lm_persistent.PREDICTORS


def epochs_of(depth: DepthTensors) -> int:
    """Exchanges of a frame."""
    return len(depth.heads) * (5 * len(depth.stack.layers) + 1)


#: More than any wait of a frame without faults, and few enough for a test to sit out.
SHORT = 8000
#: The smallest one.
KERNEL = "PREDICTOR(persistent_least_1, 16384, false, 32, 32, 2, 1, 16, 32, 1, 2, 2, 1, 1, 2, 1)"


@pytest.fixture(autouse=True)
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    persistent_kit.emulate(monkeypatch)
    Emulated.seed = 0
    with torch.inference_mode():
        yield


def equal(one: Made, other: Made) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in Made.__slots__)


@pytest.mark.parametrize("shape", [SMALLEST, GOLDEN, ODD, SHARED])
@pytest.mark.parametrize("rows", [1, 2])
def test_frames_are_the_twins(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    persistent_kit.exact(monkeypatch)
    same_logits = 0
    for seed in range(3):
        one = case(shape, rows, seed)
        vary_draws(Maker("cpu", torch.bfloat16, seed), one.state.residual)
        run = run_of(one)
        wanted, logits = twin(one)
        assert equal(launched(run, one), wanted), f"seed {seed}"
        same_logits += torch.equal(last_logits(run, one), logits[-1])
    assert same_logits >= 1, "a sum whose order decides its rounding is rare"


@pytest.mark.parametrize("rows", [1, 2])
def test_logits_are_as_near_to_the_truth_as_those_of_plain_products(rows: int) -> None:
    one = case(GOLDEN, rows)
    run = run_of(one)
    made = launched(run, one)
    _, plain = twin(one, made.codes)
    with pytest.MonkeyPatch.context() as patched:
        persistent_kit.exact(patched)
        _, truth = twin(one, made.codes)
    assert float((last_logits(run, one) - truth[-1]).norm()) <= 2 * float((plain[-1] - truth[-1]).norm())


@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_does_not_see_its_neighbour(greedy: bool) -> None:
    pair = case(SMALLEST, 2, seed=5, greedy=greedy)
    together = launched(run_of(pair), pair)
    for row in (0, 1):
        alone = replace(
            pair,
            rows=pair.rows[row : row + 1],
            hidden=pair.hidden[row : row + 1],
            first=pair.first[row : row + 1],
        )
        made = launched(run_of(alone), alone)
        assert torch.equal(made.codes[0], together.codes[row])
        assert torch.equal(made.inputs[alone.rows], together.inputs[alone.rows])


@pytest.mark.parametrize(("shape", "orders"), [(SMALLEST, 12), (GOLDEN, 4)])
def test_frames_follow_each_other_in_any_order_of_threads_with_stumbling_blocks(
    shape: Shape, orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(shape, 2, seed=2)
    wanted = launched(run_of(one), one)
    for delay in (0, 40):
        run = run_of(one, trial=Trial(seed=delay, delay=delay))
        for seed in range(orders):
            Emulated.seed = seed
            assert equal(launched(run, one), wanted), f"seed {seed}, delay {delay}"
        assert run.fault is None
        assert int(run.control[0]) == orders * epochs_of(run.predictor.depth)


def test_a_thousand_frames_pass_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in an order of its own, half of them with blocks that stumble; another request each time."""
    ones = [case(LEAST, 1, seed) for seed in range(4)]
    wanted = [launched(run_of(one), one) for one in ones]
    runs = [run_of(one, trial=Trial(seed=index, delay=30 * (index % 2))) for index, one in enumerate(ones)]
    for seed in range(1000):
        Emulated.seed = seed
        assert equal(launched(runs[seed % 4], ones[seed % 4]), wanted[seed % 4]), f"seed {seed}"
    assert [run.fault for run in runs] == [None] * 4


def test_epochs_pass_the_end_of_their_range() -> None:
    one = case(SMALLEST, 1, seed=3)
    run, wanted = run_of(one), launched(run_of(one), one)
    run.control[0] = -epochs_of(run.predictor.depth) - 20  # as a count without sign: so many before 2**32
    for _ in range(3):
        assert equal(launched(run, one), wanted)
    assert int(run.control[0]) == 2 * epochs_of(run.predictor.depth) - 20
    assert run.fault is None


def test_a_block_that_says_nothing_voids_the_frame() -> None:
    one = case(SMALLEST, 2, seed=1)
    run = run_of(one, patience=SHORT, trial=Trial(silent=2))
    made = launched(run, one)
    assert made.flags.tolist() == [made.flags[0]] * 2
    assert int(made.flags[0]) & FAILED
    assert re.fullmatch(r"Block [0-3] of the predictor waited too long for exchange 1\.", run.fault or "")
    assert 0 <= int(made.codes.min()) <= int(made.codes.max()) < 48


def test_a_fault_is_not_forgotten() -> None:
    one, fault = case(SMALLEST, 2, seed=1), -(1 << 31) | 2 << 20 | 9
    run = run_of(one)
    run.control[1] = fault
    for _ in range(2):
        assert int(launched(run, one).flags[0]) & FAILED
        assert int(run.control[1]) == fault


def test_no_block_ends_before_its_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of which the last one is sent when all others of the block are done, after a fault."""
    one = case(LEAST, 1)
    persistent_kit.rebuild(monkeypatch, tmp_path, KERNEL, persistent_kit.LOOKS_AT_ONCE)
    for seed in range(6):
        Emulated.seed = seed
        run = run_of(one, gap=100_000)
        run.control[1] = -(1 << 31)
        assert int(launched(run, one).flags[0]) & FAILED


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trial", "block"), [(Trial(starved=1), 1), (Trial(keeping=2), 2)])
def test_a_wait_for_weights_ends_in_a_fault_and_the_next_launches_are_right(
    trial: Trial, block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(SMALLEST, 2, seed=1)
    wanted = launched(run_of(one), one)
    Emulated.seed = seed
    run = run_of(one, patience=SHORT, trial=trial)
    made = launched(run, one)
    assert int(made.flags[0]) & FAILED
    assert re.fullmatch(
        rf"Block {block} of the predictor waited too long for the weights after exchange \d+\.",
        run.fault or "",
    )
    assert 0 <= int(made.codes.min()) <= int(made.codes.max()) < 48
    assert equal(launched(run_of(one), one), wanted)


def test_a_wait_for_room_ends_in_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a producer with more chunks than are used."""
    one = case(LEAST, 1)
    one_more = {"step < S::LATER; ++step) {\n        stream": "step <= S::LATER; ++step) {\n        stream"}
    persistent_kit.rebuild(monkeypatch, tmp_path, KERNEL, {**one_more, **persistent_kit.LOOKS_AT_ONCE})
    run = run_of(one, patience=SHORT)
    launched(run, one)
    assert re.fullmatch(
        r"Block [01] of the predictor waited too long for room for chunk \d+ of its weights\.",
        run.fault or "",
    )


def test_a_block_whose_clock_jumps_back_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As it may when it is moved to another multiprocessor."""
    one = case(LEAST, 1)
    wanted = launched(run_of(one), one)
    persistent_kit.rebuild(
        monkeypatch,
        tmp_path,
        KERNEL,
        {"next = clock64() + p.gap;": "next = clock64() + p.gap + (1ll << 40);"},
    )
    assert equal(launched(run_of(one), one), wanted)


def test_ends_and_logits_that_are_not_finite_are_flagged() -> None:
    one = case(SMALLEST, 2, seed=4)
    one.first[0] = one.weights.draw.ends[0]
    one.hidden[1] = float("nan")
    made = launched(run_of(one), one)
    assert made.flags.tolist() == [ENDED, NOT_FINITE]
    assert torch.equal(
        made.codes[0], launched(run_of(one), replace(one, hidden=one.hidden.nan_to_num(0.5))).codes[0]
    )


def test_the_dead_slot_stays_where_it_is() -> None:
    one = case(SMALLEST, 2)
    one.rows[1] = one.state.dead
    made = launched(run_of(one), one)
    assert (int(made.positions[one.state.dead]), int(made.frames[one.state.dead])) == (0, 0)
    assert int(made.positions[one.rows[0]]) == int(one.state.positions[one.rows[0]]) + 1


def test_a_device_that_does_not_hold_all_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    persistent_kit.emulate(monkeypatch, room=lambda: 3)
    with pytest.raises(RuntimeError, match="has 4 blocks; this device holds 3"):
        run_of(case(SMALLEST, 1))


def test_models_without_a_kernel_are_not_known() -> None:
    weights = Maker("cpu", torch.bfloat16).frame(SMALLEST)
    assert predictor_config(weights) is not None
    assert predictor_config(Maker("cpu", torch.float32).frame(SMALLEST)) is None
    other = Maker("cpu", torch.bfloat16).frame(replace(SMALLEST, codes=52))
    assert predictor_config(other) is None
    with pytest.raises(ValueError, match="no persistent kernel"):
        Predictor(other)


def test_a_kernel_with_a_block_that_owns_no_row_does_not_compile() -> None:
    edits = {"32, 256, 2, 15, 4, 2, 2, 4)": "32, 256, 2, 15, 8, 2, 2, 4)"}
    with pytest.raises(RuntimeError, match="the last block owns no row"):
        cuda_emulated.build(persistent_kit.SOURCE, [], edits)


def test_weights_are_packed_once_each_and_zeros_fill_them_up() -> None:
    weights = Maker("cpu", torch.bfloat16).frame(GOLDEN)
    depth, packed = weights.depth, Predictor(weights).weights
    assert depth is not None
    layers = [
        part for layer in depth.stack.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    whole = torch.cat([part.flatten() for part in (*layers, depth.heads)])
    assert torch.equal(packed[packed != 0].sort().values, whole[whole != 0].sort().values)


@pytest.mark.parametrize("config", persistent_kit.EMULATED_CONFIGS.values(), ids=lambda config: config.name)
def test_kernels_take_the_arguments_of_their_launch(config: TileConfig) -> None:
    for tested in (False, True):
        taken = persistent_kit.library(config.name)[f"bytes_{kernel_name(config, 1, tested)}"]
        assert taken() == ctypes.sizeof(lm_persistent.Arguments)


def test_the_published_kernels_fit_a_block_of_hopper_and_its_registers() -> None:
    spilled = persistent_kit.spilled("persistent")
    # A few words that two rows read once a codebook; inside the layers there are none.
    assert min(spilled) == 0
    assert max(spilled) <= 64
    shape = (
        SMALL.width,
        SMALL.width_inter,
        SMALL.heads,
        SMALL.kv_heads,
        SMALL.head_dim,
        SMALL.codes,
        SMALL.predictor_layers,
    )
    ((key, config),) = PUBLISHED_CONFIGS.items()
    assert key == (*shape, SMALL.codebooks - 1)
    persistent_kit.check_published("persistent", list(key), config)
