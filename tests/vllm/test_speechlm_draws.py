"""How SpeechLM's codes are drawn in the engine: each row by the settings of its own request's audio."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.vllm_v2 import require_v2

require_v2()

from pipelines.engine.state import Placement, SamplingParams, SlotState  # noqa: E402
from pipelines.speechlm.vllm_model import SpeechLmState  # noqa: E402

STREAMS, LAYER, SLOTS = 2, 4, 3


def test_codes_are_drawn_with_the_top_k_of_the_audio() -> None:
    """Of slots 2, 0, 1: the likeliest code alone, the two likeliest, and all of them."""
    state = object.__new__(SpeechLmState)
    state._config = SimpleNamespace(streams=STREAMS, codec_layer_size=LAYER)  # pyright: ignore[reportAttributeAccessIssue]
    state.drawing = drawing = SlotState(SLOTS, 1, 1, 1, 0, 0, torch.float32, torch.device("cpu"))
    slots, top_k = torch.tensor([2, 0, 1]), (1, 2, 0)
    for slot, k in zip(slots.tolist(), top_k):
        sampling = SamplingParams(1.0, 3 - k, 1.0, 1.0, 1.0, k, 1.0, min_new_tokens=1_000)
        drawing.place([Placement(slot, (), 0, sampling, np.zeros(0, np.int64), torch.zeros(1), 0)])
    step: Any = SimpleNamespace(slots=slots, positions=torch.ones(3, dtype=torch.int64))
    held: Any = [SimpleNamespace(audio=(1.0, int(k), 1.0)) for k in top_k]
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1] * STREAMS + [0.0, 0.0]] * 3)
    drawn: list[set[int]] = [set(), set(), set()]
    for number in range(64):
        noise = torch.full((3, STREAMS), number << 26, dtype=torch.int64)
        for row, codes in enumerate(state._draw_audio(logits, step, noise, held).tolist()):
            drawn[row] |= set(codes)
    assert drawn == [{0}, {0, 1}, {0, 1, 2, 3}]
