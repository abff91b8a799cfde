"""Prefill of padded chunks writes the keys and values that prefill of packed ones writes, whichever chunks share a replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cuda_graphs import GraphPool
from pipelines.engine import graph
from pipelines.engine.executor import PrefillRun
from pipelines.engine.graph import PrefillGraphs, Sharing
from pipelines.engine.state import PagedKV, SlotState
from pipelines.qwen3_tts.model import Qwen3TTSModel
from tests.support.qwen3_golden import golden_model

PAGE = 8
SHAPES = ((2, 1, 0), (6, 1, 0), (3, 2, 0), (2, 4, 0), (2, 4, 4))
CHUNK = 4 * PAGE


def use_shapes(monkeypatch: pytest.MonkeyPatch, small: tuple[tuple[int, int, int], ...] = ()) -> None:
    monkeypatch.setattr(graph, "SHAPES", SHAPES)
    monkeypatch.setattr(graph, "SMALL_SHAPES", small)


def prompts_of(model: Qwen3TTSModel, counts: list[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, model.config.talker.hidden, generator=draw) for count in counts]


def placed(model: Qwen3TTSModel, counts: list[int], max_pages: int) -> SlotState:
    """A state whose slots hold enough pages for so many positions each, in no order."""
    total = sum(-(-count // PAGE) for count in counts)
    pages = iter((torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    state = model.make_state(len(counts), max_pages, 4)
    state.write_pages([(slot, [next(pages) for _ in range(-(-count // PAGE))], 0) for slot, count in enumerate(counts)])
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
            model.prefill([PrefillRun(slot, 0, prompt[:start] if start else prompt) for slot, prompt in enumerate(prompts)], state, kv)
        if start:
            model.prefill([PrefillRun(slot, start, prompt[start:]) for slot, prompt in enumerate(prompts)], state, packed)
        rows = torch.stack([torch.nn.functional.pad(one[start:], (0, 0, 0, new + start - len(one)), value=0.5) for one in prompts])
        model.prefill_padded(rows, state.page_table[:3], torch.tensor(counts), start, padded)
    assert_same(padded, packed)


class Replayed(PrefillGraphs):
    """Does at once what a graph would do, and counts the chunks of every replay."""

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.mark.parametrize(
    ("sharing", "replays"), [("free", [(6, 6), (6, 1), (3, 2), (2, 2), (2, 2)]), ("fixed", [(2, 2)] * 3 + [(2, 1), (3, 2), (2, 2), (2, 2)]),
                             ("alone", [(2, 1)] * 7 + [(3, 1)] * 2 + [(2, 1)] * 4)],
)  # fmt: skip
def test_chunks_share_replays_and_write_what_the_packed_prefill_writes(
    sharing: Sharing, replays: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_shapes(monkeypatch)
    model = golden_model("base")
    counts = [5, 8, 3, 8, 1, 7, 2, 9, 16, 64, 80]
    prompts = prompts_of(model, counts)
    state = placed(model, counts, 10)
    packed, replayed = (model.make_kv(40, PAGE) for _ in range(2))
    seen: list[tuple[int, int]] = []

    def work(embeddings: Tensor, pages: Tensor, sizes: Tensor, start: int) -> None:
        seen.append((len(sizes), int((sizes > 0).sum())))
        model.prefill_padded(embeddings, pages, sizes, start, replayed)

    left: list[tuple[int, int]] = []
    with torch.inference_mode():
        graphs = Replayed(work, state, replayed, None, sharing)
        for start in range(0, max(counts), CHUNK):
            runs = [PrefillRun(slot, start, prompt[start : start + CHUNK]) for slot, prompt in enumerate(prompts) if len(prompt) > start]
            model.prefill(runs, state, packed)
            rest = graphs.run(runs)
            left += [(run.slot, run.start) for run in rest]
            if rest:
                model.prefill(rest, state, replayed)
    assert left == [(10, 2 * CHUNK)]
    assert seen == replays
    assert_same(replayed, packed)


def test_one_newcomer_takes_the_smallest_graph_and_a_few_take_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch, ((1, 1, 0), (4, 1, 0), (1, 2, 0)))
    model = golden_model("base")
    counts = [5, 8, 3, 7, 12, 2, 1, 9]
    prompts = prompts_of(model, counts)
    state = placed(model, counts, 10)
    packed, replayed = (model.make_kv(40, PAGE) for _ in range(2))
    seen: list[tuple[int, int]] = []

    def work(embeddings: Tensor, pages: Tensor, sizes: Tensor, start: int) -> None:
        seen.append((len(sizes), embeddings.shape[1] // PAGE))
        model.prefill_padded(embeddings, pages, sizes, start, replayed)

    with torch.inference_mode():
        graphs = Replayed(work, state, replayed, GraphPool())
        while graphs.prepare():
            pass
        for group in ([0], [1, 2], [3, 5, 6], [4], [7]):
            runs = [PrefillRun(slot, 0, prompts[slot]) for slot in group]
            model.prefill(runs, state, packed)
            assert graphs.run(runs) == []
    assert seen == [(1, 1), (2, 1), (4, 1), (1, 2), (1, 2)]
    assert_same(replayed, packed)
    kept = Replayed(work, state, replayed, None, "fixed")
    assert {shape[0] for shape in kept._shapes} == {2, 3, 6}, "in reproducible mode chunks of a size meet the shapes they always met"


def test_padded_prefill_may_end_beyond_the_context() -> None:
    """A context that is no whole number of pages: the last page of a padded chunk has positions that no request can have."""
    golden = golden_model("base")
    model = Qwen3TTSModel(golden.config, golden.weights, 2 * PAGE + 3)
    packed, padded = (model.make_kv(8, PAGE) for _ in range(2))
    state = placed(model, [18], 3)
    (prompt,) = prompts_of(model, [18])
    with torch.inference_mode():
        model.prefill([PrefillRun(0, 0, prompt)], state, packed)
        model.prefill([PrefillRun(0, 0, prompt[: 2 * PAGE])], state, padded)
        rows = torch.nn.functional.pad(prompt[2 * PAGE :], (0, 0, 0, PAGE - 2), value=0.5)[None]
        model.prefill_padded(rows, state.page_table[:1], torch.tensor([2]), 2 * PAGE, padded)
    assert_same(padded, packed)


def test_chunks_that_start_within_a_page_and_shapes_beyond_the_context_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)
    model = golden_model("base")
    state, kv = placed(model, [24], 3), model.make_kv(4, PAGE)
    graphs = Replayed(lambda *_: None, state, kv, GraphPool())
    (prompt,) = prompts_of(model, [24])
    runs = [PrefillRun(0, 4, prompt[4:8]), PrefillRun(0, 0, prompt)]
    assert graphs.run(runs) == runs


def test_a_few_graphs_serve_every_batch_and_idle_turns_capture_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)
    model = golden_model("base")
    state, kv = placed(model, [24], 8), model.make_kv(4, PAGE)
    made: list[tuple[int, int]] = []
    graphs = Replayed(lambda rows, _pages, _sizes, _start: None, state, kv, GraphPool())
    plain = graphs._graph
    monkeypatch.setattr(graphs, "_graph", lambda shape: made.append(shape[:2]) or plain(shape))
    graphs.warm()
    assert made == [(6, 1)]
    steps = 0
    while graphs.prepare():
        steps += 1
    assert steps == len(SHAPES) - 1
    assert set(made) == {shape[:2] for shape in SHAPES}


def test_without_memory_for_a_graph_chunks_are_left_to_the_packed_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shapes(monkeypatch)
    model = golden_model("base")
    state, kv = placed(model, [5], 8), model.make_kv(4, PAGE)
    tried: list[int] = []

    class Full(Replayed):
        def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
            tried.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = Full(lambda *_: None, state, kv, GraphPool())
    runs = [PrefillRun(0, 0, prompts_of(model, [5])[0])]
    assert graphs.run(runs) == runs
    assert graphs.run(runs) == runs
    assert len(tried) == 1, "what was refused is not tried again"
