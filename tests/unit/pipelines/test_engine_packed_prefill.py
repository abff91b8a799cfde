"""Packed prefill: prompts in one row write what each writes alone, and speech does not depend on who
shares its row."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import PackedPrompts
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.executor import EagerExecutor, PrefillRun
from pipelines.engine.prefill import PackedPrefills, packed_sizes
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SCRATCH_PAGE, PagedKV, SlotState
from tests.support.listened import ListenedCore
from tests.support.prefill_twins import packed_twin
from tests.support.qwen3_golden import KINDS, MAX_CONTEXT, Recorder, golden_model, random_request, run_alone
from tests.unit.pipelines.test_engine_prefix_codes import VoiceModel, requests, run

PAGE = 8
SIZES = (16, 32, 64)


def placed(model: Any, counts: Sequence[int]) -> SlotState:
    """A state whose slots hold enough pages for so many positions each, in no order."""
    total = sum(-(-count // PAGE) for count in counts)
    pages = iter((torch.randperm(total, generator=torch.Generator().manual_seed(1)) + 1).tolist())
    state = model.make_state(len(counts), -(-max(counts) // PAGE), 4)
    state.write_pages(
        [(slot, [next(pages) for _ in range(-(-count // PAGE))], 0) for slot, count in enumerate(counts)]
    )
    return state


def prompts_of(model: Any, counts: Sequence[int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, model.config.talker.hidden, generator=draw) for count in counts]


def assert_same(found: PagedKV, wanted: PagedKV) -> None:
    torch.testing.assert_close(found.k[:, 1:], wanted.k[:, 1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.v[:, 1:], wanted.v[:, 1:], rtol=1e-4, atol=1e-4)
    assert bool(wanted.k[:, 1:].any())
    assert bool(torch.isfinite(found.k).all())
    assert bool(torch.isfinite(found.v).all())


class Rows(PackedPrefills):
    """Does at once what a graph would do, and keeps the length and the counts of every row."""

    def __init__(self, model: Any, state: SlotState, kv: PagedKV, sizes: Sequence[int] = SIZES) -> None:
        self.replayed: list[tuple[int, list[int]]] = []
        self.captured: list[int] = []
        #: Captures that find no memory, counted from 1.
        self.full: Container[int] = ()

        def work(embeddings: Tensor, prompts: PackedPrompts) -> None:
            self.replayed.append((len(embeddings), [count for count in prompts.counts.tolist() if count]))
            packed_twin(model, embeddings, prompts, kv)

        super().__init__(work, state, self._kept, sizes)

    def _kept(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured.append(1)
        if len(self.captured) in self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work

    @property
    def lengths(self) -> set[int]:
        """Of the rows that there are."""
        return set(self.rows.captured)

    def groups(self, runs: Sequence[PrefillRun]) -> list[list[PrefillRun]]:
        return self._groups(runs)

    def make(self, length: int) -> None:
        self.rows.of(length, self._row)


def test_chunks_of_any_length_from_any_position_write_what_they_write_alone() -> None:
    model = golden_model("base")
    lengths, starts = [5, 30, 9, 41, 17, 8], [0, 0, 8, 21, 16, 7]
    prompts, state = prompts_of(model, lengths), placed(model, lengths)
    alone, packed = (model.make_kv(20, PAGE) for _ in range(2))
    before = [
        PrefillRun(slot, 0, prompt[:start])
        for slot, (prompt, start) in enumerate(zip(prompts, starts))
        if start
    ]
    chunks = [
        PrefillRun(slot, start, prompt[start:]) for slot, (prompt, start) in enumerate(zip(prompts, starts))
    ]
    with torch.inference_mode():
        for kv in (alone, packed):
            model.prefill(before, state, kv)
        for chunk in chunks:
            model.prefill([chunk], state, alone)
        rows = Rows(model, state, packed)
        while rows.prepare():
            pass
        assert rows.run(chunks) == []
    assert rows.replayed == [(64, [5, 30, 1, 20, 1, 1])]
    assert_same(packed, alone)


def test_only_the_tail_of_the_last_row_is_padding() -> None:
    model = golden_model("base")
    lengths = [7] * 30
    state, kv = placed(model, lengths), model.make_kv(30, PAGE)
    rows = Rows(model, state, kv)
    with torch.inference_mode():
        while rows.prepare():
            pass
        assert (
            rows.run([PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))])
            == []
        )
    # A row of 64 positions has room for eight chunks.
    assert [(size, len(counts)) for size, counts in rows.replayed] == [(64, 8), (64, 8), (64, 8), (64, 6)]
    longer = Rows(model, state, kv, (64, 128, 256))
    with torch.inference_mode():
        while longer.prepare():
            pass
        assert (
            longer.run(
                [PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))]
            )
            == []
        )
    assert [(size, sum(counts)) for size, counts in longer.replayed] == [(256, 210)]


def test_many_short_chunks_take_a_row_with_room_for_all_of_them() -> None:
    model = golden_model("base")
    lengths = [1] * 9
    state = placed(model, lengths)
    alone, packed = (model.make_kv(9, PAGE) for _ in range(2))
    runs = [PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))]
    with torch.inference_mode():
        model.prefill(runs, state, alone)
        rows = Rows(model, state, packed, (64, 128))
        while rows.prepare():
            pass
        assert rows.run(runs) == []
    assert rows.replayed == [(128, [1] * 9)]
    assert_same(packed, alone)


def test_a_prompt_longer_than_the_longest_row_goes_in_pieces() -> None:
    model = golden_model("base")
    lengths = [150, 5]
    state = placed(model, lengths)
    alone, packed = (model.make_kv(21, PAGE) for _ in range(2))
    runs = [PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))]
    with torch.inference_mode():
        model.prefill(runs, state, alone)
        rows = Rows(model, state, packed)
        while rows.prepare():
            pass
        assert rows.run(runs) == []
    assert rows.replayed == [(64, [64]), (64, [64]), (32, [22, 5])]
    assert_same(packed, alone)


def test_prompts_fill_every_row_but_the_last() -> None:
    model = golden_model("base")
    lengths = [30, 30, 30, 50]
    state = placed(model, lengths)
    alone, packed = (model.make_kv(20, PAGE) for _ in range(2))
    runs = [PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))]
    with torch.inference_mode():
        for run in runs:
            model.prefill([run], state, alone)
        rows = Rows(model, state, packed)
        while rows.prepare():
            pass
        assert rows.run(runs) == []
    assert rows.replayed == [(64, [30, 30, 4]), (64, [26, 38]), (16, [12])]
    assert_same(packed, alone)


def test_rows_are_as_long_as_their_positions_or_there_are_more() -> None:
    """Of 8,208 positions 6,144 fill a row and 2,048 another; 2,640 would leave much of a row of 4,096
    empty."""
    model = golden_model("base")
    rows = Rows(model, placed(model, [8]), model.make_kv(1, PAGE), packed_sizes(1024))
    hidden = model.config.talker.hidden
    for positions, wanted in (
        (8208, [6144, 2048, 16]),
        (2640, [2048, 592]),
        (3900, [3900]),
        (1300, [1300]),
        (40, [40]),
    ):
        groups = rows.groups([PrefillRun(0, 0, torch.zeros(positions, hidden))])
        assert [sum(len(run.embeddings) for run in group) for group in groups] == wanted
        assert [(run.start, len(run.embeddings)) for group in groups for run in group] == [
            (sum(wanted[:at]), count) for at, count in enumerate(wanted)
        ]
    for count, positions in ((60, 1), (100, 4), (300, 3)):
        short = [PrefillRun(slot, 0, torch.zeros(positions, hidden)) for slot in range(count)]
        assert [len(group) for group in rows.groups(short)] == [count], (
            "a longer row has room for all of these chunks"
        )


def test_where_the_longest_row_has_no_memory_the_next_one_takes_its_place() -> None:
    model = golden_model("base")
    rows = Rows(model, placed(model, [8]), model.make_kv(1, PAGE), packed_sizes(1024))
    rows.full = (1,)
    rows.warm()
    assert rows.lengths == {4096, 2048}
    groups = rows.groups([PrefillRun(0, 0, torch.zeros(6144, model.config.talker.hidden))])
    assert [sum(len(run.embeddings) for run in group) for group in groups] == [4096, 2048]


def test_without_memory_for_any_row_there_is_no_engine() -> None:
    model = golden_model("base")
    rows = Rows(model, placed(model, [8]), model.make_kv(1, PAGE))
    rows.full = range(100)
    with pytest.raises(torch.OutOfMemoryError):
        rows.warm()


def test_what_an_earlier_row_left_behind_reaches_nobody() -> None:
    """The tail of a row holds embeddings of the row before, and its pages are nobody's."""
    model = golden_model("base")
    lengths = [60, 9]
    state, prompts = placed(model, lengths), prompts_of(model, lengths)
    alone, packed = (model.make_kv(12, PAGE) for _ in range(2))
    with torch.inference_mode():
        rows = Rows(model, state, packed, (64,))
        for slot, prompt in enumerate(prompts):
            model.prefill([PrefillRun(slot, 0, prompt)], state, alone)
            rows.run([PrefillRun(slot, 0, prompt)])
    assert rows.replayed == [(64, [60]), (64, [9])]
    assert_same(packed, alone)


