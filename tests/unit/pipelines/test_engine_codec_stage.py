"""The codec stage: batches of whole utterances, streams beside them by deadline, and faults that stay with
their utterance."""

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

from pipelines.codec.stage import (
    QUANTUM_FRAMES,
    QUIET_ARRIVALS,
    CodecStage,
    Decoder,
    Done,
    Gathering,
    UtteranceLane,
)
from pipelines.codec.transfer import PendingSamples
from pipelines.errors import ErrorCode, NightjarError
from tests.support.codec_stage_kit import Heard, OnTheWay, lists


@dataclass
class Sum:
    """A state that adds up all codes so far."""

    total: int = 0


class Adder(Decoder):
    """A decoder whose samples are running sums; codes of 13 break it, codes of 99 come out as NaN."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def new_state(self) -> Sum:
        return Sum()

    def decode(self, codes: Sequence[Tensor], states: Sequence[Sum | None] | None = None) -> list[Tensor]:
        self.gate.wait()
        self.batches.append(len(codes))
        if any(bool((one == 13).any()) for one in codes):
            raise RuntimeError("unlucky")
        starts = [state.total if state else 0 for state in states or [None] * len(codes)]
        waves = [(start + one[:, 0].cumsum(0)).float() for start, one in zip(starts, codes)]
        return [wave.masked_fill((one[:, 0] == 99), float("nan")) for wave, one in zip(waves, codes)]

    def decode_chunk(self, states: Sequence[Sum], codes: Sequence[Tensor]) -> list[Tensor]:
        waves = self.decode(codes, states)
        for state, one in zip(states, codes):
            state.total += int(one[:, 0].sum())
        return waves


class Slow(Decoder):
    """A decoder of which only whole utterances wait for the gate."""

    def __init__(self, adder: Adder) -> None:
        self.decode, self.new_state = adder.decode, adder.new_state
        self._streams = Adder()

    def decode_chunk(self, states: Sequence[Sum], codes: Sequence[Tensor]) -> list[Tensor]:
        return self._streams.decode_chunk(states, codes)


def codes(*values: int) -> np.ndarray:
    return np.array([[value] for value in values], np.int64)


def test_what_waits_is_decoded_together() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    decoder.gate.clear()
    for index in range(6):
        stage.decode(codes(index, 1), heard.at(str(index)), Sum(100) if index == 3 else None)
    decoder.gate.set()
    got = dict(lists(heard.take(6)))
    assert got == {
        str(index): [100.0 * (index == 3) + index, 100.0 * (index == 3) + index + 1] for index in range(6)
    }
    assert len(decoder.batches) <= 2
    stage.close()


def test_chunks_of_a_stream_keep_their_order_and_state() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    states = Sum(), Sum(50)
    decoder.gate.clear()
    for step in range(3):
        for name, state in zip("ab", states):
            stage.decode_chunk(codes(step + 1), heard.at(f"{name}{step}"), state)
    decoder.gate.set()
    got = lists(heard.take(6))
    assert sorted(got) == [("a0", [1]), ("a1", [3]), ("a2", [6]), ("b0", [51]), ("b1", [53]), ("b2", [56])]
    for name in "ab":
        assert [key for key, _ in got if key[0] == name] == [f"{name}0", f"{name}1", f"{name}2"]
    stage.close()


def test_a_stream_does_not_wait_for_whole_utterances() -> None:
    """Two long batches are under way and more wait; a stream's chunks are heard nevertheless."""
    decoder, heard = Adder(), Heard()
    stage = CodecStage(Slow(decoder))
    decoder.gate.clear()
    for index in range(4):
        stage.decode(codes(index), heard.at("whole"))
    state = Sum()
    for step in range(3):
        stage.decode_chunk(codes(step + 1), heard.at(f"chunk {step}"), state)
    assert lists(heard.take(3)) == [("chunk 0", [1]), ("chunk 1", [3]), ("chunk 2", [6])]
    decoder.gate.set()
    assert [name for name, _ in heard.take(4)] == ["whole"] * 4
    stage.close()


@pytest.mark.parametrize(("value", "code"), [(13, ErrorCode.SYNTH_ENGINE), (99, ErrorCode.SYNTH_NAN)])
def test_a_fault_stays_with_its_utterance(value: int, code: ErrorCode) -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    decoder.gate.clear()
    for index in range(5):
        stage.decode(codes(value if index == 2 else index), heard.at(str(index)))
    decoder.gate.set()
    got = dict(heard.take(5))
    bad = got.pop("2")
    assert isinstance(bad, NightjarError)
    assert bad.code is code
    assert all(isinstance(samples, np.ndarray) for samples in got.values())
    stage.close()


def test_close_decodes_what_is_queued_and_refuses_the_rest() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    for index in range(4):
        stage.decode(codes(index), heard.at(str(index)))
    stage.close()
    stage.close()
    assert len(lists(heard.take(4))) == 4
    stage.decode(codes(1), heard.at("late"))
    ((_, late),) = heard.take(1)
    assert isinstance(late, NightjarError)
    assert late.code is ErrorCode.SYNTH_ABORTED


def test_samples_are_float32_on_the_host() -> None:
    heard = Heard()
    stage = CodecStage(Adder())
    stage.decode(codes(1, 2, 3), heard.at("x"))
    ((_, samples),) = heard.take(1)
    assert isinstance(samples, np.ndarray)
    assert samples.dtype == np.float32
    stage.close()
    assert not torch.is_tensor(samples)


