"""The Triton draw compiled for sm_90 without a GPU: `python -m tests.support.draw_code [--only NAME]`.

For each draw of the published sizes: warps, registers and spills of a thread, shared memory, and a digest
of the PTX, which tells whether a change has changed the code of a draw.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Lines of the source would be in the PTX.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import lm_sampler
from kernels.lm_cuda import FIRST, LAST, MIDDLE, ONLY
from kernels.lm_frame import FusedFrame, plan_for
from tests.support.lm_tensors import FISH, SPARK, Maker, Shape

ROWS = 128
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1"
}  # fmt: skip
#: The stages of a frame of each model; one layer of each stack is enough.
MODELS: dict[str, tuple[Shape, tuple[int, ...]]] = {
    "qwen3-tts-0.6b": (Shape(layers=1, predictor_layers=1), (FIRST, MIDDLE, LAST)),
    "qwen3-tts-1.7b": (Shape(hidden=2048, inter=6144, layers=1, predictor_layers=1), (FIRST, MIDDLE, LAST)),
    "spark": (replace(SPARK, layers=1), (ONLY,)),
    "fish": (replace(FISH, layers=1, predictor_layers=1), (FIRST, MIDDLE, LAST)),
}


@dataclass(frozen=True)
class Compiled:
    """A draw as it would run."""

    name: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str


class _Launches:
    """Stands in for the kernel, and compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *values: Any, num_warps: int, **options: Any) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        aligned: dict[tuple[int], Any] = {}
        for at, (parameter, value) in enumerate(zip(self._kernel.params, values, strict=True)):
            if isinstance(value, Tensor):
                signature[parameter.name], aligned[at,] = _POINTERS[value.dtype], [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None:
                signature[parameter.name], constants[at,] = "constexpr", value
            else:
                signature[parameter.name] = "i32"
        source = ASTSource(self._kernel, signature, constants, aligned)
        self.compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, **options}
        )


def compile_draws(model: str) -> list[Compiled]:
    """Every draw of a frame of this model."""
    shape, stages = MODELS[model]
    maker = Maker("cpu", torch.bfloat16, seed=1)
    k, v = maker.caches(shape, 2, 16)
    state = maker.state(shape, ROWS, 5 * ROWS + 1, 16, maker.integers(0, 9, ROWS))
    frame = FusedFrame(maker.frame(shape), state, k, v, ROWS, plan_for(ROWS))
    rows, flags = torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.uint8)
    codes = torch.zeros(ROWS, shape.codebooks, dtype=torch.int64)
    kernel = lm_sampler.draw_code
    found: list[Compiled] = []
    for stage in stages:
        vocab = shape.vocab if stage in (FIRST, ONLY) else shape.codes
        with patch.object(lm_sampler, "draw_code", _Launches(kernel)) as launches:
            frame.draw_codebook(stage, 0, torch.zeros(ROWS, vocab, dtype=torch.bfloat16), rows, codes, flags)
        found.append(_measure(f"{model} {('first', 'middle', 'last', 'only')[stage]}", launches.compiled))
    return found


def _measure(name: str, compiled: Any) -> Compiled:
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "draw.ptx"
        source.write_text(ptx)
        command = [
            str(PTXAS),
            "-v",
            "--gpu-name=sm_90a",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, *spills = (
        int(re.findall(pattern, said)[0])
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    digest = hashlib.sha256(ptx.encode()).hexdigest()[:16]
    return Compiled(name, compiled.metadata.num_warps, registers, spills[0], compiled.metadata.shared, digest)


def main() -> None:
    """Prints a table, and with `--json` a line of JSON for each draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=MODELS, help="the draws of one model")
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of a table")
    options = parser.parse_args()
    for model in [options.only] if options.only else MODELS:
        for one in compile_draws(model):
            if options.json:
                print(json.dumps(vars(one)))
            else:
                used = f"{one.warps:2d} warps, {one.registers:3d} registers, {one.spill_bytes:3d} bytes spilled, {one.shared_bytes} shared"
                print(f"{one.name:22s} {used}, PTX {one.ptx}", flush=True)


if __name__ == "__main__":
    main()
