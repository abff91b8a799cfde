"""What lies in a slot after a request was placed: its own values and nothing of an earlier owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipelines.engine.state import Placement, SamplingParams, SlotState

SLOTS, HIDDEN, VOCAB, PAGES, TRAILING, PAD = 5, 3, 11, 6, 7, 99
CPU = torch.device("cpu")


def placement(slot: int, seed: int, pages: int, trailing: int, greedy: bool = False) -> Placement:
    number = seed % 1000
    sampling = SamplingParams(
        temperature=0.0 if greedy else 0.7, top_k=number, top_p=0.8, repetition_penalty=1.5, residual_temperature=1.1,
        residual_top_k=number + 1, residual_top_p=0.6, min_new_tokens=number + 2,
    )  # fmt: skip
    text = np.arange(trailing, dtype=np.int64) + 10 * number
    return Placement(
        slot,
        list(range(1, pages + 1)),
        seed,
        sampling,
        text,
        torch.full((HIDDEN,), float(number)),
        20 + number,
    )


def state() -> SlotState:
    return SlotState(SLOTS, HIDDEN, VOCAB, PAGES, TRAILING, PAD, torch.float32, CPU)


def in_slot(made: SlotState, slot: int) -> dict[str, Any]:
    tensors = {
        "inputs": made.inputs, "positions": made.positions, "frames": made.frames, "seeds": made.seeds, "pages": made.page_table,
        "trailing": made.trailing, "seen": made.seen, "penalty": made.penalty, "least": made.min_new_tokens,
        "temperature": made.first.temperature, "top_k": made.first.top_k, "top_p": made.first.top_p, "greedy": made.first.greedy,
        "residual_temperature": made.residual.temperature, "residual_top_k": made.residual.top_k, "residual_top_p": made.residual.top_p,
        "predictor_greedy": made.residual.greedy,
    }  # fmt: skip
    return {name: tensor[slot].tolist() for name, tensor in tensors.items()}


def test_a_request_is_in_its_slot_and_the_others_are_as_they_were() -> None:
    made = state()
    before = {slot: in_slot(made, slot) for slot in range(SLOTS + 1)}
    made.place([placement(1, 4, 3, 2), placement(3, (1 << 63) - 3, 1, 0, greedy=True)])
    found = in_slot(made, 1)
    assert found["pages"] == [1, 2, 3, 0, 0, 0]
    assert found["trailing"] == [40, 41, *[PAD] * 6]
    assert (found["positions"], found["frames"], found["seeds"], found["least"]) == (24, 0, 4, 6)
    assert (found["top_k"], found["residual_top_k"], found["greedy"], found["predictor_greedy"]) == (
        4,
        5,
        False,
        False,
    )
    assert found["inputs"] == [4.0] * HIDDEN
    reals = [
        found[name] for name in ("temperature", "top_p", "residual_temperature", "residual_top_p", "penalty")
    ]
    np.testing.assert_allclose(np.array(reals, np.float32), np.array([0.7, 0.8, 1.1, 0.6, 1.5], np.float32))
    other = in_slot(made, 3)
    assert (other["seeds"], other["greedy"], other["temperature"], other["pages"]) == (
        (1 << 63) - 3,
        True,
        1.0,
        [1, 0, 0, 0, 0, 0],
    )
    assert {slot: in_slot(made, slot) for slot in (0, 2, 4, SLOTS)} == {
        slot: before[slot] for slot in (0, 2, 4, SLOTS)
    }


@pytest.mark.parametrize("together", [True, False])
def test_nothing_of_an_earlier_owner_is_left(together: bool) -> None:
    used, fresh = state(), state()
    used.place([placement(slot, 7, 5, TRAILING) for slot in range(SLOTS)])
    used.write_pages([(slot, [6], 5) for slot in range(SLOTS)])
    used.seen.fill_(True)
    used.frames.fill_(17)
    newcomers = [placement(0, 1, 2, 3), placement(2, 2, 1, 0, greedy=True), placement(4, 3, 6, TRAILING + 4)]
    for made in (used, fresh):
        for group in [newcomers] if together else [[one] for one in newcomers]:
            made.place(group)
    for slot in (0, 2, 4):
        assert in_slot(used, slot) == in_slot(fresh, slot)
    assert used.trailing[:, -1].tolist() == [PAD] * (SLOTS + 1)


def test_codes_of_prompts_are_known_and_the_window_is_empty() -> None:
    made = SlotState(SLOTS, HIDDEN, VOCAB, PAGES, 0, 0, torch.float32, CPU, window=3)
    made.recent.fill_(5)
    made.place([placement(4, 7, 2, 0)._replace(drawn=[2, 9, 2]), placement(1, 3, 1, 0)])
    assert made.seen[4].nonzero().flatten().tolist() == [2, 9]
    assert not made.seen[[0, 1, 2, 3, 5]].any(), "other slots know nothing of them"
    assert made.recent[[1, 4]].unique().tolist() == [-1]
    assert made.recent[[0, 2, 3, 5]].unique().tolist() == [5]


def test_pages_are_appended() -> None:
    made = state()
    made.place([placement(2, 1, 2, 0)])
    made.write_pages([(2, [8, 9], 2), (0, [4], 0)])
    assert made.page_table[2].tolist() == [1, 2, 8, 9, 0, 0]
    assert made.page_table[0].tolist() == [4, 0, 0, 0, 0, 0]


def test_blocks_begin_where_kernels_can_load_several_values() -> None:
    made = state()
    for tensor in (
        made.page_table,
        made.trailing,
        made.positions,
        made.seeds,
        made.penalty,
        made.first.top_k,
        made.residual.top_p,
    ):
        assert tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % 256 == 0
