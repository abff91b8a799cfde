"""The persistent kernel of the talker's layers, on a CPU: its steps against the twin's, in many orders of
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
from kernels.lm_persistent import (
    FAILED,
    Predictor,
    PredictorRun,
    Talker,
    TileConfig,
    Trial,
    kernel_name,
    talker_config,
)
from tests.support import persistent_kit, persistent_talker_kit
from tests.support.fake_gpus import FakeGpus
from tests.support.lm_tensors import SMALL, Maker, Shape
from tests.support.persistent_kit import Emulated
from tests.support.persistent_talker_kit import (
    GOLDEN_TALKER,
    ODD_TALKER,
    PAGE,
    SHARED_TALKER,
    SMALL_TALKER,
    Made,
    case,
    launched,
    run_of,
    twin,
)

PUBLISHED_CONFIGS = lm_persistent.TALKERS
SHORT = 8000


@pytest.fixture(autouse=True)
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    persistent_kit.emulate(monkeypatch)
    Emulated.seed = 0
    with torch.inference_mode():
        yield


def equal(one: Made, other: Made) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in Made.__slots__)


@pytest.mark.parametrize("shape", [SMALL_TALKER, GOLDEN_TALKER, ODD_TALKER, SHARED_TALKER])
@pytest.mark.parametrize("rows", [1, 2])
def test_steps_are_the_twins(shape: Shape, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    persistent_talker_kit.exact(monkeypatch)
    same = 0
    for seed, longest in enumerate((60, 60, 300, 8)):
        one = case(shape, rows, seed, longest)
        made, wanted = launched(run_of(one), one), twin(one)
        for name in Made.__slots__:
            mine, theirs = getattr(made, name).float(), getattr(wanted, name).float()
            assert float((mine - theirs).norm()) <= 4e-3 * float(theirs.norm()), f"seed {seed}, {name}"
        same += equal(made, wanted)
    assert same >= 3, "a sum whose order decides its rounding is rare"


@pytest.mark.parametrize("position", [0, 1, 15, 16, 255])
def test_the_new_position_is_seen_and_kept_and_no_other_one_changes(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistent_talker_kit.exact(monkeypatch)
    one = case(SMALL_TALKER, 1, seed=7, longest=300)
    one.state.positions[one.rows] = position
    made = launched(run_of(one), one)
    assert equal(made, twin(one))
    page = int(one.state.page_table[one.rows[0], position // PAGE])
    changed = (made.keys != one.keys).any(-1).any(2).nonzero()
    assert changed.unique(dim=0).tolist() == [[layer, page, position % PAGE] for layer in range(2)]


def test_a_row_does_not_see_its_neighbour() -> None:
    pair = case(SMALL_TALKER, 2, seed=5, longest=200)
    together = launched(run_of(pair), pair)
    for row in (0, 1):
        alone = replace(pair, rows=pair.rows[row : row + 1])
        assert torch.equal(launched(run_of(alone), alone).hidden[0], together.hidden[row])


@pytest.mark.parametrize(("shape", "orders"), [(SMALL_TALKER, 8), (ODD_TALKER, 2)])
def test_steps_follow_each_other_in_any_order_of_threads_with_stumbling_blocks(
    shape: Shape, orders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(shape, 2, seed=2, longest=100)
    wanted = launched(run_of(one), one)
    for delay in (0, 40):
        run = run_of(one, trial=Trial(seed=delay, delay=delay))
        for seed in range(orders):
            Emulated.seed = seed
            assert equal(launched(run, one), wanted), f"seed {seed}, delay {delay}"
        assert run.predictor_run.fault is None
        assert run.predictor_run.control.tolist() == [0, 0, orders * 6 * shape.layers]


def test_epochs_pass_the_end_of_their_range() -> None:
    one = case(SMALL_TALKER, 1, seed=3)
    run, wanted = run_of(one), launched(run_of(one), one)
    run.predictor_run.control[2] = (
        -6 * SMALL_TALKER.layers - 5
    )  # as a count without sign: so many before 2**32
    for _ in range(3):
        assert equal(launched(run, one), wanted)
    assert int(run.predictor_run.control[2]) == 2 * 6 * SMALL_TALKER.layers - 5
    assert run.predictor_run.fault is None


def test_a_block_that_says_nothing_voids_the_frame() -> None:
    one = case(SMALL_TALKER, 2, seed=1)
    run = run_of(one, patience=SHORT, trial=Trial(silent=2))
    launched(run, one)
    assert re.fullmatch(
        r"Block [0-3] of the talker waited too long for exchange 1\.", run.predictor_run.fault or ""
    )
    begun = persistent_kit.case(SMALL_TALKER, 2)
    behind = PredictorRun(Predictor(begun.weights), 2)
    behind.control.copy_(run.predictor_run.control)
    assert int(persistent_kit.launched(behind, begun).flags[0]) & FAILED, "the predictor says so for both"
    assert behind.fault == run.predictor_run.fault


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("trial", "block"), [(Trial(starved=1), 1), (Trial(keeping=2), 2)])
def test_a_wait_for_weights_ends_in_a_fault_and_the_next_launches_are_right(
    trial: Trial, block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(SMALL_TALKER, 2, seed=1)
    wanted = launched(run_of(one), one)
    Emulated.seed = seed
    run = run_of(one, patience=SHORT, trial=trial)
    launched(run, one)
    assert re.fullmatch(
        rf"Block {block} of the talker waited too long for the weights after exchange \d+\.",
        run.predictor_run.fault or "",
    )
    assert equal(launched(run_of(one), one), wanted)


def test_no_block_ends_before_its_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of which the last one is sent when all others of the block are done, after a fault."""
    one, kernel = (
        case(SMALL_TALKER, 1),
        "TALKER(persistent_talker_tiny_1, 32768, false, 48, 80, 4, 2, 32, 8, 1, 1, 4, 2, 1, 3, 1, 1)",
    )
    persistent_kit.rebuild(monkeypatch, tmp_path, kernel, persistent_kit.LOOKS_AT_ONCE)
    for seed in range(6):
        Emulated.seed = seed
        run = run_of(one, gap=200_000)
        run.predictor_run.control[1] = fault = -(1 << 31)
        launched(run, one)
        assert int(run.predictor_run.control[1]) == fault


