"""Several processes share one device here, so a test gives back what it held."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

#: Bytes that a process may keep for its next test.
KEPT = 4 << 30


@pytest.fixture(autouse=True)
def _device_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        gc.collect()
        torch.cuda.empty_cache()
