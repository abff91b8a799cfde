"""Finds the compilers of kernels on this machine: CUDA's, Triton, and the C compiler that Triton calls.
Imports neither torch nor Triton."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

CUDA_ADVICE = "Install nvidia-cuda-nvrtc with pip, or the CUDA toolkit (nvcc) and gcc, or set CUDA_HOME."
TRITON_ADVICE = "Install triton, gcc and Python's headers (Debian: apt-get install gcc python3-dev), or set CC; then run `nightjar doctor`."
_FLAGS = ("-std=c++17",)


def _cuda_home() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


def nvcc() -> str | None:
    """Path of NVIDIA's compiler, or None if there is none."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(_cuda_home() / "bin"))


def nvrtc() -> Path | None:
    """The library of NVIDIA's runtime compiler, which torch's builds for CUDA include, or None if there is
    none."""
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    found: Iterable[Path] = (
        file for folder in folders for file in sorted(folder.glob("*/lib/libnvrtc.so.*"))
    )
    toolkit = sorted((_cuda_home() / "lib64").glob("libnvrtc.so.*"))
    return next((file for file in (*found, *toolkit) if ".alt." not in file.name), None)


def cuda_compiler() -> str | None:
    """Path of a compiler of CUDA C++, or None if there is none."""
    return nvcc() or (str(library) if (library := nvrtc()) is not None else None)


def compile_cuda(source: Path, headers: Mapping[str, str], target: str) -> bytes:
    """Machine code of a source for a `target` such as sm_90a, or PTX for one such as compute_90.

    Uses nvcc, or else the runtime compiler, which needs no C compiler. The source may include only `headers`
    (name -> text). Raises RuntimeError with the message of each compiler if all fail.
    """
    faults = list[str]()
    for compiler, run in ((nvcc(), _with_nvcc), (nvrtc(), _with_nvrtc)):
        if compiler is None:
            continue
        try:
            return run(str(compiler), source, headers, target)
        except (RuntimeError, OSError, AttributeError) as error:
            faults.append(str(error))
    raise RuntimeError("; ".join(faults) or "neither nvcc nor nvrtc was found")


def _with_nvcc(program: str, source: Path, headers: Mapping[str, str], target: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            (Path(folder) / name).write_text(text)
        out = Path(folder) / "out"
        kind = "-ptx" if target.startswith("compute_") else "-cubin"
        command = [
            program,
            kind,
            f"-arch={target}",
            *_FLAGS,
            "-O3",
            "-I",
            folder,
            "-o",
            str(out),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"nvcc failed on {source.name}: {done.stderr.strip()[-2000:]}")
        return out.read_bytes()


def _with_nvrtc(library: str, source: Path, headers: Mapping[str, str], target: str) -> bytes:
    # The compiler looks for the library of its built-in functions by file name only, so it is loaded first.
    for part in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):
        if ".alt." not in part.name:
            ctypes.CDLL(str(part))
    nvrtc_library = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    texts, names = (_strings(list(words)) for words in (headers.values(), headers))
    text = source.read_text().encode()
    name = source.name.encode()
    code = nvrtc_library.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), texts, names)
    if code != 0:
        raise RuntimeError(f"nvrtc refused {source.name}: error {code}")
    try:
        options = _strings([f"--gpu-architecture={target}", *_FLAGS])
        if code := nvrtc_library.nvrtcCompileProgram(program, len(options), options):
            message = _result(nvrtc_library, "ProgramLog", program).decode(errors="replace").strip("\0\n ")
            raise RuntimeError(f"nvrtc failed on {source.name}: error {code}, {message[-2000:]}")
        return _result(nvrtc_library, "PTX" if target.startswith("compute_") else "CUBIN", program)
    finally:
        nvrtc_library.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(words: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(words))(*[word.encode() for word in words])


def _result(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    library[f"nvrtcGet{what}Size"](program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    library[f"nvrtcGet{what}"](program, content)
    return content.raw


def c_compiler() -> str | None:
    """Path of the C compiler that Triton calls (CC, clang or gcc), or None if there is none."""
    return shutil.which(os.environ.get("CC") or "clang") or (
        None if os.environ.get("CC") else shutil.which("gcc")
    )


@cache
def triton_fault() -> str | None:
    """Why Triton cannot compile kernels for the current CUDA device, as a sentence; None if a small kernel
    compiles and runs."""
    if find_spec("triton") is None:
        return "Triton is not installed."
    try:
        import_module("kernels.triton_launch").check()
    except Exception as error:  # noqa: BLE001 - any error of a compiler or a driver is the answer
        return f"Triton cannot compile kernels here ({first_line(error)})."
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
