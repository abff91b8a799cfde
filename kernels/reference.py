"""A frame over the tensors of `kernels.lm_frame`, in the plain PyTorch twins of its ops: what `FusedFrame` is tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import paged_decode_attention
from kernels.layers import codec_embedding_sum, qk_norm_rope_append, rms_norm, swiglu
from kernels.lm_frame import DrawTensors, FrameTensors, StateTensors
from kernels.sampler import frame_noise, process_first, sample


def talker_step(weights: FrameTensors, state: StateTensors, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> Tensor:
    """The talker's state [n, hidden] after the final norm, its keys and values appended. Reads the longest position from the device."""
    stack, page_size = weights.talker, k_cache.shape[3]
    positions, table = state.positions[rows], state.page_table[rows]
    pages, offsets = table.gather(1, (positions // page_size)[:, None])[:, 0], positions % page_size
    longest = int(positions.max()) + 1
    x = state.inputs[rows]
    for index, (input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down) in enumerate(stack.layers):
        packed = functional.linear(rms_norm(x, input_norm, stack.eps), qkv)
        keys, values = k_cache[index], v_cache[index]
        q = qk_norm_rope_append(packed, q_norm, k_norm, stack.eps, stack.rope_table, positions, keys, values, pages, offsets)
        x = x + functional.linear(paged_decode_attention(q, keys, values, table, positions + 1, longest, stack.scale), o)
        x = x + functional.linear(swiglu(functional.linear(rms_norm(x, post_norm, stack.eps), gate_up)), down)
    return rms_norm(x, stack.norm, stack.eps)


def _settings(draw: DrawTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return draw.temperature[rows], draw.top_k[rows], draw.top_p[rows], draw.greedy[rows] != 0


def twin_frame(
    weights: FrameTensors,
    state: StateTensors,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    predict: Callable[..., tuple[Tensor, Tensor, Tensor]],
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One frame; `predict` is the twin of its codebooks 1 and on, as the op `predictor_frame`; `forced` int64 [n, codebooks] is fed in
    place of what was drawn.

    Returns codes int64 [n, codebooks], flags uint8 [n], codebook-0 logits [n, vocab], residual logits float32 [residuals, n, codes].
    """
    predictor, residuals = weights.predictor, weights.heads.shape[0]
    hidden = talker_step(weights, state, k_cache, v_cache, rows)
    logits = functional.linear(hidden, weights.head).float()
    frames = state.frames[rows]
    noise = frame_noise(state.seeds[rows], frames, residuals + 1)
    seen, early = state.seen[rows] != 0, frames < state.min_new_tokens[rows]
    processed = process_first(logits, seen, state.penalty[rows], early, weights.end, weights.suppress_from)
    drawn = sample(processed, noise[:, 0], *_settings(state.first, rows), weights.head.shape[0], True, False)
    first = drawn if forced is None else forced[:, 0]
    projected = hidden if weights.project is None else functional.linear(hidden, *weights.project)
    codes, finite, residual_logits = predict(
        projected, first, [tensor for layer in predictor.layers for tensor in layer], predictor.norm, weights.heads, weights.inputs,
        weights.starts, predictor.rope_table, predictor.kv_heads, predictor.eps, predictor.scale, noise[:, 1:],
        *_settings(state.residual, rows), weights.heads.shape[1], True, False, forced,
    )  # fmt: skip
    fed = codes if forced is None else forced
    text = state.trailing[rows, frames.clamp(max=state.trailing.shape[1] - 1)]
    state.inputs[rows] = codec_embedding_sum(fed, weights.codec_table, weights.starts) + weights.text[text]
    alive = (rows != state.dead).long()
    state.positions[rows] += alive
    state.frames[rows] += alive
    state.seen[rows, fed[:, 0]] = 1
    codes[:, 0] = drawn
    failed = ~(finite & logits.isfinite().all(-1))
    flags = (drawn == weights.end).to(torch.uint8) + 2 * failed.to(torch.uint8)
    return codes, flags, logits, residual_logits
