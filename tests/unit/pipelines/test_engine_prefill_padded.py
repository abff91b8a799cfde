"""Prefill of padded chunks writes the keys and values that prefill of packed ones writes, whichever chunks
share a replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipelines.engine import prefill
from pipelines.engine.executor import PrefillRun
from pipelines.engine.prefill import PaddedPrefills
from pipelines.engine.state import PagedKV, SlotState
from pipelines.qwen3_tts.model import Qwen3TTSModel
from tests.support.prefill_twins import padded_twin
from tests.support.qwen3_golden import golden_model

PAGE = 8
SHAPES = ((2, 1, 0), (3, 2, 0), (2, 4, 0), (2, 4, 4))
CHUNK = 4 * PAGE


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SHAPES", SHAPES)


def at_once(work: Callable[[], None]) -> Callable[[], None]:
    """Does what a graph would do."""
    return work


def prompts_of(model: Qwen3TTSModel, counts: list[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, model.config.talker.hidden, generator=draw) for count in counts]


def placed(model: Qwen3TTSModel, counts: list[int], max_pages: int) -> SlotState:
    """A state whose slots hold enough pages for so many positions each, in no order."""
    total = sum(-(-count // PAGE) for count in counts)
    pages = iter((torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    state = model.make_state(len(counts), max_pages, 4)
    state.write_pages(
        [(slot, [next(pages) for _ in range(-(-count // PAGE))], 0) for slot, count in enumerate(counts)]
    )
    return state


def assert_same(found: PagedKV, wanted: PagedKV) -> None:
    torch.testing.assert_close(found.k[:, 1:], wanted.k[:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.v[:, 1:], wanted.v[:, 1:], rtol=1e-4, atol=1e-4)
    assert bool(wanted.k[:, 1:].any())


@pytest.mark.parametrize("start", [0, 2 * PAGE])
def test_padded_prefill_equals_packed(start: int) -> None:
    model = golden_model("base")
    counts, new = [5, 16, 9], 2 * PAGE
    prompts = prompts_of(model, [start + count for count in counts])
    packed, padded = (model.make_kv(12, PAGE) for _ in range(2))
    state = placed(model, [start + count for count in counts], (start + new) // PAGE)
    with torch.inference_mode():
        for kv in (packed, padded) if start else (packed,):
            model.prefill(
                [
                    PrefillRun(slot, 0, prompt[:start] if start else prompt)
                    for slot, prompt in enumerate(prompts)
                ],
                state,
                kv,
            )
        if start:
            model.prefill(
                [PrefillRun(slot, start, prompt[start:]) for slot, prompt in enumerate(prompts)],
                state,
                packed,
            )
        rows = torch.stack(
            [
                torch.nn.functional.pad(one[start:], (0, 0, 0, new + start - len(one)), value=0.5)
                for one in prompts
            ]
        )
        padded_twin(model, rows, state.page_table[:3], torch.tensor(counts), start, padded)
    assert_same(padded, packed)


def test_chunks_share_replays_of_their_one_shape_and_write_what_the_packed_prefill_writes() -> None:
    model = golden_model("base")
    counts = [5, 8, 3, 8, 1, 7, 2, 9, 16, 64, 80]
    prompts = prompts_of(model, counts)
    state = placed(model, counts, 10)
    packed, replayed = (model.make_kv(40, PAGE) for _ in range(2))
    seen: list[tuple[int, int]] = []

    def work(embeddings: Tensor, pages: Tensor, sizes: Tensor, start: int) -> None:
        seen.append((len(sizes), int((sizes > 0).sum())))
        padded_twin(model, embeddings, pages, sizes, start, replayed)

    left: list[tuple[int, int]] = []
    with torch.inference_mode():
        graphs = PaddedPrefills(work, state, replayed, at_once)
        for start in range(0, max(counts), CHUNK):
            runs = [
                PrefillRun(slot, start, prompt[start : start + CHUNK])
                for slot, prompt in enumerate(prompts)
                if len(prompt) > start
            ]
            model.prefill(runs, state, packed)
            rest = graphs.run(runs)
            left += [(run.slot, run.start) for run in rest]
            if rest:
                model.prefill(rest, state, replayed)
    assert left == [(10, 2 * CHUNK)]
    assert seen == [(2, 2)] * 3 + [(2, 1), (3, 2), (2, 2), (2, 2)]
    assert_same(replayed, packed)


def test_padded_prefill_may_end_beyond_the_context() -> None:
    """A context that is no whole number of pages: the last page of a padded chunk has positions that no
    request can have."""
    golden = golden_model("base")
    model = Qwen3TTSModel(golden.config, golden.weights, 2 * PAGE + 3)
    packed, padded = (model.make_kv(8, PAGE) for _ in range(2))
    state = placed(model, [18], 3)
    (prompt,) = prompts_of(model, [18])
    with torch.inference_mode():
        model.prefill([PrefillRun(0, 0, prompt)], state, packed)
        model.prefill([PrefillRun(0, 0, prompt[: 2 * PAGE])], state, padded)
        rows = torch.nn.functional.pad(prompt[2 * PAGE :], (0, 0, 0, PAGE - 2), value=0.5)[None]
        padded_twin(model, rows, state.page_table[:1], torch.tensor([2]), 2 * PAGE, padded)
    assert_same(padded, packed)


def test_chunks_that_start_within_a_page_and_shapes_beyond_the_context_are_left() -> None:
    model = golden_model("base")
    state, kv = placed(model, [24], 3), model.make_kv(4, PAGE)
    graphs = PaddedPrefills(lambda *_: None, state, kv, at_once)
    (prompt,) = prompts_of(model, [24])
    runs = [PrefillRun(0, 4, prompt[4:8]), PrefillRun(0, 0, prompt)]
    assert graphs.run(runs) == runs


def test_idle_turns_capture_what_the_first_prompts_do_not_need_as_far_as_there_is_memory() -> None:
    model = golden_model("base")
    state, kv = placed(model, [24], 8), model.make_kv(4, PAGE)
    tried: list[int] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        tried.append(1)
        if len(tried) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work

    graphs = PaddedPrefills(lambda *_: None, state, kv, capture)
    graphs.warm()
    assert list(graphs.rows.captured) == [0]
    steps = 0
    while graphs.prepare():
        steps += 1
    assert steps == len(SHAPES) - 1
    assert list(graphs.rows.captured) == [0, 2, 3]