class Ahead(UtteranceLane):
    """A lane whose device takes its time, as a GPU does; `events` are those of its batches."""

    def __init__(self, decoder: Adder, max_batch: int, gathering: Gathering | None = None) -> None:
        self.events: queue.SimpleQueue[OnTheWay] = queue.SimpleQueue()
        super().__init__(decoder, max_batch, None, gathering or Gathering())

    def _decode(self, group: list[Any]) -> PendingSamples:
        samples, event = super()._decode(group), OnTheWay()
        samples.event = event  # pyright: ignore[reportAttributeAccessIssue]
        self.events.put(event)
        return samples


def put(lane: UtteranceLane, done: Done, *values: int) -> None:
    lane.put(codes(*values), done)


def test_a_second_batch_is_started_while_the_device_has_the_first_and_no_third() -> None:
    decoder, heard = Adder(), Heard()
    lane = Ahead(decoder, 1, Gathering(frames=2))
    for index in range(3):
        put(lane, heard.at(str(index)), index)
    first, second = lane.events.get(timeout=60), lane.events.get(timeout=60)
    assert decoder.batches == [1, 1]
    assert lane.waiting_frames < lane.gathering.frames
    put(lane, heard.at("3"), 3)
    assert lane.waiting_frames >= lane.gathering.frames, (
        "two frames wait, which is a full batch, and both places on the device are taken"
    )
    second.done.set()
    first.done.set()
    assert lists(heard.take(2)) == [("0", [0]), ("1", [1])]
    for _ in range(2):
        lane.events.get(timeout=60).done.set()
    assert lists(heard.take(2)) == [("2", [2]), ("3", [3])]
    assert lane.waiting_frames == 0
    lane.close()


def test_what_a_device_has_at_the_end_is_handed_on() -> None:
    heard = Heard()
    lane = Ahead(Adder(), 1)
    for index in range(3):
        put(lane, heard.at(str(index)), index)
    closing = threading.Thread(target=lane.close)
    closing.start()
    for _ in range(3):
        event = lane.events.get(timeout=300)
        closing.join(0.1)
        assert closing.is_alive(), "the device has a batch"
        event.done.set()
    closing.join(300)
    assert lists(heard.take(3)) == [(str(index), [index]) for index in range(3)]


def test_beside_streams_small_batches_are_started_one_by_one() -> None:
    decoder, heard = Adder(), Heard()
    alive = threading.Event()
    alive.set()
    lane = Ahead(decoder, 64, Gathering(frames=1 << 20, beside_streams=alive.is_set))
    decoder.gate.clear()
    for index in range(7):
        put(lane, heard.at(str(index)), *[0] * (2 * QUANTUM_FRAMES // 5))
    decoder.gate.set()
    first = lane.events.get(timeout=60)
    with pytest.raises(queue.Empty):
        lane.events.get(timeout=0.3)
    alive.clear()
    first.done.set()
    ended = 1
    while sum(decoder.batches[:ended]) < 7:
        lane.events.get(timeout=60).done.set()
        ended += 1
    lane.close()
    heard.take(7)
    # The first batch may have been taken before the others came; what a batch takes at most beside streams
    # are two of two frames.
    assert decoder.batches[0] <= 2
    assert sum(decoder.batches) == 7


def test_a_few_utterances_wait_for_nobody_and_many_do() -> None:
    now = [100.0]
    heard = Heard()
    lane = UtteranceLane(Adder(), 64, None, Gathering(10_000, monotonic=lambda: now[0]))
    for index in range(QUIET_ARRIVALS):
        put(lane, heard.at(str(index)), index)
    assert len(lists(heard.take(QUIET_ARRIVALS))) == QUIET_ARRIVALS
    now[0] += 1.5
    put(lane, heard.at("in another second"), 1)
    assert len(lists(heard.take(1))) == 1
    for index in range(QUIET_ARRIVALS):
        put(lane, heard.at("too many"), index)
    with pytest.raises(queue.Empty):
        for _ in range(QUIET_ARRIVALS):
            heard.items.get(timeout=0.3)
    lane.close()


def test_a_batch_is_as_long_as_it_may_be() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder, gather_frames=4)
    decoder.gate.clear()
    for index in range(6):
        stage.decode(codes(index, 1, 1), heard.at(str(index)))
    decoder.gate.set()
    heard.take(6)
    # The first may have been taken before the others came.
    assert max(decoder.batches) == 2
    assert sum(decoder.batches) == 6
    stage.close()


def test_a_receiver_that_raises_stops_nobody_and_is_on_the_stages_thread() -> None:
    heard = Heard()
    stage = CodecStage(Adder())
    current: list[bool] = []

    def fail(_: np.ndarray | NightjarError) -> None:
        current.append(stage.is_current)
        raise RuntimeError("a bad receiver")

    stage.decode(codes(1), fail)
    stage.decode(codes(2), heard.at("next"))
    assert lists(heard.take(1)) == [("next", [2])]
    assert current == [True]
    assert not stage.is_current
    stage.close()


def test_an_error_that_shows_late_is_told_to_all_of_its_batch() -> None:
    class Late(UtteranceLane):
        def _decode(self, group: list[Any]) -> PendingSamples:
            samples = super()._decode(group)
            samples.event = Broken()  # pyright: ignore[reportAttributeAccessIssue]
            return samples

    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    heard = Heard()
    lane = Late(Adder(), 64, None, Gathering())
    put(lane, heard.at("a"), 1)
    ((_, error),) = heard.take(1)
    assert isinstance(error, NightjarError)
    assert error.code is ErrorCode.SYNTH_ENGINE
    put(lane, heard.at("b"), 2)  # its thread goes on
    assert isinstance(heard.take(1)[0][1], NightjarError)
    lane.close()
