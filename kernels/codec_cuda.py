"""The codec's residual unit of 96 channels in CUDA C++ (`kernels/cuda/codec_unit.cu`): its packed weights, its launch.

The unit of 192 channels (`kernels.codec_unit_wide`) is launched here too. Each does what `kernels.codec_ops.codec_active_unit` says, in the
order of rounding of Triton's kernel, on a Hopper GPU.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels import binaries, codec_unit_wide, cuda_driver, toolchain
from kernels.codec_unit_wide import WideCut
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

CHANNELS, TAPS, MAX_DILATION = 96, 7, 9
#: The only GPUs that have the kernel's products.
_CAPABILITY = (9, 0)


#: Of a tile.
_STEPS = 128


@dataclass(frozen=True, slots=True)
class Cut:
    """The kernel: two warpgroups of a block multiply, one warp has the thread that copies the activations."""

    kernel = "codec_unit_96"
    threads = 2 * 128 + 32
    channels = CHANNELS
    source = "codec_unit"
    #: Of a tile, which is copied as boxes of a tensor.
    box_steps = _STEPS
    #: `Shared` of the source, from a multiple of 1,024 bytes on: the weights, two tiles with their history, bias and snakes, barriers.
    shared_bytes = (TAPS + 1) * CHANNELS**2 * 2 + 2 * (_STEPS + 56) * CHANNELS * 2 + 6 * CHANNELS * 4 + 128 + 1024

    def pack(self, weight1: Tensor, weight2: Tensor) -> Tensor:
        """The weights of a unit as the kernel wants them, by `pack`."""
        return pack(weight1, weight2)

    def blocks(self, rows: int, steps: int, processors: int) -> int:
        """Of a launch: one for each tile, up to one for each multiprocessor."""
        return min(rows * -(-steps // _STEPS), processors)

    def pays(self, rows: int, steps: int) -> bool:
        """Whether a launch of this size is faster than Triton's kernel, which has the same bits (`results/codec_units_h200.json`)."""
        return rows * steps > 0


CUT = Cut()


class _Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/codec_unit.cu and codec_unit_wide.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "residual", "weights")),
        ("parameters", ctypes.c_void_p * 6),
        *((name, ctypes.c_void_p) for name in ("raw", "active", "ends")),
        ("active_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "steps", "lead", "dilation", "open_ends")),
    )


class _TensorArguments(ctypes.Structure):
    """`TensorArgs` of kernels/cuda/codec_unit.cu and codec_unit_wide.cu."""

    _fields_ = (("plain", _Arguments), ("padding", ctypes.c_char * (-ctypes.sizeof(_Arguments) % 64)), ("map", ctypes.c_byte * 128))


