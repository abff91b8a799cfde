"""Registers ops under the namespace `nightjar`. Each has one name, one schema and a twin, the plain PyTorch
function that runs on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "nightjar"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
#: name -> the plain PyTorch function that defines the op.
TWINS: dict[str, Callable[..., object]] = {}


def op(schema: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated twin as `torch.ops.nightjar.<name>`, with the name and types of `schema`.

    The twin runs on every device for which no kernel is registered with
    `LIBRARY.impl(name, kernel, "CUDA")`. The decorated function itself is returned unchanged, so that a
    reference that calls it never runs a kernel by accident.

        @op("swiglu(Tensor gate_up) -> Tensor")
        def swiglu(gate_up: Tensor) -> Tensor: ...
    """
    name = schema.partition("(")[0]

    def register(twin: Callable[P, R]) -> Callable[P, R]:
        LIBRARY.define(schema)
        LIBRARY.impl(name, twin, "CompositeExplicitAutograd")
        TWINS[name] = twin
        return twin

    return register


def on_gpu(
    name: str, fits: Callable[..., bool] = lambda *_: True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated function as the op's launch on CUDA devices. It runs for arguments that `fits`
    accepts, of which the first is bfloat16; for all others the twin runs."""

    def register(launch: Callable[P, R]) -> Callable[P, R]:
        def run(*args: Any, **kwargs: Any) -> object:
            launched = args[0].dtype == torch.bfloat16 and fits(*args, **kwargs)
            return (launch if launched else TWINS[name])(*args, **kwargs)

        LIBRARY.impl(name, run, "CUDA")
        return launch

    return register


def to_device(values: Tensor | NDArray[Any] | Sequence[float], device: torch.device) -> Tensor:
    """Copies values of the host to the device, without waiting for earlier work of the device."""
    made = torch.as_tensor(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def send(values: NDArray[np.int64], target: Tensor) -> None:
    """Writes values of the host into a tensor of the device, without waiting for earlier work of the device."""
    made = torch.from_numpy(values)
    target.copy_(made.pin_memory() if target.is_cuda else made, non_blocking=True)


def on_device(device: torch.device | None) -> torch.cuda.device:
    """Makes a CUDA device the thread's current one within a `with` block, because kernels, events and graphs
    belong to the current device.

    Does nothing for None, for another kind of device, and for a CUDA device without an index, which already is
    the current one.
    """
    numbered = device is not None and device.type == "cuda" and device.index is not None
    return torch.cuda.device(device if numbered else -1)
