"""On a CUDA device: what happens where a compiler is missing, in processes with empty caches; and code of
every compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels import binaries, lm_cuda, toolchain
from kernels.cuda_driver import Source
from tests.support import lm_checks
from tests.support.lm_tensors import Maker

pytestmark = pytest.mark.gpu

OPEN = """
import logging, sys, torch
from kernels import binaries, toolchain
read = binaries._read
binaries._read = lambda path: None if path.parent == binaries.SOURCES else read(path)  # a wheel may have brought code
if sys.argv[1] == "no nvrtc":
    toolchain.nvrtc = lambda: None
from benchmarks.checkpoint import dummy_model
from pipelines.engine.core import EngineOptions
from pipelines.codec.fused import codec_kernels
from pipelines.engine.opening import open_executor
logging.basicConfig(format="%(levelname)s %(message)s")
model = dummy_model("0b6", torch.device("cuda"), torch.bfloat16)
print(open_executor(model, EngineOptions(2, 16, 64, 256, persistent=False)).name, codec_kernels())
"""


def opened(tmp_path: Path, *hidden: str, nvrtc: bool = True) -> subprocess.CompletedProcess[str]:
    """Opens a model where the programs `hidden` cannot be found."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in [*os.environ["PATH"].split(":"), "/usr/local/cuda/bin"]:
        for program in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if not program.name.startswith(hidden) and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name != "CC"}
    empty = {
        "PATH": str(programs),
        "CUDA_HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "t"),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", OPEN, "nvrtc" if nvrtc else "no nvrtc"]
    done = subprocess.run(command, env=kept | empty, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_without_a_c_compiler_frames_are_eager_and_both_warnings_say_it(tmp_path: Path) -> None:
    done = opened(tmp_path, "gcc", "cc", "clang", "g++", "c++", "x86_64-linux-gnu-gcc")
    assert done.stdout.split() == ["eager", "False"]
    assert "C compiler" in done.stderr
    assert "eager executor" in done.stderr
    assert "Codecs run as single PyTorch ops" in done.stderr


def test_without_a_cuda_compiler_graphs_run_on_tritons_kernels_with_a_warning(tmp_path: Path) -> None:
    done = opened(tmp_path, "nvcc", nvrtc=False)
    assert done.stdout.split() == ["graph", "True"]
    assert done.stderr.count("neither nvcc nor nvrtc was found") >= 1
    assert "Triton's kernels, which are slower" in done.stderr


def test_the_runtime_compiler_is_enough_and_what_it_made_is_kept(tmp_path: Path) -> None:
    done = opened(tmp_path, "nvcc")
    assert done.stdout.split() == ["graph", "True"]
    assert "cannot be loaded" not in done.stderr
    kept = {path.name.partition("-sm_")[0] for path in (tmp_path / "nightjar").glob("*-sm_*.cubin")}
    assert (
        {source.name for source in lm_cuda.SOURCES} <= kept <= {name for name, _ in binaries.shipped_code()}
    )


@pytest.mark.parametrize("compiler", ["nvcc", "nvrtc"])
@pytest.mark.parametrize("ptx", [False, True])
def test_code_of_every_compiler_runs(compiler: str, ptx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "nvrtc" if compiler == "nvcc" else "nvcc"
    monkeypatch.setattr(toolchain, other, lambda: None)
    target = binaries.NEWER if ptx else binaries.target_for(torch.cuda.get_device_capability())
    monkeypatch.setattr(binaries, "candidates", lambda name, _: iter([binaries.compiled(name, target)]))
    Source.on.cache_clear()
    try:
        maker = Maker("cuda", torch.bfloat16, seed=1)
        with torch.inference_mode():
            assert lm_checks.check_skinny(maker)
            assert lm_checks.check_draw(maker)
    finally:
        Source.on.cache_clear()
