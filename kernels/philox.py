"""Counter-based random numbers: Philox4x32-10 in integer arithmetic that is equal on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.registry import op

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x, by 16-bit halves so that nothing leaves the range of int64."""
    upper = factor * (x >> 16)
    lower = factor * (x & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    All tensors are int64 that hold 32-bit words and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@op("frame_noise(Tensor seeds, Tensor frames, int codebooks) -> Tensor")
def frame_noise(seeds: Tensor, frames: Tensor, codebooks: int) -> Tensor:
    """The random word of every codebook of one frame a row: word 0 of Philox at counter (frame, codebook, 0, 0), key = seed.

    seeds: [n] int64 >= 0; frames: [n] int64; returns int64 [n, codebooks] in [0, 2**32). Depends on nothing else: not on the
    row, the batch, the device or the draws before.
    """
    codebook = torch.arange(codebooks, device=seeds.device)[None]
    zero = torch.zeros_like(codebook)
    return philox((frames[:, None], codebook, zero, zero), (seeds[:, None] & _MASK, seeds[:, None] >> 32))[0]