def test_the_dead_slot_touches_no_page_but_its_own() -> None:
    one = case(SMALL_TALKER, 2, seed=4)
    one.rows[1] = one.state.dead
    made = launched(run_of(one), one)
    alone = replace(one, rows=one.rows[:1])
    wanted = launched(run_of(alone), alone)
    assert torch.equal(made.hidden[0], wanted.hidden[0])
    assert torch.equal(made.keys[:, 1:], wanted.keys[:, 1:])
    assert torch.equal(made.values[:, 1:], wanted.values[:, 1:])


def test_talkers_without_a_kernel_are_not_known() -> None:
    assert talker_config(Maker("cpu", torch.bfloat16).frame(SMALL_TALKER)) is not None
    assert talker_config(Maker("cpu", torch.float32).frame(SMALL_TALKER)) is None
    other = Maker("cpu", torch.bfloat16).frame(replace(SMALL_TALKER, inter=84))
    assert talker_config(other) is None
    with pytest.raises(ValueError, match="no persistent kernel"):
        Talker(other)


@pytest.mark.parametrize(
    "config", persistent_kit.EMULATED_TALKER_CONFIGS.values(), ids=lambda config: config.name
)
def test_kernels_take_the_arguments_of_their_launch(config: TileConfig) -> None:
    for tested in (False, True):
        taken = persistent_kit.library(config.name)[f"bytes_{kernel_name(config, 1, tested)}"]
        assert taken() == ctypes.sizeof(lm_persistent.TalkerArguments)


def test_the_published_kernels_fit_a_block_of_hopper_and_its_registers() -> None:
    assert persistent_kit.spilled("persistent_talker") == [0, 0]
    ((key, config),) = PUBLISHED_CONFIGS.items()
    assert key == (SMALL.hidden, SMALL.inter, SMALL.heads, SMALL.kv_heads, SMALL.head_dim)
    persistent_kit.check_published("persistent_talker", [*key, 8, 1, 1], config)
