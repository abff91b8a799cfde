"""Triton kernels compiled side by side: a first start on a machine needs dozens of them, and one compiler uses one core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def on_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """The launch of a kernel on a grid, as `kernel[grid]`; within `compiled_together` it is compiled only."""
    return partial(kernel.run, grid=grid, warmup=compiling())


def compiling() -> bool:
    """Whether this thread's launches run nothing, since it is within `compiled_together`."""
    return _compiling.get()


@contextmanager
def compiled_together() -> Iterator[None]:
    """In the block this thread's launches through `on_grid` run nothing; their kernels are compiled, or read from Triton's cache, on all
    cores by its end. What such launches would have written stays as it was."""
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compiler") as pool, triton.AsyncCompileMode(pool):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
