"""Decoder layers of a checkpoint with the names of Qwen2 and Qwen3, packed for few products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.frame import Layer, StackTensors
from pipelines.nn.checkpoint import Loader
from pipelines.nn.config_keys import StackConfig


@dataclass(frozen=True, slots=True)
class StackWeights:
    """The tensors of a stack: its layers, and the norm behind them."""

    layers: tuple[Layer, ...]
    norm: Tensor

    def tensors(self, shape: StackConfig, rope_table: Tensor, wide_rope: bool = False) -> StackTensors:
        """The stack as a frame takes it, with attention scaled by the root of `head_dim`."""
        scale = shape.head_dim**-0.5
        return StackTensors(
            self.layers, self.norm, rope_table, shape.heads, shape.kv_heads, shape.eps, scale, wide_rope
        )


def take_stack(
    load: Loader, shape: StackConfig, *, head_norm: bool = True, qkv_bias: bool = False
) -> StackWeights:
    """Reads `layers.*` and `norm.weight` with the names of Qwen3 (`head_norm`) or Qwen2
    (`qkv_bias`).

    Raises `ModelError` (`model.bad_checkpoint`) that names a missing or misshapen tensor.
    """
    widths = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]

    layers = []
    for index in range(shape.layers):
        take = load.at(f"layers.{index}.")
        qkv = [
            take(f"self_attn.{name}_proj.weight", width, shape.hidden) for name, width in zip("qkv", widths)
        ]
        bias = (
            [take(f"self_attn.{name}_proj.bias", width) for name, width in zip("qkv", widths)]
            if qkv_bias
            else []
        )
        gate_up = [
            take(f"mlp.{name}_proj.weight", shape.intermediate, shape.hidden) for name in ("gate", "up")
        ]
        norms = [
            take(f"self_attn.{name}_norm.weight", shape.head_dim) if head_norm else None for name in "qk"
        ]
        layers.append(
            Layer(
                input_norm=take("input_layernorm.weight", shape.hidden),
                qkv=torch.cat(qkv),
                o=take("self_attn.o_proj.weight", shape.hidden, widths[0]),
                post_norm=take("post_attention_layernorm.weight", shape.hidden),
                gate_up=torch.cat(gate_up),
                down=take("mlp.down_proj.weight", shape.hidden, shape.intermediate),
                q_norm=norms[0],
                k_norm=norms[1],
                qkv_bias=torch.cat(bias) if bias else None,
            )
        )
    return StackWeights(tuple(layers), load("norm.weight", shape.hidden))
