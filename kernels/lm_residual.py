"""Products of decoding for many rows that are added to a residual, in CUDA C++ (`kernels/cuda/residual_products.cu`): how each is cut, and
its launch.

They need a Hopper GPU. Rounding points are those of `torch.mm` and of `kernels.lm_triton.add_norm` behind it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from kernels import binaries, cuda_driver, toolchain
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

SOURCE = "residual_products"
#: Rows and outputs of a tile, and values of the inner size in a stage.
ROWS, OUTPUTS, PIECE = 128, 128, 64
#: Parts of the inner size, which are the blocks of a cluster. With fewer cuBLAS is as fast.
SPLITS = (4, 8)
#: Frames of more rows have too many tiles for a Hopper at every published width.
MANY = 384
#: The share of its clusters that a device may have tiles for: devices of one kind, which give the same bits, hold a few more or fewer.
_ROOM = 0.9
_THREADS, _STAGES = 288, 5
_CAPABILITY = (9, 0)
_MAP_BYTES = 128


def fault(n: int, inner: int, splits: int) -> str | None:
    """Why a product of `n` outputs of `inner` values cannot be cut so, or None."""
    if splits not in SPLITS:
        return f"a product has {' or '.join(map(str, SPLITS))} splits, not {splits}"
    if n % OUTPUTS or inner % (PIECE * splits):
        return f"{n} outputs of {inner} values do not fall into tiles of {OUTPUTS} x {PIECE * splits}"
    return None


#: Outputs of the widest products that were measured. Of wider ones the weights are so many that all multiprocessors have to read them, as
#: cuBLAS's do.
_WIDEST = 2048


def has_product(n: int, inner: int) -> bool:
    """Whether `n` outputs of `inner` values fall into tiles, and are not too many."""
    return n <= _WIDEST and fault(n, inner, min(SPLITS)) is None


def splits_for(rows: int, n: int, inner: int, clusters: Mapping[int, int]) -> int | None:
    """The most parts of which all tiles run at once; None where there are none, and cuBLAS is faster.

    clusters: how many a device holds at once, by parts (`clusters_of`).
    """
    tiles = -(-rows // ROWS) * (n // OUTPUTS)
    fitting = [splits for splits in SPLITS if fault(n, inner, splits) is None and tiles <= _ROOM * clusters[splits]]
    return max(fitting, default=None)


def kernel_name(splits: int) -> str:
    """The kernel of so many parts, as the source names it."""
    return f"residual_product_{splits}"


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/residual_products.cu."""

    _fields_ = (
        ("maps", (ctypes.c_byte * _MAP_BYTES) * 2),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "n", "inner", "x_stride")),
        ("pad", ctypes.c_byte * 40),
    )


def shared_bytes() -> int:
    """`Block` of the source: stages with two barriers each, the sums of a tile, and alignment."""
    return _STAGES * ((ROWS + OUTPUTS) * PIECE * 2 + 16) + ROWS * OUTPUTS * 4 + 1024


@cache
def _kernel(splits: int, device: int) -> Kernel:
    """A kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {SOURCE}")
    for code in binaries.candidates(SOURCE, _CAPABILITY):
        try:
            return Module(code, device).kernel(kernel_name(splits), shared_bytes(), all_shared=True)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def clusters_of(device: int) -> dict[int, int]:
    """How many clusters a device holds at once, by parts of the inner size."""
    return {splits: _kernel(splits, device).resident_clusters(_THREADS, splits) for splits in SPLITS}


@cache
def available(device: int) -> bool:
    """Whether a device has the kernels. Where only their code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        clusters_of(device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels for residual products of many rows cannot be made (%s); large batches are slower. %s",
            toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _map(matrix: Tensor, rows: int) -> ctypes.Array[ctypes.c_byte]:
    """Of a contiguous matrix, whose boxes are 64 values of so many rows."""
    made = cuda_driver.tensor_map(matrix.data_ptr(), (matrix.shape[1], len(matrix), 1), (PIECE, rows, 1))
    return (ctypes.c_byte * _MAP_BYTES).from_buffer_copy(made)


def add_product(x: Tensor, a: Tensor, weight: Tensor, splits: int, *, pdl: bool = False) -> Tensor:
    """x += a @ weight.T, bfloat16, launched on the current stream of x's device.

    x: [rows, n], its rows on multiples of 16 bytes; a: contiguous [rows, inner]; weight: contiguous [n, inner]; splits: parts of the inner
    size; pdl: the kernel may start while the one ahead still runs (programmatic dependent launch). The kernel behind may start early.
    With the same splits a row has the same bits in any company. Raises ValueError for what the kernel cannot do.
    """
    (rows, inner), n = a.shape, x.shape[1]
    if (reason := fault(n, inner, splits)) is not None:
        raise ValueError(f"There is no such product: {reason}.")
    if weight.shape != (n, inner) or len(x) != rows:
        raise ValueError(f"{len(weight)} weight rows do not give {len(x)} rows of {n} outputs.")
    if not (weight.is_contiguous() and a.is_contiguous()):
        raise ValueError("Activations and weights have to be contiguous.")
    if x.stride(1) != 1 or x.stride(0) % 8 or any(t.data_ptr() % 16 for t in (x, a, weight)):
        raise ValueError("Tensors and rows of outputs have to start on multiples of 16 bytes.")
    maps = ((ctypes.c_byte * _MAP_BYTES) * 2)(_map(weight, OUTPUTS), _map(a, ROWS))
    arguments = _Arguments(maps, x.data_ptr(), rows, n, inner, x.stride(0))
    grid = (n // OUTPUTS * splits, -(-rows // ROWS))
    _kernel(splits, x.device.index or 0).launch(grid, _THREADS, arguments, _stream(x.device), pdl, cluster=splits)
    return x
