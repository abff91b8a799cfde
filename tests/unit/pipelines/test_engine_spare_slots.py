"""Slots beside the rows of a frame: requests wait in them prefilled, and say the same."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.executor import EagerExecutor
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import MAX_CONTEXT, Recorder, golden_model, random_request, run_alone
from tests.support.rounds import turn_until
from tests.support.simulated_engine import Simulation


@pytest.mark.parametrize("frames_per_turn", [1, 2])
def test_a_request_waits_prefilled_for_a_row_and_says_the_same(frames_per_turn: int) -> None:
    rng = random.Random(frames_per_turn)
    model, heard = golden_model("custom", codebooks=2), Recorder()
    members = [random_request(rng, model, str(index)) for index in range(14)]
    sizes = EngineOptions(
        4, 200, 8, MAX_CONTEXT, reserve_frames=4, spare_slots=3, frames_per_turn=frames_per_turn
    )
    executor = EagerExecutor(model, sizes)
    core = ListenedCore(executor, sizes, heard)
    batches: list[int] = []
    plain = executor.frames
    executor.frames = lambda slots, count, settings: (
        batches.append(len(slots)) or plain(slots, count, settings)
    )  # type: ignore[method-assign]
    for request in members:
        core.add(request)
    ahead = 0

    def turn() -> None:
        nonlocal ahead
        core.step()
        ahead += sum(one.prefilled == one.last and one.started == 0 for one in core.scheduler.running)

    turn_until(lambda: not core.busy, turn)
    assert max(batches) == 4
    assert batches.count(4) > len(batches) // 2
    assert ahead > 0, "nobody was prefilled ahead"
    sizes = EngineOptions(1, 200, 8, MAX_CONTEXT, reserve_frames=4)
    single = ListenedCore(EagerExecutor(model, sizes), sizes, Recorder())
    for request in members:
        np.testing.assert_array_equal(heard.codes[request], run_alone(model, request)[0])
        single.add(request)
    turn_until(lambda: not single.busy, single.step)
    for request in members:
        np.testing.assert_array_equal(
            core.log_probabilities[request], single.log_probabilities[request], strict=True
        )
        assert len(core.log_probabilities[request]) == len(heard.codes[request])
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


def test_a_request_in_a_spare_slot_counts_as_waiting() -> None:
    model = golden_model("custom", codebooks=2)
    sizes = EngineOptions(4, 200, 8, MAX_CONTEXT, reserve_frames=4, spare_slots=3)
    engine = Engine(EagerExecutor(model, sizes), sizes)
    engine.close()  # its thread is over: what is put into the scheduler stays there
    for count, wanted in ((3, (3, 0)), (4, (4, 0)), (6, (4, 2))):
        engine.core.scheduler.running = [SimpleNamespace()] * count  # type: ignore[list-item]
        stats = engine.stats()
        assert (stats.running, stats.waiting) == wanted


def test_streams_take_no_more_rows_than_there_are() -> None:
    """Streams, and whole utterances beside them: the device would refuse a row more."""
    draw, simulation = np.random.default_rng(5), Simulation(slots=16, stream_slots=8, spare_slots=8)
    frames = simulation.device.frames
    most: list[int] = []
    simulation.device.frames = lambda slots, count, settings: (
        most.append(len(slots)) or frames(slots, count, settings)
    )  # type: ignore[method-assign]
    simulation.arrive(np.sort(draw.uniform(0, 3, 60)), lambda: int(draw.integers(10, 60)))
    simulation.run(until=6.0, batch=lambda: int(draw.integers(40, 120)))
    assert max(most) == 16
    assert all(listener.over for listener in simulation.listeners.values())
    assert simulation.batch_given > 16


def test_every_row_is_taken_where_requests_wait_prefilled() -> None:
    shares: list[float] = []
    for spare_slots in (0, 48):
        draw, simulation = np.random.default_rng(1), Simulation(spare_slots=spare_slots)
        simulation.run(until=1.0, batch=lambda draw=draw: int(draw.integers(37, 188)))
        device = simulation.device
        before = device.rows, device.taken
        simulation.run(until=4.0, batch=lambda draw=draw: int(draw.integers(37, 188)))
        shares.append((device.taken - before[1]) / (device.rows - before[0]))
    assert shares[0] < 0.985
    assert shares[1] > 0.998
