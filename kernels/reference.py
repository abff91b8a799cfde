"""A frame in single PyTorch ops, on any device. The eager executor runs it, and fused frames are tested against
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from kernels.attention import paged_decode_attention
from kernels.frame import DepthTensors, Feedback, FrameTensors, StackTensors, StateTensors
from kernels.layers import qk_norm_rope_append, rms_norm, swiglu
from kernels.sampler import (
    RETRY_TEMPERATURE,
    RETRY_TOP_P,
    DrawFlags,
    all_finite,
    frame_noise,
    is_one_of,
    log_probability,
    process_first,
    sample,
)

#: Bits of a frame's flags.
ENDED = 1
NOT_FINITE = 2


class FrameOutput(NamedTuple):
    """One frame of n rows. The engine reads `codes`, `flags` and `log_probabilities`; the rest is for tests."""

    #: int64 [n, codebooks]; uint8 [n]; float32 [n], of the drawn codes 0 (`kernels.sampler.log_probability`).
    codes: Tensor
    flags: Tensor
    log_probabilities: Tensor
    #: float32 [n, vocab], the raw logits of code 0; [n, hidden], the backbone's state after the final norm;
    #: float32 [codebooks - 1, n, codes], the logits of the other codebooks.
    first_logits: Tensor
    hidden: Tensor
    residual_logits: Tensor


def run_stack(
    x: Tensor,
    stack: StackTensors,
    tokens: tuple[Tensor, Tensor, Tensor],
    k_cache: Tensor,
    v_cache: Tensor,
    attend: Callable[..., Tensor],
    keys_only_at_the_end: bool = False,
) -> Tensor:
    """Runs all layers over n new tokens, and appends their keys and values to their pages.

    x: [n, hidden]; tokens: their positions, and the page and the offset there of their keys and values, each [n];
    k_cache, v_cache: [layers, pages, kv_heads, page_size, head_dim]; attend: (q [n, heads, head_dim], the layer's
    k_cache and v_cache, scale) -> [n, heads * head_dim]. Returns [n, hidden] before the final norm. With
    `keys_only_at_the_end` the last layer stops after it has written its keys and values, and the result is
    undefined.
    """
    positions, pages, offsets = tokens
    eps = stack.eps
    angles = stack.rope_table[positions]
    for index, layer in enumerate(stack.layers):
        packed = linear(rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        q = qk_norm_rope_append(packed, layer, stack, angles, k_cache[index], v_cache[index], pages, offsets)
        if keys_only_at_the_end and index == len(stack.layers) - 1:
            break
        mixed = attend(q, k_cache[index], v_cache[index], scale=stack.scale)
        x = x + linear(mixed, layer.o)
        x = x + linear(swiglu(linear(rms_norm(x, layer.post_norm, eps), layer.gate_up)), layer.down)
    return x


def draw_frame(
    weights: FrameTensors,
    state: StateTensors,
    rows: Tensor,
    hidden: Tensor,
    first_flags: DrawFlags,
    residual_flags: DrawFlags,
    forced: Tensor | None = None,
) -> FrameOutput:
    """Computes one frame of the slots `rows` int64 [n] after `backbone_step` (the draws, the next input) and updates
    the state.

    hidden: [n, hidden], the state that the step returned; first_flags, residual_flags: `DrawFlags.of` the rows'
    settings; forced: int64 [n, codebooks], codes that are fed back instead of the drawn ones.
    """
    rules = weights.draw
    depth = weights.depth
    logits = linear(hidden, weights.head).float()
    frames = state.frames[rows]
    noise = frame_noise(state.seeds[rows], frames, weights.codebooks + (rules.window > 0))
    drawn = draw_first(weights, state, rows, logits, noise, first_flags)
    codes = drawn[:, None]
    finite = all_finite(logits)
    residual = logits.new_empty(0, len(rows), 0)
    if depth is not None:
        first = drawn if forced is None else forced[:, 0]
        settings = state.residual.rows(rows)
        codes, depth_finite, residual = depth_frame(
            depth, hidden, first, noise[:, 1:], settings, residual_flags, rules.nucleus_first, forced
        )
        codes[:, 0] = drawn
        finite = finite & depth_finite
    # Writes the next input, position and history of each row. The position of the dead slot does not change.
    alive = rows != state.dead
    fed = codes if forced is None else forced
    text = state.trailing[rows, frames.clamp(max=state.trailing.shape[1] - 1)]
    state.inputs[rows] = next_inputs(weights.feedback, fed, text)
    state.positions[rows] += alive
    state.frames[rows] += alive
    state.seen[rows, fed[:, 0]] = True
    if window := state.recent.shape[1]:
        # A request's first code does not count as recent, as in the published loop.
        state.recent[rows, frames % window] = torch.where((frames > 0) & alive, fed[:, 0], -1)
    flags = is_one_of(drawn, rules.ends).to(torch.uint8) * ENDED + (~finite).to(torch.uint8) * NOT_FINITE
    own = log_probability(logits, drawn, rules.ends, rules.suppress_from)
    return FrameOutput(codes, flags, own, logits, hidden, residual)


def backbone_step(
    stack: StackTensors, state: StateTensors, k_cache: Tensor, v_cache: Tensor, rows: Tensor, max_length: int
) -> Tensor:
    """Runs the backbone on the next input of each row, and appends the keys and values. max_length: at least the
    longest context after this frame. Returns the state [n, hidden] after the final norm."""
    page_size = k_cache.shape[3]
    positions = state.positions[rows]
    table = state.page_table[rows]
    pages = table.gather(1, (positions // page_size)[:, None])[:, 0]
    lengths = torch.where(rows == state.dead, 0, positions + 1)
    attend = partial(paged_decode_attention, page_table=table, lengths=lengths, max_length=max_length)
    tokens = positions, pages, positions % page_size
    out = run_stack(state.inputs[rows], stack, tokens, k_cache, v_cache, attend)
    return rms_norm(out, stack.norm, stack.eps)


def draw_first(
    weights: FrameTensors, state: StateTensors, rows: Tensor, logits: Tensor, noise: Tensor, flags: DrawFlags
) -> Tensor:
    """Draws code 0 of each row, int64 [n]."""
    rules = weights.draw
    early = state.frames[rows] < state.min_new_tokens[rows]
    processed = process_first(
        logits, state.seen[rows] != 0, state.penalty[rows], early, rules.ends, rules.suppress_from
    )
    temperature, top_k, top_p, greedy = settings = state.first.rows(rows)
    drawn = sample(processed, noise[:, 0], settings, flags, rules.nucleus_first)
    if rules.window == 0 or flags.all_greedy:
        return drawn
    warm = torch.full_like(temperature, RETRY_TEMPERATURE)
    wide = torch.full_like(top_p, RETRY_TOP_P)
    flags = DrawFlags(flags.max_top_k, any_top_p=True, all_greedy=False)
    again = sample(processed, noise[:, -1], (warm, top_k, wide, greedy), flags, rules.nucleus_first)
    return torch.where((state.recent[rows] == drawn[:, None]).any(-1), again, drawn)


def depth_frame(
    depth: DepthTensors,
    hidden: Tensor,
    first: Tensor,
    random: Tensor,
    settings: Sequence[Tensor],
    flags: DrawFlags,
    nucleus_first: bool,
    forced: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws the codebooks after code 0. The cache of the frame's positions exists only within this call.

    hidden: [n, hidden], the backbone's state; first: int64 [n], code 0; random: int64 [n, codebooks - 1
    or more]; settings: as in `sample`; forced: int64 [n, codebooks], codes that are fed instead of the drawn
    ones. Returns codes int64 [n, codebooks], whether the logits are finite, bool [n], and logits float32
    [codebooks - 1, n, codes].
    """
    stack = depth.stack
    later = depth.heads.shape[0]
    cache = hidden.new_empty(2, len(stack.layers), hidden.shape[0], stack.kv_heads, later + 1, stack.head_dim)
    codes = [first]
    kept = []
    finite = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    start = hidden if depth.project is None else linear(hidden, *depth.project)
    x = torch.stack((start, depth.inputs[first + depth.starts[0]]), dim=1)
    for step in range(later):
        out = _depth_step(x, 0 if step == 0 else step + 1, stack, cache)
        logits = linear(rms_norm(out[:, -1], stack.norm, stack.eps), depth.heads[step]).float()
        finite &= all_finite(logits)
        kept.append(logits)
        code = sample(logits, random[:, step], settings, flags, nucleus_first)
        codes.append(code)
        fed = code if forced is None else forced[:, step + 1]
        x = depth.inputs[fed + depth.starts[step + 1]][:, None]
    return torch.stack(codes, dim=1), finite, torch.stack(kept)


