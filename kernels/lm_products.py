"""Products of decoding for 17 to 64 rows in CUDA C++ (`kernels/cuda/products.cu`): how each is cut, and its launch.

They need a Hopper GPU and sizes in multiples of 64. Rounding points are those of `kernels.reference`. A norm between two of them is
part of both (`Norm`): rows are rounded once, after its weights, and its scale multiplies the sums of the product behind it in float32.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels import binaries, cuda_driver, toolchain
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

SOURCE = "products"
PLAIN, RESIDUAL, SWIGLU = range(3)
#: Rows of x that a kernel has room for; more are further blocks.
ROOMS = (32, 64, 128)
#: Values of the inner size in a stage, and weight rows of a block.
PIECE = 64
_THREADS = 256
#: Bytes of shared memory that a block may have; stages and blocks of a cluster that a kernel may have.
_SHARED, _MOST_STAGES, _MOST_SPLITS = 227 << 10, 16, 8
_CAPABILITY = (9, 0)
_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: parts of the inner size, which are the blocks of a cluster, and stages of x in shared memory."""

    splits: int
    stages: int

    def shared_bytes(self, room: int, inner: int) -> int:
        """`Block` of the source: stages of x and the block's weights, or its own sums; the cluster's; barriers; scales; alignment."""
        sums, stages, weights = room * (PIECE + 4) * 4, self.stages * room * 2 * PIECE, PIECE * inner // self.splits * 2
        return max(stages + weights, sums) + sums + (2 * _MOST_STAGES + 2) * 8 + room * 4 + 1024

    def fault(self, room: int, weight_rows: int, inner: int) -> str | None:
        """Why a product of these sizes cannot be cut so, or None."""
        if weight_rows % PIECE or inner % (PIECE * self.splits):
            return f"{weight_rows} x {inner} weights do not fall into tiles of {PIECE} x {PIECE * self.splits}"
        if self.splits not in (1, 2, 4, _MOST_SPLITS) or not 2 <= self.stages <= _MOST_STAGES:
            return f"a product has 1, 2, 4 or {_MOST_SPLITS} splits and 2 to {_MOST_STAGES} stages"
        if (size := self.shared_bytes(room, inner)) > _SHARED:
            return f"{size} bytes of shared memory are more than a block has"
        return None


#: Measured best (benchmarks/NOTES.md) for up to 32 rows, and for more, by weight rows and inner size.
_CUTS: dict[tuple[int, int], tuple[Cut, Cut]] = {
    (4096, 1024): (Cut(4, 4), Cut(2, 6)),
    (1024, 2048): (Cut(8, 4), Cut(4, 3)),
    (6144, 1024): (Cut(2, 8), Cut(2, 3)),
    (1024, 3072): (Cut(8, 4), Cut(8, 3)),
    (2048, 1024): (Cut(4, 4), Cut(4, 4)),
    (3072, 1024): (Cut(4, 4), Cut(4, 4)),
}


def has_product(weight_rows: int, inner: int) -> bool:
    """Whether a cut was measured for weights of this shape; those of gate and up lie one below the other."""
    return (weight_rows, inner) in _CUTS


def cut_for(rows: int, weight_rows: int, inner: int) -> Cut:
    """The cut of a product that there is."""
    return _CUTS[weight_rows, inner][rows > ROOMS[0]]


def room_for(rows: int) -> int:
    """Rows of x of the kernel that serves `rows`."""
    return next((room for room in ROOMS if rows <= room), ROOMS[-1])


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/products.cu."""

    _fields_ = (
        ("maps", (ctypes.c_byte * _MAP_BYTES) * 2),
        *((name, ctypes.c_void_p) for name in ("extra", "norm", "squares", "y", "weighted", "y_squares")),
        *((name, ctypes.c_int) for name in ("rows", "n", "inner", "y_stride", "epilogue", "splits", "stages")),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_byte * 48),
    )


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm between two products: the one ahead fills both tensors, the one behind reads them.

    weighted: [rows, width], its input times its weights; squares: float32 [rows, parts], whose sum is that of its input's squares. Here a
    part is 64 values, and the width a multiple of 256.
    """

    weighted: Tensor
    squares: Tensor
    eps: float


