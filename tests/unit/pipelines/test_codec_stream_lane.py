"""The lane of streams: chunks by deadline, groups that share a launch, and a maximum of two on the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from torch import Tensor

from pipelines.codec.stage import Decoder, StreamLane
from pipelines.codec.transfer import PendingSamples
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from tests.support.codec_stage_kit import Heard, OnTheWay, lists


class Starter(Decoder):
    """A decoder that starts groups of chunks of one length, at most `most`, whose events the test holds.

    A state is a list of what was decoded from it. Codes of 13 are refused, codes of 66 break the device,
    codes of 99 come out as NaN.
    """

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.groups: list[list[int]] = []
        self.events: queue.SimpleQueue[OnTheWay] = queue.SimpleQueue()
        self.released = 0

    def new_state(self) -> list[int]:
        return []

    def batch_key(self, frames: int, last: bool) -> tuple[int, int | None]:
        return frames, self.most

    def start_chunks(
        self, states: Sequence[list[int]], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> PendingSamples:
        values = [int(one[0, 0]) for one in codes]
        if 13 in values:
            raise SynthesisError(ErrorCode.SYNTH_ENGINE, "unlucky")
        if 66 in values:
            raise RuntimeError("the device is lost")
        for state, value in zip(states, values):
            state.append(value)
        self.groups.append(values)
        event = OnTheWay()
        self.events.put(event)
        waves = [np.array([np.nan if value == 99 else value], np.float32) for value in values]
        return PendingSamples([[wave] for wave in waves], event, self._release)  # pyright: ignore[reportArgumentType]

    def _release(self) -> None:
        self.released += 1


class Lane(StreamLane):
    """A lane of a `Starter`, two of whose groups the device has until the test says so."""

    def __init__(self, most: int = 2) -> None:
        self.starter, self.heard = Starter(most), Heard()
        super().__init__(self.starter, 64, None)
        self.chunk(0, frames=30)
        self.chunk(1, frames=31)
        self.held = [self.starter.events.get(timeout=60) for _ in range(2)]

    def chunk(
        self, value: int, state: list[int] | None = None, frames: int = 1, deadline: float = 0.0
    ) -> None:
        self.put(
            np.full((frames, 1), value),
            self.heard.at(str(value)),
            [] if state is None else state,
            False,
            deadline,
        )

    def rest(self, groups: int) -> list[tuple[str, np.ndarray | NightjarError]]:
        """Lets the device finish; what is heard of so many chunks, without the first two."""
        for event in self.held:
            event.done.set()
        for _ in range(groups):
            self.starter.events.get(timeout=60).done.set()
        chunks = sum(map(len, self.starter.groups))
        found = self.heard.take(chunks)
        assert [name for name, _ in found[:2]] == ["0", "1"]
        return found[2:]


def test_chunks_go_by_their_deadline_and_share_a_launch_by_their_size() -> None:
    lane = Lane(most=2)
    ahead, behind = list[int](), list[int]()
    lane.chunk(10, ahead, deadline=5.0)
    lane.chunk(11, ahead, deadline=6.0)
    lane.chunk(20, behind, frames=12, deadline=4.0)
    lane.chunk(30, deadline=7.0)
    lane.chunk(40)
    lane.chunk(41)
    lane.chunk(42)
    assert [name for name, _ in lane.rest(4)] == ["40", "41", "42", "10", "20", "11", "30"]
    assert lane.starter.groups[2:] == [[40, 41], [42, 10], [20], [11, 30]]
    assert ahead == [10, 11]
    lane.close()


def test_no_third_group_is_started_while_the_device_has_two() -> None:
    lane = Lane()
    lane.chunk(2)
    with pytest.raises(queue.Empty):
        lane.starter.events.get(timeout=0.3)
    assert lane.alive()
    assert [name for name, _ in lane.rest(1)] == ["2"]
    lane.close()
    assert lane.starter.released == 3


def test_a_refused_chunk_is_no_fault_of_the_others_in_its_group() -> None:
    lane = Lane(most=4)
    for value in (12, 13, 14, 99):
        lane.chunk(value)
    for event in lane.held:
        event.done.set()
    for _ in range(2):
        lane.starter.events.get(timeout=60).done.set()
    found = dict(lane.heard.take(6))
    faults = {name: one.code for name, one in found.items() if isinstance(one, NightjarError)}
    assert faults == {"13": ErrorCode.SYNTH_ENGINE, "99": ErrorCode.SYNTH_NAN}
    lane.chunk(66)
    ((_, error),) = lane.heard.take(1)
    assert isinstance(error, NightjarError)
    assert error.code is ErrorCode.SYNTH_ENGINE
    lane.chunk(7)  # the lane goes on, with both places on the device free
    lane.chunk(8, frames=2)
    for _ in range(2):
        lane.starter.events.get(timeout=60).done.set()
    assert lists(lane.heard.take(2)) == [("7", [7]), ("8", [8])]
    lane.close()


def test_a_stream_that_was_closed_is_decoded_no_more() -> None:
    class Closed(list[int]):
        closed = False

    lane, state = Lane(most=4), Closed()
    lane.chunk(5, state)
    lane.chunk(6)
    state.closed = True
    for event in lane.held:
        event.done.set()
    lane.starter.events.get(timeout=60).done.set()
    found = dict(lane.heard.take(4))
    assert isinstance(found["5"], NightjarError)
    assert found["5"].code is ErrorCode.SYNTH_ABORTED
    assert lane.starter.groups[2:] == [[6]]
    lane.close()


def test_a_closed_lane_decodes_what_waits_and_refuses_the_rest() -> None:
    lane = Lane()
    for value in (2, 3, 4):
        lane.chunk(value)
    closing = threading.Thread(target=lane.close)
    closing.start()
    assert [name for name, _ in lane.rest(2)] == ["2", "3", "4"]
    closing.join(60)
    assert not closing.is_alive()
    lane.chunk(5)
    ((_, late),) = lane.heard.take(1)
    assert isinstance(late, NightjarError)
    assert late.code is ErrorCode.SYNTH_ABORTED


class Gated(Starter):
    """Starts no group before the test opens the gate, and chunks one by one."""

    def __init__(self) -> None:
        super().__init__(most=1)
        self.gate = threading.Event()

    def start_chunks(
        self, states: Sequence[list[int]], codes: Sequence[Tensor], last: Sequence[bool]
    ) -> PendingSamples:
        assert self.gate.wait(60)
        return super().start_chunks(states, codes, last)


class PatientLane(StreamLane):
    hold_seconds = 60.0


def putting(lane: StreamLane, heard: Heard, deadline: float) -> threading.Thread:
    codes = np.full((1, 1), 3)
    thread = threading.Thread(target=lane.put, args=(codes, heard.at("3"), [], False, deadline), daemon=True)
    thread.start()
    return thread


def test_the_engine_waits_until_the_first_frames_of_a_lone_stream_are_started() -> None:
    starter, heard = Gated(), Heard()
    lane = PatientLane(starter, 64, None)
    first = putting(lane, heard, 0.0)
    first.join(0.2)
    assert first.is_alive()
    starter.gate.set()
    first.join(30)
    assert not first.is_alive()
    # The device takes a second group but no third one, for which the engine does not wait.
    for _ in range(2):
        busy = putting(lane, heard, 0.0)
        busy.join(30)
        assert not busy.is_alive()
    for _ in range(3):
        starter.events.get(timeout=60).done.set()
    heard.take(3)
    lane.close()


def test_the_engine_does_not_wait_for_later_frames_of_a_stream() -> None:
    starter, heard = Gated(), Heard()
    lane = PatientLane(starter, 64, None)
    later = putting(lane, heard, 1.0)
    later.join(30)
    assert not later.is_alive()
    starter.gate.set()
    starter.events.get(timeout=60).done.set()
    heard.take(1)
    lane.close()
