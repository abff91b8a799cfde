"""Guidance pairs: a sequence and its null branch, which advance in lockstep or not at all. Imports no vLLM.

A pair is two requests whose `extra` says so (`pair_extra`). `pipelines.vllm_engine.pair_scheduler` keeps
them in step; samplers look the rows of a step up with `match`, merge those of whole pairs and draw once,
and end a row whose partner is missing with a token that its owner knows, so that no row is ever drawn
unguided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Part = Literal["main", "null"]


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two sequences of a pair."""

    pair: str
    part: Part
    #: Guidance: merged = scale * main + (1 - scale) * null.
    scale: float


def pair_extra(pair: str, part: Part, scale: float) -> dict[str, Any]:
    """Keys of `TokenRequest.extra`; `pair` is a name that no other pair has, and both halves have prompts
    of one length."""
    return {"pair": pair, "part": part, "scale": scale}


def half_of(extra: Mapping[str, Any]) -> Half | None:
    """What `pair_extra` wrote; None for a sequence that is no half."""
    return Half(extra["pair"], extra["part"], float(extra["scale"])) if "pair" in extra else None


@dataclass(slots=True)
class Matched:
    """Row numbers of a step: the halves of whole pairs, side by side, and rows whose partner is not where
    they are."""

    mains: list[int] = field(default_factory=list[int])
    nulls: list[int] = field(default_factory=list[int])
    scales: list[float] = field(default_factory=list[float])
    broken: list[int] = field(default_factory=list[int])


def match(halves: Sequence[Half | None], positions: NDArray[np.int64], whole: NDArray[np.bool_]) -> Matched:
    """Finds the pairs among the rows of a step. Rows that are not whole draw nothing and are left out."""
    found, seen = Matched(), dict[str, dict[Part, int]]()
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
            found.broken += rows.values()
    return found
