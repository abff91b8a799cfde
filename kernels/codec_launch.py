"""Launches the codec's Triton kernels and chooses their tiles. The import of this module registers them as the
codec's ops on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import codec_cuda, codec_ops
from kernels.codec_triton import conv_kernel, head_products_kernel, head_sum_kernel, unit_kernel
from kernels.registry import LIBRARY, on_gpu
from kernels.triton_launch import INTERPRETED, compiling, on_grid, pieces, power_from

#: Maximum taps of the last convolution, whose products are stored for each step.
HEAD_TAPS = 8


class Tile(NamedTuple):
    """A tile: rows x columns x depth, pipeline stages, warps, and whether it is copied by TMA."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    tma: bool = True


class Shape(NamedTuple):
    """The properties by which a kernel's tile is chosen: `kind` is conv or unit, `channels` in, `columns`
    out."""

    kind: str
    channels: int
    columns: int
    taps: int


#: The fastest tiles of those that were tried on an H200 with 32 x 100 frames. Other shapes get a tile by the general
#: rule of `tile_for`.
TILES = {
    Shape("conv", 1024, 1536, 7): Tile(128, 256, 64, 3, 8),
    Shape("conv", 1536, 6144, 2): Tile(128, 256, 64, 4, 8),
    Shape("conv", 768, 768, 7): Tile(128, 256, 64, 3, 8),
    Shape("conv", 768, 768, 1): Tile(256, 128, 64, 3, 8),
    Shape("conv", 768, 1920, 2): Tile(128, 128, 64, 3, 4),
    Shape("conv", 384, 384, 7): Tile(256, 128, 64, 3, 8),
    Shape("conv", 384, 384, 1): Tile(128, 128, 64, 3, 4),
    Shape("conv", 384, 768, 2): Tile(128, 128, 64, 3, 4),
    Shape("unit", 192, 192, 7): Tile(64, 0, 64, 3, 4),
    Shape("conv", 192, 288, 2): Tile(128, 128, 64, 3, 4),
    Shape("unit", 96, 96, 7): Tile(128, 0, 32, 3, 4),
}


@lru_cache(maxsize=4096)
def tile_for(shape: Shape, steps: int, tma: bool) -> Tile | None:
    """The tile for a shape. None: these kernels cannot run it, so the twin must."""
    tile = TILES.get(shape) or (_unit_tile(shape) if shape.kind == "unit" else _conv_tile(shape))
    if tile is None:
        return None
    rows = min(tile.rows, max(64, power_from(steps)))
    return tile._replace(rows=rows, tma=tile.tma and tma, stages=tile.stages if tma else min(tile.stages, 2))


def _conv_tile(shape: Shape) -> Tile | None:
    depth = _depth(shape.channels)
    if depth is None or shape.columns % 16:
        return None
    wide = shape.columns % 256 == 0 and shape.taps * shape.channels >= 2048
    return Tile(128, 256 if wide else 128, depth, 3, 8)


def _depth(channels: int) -> int | None:
    """The depth of a product's tiles: the largest of 64, 32 and 16 that divides the channels, or None."""
    return next((depth for depth in (64, 32, 16) if channels % depth == 0), None)


def _unit_tile(shape: Shape) -> Tile | None:
    _, small = split(shape.channels)
    possible = shape.channels <= 256 and small >= 16 and not small & (small - 1)
    return Tile(128, 0, min(64, small), 3, 8) if possible else None


def split(channels: int) -> tuple[int, int]:
    """Splits a number of channels into the largest power of two and the rest: 96 -> (64, 32)."""
    large = 1 << (channels.bit_length() - 1)
    return large, channels - large


def _tiles(tensor: Tensor, *block: int) -> Any:
    return TensorDescriptor.from_tensor(tensor, list(block))


def _chosen_tile(kind: str, a: Tensor, lead: int, columns: int, taps: int) -> Tile | None:
    if a.dtype != torch.bfloat16:
        return None
    has_tma = torch.cuda.get_device_capability(a.device) >= (9, 0)
    return tile_for(Shape(kind, a.shape[2], columns, taps), a.shape[1] - lead, has_tma)


def _place(active: Tensor | None, active_lead: int) -> tuple[Tensor | None, int]:
    """The start of an activated result, and the number of values from one row to the next."""
    if active is None:
        return None, 0
    flat = active.view(len(active), -1)
    return flat[:, active_lead:] if active_lead else active, flat.shape[1]


