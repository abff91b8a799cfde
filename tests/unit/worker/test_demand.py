"""How many shards a worker can use: open items against the slots of its engine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.support.fakes import FakeClock
from worker.admission import MAX_SHARDS, MAX_UNCLAIMED, MAX_WRITING_ITEMS, SHARDS_AT_START, Demand, ItemCounts


@dataclass(eq=False)
class Shard:
    open_items: int
    answered_items: int = 0
    writing_items: int = 0

    def counts(self) -> ItemCounts:
        return ItemCounts(self.open_items, self.answered_items, self.writing_items)

    def answer(self, items: int) -> None:
        self.open_items -= items
        self.answered_items += items


class Worker:
    """A worker with an engine of `slots`, without its processes."""

    def __init__(self, slots: int = 64, fixed: int | None = None) -> None:
        self.slots, self.suspended, self.clock = slots, False, FakeClock()
        self.demand = Demand(fixed, lambda: self.slots, lambda: self.suspended, self.clock)
        self._count = 0

    @contextmanager
    def shard(self, items: int) -> Generator[Shard, None, None]:
        """One that was taken, claimed and begun."""
        self._count += 1
        shard = Shard(items)
        self.demand.taken()
        with self.demand.hold(shard.counts):
            yield shard
        self.demand.ended()

    def fill(self, stack: ExitStack, items: int) -> int:
        """Takes shards of so many items for as long as it can use them; how many."""
        before = self._count
        while self.demand.wants_message:
            assert self._count - before < MAX_SHARDS, "it takes more than a worker may have"
            stack.enter_context(self.shard(items))
        return self._count - before


@pytest.mark.parametrize(
    ("items", "shards"), [(3, 43), (64, 2), (67, 2), (127, 2), (128, 1), (5000, 1), (1, MAX_SHARDS)]
)
def test_shards_are_taken_until_their_open_items_cover_slots_and_reserve(items: int, shards: int) -> None:
    worker = Worker(slots=64)
    with ExitStack() as stack:
        assert worker.fill(stack, items) == shards
        assert worker.demand.shards == shards
    assert worker.demand.wants_message


def test_the_next_shard_is_taken_while_the_tail_of_the_last_one_runs() -> None:
    worker = Worker(slots=64)
    with worker.shard(5000) as shard:
        shard.open_items = 128
        assert not worker.demand.wants_message
        assert worker.demand.shards == 1
        shard.open_items = 127
        assert worker.demand.wants_message
        assert worker.demand.shards == 2


def test_a_fast_engine_has_a_longer_reserve() -> None:
    worker = Worker(slots=4)
    with worker.shard(5000) as shard:
        assert not worker.demand.wants_message
        worker.clock.advance(1)
        shard.answer(300)
        assert not worker.demand.wants_message
        shard.open_items = 4 + 2 * 300
        assert not worker.demand.wants_message
        shard.open_items -= 1
        assert worker.demand.wants_message
        for _ in range(40):
            worker.clock.advance(1)
            assert worker.demand.shards
        shard.open_items = 8
        assert not worker.demand.wants_message, "an engine that has become slow needs no more than its slots"


def test_items_that_are_given_back_do_not_count_as_speed() -> None:
    worker = Worker(slots=4)
    with worker.shard(5000):
        worker.clock.advance(1)
        assert not worker.demand.wants_message
    worker.clock.advance(1)
    with worker.shard(8):
        assert not worker.demand.wants_message


def test_before_an_engine_is_open_two_shards_are_taken() -> None:
    worker = Worker(slots=0)
    with ExitStack() as stack:
        assert worker.demand.shards == SHARDS_AT_START
        assert worker.fill(stack, 3) == SHARDS_AT_START
        worker.slots = 64
        # What was learned of the first two: it can use forty-one more.
        assert worker.demand.shards == 43
        assert worker.fill(stack, 3) == 41


def test_a_first_message_is_enough_until_its_shard_is_claimed() -> None:
    worker = Worker(slots=64)
    worker.demand.taken()
    assert not worker.demand.wants_message


def test_messages_that_are_not_claimed_yet_count_as_shards_of_the_usual_size() -> None:
    worker = Worker(slots=64)
    with worker.shard(50):
        worker.demand.taken()
        assert worker.demand.wants_message
        worker.demand.taken()
        assert not worker.demand.wants_message
        worker.demand.ended()
        worker.demand.ended()
        assert worker.demand.wants_message
    worker = Worker(slots=512)
    with worker.shard(1):
        for _ in range(MAX_UNCLAIMED):
            assert worker.demand.wants_message
            worker.demand.taken()
        assert not worker.demand.wants_message, "their shards may be large"


def test_meters_that_are_slower_than_the_engine_stop_the_taking() -> None:
    worker = Worker(slots=64)
    with worker.shard(5000) as shard:
        shard.open_items, shard.writing_items = 0, MAX_WRITING_ITEMS
        assert not worker.demand.wants_message
        assert worker.demand.shards == 1
        shard.writing_items -= 1
        assert worker.demand.wants_message


def test_nothing_is_taken_while_a_shard_is_to_run_alone() -> None:
    worker = Worker()
    worker.suspended = True
    assert not worker.demand.wants_message
    worker.suspended = False
    assert worker.demand.wants_message


def test_a_number_of_the_users_is_the_number() -> None:
    worker = Worker(slots=64, fixed=3)
    with worker.shard(5000):
        assert worker.demand.wants_message
        assert worker.demand.shards == 3
