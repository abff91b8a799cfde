"""Prefill of padded prompts writes the keys and values that prefill of packed ones writes."""

from __future__ import annotations

import pytest
import torch

from pipelines.engine.model import PrefillRun
from pipelines.engine.prefill_graphs import PrefillGraphs
from tests.unit.qwen3_golden import golden_model

PAGE = 8


def test_padded_prefill_equals_packed() -> None:
    model = golden_model("base")
    draw = torch.Generator().manual_seed(0)
    counts, new = [5, 16, 9], 16
    prompts = [torch.randn(count, model.config.talker.hidden, generator=draw) for count in counts]
    packed, padded = (model.make_kv(6, PAGE) for _ in range(2))
    state = model.make_state(3, 2, 4)
    state.write_pages([(0, [3], 0), (1, [1, 6], 0), (2, [5, 2], 0)])
    with torch.inference_mode():
        model.prefill([PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts)], state, packed)
        rows = torch.stack([torch.nn.functional.pad(prompt, (0, 0, 0, new - len(prompt)), value=0.5) for prompt in prompts])
        model.prefill_padded(rows, state.page_table[:3], torch.tensor(counts), padded)
    torch.testing.assert_close(padded.k[:, 1:], packed.k[:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded.v[:, 1:], packed.v[:, 1:], rtol=1e-4, atol=1e-4)
    assert bool(packed.k[:, 1:].any())


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
def test_graphs_equal_the_packed_prefill(alone: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from benchmarks.qwen3_tts_shapes import random_model

    model = random_model("tiny", torch.device("cuda"), torch.float32, 1024)
    draw = torch.Generator("cuda").manual_seed(0)
    counts = [5, 64, 9, 65, 200, 300] + [20] * 40
    packed, replayed = (model.make_kv(100, 64) for _ in range(2))
    state = model.make_state(len(counts), 8, 4)
    pages = iter(range(1, 101))
    state.write_pages([(slot, [next(pages) for _ in range(-(-count // 64))], 0) for slot, count in enumerate(counts)])
    with torch.inference_mode():
        runs = [PrefillRun(slot, 0, torch.randn(count, 64, generator=draw, device="cuda")) for slot, count in enumerate(counts)]
        model.prefill(runs[:5] + runs[6:], state, packed)
        left = PrefillGraphs(model, state, replayed, torch.cuda.graph_pool_handle(), alone).run(runs)
    assert [run.slot for run in left] == [5]
    torch.testing.assert_close(replayed.k[:, 1:], packed.k[:, 1:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(replayed.v[:, 1:], packed.v[:, 1:], rtol=1e-3, atol=1e-3)