def conv(
    a: Tensor,
    lead: int,
    weight: Tensor,
    bias: Tensor,
    taps: int,
    dilation: int,
    residual: Tensor | None,
    *into: Any,
    ends: Tensor | None = None,
    open_ends: bool = False,
    tile: Tile | None = None,
) -> None:
    """`codec_active_conv` in bfloat16 (bias, frequency and gain are float32), with this tile. The channels must be a
    multiple of its depth.

    into: raw, active, active_lead, frequency, gain. If no tile is given, the best one is used, or the twin if there
    is none.
    """
    rows, extended, channels = a.shape
    steps = extended - lead
    columns = weight.shape[1]
    if tile is None and (tile := _chosen_tile("conv", a, lead, columns, taps)) is None:
        codec_ops.codec_active_conv(
            a, lead, weight, bias, taps, dilation, residual, *into, ends=ends, open_ends=open_ends
        )
        return
    raw, active, active_lead, frequency, gain = into
    if channels % tile.depth or weight.shape[0] != taps * channels:
        raise ValueError(
            f"weight {list(weight.shape)} and depth {tile.depth} do not fit {taps} taps of {channels} channels"
        )
    on_grid(conv_kernel, (rows * pieces(steps, tile.rows) * pieces(columns, tile.columns),))(
        _tiles(a, 1, tile.rows, tile.depth) if tile.tma else a,
        _tiles(weight, tile.depth, tile.columns) if tile.tma else weight,
        bias, residual, raw, *_place(active, active_lead), frequency, gain, ends, rows, steps, lead,
        DILATION=dilation, TAPS=taps, C=channels, N=columns, OPEN=open_ends and ends is not None, BM=tile.rows, BN=tile.columns,
        BK=tile.depth, GROUP=8, STAGES=tile.stages, TMA=tile.tma, FAST=not INTERPRETED, num_warps=tile.warps,
    )  # fmt: skip


def unit(
    a: Tensor,
    lead: int,
    residual: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    frequency1: Tensor,
    gain1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    dilation: int,
    *into: Any,
    ends: Tensor | None = None,
    open_ends: bool = False,
    packed: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """`codec_active_unit` in bfloat16, for widths that `split` can split and whose accumulators fit into one program
    (96, 192). `into` is as in `conv`.

    With `packed` weights a CUDA C++ kernel runs if that is faster. The depth of a tile must divide the channels. If
    no tile is given, the best one is used, or the twin if there is none.
    """
    rows, extended, channels = a.shape
    inner = (bias1, frequency1, gain1)
    raw, active, active_lead, frequency2, gain2 = into
    if packed is not None and codec_cuda.is_faster(a, lead) and codec_cuda.aligned(a, residual, *into):
        stop = {"ends": ends, "open_ends": open_ends}
        codec_cuda.unit(
            a, lead, residual, packed, *inner, bias2, dilation, *into, **stop, load_only=compiling()
        )
        return
    steps = extended - lead
    taps = weight1.shape[0] // channels
    if tile is None and (tile := _chosen_tile("unit", a, lead, channels, taps)) is None:
        codec_ops.codec_active_unit(
            a, lead, residual, weight1, *inner, weight2, bias2, dilation, *into, ends=ends, open_ends=open_ends
        )  # fmt: skip
        return
    columns = split(channels)
    tma = tile.tma
    on_grid(unit_kernel, (rows * pieces(steps, tile.rows),))(
        _tiles(a, 1, tile.rows, tile.depth) if tma else a,
        *(_tiles(weight1, tile.depth, each) if tma else weight1 for each in columns),
        *inner, weight2, bias2, residual, raw, *_place(active, active_lead), frequency2, gain2, ends, rows, steps, lead,
        DILATION=dilation, TAPS=taps, C=channels, N0=columns[0], N1=columns[1], OPEN=open_ends and ends is not None, BM=tile.rows, BK=tile.depth,
        STAGES=tile.stages, TMA=tma, FAST=not INTERPRETED, num_warps=tile.warps,
    )  # fmt: skip


def _head_fits(a: Tensor, lead: int, weight: Tensor, bias: Tensor, **_: Tensor | None) -> bool:
    return _depth(a.shape[2]) is not None and len(weight) <= HEAD_TAPS


@on_gpu("codec_head", _head_fits)
def head(a: Tensor, lead: int, weight: Tensor, bias: Tensor, *, ends: Tensor | None = None) -> Tensor:
    """`codec_head` in bfloat16 (bias float32), for up to 8 taps and a multiple of 16 channels."""
    rows, extended, channels = a.shape
    steps = extended - lead
    taps = weight.shape[0]
    products = torch.empty(rows * extended, HEAD_TAPS, dtype=torch.float32, device=a.device)
    # Without ends, all rows are processed as one long row.
    count, launches = (rows * extended, 1) if ends is None else (extended, rows)
    on_grid(head_products_kernel, (pieces(count, 128), launches))(
        a,
        weight,
        products,
        ends,
        count,
        0 if ends is None else lead,
        taps,
        channels,
        128,
        _depth(channels),
        HEAD_TAPS,
        not INTERPRETED,
        num_warps=4,
    )
    out = torch.empty(rows, steps, dtype=torch.float32, device=a.device)
    on_grid(head_sum_kernel, (pieces(steps, 512), rows))(
        products, bias, out, ends, steps, lead, taps, HEAD_TAPS, 512, num_warps=4
    )
    return out


LIBRARY.impl("codec_active_conv", conv, "CUDA")
LIBRARY.impl("codec_active_unit", unit, "CUDA")
