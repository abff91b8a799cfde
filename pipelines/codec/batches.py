"""Divides utterances into batches that a codec decodes together: batches of the lowest cost, or of fixed
shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

#: Lengths are padded to a multiple of this, which bounds the number of shapes.
LENGTH_STEP = 8
#: The minimum cost of a batch, and the additional cost of every batch, in frames.
MIN_FRAMES = 600
BATCH_COST = 100
#: The cost of a padded frame for kernels that skip positions after the end of a row: only the layers before
#: the convolutions compute it.
PADDING_COST = 0.1
#: Rows of every batch in reproducible mode.
FIXED_ROWS = 8


def round_up(frames: int) -> int:
    """The padded length of an utterance."""
    return -(-frames // LENGTH_STEP) * LENGTH_STEP


def by_length(lengths: Sequence[int]) -> list[int]:
    """Indices of the utterances that are not empty, the longest first."""
    return sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])


def longest_first(lengths: Sequence[int], max_frames: int) -> list[list[int]]:
    """Indices of utterances in batches of up to `max_frames` padded frames, the longest first, so that the
    lengths in a batch are similar."""
    found = list[list[int]]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= max_frames:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def cheapest_batches(
    lengths: Sequence[int], max_frames: int, pass_frames: int, padding_cost: float = 1.0
) -> list[list[int]]:
    """Divides utterances into batches of the lowest cost, the longest first; omits empty ones.

    A batch is as wide as its longest utterance and has up to `max_frames` frames; a row counts as up to
    `pass_frames` frames, since longer ones are decoded in passes of that length. `padding_cost`: the cost of
    a padded frame in a batch of one pass; the cost is 1 in batches of several passes.
    """
    order = by_length(lengths)
    widths = [round_up(lengths[i]) for i in order]
    shares = [padding_cost if width <= pass_frames else 1.0 for width in widths]
    limits = [max(max_frames // min(width, pass_frames), 1) for width in widths]
    frames = [0, *accumulate(lengths[i] for i in order)]
    # For the first `end` utterances: the lowest cost, and where their last batch begins. With hundreds of
    # utterances this takes milliseconds, so the inner loop calls no function.
    costs = [0.0]
    begins = [0]
    for end in range(1, len(order) + 1):
        least = math.inf
        first = end - 1
        for begin in range(end - 1, -1, -1):
            rows = end - begin
            if rows > limits[begin]:
                break
            real = frames[end] - frames[begin]
            own = real + shares[begin] * (rows * widths[begin] - real)
            cost = costs[begin] + (own if own > MIN_FRAMES else MIN_FRAMES)
            if cost <= least:
                least = cost
                first = begin
        costs.append(least + BATCH_COST)
        begins.append(first)
    batches = list[list[int]]()
    end = len(order)
    while end:
        begin = begins[end]
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]


def same_length_batches(lengths: Sequence[int], warm: Sequence[bool]) -> list[list[int]]:
    """Batches of up to `FIXED_ROWS` utterances of one padded length, all of which continue from a state (`warm`)
    or none: the shape of an utterance's batch depends on its length only. Omits empty ones."""
    sizes = dict[tuple[bool, int], list[int]]()
    for i in by_length(lengths):
        sizes.setdefault((warm[i], round_up(lengths[i])), []).append(i)
    return [
        same[start : start + FIXED_ROWS]
        for same in sizes.values()
        for start in range(0, len(same), FIXED_ROWS)
    ]
