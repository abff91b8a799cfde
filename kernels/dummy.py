"""Dummy weights and slot states of any size, made on the device, for tests and timings of the frame's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layers import rope_table
from kernels.lm_frame import DrawTensors, FrameTensors, StackTensors, StateTensors


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of talker and predictor; the defaults are the 0.6B model's."""

    hidden: int = 1024
    inter: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 3072
    width: int = 1024
    width_inter: int = 3072
    predictor_layers: int = 5
    codes: int = 2048
    codebooks: int = 16
    control: int = 1024


SMALL = Shape()
LARGE = Shape(hidden=2048, inter=6144)
TINY = Shape(
    hidden=48, inter=80, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=80, width=64, width_inter=96, predictor_layers=2, codes=48,
    codebooks=5, control=32,
)  # fmt: skip


class Maker:
    """Draws tensors from one seed on one device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, device=self.device, dtype=torch.float32).normal_(mean, std, generator=self.generator)
        return drawn.to(self.dtype)

    def matrix(self, rows: int, inner: int) -> Tensor:
        return self.normal(rows, inner, std=0.8 / inner**0.5)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def stack(self, hidden: int, inter: int, layers: int, shape: Shape, positions: int) -> StackTensors:
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        made = [
            [
                self.normal(hidden, std=0.1, mean=1.0),
                self.matrix(q_width + 2 * kv_width, hidden),
                self.normal(shape.head_dim, std=0.1, mean=1.0),
                self.normal(shape.head_dim, std=0.1, mean=1.0),
                self.matrix(hidden, q_width),
                self.normal(hidden, std=0.1, mean=1.0),
                self.matrix(2 * inter, hidden),
                self.matrix(hidden, inter),
            ]
            for _ in range(layers)
        ]
        table = rope_table(positions, shape.head_dim, 1e6, self.dtype, self.device)
        norm = self.normal(hidden, std=0.1, mean=1.0)
        return StackTensors(made, norm, table, shape.heads, shape.kv_heads, 1e-6, shape.head_dim**-0.5)

    def frame(self, shape: Shape, positions: int = 4096, text_ids: int = 512) -> FrameTensors:
        residuals = shape.codebooks - 1
        rows = shape.vocab + residuals * shape.codes + 1
        table = self.normal(rows, shape.hidden, std=0.3)
        project = None
        if shape.hidden != shape.width:
            project = self.matrix(shape.width, shape.hidden), self.normal(shape.width, std=0.02)
        starts = [0, *(shape.vocab + index * shape.codes for index in range(residuals))]
        return FrameTensors(
            talker=self.stack(shape.hidden, shape.inter, shape.layers, shape, positions),
            head=self.matrix(shape.vocab, shape.hidden) * 3,
            predictor=self.stack(shape.width, shape.width_inter, shape.predictor_layers, shape, shape.codebooks),
            heads=torch.stack([self.matrix(shape.codes, shape.width) * 3 for _ in range(residuals)]),
            project=project,
            inputs=table if project is None else torch.nn.functional.linear(table, *project),
            starts=torch.tensor(starts, device=self.device),
            codec_table=table,
            text=self.normal(text_ids, shape.hidden, std=0.3),
            end=shape.vocab - shape.control + 2,
            suppress_from=shape.vocab - shape.control,
        )

    def draw(self, slots: int, greedy: bool, top_p: bool) -> DrawTensors:
        return DrawTensors(
            temperature=torch.full((slots,), 0.9, device=self.device),
            top_k=torch.full((slots,), 50, device=self.device),
            top_p=torch.where(torch.arange(slots, device=self.device) % 2 == 0, 1.0, 0.8 if top_p else 1.0),
            greedy=torch.full((slots,), int(greedy), device=self.device, dtype=torch.uint8),
        )

    def caches(self, shape: Shape, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Keys and values as a talker's would be, [layers, pages, kv_heads, page_size, head_dim]."""
        size = (shape.layers, pages, shape.kv_heads, page_size, shape.head_dim)
        k, v = (torch.empty(size, device=self.device, dtype=self.dtype) for _ in range(2))
        for cache in (k, v):
            cache.normal_(0, 1, generator=self.generator)
        return k, v

    def state(
        self, shape: Shape, slots: int, pages: int, page_size: int, contexts: Tensor, greedy: bool = False, top_p: bool = False
    ) -> StateTensors:
        """`slots` live slots at positions `contexts` [slots] with shuffled pages, and a dead one after them."""
        width = -(-int(contexts.max() + 64) // page_size)
        table = torch.zeros(slots + 1, width, dtype=torch.int64, device=self.device)
        order = torch.randperm(pages - 1, device=self.device, generator=self.generator) + 1
        table[:slots] = order[: slots * width].view(slots, width)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        return StateTensors(
            inputs=self.normal(slots + 1, shape.hidden),
            positions=torch.cat((contexts, zero)),
            frames=torch.cat((self.integers(0, 30, slots), zero)),
            seeds=torch.cat((self.integers(0, 1 << 62, slots), zero)),
            page_table=table,
            trailing=self.integers(0, 512, slots + 1, 17),
            seen=(torch.rand(slots + 1, shape.vocab, device=self.device, generator=self.generator) < 0.02).to(torch.uint8),
            penalty=torch.full((slots + 1,), 1.05, device=self.device),
            min_new_tokens=torch.full((slots + 1,), 2, device=self.device),
            first=self.draw(slots + 1, greedy, top_p),
            residual=self.draw(slots + 1, greedy, top_p),
            dead=slots,
        )
