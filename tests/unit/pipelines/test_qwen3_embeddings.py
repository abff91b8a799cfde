"""Embeddings of many prompts of Qwen3-TTS in few launches: each has those that it has alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipelines.qwen3_tts.model import EMBEDDED_POSITIONS, Qwen3TTSModel
from tests.support.qwen3_golden import KINDS, MAX_CONTEXT, golden_model, random_request


class Noted(Qwen3TTSModel):
    """A model that notes the sets of prompts that it embeds."""

    def __init__(self, model: Qwen3TTSModel) -> None:
        super().__init__(model.config, model.weights, MAX_CONTEXT)
        self.sets: list[Sequence[Any]] = []

    def embed(self, *prompts: Any) -> Any:
        self.sets.append(prompts)
        return super().embed(*prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_embedded_together_are_embedded_as_each_alone(kind: str) -> None:
    rng, model = random.Random(kind), Noted(golden_model(kind))
    prompts: list[Any] = []
    while sum(map(len, prompts)) <= 2 * EMBEDDED_POSITIONS:
        prompts.append(random_request(rng, model, str(len(prompts))).prompt)
    with torch.inference_mode():
        found, sets = model.embed_all(prompts), [*model.sets]
        assert [prompt for group in sets for prompt in group] == prompts
        sizes = [sum(map(len, group)) for group in sets]
        assert max(sizes) <= EMBEDDED_POSITIONS
        assert all(size + len(following[0]) > EMBEDDED_POSITIONS for size, following in zip(sizes, sets[1:]))
        for prompt, embeddings in zip(prompts, found, strict=True):
            assert embeddings.shape == (len(prompt), model.config.talker.hidden)
            torch.testing.assert_close(embeddings, model.embed(prompt), rtol=0, atol=0)
    assert kind != "base" or sum(prompt.voice is not None for prompt in prompts) > 1, (
        "no voice vectors were put into their places"
    )
