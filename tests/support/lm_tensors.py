"""Sizes of the language models' frames, and weights and states of slots of any size, drawn from a seed, for
tests and timings of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.frame import (
    DepthTensors,
    DrawRules,
    DrawTensors,
    Feedback,
    FrameTensors,
    Layer,
    StackTensors,
    StateTensors,
)
from kernels.layers import rope_table


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
    qkv_bias: bool = False
    #: Whether the heads of the backbone, and of the depth, have norms.
    head_norms: bool = True
    depth_head_norms: bool = True
    wide_rope: bool = False
    #: Whether all codebooks after code 0 share one head and one table of inputs.
    one_head: bool = False
    ends: int = 1
    nucleus_first: bool = False
    window: int = 0
    #: What the next input takes of the text: a row by the request's text id, by code 0, or nothing.
    text: Literal["id", "code", "none"] = "id"
    scale: float = 1.0


SMALL = Shape()
LARGE = Shape(hidden=2048, inter=6144)
#: SparkTTS and Fish S2 Pro.
SPARK = Shape(
    hidden=896, inter=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=13_568, codebooks=1, control=64, qkv_bias=True,
    head_norms=False, ends=2, text="none",
)  # fmt: skip
FISH = Shape(
    hidden=2560, inter=9728, layers=36, heads=32, vocab=4160, width=2560, width_inter=9728, predictor_layers=4, codes=4096, codebooks=10,
    control=64, depth_head_norms=False, wide_rope=True, one_head=True, nucleus_first=True, window=10, text="code", scale=11**-0.5,
)  # fmt: skip
#: The published sizes by the name of their checkpoint.
PUBLISHED = {"0b6": SMALL, "1b7": LARGE, "spark": SPARK, "fish": FISH}
TINY = Shape(
    hidden=48, inter=80, layers=2, heads=4, kv_heads=2, head_dim=32, vocab=80, width=64, width_inter=96, predictor_layers=2, codes=48,
    codebooks=5, control=32,
)  # fmt: skip
TINY_SPARK = replace(SPARK, hidden=48, inter=80, layers=2, head_dim=16, vocab=80, control=16)
TINY_FISH = replace(
    FISH, hidden=48, inter=80, layers=2, heads=8, kv_heads=2, head_dim=16, vocab=80, width=48, width_inter=64, predictor_layers=2, codes=24,
    codebooks=3, control=16, window=5,
)  # fmt: skip


class Maker:
    """Draws tensors from one seed on one device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.empty(shape, device=self.device, dtype=torch.float32).normal_(
            mean, std, generator=self.generator
        )
        return drawn.to(self.dtype)

    def matrix(self, rows: int, inner: int) -> Tensor:
        return self.normal(rows, inner, std=0.8 / inner**0.5)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def stack(
        self,
        hidden: int,
        inter: int,
        layers: int,
        shape: Shape,
        positions: int,
        head_norms: bool | None = None,
    ) -> StackTensors:
        """`head_norms`: other than the shape's for its backbone."""
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        normed = shape.head_norms if head_norms is None else head_norms
        made = [
            Layer(
                input_norm=self.normal(hidden, std=0.1, mean=1.0),
                qkv=self.matrix(q_width + 2 * kv_width, hidden),
                q_norm=self.normal(shape.head_dim, std=0.1, mean=1.0) if normed else None,
                k_norm=self.normal(shape.head_dim, std=0.1, mean=1.0) if normed else None,
                o=self.matrix(hidden, q_width),
                post_norm=self.normal(hidden, std=0.1, mean=1.0),
                gate_up=self.matrix(2 * inter, hidden),
                down=self.matrix(hidden, inter),
                qkv_bias=self.normal(q_width + 2 * kv_width, std=0.5) if shape.qkv_bias else None,
            )
            for _ in range(layers)
        ]
        table = rope_table(positions, shape.head_dim, 1e6, self.dtype, self.device)
        norm = self.normal(hidden, std=0.1, mean=1.0)
        return StackTensors(
            made, norm, table, shape.heads, shape.kv_heads, 1e-6, shape.head_dim**-0.5, shape.wide_rope
        )

    def frame(self, shape: Shape, positions: int = 4096, text_ids: int = 512) -> FrameTensors:
        residuals = shape.codebooks - 1
        rows = shape.vocab + residuals * shape.codes + 1
        table = self.normal(rows, shape.hidden, std=0.3)
        starts = [0, *(shape.vocab + index * shape.codes for index in range(residuals))]
        first = torch.tensor(starts, device=self.device)
        depth = self._depth(shape, table, first) if residuals else None
        text = (
            None if shape.text == "none" else self.normal(max(text_ids, shape.vocab), shape.hidden, std=0.3)
        )
        speech = shape.vocab - shape.control
        return FrameTensors(
            backbone=self.stack(shape.hidden, shape.inter, shape.layers, shape, positions),
            head=self.matrix(shape.vocab, shape.hidden) * 3,
            draw=DrawRules(
                tuple(speech + 2 + 3 * index for index in range(shape.ends)),
                speech,
                shape.nucleus_first,
                shape.window,
            ),
            feedback=Feedback(table, first, text, shape.text == "code", shape.scale),
            depth=depth,
        )

    def _depth(self, shape: Shape, table: Tensor, starts: Tensor) -> DepthTensors:
        project = None
        if shape.hidden != shape.width:
            project = self.matrix(shape.width, shape.hidden), self.normal(shape.width, std=0.02)
        stack = self.stack(
            shape.width,
            shape.width_inter,
            shape.predictor_layers,
            shape,
            shape.codebooks,
            shape.depth_head_norms,
        )
        if shape.one_head:
            heads = (self.matrix(shape.codes, shape.width) * 3).expand(shape.codebooks - 1, -1, -1)
            inputs = self.normal(max(shape.vocab, shape.codes), shape.width, std=0.3)
            return DepthTensors(stack, heads, inputs, torch.zeros_like(starts), project)
        heads = torch.stack([self.matrix(shape.codes, shape.width) * 3 for _ in range(shape.codebooks - 1)])
        inputs = table if project is None else torch.nn.functional.linear(table, *project)
        return DepthTensors(stack, heads, inputs, starts, project)

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
        self,
        shape: Shape,
        slots: int,
        pages: int,
        page_size: int,
        contexts: Tensor,
        greedy: bool = False,
        top_p: bool = False,
    ) -> StateTensors:
        """`slots` live slots at positions `contexts` [slots] with shuffled pages, and a dead one after
        them."""
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
            seen=(torch.rand(slots + 1, shape.vocab, device=self.device, generator=self.generator) < 0.02).to(
                torch.uint8
            ),
            penalty=torch.full((slots + 1,), 1.05, device=self.device),
            min_new_tokens=torch.full((slots + 1,), 2, device=self.device),
            first=self.draw(slots + 1, greedy, top_p),
            residual=self.draw(slots + 1, greedy, top_p),
            recent=self.integers(-1, shape.vocab - shape.control, slots + 1, shape.window),
            dead=slots,
        )
