"""Bits at real widths: here products of other heights do round differently, so a batch that leaks would
show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipelines.engine.executor import CPU_ROWS
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from tests.support.qwen3_golden import GOLDEN, MAX_CONTEXT, Recorder, make_core, random_request


class MadeUp:
    """Random weights of any shape."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: object = None
    ) -> Tensor:
        scale = 1.0 if "norm" in name else shape[-1] ** -0.5
        return torch.randn(tuple(shape), generator=self.generator) * scale


@cache
def wide_model() -> Qwen3TTSModel:
    torch.set_num_threads(1)
    config = Qwen3TTSConfig.from_folder(Path(GOLDEN) / "checkpoint-base")
    talker = replace(config.talker, hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=4, head_dim=64)
    predictor = replace(
        config.predictor, hidden=256, intermediate=768, layers=1, heads=4, kv_heads=2, head_dim=64
    )
    config = replace(config, talker=talker, predictor=predictor, text_hidden=512)
    return Qwen3TTSModel(config, take_weights(MadeUp(), config, torch.float32, "cpu"), MAX_CONTEXT)


def test_products_of_one_height_do_not_depend_on_the_place() -> None:
    """What the fixed batch of the CPU rests on, for the shapes of the published models."""
    generator = torch.Generator().manual_seed(3)
    for width, out in (
        (1024, 4096),
        (1024, 2048),
        (3072, 1024),
        (2048, 1024),
        (1024, 3072),
        (256, 1536),
        (80, 33),
    ):
        weight, row = torch.randn(out, width, generator=generator), torch.randn(width, generator=generator)
        results = []
        for place in range(0, CPU_ROWS, 5):
            rows = torch.randn(CPU_ROWS, width, generator=generator)
            rows[place] = row
            results.append(functional.linear(rows, weight)[place])
        assert all(torch.equal(results[0], other) for other in results[1:]), f"{width} to {out}"


def keys_and_values(members: list[GenerationRequest], frames: int) -> dict[GenerationRequest, Tensor]:
    """Keys and values of all positions of each request after some frames: the bits of everything that the
    talker computed."""
    core = make_core(wide_model(), Recorder(), slots=8)
    for request in members:
        core.add(request)
    kept: dict[GenerationRequest, Tensor] = {}
    while len(kept) < len(members):
        core.step()
        for one in list(core.scheduler.running):
            if one.started == frames and one.request not in kept:
                written = (
                    torch.stack((core.executor.kv.k, core.executor.kv.v))[:, :, one.pages]
                    .transpose(3, 2)
                    .flatten(3, 4)
                )
                kept[one.request] = written[:, :, :, : one.last + one.started].clone()
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_the_talker_computes_the_same_bits_alone_and_in_a_mix(seed: int) -> None:
    rng = random.Random(seed)
    sampling = SamplingParams(min_new_tokens=8)
    members = [
        replace(random_request(rng, wide_model(), f"w{index}"), max_tokens=8, sampling=sampling)
        for index in range(rng.randint(3, 8))
    ]
    together = keys_and_values(members, 6)
    for request in members:
        alone = keys_and_values([request], 6)[request]
        assert torch.isfinite(alone).all()
        assert torch.equal(together[request], alone)
