"""Launches of Triton kernels: as usual, early (before the previous kernel has ended), or only to compile many
kernels in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

#: Whether kernels run on a CPU, in Triton's interpreter.
INTERPRETED = triton.knobs.runtime.interpret
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """The launch of a kernel on a grid, as `kernel[grid]`; within `compiled_together` the kernel is only
    compiled."""
    return partial(kernel.run, grid=grid, warmup=compiling())


def compiling() -> bool:
    """Whether this thread is within `compiled_together`, so that its launches run nothing."""
    return _compiling.get()


@contextmanager
def compiled_together() -> Iterator[None]:
    """Within the block, this thread's launches through `on_grid` run nothing and write nothing. At the end of the
    block their kernels are compiled on all cores, or read from Triton's cache.

    The first start on a machine needs dozens of kernels, and one compiler uses only one core.
    """
    with (
        ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compiler") as pool,
        triton.AsyncCompileMode(pool),
    ):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options of a kernel that may start while the previous one still runs (programmatic dependent
    launch), and that itself waits for the previous one's results."""
    return {"launch_pdl": True} if pdl else {}


def pieces(count: int, size: int) -> int:
    """The number of pieces of this size. `triton.cdiv` computes the same, but takes longer than the rest of a
    launch."""
    return -(-count // size)


def power_from(count: int) -> int:
    """The smallest power of two that is not below `count` (at least 1)."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _write_one(out):
    tl.store(out, 1)


def check() -> None:
    """Compiles and runs a small kernel on the current CUDA device. Raises the error of Triton, of its C compiler
    or of the driver."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran and did nothing")
