"""The order in which a worker's shards are fed to its engine."""

from __future__ import annotations

import threading

from tests.support.worker_rig import wait_for
from worker.feeding import FOLDER_SHARDS, FeedingOrder, Rank


def waits(
    order: FeedingOrder, rank: Rank, name: str, told: list[str], gives_up: threading.Event | None = None
) -> threading.Thread:
    """A thread that waits for its turn by now, and tells of it."""
    asked = threading.Event()

    def give_up() -> bool:
        asked.set()
        return gives_up is not None and gives_up.is_set()

    def run() -> None:
        granted = order.take(rank, give_up)
        told.append(name if granted else f"not {name}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # Only who waits is asked whether it gives up.
    assert asked.wait(240)
    return thread


def test_two_shards_are_fed_at_a_time_the_older_ones_first() -> None:
    order, told = FeedingOrder(), list[str]()
    ranks = [order.place(0, remote=False) for _ in range(5)]
    assert all(order.take(rank, lambda: False) for rank in ranks[:FOLDER_SHARDS])
    for index in (4, 3, 2):
        waits(order, ranks[index], str(index), told)
    for index in (0, 2, 3):
        order.leave(ranks[index])
        wait_for(lambda left=index: len(told) == max(1, left))
    assert told == ["2", "3", "4"]


def test_a_shard_of_a_higher_priority_takes_the_turn_of_the_lowest() -> None:
    order, told = FeedingOrder(), list[str]()
    low, lowest = order.place(0, remote=False), order.place(-1, remote=False)
    assert order.take(low, lambda: False)
    assert order.take(lowest, lambda: False)
    waits(order, order.place(5, remote=False), "high", told)
    assert order.take(low, lambda: False), "only the lowest one has to let it go first"
    assert told == []
    gives_up = threading.Event()
    again = waits(order, lowest, "lowest", told, gives_up)
    wait_for(lambda: told == ["high"])
    gives_up.set()
    again.join(240)
    assert told == ["high", "not lowest"]
    order.leave(low)


def test_a_shard_whose_store_is_far_away_has_more_company() -> None:
    order = FeedingOrder()
    ranks = [order.place(0, remote=True) for _ in range(FOLDER_SHARDS + 3)]
    assert all(order.take(rank, lambda: False) for rank in ranks)


def test_a_turn_that_was_left_goes_to_who_waits() -> None:
    order, told = FeedingOrder(), list[str]()
    ranks = [order.place(0, remote=False) for _ in range(FOLDER_SHARDS)]
    assert all(order.take(rank, lambda: False) for rank in ranks)
    other = waits(order, order.place(0, remote=False), "other", told)
    order.leave(ranks[0])
    order.leave(ranks[0])
    other.join(240)
    assert told == ["other"]
