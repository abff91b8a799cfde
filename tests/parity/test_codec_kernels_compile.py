"""Triton kernels of the codec's convolution stack without a GPU: for rows that end they compile for sm_90
as well as for whole ones."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs

from kernels import codec_launch, codec_triton
from kernels.codec_launch import HEAD_TAPS, TILES, Shape
from tests.parity.test_kernels_compile import BF16, F32, I32, compiled

INTS = dict.fromkeys(("stride", "rows", "steps", "lead"), I32)
RESULTS = dict.fromkeys(("residual", "raw", "active"), BF16) | {"ends": "*i32"}


def boxes(*sizes: int) -> str:
    return f"tensordesc<bf16[{', '.join(map(str, sizes))}]>"


def conv(shape: Shape) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    tile, narrow = TILES[shape], shape.taps == 1
    inputs = {"a": boxes(1, tile.rows, tile.depth), "w": boxes(tile.depth, tile.columns)}
    types = inputs | dict.fromkeys(("bias", "frequency", "gain"), F32) | RESULTS | INTS
    asked = {name: None for name, there in (("residual", narrow), ("raw", shape.taps < 7)) if not there}
    sizes = {"DILATION": 1, "TAPS": shape.taps, "C": shape.channels, "N": shape.columns, "GROUP": 8}
    cut = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages}
    return codec_triton.conv_kernel, types, asked | sizes | cut, tile.warps


def unit(shape: Shape) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    tile, (large, small) = TILES[shape], codec_launch.split(shape.channels)
    inputs = {"a": boxes(1, tile.rows, tile.depth)}
    inputs |= {"w0": boxes(tile.depth, large), "w1": boxes(tile.depth, small)}
    parameters = [f"{name}{number}" for name in ("bias", "frequency", "gain") for number in (1, 2)]
    types = inputs | dict.fromkeys(parameters, F32) | {"w2": BF16} | RESULTS | INTS
    sizes = {"DILATION": 3, "TAPS": shape.taps, "C": shape.channels, "N0": large, "N1": small}
    return (
        codec_triton.unit_kernel,
        types,
        sizes | {"BM": tile.rows, "BK": tile.depth, "STAGES": tile.stages},
        tile.warps,
    )


def spilled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, folder: Path) -> int:
    """Bytes of registers that a kernel stores and loads."""
    text = folder / "kernel.ptx"
    text.write_text(compiled(kernel, types, constants, warps).asm["ptx"])
    command = [
        knobs.nvidia.ptxas.path,
        "-v",
        "--gpu-name=sm_90a",
        str(text),
        "-o",
        str(folder / "kernel.cubin"),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    counts = re.findall(r"(\d+) bytes spill", said)
    assert counts, said
    return sum(map(int, counts))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "shape",
    [
        Shape("conv", 1024, 1536, 7),
        Shape("conv", 768, 768, 1),
        Shape("conv", 192, 288, 2),
        Shape("unit", 192, 192, 7),
        Shape("unit", 96, 96, 7),
    ],
    ids=lambda shape: f"{shape.kind}-{shape.channels}-{shape.columns}-{shape.taps}",
)
def test_open_ends_spill_no_more_than_whole_rows(shape: Shape, tmp_path: Path) -> None:
    kernel, types, constants, warps = (unit if shape.kind == "unit" else conv)(shape)
    constants |= {"TMA": True, "FAST": True}
    whole = spilled(kernel, types, constants | {"ends": None, "OPEN": False}, warps, tmp_path)
    assert spilled(kernel, types, constants | {"OPEN": True}, warps, tmp_path) <= whole
    assert not whole or shape.taps == 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("left_out", [{}, {"ends": None}], ids=["ends", "whole"])
def test_the_head_spills_nothing(left_out: dict[str, None], tmp_path: Path) -> None:
    types = {
        "a": BF16,
        "w": BF16,
        "products": F32,
        "bias": F32,
        "out": F32,
        "ends": "*i32",
        "count": I32,
        "steps": I32,
        "lead": I32,
    }
    products = {"TAPS": 7, "C": 96, "BM": 128, "BK": 32, "ROOM": HEAD_TAPS, "FAST": True}
    sums = {"TAPS": 7, "ROOM": HEAD_TAPS, "BLOCK": 512}
    assert spilled(codec_triton.head_products_kernel, types, products | left_out, 4, tmp_path) == 0
    assert spilled(codec_triton.head_sum_kernel, types, sums | left_out, 4, tmp_path) == 0
