"""What a frame means beyond one family's: the window of recent codes, several ends, what is fed back, and
rows that are never drawn."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.frame import DrawRules, DrawTensors, Feedback, FrameTensors, StackTensors, StateTensors
from kernels.reference import ENDED, FrameOutput, backbone_step, draw_frame, next_inputs
from kernels.sampler import DrawFlags

FLAGS = DrawFlags(0, any_top_p=True, all_greedy=False)
CODES, HIDDEN = 8, 4
#: Four likely codes: cold draws always take code 3, warm ones any of those that top-p keeps.
LOGITS = (0.0, 5.0, 5.1, 5.2, 0.0, 5.05, 0.0, 0.0)


def frame_of(logits: Sequence[float], rules: DrawRules) -> FrameTensors:
    """A model whose logits are always these: no layers, and an input that never changes."""
    stack = StackTensors([], torch.ones(HIDDEN), torch.zeros(512, 2), heads=1, kv_heads=1, eps=0.0, scale=1.0)
    head = torch.tensor(logits)[:, None].expand(-1, HIDDEN) / HIDDEN
    feedback = Feedback(
        torch.zeros(len(logits), HIDDEN),
        torch.tensor([0]),
        torch.ones(len(logits), HIDDEN),
        text_by_code=True,
    )
    return FrameTensors(stack, head.contiguous(), rules, feedback)


def state_of(
    rows: int, temperature: float, window: int = 0, seen: Sequence[int] = (), penalty: float = 1.0
) -> StateTensors:
    """Rows of different seeds, and a dead one."""

    def whole(value: int = 0) -> Tensor:
        return torch.full((rows + 1,), value)

    draw = DrawTensors(
        torch.full((rows + 1,), temperature),
        whole(),
        torch.ones(rows + 1),
        torch.zeros(rows + 1, dtype=torch.bool),
    )
    known = torch.zeros(rows + 1, CODES, dtype=torch.bool)
    known[:, list(seen)] = True
    return StateTensors(
        inputs=torch.ones(rows + 1, HIDDEN), positions=whole(), frames=whole(), seeds=torch.arange(rows + 1), page_table=whole()[:, None],
        trailing=whole()[:, None], seen=known, penalty=torch.full((rows + 1,), penalty), min_new_tokens=whole(), first=draw, residual=draw,
        recent=torch.full((rows + 1, window), -1), dead=rows,
    )  # fmt: skip


def frames_of(model: FrameTensors, state: StateTensors, count: int) -> tuple[Tensor, Tensor]:
    """Codes and flags [frames, rows] of all live rows."""
    caches = torch.zeros(0, 1, 1, 512, 2)
    rows = torch.arange(state.dead)
    made: list[FrameOutput] = []
    for frame in range(count):
        hidden = backbone_step(model.backbone, state, caches, caches, rows, frame + 1)
        made.append(draw_frame(model, state, rows, hidden, FLAGS, FLAGS))
    return torch.stack([one.codes[:, 0] for one in made]), torch.stack([one.flags for one in made])


def test_a_code_of_the_window_is_drawn_once_more_and_the_first_code_is_none() -> None:
    rules = DrawRules((CODES - 1,), CODES - 1, nucleus_first=True, window=2)
    codes, _ = frames_of(frame_of(LOGITS, rules), state_of(600, 0.01, window=2), 3)
    assert (codes[:2] == 3).all(), (
        "cold draws take the likeliest, and the first code does not stand in the window"
    )
    # Warm draws keep what is within top_p = 0.9 of the mass: codes 3, 2 and 5.
    share = torch.stack([(codes[2] == code).float().mean() for code in range(CODES)])
    warm = torch.tensor([LOGITS[code] for code in (3, 2, 5)]).softmax(0)
    assert share[[3, 2, 5]].tolist() == pytest.approx(warm.tolist(), abs=0.08)
    assert share[[3, 2, 5]].sum() == 1


def test_the_second_draw_keeps_the_top_k_of_its_row() -> None:
    state = state_of(100, 0.01, window=2)
    state.first.top_k.fill_(2)
    codes, _ = frames_of(
        frame_of(LOGITS, DrawRules((CODES - 1,), CODES - 1, nucleus_first=True, window=2)), state, 3
    )
    assert set(codes[2].tolist()) == {3, 2}


def test_a_code_leaves_the_window() -> None:
    model = frame_of(LOGITS, DrawRules((CODES - 1,), CODES - 1, nucleus_first=True, window=2))
    state = state_of(1, 0.01, window=2)
    state.frames[0] = 5
    state.recent[0] = torch.tensor([3, -1])  # of frames 4 and 3: that of frame 5 goes to the second place
    seeds = torch.arange(200)
    again = []
    for seed in seeds.tolist():
        one = state._replace(
            frames=state.frames.clone(), recent=state.recent.clone(), seeds=torch.tensor([seed, 0])
        )
        codes, _ = frames_of(model, one, 1)
        again.append(int(codes[0, 0]))
        assert one.recent[0].tolist() == [3, again[-1]]
    assert set(again) == {3, 2, 5}
    state.recent[0] = torch.tensor([6, 6])
    assert frames_of(model, state, 1)[0].item() == 3


def test_a_model_may_have_two_ends_and_rows_that_are_never_drawn() -> None:
    likely = [9.0] * CODES
    codes, flags = frames_of(frame_of(likely, DrawRules((1, 6), 4)), state_of(400, 1.0), 2)
    assert set(codes.unique().tolist()) == {0, 1, 2, 3, 6}, "from 4 on nothing is drawn but an end"
    assert ((flags & ENDED) > 0).equal((codes == 1) | (codes == 6))
    early = state_of(100, 1.0)
    early.min_new_tokens.fill_(1)
    codes, _ = frames_of(frame_of(likely, DrawRules((1, 6), 4)), early, 2)
    assert set(codes[0].unique().tolist()) == {0, 2, 3}, "neither end may come before its time"
    assert {1, 6} <= set(codes[1].unique().tolist())


def test_codes_of_the_prompt_count_as_drawn() -> None:
    model = frame_of((3.0, 2.9, *[0.0] * (CODES - 2)), DrawRules((CODES - 1,), CODES))
    assert (frames_of(model, state_of(50, 0.001), 1)[0] == 0).all()
    assert (frames_of(model, state_of(50, 0.001, seen=[0], penalty=2.0), 1)[0] == 1).all()


def test_what_is_fed_back_is_rounded_where_the_published_code_rounds() -> None:
    draw = torch.Generator().manual_seed(1)
    table, text = (torch.randn(size, HIDDEN, generator=draw).to(torch.bfloat16) for size in (12, 9))
    codes, starts = torch.tensor([[2, 0, 3], [5, 1, 1]]), torch.tensor([0, 6, 8])
    spoken = table[codes + starts].float().sum(1).to(torch.bfloat16)
    plain = next_inputs(Feedback(table, starts), codes, torch.tensor([7, 8]))
    assert torch.equal(plain, table[codes + starts].sum(1))
    followed = next_inputs(Feedback(table, starts, text), codes, torch.tensor([7, 8]))
    assert torch.equal(followed, spoken + text[[7, 8]])
    scaled = next_inputs(
        Feedback(table, starts, text, text_by_code=True, scale=0.3), codes, torch.tensor([7, 8])
    )
    assert torch.equal(scaled, (spoken + text[[2, 5]]) * 0.3)