def test_a_few_graphs_serve_every_row_and_idle_turns_capture_the_others() -> None:
    model = golden_model("base")
    state, kv = placed(model, [20]), model.make_kv(3, PAGE)
    rows = Rows(model, state, kv)
    run = PrefillRun(0, 0, prompts_of(model, [20])[0])
    with torch.inference_mode():
        rows.warm()
        rows.run([run])
        assert (rows.replayed, len(rows.captured)) == ([(64, [20])], 1)
        while rows.prepare():
            pass
        rows.run([run])
    assert (rows.replayed[-1], len(rows.captured)) == ((32, [20]), len(SIZES))


def test_without_memory_for_a_graph_chunks_are_left_in_order() -> None:
    model = golden_model("base")
    lengths = [70, 5]
    state, kv = placed(model, lengths), model.make_kv(20, PAGE)
    rows = Rows(model, state, kv)
    rows.make(16)
    tried, rows.full = rows.captured, range(100)
    left = rows.run([PrefillRun(slot, 0, prompt) for slot, prompt in enumerate(prompts_of(model, lengths))])
    assert [(run.slot, run.start, len(run.embeddings)) for run in left] == [(0, 0, 64), (0, 64, 6), (1, 0, 5)]
    assert len(tried) == 2
    assert [len(run.embeddings) for run in rows.run(left[:1])] == [32, 32]
    assert len(tried) == 3, "what was refused is not tried again, a shorter row is"
    with torch.inference_mode():
        assert rows.run(left[:1]) == []
    assert (len(tried), rows.replayed[-4:]) == (3, [(16, [16])] * 4)


