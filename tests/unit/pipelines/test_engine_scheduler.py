"""The scheduler's decisions, apart from any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pipelines.engine.core import EngineOptions
from pipelines.engine.scheduler import GenerationRequest, Scheduler, Utterance
from pipelines.engine.state import PagedKV, SamplingParams
from pipelines.engine.turns import Playback
from tests.support.attention_layers import SMALLEST

NOBODY: Any = None


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
    scheduler = Scheduler(
        PagedKV(SMALLEST, 64, 8),
        8,
        EngineOptions(prefill_chunk=chunk, prefill_tokens=budget, reserve_frames=0),
    )
    lengths = (41, 18, 70)
    scheduler.waiting.extend(Utterance(request(length), NOBODY) for length in lengths)
    scheduler.admit()
    chunks: dict[int, list[int]] = {length: [] for length in lengths}
    while plan := scheduler.prefill(scheduler.running):
        for utterance, count in plan:
            chunks[len(utterance.request.prompt)].append(count)
            utterance.prefilled += count
    for length, counts in chunks.items():
        left = length - 1
        assert counts == [min(chunk, left - start) for start in range(0, left, chunk)]


def test_who_makes_way_is_the_first_of_its_queue() -> None:
    """Before those who never ran: what is known of it is heard, or waited for."""
    for queue in ("waiting", "waiting_streams"):
        scheduler = Scheduler(
            PagedKV(SMALLEST, 64, 8),
            2,
            EngineOptions(prefill_chunk=16, prefill_tokens=64, reserve_frames=0),
        )
        everybody = [
            Utterance(request(length), NOBODY, playback=Playback(0.0) if queue == "waiting_streams" else None)
            for length in range(9, 13)
        ]
        getattr(scheduler, queue).extend(everybody)
        admitted = scheduler.admit() + scheduler.admit_streams()
        assert admitted == everybody[:2]
        scheduler.preempt_youngest()
        assert everybody[1].slot < 0
        assert list(getattr(scheduler, queue)) == everybody[1:]
