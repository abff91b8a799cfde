"""The scheduler's decisions, apart from any model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pipelines.engine.scheduler import GenerationRequest, Scheduler, Utterance
from pipelines.engine.state import PagedKV, SamplingParams


@dataclass(frozen=True)
class Prompt:
    length: int
    trailing: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.length


def request(length: int) -> GenerationRequest:
    return GenerationRequest(f"of {length}", Prompt(length), SamplingParams(), 0, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [16, 20, 23, 100])
def test_the_chunks_of_a_prompt_do_not_depend_on_its_neighbours(budget: int) -> None:
    """Whole chunks, and a prompt's last one shorter: whatever is left of the turn's budget."""
    chunk = 16
    scheduler = Scheduler(PagedKV(1, 64, 1, 8, 2, torch.float32, torch.device("cpu")), 8, chunk, budget, 0)
    lengths = (41, 18, 70)
    scheduler.waiting.extend(Utterance(request(length)) for length in lengths)
    scheduler.admit()
    chunks: dict[int, list[int]] = {length: [] for length in lengths}
    while plan := scheduler.prefill():
        for utterance, count in plan:
            chunks[len(utterance.request.prompt)].append(count)
            utterance.prefilled += count
    for length, counts in chunks.items():
        left = length - 1
        assert counts == [min(chunk, left - start) for start in range(0, left, chunk)]
