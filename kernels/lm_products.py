"""Products of decoding with Hopper's own instructions, in CUDA C++: the tiles of each, and its launch.

`product` is for 17 to 64 rows (`kernels/cuda/products.cu`). For many rows, `add_product` adds a product to a residual
(`residual_products.cu`), and `swiglu` computes gate and up (`wide_products.cu`). They round at the same places as
`torch.mm` followed by the kernels of `kernels.lm_triton`, with one exception: a norm between two `product`s is
computed by both (`Norm`). Its input is multiplied by its weights and then rounded once, and its scale multiplies the
float32 sums of the second product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_byte, c_float, c_int, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cuda_driver import Source, TensorMap, addresses, available, fields, matrix_map, processors
from kernels.lm_cuda import PLAIN, RESIDUAL, SWIGLU

#: Rows of x per block, one number for each kernel of `product`; further rows are computed by further blocks.
BLOCK_ROWS = (32, 64, 128)
#: Values of the inner size per pipeline stage, in all three kinds of products, and weight rows per block of `product`.
PIECE = 64
#: Rows and outputs of a tile of `add_product` and `swiglu`.
ROWS = 128
RESIDUAL_OUTPUTS = 128
SWIGLU_OUTPUTS = 96
#: Numbers of parts into which `add_product` divides the inner size; the blocks of a cluster compute one part each.
#: With fewer parts it is not faster than cuBLAS.
SPLITS = (4, 8)
#: For more rows, `add_product` has more tiles than a Hopper GPU can run at once, at every published width.
MAX_RESIDUAL_ROWS = 384
#: Up to this number of rows cuBLAS is faster than `swiglu` with any tiles.
MAX_CUBLAS_ROWS = 256
_THREADS = 256
_WIDE_THREADS = 288
_WIDE_STAGES = 5
#: Maxima of `product`: bytes of shared memory of a block, pipeline stages, and blocks of a cluster.
_SHARED = 227 << 10
_MAX_STAGES = 16
_MAX_SPLITS = 8
#: The maximum share of a device's clusters that the tiles of `add_product` may need. Devices of the same kind may
#: differ by a few clusters, but they must choose the same splits, because other splits give other bits.
_MAX_FILL = 0.9
#: The largest number of outputs with which `add_product` was measured. The weights of more outputs are so many that only
#: all multiprocessors together read them fast enough; cuBLAS uses all of them.
_MAX_RESIDUAL_OUTPUTS = 2048
#: The tiles of `swiglu` run in turns of one tile per multiprocessor. They must fill at least this share of all turns,
#: because a last turn with few tiles takes as long as a full one.
_MIN_FILL = 0.9
#: Bytes of `Block` of residual_products.cu and of wide_products.cu: pipeline stages with two barriers each, the sums of
#: a tile (only residual_products.cu), and room for alignment.
_RESIDUAL_BYTES = (
    _WIDE_STAGES * ((ROWS + RESIDUAL_OUTPUTS) * PIECE * 2 + 16) + ROWS * RESIDUAL_OUTPUTS * 4 + 1024
)
_SWIGLU_BYTES = _WIDE_STAGES * ((ROWS + 2 * SWIGLU_OUTPUTS) * PIECE * 2 + 16) + 1024

PRODUCTS = Source(
    "products", {f"product_{block_rows}": _SHARED for block_rows in BLOCK_ROWS}, "batches of 17 to 64 requests are slower", all_shared=True
)  # fmt: skip
RESIDUAL_PRODUCTS = Source(
    "residual_products", {f"residual_product_{splits}": _RESIDUAL_BYTES for splits in SPLITS}, "large batches are slower", all_shared=True
)  # fmt: skip
WIDE_PRODUCTS = Source(
    "wide_products", {"wide_swiglu": _SWIGLU_BYTES}, "large batches and many prompts at once are slower", all_shared=True
)  # fmt: skip


class TileConfig(NamedTuple):
    """How `product` is divided. splits: parts of the inner size, one for each block of a cluster; stages: pipeline
    stages of x in shared memory."""

    splits: int
    stages: int

    def shared_bytes(self, block_rows: int, inner: int) -> int:
        """Bytes of `Block` of the source: pipeline stages of x and the block's weights, or later its own sums; the
        sums of the cluster; barriers; scales; room for alignment."""
        sums = block_rows * (PIECE + 4) * 4
        stages = self.stages * block_rows * 2 * PIECE
        weights = PIECE * inner // self.splits * 2
        return max(stages + weights, sums) + sums + (2 * _MAX_STAGES + 2) * 8 + block_rows * 4 + 1024

    def fault(self, block_rows: int, weight_rows: int, inner: int) -> str | None:
        """Why a product of these sizes cannot have these tiles, or None."""
        if weight_rows % PIECE or inner % (PIECE * self.splits):
            return (
                f"{weight_rows} x {inner} weights do not fall into tiles of {PIECE} x {PIECE * self.splits}"
            )
        if self.splits not in (1, 2, 4, _MAX_SPLITS) or not 2 <= self.stages <= _MAX_STAGES:
            return f"a product has 1, 2, 4 or {_MAX_SPLITS} splits and 2 to {_MAX_STAGES} stages"
        if (size := self.shared_bytes(block_rows, inner)) > _SHARED:
            return f"{size} bytes of shared memory are more than a block has"
        return None


#: (weight rows, inner size) -> the fastest measured configurations (docs/adr/0008) for up to 32 rows, and for more.
TILE_CONFIGS = {
    (4096, 1024): (TileConfig(4, 4), TileConfig(2, 6)),
    (1024, 2048): (TileConfig(8, 4), TileConfig(4, 3)),
    (6144, 1024): (TileConfig(2, 8), TileConfig(2, 3)),
    (1024, 3072): (TileConfig(8, 4), TileConfig(8, 3)),
    (2048, 1024): (TileConfig(4, 4), TileConfig(4, 4)),
    (3072, 1024): (TileConfig(4, 4), TileConfig(4, 4)),
}


def tile_config(rows: int, weight_rows: int, inner: int) -> TileConfig:
    """The configuration of a product that is in `TILE_CONFIGS`. For SwiGLU, the weight rows are those of gate and up."""
    return TILE_CONFIGS[weight_rows, inner][rows > BLOCK_ROWS[0]]


def block_rows_for(rows: int) -> int:
    """Rows of x per block of the kernel that is used for `rows` rows."""
    return next((block_rows for block_rows in BLOCK_ROWS if rows <= block_rows), BLOCK_ROWS[-1])


def residual_fault(n: int, inner: int, splits: int) -> str | None:
    """Why `add_product` with `n` outputs of `inner` values cannot have these splits, as a sentence part, or None."""
    if splits not in SPLITS:
        return f"a product has {' or '.join(map(str, SPLITS))} splits, not {splits}"
    if n % RESIDUAL_OUTPUTS or inner % (PIECE * splits):
        return (
            f"{n} outputs of {inner} values do not fall into tiles of {RESIDUAL_OUTPUTS} x {PIECE * splits}"
        )
    return None


def has_residual(n: int, inner: int) -> bool:
    """Whether `n` outputs of `inner` values fall into whole tiles of `add_product`, and are not too many for it."""
    return n <= _MAX_RESIDUAL_OUTPUTS and residual_fault(n, inner, min(SPLITS)) is None


@cache
def clusters_of(device: int) -> dict[int, int]:
    """Number of splits -> how many clusters of `add_product` a device holds at once."""
    kernels = RESIDUAL_PRODUCTS.on(device)
    return {
        splits: kernels[f"residual_product_{splits}"].resident_clusters(_WIDE_THREADS, splits)
        for splits in SPLITS
    }


def splits_for(rows: int, n: int, inner: int, clusters: Mapping[int, int]) -> int | None:
    """The largest number of splits with which all tiles run at once; None if there is none, so that cuBLAS is faster.

    clusters: the result of `clusters_of`.
    """
    tiles = -(-rows // ROWS) * (n // RESIDUAL_OUTPUTS)
    fitting = [
        splits
        for splits in SPLITS
        if residual_fault(n, inner, splits) is None and tiles <= _MAX_FILL * clusters[splits]
    ]
    return max(fitting, default=None)


def blocks_of(rows: int, n: int, processors: int) -> int:
    """The number of blocks of `swiglu`: up to one for each multiprocessor, such that tiles are spread evenly."""
    return -(-_tiles(rows, n) // _turns(rows, n, processors))


def fills(rows: int, n: int, processors: int) -> bool:
    """Whether `swiglu` is faster than cuBLAS for `rows` rows of `n` outputs: there are more than
    `MAX_CUBLAS_ROWS` rows, and their tiles nearly fill all turns of the device."""
    return rows > MAX_CUBLAS_ROWS and _tiles(rows, n) >= _MIN_FILL * _turns(rows, n, processors) * processors


def _tiles(rows: int, n: int) -> int:
    return -(-rows // ROWS) * (n // SWIGLU_OUTPUTS)


def _turns(rows: int, n: int, processors: int) -> int:
    """The number of tiles that a block computes one after the other, if each multiprocessor has one block."""
    return -(-_tiles(rows, n) // processors)


def supports_swiglu(down: Tensor) -> bool:
    """Whether `swiglu` supports the gate and up matrices of a layer whose `down` is [inner, n], and their device."""
    fits = (
        down.is_cuda
        and down.dtype == torch.bfloat16
        and down.shape[1] % SWIGLU_OUTPUTS == 0
        and down.shape[0] % PIECE == 0
    )
    return fits and available(down.device.index or 0, WIDE_PRODUCTS)


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/products.cu."""

    _fields_ = (
        ("maps", TensorMap * 2),
        *fields(c_void_p, "extra norm squares y weighted y_squares"),
        *fields(c_int, "rows n inner y_stride epilogue splits stages"),
        ("eps", c_float),
        ("pad", c_byte * 48),
    )


