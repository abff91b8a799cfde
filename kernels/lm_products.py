"""Products of decoding for 17 rows and more in CUDA C++ (`kernels/cuda/products.cu`): how each is cut, and its launch.

They need a Hopper GPU and sizes in multiples of 64. Rounding points are those of `kernels.lm_triton.product`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from kernels import binaries, cuda_driver, toolchain
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

SOURCE = "products"
PLAIN, RESIDUAL, SWIGLU, BIAS = range(4)
#: Rows of x that a kernel has room for; more are further blocks.
ROWS = (32, 64, 128)
#: Stages that a product with a norm needs at least, by its room.
FEWEST_NORMED = {32: 8, 64: 5, 128: 3}
#: Values of k in a stage, and weight rows of a warpgroup.
PIECE = 64
#: Bytes of shared memory that a block may have; stages and blocks of a cluster that a kernel may have.
_SHARED, _MOST_STAGES, _MOST_SPLITS = 227 << 10, 16, 8
#: Blocks of a launch that are sought: one for each multiprocessor.
_BLOCKS = 132
_CAPABILITY = (9, 0)
_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: warpgroups of a block, each with 64 weight rows; parts of the inner size; stages of x in shared memory."""

    groups: int
    splits: int
    stages: int
    #: Boxes that one thread asks for (TMA), where x is contiguous and not normed; else 16 bytes a thread.
    boxed: bool = False

    def kernel(self, room: int) -> str:
        """Its name in the source, for so many rows of x."""
        return f"product_{self.groups}_{room}"

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup more copies."""
        return 128 * (self.groups + 1)

    def shared_bytes(self, room: int, inner: int) -> int:
        """`Block` of the source: stages of x and the block's weights, or its own sums; those of the cluster; barriers; alignment."""
        tile = PIECE * self.groups
        sums, stages, weights = room * (tile + 4) * 4, self.stages * room * 2 * PIECE, tile * inner // self.splits * 2
        return max(stages + weights, sums) + sums + 2 * _MOST_STAGES * 8 + 16 + 1024

    def fault(self, room: int, weight_rows: int, inner: int, normed: bool = False) -> str | None:
        """Why a product of these sizes cannot be cut so, or None."""
        if weight_rows % (PIECE * self.groups) or inner % (PIECE * self.splits):
            return f"{weight_rows} x {inner} weights do not fall into tiles of {PIECE * self.groups} x {PIECE * self.splits}"
        if self.splits not in (1, 2, 4, _MOST_SPLITS) or not 2 <= self.stages <= _MOST_STAGES:
            return f"a product has 1, 2, 4 or {_MOST_SPLITS} splits and 2 to {_MOST_STAGES} stages"
        if normed and self.stages < FEWEST_NORMED[room]:
            return f"a product with a norm has at least {FEWEST_NORMED[room]} stages"
        if (size := self.shared_bytes(room, inner)) > _SHARED:
            return f"{size} bytes of shared memory are more than a block has"
        return None


@dataclass(frozen=True, slots=True)
class Products:
    """How the products of a frame are run; every field changes time, none changes meaning."""

    #: Cuts for "qkv", "o", "gate_up", "down", "head", "project"; the one that `cut_for` finds where there is none, or it does not fit.
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    #: Weights this many products ahead are brought into the L2; 0 = none.
    ahead: int = 0
    #: Norms are made in the products behind them where the product ahead of them is one of these.
    norms: bool = False

    def cut(self, name: str, rows: int, weight_rows: int, inner: int, normed: bool = False) -> Cut:
        """Raises ValueError for sizes that no cut has."""
        room, found = room_for(rows), self.cuts.get(name)
        if found is not None and normed:
            found = replace(found, stages=max(found.stages, FEWEST_NORMED[room]))
        if found is not None and found.fault(room, weight_rows, inner, normed) is None:
            return found
        return cut_for(rows, weight_rows, inner, normed)


def room_for(rows: int) -> int:
    """Rows of x of the kernel that serves `rows`."""
    return next((room for room in ROWS if rows <= room), ROWS[-1])


