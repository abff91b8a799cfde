"""Residual units of the codec with random weights: what their kernels in CUDA C++ make of them, and what
their twin does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import codec_cuda, codec_ops
from kernels.codec_cuda import TAPS, TileConfig
from tests.support.cuda_emulated import guarded

BF16 = torch.bfloat16
TILE_CONFIGS = tuple(codec_cuda.TILE_CONFIGS.values())


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's weights and inputs, and what is asked of it."""

    rows: int
    steps: int
    dilation: int
    lead: int = 0
    raw: bool = True
    active: bool = True
    margin: int = 0
    ends: tuple[int, ...] | None = None
    #: What lies behind an end is no number in the inputs, and may be anything in the results.
    open_ends: bool = False
    device: str = "cpu"

    def tensors(self, channels: int) -> dict[str, Tensor]:
        snakes = [normal(channels, seed=i, scale=0.3) for i in range(4)]
        inner, after = codec_ops.snake_parameters(*snakes[:2]), codec_ops.snake_parameters(*snakes[2:])
        made = {
            "a": normal(self.rows, self.lead + self.steps, channels, seed=5).to(BF16),
            "x": normal(self.rows, self.steps, channels, seed=6).to(BF16),
            "weight1": (normal(TAPS * channels, channels, seed=7) / math.sqrt(TAPS * channels)).to(BF16),
            "weight2": (normal(channels, channels, seed=8) / math.sqrt(channels)).to(BF16),
            "bias1": normal(channels, seed=9), "bias2": normal(channels, seed=10),
            "frequency1": inner[0], "gain1": inner[1], "frequency2": after[0], "gain2": after[1],
        }  # fmt: skip
        for row, end in enumerate(self.ends or () if self.open_ends else ()):
            made["a"][row, self.lead + end :] = made["x"][row, end:] = math.nan
        return {name: self._placed(tensor) for name, tensor in made.items()}

    def _placed(self, tensor: Tensor) -> Tensor:
        return guarded(tensor) if self.device == "cpu" else tensor.to(self.device)

    def packed(self, config: TileConfig) -> Tensor:
        t = self.tensors(config.channels)
        return self._placed(config.pack(t["weight1"], t["weight2"]))

    def outputs(self, channels: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """raw and active, of which the kernel may not leave anything but the margins as it was."""
        unwritten = torch.full((self.rows, self.steps, channels), math.nan, dtype=dtype)
        active = torch.full((self.rows, 2 * self.margin + self.steps, channels), 7.0, dtype=dtype)
        return self._placed(unwritten) if self.raw else None, self._placed(active) if self.active else None

    @property
    def end_tensor(self) -> Tensor | None:
        return None if self.ends is None else torch.tensor(self.ends, dtype=torch.int32, device=self.device)

    def made(self, config: TileConfig) -> tuple[Tensor | None, Tensor | None]:
        channels = config.channels
        t, packed, (raw, active) = self.tensors(channels), self.packed(config), self.outputs(channels, BF16)
        codec_cuda.unit(
            t["a"], self.lead, t["x"], packed, t["bias1"], t["frequency1"], t["gain1"], t["bias2"], self.dilation,
            raw, active, self.margin * channels, t["frequency2"], t["gain2"], ends=self.end_tensor, open_ends=self.open_ends,
        )  # fmt: skip
        return raw, active

    def twin(self, channels: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        t = {
            name: value.to(dtype) if value.dtype == BF16 else value
            for name, value in self.tensors(channels).items()
        }
        raw, active = self.outputs(channels, dtype)
        codec_ops.codec_active_unit(
            t["a"], self.lead, t["x"], t["weight1"], t["bias1"], t["frequency1"], t["gain1"], t["weight2"], t["bias2"], self.dilation,
            raw, active, self.margin * channels, t["frequency2"], t["gain2"], ends=self.end_tensor,
            open_ends=self.open_ends,
        )  # fmt: skip
        return raw, active


def check(unit: Unit, channels: int, made: tuple[Tensor | None, Tensor | None]) -> None:
    """The error against float32 is that of the twin in bfloat16, give or take; margins and what lies
    behind an end are exact."""
    ends = unit.ends or (unit.steps,) * unit.rows
    for found, exact, rounded in zip(made, unit.twin(channels, torch.float32), unit.twin(channels, BF16)):
        assert (found is None) == (exact is None)
        if found is None or exact is None or rounded is None:
            continue
        margin = (found.shape[1] - unit.steps) // 2
        for row, end in enumerate(ends):
            inside = slice(margin, margin + end)
            difference, yardstick = (
                (one[row, inside].float() - exact[row, inside]).norm() for one in (found, rounded)
            )
            assert float(difference) <= 1.2 * float(yardstick)
            assert torch.equal(found[row, :margin], rounded[row, :margin])
            assert torch.equal(found[row, margin + unit.steps :], rounded[row, margin + unit.steps :])
            if unit.ends is not None and not unit.open_ends and found is made[1]:
                assert not found[row, margin + end : margin + unit.steps].any()


UNITS = {
    "dilation 1": Unit(2, 130, 1),
    "dilation 3": Unit(1, 300, 3),
    "dilation 9": Unit(1, 257, 9),
    "history": Unit(2, 140, 9, lead=54),
    "long history": Unit(1, 129, 3, lead=23),
    "few steps": Unit(5, 3, 9),
    "three tiles a row": Unit(3, 300, 1),
    "no raw": Unit(1, 100, 1, raw=False),
    "no active": Unit(1, 100, 1, active=False),
    "centred, and rows that end": Unit(4, 200, 3, lead=18, margin=5, ends=(200, 70, 0, 131)),
    "rows with open ends": Unit(5, 400, 9, ends=(0, 400, 70, 128, 129), open_ends=True),
    "history, and open ends": Unit(3, 200, 3, lead=18, margin=5, ends=(191, 1, 64), open_ends=True),
}
