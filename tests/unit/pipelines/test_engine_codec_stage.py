"""The codec stage: batches, streams first and in order, and faults that stay with their utterance."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.codec.stage import CodecStage, Done
from pipelines.errors import ErrorCode, NightjarError


@dataclass
class Sum:
    """A state that adds up all codes so far."""

    total: int = 0


class Adder:
    """A decoder whose samples are running sums; codes of 13 break it, codes of 99 come out as NaN."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def new_state(self) -> Sum:
        return Sum()

    def decode(self, codes: Sequence[Tensor], states: Sequence[Sum] | None = None) -> list[Tensor]:
        self.gate.wait()
        self.batches.append(len(codes))
        if any(bool((one == 13).any()) for one in codes):
            raise RuntimeError("unlucky")
        starts = [0] * len(codes) if states is None else [state.total for state in states]
        waves = [(start + one[:, 0].cumsum(0)).float() for start, one in zip(starts, codes)]
        return [wave.masked_fill((one[:, 0] == 99), float("nan")) for wave, one in zip(waves, codes)]

    def decode_chunk(self, states: Sequence[Sum], codes: Sequence[Tensor]) -> list[Tensor]:
        waves = self.decode(codes, states)
        for state, one in zip(states, codes):
            state.total += int(one[:, 0].sum())
        return waves


def codes(*values: int) -> np.ndarray:
    return np.array([[value] for value in values], np.int64)


class Heard:
    """What came out, in order."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[str, np.ndarray | NightjarError]] = queue.SimpleQueue()

    def at(self, name: str) -> Done:
        return lambda samples: self.items.put((name, samples))

    def take(self, count: int) -> list[tuple[str, np.ndarray | NightjarError]]:
        return [self.items.get(timeout=240) for _ in range(count)]


def lists(items: list[tuple[str, np.ndarray | NightjarError]]) -> list[tuple[str, list[float]]]:
    return [(name, samples.tolist()) for name, samples in items if isinstance(samples, np.ndarray)]


def test_what_waits_is_decoded_together() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    decoder.gate.clear()
    for index in range(6):
        stage.decode(codes(index, 1), heard.at(str(index)), Sum(100) if index == 3 else None)
    decoder.gate.set()
    got = dict(lists(heard.take(6)))
    assert got == {str(index): [100.0 * (index == 3) + index, 100.0 * (index == 3) + index + 1] for index in range(6)}
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


def test_streams_go_before_whole_utterances() -> None:
    decoder, heard = Adder(), Heard()
    stage = CodecStage(decoder)
    decoder.gate.clear()
    stage.decode(codes(1), heard.at("under way"))
    while stage._jobs:
        pass
    stage.decode(codes(2), heard.at("whole"))
    stage.decode_chunk(codes(3), heard.at("chunk"), Sum())
    decoder.gate.set()
    assert [name for name, _ in heard.take(3)] == ["under way", "chunk", "whole"]
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


class OnTheWay:
    """The event of a batch that a device works on until it is told that it is done."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class Ahead(CodecStage[Sum]):
    """A stage whose device takes its time, as a GPU does; `sent` are the events of its batches."""

    def __init__(self, decoder: Adder, max_batch: int, gather_frames: int = 4096) -> None:
        self.sent: queue.SimpleQueue[OnTheWay] = queue.SimpleQueue()
        super().__init__(decoder, max_batch, gather_frames=gather_frames)

    def _sent(self, batch: list, waves: list[Tensor]):  # type: ignore[no-untyped-def]
        started = super()._sent(batch, waves)
        started.there = OnTheWay()  # type: ignore[assignment]
        self.sent.put(started.there)  # type: ignore[arg-type]
        return started


def test_a_second_batch_is_started_while_the_device_has_the_first_and_no_third() -> None:
    decoder, heard = Adder(), Heard()
    stage = Ahead(decoder, max_batch=1, gather_frames=2)
    for index in range(3):
        stage.decode(codes(index), heard.at(str(index)))
    first, second = stage.sent.get(timeout=60), stage.sent.get(timeout=60)
    assert decoder.batches == [1, 1]
    assert not stage.behind
    stage.decode(codes(3), heard.at("3"))
    assert stage.behind, "two frames wait, which is a full batch, and both places on the device are taken"
    second.done.set()
    first.done.set()
    assert lists(heard.take(2)) == [("0", [0]), ("1", [1])]
    for _ in range(2):
        stage.sent.get(timeout=60).done.set()
    assert lists(heard.take(2)) == [("2", [2]), ("3", [3])]
    assert not stage.behind
    stage.close()


def test_what_a_device_has_at_the_end_is_handed_on() -> None:
    heard = Heard()
    stage = Ahead(Adder(), max_batch=1)
    for index in range(3):
        stage.decode(codes(index), heard.at(str(index)))
    closing = threading.Thread(target=stage.close)
    closing.start()
    for _ in range(3):
        sent = stage.sent.get(timeout=300)
        closing.join(0.1)
        assert closing.is_alive(), "the device has a batch"
        sent.done.set()
    closing.join(300)
    assert lists(heard.take(3)) == [(str(index), [index]) for index in range(3)]


def test_a_fault_of_a_stream_comes_after_the_audio_before_it() -> None:
    heard, state = Heard(), Sum()
    stage = Ahead(Adder(), max_batch=2)
    stage.decode_chunk(codes(4), heard.at("first"), state)
    sent = stage.sent.get(timeout=300)
    stage.decode_chunk(codes(13), heard.at("broken"), state)
    stage.decode(codes(5), heard.at("other"))
    sent.done.set()
    stage.sent.get(timeout=300).done.set()
    (first, samples), (broken, error), (other, more) = heard.take(3)
    assert (first, broken, other) == ("first", "broken", "other")
    assert isinstance(samples, np.ndarray)
    assert isinstance(error, NightjarError)
    assert isinstance(more, np.ndarray)
    stage.close()


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
    class Late(CodecStage[Sum]):
        def _sent(self, batch: list, waves: list[Tensor]):  # type: ignore[no-untyped-def]
            started = super()._sent(batch, waves)
            started.there = Broken()  # type: ignore[assignment]
            return started

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("the device is lost")

        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    heard = Heard()
    stage = Late(Adder())
    stage.decode(codes(1), heard.at("a"))
    ((_, error),) = heard.take(1)
    assert isinstance(error, NightjarError)
    assert error.code is ErrorCode.SYNTH_ENGINE
    stage.decode(codes(2), heard.at("b"))  # its thread goes on
    assert isinstance(heard.take(1)[0][1], NightjarError)
    stage.close()
