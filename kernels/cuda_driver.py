"""Loads and launches the kernels of `kernels/cuda` through CUDA's driver.

The driver is called through ctypes, so nothing is linked against it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels import binaries, toolchain

log = logging.getLogger(__name__)

# Attributes of functions and launches, with their names in CUDA's driver.
_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    if code := driver.cuInit(0):
        raise RuntimeError(f"CUDA's driver does not start (error {code}).")
    return driver


def _check(code: int, what: str) -> None:
    if code != 0:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{what} was refused: {(name.value or b'CUDA error').decode()} ({code}).")


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The context of a device, which torch uses too; kept until the process ends."""
    context = ctypes.c_void_p()
    _check(
        _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"The context of device {device}"
    )
    return context


@contextmanager
def _on(device: int) -> Iterator[None]:
    """Makes a device current within the block, and restores the thread's previous one afterwards. A thread
    that had none keeps this device."""
    driver = _driver()
    wanted = _context(device)
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    if current.value == wanted.value:
        yield
        return
    _check(driver.cuCtxSetCurrent(wanted), f"The context of device {device}")
    try:
        yield
    finally:
        if current.value:
            driver.cuCtxSetCurrent(current)


_BFLOAT16, _PROMOTION_128B = 9, 2  # members of the enumerations of CUtensorMap
_SWIZZLES = {32: 2, 64: 3}  # last size of a box in values -> swizzle mode for 64 or 128 bytes


#: `TensorMap` of kernels/cuda/wgmma.cuh, as a field of a structure of arguments.
TensorMap = ctypes.c_byte * 128


def tensor_map(
    address: int, sizes: tuple[int, int, int], box: tuple[int, int, int]
) -> ctypes.Array[ctypes.c_byte]:
    """A descriptor with which kernels copy boxes of a contiguous bfloat16 tensor.

    sizes, box: the sizes of the tensor and of a box, last dimension first. The last dimension of a box has 32
    or 64 values. Raises RuntimeError if the driver refuses the descriptor.
    """
    memory = (ctypes.c_char * (2 * ctypes.sizeof(TensorMap)))()
    offset = -ctypes.addressof(memory) % 64
    strides = (ctypes.c_ulonglong * 2)(2 * sizes[0], 2 * sizes[0] * sizes[1])
    steps = (ctypes.c_uint * 3)(1, 1, 1)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(memory, offset), _BFLOAT16, 3, ctypes.c_void_p(address), (ctypes.c_ulonglong * 3)(*sizes), strides,
        (ctypes.c_uint * 3)(*box), steps, 0, _SWIZZLES[box[0]], _PROMOTION_128B, 0,
    )  # fmt: skip
    _check(code, "A map of a tensor")
    return TensorMap.from_buffer_copy(memory, offset)


def matrix_map(matrix: Tensor, columns: int, rows: int) -> ctypes.Array[ctypes.c_byte]:
    """The `tensor_map` of a contiguous matrix, for boxes with these columns and rows."""
    return tensor_map(matrix.data_ptr(), (matrix.shape[1], len(matrix), 1), (columns, rows, 1))


