"""The fast AR: from one state of the slow AR and the semantic code to the residual codes of a frame, all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from pipelines.fish_speech.config import FishConfig, StackConfig
from pipelines.fish_speech.weights import FAST, NormedSource, projection_name, rotary_table, take_stack

#: Chooses code i of every row: (i, logits [n, codes]) -> int64 [n].
Choose = Callable[[int, Tensor], Tensor]


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + more, and its RMSNorm: float32 statistics, cast back, then the weight. x, more: [n, dim]."""
    if more is not None:
        x = x + more
    wide = x.float()
    return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """[n, 2 * width] -> [n, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates half-split heads in float32. x: [n, heads, head_dim]; cosine, sine: [head_dim / 2], one position for all rows."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Pieces:
    """What stands between the matrix products: plain functions, or compiled ones that are a kernel each."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]] = add_norm
    swiglu: Callable[[Tensor], Tensor] = swiglu
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate

    @classmethod
    def compiled(cls, backend: str = "inductor") -> Pieces:
        # Without `dynamic` only the number of rows becomes a variable, after the first two of them: widths stay constants of the kernels.
        made: list[Any] = [torch.compile(piece, backend=backend) for piece in (add_norm, swiglu, rotate)]
        return cls(*made)


class FastLayer(nn.Module):
    """One layer; `qkv` and `gate_up` are the published matrices one below the other, q and k in half-split order."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        dim, inner = config.dim, config.intermediate
        self.norm1, self.norm2 = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.qkv = nn.Parameter(torch.empty(config.q_width + 2 * config.kv_width, dim))
        self.out = nn.Parameter(torch.empty(dim, config.q_width))
        self.gate_up = nn.Parameter(torch.empty(2 * inner, dim))
        self.down = nn.Parameter(torch.empty(dim, inner))

    def forward(
        self,
        x: Tensor,
        more: Tensor | None,
        pieces: Pieces,
        rotation: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        position: int,
    ) -> tuple[Tensor, Tensor]:
        """x, more: [n, dim], to be added; keys, values: [n, kv_heads, positions, head_dim], filled up to `position` and written there.

        Returns two that are to be added likewise.
        """
        config = self.config
        x, inner = pieces.add_norm(x, more, self.norm1, config.eps)
        packed = linear(inner, self.qkv).unflatten(-1, (-1, config.head_dim))
        turned = pieces.rotate(packed[:, : config.heads + config.kv_heads], *rotation)
        keys[:, :, position] = turned[:, config.heads :]
        values[:, :, position] = packed[:, config.heads + config.kv_heads :]
        seen = slice(0, position + 1)
        query = turned[:, : config.heads, None]
        attended = scaled_dot_product_attention(query, keys[:, :, seen], values[:, :, seen], enable_gqa=config.heads != config.kv_heads)
        x, inner = pieces.add_norm(x, linear(attended.flatten(1), self.out), self.norm2, config.eps)
        return x, linear(pieces.swiglu(linear(inner, self.gate_up)), self.down)


class FastAr(nn.Module):
    """The stack with its own keys and values, which live for one frame: position 0 is the state, position i code i - 1."""

    def __init__(self, config: FishConfig) -> None:
        super().__init__()
        stack = config.fast
        self.config = stack
        self.codebooks = config.codebooks
        self.project = self.project_bias = None
        if stack.dim != config.slow.dim:
            self.project = nn.Parameter(torch.empty(stack.dim, config.slow.dim))
            self.project_bias = nn.Parameter(torch.empty(stack.dim))
        self.embeddings = nn.Parameter(torch.empty(stack.vocab, stack.dim))
        self.layers = nn.ModuleList([FastLayer(stack) for _ in range(stack.layers)])
        self.norm = nn.Parameter(torch.empty(stack.dim))
        self.output = nn.Parameter(torch.empty(stack.vocab, stack.dim))
        cosine, sine = rotary_table(config.codebooks, stack.head_dim, stack.rope_base)
        self.pieces = Pieces()
        # Not of the state dictionary: rounded values in float32, whatever type the weights have.
        self._tables = (cosine, sine)
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """hidden: [n, slow dim], behind the final norm; first: int64 [n], code 0. Returns int64 [n, codebooks]."""
        rows, device = len(hidden), hidden.device
        cosine, sine = self._tables = tuple(table.to(device) for table in self._tables)
        keys, values = self._cache(rows, hidden.dtype, device)
        x = hidden if self.project is None else linear(hidden, self.project, self.project_bias)
        codes = [first]
        for position in range(self.codebooks):
            if position:
                x = embedding(codes[-1], self.embeddings)
            more = None
            for index, layer in enumerate(self.layers):
                x, more = layer(x, more, self.pieces, (cosine[position], sine[position]), keys[index], values[index], position)
            # What follows the state alone would be code 0 again, which the slow AR has chosen already.
            if position:
                _, last = self.pieces.add_norm(x, more, self.norm, self.config.eps)
                codes.append(choose(position, linear(last, self.output)))
        return torch.stack(codes, dim=-1)

    def _cache(self, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys and values, [layers, n, kv_heads, positions, head_dim] each: allocated once a size, since a frame overwrites them whole."""
        if rows not in self._caches:
            config = self.config
            shape = (config.layers, rows, config.kv_heads, self.codebooks, config.head_dim)
            self._caches[rows] = (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        return self._caches[rows]


def fast_tensors(config: FishConfig, source: NormedSource) -> dict[str, Tensor]:
    """The state dictionary of a `FastAr`, from a checkpoint's tensors. Raises as the source does."""
    stack = config.fast
    weights = take_stack(source, FAST, stack)
    tensors = {
        "embeddings": source.take(f"{FAST}embeddings.weight", (stack.vocab, stack.dim)),
        "norm": weights.norm,
        "output": source.take(f"{FAST}output.weight", (stack.vocab, stack.dim)),
    }
    if stack.dim != config.slow.dim:
        place = FAST + projection_name(source)
        tensors["project"] = source.take(f"{place}.weight", (stack.dim, config.slow.dim))
        tensors["project_bias"] = source.take(f"{place}.bias", (stack.dim,))
    for index, layer in enumerate(weights.layers):
        named = {"qkv": layer.qkv, "out": layer.o, "norm1": layer.input_norm, "norm2": layer.post_norm}
        named |= {"gate_up": layer.gate_up, "down": layer.down}
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in named.items()}
    return tensors
