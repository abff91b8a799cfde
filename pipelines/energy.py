"""The energy counter of the GPU that this process uses."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

#: Readings a second at most; the driver renews its counter about ten times a second.
_READINGS_PER_SECOND = 4
#: UUID of a GPU -> its counter in millijoules at the first reading.
_first: dict[str, int] = {}


def board_joules() -> float | None:
    """The energy that the board of this process's GPU, on which it has most memory, has used since the first call, with all
    other programs on that board.

    None if CUDA is not in use, `nvidia-ml-py` is not installed, or the GPU has no counter.
    """
    return _read(int(time.monotonic() * _READINGS_PER_SECOND)) if torch.cuda.is_initialized() else None


@lru_cache(1)
def _read(_tick: int) -> float | None:
    device = max(range(torch.cuda.device_count()), key=torch.cuda.memory_allocated)
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        now = pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:  # noqa: BLE001 - the library's own errors need the library, and a figure stops no engine
        return None
    return (now - _first.setdefault(uuid, now)) / 1000
