"""Builds and calls the CUDA C++ kernels of `kernels/cuda`: compiled once with nvcc for the device at hand, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import toolchain

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cuda"
#: The files of `kernels/cuda` that are compiled, by name.
LIBRARIES = ("skinny", "predictor_attention", "sampler")
PLAIN, RESIDUAL, SWIGLU, BIAS = range(4)
#: (inner size, has norm, epilogue) that the skinny kernel was instantiated for.
_SHAPES = {
    (1024, True, PLAIN),
    (1024, False, PLAIN),
    (1024, False, SWIGLU),
    (1024, True, SWIGLU),
    (2048, True, PLAIN),
    (2048, True, SWIGLU),
    (2048, False, RESIDUAL),
    (2048, False, BIAS),
    (3072, False, RESIDUAL),
    (6144, False, RESIDUAL),
}


def build(name: str, capability: tuple[int, int]) -> Path:
    """Compiles `kernels/cuda/<name>.cu` for one compute capability unless the cache holds it; returns the shared library.

    Raises RuntimeError with the compiler's words when it fails.
    """
    source = SOURCES / f"{name}.cu"
    target = f"{capability[0]}{capability[1]}" + ("a" if capability[0] == 9 else "")
    parts = [path.read_bytes() for path in (source, *sorted(SOURCES.glob("*.cuh")))]
    digest = hashlib.sha256(b"".join(parts) + target.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nightjar"
    library = folder / f"{name}-{target}-{digest}.so"
    if library.exists():
        return library
    nvcc = toolchain.nvcc()
    if nvcc is None:
        raise RuntimeError("nvcc was not found")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}.tmp")
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
    architecture = f"-gencode=arch=compute_{target},code=sm_{target}"
    done = subprocess.run([nvcc, architecture, *flags, "-o", str(unfinished), str(source)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed on {source.name}: {done.stderr.strip()[-2000:]}")
    unfinished.replace(library)
    return library


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(name, torch.cuda.get_device_capability())))


@cache
def available() -> bool:
    """Whether the CUDA C++ kernels can run here: on an sm_90 or newer device, for which the cache holds them or nvcc compiles them.

    Where nvcc is missing or fails on a device that could run them, one warning says so.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return False
    try:
        for name in LIBRARIES:
            _library(name)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels cannot be made (%s); batches of few requests run on Triton's kernels, which are slower. %s",
            toolchain.first_line(error), toolchain.NVCC_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def has_skinny(inner: int, normed: bool, epilogue: int) -> bool:
    """Whether the skinny kernel knows this shape."""
    return (inner, normed, epilogue) in _SHAPES


def _call(library: str, function: str, what: str, *arguments: object) -> None:
    code = getattr(_library(library), function)(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    if code != 0:
        raise RuntimeError(f"{what} was refused: CUDA error {code}.")


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def skinny(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    normed: Tensor | None = None,
    ahead: Tensor | None = None,
    late: bool = True,
    pdl: bool = True,
) -> Tensor:
    """y = epilogue(norm(x) @ weight.T) for few rows, bfloat16, launched on the current stream.

    x: [rows, inner]; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y: [rows, n]; norm: [inner], RMSNorm of
    x in the order of the reference; extra: what RESIDUAL adds, [rows, n] (may be y), or BIAS, [n]; normed: [rows, inner] to keep
    norm(x); ahead: a weight that a later launch reads, brought into the L2 meanwhile; late: the next kernel may start once the
    activations are here, not before; pdl: programmatic dependent launch.
    A row's bits do not depend on its neighbours, and on `rows` only by whether they are more than 8.
    Raises RuntimeError for a shape that has no kernel.
    """
    rows, inner = x.shape
    sizes = [ctypes.c_int(size) for size in (rows, y.shape[1], inner, x.stride(0), y.stride(0), late)]
    pointers = [_pointer(tensor) for tensor in (x, weight, norm, extra, y, normed, ahead)]
    bytes_ahead = ctypes.c_longlong(0 if ahead is None else ahead.numel() * ahead.element_size())
    what = f"The skinny product rows={rows}, n={y.shape[1]}, inner={inner}, epilogue={epilogue}"
    _call("skinny", "nightjar_skinny", what, *pointers, bytes_ahead, *sizes, ctypes.c_float(eps), ctypes.c_int(epilogue), ctypes.c_int(pdl))
    return y


def has_predictor_attention(heads: int, kv_heads: int, span: int, head_dim: int) -> bool:
    """Whether the predictor's attention kernel knows these sizes."""
    return heads == 2 * kv_heads and span == 16 and head_dim == 128


def predictor_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope_table: Tensor, k_cache: Tensor, v_cache: Tensor, position: int,
    scale: float, out: Tensor, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.lm_triton.predictor_attention` for one token a row at `position` 1..15: bfloat16, heads of 128, pairs of query heads."""
    tensors = (qkv, q_weight, k_weight, rope_table, k_cache, v_cache, out)
    sizes = (qkv.shape[0], k_cache.shape[1], position)
    _call(
        "predictor_attention", "nightjar_predictor_attention", f"Predictor attention at position {position}",
        *[_pointer(tensor) for tensor in tensors], *[ctypes.c_int(size) for size in sizes], ctypes.c_float(eps), ctypes.c_float(scale),
        ctypes.c_int(pdl),
    )  # fmt: skip
    return out


def has_draw(vocab: int, width: int, hidden: int) -> bool:
    """Whether the sampler kernel knows these sizes."""
    return vocab % 256 == 0 and vocab <= 4096 and width % 8 == 0 and hidden % 8 == 0


def draw(pointers: Sequence[Tensor], numbers: Sequence[int], stage: int, pdl: bool = True) -> None:
    """One launch of `kernels/cuda/sampler.cu`; the order of pointers and numbers stands there."""
    packed = (ctypes.c_void_p * len(pointers))(*[tensor.data_ptr() for tensor in pointers])
    counts = (ctypes.c_longlong * len(numbers))(*numbers)
    _call("sampler", "nightjar_draw", "The sampler's launch", packed, counts, ctypes.c_int(stage), ctypes.c_int(pdl))