class Module:
    """Machine code on one device, and its kernels by name. Raises RuntimeError if the driver refuses the code."""

    def __init__(self, code: bytes, device: int) -> None:
        self._device = device
        self._module = ctypes.c_void_p()
        with _on(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), code), "A kernel's machine code")

    def kernel(self, name: str, shared_bytes: int = 0, all_shared: bool = False) -> Kernel:
        """The kernel with this name, for launches with this much dynamic shared memory.

        all_shared: multiprocessors are configured for the largest shared memory. The kernels before and after
        it use the same configuration.
        """
        function = ctypes.c_void_p()
        what = f"{shared_bytes} bytes of shared memory for {name}"
        with _on(self._device):
            _check(
                _driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()),
                f"The kernel {name}",
            )
            _check(_driver().cuFuncSetAttribute(function, _MAX_SHARED_BYTES, shared_bytes), what)
            if all_shared:
                _check(_driver().cuFuncSetAttribute(function, _CARVEOUT, 100), what)
        return Kernel(function, name, shared_bytes, self._device)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of a module. Its only parameter is a structure."""

    _function: ctypes.c_void_p
    _name: str
    _shared_bytes: int
    _device: int

    def resident_blocks(self, threads: int) -> int:
        """How many blocks of this size run at once on an idle device."""
        each = ctypes.c_int()
        with _on(self._device):
            asked = (self._function, threads, ctypes.c_size_t(self._shared_bytes))
            code = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(each), *asked)
            _check(code, f"The occupancy of {self._name}")
        return each.value * processors(self._device)

    def resident_clusters(self, threads: int, blocks: int) -> int:
        """How many clusters of this size run at once on an idle device."""
        count = ctypes.c_int()
        attribute = _Attribute(_CLUSTER, b"", (blocks, 1, 1))
        config = _Config(
            (blocks, 1, 1), (threads, 1, 1), self._shared_bytes, None, ctypes.pointer(attribute), 1
        )
        with _on(self._device):
            code = _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._function, ctypes.byref(config)
            )
            _check(code, f"The clusters of {self._name}")
        return count.value

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
        stream: int,
        programmatic: bool = False,
        cooperative: bool = False,
        *,
        cluster: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        """Starts grid[0] x grid[1] blocks of `threads` threads on a stream of the kernel's device. Raises
        RuntimeError if the driver refuses the launch.

        programmatic: the kernel may start before earlier kernels of the stream have ended (programmatic
        dependent launch); cooperative: all its blocks run at the same time; cluster: number of consecutive
        blocks along grid[0] that can read each other's shared memory; shared_bytes: a smaller dynamic shared
        memory than `Module.kernel` was given.
        """
        asked = [
            (_PROGRAMMATIC, (1,), programmatic),
            (_COOPERATIVE, (1,), cooperative),
            (_CLUSTER, (cluster, 1, 1), cluster > 1),
        ]
        chosen = [_Attribute(kind, b"", value) for kind, value, wanted in asked if wanted]
        attributes = (_Attribute * max(1, len(chosen)))(*chosen)
        size = self._shared_bytes if shared_bytes is None else shared_bytes
        config = _Config((*grid, 1), (threads, 1, 1), size, stream or None, attributes, len(chosen))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with _on(self._device):
            _check(
                _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None),
                f"A launch of {self._name}",
            )


@dataclass(frozen=True, eq=False)
class Source:
    """A file of `kernels/cuda`, and its kernels."""

    name: str
    #: The kernels, with their dynamic shared memory in bytes.
    kernels: Mapping[str, int]
    #: What is slower without these kernels, as a sentence.
    without: str = ""
    #: As in `Module.kernel`.
    all_shared: bool = False

    @cache  # noqa: B019 - sources live as long as the process
    def on(self, device: int) -> dict[str, Kernel]:
        """The kernels on a device, from the first code that its driver accepts. Raises RuntimeError or OSError
        if it accepts none."""
        fault = RuntimeError(f"there is no code of {self.name}")
        for code in binaries.candidates(self.name, torch.cuda.get_device_capability(device)):
            try:
                module = Module(code, device)
                return {
                    kernel: module.kernel(kernel, size, self.all_shared)
                    for kernel, size in self.kernels.items()
                }
            except RuntimeError as error:
                fault = error
        raise fault

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
        device: int | None,
        **how: Any,
    ) -> None:
        """Launches a kernel on the current stream of a device (None: the current device). `how`: options of
        `Kernel.launch`."""
        index = index_of(device)
        self.on(index)[kernel].launch(
            grid, threads, arguments, torch.cuda.current_stream(index).cuda_stream, **how
        )


@cache
def available(device: int, *sources: Source) -> bool:
    """Loads all kernels of these sources on a device, in parallel. Returns whether that succeeded.

    False if no code of a source is meant for the device. If code cannot be loaded or compiled, one warning is
    logged.
    """
    capability = torch.cuda.get_device_capability(device)
    target = binaries.HOPPER if capability == (9, 0) else binaries.NEWER
    if capability < (9, 0) or not all(target in binaries.targets_of(one.name) for one in sources):
        return False
    try:
        with ThreadPoolExecutor(len(sources)) as pool:
            list(pool.map(lambda source: source.on(device), sources))
    except (RuntimeError, OSError) as error:
        names = ", ".join(source.name for source in sources)
        message = toolchain.first_line(error)
        log.warning(
            "the CUDA C++ kernels of %s cannot be loaded (%s); %s. %s",
            names,
            message,
            sources[0].without,
            toolchain.CUDA_ADVICE,
            exc_info=True,
        )
        return False
    return True


def index_of(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device


@cache
def processors(device: int) -> int:
    """The number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def fields(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    """Fields of a structure of arguments that all have the type `kind`; `names` are separated by spaces."""
    return ((name, kind) for name in names.split())


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """The addresses of tensors, as arguments of a kernel."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
