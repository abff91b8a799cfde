"""The codec's residual units in CUDA C++: packed weights and launches. `kernels/cuda/codec_unit.cu` has the kernel
for 96 channels, `codec_unit_wide.cu` the one for 192.

Each computes `kernels.codec_ops.codec_active_unit` on a Hopper GPU, and rounds like the Triton kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char, c_int, c_longlong, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cuda_driver import (
    Source,
    TensorMap,
    addresses,
    available,
    fields,
    index_of,
    processors,
    tensor_map,
)

TAPS = 7
MAX_DILATION = 9


def _narrow_weights(weight1: Tensor, weight2: Tensor) -> Tensor:
    """Packs the weights of a unit with 96 channels as its kernel holds them: [8 * 96 * 96], the seven taps, then the
    second weight.

    Each tap and the second weight are [12, 96, 8], with 8 input channels side by side. A thread has two of each 8 columns of a
    product. The second weight's columns are ordered so that a thread has 8 consecutive channels of each 32.
    """
    second = weight2.view(96, 3, 4, 4, 2).transpose(2, 3).reshape(96, 96)
    return torch.cat((weight1, second)).view(TAPS + 1, 12, 8, 96).transpose(2, 3).reshape(-1)


def _wide_weights(weight1: Tensor, weight2: Tensor) -> Tensor:
    """Packs the weights of a unit with 192 channels as chunks in the order in which the kernel reads them, each in its
    layout in shared memory: [8 * 192 * 192].

    A chunk has 12 KB: 32 input channels and all columns of weight1, or 64 input channels and half of the
    columns of weight2, as [input channels / 8, columns, 8]. A thread has two of each 8 columns of a product; the
    second weight's columns are ordered as for 96 channels.
    """
    first = weight1.view(-1, 4, 8, 192).transpose(2, 3)
    ordered = weight2.view(192, 6, 4, 4, 2).transpose(2, 3).reshape(24, 8, 2, 96)
    return torch.cat((first.reshape(-1), ordered.permute(2, 0, 3, 1).reshape(-1)))


class TileConfig(NamedTuple):
    """A kernel and the sizes of its tiles. The source contains no other kernel."""

    source: Source
    channels: int
    #: Steps of a tile, which is copied as boxes of a tensor.
    box_steps: int
    threads: int
    #: For batches with fewer steps the Triton kernel, which gives the same bits, is faster
    #: (`results/codec_units_h200.json`).
    fewest_steps: int
    #: Packs the weights for the kernel: weight1 [7 * channels, channels], oldest tap first, and
    #: weight2 [channels, channels], input channel first.
    pack: Callable[[Tensor, Tensor], Tensor]

    @property
    def kernel(self) -> str:
        return next(iter(self.source.kernels))


#: Bytes of `Shared` of codec_unit.cu, with room to align it to 1,024 bytes: weights, two tiles with their history, bias
#: and snake parameters, barriers.
_NARROW_BYTES = (TAPS + 1) * 96**2 * 2 + 2 * (128 + 56) * 96 * 2 + 6 * 96 * 4 + 128 + 1024
#: Bytes of shared memory of codec_unit_wide.cu: bias and snake parameters, barriers, the activations of three pieces,
#: and chunks of weights in the rest.
_WIDE_BYTES = 226 * 1024 + 512
_WITHOUT = "the codec's units of {} channels run on Triton's kernel, which is slower"
#: Channels -> kernel. With 96 channels, two warpgroups of a block multiply in turns and one warp copies. With 192,
#: three warpgroups multiply, and one streams weights and copies.
TILE_CONFIGS = {
    96: TileConfig(
        Source("codec_unit", {"codec_unit_96": _NARROW_BYTES}, _WITHOUT.format(96)),
        96,
        128,
        2 * 128 + 32,
        0,
        _narrow_weights,
    ),
    192: TileConfig(
        Source("codec_unit_wide", {"codec_unit_wide": _WIDE_BYTES}, _WITHOUT.format(192)),
        192,
        64,
        512,
        10_000,
        _wide_weights,
    ),
}


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/codec_tiles.cuh."""

    _fields_ = (
        *fields(c_void_p, "a residual weights"),
        ("parameters", c_void_p * 6),
        *fields(c_void_p, "raw active ends"),
        ("active_stride", c_longlong),
        *fields(c_int, "rows steps lead dilation open_ends"),
    )


