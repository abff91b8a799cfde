"""The codec's residual unit in CUDA C++ on a CUDA device: as in tests/parity/test_codec_unit_emulated.py,
and at useful lengths.

`compute-sanitizer --tool memcheck python -m pytest tests/gpu/test_codec_unit_gpu.py -k
small` looks at its accesses, `--tool racecheck` at those of shared memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.common import captured
from kernels import codec_cuda
from kernels.codec_cuda import TileConfig
from tests.support.codec_unit_kit import TILE_CONFIGS, UNITS, Unit, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("config", TILE_CONFIGS, ids=lambda config: config.kernel),
]
#: More tiles than blocks, several for each.
LONG = Unit(3, 40_000, 9, lead=54, margin=6, ends=(40_000, 23_001, 0), device="cuda")


@pytest.mark.parametrize("unit", UNITS.values(), ids=[f"small, {name}" for name in UNITS])
def test_small_units_equal_their_twin(unit: Unit, config: TileConfig) -> None:
    there = replace(unit, device="cuda")
    check(there, config.channels, there.made(config))


@pytest.mark.parametrize("dilation", [1, 3, 9])
def test_long_units_equal_their_twin_and_each_launch_the_one_before(
    dilation: int, config: TileConfig
) -> None:
    unit = replace(LONG, dilation=dilation)
    made = unit.made(config)
    check(unit, config.channels, made)
    for _ in range(5):
        for one, other in zip(made, unit.made(config)):
            assert one is not None and other is not None  # noqa: PT018
            assert torch.equal(one[0], other[0])


def test_a_row_has_the_same_bits_in_any_company(config: TileConfig) -> None:
    alone, among = (Unit(rows, 5_000, 3, device="cuda").made(config)[1] for rows in (1, 4))
    assert alone is not None and among is not None  # noqa: PT018
    assert torch.equal(alone[0], among[0])


def test_a_launch_can_be_captured(config: TileConfig) -> None:
    unit = Unit(2, 2_000, 3, device="cuda")
    t, (raw, active), wanted = (
        unit.tensors(config.channels),
        unit.outputs(config.channels, torch.bfloat16),
        unit.made(config),
    )
    packed = unit.packed(config)
    before = (t["bias1"], t["frequency1"], t["gain1"], t["bias2"], 3)
    graph = captured(
        lambda: codec_cuda.unit(
            t["a"], 0, t["x"], packed, *before, raw, active, 0, t["frequency2"], t["gain2"]
        )
    )
    assert raw is not None and active is not None  # noqa: PT018
    raw.zero_()
    active.zero_()
    graph.replay()
    for found, exact in zip((raw, active), wanted):
        assert exact is not None
        assert torch.equal(found, exact)
