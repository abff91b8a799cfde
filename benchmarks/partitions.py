"""Parts of a GPU's multiprocessors for work side by side: green contexts of CUDA's driver, each with a stream.

A kernel that is launched on such a stream has the multiprocessors of its part only. A graph has those of the stream that it was captured
on, whichever it is replayed on. PyTorch's own green contexts each take the first multiprocessors of the device, so two of them overlap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.cuda_driver import _check, _driver, _on

_MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which the driver demands
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which it demands too


class _Resource(ctypes.Structure):
    """CUdevResource of multiprocessors."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("internal", ctypes.c_ubyte * 92),
        ("count", ctypes.c_uint),
        ("least", ctypes.c_uint),
        ("aligned", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 36),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """So many multiprocessors, and a stream whose kernels run on them alone."""

    multiprocessors: int
    stream: torch.cuda.Stream


def two_parts(device: torch.device, wanted: int) -> tuple[Part, Part]:
    """At least `wanted` multiprocessors, as many more as the driver rounds up to (multiples of 8 on Hopper), and all others.

    They share nothing but memory and its caches, and live as long as the process. Raises RuntimeError where the driver refuses.
    """
    driver, index = _driver(), device.index or 0
    whole, first, others, groups = _Resource(), _Resource(), _Resource(), ctypes.c_uint(1)
    with _on(index):
        _check(driver.cuDeviceGetDevResource(index, ctypes.byref(whole), _MULTIPROCESSORS), "A device's multiprocessors")
        split = (ctypes.byref(first), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(others), 0, wanted)
        _check(driver.cuDevSmResourceSplitByCount(*split), f"A part of {wanted} multiprocessors")
        if groups.value != 1 or not others.count:
            raise RuntimeError(f"{wanted} of {whole.count} multiprocessors leave no second part.")
        return _part(first, device), _part(others, device)


def _part(resource: _Resource, device: torch.device) -> Part:
    driver, index = _driver(), device.index or 0
    described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuDevResourceGenerateDesc(ctypes.byref(described), ctypes.byref(resource), 1), "A part of the multiprocessors")
    _check(driver.cuGreenCtxCreate(ctypes.byref(context), described, index, _DEFAULT_STREAM), "A green context")
    _check(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, _NON_BLOCKING, 0), "A stream of a green context")
    return Part(resource.count, torch.cuda.ExternalStream(stream.value or 0, device=device))


@contextmanager
def products_of(multiprocessors: int) -> Iterator[None]:
    """In the block cuBLAS cuts this thread's products for so many multiprocessors: a grid for all of them would take two rounds."""
    library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}")
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    if code := library.cublasSetSmCountTarget(handle, multiprocessors):
        raise RuntimeError(f"cuBLAS takes no number of multiprocessors (error {code}).")
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, 0)
