"""The codec's residual unit of 192 channels in CUDA C++ (`kernels/cuda/codec_unit_wide.cu`): its cuts, its packed weights.

Both weights together do not fit into shared memory, so every block streams them. `kernels.codec_cuda` launches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHANNELS, TAPS = 192, 7
#: Steps of a piece, which is the work of a warpgroup.
_STEPS = 64
#: Steps of a batch below which Triton's kernel is faster: a block's tile takes as long, and Triton has three blocks a multiprocessor.
_FEWEST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class WideCut:
    """The kernel: three warpgroups of a block multiply, one has the threads that stream the weights and copy the activations."""

    kernel = source = "codec_unit_wide"
    channels = CHANNELS
    #: Bias and snakes, barriers, the activations of three pieces, as many chunks of weights as there is room for, and alignment.
    shared_bytes = 226 * 1024 + 512
    #: Of a piece, which is copied as boxes of a tensor.
    box_steps = _STEPS
    threads = 512

    def pack(self, weight1: Tensor, weight2: Tensor) -> Tensor:
        """The weights of a unit as the kernel wants them, by `pack`."""
        return pack(weight1, weight2)

    def blocks(self, rows: int, steps: int, processors: int) -> int:
        """Of a launch: one for each piece, up to one for each multiprocessor."""
        return min(rows * -(-steps // _STEPS), processors)

    def pays(self, rows: int, steps: int) -> bool:
        """Whether a launch of this size is faster than Triton's kernel, which has the same bits (`results/codec_units_h200.json`)."""
        return rows * steps >= _FEWEST_STEPS


CUT = WideCut()


def pack(weight1: Tensor, weight2: Tensor) -> Tensor:
    """The weights of a unit as chunks in the order of use, each as it lies in shared memory: [8 * 192 * 192].

    weight1: [7 * 192, 192], oldest tap first; weight2: [192, 192], input channel first. A chunk has 12 KB: 32 input channels and all
    columns of weight1, or 64 input channels and half of the columns of weight2, as [input channels / 8, columns, 8]. A thread has two
    columns of each 8 of a product; the second weight's are in such an order that these are 8 channels of each 32.
    """
    first = weight1.view(-1, 4, 8, CHANNELS).transpose(2, 3)
    ordered = weight2.view(CHANNELS, 6, 4, 4, 2).transpose(2, 3).reshape(CHANNELS // 8, 8, 2, CHANNELS // 2)
    second = ordered.permute(2, 0, 3, 1)
    return torch.cat((first.reshape(-1), second.reshape(-1)))
