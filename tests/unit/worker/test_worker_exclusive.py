"""Shards side by side and shards alone."""

from __future__ import annotations

import random
import threading
import time

from worker.admission import ExclusiveLock


def test_a_shard_alone_has_no_neighbour() -> None:
    exclusive, rules = ExclusiveLock(), random.Random(5)
    kinds = [rules.random() < 0.3 for _ in range(60)]
    inside: list[bool] = []
    seen: list[tuple[bool, int]] = []
    lock = threading.Lock()

    def run(alone: bool) -> None:
        with exclusive.hold(alone, lambda: False) as placed:
            assert placed
            with lock:
                inside.append(alone)
                seen.append((any(inside), len(inside)))
            time.sleep(0.001)
            with lock:
                inside.remove(alone)

    threads = [threading.Thread(target=run, args=(alone,)) for alone in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(seen) == len(kinds)
    assert all(count == 1 for with_one_alone, count in seen if with_one_alone)
    with exclusive.hold(False, lambda: True) as first, exclusive.hold(False, lambda: True) as second:
        assert (first, second) == (True, True)


def test_who_waits_to_be_alone_goes_before_later_ones() -> None:
    exclusive = ExclusiveLock()
    order: list[str] = []
    first_may_end = threading.Event()
    told = {name: threading.Event() for name in ("first", "alone", "later")}

    def waits(name: str) -> bool:
        """Asked of those who wait, whether they give up."""
        told[name].set()
        return False

    def first() -> None:
        with exclusive.hold(False, lambda: False):
            told["first"].set()
            first_may_end.wait(240)

    def later(name: str, alone: bool) -> None:
        with exclusive.hold(alone, lambda: waits(name)):
            order.append(name)

    threads = [
        threading.Thread(target=first),
        threading.Thread(target=later, args=("alone", True)),
        threading.Thread(target=later, args=("later", False)),
    ]
    for thread, name in zip(threads, told, strict=True):
        thread.start()
        assert told[name].wait(240)
    assert order == []
    first_may_end.set()
    for thread in threads:
        thread.join(240)
    assert order == ["alone", "later"]


def test_a_worker_that_drains_gives_up_its_place_in_the_queue() -> None:
    exclusive = ExclusiveLock()
    with exclusive.hold(True, lambda: False) as placed:
        assert placed
        with exclusive.hold(False, lambda: True) as second:
            assert not second
        with exclusive.hold(True, lambda: True) as third:
            assert not third
    with exclusive.hold(False, lambda: True) as free:
        assert free
