"""What only the step behind vLLM's slow AR shows of Fish Speech S2 against a golden folder: a hundred thousand draws of its own sampler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.sampler import RETRY_TEMPERATURE, RETRY_TOP_P
from pipelines.fish_speech.frame import (
    Ranked,
    draw,
    probabilities,
    ranked,
    repetition_aware,
    uniform_noise,
)
from tests.conformance.fish_native import DRAWS, allowed, window_chances
from tests.conformance.token_engines import check_share

if TYPE_CHECKING:
    from tests.conformance.fish import Case, Golden, Item


def cases(golden: Golden) -> Iterator[Case]:
    """The draws of the sampler."""
    for case in golden.cases.values():
        if case["kind"] == "sampling_distribution":
            yield f"{case['kind']} {case['name']}", partial(_draws, golden, case)


def _draws(golden: Golden, case: Item) -> None:
    """Draws with the noise of as many seeds, and tokens beside a window, from the same probabilities as on our own engine."""
    arrays, ids = golden.arrays(case["file"]), allowed(golden)
    slow, fast = torch.from_numpy(arrays["slow_logits"])[None, ids], torch.from_numpy(arrays["fast_logits"])[None]
    noise = _noise(max(slow.shape[1], fast.shape[1]))
    for index, (temperature, top_p, top_k) in enumerate(case["settings"]):
        for stream, (kind, logits) in enumerate((("slow", slow), ("fast", fast))):
            codes = _drawn(logits, float(temperature), float(top_p), int(top_k), noise[:, stream])
            wanted = arrays[f"{kind}_probs_{index}"].astype(np.float64)
            check_share(f"{kind} settings {index}", (ids[codes] if kind == "slow" else codes).tolist(), wanted)
    chances, (temperature, top_k, top_p), window = window_chances(golden, case)
    first = _drawn(slow, temperature, top_p, top_k, noise[:, 0])
    again = _drawn(slow, RETRY_TEMPERATURE, RETRY_TOP_P, top_k, noise[:, 1])
    codes = repetition_aware(first, again, window, range(len(ids) - 1))
    check_share("beside a window", codes.tolist(), chances)


def _drawn(logits: Tensor, temperature: float, top_p: float, top_k: int, noise: Tensor) -> Tensor:
    """Draws from one row of logits [1, values], int64 [n]; noise: float32 [n, ranks]."""
    one = ranked(logits, 0)
    chances = probabilities(one, torch.tensor([temperature]), torch.tensor([top_p]), torch.tensor([top_k]))
    # One row stands for all: they differ in their noise.
    return draw(Ranked(one.logits, one.order.expand(len(noise), -1), one.cumulative), chances, noise[:, : chances.shape[1]])


def _noise(ranks: int) -> Tensor:
    """float32 [draws, 2, ranks] of as many seeds."""
    seeds = torch.arange(DRAWS).split(DRAWS // 10)
    return torch.cat([uniform_noise(part, torch.zeros_like(part), 2, ranks) for part in seeds])
