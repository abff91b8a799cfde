"""Text that comes while it is spoken: the codes of the whole text, however it came; a stream whose text is
used up waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelines.engine.scheduler import GenerationRequest
from pipelines.errors import ErrorCode
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import (
    Recorder,
    golden_model,
    make_core,
    random_request,
    random_sampling,
    run_alone,
)
from tests.support.rounds import turn_until, wait_until
from tests.unit.pipelines.test_engine_thread import Waiter, make_engine

FRAMES = 30


class Writer:
    """A request with open text, the same one with all of it, and the ids that are still to come."""

    def __init__(self, seed: int, clone: bool = False, frames: int = FRAMES) -> None:
        rng, draw = random.Random(seed), np.random.default_rng(seed)
        config = golden_model("base").config
        body = draw.integers(0, 256, rng.randint(16, 24)).tolist()
        said = draw.integers(0, 256, 3).tolist()
        codes = draw.integers(0, config.predictor.vocab, (8, config.codebooks)) if clone else None
        task = TokenizedTask([1, 2, 3], body, reference_ids=said if clone else None)
        first = task.streamed_ids(codes)
        sampling = replace(random_sampling(rng), min_new_tokens=frames + 1)
        prompt = build_prompt(config, task, codes=codes, text_first=False)
        self.whole = GenerationRequest(f"w{seed}", prompt, sampling, seed, frames + 1)
        opened = build_prompt(
            config,
            msgspec.structs.replace(task, body_ids=body[:first], text_open=True),
            codes=codes,
            text_first=False,
        )
        self.open = replace(self.whole, prompt=opened, stream=True, text_open=True)
        self.left = [*body[first:], config.text_ids.tts_eos_token_id]
        np.testing.assert_array_equal(opened.text, prompt.text)

    def write(self, core: ListenedCore, count: int) -> None:
        ids, self.left = self.left[:count], self.left[count:]
        core.append(self.open, ids, not self.left)

    def codes(self) -> np.ndarray:
        return run_alone(golden_model("base"), self.whole)[0]


def core_of(heard: Recorder, **options: Any) -> ListenedCore:
    return make_core(golden_model("base"), heard, clock=lambda: 0.0, **options)


def run(core: ListenedCore) -> None:
    turn_until(lambda: core.idle, core.step)


@pytest.mark.parametrize("clone", [False, True])
def test_text_in_pieces_gives_the_codes_of_the_whole_text_in_any_company(clone: bool) -> None:
    heard, rng = Recorder(), random.Random(1)
    core = core_of(heard, slots=6)
    writers = [Writer(seed, clone) for seed in range(3)]
    others = [random_request(rng, golden_model("base"), f"o{index}") for index in range(4)]
    for writer in writers:
        core.add(writer.open)
    for number, other in enumerate(others):
        core.add(replace(other, stream=number % 2 == 0))
    while any(writer.left for writer in writers):
        for _ in range(rng.randint(0, 5)):
            core.step()
        writer = rng.choice([one for one in writers if one.left])
        writer.write(core, rng.randint(1, 5))
    run(core)
    assert not core.busy
    for writer in writers:
        np.testing.assert_array_equal(heard.codes[writer.open], writer.codes())
    for request, codes in heard.codes.items():
        if request.request_id.startswith("o"):
            np.testing.assert_array_equal(
                codes, run_alone(golden_model("base"), replace(request, stream=False))[0]
            )
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


def test_a_stream_whose_text_is_used_up_takes_no_frames_and_others_go_on() -> None:
    heard, writer = Recorder(), Writer(5)
    core = core_of(heard)
    other = replace(random_request(random.Random(2), golden_model("base"), "other"), max_tokens=60)
    core.add(writer.open)
    for count in (0, 4, 5):
        writer.write(core, count)
        run(core)
        (starved,) = core.scheduler.running
        assert starved.starved
        assert starved.started == len(starved.trailing), "one frame for each id"
        assert sum(len(chunk) for chunk in heard.chunks.get(writer.open, ())) == starved.started, (
            "what was made is heard before it waits"
        )
    core.add(other)
    turn_until(lambda: other in heard.codes or core.idle, core.step)
    assert other in heard.codes
    assert starved.started == 9
    assert core.idle
    assert core.busy
    writer.write(core, 100)
    run(core)
    np.testing.assert_array_equal(heard.codes[writer.open], writer.codes())
    np.testing.assert_array_equal(
        np.concatenate(heard.chunks[writer.open]), writer.codes()[: sum(map(len, heard.chunks[writer.open]))]
    )


def test_text_comes_while_the_stream_waits_for_a_slot() -> None:
    heard, (first, second) = Recorder(), (Writer(7), Writer(8))
    core = core_of(heard, slots=1)
    for writer in (first, second):
        core.add(writer.open)
        core.step()
        writer.write(core, 2)
    first.write(core, 100)
    second.write(core, 3)
    run(core)
    second.write(core, 100)
    run(core)
    for writer in (first, second):
        np.testing.assert_array_equal(heard.codes[writer.open], writer.codes())


def test_a_stream_that_starts_again_has_all_text_that_came() -> None:
    heard, writer = Recorder(), Writer(9)
    core = core_of(heard)
    core.add(writer.open)
    writer.write(core, 6)
    run(core)
    (starved,) = core.scheduler.running
    core.scheduler.preempt_youngest()
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages
    writer.write(core, 3)
    run(core)
    assert (starved.started, starved.starved) == (9, True)
    writer.write(core, 100)
    run(core)
    np.testing.assert_array_equal(heard.codes[writer.open], writer.codes())
    handed = np.concatenate(heard.chunks[writer.open])
    np.testing.assert_array_equal(handed, writer.codes()[: len(handed)])


def test_a_starved_stream_that_is_cancelled_frees_its_slot_and_pages() -> None:
    heard, writer = Recorder(), Writer(10)
    core = core_of(heard, slots=1)
    core.add(writer.open)
    writer.write(core, 4)
    run(core)
    assert not core.scheduler.free_slots
    core.abort(writer.open)
    assert heard.errors[writer.open].code is ErrorCode.SYNTH_ABORTED
    assert (len(core.scheduler.free_slots), len(core.scheduler.kv.free)) == (1, core.scheduler.kv.pages)
    assert not core.busy
    writer.write(core, 3)
    assert core.idle


def test_an_earlier_owner_leaves_no_text_in_a_slot() -> None:
    heard, (first, second) = Recorder(), (Writer(11), Writer(12))
    core = core_of(heard, slots=1)
    core.add(first.open)
    first.write(core, 12)
    run(core)
    core.abort(first.open)
    core.add(second.open)
    second.write(core, 100)
    run(core)
    np.testing.assert_array_equal(heard.codes[second.open], second.codes())


def test_text_beyond_the_last_frame_is_not_read() -> None:
    heard, writer = Recorder(), Writer(13, frames=12)
    core = core_of(heard)
    core.add(writer.open)
    writer.write(core, 14)
    run(core)
    assert heard.finish[writer.open] == "length"
    np.testing.assert_array_equal(heard.codes[writer.open], writer.codes())
    writer.write(core, 100)
    assert core.idle


def test_the_engine_rests_while_all_streams_wait_for_text_and_wakes_when_it_comes() -> None:
    engine, waiter, writer = make_engine(), Waiter(), Writer(14)
    steps: list[int] = []
    step = engine.core.step
    engine.core.step = lambda batch=True: (steps.append(1), step(batch))[1]
    engine.submit(writer.open, waiter)
    while writer.left:
        ids, writer.left = writer.left[:4], writer.left[4:]
        engine.append(writer.open, ids, not writer.left)
    np.testing.assert_array_equal(waiter.wait().codes, writer.codes())
    silent, starved = Waiter(), Writer(15)
    engine.submit(starved.open, silent)
    wait_until(lambda: engine.core.scheduler.running and engine.core.idle)
    turns = len(steps)
    engine.append(starved.open, starved.left, True)
    np.testing.assert_array_equal(silent.wait().codes, starved.codes())
    assert len(steps) - turns <= FRAMES + 6, "turns were taken for nothing"
    engine.close()
