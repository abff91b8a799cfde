"""The lane of a continuous batch: who is in which step, when a step is due, and faults that show late."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.codec import stage as stage_module
from pipelines.codec.graphs import Codes
from pipelines.codec.stage import QUIET_ARRIVALS, ContinuousLane, Gathering
from pipelines.codec.transfer import PendingSamples
from pipelines.errors import ErrorCode, NightjarError
from tests.support.codec_stage_kit import Heard, OnTheWay, lists


@dataclass(eq=False)
class Sum:
    """A state that adds up all codes so far."""

    total: int = 0


class Sums:
    """Steps of one frame whose samples are running sums; codes of 99 come out as NaN. A test that `holds`
    them says when each is over."""

    rows, frames, samples_per_frame = 2, 1, 1

    def __init__(self, holds: bool = False) -> None:
        self.steps: list[list[int]] = []
        self.events: queue.SimpleQueue[OnTheWay] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0
        self._holds = holds

    def enter(self, codes: Tensor, start: Sum | None) -> Sum | None:
        self.inside += 1
        return Sum() if start is None else Sum(start.total)

    def leave(self, state: Sum) -> None:
        self.inside -= 1

    def step(self, states: Sequence[Sum], codes: Sequence[Codes]) -> PendingSamples:
        self.gate.wait(240)
        self.steps.append([int(one[0, 0]) for one in codes])
        parts = []
        for state, one in zip(states, codes):
            state.total += int(one[0, 0])
            parts.append([np.array([np.nan if one[0, 0] == 99 else state.total], np.float32)])
        event = OnTheWay() if self._holds else None
        if event is not None:
            self.events.put(event)
        return PendingSamples(parts, event)  # pyright: ignore[reportArgumentType]


def opened(steps: Sums, seconds: float = 0.0, **gathering: Any) -> Any:
    return ContinuousLane(steps, None, Gathering(seconds, **gathering))  # pyright: ignore[reportArgumentType]


def put(lane: Any, heard: Heard, name: str, *values: int, start: Sum | None = None) -> None:
    lane.put(np.array(values, np.int64)[:, None], heard.at(name), start)


def test_an_utterance_joins_a_row_that_another_left() -> None:
    steps, heard = Sums(), Heard()
    steps.gate.clear()
    lane = opened(steps)
    put(lane, heard, "a", 1, 2, 3)  # alone in the step that the gate holds
    for name, value in zip("bcd", (10, 20, 30)):
        put(lane, heard, name, value, start=Sum(1000))
    steps.gate.set()
    found = lists(heard.take(4))
    lane.close()
    assert dict(found) == {"a": [1, 3, 6], "b": [1010], "c": [1020], "d": [1030]}
    assert [name for name, _ in found if name != "a"] == ["b", "c", "d"]
    assert steps.steps in ([[1], [2, 10], [3, 20], [30]], [[1, 10], [2, 20], [3, 30]])
    assert steps.inside == 0


def test_what_is_no_number_ends_its_utterance_in_the_middle_and_frees_its_row() -> None:
    steps, heard = Sums(), Heard()
    lane = opened(steps)
    put(lane, heard, "bad", 1, 99, *[1] * 50)
    put(lane, heard, "good", 1, 2)
    put(lane, heard, "next", 5, 5)
    found = dict(heard.take(3))
    lane.close()
    error = found.pop("bad")
    assert isinstance(error, NightjarError)
    assert error.code is ErrorCode.SYNTH_NAN
    assert len(steps.steps) < 30, "it was not decoded to its end"
    assert {name: list(samples) for name, samples in found.items() if isinstance(samples, np.ndarray)} == {
        "good": [1, 3],
        "next": [5, 10],
    }
    assert steps.inside == 0


@pytest.mark.parametrize(("alive", "most"), [(False, 2), (True, 1)])
def test_a_second_step_is_started_while_the_device_has_the_first_but_no_third(alive: bool, most: int) -> None:
    steps, heard = Sums(holds=True), Heard()
    lane = opened(steps, beside_streams=lambda: alive)
    put(lane, heard, "a", *range(5))
    events = [steps.events.get(timeout=240) for _ in range(most)]
    with pytest.raises(queue.Empty):
        steps.events.get(timeout=0.2)
    for _ in range(5 - most):
        events.pop(0).done.set()
        events.append(steps.events.get(timeout=240))
    for event in events:
        event.done.set()
    assert lists(heard.take(1)) == [("a", [0, 1, 3, 6, 10])]
    lane.close()


def test_where_many_come_a_step_waits_for_all_rows_or_its_time() -> None:
    now = [100.0]
    steps, heard = Sums(), Heard()
    steps.rows = 4
    lane = opened(steps, 10_000.0, monotonic=lambda: now[0])
    for index in range(QUIET_ARRIVALS):
        put(lane, heard, "few", index)
    heard.take(QUIET_ARRIVALS)
    before = len(steps.steps)
    for index in range(3):
        put(lane, heard, "many", index)
    with pytest.raises(queue.Empty):
        heard.items.get(timeout=0.2)
    put(lane, heard, "many", 3)
    heard.take(4)
    assert steps.steps[before:] == [[0, 1, 2, 3]]
    put(lane, heard, "late", 1)
    with pytest.raises(queue.Empty):
        heard.items.get(timeout=0.2)
    now[0] += 20_000.0
    put(lane, heard, "late", 2)
    assert [name for name, _ in heard.take(2)] == ["late", "late"]
    lane.close()


def test_it_is_behind_while_much_waits_for_a_row() -> None:
    steps, heard = Sums(), Heard()
    steps.gate.clear()
    lane = opened(steps, frames=6)
    for _ in range(4):
        put(lane, heard, "x", 1, 1)
    put(lane, heard, "x", *[1] * 4)
    assert lane.waiting_frames >= lane.gathering.frames
    steps.gate.set()
    heard.take(5)
    assert lane.waiting_frames == 0
    lane.close()


def test_a_fault_that_shows_late_is_told_once_to_all_of_its_step_and_the_lane_goes_on() -> None:
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    class Late(Sums):
        def step(self, states: Sequence[Sum], codes: Sequence[Codes]) -> PendingSamples:
            samples = super().step(states, codes)
            if len(self.steps) == 1:
                samples.event = Broken()  # pyright: ignore[reportAttributeAccessIssue]
            return samples

    steps, heard = Late(), Heard()
    steps.gate.clear()
    lane = opened(steps)
    put(lane, heard, "a", *[1] * 9)
    steps.gate.set()
    ((_, error),) = heard.take(1)
    assert isinstance(error, NightjarError)
    assert error.code is ErrorCode.SYNTH_ENGINE
    put(lane, heard, "b", 1, 2)
    assert lists(heard.take(1)) == [("b", [1, 3])]
    lane.close()
    assert heard.items.empty()
    assert steps.inside == 0


def test_a_receiver_that_raises_stops_nobody_and_is_on_the_lanes_thread() -> None:
    steps, heard = Sums(), Heard()
    lane = opened(steps)
    current: list[bool] = []

    def fail(_: np.ndarray | NightjarError) -> None:
        current.append(threading.current_thread() in lane.threads)
        raise RuntimeError("a bad receiver")

    lane.put(np.ones((1, 1), np.int64), fail)
    put(lane, heard, "next", 2)
    assert lists(heard.take(1)) == [("next", [2])]
    assert current == [True]
    lane.close()
    put(lane, heard, "late", 1)
    ((_, late),) = heard.take(1)
    assert isinstance(late, NightjarError)
    assert late.code is ErrorCode.SYNTH_ABORTED


def test_one_that_turns_over_while_places_are_freed_keeps_its_own_or_gives_it_back() -> None:
    class Turning(stage_module.Job):
        """Is told of a fault by another thread, right after it was looked at."""

        looks = 0

        @property
        def notified(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
            Turning.looks += 1
            return Turning.looks > 1

        @notified.setter
        def notified(self, value: bool) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    steps = Sums()
    lane = opened(steps)
    codes = torch.ones(3, 1, dtype=torch.int64)
    state = steps.enter(codes, None)
    lane._inside = [Turning(codes.numpy(), lambda _: None, state, False, 0.0, 0.0)]
    lane._take()
    assert (len(lane._inside), steps.inside) == (1, 1)
    lane._take()
    assert (len(lane._inside), steps.inside) == (0, 0)
    lane.close()


def test_codes_whose_audio_has_no_room_take_no_row_and_the_lane_goes_on() -> None:
    steps, heard = Sums(), Heard()
    lane = opened(steps)
    # More bytes than a process can address.
    steps.samples_per_frame = 1 << 50
    put(lane, heard, "a", 1, 2, 3)
    found = dict(heard.take(1))
    steps.samples_per_frame = 1
    put(lane, heard, "b", 1, 2)
    found |= dict(heard.take(1))
    lane.close()
    assert isinstance(found["a"], NightjarError)
    assert lists([("b", found["b"])]) == [("b", [1, 3])]
    assert steps.inside == 0


def test_where_the_lanes_thread_fails_all_are_told_and_it_closes() -> None:
    class Broken(Sums):
        def leave(self, state: Sum) -> None:
            raise RuntimeError("a place is lost")

    steps, heard = Broken(), Heard()
    steps.gate.clear()
    lane = opened(steps)
    for name in "abc":
        put(lane, heard, name, *[1] * (1 if name == "a" else 9))
    steps.gate.set()
    errors = [error for _, error in heard.take(3)]
    assert all(isinstance(error, NightjarError) and error.code is ErrorCode.SYNTH_ENGINE for error in errors)
    lane.close()
    put(lane, heard, "late", 1)
    ((_, late),) = heard.take(1)
    assert isinstance(late, NightjarError)
