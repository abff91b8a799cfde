"""The codec's residual unit in CUDA C++, run on a CPU by the emulator, against its twin in float64
arithmetic."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kernels import binaries, codec_cuda, toolchain
from kernels.codec_cuda import TileConfig
from tests.support.codec_unit_kit import BF16, TILE_CONFIGS, UNITS, Unit, check
from tests.support.cuda_emulated import choose_order
from tests.support.fake_gpus import FakeGpus

#: Blocks of a launch: each has some tiles.
BLOCKS = 2


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    gpus.processors = BLOCKS
    return choose_order(monkeypatch)


@pytest.mark.parametrize("config", TILE_CONFIGS, ids=lambda config: config.kernel)
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_it_equals_its_twin(unit: Unit, config: TileConfig, emulated: Callable[[int], None]) -> None:
    check(unit, config.channels, unit.made(config))


@pytest.mark.parametrize("config", TILE_CONFIGS, ids=lambda config: config.kernel)
def test_the_order_of_threads_changes_no_bit(
    config: TileConfig, emulated: Callable[[int], None], gpus: FakeGpus
) -> None:
    gpus.processors = 1
    unit = Unit(3, 450, 3, ends=(450, 0, 150))
    runs: list[Tensor] = []
    for seed in range(4):
        emulated(seed)
        _, active = unit.made(config)
        assert active is not None
        runs.append(active)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("config", TILE_CONFIGS, ids=lambda config: config.kernel)
def test_open_ends_change_no_bit_in_front_of_them_and_leave_the_tiles_behind_them(
    config: TileConfig, emulated: Callable[[int], None]
) -> None:
    ends = (400, 0, 129, 64)
    whole, ended = (Unit(4, 400, 9, ends=chosen, open_ends=chosen is not None) for chosen in (None, ends))
    for of_whole, of_ended, unwritten in zip(
        whole.made(config), ended.made(config), ended.outputs(config.channels, BF16)
    ):
        assert of_whole is not None and of_ended is not None and unwritten is not None  # noqa: PT018
        for row, end in enumerate(ends):
            assert torch.equal(of_ended[row, :end], of_whole[row, :end])
            behind = -(-end // config.box_steps) * config.box_steps
            assert torch.equal(
                of_ended[row, behind:].nan_to_num(9.0), unwritten[row, behind:].nan_to_num(9.0)
            )


def test_a_row_has_the_same_bits_in_any_company(emulated: Callable[[int], None]) -> None:
    alone, among = (Unit(rows, 150, 3).made(TILE_CONFIGS[0])[1] for rows in (1, 4))
    assert alone is not None and among is not None  # noqa: PT018
    assert torch.equal(alone[0], among[0])


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("config", TILE_CONFIGS, ids=lambda config: config.kernel)
def test_the_op_takes_the_kernel_where_weights_are_packed_and_tensors_aligned(
    config: TileConfig, emulated: Callable[[int], None], gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import codec_launch

    # A device without TMA, whose descriptors need aligned tensors.
    gpus.capability = (8, 0)
    unit, launched = Unit(2, 70, 3), list[int]()
    monkeypatch.setattr(codec_launch, "on_grid", lambda *_: lambda *given, **_: launched.append(len(given)))
    monkeypatch.setitem(codec_cuda.TILE_CONFIGS, 192, codec_cuda.TILE_CONFIGS[192]._replace(fewest_steps=140))
    t, made = unit.tensors(config.channels), unit.made(config)

    def op(a: Tensor, packed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        raw, active = unit.outputs(config.channels, BF16)
        before = (t["weight1"], t["bias1"], t["frequency1"], t["gain1"], t["weight2"], t["bias2"], 3)
        codec_launch.unit(a, 0, t["x"], *before, raw, active, 0, t["frequency2"], t["gain2"], packed=packed)
        return raw, active

    for found, wanted in zip(op(t["a"], unit.packed(config)), made):
        assert found is not None and wanted is not None  # noqa: PT018
        assert torch.equal(found, wanted)
    assert launched == []
    off = torch.zeros(t["a"].numel() + 1, dtype=BF16)[1:].view_as(t["a"])
    op(t["a"], None)
    op(off, unit.packed(config))
    assert len(launched) == 2
    monkeypatch.setitem(codec_cuda.TILE_CONFIGS, 192, codec_cuda.TILE_CONFIGS[192]._replace(fewest_steps=141))
    op(t["a"], unit.packed(config))
    assert len(launched) == 2 + (config.channels == 192)


def test_what_the_kernel_cannot_do_is_refused(emulated: Callable[[int], None]) -> None:
    with pytest.raises(ValueError, match="dilation 10"):
        Unit(1, 70, 10).made(TILE_CONFIGS[0])
    t, packed = Unit(1, 70, 1).tensors(96), Unit(1, 70, 1).packed(TILE_CONFIGS[0])
    snakes, odd = (
        (t["bias1"], t["frequency1"], t["gain1"], t["bias2"]),
        torch.zeros(70 * 96 + 1, dtype=BF16)[1:],
    )
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        codec_cuda.unit(t["a"], 0, t["x"], packed, *snakes, 1, odd.view(1, 70, 96), None, 0, None, None)


def test_a_wheel_brings_the_kernels() -> None:
    assert all(binaries.targets_of(config.source.name) == [binaries.HOPPER] for config in TILE_CONFIGS)


@pytest.mark.parametrize("source", sorted(config.source.name for config in TILE_CONFIGS))
def test_its_kernels_spill_no_registers_and_products_overlap(source: str) -> None:
    """ptxas says so where it lets one product wait for the other (C7510)."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-cubin", "-arch=sm_90a", "-std=c++17", "-O3", "-Xptxas", "-v", "-o", "/dev/null"]
    said = subprocess.run(
        [*command, str(binaries.SOURCES / f"{source}.cu")],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stderr
    names = [config.kernel for config in TILE_CONFIGS if config.source.name == source]
    assert sorted(re.findall(r"entry function '(\w+)'", said)) == sorted(names)
    assert [int(each) for each in re.findall(r"(\d+) bytes spill", said)] == [0] * (2 * len(names)), said
    assert "warning" not in said.lower(), said