class Packed(EagerExecutor):
    """Frames op by op, prompts packed."""

    packed = True

    def __init__(self, model: Any, sizes: EngineOptions) -> None:
        super().__init__(model, sizes)
        self.rows = Rows(model, self.state, self.kv)

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        with torch.inference_mode():
            assert self.rows.run(runs) == []


def packed_core(model: Any, heard: Recorder, **options: Any) -> ListenedCore:
    sizes = EngineOptions(
        **{
            "slots": 8,
            "pages": 128,
            "page_size": 8,
            "max_context": MAX_CONTEXT,
            "prefill_chunk": 24,
            "reserve_frames": 4,
            **options,
        }
    )
    return ListenedCore(Packed(model, sizes), sizes, heard)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_plain_prefill_alone_and_in_any_mix(kind: str) -> None:
    rng = random.Random(f"packed {kind}")
    model = golden_model(kind, codebooks=3)
    members = [random_request(rng, model, f"{kind}-{index}") for index in range(12)]
    wanted = {request: run_alone(model, request) for request in members}
    shared = 0
    for _ in range(4):
        heard = Recorder()
        core = packed_core(
            model,
            heard,
            slots=rng.randint(2, 9),
            pages=rng.choice((24, 64)),
            frames_per_turn=rng.choice((1, 3)),
        )
        for request in rng.sample(members, len(members)):
            core.add(request)
        run(core)
        assert isinstance(core.executor, Packed)
        shared += sum(len(counts) > 1 for _, counts in core.executor.rows.replayed)
        for request, (codes, finish) in wanted.items():
            assert heard.finish[request] == finish
            np.testing.assert_array_equal(heard.codes[request], codes)
        assert len(core.scheduler.kv.free) == core.scheduler.kv.pages
    assert shared > 8, "nobody shared a row"


@pytest.mark.parametrize(
    ("slots", "spare_pages", "frames"), [(4, 80, 3), (6, 8, 24)], ids=["in a mix", "after a restart"]
)
def test_codes_are_the_same_behind_prefixes_of_others_and_after_making_way(
    slots: int, spare_pages: int, frames: int
) -> None:
    many: list[GenerationRequest] = requests(9, 3, frames)
    alone = {request: run_alone(VoiceModel(), request)[0] for request in many}
    heard = Recorder()
    pages = max(-(-(len(request.prompt) + request.max_tokens - 1) // PAGE) for request in many) + spare_pages
    core = packed_core(VoiceModel(), heard, slots=slots, pages=pages, reserve_frames=0, prefill_tokens=64)
    for request in many:
        core.add(request)
    utterances = list(core.scheduler.waiting)
    run(core)
    for request, codes in alone.items():
        np.testing.assert_array_equal(heard.codes[request], codes)
    assert any(one.run > 1 for one in utterances) == (slots == 6)
    assert isinstance(core.executor, Packed)
    assert any(len(counts) > 1 for _, counts in core.executor.rows.replayed)
    prompts = sum(len(request.prompt) - 1 for request in many)
    made = sum(sum(counts) for _, counts in core.executor.rows.replayed)
    assert slots == 6 or made < prompts - 2 * 16, "nobody shared a prefix"


def test_the_record_of_the_engine_names_it() -> None:
    core = packed_core(VoiceModel(), Recorder(), slots=2, pages=24)
    with closing(Engine(core.executor, core.options)) as engine:
        assert engine.info.kernels.endswith(", packed prefill")


def test_places_of_tokens() -> None:
    table = torch.tensor([[4, 5, 6], [7, 8, 9]])
    prompts = PackedPrompts(table, *(torch.tensor(each) for each in ([1, 0, 0], [6, 0, 0], [4, 0, 3])))
    positions, pages, offsets = prompts.places(10, PAGE, SCRATCH_PAGE)
    assert positions.tolist() == [6, 7, 8, 9, 0, 1, 2, 0, 0, 0]
    assert pages.tolist() == [7, 7, 8, 8, 4, 4, 4, 0, 0, 0]
    assert offsets.tolist() == [6, 7, 0, 1, 0, 1, 2, 0, 0, 0]
    assert prompts._replace(counts=torch.tensor([0, 0, 0])).places(2, PAGE, 3)[1].tolist() == [3, 3]
