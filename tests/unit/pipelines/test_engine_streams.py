"""Streams in the frame loop: whole chunks, each frame once, the same codes as a whole utterance in any
company, and room at once."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import Recorder, golden_model, make_core, random_request, run_alone
from tests.support.rounds import turn_until
from tests.support.simulated_engine import FRAME_SECONDS, Simulation
from tests.unit.pipelines.test_engine_thread import SECONDS, Backlog, Waiter, make_engine


def requests(
    count: int, seed: int, frames: int | None = None, stream: bool = False
) -> list[GenerationRequest]:
    rng = random.Random(seed)
    made = [
        replace(random_request(rng, golden_model("base"), f"r{index}"), stream=stream)
        for index in range(count)
    ]
    if frames is None:
        return made
    return [
        replace(one, max_tokens=frames + 1, sampling=replace(one.sampling, min_new_tokens=frames + 1))
        for one in made
    ]


def run(core: ListenedCore) -> None:
    turn_until(lambda: not core.busy, core.step)


@pytest.fixture
def still() -> list[float]:
    """The time of a clock that stands: turns take none, so that chunks have their usual sizes."""
    return [0.0]


def core_of(heard: Recorder, still: list[float], **options: Any) -> ListenedCore:
    return make_core(golden_model("base"), heard, clock=lambda: still[0], **options)


def test_a_stream_is_handed_on_in_whole_chunks_and_its_end_comes_with_all_of_it(still: list[float]) -> None:
    heard, (request,) = Recorder(), requests(1, 1, 40, stream=True)
    core = core_of(heard, still)
    core.add(request)
    run(core)
    assert [len(chunk) for chunk in heard.chunks[request]] == [1, 2, 4, 8, 12, 12]
    assert len(heard.codes[request]) == 40
    np.testing.assert_array_equal(np.concatenate(heard.chunks[request]), heard.codes[request][:39])


def test_the_first_chunk_has_what_nobody_hears_too_and_a_family_cuts_its_chunks(still: list[float]) -> None:
    heard, (request,) = Recorder(), requests(1, 1, 60, stream=True)
    request = replace(request, inaudible=7)
    core = core_of(heard, still, chunk_frames=(3, 6, 12), first_frames=(3,))
    core.add(request)
    run(core)
    assert [len(chunk) for chunk in heard.chunks[request]] == [10, 6, 12, 12, 12]
    np.testing.assert_array_equal(np.concatenate(heard.chunks[request]), heard.codes[request][:52])


def test_streamed_equals_whole_and_alone_equals_any_company(still: list[float]) -> None:
    many = [replace(one, stream=index % 2 == 0) for index, one in enumerate(requests(16, 5))]
    heard = Recorder()
    core = core_of(heard, still, slots=5, pages=64, stream_slots=2, frames_per_turn=2)
    for index, request in enumerate(many):
        core.add(request)
        for _ in range(index % 3):
            core.step()
            still[0] += 0.3
    run(core)
    for request in many:
        np.testing.assert_array_equal(
            heard.codes[request], run_alone(golden_model("base"), replace(request, stream=False))[0]
        )
        if request.stream and request in heard.chunks:
            handed = np.concatenate(heard.chunks[request])
            np.testing.assert_array_equal(handed, heard.codes[request][: len(handed)])


def test_a_stream_that_starts_again_hands_no_frame_on_twice(still: list[float]) -> None:
    pair = requests(2, 3, 40, stream=True)
    alone = [run_alone(golden_model("base"), replace(request, stream=False))[0] for request in pair]
    needed = max(-(-(len(request.prompt) + request.max_tokens - 1) // 8) for request in pair)
    heard = Recorder()
    core = core_of(heard, still, pages=needed + 1, reserve_frames=0)
    for request in pair:
        core.add(request)
    utterances = list(core.scheduler.waiting_streams)
    run(core)
    assert max(utterance.run for utterance in utterances) > 1, (
        "nobody had to make way: the test has too many pages"
    )
    for request, codes in zip(pair, alone):
        np.testing.assert_array_equal(heard.codes[request], codes)
        assert [len(chunk) for chunk in heard.chunks[request]] == [1, 2, 4, 8, 12, 12]
        np.testing.assert_array_equal(np.concatenate(heard.chunks[request]), codes[:39])
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


def test_the_youngest_whole_utterance_makes_way_for_a_stream_and_says_the_same_later(
    still: list[float],
) -> None:
    heard = Recorder()
    old, young, *_ = whole = requests(2, 7, 30)
    (urgent,) = requests(1, 8, 10, stream=True)
    core = core_of(heard, still, slots=2)
    for request in whole:
        core.add(request)
    for _ in range(5):
        core.step()
    core.add(urgent)
    core.step()
    assert [one.request for one in core.scheduler.running] == [old, urgent]
    assert (core.scheduler.preempted, [one.request for one in core.scheduler.waiting]) == (1, [young])
    run(core)
    assert core.scheduler.preempted == 0
    for request in whole:
        np.testing.assert_array_equal(heard.codes[request], run_alone(golden_model("base"), request)[0])
    assert list(heard.codes).index(urgent) < list(heard.codes).index(young)


def test_a_stream_that_starts_again_hands_nothing_on_twice(still: list[float]) -> None:
    heard = Recorder()
    long = SamplingParams(temperature=0.0, residual_temperature=0.0, min_new_tokens=40)
    pair = [replace(request, sampling=long) for request in requests(2, 3, 40, stream=True)]
    alone = [run_alone(golden_model("base"), replace(request, stream=False))[0] for request in pair]
    core = core_of(
        heard,
        still,
        pages=max(-(-(len(request.prompt) + request.max_tokens - 1) // 8) for request in pair) + 2,
        reserve_frames=0,
    )
    for request in pair:
        core.add(request)
    young = core.scheduler.waiting_streams[1]
    run(core)
    assert young.run > 1, "nobody had to make way: the test has too many pages"
    for request, codes in zip(pair, alone):
        handed = np.concatenate(heard.chunks[request])
        assert len(handed) > 0
        np.testing.assert_array_equal(handed, codes[: len(handed)])
        np.testing.assert_array_equal(heard.codes[request], codes)


def test_a_stream_that_needs_pages_takes_them_from_whole_utterances(still: list[float]) -> None:
    heard = Recorder()
    (stream,) = requests(1, 3, 30, stream=True)
    whole = requests(3, 4, 30)
    needed = -(-(len(stream.prompt) + stream.max_tokens - 1) // 8)
    core = core_of(
        heard,
        still,
        pages=max(needed, *(-(-(len(one.prompt) + one.max_tokens - 1) // 8) for one in whole)) + 4,
        reserve_frames=0,
    )
    for request in (*whole, stream):
        core.add(request)
    others, (listening,) = list(core.scheduler.waiting), core.scheduler.waiting_streams

    def turn() -> None:
        assert listening.run == 0, "the stream made way"
        core.step()
        still[0] += FRAME_SECONDS

    turn_until(lambda: stream in heard.codes, turn)
    run(core)
    assert any(one.run > 1 for one in others), "nobody had to make way: the test has too many pages"
    assert len(heard.codes) == 4


def test_whole_utterances_leave_the_slots_of_streams_free(still: list[float]) -> None:
    core = core_of(Recorder(), still, slots=4, stream_slots=3)
    for request in requests(4, 2, 20):
        core.add(request)
    core.step()
    assert (len(core.scheduler.running), len(core.scheduler.free_slots), core.scheduler.free_whole_slots) == (
        1,
        3,
        0,
    )


def test_streams_leave_a_part_of_the_slots_to_whole_utterances_that_are_there() -> None:
    simulation = Simulation(slots=32)
    for seed in range(4):
        simulation.add(900 + seed, 300, stream=False)
    simulation.core.step()
    simulation.arrive([0.0] * 60, lambda: 100)
    simulation.run(simulation.device.now + 0.02)
    scheduler = simulation.core.scheduler
    assert (len(scheduler.streams), len(scheduler.whole), len(scheduler.waiting)) == (30, 2, 2)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 20])
def test_a_stream_that_is_cancelled_is_gone_at_once(steps: int, still: list[float]) -> None:
    heard, (doomed, other) = Recorder(), requests(2, 11, 30, stream=True)
    core = core_of(heard, still)
    core.add(doomed)
    core.add(other)
    for _ in range(steps):
        core.step()
    core.abort(doomed)
    assert [one.request for one in core.scheduler.all()] == [other]
    assert heard.errors[doomed].code is ErrorCode.SYNTH_ABORTED
    handed = len(heard.chunks.get(doomed, ()))
    run(core)
    assert len(heard.chunks.get(doomed, ())) == handed
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages
    np.testing.assert_array_equal(
        heard.codes[other], run_alone(golden_model("base"), replace(other, stream=False))[0]
    )


def test_streams_go_on_while_the_stage_is_backlogged_and_whole_utterances_rest() -> None:
    stage = Backlog()
    stage.is_backlogged = True
    engine = make_engine(stage=stage)
    (whole,), (stream, doomed) = requests(1, 4), requests(2, 9, 20, stream=True)
    rests, waits, ends = Waiter(), Waiter(), Waiter()
    engine.submit(whole, rests)
    engine.submit(stream, waits)
    np.testing.assert_array_equal(
        waits.wait().codes, run_alone(golden_model("base"), replace(stream, stream=False))[0]
    )
    assert rests.codes is None
    doomed = replace(doomed, max_tokens=150)
    engine.submit(doomed, ends)
    engine.cancel(doomed)
    error = ends.wait().error
    assert error is not None
    assert error.code is ErrorCode.SYNTH_ABORTED
    stage.is_backlogged = False
    np.testing.assert_array_equal(rests.wait().codes, run_alone(golden_model("base"), whole)[0])
    engine.close()


def test_a_stream_is_taken_although_the_waiting_room_is_full() -> None:
    engine = make_engine(waiting_room=2, slots=1)
    held, (one, two) = threading.Event(), requests(2, 4, 5)
    (stream,) = requests(1, 6, 5, stream=True)

    class Holding(Waiter):
        def frames(self, codes: np.ndarray) -> None:
            assert held.wait(SECONDS)

    first, second, third = Holding(), Waiter(), Waiter()
    engine.submit(one, first)
    engine.submit(two, second)
    engine.submit(stream, third)  # would wait for ever
    held.set()
    for waiter in (first, second, third):
        assert waiter.wait().codes is not None
    engine.close()


def test_one_frame_a_turn_and_no_lag_while_a_stream_is_alive() -> None:
    simulation = Simulation(slots=8)
    asked: list[tuple[int, int]] = []
    frames = simulation.device.frames
    simulation.device.frames = lambda slots, count, settings: (
        asked.append((len(slots), count)),
        frames(slots, count, settings),
    )[1]
    for seed in range(900, 904):
        simulation.add(seed, 40, stream=False)
    simulation.core.step()
    simulation.core.step()
    assert asked == [(4, 2), (4, 2)]
    assert len(simulation.core.turns) == 1
    simulation.arrive([simulation.device.now], lambda: 6)
    simulation.run(simulation.device.now + 0.001)
    assert asked[2:] == [(1, 1)], "a first chunk does not wait for the batch"
    assert not simulation.core.turns
    simulation.run()
    assert asked[-1][1] == 2
    (listener,) = simulation.listeners.values()
    assert listener.frames == 6
    assert listener.until - listener.first == pytest.approx(6 * FRAME_SECONDS)


def test_what_a_stream_may_draw_is_its_own() -> None:
    """A greedy stream beside drawn whole utterances."""
    (greedy,) = requests(1, 20, 12, stream=True)
    greedy = replace(
        greedy, sampling=SamplingParams(temperature=0.0, residual_temperature=0.0, min_new_tokens=13)
    )
    heard = Recorder()
    core = make_core(golden_model("base"), heard)
    for request in (*requests(3, 21, 12), greedy):
        core.add(request)
    run(core)
    np.testing.assert_array_equal(
        heard.codes[greedy], run_alone(golden_model("base"), replace(greedy, stream=False))[0]
    )
