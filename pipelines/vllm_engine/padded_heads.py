"""Qwen2 and Qwen3 with attention heads that are padded to a width that the device's attention kernels know.

Zeros in the padded part of queries, keys, values and of the output projection change nothing. Rotary embedding turns pairs
(i, i + width / 2), so the real halves go to the start of the padded halves, and theta is raised so that pair i keeps its
angle: theta'^(-2i / padded) = theta^(-2i / width). The attention divides by the square root of the padded width, so queries
are scaled by the square root of padded / width.
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from pipelines.vllm_engine.library import STORED_WIDTH


class PaddedQwen2ForCausalLM(LlamaForCausalLM):
    """Llama's layers do what Qwen2's do, and take a `head_dim` and `qkv_bias` of their own."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        config: Any = self.config
        width, padded = getattr(config, STORED_WIDTH), config.head_dim
        return super().load_weights((name, pad(name, tensor, width, padded)) for name, tensor in weights)


class PaddedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with heads as they are stored, or padded where its config says so."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = self.config
        #: Of the stored heads, and of those that vLLM runs.
        self.widths: tuple[int, int] = (getattr(config, STORED_WIDTH, config.head_dim), config.head_dim)
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            for norm in (attention.q_norm, attention.k_norm):
                norm.variance_epsilon *= self.widths[0] / self.widths[1]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, pad_normed(name, tensor, *self.widths)) for name, tensor in weights)


def pad(name: str, tensor: Tensor, width: int, padded: int) -> Tensor:
    """A stored tensor as the padded model wants it; tensors outside attention come back as they are."""
    if ".self_attn." not in name:
        return tensor
    if ".o_proj." in name:
        return _spread(tensor.T, width, padded, halves=1).T.contiguous()
    if ".v_proj." in name:
        return _spread(tensor, width, padded, halves=1)
    spread = _spread(tensor, width, padded, halves=2)
    return spread * math.sqrt(padded / width) if ".q_proj." in name else spread


def pad_normed(name: str, tensor: Tensor, width: int, padded: int) -> Tensor:
    """`pad` for attention with norms of queries and keys (Qwen3); their epsilon must be multiplied by width / padded.

    The mean of squares over the padded width is smaller by width / padded, so normed values are larger by the root of padded / width.
    For queries that is just the factor that the attention's own scale lacks; for keys their norm's weight takes it back.
    """
    if width == padded or ".self_attn." not in name:
        return tensor
    if ".q_proj." in name or "_norm." in name:
        spread = _spread(tensor, width, padded, halves=2)
        return spread * math.sqrt(width / padded) if ".k_norm." in name else spread
    return pad(name, tensor, width, padded)


def _spread(tensor: Tensor, width: int, padded: int, halves: int) -> Tensor:
    """[heads * width, ...] -> [heads * padded, ...] in float32, zeros behind each half (or whole) of a head."""
    heads = tensor.shape[0] // width
    wide = tensor.new_zeros((heads, halves, padded // halves, *tensor.shape[1:]), dtype=torch.float32)
    wide[:, :, : width // halves] = tensor.view(heads, halves, width // halves, *tensor.shape[1:]).float()
    return wide.reshape(heads * padded, *tensor.shape[1:])
