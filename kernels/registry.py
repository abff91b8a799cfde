"""Registers ops under the namespace `nightjar`: one name and one schema each, a plain PyTorch twin for
every device."""

from __future__ import annotations

from collections.abc import Callable
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

    The twin serves every device until a kernel is registered for one:
    `LIBRARY.impl(name, kernel, "CUDA")`. The decorated function stays the twin itself, so that the oracle
    never runs a kernel by accident.

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


def on_gpu(name: str, fits: Callable[..., bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated launch of an op on a CUDA device for arguments that `fits` accepts; for others
    its twin runs."""

    def register(launch: Callable[P, R]) -> Callable[P, R]:
        def run(*args: Any, **kwargs: Any) -> object:
            return (launch if fits(*args, **kwargs) else TWINS[name])(*args, **kwargs)

        LIBRARY.impl(name, run, "CUDA")
        return launch

    return register


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host does not wait for the work before it."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def send(values: NDArray[np.int64], target: Tensor) -> None:
    """Writes values of the host into a tensor of the device; the host does not wait for the work before
    it."""
    made = torch.from_numpy(values)
    target.copy_(made.pin_memory() if target.is_cuda else made, non_blocking=True)


def on_device(device: torch.device | None) -> torch.cuda.device:
    """Makes a CUDA device the thread's current one within a `with` block: kernels, events and graphs are
    the current device's.

    Does nothing for another kind of device, for one without a number, which is the current one, or None.
    """
    numbered = device is not None and device.type == "cuda" and device.index is not None
    return torch.cuda.device(device if numbered else -1)
