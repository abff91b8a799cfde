"""Triton kernels of the codec's front without a GPU: they compile for sm_90 without spills and with copies
of a tile that no product in flight reads.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import codec_front_triton as front
from kernels.codec_front_triton import KEYS, PRODUCT, PRODUCT_SWIGLU, SCALED, STEPS
from kernels.codec_launch import HEAD_TAPS, Tile
from kernels.codec_triton import head_sum_kernel

#: Bytes of shared memory that a block may have.
SHARED = 227 << 10
BF16, F32, I32 = "*bf16", "*fp32", "i32"
ATTENTION = {
    "qkv": BF16,
    "past": BF16,
    "kept": BF16,
    "positions": "*i64",
    "cosine": F32,
    "sine": F32,
    "out": BF16,
}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {}


def product(name: str, depth: int, columns: int, tile: Tile, **chosen: bool) -> None:
    types = {"x": BF16, "scales": F32, "w": BF16, "bias": F32, "residual": BF16, "out": BF16, "rows": I32}
    given = {"K": depth, "N": columns, "GATED": False, "CURVED": False, "GROUP": 8, "FAST": True}
    sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "STAGES": tile.stages}
    pointers = ("scales", "bias", "residual")
    kinds = {key.upper(): value for key, value in chosen.items() if key not in pointers}
    left_out = {key: None for key in pointers if not chosen.get(key)}
    CASES[name] = front.product_kernel, types, given | sizes | kinds | left_out, tile.warps


def attention(name: str, queries: int, *left_out: str) -> None:
    types = (
        ATTENTION
        | dict.fromkeys(("steps", "past_stride", "kept_stride", "table_stride"), I32)
        | {"scale": "fp32"}
    )
    sizes = {"HEADS": 16, "KV_HEADS": 16, "H": 32, "EARLIER": 71, "BM": queries, "BK": KEYS, "FAST": True}
    CASES[name] = front.window_kernel, types, sizes | dict.fromkeys(left_out), 4


product("qkv", 512, 3072, PRODUCT, scales=True)
product("out", 1024, 512, PRODUCT, residual=True)
product("gate and up", 512, 1024, PRODUCT_SWIGLU, scales=True, gated=True)
product("exit", 512, 2048, PRODUCT, scales=True, bias=True)
product("wide", 1024, 4096, PRODUCT, curved=True, bias=True)
product("narrow", 4096, 1024, PRODUCT, bias=True, residual=True)
attention("chunk of 16 frames", 16)
attention("long chunk", 64)
attention("whole utterance", 64, "past", "kept", "positions")
CASES["scales"] = (
    front.scales_kernel,
    {"x": BF16, "out": F32, "rows": I32, "eps": "fp32"},
    {"K": 512, "BM": SCALED, "BK": 512},
    4,
)
CASES["depthwise"] = (
    front.depthwise_norm_kernel,
    {
        "x": BF16,
        "history": BF16,
        "weight": F32,
        "bias": F32,
        "out": BF16,
        "steps": I32,
        "history_stride": I32,
        "eps": "fp32",
    },
    {"TAPS": 7, "C": 1024, "BM": STEPS, "BC": 1024},
    4,
)


#: Those whose loop is nothing but products of tiles.
TILED = ("qkv", "out", "gate and up", "exit", "wide", "narrow")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    arguments = kernel.arg_names
    signature = {
        argument: "constexpr" if argument in constants else types[argument] for argument in arguments
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, argument in enumerate(arguments)
        if signature[argument].startswith("*")
    }
    source = ASTSource(
        kernel, signature, {(arguments.index(key),): value for key, value in constants.items()}, aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def overwritten(ttgir: str) -> list[str]:
    """Tiles in shared memory that are copied anew in a pipelined loop while a product that is not waited
    for may read them.

    A tile has as many copies as its allocation says; the copy that a loop fills is as many turns ahead as
    were filled before the loop. The products of a turn are in flight until the next turn's
    `warp_group_dot_wait`, where that leaves any pending.
    """
    copies = {
        name: int(count)
        for name, count in re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir)
    }
    tile_of = {name: name for name in copies}
    for name, source in re.findall(r"(%\S+) = ttg\.memdesc_(?:index|trans|subslice) (%[^\s\[{]+)", ttgir):
        tile_of[name] = tile_of.get(source, source)
    before, *loops = re.split(r"\n[^\n]*scf\.for ", ttgir)
    filled = re.compile(r"async_copy_global_to_local %\S+, (%[^\s,]+)")
    found: list[str] = []
    for loop in loops:
        body = loop.partition("scf.yield")[0]
        ahead = Counter(tile_of[place] for place in filled.findall(before))
        pending = [int(count) for count in re.findall(r"warp_group_dot_wait [^\n]*pendings = (\d+)", body)]
        read: dict[str, int] = {}
        for dot in re.finditer(r"warp_group_dot (%[^\s,]+), (%[^\s,]+), [^\n]*isAsync = true", body):
            read |= {tile_of.get(operand, operand): dot.start() for operand in dot.groups()}
        for copy in filled.finditer(body):
            tile = tile_of[copy[1]]
            turns = ahead[tile] + (copy.start() < read.get(tile, 0))
            if tile in read and pending and min(pending) and turns % copies[tile] == 0:
                found.append(f"{tile}: {copies[tile]} copies, filled {ahead[tile]} turns ahead")
        before = loop
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", list(CASES))
def test_it_fits_sm_90_without_spills(name: str, tmp_path: Path) -> None:
    built = compiled(*CASES[name])
    assert built.metadata.shared <= SHARED
    text = tmp_path / "kernel.ptx"
    text.write_text(built.asm["ptx"])
    command = [
        knobs.nvidia.ptxas.path,
        "-v",
        "--gpu-name=sm_90a",
        str(text),
        "-o",
        str(tmp_path / "kernel.cubin"),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert spilled, said
    assert not any(spilled), said


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", list(CASES))
def test_no_tile_is_overwritten_that_a_product_in_flight_reads(name: str) -> None:
    built = compiled(*CASES[name])
    assert overwritten(built.asm["ttgir"]) == []
    assert name not in TILED or "isAsync = true" in built.asm["ttgir"], "its products run beside the copies"


@triton.jit
def summed_too_kernel(x, w, out, sums, depth: tl.constexpr, size: tl.constexpr):
    """A tile that is read in the loop beside its products."""
    at = tl.arange(0, size)
    total = tl.zeros((size, size), dtype=tl.float32)
    sum_ = tl.zeros((size,), dtype=tl.float32)
    for k in tl.range(0, depth, size, num_stages=3):
        piece = tl.load(x + at[:, None] * depth + k + at[None, :])
        total = tl.dot(piece, tl.load(w + (k + at[:, None]) * size + at[None, :]), total)
        sum_ += tl.sum(piece.to(tl.float32), axis=1)
    tl.store(out + at[:, None] * size + at[None, :], total)
    tl.store(sums + at, sum_)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_a_tile_that_is_overwritten_too_early_is_found() -> None:
    """By the Triton that the lock file names; one that keeps enough copies lets a norm be computed in the
    loop."""
    types = {"x": BF16, "w": BF16, "out": F32, "sums": F32}
    assert (
        len(overwritten(compiled(summed_too_kernel, types, {"depth": 512, "size": 64}, 4).asm["ttgir"])) == 1
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_samples_that_are_no_numbers_pass_the_last_clamp() -> None:
    """The interpreter's clamp always lets them pass; a GPU's plain one makes -1 of them."""
    types = {"products": F32, "bias": F32, "out": F32, "steps": I32, "lead": I32}
    text = compiled(
        head_sum_kernel, types, {"ends": None, "TAPS": 7, "ROOM": HEAD_TAPS, "BLOCK": 512}, 4
    ).asm["ptx"]
    assert "max.NaN.f32" in text
    assert "min.NaN.f32" in text
    assert not re.search(r"(max|min)[.]f32", text)
