"""Prefixes that requests share: computed once, read by many, never written again, and no page lost or
given to two."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.scheduler import PrefixCache, Scheduler, Utterance
from pipelines.engine.state import PagedKV
from pipelines.errors import ErrorCode
from tests.support.attention_layers import SMALLEST
from tests.support.prefix_rig import PAGE, Device, Run, request
from tests.support.rounds import turn_until
from tests.unit.pipelines.test_engine_thread import Waiter

#: What happens, as often as it stands here.
DOINGS = [*["add"] * 10, *["step"] * 14, *["abort"] * 2, "nan", "lack", "fault"]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=True), st.sampled_from([(0, 1), (1, 1), (1, 3)]))
def test_no_page_is_lost_or_has_two_owners_whatever_happens(
    rng: random.Random, sizes: tuple[int, int]
) -> None:
    run = Run(4, 10, *sizes, prefill_tokens=6)
    for _ in range(60):
        match rng.choice(DOINGS):
            case "add":
                within = rng.choice(((), (5,), (8,), (5, 8, 11)))
                shared = rng.choice((0, 5, 8, 13)) if not within else 13
                own, frames = rng.randint(shared == 0, 6), rng.randrange(12)
                run.add(
                    request(len(run.asked), rng.randrange(2), shared, own, frames, rng.random() < 0.2, within)
                )
            case "abort":
                run.core.abort(f"r{rng.randrange(len(run.asked) + 1)}")
            # Frames that nobody has read yet can be of pages that were given back since.
            case "nan" if not run.device.lag:
                run.device.nan_at = rng.randrange(20)
            case "lack":
                run.device.fault = torch.OutOfMemoryError("no room")
            case "fault" if rng.random() < 0.3:
                run.device.fault = RuntimeError("a kernel failed")
            case _:
                run.step()
        run.check()
    run.end()


@pytest.mark.parametrize(
    ("shared", "own", "cuts"), [(8, 9, [6, 2, 6, 2]), (11, 1, [6, 2, 3]), (8, 0, [4, 3]), (3, 9, [6, 5])]
)
def test_chunks_are_cut_at_the_end_of_the_prefix_whoever_computes_it(
    shared: int, own: int, cuts: list[int]
) -> None:
    run = Run(slots=1)
    pair = request(0, 1, shared, own), request(1, 1, shared, own)
    run.add(*pair)
    run.end()
    whole = min(shared, shared + own - 1) // PAGE * PAGE
    starts = np.cumsum([0, *cuts[:-1]]).tolist()
    first = [(0, start, count) for start, count in zip(starts, cuts)]
    assert run.device.chunks == [*first, *[chunk for chunk in first if chunk[1] >= whole]]


def test_who_comes_at_the_same_time_computes_its_own_and_who_has_not_begun_shares() -> None:
    run = Run(slots=4, pages=40, prefill_tokens=12)
    run.add(*(request(number, 1, 8, 3) for number in range(4)))
    run.step()
    assert [one.prefilled for one in run.core.scheduler.running] == [10, 6, 0, 0]
    assert run.core.scheduler.running[0].shared is not None
    run.step()
    first, second, third, fourth = run.core.scheduler.running
    assert (first.shared, second.shared) == (third.shared, None) == (fourth.shared, None)
    assert set(second.pages).isdisjoint(first.pages)
    assert all(one.prefilled == one.last for one in (first, second, third, fourth))
    assert sum(count for _, _, count in run.device.chunks) == 2 * 10 + 2 * 2
    run.end()


def test_prefixes_go_before_anybody_makes_way_and_the_one_read_longest_ago_first() -> None:
    run = Run(slots=2, pages=10)
    for number, voice in enumerate((1, 2, 3, 1)):
        run.add(request(number, voice, 8, 1))
        run.end()
    assert run.known == {bytes([voice, 8]) for voice in (1, 2, 3)}
    assert len(run.core.scheduler.kv.free) == 4
    run.add(request(4, 0, 0, 20, frames=9))
    (utterance,) = run.core.scheduler.waiting
    run.end()
    assert run.known == {bytes([1, 8])}, (
        "7 pages for the newcomer: 4 that were free, and those of voices 2 and 3"
    )
    assert utterance.run == 1, "it had to start again"


def test_admission_counts_the_pages_of_prefixes_that_nobody_reads() -> None:
    run = Run(slots=3, pages=10)
    run.add(request(0, 1, 13, 1, frames=1), request(1, 2, 13, 1, frames=1))
    run.end()
    assert (len(run.core.scheduler.kv.free), run.core.scheduler.prefixes.free) == (4, 10)
    run.add(request(2, 0, 0, 6, frames=9), request(3, 1, 13, 3, frames=9), request(4, 0, 0, 5, frames=9))
    run.step()
    assert [one.request.request_id for one in run.core.scheduler.running] == ["r2", "r3", "r4"]
    assert run.known == {bytes([1, 13])}
    run.end()


def test_admission_does_not_count_the_pages_of_a_known_prefix_again() -> None:
    run = Run(slots=2, pages=9)
    run.add(request(0, 1, 16, 2, frames=9))
    turn_until(lambda: run.known, run.step)
    assert run.core.scheduler.prefixes.free == 4, "as many as the shared positions alone have"
    run.add(request(1, 1, 16, 2, frames=2))
    run.step()
    assert [one.request.request_id for one in run.core.scheduler.running] == ["r0", "r1"]
    run.end()


def test_a_prefix_with_nan_is_given_to_nobody_and_its_pages_are_zeroed_after_its_last_reader() -> None:
    run = Run(slots=3, pages=30)
    pair = request(0, 1, 8, 3, frames=9), request(1, 1, 8, 3, frames=9)
    run.add(pair[0])
    run.step(2)
    run.add(pair[1])
    run.step(2)
    invalid = run.core.scheduler.running[1].shared
    # In the older one's own part: the other one says nothing of it.
    run.device.nan_at = 9
    run.step()
    assert run.heard.errors[pair[0]].code is ErrorCode.SYNTH_NAN
    assert invalid is not None
    assert (invalid.users, run.known) == (1, set())
    run.add(later := request(2, 1, 8, 3, frames=9))
    run.step()
    assert [one.shared is invalid for one in run.core.scheduler.running] == [True, False]
    # In the prefix itself.
    run.device.nan_at = 2
    run.step()
    assert run.heard.errors[pair[1]].code is ErrorCode.SYNTH_NAN
    run.end()
    assert list(run.heard.codes) == [later]
    assert run.core.scheduler.prefixes.take(30) is not None
    assert np.isfinite(run.device.keys).all()


def test_what_was_computed_before_a_fault_is_not_kept() -> None:
    run = Run()
    run.add(request(0, 1, 8, 3), request(1, 2, 8, 3))
    run.step(2)
    assert run.known
    run.device.fault = RuntimeError("a kernel failed")
    run.step()
    assert (run.known, len(run.core.scheduler.kv.free)) == (set(), run.device.kv.pages)
    run.end()


def test_a_prefix_whose_prefill_ran_out_of_memory_is_not_kept() -> None:
    run = Run(prefill_tokens=64)
    run.device.fault = torch.OutOfMemoryError("no room")
    run.add(request(0, 1, 5, 3), request(1, 2, 5, 3))
    run.step()
    assert run.known == set()
    run.end()
    assert len(run.heard.codes) == 2


def test_kv_in_use_is_what_requests_use() -> None:
    device = Device(2, 20, 0)
    engine = Engine(device, EngineOptions(2, 20, PAGE, 64))
    device.running = engine.core.scheduler.running
    waiter = Waiter()
    engine.submit(request(0, 1, 8, 3), waiter)
    waiter.wait()
    assert len(device.kv.free) == 20 - 2
    assert engine.stats().kv_use == 0
    engine.close()


def test_a_prefix_is_known_by_its_content_and_its_pages() -> None:
    kv = PagedKV(SMALLEST, 8, PAGE)
    cache = PrefixCache(kv)
    pages = [kv.free.pop() for _ in range(3)]
    kept = cache.keep(None, b"voice", pages[:2])
    assert kept is not None
    assert cache.keep(None, b"voice", pages[1:]) is None, "it is known already"
    assert cache.use([(b"voice", 1)]) is None
    assert cache.use([(b"other", 2)]) is None
    assert cache.use([(b"voice", 2)]) is kept
    assert kept.users == 2


def test_a_longer_prefix_goes_on_from_the_very_shorter_one_and_both_are_read() -> None:
    kv = PagedKV(SMALLEST, 8, PAGE)
    cache = PrefixCache(kv)
    pages = [kv.free.pop() for _ in range(5)]
    voice = cache.keep(None, b"voice", pages[:2])
    turn = cache.keep(voice, b"turn", pages[2:3])
    assert voice is not None
    assert turn is not None
    assert cache.use([(b"turn", 1)]) is None
    assert cache.use([(b"turn", 3)]) is None
    assert cache.use([(b"voice", 2), (b"turn", 4)]) is voice
    assert cache.use([(b"voice", 2), (b"turn", 3), (b"later", 4)]) is turn
    assert turn.all_pages == pages[:3]
    assert (voice.users, turn.users) == (3, 2)


def test_a_later_turn_reads_what_every_turn_before_it_computed_and_the_longest_goes_first() -> None:
    run = Run(slots=1, pages=10)
    run.add(request(0, 1, 16, 1, within=(4, 9)), request(1, 1, 24, 1, within=(4, 9, 16)))
    run.end()
    assert [chunk[1:] for chunk in run.device.chunks] == [(0, 4), (4, 4), (8, 6), (14, 2), (16, 6), (22, 2)]
    assert run.known == {bytes([1, length]) for length in (4, 9, 16, 24)}
    assert run.core.scheduler.prefixes.take(6) is not None
    assert run.known == {bytes([1, length]) for length in (4, 9, 16)}
    assert run.core.scheduler.prefixes.take(1) is not None
    assert run.known == {bytes([1, length]) for length in (4, 9)}


def test_what_goes_on_from_a_prefix_with_nan_is_given_to_nobody_and_nothing_is_kept_behind_it() -> None:
    run = Run(slots=4, pages=40, prefill_tokens=6)
    turns = [
        request(0, 1, 8, 3, frames=9),
        request(1, 1, 12, 3, frames=1, within=(8,)),
        request(2, 1, 28, 3, frames=9, within=(8,)),
    ]
    for one in turns[:2]:
        run.add(one)
        run.step(4)
    assert run.known == {bytes([1, 8]), bytes([1, 12])}
    run.add(turns[2])
    run.step()
    run.device.nan_at = 9
    run.step()
    assert run.heard.errors[turns[0]].code is ErrorCode.SYNTH_NAN
    run.step(5)
    assert turns[2] in {one.request for one in run.core.scheduler.running}
    assert run.known == set(), "neither what the one before it has kept, nor what was prefilled behind it"
    run.end()
    assert run.core.scheduler.prefixes.take(40) is not None
    assert np.isfinite(run.device.keys).all()


def test_nothing_is_shared_by_those_who_declare_nothing() -> None:
    options = EngineOptions(prefill_chunk=6, prefill_tokens=64, reserve_frames=0)
    scheduler = Scheduler(PagedKV(SMALLEST, 8, PAGE), 2, options)
    scheduler.waiting.extend(Utterance(request(number, 1, 0, 9), Waiter()) for number in range(2))
    for utterance in scheduler.admit():
        utterance.prefilled = 8
        scheduler.keep_prefix(utterance)
    assert not scheduler.prefixes.known
