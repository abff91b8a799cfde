"""From the host to the device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host does not wait for the work before it."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