class _WideArguments(ctypes.Structure):
    """`Args` of kernels/cuda/residual_products.cu and wide_products.cu."""

    _fields_ = (
        ("maps", TensorMap * 2),
        ("y", c_void_p),
        *fields(c_int, "rows n inner y_stride"),
        ("pad", c_byte * 40),
    )


def _maps(weight: Tensor, weight_rows: int, x: Tensor, rows: int) -> ctypes.Array[ctypes.Array[c_byte]]:
    """The tensor maps of weights and activations, whose boxes have `weight_rows` and `rows` rows."""
    return (TensorMap * 2)(matrix_map(weight, PIECE, weight_rows), matrix_map(x, PIECE, rows))


def _check(x: Tensor, weight: Tensor, y: Tensor, halves: int, step: int) -> None:
    """Raises ValueError if the shapes do not fit, if tensors are not contiguous, or if they are not aligned: x and
    weight to 16 bytes, the rows of y to `step` values. halves: 2 if the weights are gate and up."""
    rows, inner = x.shape
    n = y.shape[1]
    if weight.shape != (halves * n, inner) or len(y) != rows:
        raise ValueError(f"{len(weight)} weight rows do not give {len(y)} rows of {n} outputs.")
    if not (weight.is_contiguous() and x.is_contiguous()) or any(t.data_ptr() % 16 for t in (x, weight)):
        raise ValueError("Activations and weights must be contiguous and start on multiples of 16 bytes.")
    if y.stride(1) != 1 or y.stride(0) % step or y.data_ptr() % (2 * step):
        raise ValueError(f"Rows of outputs must start on multiples of {2 * step} bytes.")


