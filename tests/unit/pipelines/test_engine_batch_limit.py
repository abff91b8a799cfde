"""How the engine gets through a lack of device memory: a smaller batch, and step by step the full one
again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import FrameCodes, FrameExecutor, FrameSettings, PendingFrames, PrefillRun
from pipelines.engine.scheduler import FIRST_PATIENCE, MAX_PATIENCE, BatchLimit, GenerationRequest
from pipelines.engine.state import PagedKV, SamplingParams, SlotState
from tests.support.attention_layers import SMALLEST
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import Recorder
from tests.support.rounds import turn_until

SLOTS = 16


@dataclass(frozen=True, slots=True)
class Words:
    """A prompt of four positions."""

    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return 4


class SmallDevice(FrameExecutor):
    """An executor without a model, on a device whose memory holds `room` requests at a time."""

    name = "small"
    reproducible = True
    lag = 0
    batch_sizes = (SLOTS,)

    def __init__(self, room: int) -> None:
        self.room = room
        self.kv = PagedKV(SMALLEST, 256, 8)
        self.state = SlotState(SLOTS, 1, 2, 8, 8, 0, torch.float32, torch.device("cpu"))
        #: Turns, and those that ran out of memory; the largest batch that went well since somebody looked.
        self.turns = 0
        self.lacks: list[int] = []
        self.most = 0

    def embed(self, prompts: Sequence[object]) -> list[Tensor]:
        return [torch.zeros(4, 1) for _ in prompts]

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        """Nothing to write."""

    def prepare(self) -> bool:
        return False

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        self.turns += 1
        if len(slots) > self.room:
            self.lacks.append(self.turns)
            raise torch.OutOfMemoryError("no room")
        self.most = max(self.most, len(slots))
        shape = count, len(slots)
        made = FrameCodes(
            np.zeros((*shape, 1), np.int64), np.zeros(shape, np.uint8), np.zeros(shape, np.float32)
        )
        return lambda: made


class Load:
    """An engine with as many requests as it takes, for ever."""

    def __init__(self, room: int, device: type[SmallDevice] = SmallDevice) -> None:
        self.device = device(room)
        self.heard = Recorder()
        self.core = ListenedCore(
            self.device, EngineOptions(slots=SLOTS, pages=256, page_size=8, max_context=64), self.heard
        )
        self.sent = 0

    def run(self, turns: int) -> None:
        for _ in range(turns):
            for _ in range(SLOTS - len(self.core.scheduler.waiting)):
                self.core.add(GenerationRequest(str(self.sent), Words(), SamplingParams(), self.sent, 6))
                self.sent += 1
            self.core.step()

    def end(self) -> None:
        turn_until(lambda: not self.core.busy, self.core.step)


def test_the_batch_is_full_again_when_the_memory_is_back() -> None:
    load = Load(room=5)
    load.run(40)
    assert load.core.scheduler.limit.now < SLOTS
    load.device.room = SLOTS
    load.device.most = 0
    load.run(30 * FIRST_PATIENCE)
    assert load.core.scheduler.limit.now == load.device.most == SLOTS
    load.end()
    assert (len(load.heard.codes), load.heard.errors) == (load.sent, {})


def test_a_device_that_stays_small_is_asked_less_and_less_often() -> None:
    load = Load(room=5)
    load.run(200 * FIRST_PATIENCE)
    # From 16 to 4 at first; after that each try is one step above what went well, and the next one comes
    # later.
    assert load.device.lacks[:2] == [1, 2]
    pauses = np.diff(load.device.lacks[1:])
    assert len(pauses) >= 4
    assert (pauses >= FIRST_PATIENCE).all()
    assert (pauses[1:] >= 1.5 * pauses[:-1]).all()
    assert load.core.scheduler.limit.now in (4, 5, 6)
    load.end()
    assert (len(load.heard.codes), load.heard.errors) == (load.sent, {})
    assert len(load.core.scheduler.kv.free) == load.core.scheduler.kv.pages


def test_a_limit_falls_to_what_went_well_and_rises_by_an_eighth() -> None:
    limit = BatchLimit(64)
    limit.reduce(64)
    assert limit.now == 32
    for wanted in (40, 48):
        for _ in range(2 * FIRST_PATIENCE - 1):
            limit.record_success(limit.now)
        assert limit.now == wanted - 8, "it rose before its time"
        limit.record_success(limit.now)
        assert limit.now == wanted
    limit.reduce(48)
    assert limit.now == 40
    limit.reduce(40)
    assert limit.now == 20
    for _ in range(40):
        limit.reduce(1)
    assert limit.now == 1


def test_small_batches_tell_nothing_and_patience_has_an_end() -> None:
    limit = BatchLimit(64)
    for _ in range(40):
        limit.reduce(limit.now)
    for _ in range(MAX_PATIENCE - 1):
        limit.record_success(1)
    assert limit.now == 1
    limit.record_success(1)
    assert limit.now == 9
    for _ in range(2 * MAX_PATIENCE):
        limit.record_success(7)
    assert limit.now == 9


@pytest.mark.parametrize("turns", [1, 8 * MAX_PATIENCE])
def test_all_slots_for_long_make_the_patience_short_again(turns: int) -> None:
    limit = BatchLimit(8)
    for _ in range(5):
        limit.reduce(8)
    turn_until(lambda: limit.now >= 8, lambda: limit.record_success(limit.now), 8 * MAX_PATIENCE)
    for _ in range(turns):
        limit.record_success(8)
    limit.reduce(8)
    before = limit.now
    for _ in range(2 * FIRST_PATIENCE):
        limit.record_success(limit.now)
    assert (limit.now > before) == (turns > 1)


def test_a_lack_of_memory_while_newcomers_are_embedded_shrinks_the_batch_and_ends_nobody() -> None:
    asked: list[int] = []

    class FullOnce(SmallDevice):
        def embed(self, prompts: Sequence[object]) -> list[Tensor]:
            asked.append(len(prompts))
            if len(asked) == 1:
                raise torch.OutOfMemoryError("no room")
            return super().embed(prompts)

    load = Load(SLOTS, FullOnce)
    load.run(20)
    assert asked[0] == SLOTS
    assert load.core.scheduler.limit.now < SLOTS
    load.end()
    assert (len(load.heard.codes), load.heard.errors) == (load.sent, {})
