"""Layers of which only the attention is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.frame import Layer, StackTensors

EPS = 1e-6


def attention_layer(
    norms: Sequence[Tensor | None], table: Tensor, wide_rope: bool = False
) -> tuple[Layer, StackTensors]:
    """A layer with these norms of queries and keys, and its stack, whose rotary embedding has this table."""
    q_norm, k_norm = norms
    layer = Layer(table, table, table, table, table, table, q_norm, k_norm)
    return layer, StackTensors([layer], table, table, 1, 1, EPS, table.shape[1] ** -0.5, wide_rope)


#: The stack of a model with one head of one value.
SMALLEST = attention_layer((None, None), torch.zeros(1, 1))[1]
