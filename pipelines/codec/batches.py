"""Which utterances a codec decodes together: batches that cost the least, or that meet one shape whatever
their company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

#: Lengths are filled up to a multiple of this, which bounds the number of shapes that kernels and libraries
#: meet.
LENGTH_STEP = 8
#: Frames that a batch costs at least, however small (its launches), and that each batch costs beside its own.
MIN_FRAMES, BATCH_COST = 600, 100
#: Of a padded frame, where kernels pass over what lies behind the end of a row: only what stands in front of
#: the convolutions makes it.
PADDING_COST = 0.1
#: Rows of every batch in reproducible mode.
FIXED_ROWS = 8


def round_up(frames: int) -> int:
    """The length that an utterance of so many frames is filled up to."""
    return -(-frames // LENGTH_STEP) * LENGTH_STEP


def longest_first(lengths: Sequence[int], max_frames: int) -> list[list[int]]:
    """Indices of utterances in batches of at most `max_frames` padded frames, the longest first, so that
    neighbours are alike."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= max_frames:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def cheapest(
    lengths: Sequence[int], max_frames: int, pass_frames: int, padding_cost: float = 1.0
) -> list[list[int]]:
    """The cut of utterances into batches that costs the least by the figures above; empty ones are left out.

    A batch is as wide as its longest utterance and has at most `max_frames` frames, of which a row counts
    at most `pass_frames`: longer ones are decoded in passes of that many. The longest utterances come
    first. `padding_cost`: of a padded frame, in frames of an utterance; 1 in a batch that is decoded in
    passes.
    """
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    widths = [round_up(lengths[i]) for i in order]
    shares = [padding_cost if width <= pass_frames else 1.0 for width in widths]
    most = [max(max_frames // min(width, pass_frames), 1) for width in widths]
    frames = [0, *accumulate(lengths[i] for i in order)]
    # Of the first `end` utterances: the least cost, and where their last batch begins. Hundreds of utterances
    # make this the thread's work of milliseconds, so the loop calls nothing.
    costs, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        least, first = math.inf, end - 1
        for begin in range(end - 1, -1, -1):
            rows = end - begin
            if rows > most[begin]:
                break
            real = frames[end] - frames[begin]
            own = real + shares[begin] * (rows * widths[begin] - real)
            cost = costs[begin] + (own if own > MIN_FRAMES else MIN_FRAMES)
            if cost <= least:
                least, first = cost, begin
        costs.append(least + BATCH_COST)
        begins.append(first)
    batches: list[list[int]] = []
    end = len(order)
    while end:
        begin = begins[end]
        batches.append(order[begin:end])
        end = begin
    return batches[::-1]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of at most `FIXED_ROWS` utterances of one filled-up length: the shape that an utterance
    meets depends on its length only."""
    sizes: dict[int, list[int]] = {}
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        sizes.setdefault(round_up(lengths[i]), []).append(i)
    return [
        same[start : start + FIXED_ROWS]
        for same in sizes.values()
        for start in range(0, len(same), FIXED_ROWS)
    ]
