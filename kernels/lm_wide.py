"""Products of decoding for many rows in CUDA C++ (`kernels/cuda/wide_products.cu`): how each is cut, and its launch.

They need a Hopper GPU. Rounding points are those of `torch.mm` and of `kernels.lm_triton.swiglu` behind it.
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

SOURCE = "wide_products"
#: Rows of x in a tile, and values of the inner size in a stage.
ROWS, PIECE = 128, 64
#: Weight rows of a tile of plain products and of those with SwiGLU.
HEIGHTS = {False: (64, 128, 256), True: (96, 192)}
_THREADS, _RING = 288, 204 << 10
_CAPABILITY = (9, 0)
_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: weight rows of a tile, and the blocks of a cluster, whose tiles have the same weights."""

    height: int
    cluster: int

    def fault(self, n: int, inner: int, swiglu: bool) -> str | None:
        """Why a product with `n` outputs cannot be cut so, or None."""
        if self.height not in HEIGHTS[swiglu] or self.cluster not in (1, 2, 4):
            return f"a tile has {' or '.join(map(str, HEIGHTS[swiglu]))} rows of weights, a cluster 1, 2 or 4 blocks"
        outputs = self.outputs(swiglu)
        if n % outputs or inner % PIECE:
            return f"{n} outputs of {inner} values do not fall into tiles of {outputs} x {PIECE}"
        return None

    def outputs(self, swiglu: bool) -> int:
        """Columns of y in a tile."""
        return self.height // (2 if swiglu else 1)

    @property
    def shared_bytes(self) -> int:
        """`Block` of the source: stages with two barriers each, and alignment."""
        stage = (ROWS + self.height) * PIECE * 2
        return _RING // stage * (stage + 16) + 1024

    def grid(self, rows: int, n: int, swiglu: bool, processors: int) -> int:
        """Blocks, of which each has as many tiles as any other, or one fewer."""
        tiles = -(-rows // (ROWS * self.cluster)) * (n // self.outputs(swiglu))
        return -(-tiles // self.turns(rows, n, swiglu, processors)) * self.cluster

    def turns(self, rows: int, n: int, swiglu: bool, processors: int) -> int:
        """Tiles of a block, where each multiprocessor has one."""
        tiles = -(-rows // (ROWS * self.cluster)) * (n // self.outputs(swiglu))
        return -(-tiles // max(1, processors // self.cluster))

    @property
    def clocks(self) -> float:
        """Of a tile's step of 16 values: the tensor cores', or those of shared memory, which operands are written to and read from."""
        return max(self.height, 64 + 0.75 * self.height)


def has_product(n: int, inner: int, swiglu: bool) -> bool:
    """Whether there are tiles for a product with `n` outputs."""
    return any(Cut(height, 1).fault(n, inner, swiglu) is None for height in HEIGHTS[swiglu])


def cut_for(rows: int, n: int, swiglu: bool, processors: int) -> Cut:
    """The tiles that take the fewest clocks, and pairs of blocks where the tiles of x are even in number."""
    cluster = 1 if -(-rows // ROWS) % 2 else 2
    cuts = [Cut(height, cluster) for height in HEIGHTS[swiglu]]
    fitting = [cut for cut in cuts if n % cut.outputs(swiglu) == 0]
    return min(fitting or cuts, key=lambda cut: (cut.turns(rows, n, swiglu, processors) * cut.clocks, -cut.height))


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/wide_products.cu."""

    _fields_ = (
        ("maps", (ctypes.c_byte * _MAP_BYTES) * 2),
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "n", "inner", "y_stride", "cluster")),
        ("pad", ctypes.c_byte * 36),
    )


def kernel_name(height: int, swiglu: bool) -> str:
    """The kernel for tiles of so many weight rows, as the source names it."""
    return f"wide_{'swiglu_' if swiglu else ''}{height}"


@cache
def _kernel(height: int, swiglu: bool, device: int) -> Kernel:
    """A kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {SOURCE}")
    for code in binaries.candidates(SOURCE, _CAPABILITY):
        try:
            return Module(code, device).kernel(kernel_name(height, swiglu), Cut(height, 1).shared_bytes, all_shared=True)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def available(device: int) -> bool:
    """Whether a device has the kernels. Where only their code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        for swiglu, heights in HEIGHTS.items():
            for height in heights:
                _kernel(height, swiglu, device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels of products of many rows cannot be made (%s); large batches are slower. %s",
            toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


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


def product(x: Tensor, weight: Tensor, y: Tensor, *, swiglu: bool = False, cut: Cut | None = None, pdl: bool = False) -> Tensor:
    """y = x @ weight.T, or its SwiGLU, bfloat16, launched on the current stream of x's device.

    x: contiguous [rows, inner]; weight: contiguous [n, inner], with `swiglu` [2 * n, inner], the gate's rows first; y: [rows, n]; pdl:
    the kernel may start while the one ahead still runs (programmatic dependent launch).
    A row has the same bits in any company. Raises ValueError for what the kernel cannot do.
    """
    (rows, inner), n, device = x.shape, y.shape[1], x.device.index or 0
    cut = cut or cut_for(rows, n, swiglu, processors(device))
    if (fault := cut.fault(n, inner, swiglu)) is not None:
        raise ValueError(f"There is no such product: {fault}.")
    if weight.shape != ((2 if swiglu else 1) * n, inner) or len(y) != rows:
        raise ValueError(f"{len(weight)} weight rows do not give {len(y)} rows of {n} outputs.")
    if not (weight.is_contiguous() and x.is_contiguous()) or any(t.data_ptr() % 16 for t in (x, weight)):
        raise ValueError("Tensors of a product have to be contiguous and to start on multiples of 16 bytes.")
    if y.stride(1) != 1 or y.stride(0) % 4 or y.data_ptr() % 8:
        raise ValueError("Rows of a product's outputs have to start on multiples of 8 bytes.")
    maps = ((ctypes.c_byte * _MAP_BYTES) * 2)(_map(weight, cut.height // max(2, cut.cluster)), _map(x, ROWS))
    arguments = _Arguments(maps, y.data_ptr(), rows, n, inner, y.stride(0), cut.cluster)
    grid = cut.grid(rows, n, swiglu, processors(device))
    _kernel(cut.height, swiglu, device).launch(
        (grid, 1), _THREADS, arguments, _stream(x.device), pdl, cluster=cut.cluster, shared_bytes=cut.shared_bytes
    )
    return y
