"""A model says the same whether its prompt's prefix was computed by the request itself or by another one,
and in any company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.engine.executor import PrefillRun
from pipelines.engine.scheduler import GenerationRequest, PromptPrefix
from pipelines.engine.state import PagedKV, SlotState
from tests.support.evictions import Evictions
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import Recorder, golden_model, make_core, random_request, run_alone
from tests.support.rounds import turn_until

#: Positions of the voices' prefixes; pages have 8, and chunks 16.
LENGTHS = (27, 30, 40)


@dataclass(frozen=True, eq=False)
class VoicePrompt:
    """A prompt behind the prefix of a voice."""

    voice: int
    rest: Any

    def __len__(self) -> int:
        return LENGTHS[self.voice] + len(self.rest)

    @property
    def trailing(self) -> np.ndarray:
        return self.rest.trailing


class VoiceModel:
    """A golden model that speaks such prompts, and counts the positions that it prefills."""

    def __init__(self) -> None:
        self._model = golden_model("base", codebooks=2)
        self.prefilled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def embed(self, prompt: VoicePrompt) -> Tensor:
        rest = self._model.embed(prompt.rest)
        draw = torch.Generator().manual_seed(prompt.voice)
        return torch.cat((torch.randn(LENGTHS[prompt.voice], rest.shape[1], generator=draw), rest))

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        self.prefilled += sum(len(run.embeddings) for run in runs)
        self._model.prefill(runs, state, kv)


def requests(count: int, seed: int, frames: int) -> list[GenerationRequest]:
    rng = random.Random(seed)
    made: list[GenerationRequest] = []
    for index in range(count):
        one, voice = random_request(rng, golden_model("base", codebooks=2), f"r{index}"), index % len(LENGTHS)
        sampling = replace(one.sampling, min_new_tokens=frames)
        prefixes = (PromptPrefix(bytes([voice]), LENGTHS[voice]),)
        made.append(
            replace(
                one,
                prompt=VoicePrompt(voice, one.prompt),
                prefixes=prefixes,
                max_tokens=frames,
                sampling=sampling,
            )
        )
    return made


def run(core: ListenedCore) -> None:
    turn_until(lambda: not core.busy, core.step)


@pytest.mark.parametrize(
    ("slots", "spare_pages", "frames"),
    [(4, 80, 3), (1, 1, 2), (6, 8, 24)],
    ids=["in a mix", "after eviction", "after a restart"],
)
def test_alone_equals_any_company_with_prefixes_of_others(slots: int, spare_pages: int, frames: int) -> None:
    many = requests(9, 3, frames)
    alone = {request: run_alone(VoiceModel(), request)[0] for request in many}
    model, heard = VoiceModel(), Recorder()
    pages = max(-(-(len(request.prompt) + request.max_tokens - 1) // 8) for request in many) + spare_pages
    core = make_core(model, heard, slots=slots, pages=pages, reserve_frames=0, prefill_tokens=64)
    evictions = Evictions(core)
    for request in many:
        core.add(request)
    utterances = list(core.scheduler.waiting)
    run(core)
    for request, codes in alone.items():
        np.testing.assert_array_equal(heard.codes[request], codes)
    restarts = sum(one.run > 1 for one in utterances)
    assert (evictions.prefixes > 0, restarts > 0) == ((spare_pages < 80), slots == 6)
    prompts = sum(len(request.prompt) - 1 for request in many)
    assert restarts or model.prefilled < prompts - 2 * 16, "nobody shared a prefix"
    assert core.scheduler.prefixes.free == pages