def kernel_name(room: int) -> str:
    """The kernel for so many rows of x, as the source names it."""
    return f"product_{room}"


@cache
def _kernel(room: int, device: int) -> Kernel:
    """A kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {SOURCE}")
    for code in binaries.candidates(SOURCE, _CAPABILITY):
        try:
            return Module(code, device).kernel(kernel_name(room), _SHARED, all_shared=True)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def available(device: int) -> bool:
    """Whether a device has the kernels. Where only their code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        for room in ROOMS:
            _kernel(room, device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels of products cannot be made (%s); batches of 17 to 64 requests are slower. %s",
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


def product(
    x: Tensor | Norm,
    weight: Tensor,
    y: Tensor,
    cut: Cut,
    *,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    norm: Tensor | None = None,
    into: Norm | None = None,
    pdl: bool = True,
) -> Tensor:
    """y = epilogue(x @ weight.T), bfloat16, launched on the current stream of x's device.

    x: contiguous [rows, inner], or a norm of that; weight: contiguous [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y:
    [rows, n]; extra: what RESIDUAL adds, [rows, n] with y's strides (may be y); norm: weights [n] of the norm behind a RESIDUAL, which
    fills `into`; pdl: programmatic dependent launch.
    The same cut and room give a row the same bits in any company. Raises ValueError for what the kernel cannot do.
    """
    ahead, x = (x, x.weighted) if isinstance(x, Norm) else (None, x)
    rows, inner = x.shape
    room, weight_rows = room_for(rows), len(weight)
    if (fault := cut.fault(room, weight_rows, inner)) is not None:
        raise ValueError(f"There is no such product: {fault}.")
    if weight_rows != (2 if epilogue == SWIGLU else 1) * y.shape[1] or len(y) != rows:
        raise ValueError(f"{weight_rows} weight rows do not give {len(y)} rows of {y.shape[1]} outputs.")
    if not (weight.is_contiguous() and x.is_contiguous()) or any(t.data_ptr() % 16 for t in (x, weight)) or y.stride(0) % 2:
        raise ValueError("Tensors of a product have to be contiguous and to start on multiples of 16 bytes.")
    if (into is None) != (norm is None) or (into is not None and (epilogue != RESIDUAL or into.weighted.stride() != y.stride())):
        raise ValueError("A norm behind a product needs its weights, a residual, and rows as far apart as those of y.")
    for one, width in ((ahead, inner), (into, y.shape[1])):
        if one is not None and (one.squares.shape != (rows, width // PIECE) or not one.squares.is_contiguous()):
            raise ValueError(f"The sums of squares of {rows} rows of {width} values are {rows} x {width // PIECE}.")
        if one is not None and width % (4 * PIECE):
            raise ValueError(f"A norm between products has a multiple of {4 * PIECE} values, not {width}.")
    maps = ((ctypes.c_byte * _MAP_BYTES) * 2)(_map(weight, PIECE // 2), _map(x, room))
    squares, weighted, y_squares = ahead and ahead.squares, into and into.weighted, into and into.squares
    pointers = (None if t is None else t.data_ptr() for t in (extra, norm, squares, y, weighted, y_squares))
    numbers = (rows, y.shape[1], inner, y.stride(0), epilogue, cut.splits, cut.stages)
    arguments = _Arguments(maps, *pointers, *numbers, 0.0 if ahead is None else ahead.eps)
    _kernel(room, x.device.index or 0).launch(
        (weight_rows // PIECE * cut.splits, -(-rows // room)), _THREADS, arguments, _stream(x.device), pdl, cluster=cut.splits,
        shared_bytes=cut.shared_bytes(room, inner),
    )  # fmt: skip
    return y