class _TensorArguments(ctypes.Structure):
    """`TensorArgs` of kernels/cuda/codec_tiles.cuh."""

    _fields_ = (
        ("plain", _Arguments),
        ("padding", c_char * (-ctypes.sizeof(_Arguments) % 64)),
        ("map", TensorMap),
    )


def chosen(weight1: Tensor, weight2: Tensor, dilation: int) -> Tensor | None:
    """The packed weights of a unit, if one of these kernels can run it on the weights' device, else None. weight1,
    weight2: as in `TileConfig.pack`."""
    channels = len(weight2)
    config = TILE_CONFIGS.get(channels)
    if (
        config is None
        or weight1.shape != (TAPS * channels, channels)
        or weight1.dtype != torch.bfloat16
        or dilation > MAX_DILATION
        or not weight1.is_cuda
        or not available(weight1.device.index or 0, config.source)
    ):
        return None
    return config.pack(weight1, weight2)


def is_faster(a: Tensor, lead: int) -> bool:
    """Whether there is a kernel for the channels of `a`, and it is faster than the Triton kernel for this number of
    steps."""
    config = TILE_CONFIGS.get(a.shape[2])
    steps = a.shape[0] * (a.shape[1] - lead)
    return config is not None and steps > 0 and steps >= config.fewest_steps


def aligned(
    a: Tensor, residual: Tensor, raw: Tensor | None, active: Tensor | None, active_lead: int, *_: object
) -> bool:
    """Whether the kernels can read and write these tensors, 16 bytes at a time."""
    return not active_lead % 8 and all(
        tensor is None or (tensor.is_contiguous() and not tensor.data_ptr() % 16 and not tensor.stride(0) % 8)
        for tensor in (a, residual, raw, active)
    )


def unit(
    a: Tensor,
    lead: int,
    residual: Tensor,
    packed: Tensor,
    bias1: Tensor,
    frequency1: Tensor,
    gain1: Tensor,
    bias2: Tensor,
    dilation: int,
    *into: Any,
    ends: Tensor | None = None,
    open_ends: bool = False,
    load_only: bool = False,
) -> None:
    """`codec_active_unit` with packed weights, on the current stream of the device. `load_only`: the kernel is loaded
    but not launched; `into`: as in `kernels.codec_launch.conv`.

    All tensors except bias, frequency and gain are bfloat16. Raises ValueError for other numbers of channels,
    dilations above 9, and tensors that are not `aligned`.
    """
    rows, extended, channels = a.shape
    config = TILE_CONFIGS.get(channels)
    if config is None or not 1 <= dilation <= MAX_DILATION or packed.shape != ((TAPS + 1) * channels**2,):
        raise ValueError(
            f"there is no kernel for units of {channels} channels and dilation {dilation}; {[*TILE_CONFIGS]} channels and dilations of 1 to {MAX_DILATION} are possible"
        )
    raw, active, active_lead, frequency2, gain2 = into
    if not aligned(a, residual, *into):
        raise ValueError(
            "tensors of a unit must be contiguous, and their rows must start on multiples of 16 bytes"
        )
    device = index_of(a.device.index)
    steps = extended - lead
    # One block for each tile, up to one for each multiprocessor.
    blocks = min(rows * -(-steps // config.box_steps), processors(device))
    if load_only or blocks == 0:
        config.source.on(device)
        return
    snakes = (frequency2, gain2) if active is not None else (None, None)
    parameters = (c_void_p * 6)(*addresses(bias1, frequency1, gain1, bias2, *snakes))
    place, stride = (None, 0) if active is None else (active.data_ptr() + 2 * active_lead, active.stride(0))
    arguments = _Arguments(
        *addresses(a, residual, packed),
        parameters,
        *addresses(raw),
        place,
        *addresses(ends),
        stride,
        rows,
        steps,
        lead,
        dilation,
        open_ends,
    )
    boxes = tensor_map(
        a.data_ptr(), (channels, extended, rows), (32, config.box_steps + (TAPS - 1) * dilation, 1)
    )
    config.source.launch(
        config.kernel, (blocks, 1), config.threads, _TensorArguments(arguments, b"", boxes), device
    )
