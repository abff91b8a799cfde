"""Embeddings of many prompts of Qwen3-TTS in few launches: each has those that it has alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pipelines.qwen3_tts import model as qwen3_model
from tests.support.qwen3_golden import KINDS, golden_model, random_request


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [2048, 60, 1])
def test_prompts_embedded_together_are_embedded_as_each_alone(
    kind: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen3_model, "EMBEDDED_POSITIONS", together)
    rng, model = random.Random(kind), golden_model(kind)
    prompts: list[Any] = [random_request(rng, model, str(index)).prompt for index in range(12)]
    sets: list[int] = []
    one_set = model.embed
    monkeypatch.setattr(model, "embed", lambda *group: sets.append(len(group)) or one_set(*group))
    with torch.inference_mode():
        found = model.embed_all(prompts)
        assert sum(sets) == len(prompts)
        assert len(sets) == {2048: 1, 1: 12}.get(together, len(sets))
        for prompt, embeddings in zip(prompts, found, strict=True):
            assert embeddings.shape == (len(prompt), model.config.talker.hidden)
            torch.testing.assert_close(embeddings, model.embed(prompt), rtol=0, atol=0)
    assert kind != "base" or sum(prompt.voice_at is not None for prompt in prompts) > 1, (
        "no voice vectors were put into their places"
    )
