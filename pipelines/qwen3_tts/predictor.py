"""The code predictor's frame: codebooks 1.. of one frame, from the talker's state and codebook 0."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.layers import LAYER_TENSORS, rms_norm, rope, swiglu
from kernels.registry import op
from kernels.sampler import all_finite, sample


@op(
    "predictor_frame(Tensor hidden, Tensor first, Tensor[] weights, Tensor norm, Tensor heads, Tensor inputs, Tensor starts, "
    "Tensor rope_table, int kv_heads, float eps, float scale, Tensor random, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor greedy, int max_top_k, bool any_top_p, bool all_greedy, Tensor? forced=None) -> (Tensor, Tensor, Tensor)"
)
def predictor_frame(
    hidden: Tensor,
    first: Tensor,
    weights: list[Tensor],
    norm: Tensor,
    heads: Tensor,
    inputs: Tensor,
    starts: Tensor,
    rope_table: Tensor,
    kv_heads: int,
    eps: float,
    scale: float,
    random: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    greedy: Tensor,
    max_top_k: int,
    any_top_p: bool,
    all_greedy: bool,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs all residual codebooks of a frame; the cache of its 16 positions lives only here.

    hidden: [n, width], the talker's state, already projected; first: int64 [n], codebook 0; weights: `LAYER_TENSORS` of every layer;
    norm: [width]; heads: [residuals, codes, width]; inputs: [rows, width], projected embeddings of all codebooks one after the
    other; starts: [codebooks], the first row of each; rope_table: [>= codebooks, head_dim]; random: int64 [n, residuals];
    sampling settings as in `sample`; forced: int64 [n, codebooks] to feed instead of what was drawn.
    Returns codes int64 [n, codebooks], finite: bool [n], and float32 logits [residuals, n, codes].
    """
    residuals = heads.shape[0]
    head_dim = rope_table.shape[1]
    cache = hidden.new_empty(2, len(weights) // len(LAYER_TENSORS), hidden.shape[0], kv_heads, residuals + 1, head_dim)
    codes = [first]
    finite = torch.ones_like(greedy)
    kept = []
    x = torch.stack((hidden, inputs[first + starts[0]]), dim=1)
    for step in range(residuals):
        out = _forward(x, 0 if step == 0 else step + 1, weights, cache, rope_table, eps, scale)
        logits = functional.linear(rms_norm(out[:, -1], norm, eps), heads[step]).float()
        finite &= all_finite(logits)
        kept.append(logits)
        code = sample(logits, random[:, step], temperature, top_k, top_p, greedy, max_top_k, any_top_p, all_greedy)
        codes.append(code)
        fed = code if forced is None else forced[:, step + 1]
        x = inputs[fed + starts[step + 1]][:, None]
    return torch.stack(codes, dim=1), finite, torch.stack(kept)


def _forward(x: Tensor, start: int, weights: list[Tensor], cache: Tensor, table: Tensor, eps: float, scale: float) -> Tensor:
    """All layers over the new positions from `start` on; x: [n, new, width] -> [n, new, width]."""
    rows, new, _ = x.shape
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    angles = table[start : start + new].repeat(rows, 1)
    end = start + new
    for layer in range(cache.shape[1]):
        input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down = weights[
            layer * len(LAYER_TENSORS) : (layer + 1) * len(LAYER_TENSORS)
        ]
        packed = functional.linear(rms_norm(x, input_norm, eps), qkv).view(rows * new, -1, head_dim)
        q, k, v = packed.split((packed.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        keys, values = cache[0, layer], cache[1, layer]
        keys[:, :, start:end] = rope(rms_norm(k, k_norm, eps), angles).view(rows, new, kv_heads, head_dim).transpose(1, 2)
        values[:, :, start:end] = v.reshape(rows, new, kv_heads, head_dim).transpose(1, 2)
        q = rope(rms_norm(q, q_norm, eps), angles).view(rows, new, -1, head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], is_causal=new > 1, scale=scale, enable_gqa=True
        )
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), o)
        x = x + functional.linear(swiglu(functional.linear(rms_norm(x, post_norm, eps), gate_up)), down)
    return x