@cache
def cut_for(rows: int, weight_rows: int, inner: int, normed: bool = False) -> Cut:
    """The cut of a product: about a block for each multiprocessor, with few parts. Raises ValueError for sizes that have none."""
    room, tiles = room_for(rows), weight_rows // PIECE
    fewest = FEWEST_NORMED[room] if normed else 2
    fitting: list[Cut] = []
    for splits in (1, 2, 4, 8):
        wanted = max(fewest, min({32: 8, 64: 5, 128: 3}[room], inner // splits // PIECE))
        cuts = [Cut(1, splits, stages) for stages in range(wanted, fewest - 1, -1)]
        fitting += [cut for cut in cuts if cut.fault(room, weight_rows, inner, normed) is None][:1]
    if not fitting:
        raise ValueError(f"there is no product of {weight_rows} x {inner} weights: both have to be multiples of {PIECE}")
    return max((cut for cut in fitting if tiles * cut.splits <= _BLOCKS), key=lambda cut: cut.splits, default=fitting[0])


def has_product(weight_rows: int, inner: int) -> bool:
    """Whether weights of this shape, those of gate and up one below the other, can be multiplied."""
    try:
        for room in ROWS:
            cut_for(room, weight_rows, inner)
    except ValueError:
        return False
    return True


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/products.cu."""

    _fields_ = (
        ("maps", (ctypes.c_byte * _MAP_BYTES) * 2),
        *((name, ctypes.c_void_p) for name in ("x", "w", "extra", "y", "ahead", "norm", "squares", "sums")),
        ("ahead_bytes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "n", "inner", "x_stride", "y_stride", "epilogue", "splits", "stages", "boxed")),
        ("eps", ctypes.c_float),
        ("pad", ctypes.c_byte * 16),
    )


def kernel_names() -> list[str]:
    """All that the source has."""
    return [Cut(groups, 1, 2).kernel(room) for groups in (1, 2) for room in ROWS]


@cache
def _kernel(name: str, device: int) -> Kernel:
    """A kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {SOURCE}")
    for code in binaries.candidates(SOURCE, _CAPABILITY):
        try:
            return Module(code, device).kernel(name, _SHARED, all_shared=True)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def available(device: int) -> bool:
    """Whether a device has the kernels. Where only their code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        for name in kernel_names():
            _kernel(name, device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels of products cannot be made (%s); cuBLAS serves instead, which is slower. %s",
            toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _map(matrix: Tensor, rows: int) -> ctypes.Array[ctypes.c_byte]:
    """Of a contiguous matrix, whose boxes are 64 values of so many rows."""
    made = cuda_driver.tensor_map(matrix.data_ptr(), (matrix.shape[1], len(matrix), 1), (PIECE, rows, 1))
    return (ctypes.c_byte * _MAP_BYTES).from_buffer_copy(made)


def product(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    cut: Cut,
    *,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    squares: Tensor | None = None,
    sums: Tensor | None = None,
    ahead: Tensor | None = None,
    pdl: bool = True,
) -> Tensor:
    """y = epilogue(norm(x) @ weight.T), bfloat16, launched on the current stream of x's device.

    x: [rows, inner]; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y: [rows, n]; extra: what RESIDUAL adds,
    [rows, n] with y's strides (may be y), or BIAS, [n]; norm: [inner], RMSNorm of x in the order of the reference, for which squares,
    float32 [rows, inner / 64], are the sums of the squares of each 64 values of x; sums: the same of y, written by RESIDUAL; ahead: a
    weight that a later launch reads, brought into the L2 meanwhile; pdl: programmatic dependent launch.
    The same cut and room give a row the same bits in any company. Raises ValueError for what the kernel cannot do.
    """
    rows, inner = x.shape
    room, weight_rows = room_for(rows), len(weight)
    if (fault := cut.fault(room, weight_rows, inner, norm is not None)) is not None:
        raise ValueError(f"There is no such product: {fault}.")
    if weight_rows != (2 if epilogue == SWIGLU else 1) * y.shape[1] or len(y) != rows:
        raise ValueError(f"{weight_rows} weight rows do not give {len(y)} rows of {y.shape[1]} outputs.")
    if not weight.is_contiguous() or any(t.data_ptr() % 16 or t.stride(0) % 8 or t.stride(1) != 1 for t in (x, weight, y)):
        raise ValueError("Tensors of a product have to be row by row, and their rows to start on multiples of 16 bytes.")
    for table, wanted in ((squares, (rows, inner // PIECE)), (sums, (rows, y.shape[1] // PIECE))):
        if table is not None and (table.shape != wanted or not table.is_contiguous()):
            raise ValueError(f"Sums of squares are a contiguous tensor of {wanted}, not of {tuple(table.shape)}.")
    if (norm is None) != (squares is None) or (sums is not None and epilogue != RESIDUAL):
        raise ValueError("A norm needs the squares of its rows, and only RESIDUAL writes them.")
    bytes_ahead = 0 if ahead is None else ahead.numel() * ahead.element_size()
    pointers = [_address(tensor) for tensor in (x, weight, extra, y, ahead, norm, squares, sums)]
    boxed = cut.boxed and norm is None and x.is_contiguous()
    maps = (_map(weight, PIECE * cut.groups // 2), _map(x, room)) if boxed else ()
    numbers = (rows, y.shape[1], inner, x.stride(0), y.stride(0), epilogue, cut.splits, cut.stages, int(boxed))
    arguments = _Arguments((ctypes.c_byte * _MAP_BYTES * 2)(*maps), *pointers, bytes_ahead, *numbers, eps)
    tiles = weight_rows // (PIECE * cut.groups)
    _kernel(cut.kernel(room), x.device.index or 0).launch(
        (tiles * cut.splits, -(-rows // room)), cut.threads, arguments, _stream(x.device), pdl, cluster=cut.splits,
        shared_bytes=cut.shared_bytes(room, inner),
    )  # fmt: skip
    return y
