"""SwiGLU of many rows in CUDA C++ (`kernels/cuda/wide_products.cu`): how it is cut, and its launch.

It needs a Hopper GPU. Rounding points are those of `torch.mm` and of `kernels.lm_triton.swiglu` behind it.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from kernels import binaries, cuda_driver, toolchain
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

SOURCE, NAME = "wide_products", "wide_swiglu"
#: Rows of x in a tile, outputs of one, and values of the inner size in a stage.
ROWS, OUTPUTS, PIECE = 128, 96, 64
#: cuBLAS is faster for so many rows and fewer, whatever the tiles.
FEW = 256
#: The share of its turns that a device has to have tiles for: a launch takes a whole turn's time where the last one has few.
_FULL = 0.9
_THREADS, _STAGES = 288, 5
_CAPABILITY = (9, 0)
_MAP_BYTES = 128


def has_product(n: int, inner: int) -> bool:
    """Whether `n` outputs of `inner` values fall into tiles."""
    return n % OUTPUTS == 0 and inner % PIECE == 0


def turns(rows: int, n: int, processors: int) -> int:
    """Tiles that a block has, where each multiprocessor has one block."""
    return -(-_tiles(rows, n) // processors)


def grid(rows: int, n: int, processors: int) -> int:
    """Blocks, of which each has as many tiles as any other, or one fewer."""
    return -(-_tiles(rows, n) // turns(rows, n, processors))


def fills(rows: int, n: int, processors: int) -> bool:
    """Whether the kernel is worth its launch for `rows` rows of `n` outputs: more than `FEW` rows, and tiles that fill their turns."""
    return rows > FEW and _tiles(rows, n) >= _FULL * turns(rows, n, processors) * processors


def _tiles(rows: int, n: int) -> int:
    return -(-rows // ROWS) * (n // OUTPUTS)


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/wide_products.cu."""

    _fields_ = (
        ("maps", (ctypes.c_byte * _MAP_BYTES) * 2),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "n", "inner", "y_stride")),
        ("pad", ctypes.c_byte * 40),
    )


def shared_bytes() -> int:
    """`Block` of the source: stages with two barriers each, and alignment."""
    return _STAGES * ((ROWS + 2 * OUTPUTS) * PIECE * 2 + 16) + 1024


@cache
def _kernel(device: int) -> Kernel:
    """The kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {SOURCE}")
    for code in binaries.candidates(SOURCE, _CAPABILITY):
        try:
            return Module(code, device).kernel(NAME, shared_bytes(), all_shared=True)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def available(device: int) -> bool:
    """Whether a device has the kernel. Where only its code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        _kernel(device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernel for SwiGLU of many rows cannot be made (%s); large batches and many prompts at once are slower. %s",
            toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def serves(down: Tensor) -> bool:
    """Whether the kernel knows gate and up of a layer whose `down` is [inner, n], and their device."""
    known = down.is_cuda and down.dtype == torch.bfloat16 and has_product(down.shape[1], down.shape[0])
    return known and available(down.device.index or 0)


@cache
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _map(matrix: Tensor, rows: int) -> ctypes.Array[ctypes.c_byte]:
    """Of a contiguous matrix, whose boxes are 64 values of so many rows."""
    made = cuda_driver.tensor_map(matrix.data_ptr(), (matrix.shape[1], len(matrix), 1), (PIECE, rows, 1))
    return (ctypes.c_byte * _MAP_BYTES).from_buffer_copy(made)


def swiglu(x: Tensor, weight: Tensor, y: Tensor, *, pdl: bool = False) -> Tensor:
    """y = silu(x @ gate.T) * (x @ up.T), bfloat16, launched on the current stream of x's device.

    x: contiguous [rows, inner]; weight: contiguous [2 * n, inner], the gate's rows first; y: [rows, n]; pdl: the kernel may
    start while the one ahead still runs (programmatic dependent launch).
    A row has the same bits in any company. Raises ValueError for what the kernel cannot do.
    """
    (rows, inner), n, device = x.shape, y.shape[1], x.device.index or 0
    if not has_product(n, inner):
        raise ValueError(f"{n} outputs of {inner} values do not fall into tiles of {OUTPUTS} x {PIECE}.")
    if weight.shape != (2 * n, inner) or len(y) != rows:
        raise ValueError(f"{len(weight)} weight rows do not give {len(y)} rows of {n} outputs.")
    if not (weight.is_contiguous() and x.is_contiguous()) or any(t.data_ptr() % 16 for t in (x, weight)):
        raise ValueError("Activations and weights have to be contiguous and to start on multiples of 16 bytes.")
    if y.stride(1) != 1 or y.stride(0) % 4 or y.data_ptr() % 8:
        raise ValueError("Rows of outputs have to start on multiples of 8 bytes.")
    maps = ((ctypes.c_byte * _MAP_BYTES) * 2)(_map(weight, OUTPUTS), _map(x, ROWS))
    arguments = _Arguments(maps, y.data_ptr(), rows, n, inner, y.stride(0))
    _kernel(device).launch((grid(rows, n, processors(device)), 1), _THREADS, arguments, _stream(x.device), pdl)
    return y
