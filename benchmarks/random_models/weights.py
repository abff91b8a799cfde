"""Dummy weights: seeded noise in the place of a checkpoint, to measure speed and to test kernels without a
download."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: The value of a tensor from its name and standard normal noise of its shape.
Rule = Callable[[str, Tensor], Tensor]


def in_range(name: str, noise: Tensor) -> Tensor:
    """Scales of one, matrices that let a signal fade slowly, small vectors: what keeps the signals of most
    models in range."""
    if name.endswith(("running_var", "norm.weight", "bn.weight", "alpha")) or ".bns." in name:
        return torch.ones_like(noise)
    if name.endswith("gamma"):
        return torch.full_like(noise, 0.1)
    return noise * (0.6 * noise[0].numel() ** -0.5 if noise.dim() > 1 else 0.02)


class DummyWeights:
    """Takes the place of `pipelines.nn.checkpoint.Checkpoint`: draws each tensor on `device` when it is
    taken.

    The noise of a tensor depends on its name and shape alone.
    """

    def __init__(self, device: torch.device | str, rule: Rule = in_range) -> None:
        self._device = torch.device(device)
        self._rule = rule

    def __contains__(self, name: str) -> bool:
        return False

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        dice = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tuple(shape), generator=dice, device=self._device)
        return self._rule(name, noise).to(device=device, dtype=dtype)


@torch.no_grad()
def fill(module: nn.Module, rule: Rule = in_range, seed: int = 0) -> None:
    """Gives every float tensor of a module its dummy values, and every other tensor zeros."""
    dice: dict[torch.device, torch.Generator] = {}
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            tensor.zero_()
            continue
        drawn = dice.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        tensor.copy_(rule(name, torch.randn(tensor.shape, generator=drawn, device=tensor.device)))
