"""Blocks of a codec with given weights, under the names of Qwen3-TTS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipelines.codec.blocks import Past, ResidualUnit, StateLayout, StateSpan, UpsampleBlock
from pipelines.nn.checkpoint import TensorSource
from pipelines.qwen3_tts.codec import CodecLoader


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def snake64(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """SnakeBeta in float64, of the logarithms of its parameters."""
    x, alpha, beta = x.double(), alpha.double(), beta.double()
    return x + torch.sin(x * alpha.exp()) ** 2 / (beta.exp() + 1e-9)


class Given(TensorSource):
    """Tensors by their names; others have any values."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            return super().take(name, shape, dtype, device)
        assert found.shape == tuple(shape), name
        return found


def loader(tensors: Mapping[str, Tensor]) -> CodecLoader:
    return CodecLoader(Given(tensors), "", torch.float32, torch.device("cpu"))


def residual_unit(snakes: Sequence[Tensor], weights: Sequence[Tensor], dilation: int) -> ResidualUnit:
    """A unit with two snakes (logarithms of frequency and gain of each), and the weight [C, C, 7] and bias of its wide
    convolution, and the weight [C, C] and bias of its narrow one."""
    w1, b1, w2, b2 = weights
    tensors = {
        "act1.alpha": snakes[0], "act1.beta": snakes[1], "conv1.conv.weight": w1, "conv1.conv.bias": b1,
        "act2.alpha": snakes[2], "act2.beta": snakes[3], "conv2.conv.weight": w2[:, :, None], "conv2.conv.bias": b2,
    }  # fmt: skip
    return ResidualUnit(loader(tensors), StateLayout(), len(b1), dilation)


def upsampling(snake: Sequence[Tensor], weight: Tensor, bias: Tensor, rate: int) -> UpsampleBlock:
    """A block without residual units, with a snake (logarithms of frequency and gain), and the weight [Cin, Cin / 2,
    2 * rate] and bias of its convolution."""
    tensors = {
        "block.0.alpha": snake[0], "block.0.beta": snake[1],
        "block.1.conv.weight": weight, "block.1.conv.bias": bias,
    }  # fmt: skip
    block = UpsampleBlock(loader(tensors), StateLayout(), len(weight), rate)
    block.units.clear()
    return block


def past_of(span: StateSpan, history: Tensor) -> Past:
    """The past of a block whose state is at `span`, with these inputs [B, steps, C] before the next one."""
    before = torch.zeros(len(history), span.at.stop)
    span.of(before).copy_(history)
    return Past(before, torch.ones(len(history), dtype=torch.int64))