def _depth_step(x: Tensor, start: int, stack: StackTensors, cache: Tensor) -> Tensor:
    """Runs all layers over the new positions from `start`. x: [n, new, width] -> [n, new, width].

    cache: [2, layers, n, kv_heads, positions, head_dim], so that the positions of a row are one page.
    """
    rows, new, width = x.shape
    positions = torch.arange(start, start + new, device=x.device).repeat(rows)
    pages = torch.arange(rows, device=x.device).repeat_interleave(new)

    def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        queries = q.view(rows, new, -1, stack.head_dim).transpose(1, 2)
        keys = keys[:, :, : start + new]
        values = values[:, :, : start + new]
        mixed = scaled_dot_product_attention(
            queries, keys, values, is_causal=new > 1, scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(rows * new, -1)

    tokens = positions, pages, positions
    return run_stack(x.flatten(0, 1), stack, tokens, cache[0], cache[1], attend).view(rows, new, width)


def next_inputs(feedback: Feedback, codes: Tensor, text: Tensor) -> Tensor:
    """The backbone's inputs after a frame. codes: int64 [n, codebooks]; text: int64 [n], each row's text
    id -> [n, hidden]."""
    made = feedback.table[codes + feedback.starts].sum(dim=1)
    if feedback.text is not None:
        made = made + feedback.text[codes[:, 0] if feedback.text_by_code else text]
    return made if feedback.scale == 1 else made * feedback.scale
