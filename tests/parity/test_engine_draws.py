"""Drawn speech of the whole engine, eager on CPU: every setting of a request apart and in one mix, and
words that nobody else has.

Seeds are fixed, so a run always gives the same answer. ALPHA is what chance may do to one comparison;
there are about 60 of them.

Power, by `tests.support.drawn.power`, which `test_the_stated_power` holds. With one group of settings
codebook 0 has at least 250 draws, where an effect of w = 0.45 (Cohen's) is found with a chance above 0.9,
and the later codebooks have at least 1,000, where w = 0.25 is. Measured: temperature 1 where 0.5 or 2 is
asked for has w = 1.3 and 0.67, top_k 50 where all are asked for 0.66, a request's top_p 0.6 that goes to
the predictor too 0.77. A token outside of top_k or top_p, or one that the penalty puts outside, fails at
once. A comparison of pairs has at least 2,500, where w = 0.18 is found with a chance above 0.99; two draws
that share a random word have w > 1.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.checkpoint import dummy_model
from kernels.reference import FrameOutput
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.config import SamplingDefaults
from pipelines.qwen3_tts.pipeline import sampling_params
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from pipelines.request import Generation
from tests.support.drawn import (
    ALL_SETTINGS,
    Logits,
    Places,
    drawn,
    independent,
    intervals,
    lagged,
    power,
    uniform,
)
from tests.support.qwen3_golden import MAX_CONTEXT, Recorder, golden_model, make_core, random_request
from tests.support.rounds import turn_until

ALPHA = 1e-5
CODEBOOKS = 5
FRAMES = 6
REQUESTS = 48 * len(ALL_SETTINGS)


class Kept:
    """A model that keeps the logits of its frames."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outputs: list[FrameOutput] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def frame(self, *arguments: Any) -> FrameOutput:
        self._outputs.append(self._model.frame(*arguments))
        return self._outputs[-1]

    def logits(self) -> Logits:
        """Of the frames since the last call, all rows together."""
        made, self._outputs = self._outputs, []
        return torch.cat([one.first_logits for one in made]), torch.cat(
            [one.residual_logits for one in made], dim=1
        )


@cache
def places() -> Places:
    model = Kept(golden_model("base", codebooks=CODEBOOKS))
    prompt = random_request(random.Random(3), model, "prompt").prompt
    options = EngineOptions(
        slots=REQUESTS, pages=REQUESTS * 12, page_size=8, max_context=MAX_CONTEXT, reserve_frames=FRAMES + 1
    )
    executor = EagerExecutor(model, options)
    return drawn(model.config, executor, model.logits, prompt, options, REQUESTS, FRAMES)


def test_nothing_is_drawn_that_the_processors_forbid() -> None:
    found = [
        (places().settings[request % len(ALL_SETTINGS)].name, frame, codebook)
        for request, frame, codebook in places().impossible
    ]
    assert not found, f"{len(found)} impossible draws: {found[:10]}"


@pytest.mark.parametrize("name", [one.name for one in ALL_SETTINGS])
def test_draws_have_the_exact_probabilities_of_their_own_settings(name: str) -> None:
    mine = places().of(name)
    assert np.count_nonzero(~np.isnan(mine[:, :, 0])) >= 250
    assert np.count_nonzero(~np.isnan(mine[:, :, 1:])) >= 1000
    assert uniform(mine[:, :, 0]) > ALPHA, "codebook 0"
    assert uniform(mine[:, :, 1:]) > ALPHA, "the other codebooks"


def test_every_frame_and_codebook_of_all_together_is_exact() -> None:
    for frame in range(FRAMES):
        assert uniform(places().by_rank[:, frame]) > ALPHA, f"frame {frame}"
    for codebook in range(CODEBOOKS):
        assert uniform(places().by_rank[:, :, codebook]) > ALPHA, f"codebook {codebook}"


def test_draws_know_nothing_of_each_other() -> None:
    """Over frames, codebooks and seeds; where a place says what random word was drawn, equal words of two
    draws show."""
    for what, pair in lagged(places().by_id).items():
        chance, count = independent(*pair)
        assert count >= 2500, f"{what}: {count} pairs"
        assert chance > ALPHA, f"{what}: {chance:.1e} in {count} pairs"


def test_the_stated_power() -> None:
    assert power(0.45, 250, 9, ALPHA) > 0.9
    assert power(0.25, 1000, 9, ALPHA) > 0.9
    assert power(0.18, 2500, 15, ALPHA) > 0.99


def test_places_of_a_known_distribution() -> None:
    probabilities = torch.tensor([[0.2, 0.5, 0.0, 0.3]], dtype=torch.float64).repeat(4, 1)
    low, high, rank, possible = intervals(probabilities, torch.arange(4))
    np.testing.assert_allclose(low, [0, 0.2, 0.7, 0.7])
    np.testing.assert_allclose(high, [0.2, 0.7, 0.7, 1.0])
    np.testing.assert_allclose(rank, [0.8, 0, 1, 0.5])
    assert possible.tolist() == [True, True, False, True]


@pytest.mark.parametrize("least", [1, 2, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_end_is_banned_for_so_many_draws_and_no_more(least: int, temperature: float) -> None:
    """A model that ends wherever it may says exactly as many frames as draws were banned."""
    model = ending_model()
    heard = Recorder()
    core = make_core(model, heard)
    prompt = build_prompt(
        model.config, TokenizedTask([151644, 77091, 198], [5, 6, 7], language="english", speaker="ryan")
    )
    sampling = SamplingParams(temperature=temperature, residual_temperature=temperature, min_new_tokens=least)
    requests = [GenerationRequest(str(seed), prompt, sampling, seed, 12) for seed in range(4)]
    for request in requests:
        core.add(request)
    turn_until(lambda: not core.busy, core.step)
    assert [(len(heard.codes[request]), heard.finish[request]) for request in requests] == [
        (least, "eos")
    ] * 4


def test_a_request_of_the_pipeline_may_not_end_in_its_first_two_draws() -> None:
    assert sampling_params(SamplingDefaults(), Generation()).min_new_tokens == 2


@cache
def ending_model() -> Any:
    torch.set_num_threads(1)
    return dummy_model("tiny", torch.device("cpu"), torch.float32, MAX_CONTEXT, ends=True)