def pack(weight1: Tensor, weight2: Tensor) -> Tensor:
    """The weights of a unit as its kernel holds them: [8 * 96 * 96], the seven taps and the second weight.

    weight1: [7 * 96, 96], oldest tap first; weight2: [96, 96], input channel first. Of each, 8 input channels lie together: [12, 96, 8].
    A thread has two columns of each 8 of a product; the second weight's are in such an order that these are 8 channels of each 32.
    """
    second = weight2.view(CHANNELS, 3, 4, 4, 2).transpose(2, 3).reshape(CHANNELS, CHANNELS)
    whole = torch.cat((weight1, second))
    return whole.view(TAPS + 1, CHANNELS // 8, 8, CHANNELS).transpose(2, 3).reshape(-1)


def _cut_for(channels: int) -> Cut | WideCut | None:
    """The kernel of units of so many channels; None: they run on Triton's."""
    return {CHANNELS: CUT, codec_unit_wide.CHANNELS: codec_unit_wide.CUT}.get(channels)


def chosen(weight1: Tensor, weight2: Tensor, dilation: int) -> Tensor | None:
    """The packed weights of a unit that runs on one of these kernels; None for any other one. weight1, weight2: as in `pack`."""
    channels, cut = len(weight2), _cut_for(len(weight2))
    known = weight1.shape == (TAPS * channels, channels) and weight1.dtype == torch.bfloat16 and dilation <= MAX_DILATION
    if cut is None or not known or not weight1.is_cuda or not _available(cut, weight1.device.index or 0):
        return None
    return cut.pack(weight1, weight2)


@cache
def _available(cut: Cut | WideCut, device: int) -> bool:
    """Whether a device can run the kernel. Where only its code is missing, a warning says so."""
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    try:
        _kernel(cut, device)
    except (RuntimeError, OSError) as error:
        log.warning(
            "the codec's CUDA C++ kernel of %d channels cannot be made (%s); Triton's serves instead, which is slower. %s",
            cut.channels, toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def pays(a: Tensor, lead: int) -> bool:
    """Whether the kernel for the width of `a` is the faster one for so many steps."""
    cut = _cut_for(a.shape[2])
    return cut is not None and cut.pays(a.shape[0], a.shape[1] - lead)


def aligned(a: Tensor, residual: Tensor, raw: Tensor | None, active: Tensor | None, active_lead: int) -> bool:
    """Whether the kernels can read and write these, 16 bytes at a time."""
    return not active_lead % 8 and all(tensor is None or _starts_well(tensor) for tensor in (a, residual, raw, active))


def _starts_well(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.data_ptr() % 16 and not tensor.stride(0) % 8


@cache
def _kernel(cut: Cut | WideCut, device: int) -> Kernel:
    """A kernel on a device, made by the first code that the driver takes."""
    fault = RuntimeError(f"there is no code of {cut.source}")
    for code in binaries.candidates(cut.source, _CAPABILITY):
        try:
            return Module(code, device).kernel(cut.kernel, cut.shared_bytes)
        except RuntimeError as error:
            fault = error
    raise fault


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
    raw: Tensor | None,
    active: Tensor | None,
    active_lead: int,
    frequency2: Tensor | None,
    gain2: Tensor | None,
    cut: Cut | WideCut,
    ends: Tensor | None = None,
    open_ends: bool = False,
) -> None:
    """`codec_active_unit` with packed weights, as `cut` says, on the current stream of the device.

    All tensors are bfloat16 but bias, frequency and gain. Raises ValueError for what the kernel cannot do: other widths, dilations above
    9, tensors that are not `aligned`.
    """
    rows, extended, channels = a.shape
    if channels != cut.channels or not 1 <= dilation <= MAX_DILATION or packed.shape != ((TAPS + 1) * channels**2,):
        raise ValueError(
            f"there is no unit of {channels} channels and dilation {dilation}; {cut.channels} and 1 to {MAX_DILATION} are possible"
        )
    if not aligned(a, residual, raw, active, active_lead):
        raise ValueError("tensors of a unit have to be contiguous, and their rows to start on multiples of 16 bytes")
    steps = extended - lead
    blocks = cut.blocks(rows, steps, _processors(a.device))
    if blocks == 0:
        return
    snakes = (frequency2, gain2) if active is not None else (None, None)
    parameters = [_address(tensor) for tensor in (bias1, frequency1, gain1, bias2, *snakes)]
    place, stride = (None, 0) if active is None else (active.data_ptr() + 2 * active_lead, active.stride(0))
    arguments = _Arguments(
        a.data_ptr(), residual.data_ptr(), packed.data_ptr(), (ctypes.c_void_p * 6)(*parameters), _address(raw), place, _address(ends),
        stride, rows, steps, lead, dilation, open_ends,
    )  # fmt: skip
    box = (32, cut.box_steps + (TAPS - 1) * dilation, 1)
    map_bytes = (ctypes.c_byte * 128).from_buffer_copy(cuda_driver.tensor_map(a.data_ptr(), (channels, extended, rows), box))
    whole = _TensorArguments(arguments, b"", map_bytes)
    _kernel(cut, a.device.index or 0).launch((blocks, 1), cut.threads, whole, _stream(a.device))


def run(a: Tensor, *rest: Any, ends: Tensor | None, open_ends: bool, compile_only: bool) -> None:
    """`unit` with the kernel for its width; `compile_only`: that is made and not launched."""
    cut = _cut_for(a.shape[2])
    if cut is None:
        raise ValueError(f"there is no kernel of {a.shape[2]} channels")
    everything: Any = (a, *rest, cut, ends, open_ends)
    if compile_only:
        _kernel(cut, a.device.index or 0)
    else:
        unit(*everything)
