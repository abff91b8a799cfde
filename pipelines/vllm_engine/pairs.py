"""Guidance pairs: a sequence and its null branch, which advance in lockstep or not at all. Imports no vLLM.

A pair is two requests whose `extra` says so (`Half`). `pipelines.vllm_engine.scheduler` keeps
them in step; samplers look the rows of a step up with `match`, merge those of whole pairs and draw once,
and end a row whose partner is missing with a token that its owner knows, so that no row is ever drawn
unguided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Part = Literal["main", "null"]


class Half(NamedTuple):
    """One of the two sequences of a pair, which have prompts of one length: `TokenRequest.extra["pair"]`."""

    #: A name that no other pair has.
    pair: str
    part: Part
    #: Guidance: merged = scale * main + (1 - scale) * null.
    scale: float


def half_of(extra: Mapping[str, Any]) -> Half | None:
    """The half that a sequence is, None for one that is none: on its way through vLLM it became a list."""
    return Half(*extra["pair"]) if "pair" in extra else None


class Matched(NamedTuple):
    """Row numbers of a step: the halves of whole pairs, side by side, and rows whose partner is not where
    they are."""

    mains: list[int]
    nulls: list[int]
    scales: list[float]
    broken: list[int]


def match(halves: Sequence[Half | None], positions: NDArray[np.int64], whole: NDArray[np.bool_]) -> Matched:
    """Finds the pairs among the rows of a step. Rows that are not whole draw nothing and are left out."""
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
