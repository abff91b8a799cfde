"""Which graph a batch takes while only some are captured, and when the others follow."""

from __future__ import annotations

import random

import pytest
import torch

from pipelines.engine.buckets import ASKS, BUCKETS, WIDE_BUCKETS, Buckets, bucket_of, buckets_for


def same(size: int) -> int:
    """A graph that is its size."""
    return size


def capture(buckets: Buckets[int], *sizes: int) -> None:
    for size in sizes:
        buckets.of(size, same)


@pytest.mark.parametrize(
    ("slots", "last"),
    [
        (1, [1]),
        (100, [64, 128]),
        (128, [64, 128]),
        (512, [384, 512]),
        (513, [512, 640]),
        (900, [640, 768, 896, 1024]),
        (1024, [896, 1024]),
        (1025, [1024, 1152]),
    ],
)
def test_an_engine_has_the_buckets_up_to_one_that_holds_its_slots(slots: int, last: list[int]) -> None:
    assert list(buckets_for(slots))[-len(last) :] == last
    assert bucket_of(slots, buckets_for(slots)) == last[-1]


def test_the_first_graphs_hold_every_batch() -> None:
    buckets = Buckets[int](buckets_for(300))
    assert buckets.first == [384, 1, 8]
    capture(buckets, *buckets.first)
    assert [buckets.choose(rows, same) for rows in (1, 2, 8, 9, 64, 300)] == [1, 8, 8, 384, 384, 384]
    assert Buckets([512]).first == [512]


def test_a_size_that_is_asked_for_often_is_captured_and_then_used() -> None:
    buckets = Buckets[int](buckets_for(128))
    capture(buckets, *buckets.first)
    assert [buckets.choose(20, same) for _ in range(ASKS)] == [128] * (ASKS - 1) + [32]
    assert buckets.choose(20, same) == 32
    assert buckets.choose(33, same) == 128, "each size is asked for by itself"
    assert buckets.captured == {size: size for size in (*buckets.first, 32)}


def test_an_engine_of_the_default_slots_has_no_wide_bucket() -> None:
    assert buckets_for(BUCKETS[-1]) == BUCKETS
    assert not set(WIDE_BUCKETS) & set(buckets_for(BUCKETS[-1]))
    assert buckets_for(WIDE_BUCKETS[-1]) == (*BUCKETS, *WIDE_BUCKETS)


def test_idle_turns_capture_what_is_left_one_by_one() -> None:
    buckets = Buckets[int](buckets_for(64))
    capture(buckets, *buckets.first)
    while buckets.prepare(same):
        pass
    assert list(buckets.captured) == [64, 1, 8, 2, 4, 16, 32]


def test_a_size_without_memory_is_served_by_larger_ones_and_never_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buckets, tried = Buckets[int](buckets_for(64)), list[int]()
    capture(buckets, *buckets.first)

    def full(size: int) -> int:
        tried.append(size)
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert {buckets.choose(12, full) for _ in range(3 * ASKS)} == {64}
    assert tried == [16]
    assert buckets.prepare(full)
    assert tried == [16, 2]
    assert buckets.possible == (1, 4, 8, 32, 64)
    assert caplog.messages[0] == "there is no memory for a graph of 16 rows; others are used instead"
    alone = Buckets[int]([4])
    assert alone.choose(1, full) is None
    assert alone.possible == (4,)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_was_captured_a_batch_fits_its_size(seed: int) -> None:
    rng = random.Random(seed)
    buckets = Buckets[int](buckets_for((BUCKETS[-1], 1024)[seed % 2]))
    capture(buckets, *buckets.first)

    def sometimes(size: int) -> int:
        if rng.random() < 0.3:
            raise torch.OutOfMemoryError
        return size

    for _ in range(500):
        rows = rng.randint(1, buckets.sizes[-1])
        size = buckets.choose(rows, sometimes)
        assert size is not None
        assert size >= rows
        assert size in buckets.captured
