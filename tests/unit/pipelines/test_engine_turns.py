"""Which streams take part in the next turn; and a day in the life of the engine, on a clock and a device
that are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.engine.buckets import BUCKETS
from pipelines.engine.turns import (
    AHEAD_ROWS,
    CHEAP_ROWS,
    CHUNK_FRAMES,
    DUE_SECONDS,
    FAIR_TURNS,
    FIRST_FRAMES,
    MAX_AHEAD_ROWS,
    Playback,
    TurnPlanner,
)
from tests.support.simulated_engine import FRAME_SECONDS, Simulation

NOW = 100.0


def stream(lead: float, missing: int = 12) -> Playback:
    """A stream whose listener has so many seconds left to hear."""
    return Playback(NOW + lead, False, 12, missing)


def awaiting(waited: float = 0.0) -> Playback:
    return Playback(NOW - waited)


def planner(turn: float = 0.01) -> TurnPlanner:
    made = TurnPlanner(BUCKETS, FRAME_SECONDS, False, CHUNK_FRAMES, FIRST_FRAMES)
    made.record(turn, together=True)
    return made


def test_first_chunks_come_before_everything_then_the_listener_who_runs_dry_first() -> None:
    streams = [
        stream(5.0),
        stream(0.3),
        awaiting(0.01),
        stream(0.05),
        awaiting(0.02),
        *[stream(1.0 + 0.01 * index) for index in range(20)],
    ]
    plan = planner().plan(streams, NOW, batch=True)
    assert plan.streams[:4] == [4, 2, 3, 1]
    assert (len(plan.streams), plan.batch, plan.together) == (CHEAP_ROWS, False, False)
    assert plan.streams[4:] == [5, 6, 7, 8], "places that cost nothing go to those who run dry next"
    assert 0 not in plan.streams


def test_a_bucket_of_urgent_streams_is_filled_up() -> None:
    streams = [awaiting() for _ in range(40)] + [stream(1.0) for _ in range(60)]
    plan = planner().plan(streams, NOW, batch=True)
    assert len(plan.streams) == 64
    assert set(range(40)) <= set(plan.streams)


def test_a_stream_is_urgent_when_its_next_chunk_would_come_too_late_beside_everybody() -> None:
    made = planner(turn=0.016)
    assert made.is_urgent(stream(0.1, missing=3), NOW)
    assert not made.is_urgent(stream(0.1, missing=2), NOW)
    assert not made.is_urgent(stream(0.41, missing=1000), NOW)
    assert made.is_urgent(stream(-1.0, missing=1), NOW)


def test_without_urgent_streams_those_that_are_due_go_with_the_batch() -> None:
    streams = [stream(0.5), stream(DUE_SECONDS - 0.1), stream(DUE_SECONDS + 0.1)]
    plan = planner().plan(streams, NOW, batch=True)
    assert (plan.streams, plan.batch, plan.together) == ([0, 1], True, True)
    assert planner().plan([], NOW, batch=True).batch


def test_where_few_slots_are_free_everybody_goes_on() -> None:
    streams = [stream(0.5), stream(9.0), stream(8.0)]
    assert planner().plan(streams, NOW, batch=True, crowded=True).streams == [0, 2, 1]
    assert planner().plan(streams, NOW, batch=False, crowded=True).streams == [0, 2, 1]


def test_with_nothing_else_to_do_streams_that_are_ahead_go_on_a_few_at_a_time() -> None:
    streams = [stream(10.0 - index / 100) for index in range(100)]
    plan = planner().plan(streams, NOW, batch=False)
    assert plan.streams == list(range(99, 99 - 32, -1)), "a quarter of them, filled up to a bucket"
    assert not plan.together
    assert len(planner().plan(streams[:20], NOW, batch=False).streams) == AHEAD_ROWS
    assert len(planner().plan([*streams] * 5, NOW, batch=False).streams) == MAX_AHEAD_ROWS


def test_a_single_stream_that_is_due_takes_others_along() -> None:
    streams = [stream(10.0 - index / 100) for index in range(40)] + [stream(1.0)]
    assert planner().plan(streams, NOW, batch=False).streams == [40, *range(39, 24, -1)]
    assert planner().plan(streams, NOW, batch=True).streams == [40], "not at the cost of batch work"


def test_batch_work_is_passed_over_a_few_times_in_a_row_only() -> None:
    made, streams = planner(), [awaiting(), stream(1.0)]
    turns = [made.plan(streams, NOW, batch=True) for _ in range(3 * (FAIR_TURNS + 1))]
    assert [plan.batch for plan in turns] == ([False] * FAIR_TURNS + [True]) * 3
    assert all(0 in plan.streams for plan in turns), "the urgent ones go on in a turn of the batch too"
    assert not any(made.plan(streams, NOW, batch=False).batch for _ in range(20))


@pytest.mark.parametrize(("turn", "first"), [(0.0, 1), (0.003, 1), (0.05, 1), (0.06, 2), (0.07, 4), (0.5, 1)])
def test_the_first_chunk_grows_with_the_time_of_a_turn_only(turn: float, first: int) -> None:
    """Where nothing keeps up it is small again: then it is at least there soon."""
    assert planner(turn).next_size(awaiting(), NOW) == first


def test_one_slow_turn_changes_nothing() -> None:
    made = planner(0.003)
    for _ in range(4):
        made.record(0.003, together=False)
    made.record(9.0, together=True)
    assert made.next_size(awaiting(), NOW) == 1


def sizes(turn: float, count: int) -> list[int]:
    """The chunks of a stream that gets a frame every `turn` seconds."""
    made, one, now = planner(turn), awaiting(), NOW
    found = []
    for _ in range(count):
        one.size = made.next_size(one, now)
        now += turn * one.size
        one.record_chunk(one.size, now, FRAME_SECONDS)
        found.append(one.size)
    return found


def test_chunks_grow_as_far_as_they_come_in_time() -> None:
    assert sizes(0.003, 7) == [1, 2, 4, 8, 12, 12, 12]
    assert sizes(0.02, 6) == [1, 2, 4, 8, 12, 12]
    slow = sizes(0.045, 12)
    assert slow[:3] == [1, 1, 1]
    assert slow[-1] == 12
    assert sizes(0.09, 6) == [1, 2, 4, 8, 12, 12], "what cannot keep up has few calls at least"


def poisson(rate: float, seconds: float, draw: np.random.Generator) -> list[float]:
    times = np.cumsum(draw.exponential(1 / rate, int(2 * rate * seconds)))
    return times[times < seconds].tolist()


def seed_tts(draw: np.random.Generator) -> int:
    """Frames of a short sentence: 2 to 8 s."""
    return int(draw.integers(25, 100))


@pytest.mark.parametrize(("rate", "aim"), [(10, 18.0), (20, 25.0), (50, 40.0), (100, 80.0)])
def test_an_open_loop_has_its_first_chunks_in_time_and_no_underrun(rate: int, aim: float) -> None:
    draw, simulation = np.random.default_rng(rate), Simulation(stream_slots=128)
    simulation.arrive(poisson(rate, 10, draw), lambda: seed_tts(draw))
    simulation.run()
    assert simulation.first_chunk_ms(95) < aim
    assert simulation.underruns() == 0
    assert all(one.over for one in simulation.listeners.values())
    assert len(simulation.core.scheduler.kv.free) == simulation.core.scheduler.kv.pages


def test_a_thousand_listeners_in_real_time_hear_no_gap() -> None:
    """Twice as many as there are slots: an utterance is made sooner than it is heard."""
    draw, simulation = np.random.default_rng(0), Simulation(stream_slots=128)
    simulation.arrive(poisson(100, 20, draw), lambda: int(draw.integers(100, 180)))
    simulation.run()
    assert simulation.most_listeners() > 1000
    assert simulation.underruns() == 0
    assert simulation.first_chunk_ms(95) < 80.0
    assert all(one.over for one in simulation.listeners.values())


def made_beside(streams: int, seconds: float = 15.0) -> tuple[float, Simulation]:
    """Frames a second of batch work beside so many streams, whose listeners ask again when they have heard
    enough."""
    draw, simulation = np.random.default_rng(3), Simulation(stream_slots=128)
    simulation.run(5.0, lambda: seed_tts(draw))
    before, began = simulation.core.frames_made, simulation.device.now
    simulation.then = lambda now: simulation.arrive([now + draw.uniform(2, 6)], lambda: seed_tts(draw))
    simulation.arrive((began + draw.uniform(0, 4, streams)).tolist(), lambda: seed_tts(draw))
    simulation.run(began + seconds, lambda: seed_tts(draw))
    streamed = sum(one.frames for one in simulation.listeners.values())
    return (simulation.core.frames_made - before - streamed) / (simulation.device.now - began), simulation


def test_batch_work_keeps_its_speed_beside_32_streams_and_they_their_start() -> None:
    alone, _ = made_beside(0)
    beside, simulation = made_beside(32)
    assert beside > 0.9 * alone
    assert simulation.underruns() == 0
    assert simulation.first_chunk_ms(95) < 35.0
    assert len(simulation.listeners) > 60


def test_under_more_streams_than_the_device_can_make_nobody_starves() -> None:
    draw, simulation = np.random.default_rng(1), Simulation(stream_slots=128)
    simulation.arrive(poisson(300, 6, draw), lambda: int(draw.integers(100, 180)))
    simulation.run(6.0, lambda: seed_tts(draw))
    assert simulation.batch_frames > 1000
    scheduler = simulation.core.scheduler
    assert len(scheduler.whole) + len(scheduler.free_slots) >= 512 // 16
    simulation.run()
    assert all(one.over for one in simulation.listeners.values())
    assert not simulation.core.busy


def test_reproducible_chunks_have_the_same_sizes_at_any_load() -> None:
    made = TurnPlanner(BUCKETS, FRAME_SECONDS, True, CHUNK_FRAMES, FIRST_FRAMES)
    for seconds in (0.002, 10.0):
        for _ in range(40):
            made.record(seconds, True)
        one, sizes = Playback(NOW), list[int]()
        for _ in range(7):
            one.size = made.next_size(one, NOW)
            sizes.append(one.size)
            one.record_chunk(one.size, NOW, FRAME_SECONDS)
        assert sizes == [1, 2, 4, 8, 12, 12, 12]


#: A family whose codec looks 12 frames ahead, and whose model writes 40 before the speech.
INAUDIBLE, SLOW_CHUNKS, SLOW_FIRST = 52, (8, 16, 32, 64), (8, 16)


def test_what_nobody_hears_is_no_audio_ahead_of_the_listener() -> None:
    one = Playback(NOW, size=8, inaudible=INAUDIBLE)
    assert one.wanted == INAUDIBLE + 8
    one.record_chunk(one.wanted, NOW + 1, 0.02)
    assert one.deadline == pytest.approx(NOW + 1 + 8 * 0.02)
    assert one.wanted == 8
    one.record_chunk(one.wanted, NOW + 1.1, 0.02)
    assert one.deadline == pytest.approx(NOW + 1 + 16 * 0.02), "later chunks are heard whole"
    short = Playback(NOW, size=8, inaudible=INAUDIBLE)
    short.record_chunk(3, NOW, 0.02)
    assert short.deadline == NOW


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_family_has_chunks_of_its_own_sizes(reproducible: bool) -> None:
    made = TurnPlanner(BUCKETS, 0.02, reproducible, SLOW_CHUNKS, SLOW_FIRST)
    made.record(0.002, together=True)
    one, now, found = Playback(NOW, inaudible=INAUDIBLE), NOW, []
    for _ in range(6):
        one.size = made.next_size(one, now)
        found.append(one.wanted)
        now += 0.002 * one.wanted
        one.record_chunk(one.wanted, now, 0.02)
    assert found == [INAUDIBLE + 8, 16, 32, 64, 64, 64]
    assert [made.whole_part(frames) for frames in (5, 8, 40, 99)] == [5, 8, 32, 64]


def test_the_first_chunk_of_a_family_grows_within_its_own_sizes() -> None:
    made = TurnPlanner(BUCKETS, 0.02, False, SLOW_CHUNKS, SLOW_FIRST)
    made.record(0.016, together=True)
    assert made.next_size(Playback(NOW, inaudible=INAUDIBLE), NOW) == 8
    made = TurnPlanner(BUCKETS, 0.02, False, SLOW_CHUNKS, SLOW_FIRST)
    made.record(0.018, together=True)
    assert made.next_size(Playback(NOW, inaudible=INAUDIBLE), NOW) == 16
