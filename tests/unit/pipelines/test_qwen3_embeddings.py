"""Embeddings of many prompts of Qwen3-TTS in few launches: each has those that it has alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pipelines.qwen3_tts.model import EMBEDDED_POSITIONS
from tests.support.qwen3_golden import KINDS, golden_model, random_request


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_embedded_together_are_embedded_as_each_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, model = random.Random(kind), golden_model(kind)
    prompts: list[Any] = []
    while sum(map(len, prompts)) <= 2 * EMBEDDED_POSITIONS:
        prompts.append(random_request(rng, model, str(len(prompts))).prompt)
    sets: list[Sequence[Any]] = []
    one_set = model.embed
    monkeypatch.setattr(model, "embed", lambda *group: sets.append(group) or one_set(*group))
    with torch.inference_mode():
        found = model.embed_all(prompts)
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
