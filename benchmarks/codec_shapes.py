"""The kernels of the published decoder as single problems, for checks and timings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, codec_values
from benchmarks.random_models.weights import DummyWeights
from kernels import codec_launch, codec_ops
from kernels.codec_launch import Shape, Tile
from pipelines.qwen3_tts.config import CodecDecoderConfig

#: Multiply-adds of one frame of the published decoder, from its weight shapes.
FRAME_MACS = 2.48e9


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel of the decoder: where it stands, what it multiplies, how often a frame needs it, and its
    steps per frame."""

    name: str
    shape: Shape
    dilation: int
    steps: int
    count: int
    residual: bool = False
    raw: bool = True
    active: bool = True

    @property
    def macs(self) -> int:
        """Multiply-adds of one step."""
        extra = self.shape.columns**2 if self.shape.kind == "unit" else 0
        return self.shape.taps * self.shape.channels * self.shape.columns + extra

    def bind(
        self, rows: int, steps: int, device: str = "cuda"
    ) -> tuple[Callable[[Tile], None], Callable[[], None], list[Tensor]]:
        """Random tensors for it: a launch with a tile, the twin in float32 on the same values, and
        [kernel's, twin's] outputs."""
        shape = self.shape
        rand = DummyWeights(device, codec_values).take
        a, x = (
            rand("x.a", (rows, steps, shape.channels)).bfloat16(),
            rand("x.x", (rows, steps, shape.columns)).bfloat16(),
        )
        deep = shape.taps * shape.channels
        weight = (rand("x.w", (deep, shape.columns)) / math.sqrt(deep)).bfloat16()
        bias, second = (
            rand("x.b.bias", (shape.columns,)),
            (rand("x.w2", (shape.columns, shape.columns)) / math.sqrt(shape.columns)).bfloat16(),
        )
        inner, after = (
            codec_ops.snake_parameters(
                rand(f"{n}.alpha", (shape.columns,)), rand(f"{n}.beta", (shape.columns,))
            )
            for n in "xy"
        )
        outputs = [torch.empty_like(x) for _ in range(2)] + [
            torch.empty_like(x, dtype=torch.float32) for _ in range(2)
        ]

        def arguments(raw: Tensor, active: Tensor, wide: Callable[[Tensor], Tensor]) -> tuple[object, ...]:
            sink = (raw if self.raw else None, active if self.active else None, 0, *after)
            if shape.kind == "unit":
                return (
                    wide(a),
                    0,
                    wide(x),
                    wide(weight),
                    bias,
                    *inner,
                    wide(second),
                    bias,
                    self.dilation,
                    *sink,
                )
            return (
                wide(a),
                0,
                wide(weight),
                bias,
                shape.taps,
                self.dilation,
                wide(x) if self.residual else None,
                *sink,
            )

        kernel, twin = (
            (codec_launch.unit, codec_ops.codec_active_unit)
            if shape.kind == "unit"
            else (codec_launch.conv, codec_ops.codec_active_conv)
        )
        return (
            lambda tile: kernel(*arguments(outputs[0], outputs[1], lambda t: t), tile=tile),  # type: ignore[arg-type]
            lambda: twin(*arguments(outputs[2], outputs[3], Tensor.float)),  # type: ignore[arg-type]
            outputs,
        )


def problems(config: CodecDecoderConfig = PUBLISHED_CODEC) -> list[Problem]:
    """The kernels of the decoder's convolution stack in order of first use; a unit's three dilations are
    one problem.

    Where a unit can be one kernel it is also listed as two, to compare.
    """
    width, steps = config.decoder_dim, math.prod(config.upsampling_ratios)
    found = [Problem("stem", Shape("conv", config.latent_dim, width, 7), 1, steps, 1, raw=False)]
    for rate in config.upsample_rates:
        half = width // 2
        found.append(Problem(f"up {half}", Shape("conv", width, rate * half, 2), 1, steps, 1))
        width, steps = half, steps * rate
        if width <= 192:
            found.append(Problem(f"unit {width}", Shape("unit", width, width, 7), 3, steps, 3))
        found.append(Problem(f"conv7 {width}", Shape("conv", width, width, 7), 3, steps, 3, raw=False))
        found.append(Problem(f"conv1 {width}", Shape("conv", width, width, 1), 1, steps, 3, residual=True))
    return found


def tiles(problem: Problem) -> list[Tile]:
    """Candidates that compile without spills for sm_90."""
    shape = problem.shape
    if shape.kind == "unit" and shape.channels % 64:
        cuts = [
            (64, 32, 4, 4),
            (128, 32, 3, 4),
            (128, 32, 4, 4),
            (128, 32, 4, 8),
            (128, 32, 6, 8),
            (256, 32, 3, 8),
            (256, 32, 4, 8),
        ]
        cuts += [(128, 64, 2, 4), (128, 64, 2, 8), (256, 64, 2, 8)]
    elif shape.kind == "unit":
        cuts = [(64, 64, 3, 4), (64, 64, 4, 4), (128, 64, 2, 8), (128, 64, 3, 8), (128, 64, 4, 8)]
    if shape.kind == "unit":
        found = [Tile(rows, 0, depth, stages, warps) for rows, depth, stages, warps in cuts]
        return [*found, replace(found[3], tma=False)]
    cuts = [
        (128, 128, 3, 4),
        (128, 128, 3, 8),
        (128, 128, 4, 8),
        (256, 128, 3, 8),
        (256, 128, 4, 8),
        (128, 64, 4, 4),
        (256, 64, 4, 8),
    ]
    if shape.columns % 256 == 0:
        cuts += [(128, 256, 3, 8), (128, 256, 4, 8), (64, 256, 4, 8)]
    if shape.columns < 512:
        cuts += [(128, 32, 4, 4), (256, 32, 4, 8)]
    depth = 64 if shape.channels % 64 == 0 else 32
    return [Tile(rows, columns, depth, stages, warps) for rows, columns, stages, warps in cuts] + [
        Tile(128, 128, depth, 3, 8, tma=False)
    ]
