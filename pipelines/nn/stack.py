"""A stack of Qwen3 decoder layers over paged keys and values: weights packed for few products, arithmetic by ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.layers import qk_norm_rope_append, rms_norm, swiglu
from pipelines.nn.checkpoint import TensorSource


class StackShape(Protocol):
    """The sizes of a stack, as a family's config gives them."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def q_width(self) -> int: ...
    @property
    def kv_width(self) -> int: ...
    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; `qkv` and `gate_up` are the published matrices one below the other."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def tensors(self) -> list[Tensor]:
        """In the order of `kernels.layers.LAYER_TENSORS`."""
        return [self.input_norm, self.qkv, self.q_norm, self.k_norm, self.o, self.post_norm, self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class StackWeights:
    layers: tuple[LayerWeights, ...]
    norm: Tensor


def take_stack(source: TensorSource, prefix: str, shape: StackShape, dtype: torch.dtype, device: torch.device | str) -> StackWeights:
    """Reads `<prefix>layers.*` and `<prefix>norm.weight` with the names of Qwen3.

    Raises `ModelError` (`model.bad_checkpoint`) that names a missing or misshapen tensor.
    """

    def take(name: str, *size: int) -> Tensor:
        return source.take(f"{prefix}{name}.weight", size, dtype, device)

    layers = []
    for index in range(shape.layers):
        at = f"layers.{index}."
        qkv = [take(f"{at}self_attn.{name}_proj", size, shape.hidden) for name, size in zip("qkv", (shape.q_width, *[shape.kv_width] * 2))]
        gate_up = [take(f"{at}mlp.{name}_proj", shape.intermediate, shape.hidden) for name in ("gate", "up")]
        layers.append(
            LayerWeights(
                input_norm=take(f"{at}input_layernorm", shape.hidden),
                qkv=torch.cat(qkv),
                q_norm=take(f"{at}self_attn.q_norm", shape.head_dim),
                k_norm=take(f"{at}self_attn.k_norm", shape.head_dim),
                o=take(f"{at}self_attn.o_proj", shape.hidden, shape.q_width),
                post_norm=take(f"{at}post_attention_layernorm", shape.hidden),
                gate_up=torch.cat(gate_up),
                down=take(f"{at}mlp.down_proj", shape.hidden, shape.intermediate),
            )
        )
    return StackWeights(tuple(layers), take("norm", shape.hidden))


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """The positions of n new tokens, and the page and the offset that hold their keys and values; each [n]."""

    positions: Tensor
    pages: Tensor
    offsets: Tensor


def run_stack(
    x: Tensor,
    weights: StackWeights,
    eps: float,
    rope_table: Tensor,
    tokens: TokenPositions,
    k_cache: Tensor,
    v_cache: Tensor,
    attend: Callable[[int, Tensor], Tensor],
    keys_only_at_the_end: bool = False,
) -> Tensor:
    """All layers over n new tokens, whose keys and values are appended to their pages.

    x: [n, hidden]; k_cache, v_cache: [layers, pages, kv_heads, page_size, head_dim]; attend: (layer, q [n, heads, head_dim]) ->
    [n, heads * head_dim]. Returns [n, hidden] before the final norm; with `keys_only_at_the_end` the last layer stops once its
    keys and values are written, and the result means nothing.
    """
    for index, layer in enumerate(weights.layers):
        packed = functional.linear(rms_norm(x, layer.input_norm, eps), layer.qkv)
        keys, values = k_cache[index], v_cache[index]
        q = qk_norm_rope_append(
            packed, layer.q_norm, layer.k_norm, eps, rope_table, tokens.positions, keys, values, tokens.pages, tokens.offsets
        )
        if keys_only_at_the_end and index == len(weights.layers) - 1:
            break
        x = x + functional.linear(attend(index, q), layer.o)
        x = x + functional.linear(swiglu(functional.linear(rms_norm(x, layer.post_norm, eps), layer.gate_up)), layer.down)
    return x
