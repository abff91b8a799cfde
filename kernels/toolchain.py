"""What makes kernels on this machine: nvcc for CUDA C++; Triton, and the C compiler that it calls. Imports neither torch nor Triton."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec

NVCC_ADVICE = "Install the CUDA toolkit (nvcc) and gcc, or set CUDA_HOME."
TRITON_ADVICE = "Install triton, gcc and Python's headers (Debian: apt-get install gcc python3-dev), or set CC; then run `nightjar doctor`."


def nvcc() -> str | None:
    """Path of NVIDIA's compiler, or None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def c_compiler() -> str | None:
    """Path of the C compiler that Triton calls (CC, clang or gcc), or None where there is none."""
    return shutil.which(os.environ.get("CC") or "clang") or (None if os.environ.get("CC") else shutil.which("gcc"))


@cache
def triton_fault() -> str | None:
    """Why Triton makes no kernels for the current CUDA device, as a sentence; None where a small kernel is made and runs."""
    if find_spec("triton") is None:
        return "Triton is not installed."
    try:
        import_module("kernels.probe_triton").check()
    except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises is the answer
        return f"Triton cannot make kernels here ({first_line(error)})."
    return None


def first_line(error: BaseException) -> str:
    """What an error says, cut to its first line."""
    words = str(error).strip().partition("\n")[0].rstrip(".")
    return words or type(error).__name__
