"""Guidance pairs: a sequence and its null branch, which advance in lockstep. Imports no vLLM.

A pair is two requests with a `Half` in their `extra`. `pipelines.vllm_engine.scheduler` keeps them in
lockstep. Samplers find the pairs of a step with `match`, merge the logits of complete pairs and draw once.
They end a row without its partner with a token that the model's pipeline recognizes, so that no row is drawn
without guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Part = Literal["main", "null"]


class Half(NamedTuple):
    """One of the two sequences of a pair, which have prompts of one length: `TokenRequest.extra["pair"]`."""

    #: A unique name of the pair.
    pair: str
    part: Part
    #: Guidance: merged = scale * main + (1 - scale) * null.
    scale: float


def half_of(extra: Mapping[str, Any]) -> Half | None:
    """The `Half` of a sequence, None if it has none; vLLM converts it to a list."""
    return Half(*extra["pair"]) if "pair" in extra else None


class Matched(NamedTuple):
    """Row numbers of a step: the two halves of complete pairs, and rows without a partner at their position."""

    mains: list[int]
    nulls: list[int]
    scales: list[float]
    broken: list[int]


def match(halves: Sequence[Half | None], positions: NDArray[np.int64], whole: NDArray[np.bool_]) -> Matched:
    """Finds the pairs in a step. Rows whose prompt is incomplete draw nothing and are skipped."""
    found, seen = Matched([], [], [], []), dict[str, dict[Part, int]]()
    for row, half in enumerate(halves):
        if half is not None and whole[row]:
            seen.setdefault(half.pair, {})[half.part] = row
    for rows in seen.values():
        if len(rows) == 2 and positions[rows["main"]] == positions[rows["null"]]:
            half = halves[rows["main"]]
            assert half is not None
            found.mains.append(rows["main"])
            found.nulls.append(rows["null"])
            found.scales.append(half.scale)
        else:
            found.broken.extend(rows.values())
    return found