class Norm(NamedTuple):
    """RMSNorm between two products: the first fills both tensors, the second reads them.

    weighted: [rows, width], the norm's input times its weights; squares: float32 [rows, parts], the sum of squares of
    each part of the input. A part has 64 values, and the width must be a multiple of 256.
    """

    weighted: Tensor
    squares: Tensor
    eps: float

    def fault(self, rows: int, width: int) -> str | None:
        """Why this norm does not fit a product with these rows and this width, as a sentence, or None."""
        if self.squares.shape != (rows, width // PIECE) or not self.squares.is_contiguous():
            return f"The sums of squares of {rows} rows of {width} values are {rows} x {width // PIECE}."
        return (
            f"A norm between products has a multiple of {4 * PIECE} values, not {width}."
            if width % (4 * PIECE)
            else None
        )


def product(
    x: Tensor | Norm,
    weight: Tensor,
    y: Tensor,
    config: TileConfig,
    *,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    norm: Tensor | None = None,
    into: Norm | None = None,
    pdl: bool = True,
) -> Tensor:
    """y = epilogue(x @ weight.T), bfloat16, launched on the current stream of x's device.

    x: contiguous [rows, inner], or a `Norm` with a `weighted` of this shape; weight: contiguous [n, inner], for SWIGLU
    [2 * n, inner] with the gate's rows first; y: [rows, n]; extra: the residual for RESIDUAL, [rows, n] with y's
    strides (may be y); norm: weights [n] of a norm after RESIDUAL; into: the `Norm` that this product fills, given
    together with `norm`; pdl: programmatic dependent launch. A row has the same bits in every batch with the same
    configuration and the same `block_rows_for`. Raises ValueError for sizes and tensors that the kernel does not
    support.
    """
    ahead, x = (x, x.weighted) if isinstance(x, Norm) else (None, x)
    rows, inner = x.shape
    weight_rows = len(weight)
    n = y.shape[1]
    block_rows = block_rows_for(rows)
    if (fault := config.fault(block_rows, weight_rows, inner)) is not None:
        raise ValueError(f"There is no such product: {fault}.")
    _check(x, weight, y, 2 if epilogue == SWIGLU else 1, step=2)
    if (into is None) != (norm is None) or (
        into is not None and (epilogue != RESIDUAL or into.weighted.stride() != y.stride())
    ):
        raise ValueError(
            "A norm after a product needs its weights, a residual, and rows with the strides of y."
        )
    for one, width in ((ahead, inner), (into, n)):
        if one is not None and (fault := one.fault(rows, width)) is not None:
            raise ValueError(fault)
    pointers = addresses(
        extra, norm, ahead and ahead.squares, y, into and into.weighted, into and into.squares
    )
    numbers = (rows, n, inner, y.stride(0), epilogue, config.splits, config.stages)
    arguments = _Arguments(
        _maps(weight, PIECE // 2, x, block_rows), *pointers, *numbers, 0.0 if ahead is None else ahead.eps
    )
    PRODUCTS.launch(
        f"product_{block_rows}", (weight_rows // PIECE * config.splits, -(-rows // block_rows)), _THREADS, arguments, x.device.index, programmatic=pdl,
        cluster=config.splits, shared_bytes=config.shared_bytes(block_rows, inner),
    )  # fmt: skip
    return y


def add_product(x: Tensor, a: Tensor, weight: Tensor, splits: int, *, pdl: bool = False) -> Tensor:
    """x += a @ weight.T, bfloat16, launched on the current stream of x's device.

    x: [rows, n], with rows aligned to 16 bytes; a: contiguous [rows, inner]; weight: contiguous [n, inner];
    splits: parts of the inner size; pdl: the kernel may start while the previous one still runs (programmatic
    dependent launch). The next kernel may always start early. A row has the same bits in every batch with the same
    splits. Raises ValueError for sizes and tensors that the kernel does not support.
    """
    rows, inner = a.shape
    n = x.shape[1]
    if (fault := residual_fault(n, inner, splits)) is not None:
        raise ValueError(f"There is no such product: {fault}.")
    _check(a, weight, x, 1, step=8)
    arguments = _WideArguments(
        _maps(weight, RESIDUAL_OUTPUTS, a, ROWS), x.data_ptr(), rows, n, inner, x.stride(0)
    )
    kernel = f"residual_product_{splits}"
    grid = (n // RESIDUAL_OUTPUTS * splits, -(-rows // ROWS))
    RESIDUAL_PRODUCTS.launch(
        kernel, grid, _WIDE_THREADS, arguments, x.device.index, programmatic=pdl, cluster=splits
    )
    return x


def swiglu(x: Tensor, weight: Tensor, y: Tensor, *, pdl: bool = False) -> Tensor:
    """y = silu(x @ gate.T) * (x @ up.T), bfloat16, launched on the current stream of x's device.

    x: contiguous [rows, inner]; weight: contiguous [2 * n, inner], the gate's rows first; y: [rows, n];
    pdl: the kernel may start while the previous one still runs (programmatic dependent launch). A row has the
    same bits in every batch. Raises ValueError for sizes and tensors that the kernel does not support.
    """
    rows, inner = x.shape
    n = y.shape[1]
    if n % SWIGLU_OUTPUTS or inner % PIECE:
        raise ValueError(
            f"{n} outputs of {inner} values do not fall into tiles of {SWIGLU_OUTPUTS} x {PIECE}."
        )
    _check(x, weight, y, 2, step=4)
    arguments = _WideArguments(
        _maps(weight, SWIGLU_OUTPUTS, x, ROWS), y.data_ptr(), rows, n, inner, y.stride(0)
    )
    blocks = blocks_of(rows, n, processors(x.device.index or 0))
    WIDE_PRODUCTS.launch(
        "wide_swiglu", (blocks, 1), _WIDE_THREADS, arguments, x.device.index, programmatic=pdl
    )
    return y
