"""CUDA devices that PyTorch reports on a machine without any, for what plans, chooses and refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

#: Functions of `torch.cuda` that `FakeGpus` answers.
_ANSWERED = (
    "current_device",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_properties",
    "is_available",
    "mem_get_info",
    "set_per_process_memory_fraction",
    "synchronize",
)


@dataclass
class FakeGpus:
    """Equal devices; a test changes the fields as it goes."""

    count: int = 1
    capability: tuple[int, int] = (9, 0)
    #: Capabilities of devices that differ from the others.
    capabilities: dict[int, tuple[int, int]] = field(default_factory=dict)
    processors: int = 132
    free_gib: float = 140
    total_gib: float = 141
    #: The share of a device's memory that the allocator was given.
    shares: dict[int | None, float] = field(default_factory=dict)
    #: What is called whenever a device is waited for.
    waits: list[Callable[[], object]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
        for name in _ANSWERED:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = 0) -> Any:
        """The stream of device d is 7 + d."""
        return SimpleNamespace(cuda_stream=7 + device)

    def get_device_capability(self, device: Any = 0) -> tuple[int, int]:
        return self.capabilities.get(device, self.capability)

    def get_device_properties(self, device: Any = 0) -> Any:
        return SimpleNamespace(multi_processor_count=self.processors)

    def mem_get_info(self, device: Any = 0) -> tuple[int, int]:
        return int(self.free_gib * 2**30), int(self.total_gib * 2**30)

    def set_per_process_memory_fraction(self, share: float, device: int | None) -> None:
        """As in PyTorch, which refuses a device without its number."""
        assert device is None or isinstance(device, int)
        self.shares[device] = share

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self, device: Any = 0) -> None:
        for call in self.waits:
            call()
