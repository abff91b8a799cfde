"""Kernels of the codec without a GPU: the front's equal their twins in Triton's interpreter and compile for sm_90 without spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import codec_front_triton as front
from kernels.codec_front_triton import KEYS, PRODUCT, PRODUCT_SWIGLU, STEPS, ProductTile
from kernels.codec_launch import HEAD_TAPS
from kernels.codec_triton import head_sum_kernel

#: Bytes of shared memory that a block may have.
SHARED = 227 << 10
BF16, F32, I32 = "*bf16", "*fp32", "i32"
ATTENTION = {"qkv": BF16, "past": BF16, "kept": BF16, "positions": "*i64", "cosine": F32, "sine": F32, "out": BF16}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {}


def product(name: str, depth: int, columns: int, tile: ProductTile, **chosen: bool) -> None:
    types = {"x": BF16, "w": BF16, "bias": F32, "residual": BF16, "out": BF16, "rows": I32, "eps": "fp32"}
    given = {"K": depth, "N": columns, "NORM": False, "GATED": False, "CURVED": False, "GROUP": 8, "FAST": True}
    sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages}
    kinds = {key.upper(): value for key, value in chosen.items() if key not in ("bias", "residual")}
    left_out = {key: None for key in ("bias", "residual") if not chosen.get(key)}
    CASES[name] = front.product_kernel, types, given | sizes | kinds | left_out, tile.warps


def attention(name: str, queries: int, *left_out: str) -> None:
    types = ATTENTION | dict.fromkeys(("steps", "past_stride", "kept_stride", "table_stride"), I32) | {"scale": "fp32"}
    sizes = {"HEADS": 16, "KV_HEADS": 16, "H": 32, "EARLIER": 71, "BM": queries, "BK": KEYS, "FAST": True}
    CASES[name] = front.window_kernel, types, sizes | dict.fromkeys(left_out), 4


product("qkv", 512, 3072, PRODUCT, norm=True)
product("out", 1024, 512, PRODUCT, residual=True)
product("gate and up", 512, 1024, PRODUCT_SWIGLU, norm=True, gated=True)
product("exit", 512, 2048, PRODUCT, norm=True, bias=True)
product("wide", 1024, 4096, PRODUCT, curved=True, bias=True)
product("narrow", 4096, 1024, PRODUCT, bias=True, residual=True)
attention("chunk of 16 frames", 16)
attention("long chunk", 64)
attention("whole utterance", 64, "past", "kept", "positions")
CASES["depthwise"] = (
    front.depthwise_norm_kernel,
    {"x": BF16, "history": BF16, "weight": F32, "bias": F32, "out": BF16, "steps": I32, "history_stride": I32, "eps": "fp32"},
    {"TAPS": 7, "C": 1024, "BM": STEPS, "BC": 1024},
    4,
)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    arguments = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else types[argument] for argument in arguments}
    aligned = {(at,): [["tt.divisibility", 16]] for at, argument in enumerate(arguments) if signature[argument].startswith("*")}
    source = ASTSource(kernel, signature, {(arguments.index(key),): value for key, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", list(CASES))
def test_it_fits_sm_90_without_spills(name: str, tmp_path: Path) -> None:
    built = compiled(*CASES[name])
    assert built.metadata.shared <= SHARED
    text = tmp_path / "kernel.ptx"
    text.write_text(built.asm["ptx"])
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(text), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert spilled, said
    assert not any(spilled), said


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_samples_that_are_no_numbers_pass_the_last_clamp() -> None:
    """The interpreter's clamp always lets them pass; a GPU's plain one makes -1 of them."""
    types = {"products": F32, "bias": F32, "out": F32, "steps": I32, "lead": I32}
    text = compiled(head_sum_kernel, types, {"TAPS": 7, "ROOM": HEAD_TAPS, "BLOCK": 512}, 4).asm["ptx"]
    assert "max.NaN.f32" in text
    assert "min.NaN.f32" in text
    assert not re.search(r"(max|min)[.]f32", text)


def test_the_kernels_equal_their_twins_in_the_interpreter() -> None:
    """Only a fresh process can be put into the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "tests/gpu/test_codec_front_kernels.py", "-p", "no:cacheprovider"]
    found = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "17 passed" in found.stdout
