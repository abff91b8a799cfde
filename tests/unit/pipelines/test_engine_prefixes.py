"""Prefixes that requests share: computed once, read by many, never written again, and no page lost or given to two."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import ENDED, NOT_FINITE
from pipelines.engine.core import EngineCore, EngineOptions, engine_failure
from pipelines.engine.engine import Engine
from pipelines.engine.executor import FrameCodes, FrameSettings, PrefillRun
from pipelines.engine.prefixes import PrefixCache, PromptPrefix
from pipelines.engine.scheduler import GenerationRequest, Scheduler, Utterance
from pipelines.engine.state import PagedKV, SamplingParams, SlotState
from pipelines.errors import ErrorCode
from tests.support.qwen3_golden import Recorder
from tests.unit.pipelines.test_engine_thread import Waiter

PAGE = 4
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt whose embeddings are numbers: those of a voice, then its own."""

    numbers: tuple[int, ...]
    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.numbers)


def request(
    number: int, voice: int, shared: int, own: int, frames: int = 3, stream: bool = False, within: Sequence[int] = ()
) -> GenerationRequest:
    """One that ends after so many frames, and whose prompt begins with the `shared` positions of a voice, and shorter ones `within` it."""
    numbers = [100 * voice + at for at in range(shared)] + [10_000 + 100 * number + at for at in range(own)]
    prefixes = [PromptPrefix(bytes([voice, length]), length) for length in (*within, shared) if length]
    return GenerationRequest(f"r{number}", Prompt(tuple(numbers)), SamplingParams(), frames, 10, stream, prefixes=prefixes)


def numbers_of(utterance: Utterance) -> tuple[int, ...]:
    assert isinstance(utterance.request.prompt, Prompt)
    return utterance.request.prompt.numbers


@dataclass(frozen=True)
class Frames:
    codes: FrameCodes

    def result(self) -> FrameCodes:
        return self.codes


class Device:
    """An executor without a model. The keys are the numbers of prompts, and of frames their positions below zero: a page tells what it has.

    A request whose context holds NaN gets NaN.
    """

    name, kernels, reproducible, stream = "numbers", "plain", True, None

    def __init__(self, slots: int, pages: int, lag: int) -> None:
        self.batch_sizes, self.lag = (slots,), lag
        self.kv = PagedKV(1, pages, 1, PAGE, 1, torch.float32, CPU)
        self.keys = self.kv.k[0, :, 0, :, 0].numpy()
        self.state = SlotState(slots, 1, 2, 16, 4, 0, torch.float32, CPU)
        self.running: list[Utterance] = []
        #: Raised by the next prefill or frame, after its first chunk.
        self.fault: Exception | None = None
        #: The next frame writes NaN at this position of its first row.
        self.nan_at: int | None = None
        #: Chunks that were prefilled: (slot, start, positions).
        self.chunks: list[tuple[int, int, int]] = []

    def embed(self, prompt: Any) -> Tensor:
        return torch.tensor(prompt.numbers, dtype=torch.float32)[:, None]

    def take_text(self, ids: object) -> None:
        """Text costs nothing."""

    def prepare(self) -> bool:
        return False

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        for run in runs:
            self.chunks.append((run.slot, run.start, len(run.embeddings)))
            self._write(self._owner(run.slot), run.start, run.embeddings[:, 0].numpy())
            self._break()

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> Frames:
        self._break()
        flags = np.zeros((count, len(slots)), np.uint8)
        for row, slot in enumerate(slots):
            utterance, at = self._owner(slot), int(self.state.positions[slot])
            self._write(utterance, at, -1.0 - np.arange(at, at + count))
            if self.nan_at is not None:
                where, self.nan_at = self.nan_at % (at + 1), None
                self.keys[utterance.pages[where // PAGE], where % PAGE] = np.nan
            flags[max(utterance.request.seed - utterance.started, 0) :, row] = ENDED
            if np.isnan(self.context(utterance)[: at + 1]).any():
                flags[:, row] = NOT_FINITE
            self.state.positions[slot] += count
        return Frames(FrameCodes(np.zeros((count, len(slots), 1), np.int64), flags))

    def context(self, utterance: Utterance) -> np.ndarray:
        """The keys of an utterance in the order of positions."""
        return self.keys[utterance.pages].ravel()

    def _owner(self, slot: int) -> Utterance:
        (found,) = (one for one in self.running if one.slot == slot)
        assert self.state.page_table[slot, : len(found.pages)].tolist() == found.pages
        return found

    def _write(self, utterance: Utterance, start: int, numbers: np.ndarray) -> None:
        for at, number in enumerate(numbers, start):
            page = utterance.pages[at // PAGE]
            assert page in utterance.own_pages, "a page that others can read was written"
            self.keys[page, at % PAGE] = number

    def _break(self) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


class Run:
    """An engine on such a device, and what was asked of it."""

    def __init__(self, slots: int = 3, pages: int = 14, lag: int = 0, frames_per_turn: int = 1, prefill_tokens: int = 12) -> None:
        self.device, self.heard = Device(slots, pages, lag), Recorder()
        options = EngineOptions(
            slots, pages, PAGE, 64, prefill_chunk=6, prefill_tokens=prefill_tokens, reserve_frames=2, frames_per_turn=frames_per_turn
        )
        self.core = EngineCore(self.device, options, self.heard)
        self.device.running = self.core.scheduler.running
        self.asked: list[GenerationRequest] = []

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.core.add(one)
            self.asked.append(one)

    def step(self, turns: int = 1) -> None:
        for _ in range(turns):
            try:
                self.core.step()
            except RuntimeError as error:
                self.core.fail_all(engine_failure(error))
            self.check()

    def end(self) -> None:
        for _ in range(1000):
            if not self.core.busy:
                break
            self.step()
        assert not self.core.busy, "the engine never came to rest"
        assert Counter(self.asked) == Counter([*self.heard.codes, *self.heard.errors])
        for one, codes in self.heard.codes.items():
            assert len(codes) == min(one.seed, one.max_tokens - 1)
        assert self.core.scheduler.prefixes.free == self.device.kv.pages

    def check(self) -> None:
        """Each page has one owner, or is of a prefix with its users; each utterance reads what is its own, from first to last."""
        running, cache, kv = self.core.scheduler.running, self.core.scheduler.prefixes, self.device.kv
        users = Counter(prefix for one in running if one.shared is not None for prefix in one.shared.chain)
        assert {prefix: prefix.users for prefix in users} == users
        assert not any(prefix.users or prefix.doubtful for prefix in cache._unused)
        in_use = [page for prefix in users for page in prefix.pages] + [page for one in running for page in one.own_pages]
        assert all(one.pages[: one.shared_pages] == one.shared.all_pages for one in running if one.shared is not None)
        unused = [page for prefix in cache._unused for page in prefix.pages]
        assert sorted([*kv._free, *cache._unclean, *unused, *in_use]) == list(range(1, kv.pages + 1))
        assert cache.free == kv.pages - len(in_use)
        assert {prefix for prefix in users if not prefix.doubtful} | set(cache._unused) == set(cache._known.values())
        assert np.isfinite(self.device.keys[kv._free]).all(), "NaN was left in free pages"
        for one in running:
            last, found = len(one.request.prompt) - 1, self.device.context(one)
            wanted = [*numbers_of(one)[: one.prefilled], *[-1 - at for at in range(last, last + one.started)]]
            found = np.concatenate((found[: one.prefilled], found[last : last + one.started]))
            assert np.array_equal(found[np.isfinite(found)], np.array(wanted)[np.isfinite(found)])

    @property
    def known(self) -> set[bytes]:
        return {prefix.content for prefix in self.core.scheduler.prefixes._known.values()}


#: What happens, as often as it stands here.
DOINGS = [*["add"] * 10, *["step"] * 14, *["abort"] * 2, "nan", "lack", "fault"]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=True), st.sampled_from([(0, 1), (1, 1), (1, 3)]))
def test_no_page_is_lost_or_has_two_owners_whatever_happens(rng: random.Random, sizes: tuple[int, int]) -> None:
    run = Run(4, 10, *sizes, prefill_tokens=6)
    for _ in range(60):
        match rng.choice(DOINGS):
            case "add":
                within = rng.choice(((), (5,), (8,), (5, 8, 11)))
                shared = rng.choice((0, 5, 8, 13)) if not within else 13
                own, frames = rng.randint(shared == 0, 6), rng.randrange(12)
                run.add(request(len(run.asked), rng.randrange(2), shared, own, frames, rng.random() < 0.2, within))
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


@pytest.mark.parametrize(("shared", "own", "cuts"), [(8, 9, [6, 2, 6, 2]), (11, 1, [6, 2, 3]), (8, 0, [4, 3]), (3, 9, [6, 5])])
def test_chunks_are_cut_at_the_end_of_the_prefix_whoever_computes_it(shared: int, own: int, cuts: list[int]) -> None:
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
    assert [one.to_prefill for one in (first, second, third, fourth)] == [0, 0, 0, 0]
    assert sum(count for _, _, count in run.device.chunks) == 2 * 10 + 2 * 2
    run.end()


def test_prefixes_go_before_anybody_makes_way_and_the_one_read_longest_ago_first() -> None:
    run = Run(slots=2, pages=10)
    for number, voice in enumerate((1, 2, 3, 1)):
        run.add(request(number, voice, 8, 1))
        run.end()
    assert run.known == {bytes([voice, 8]) for voice in (1, 2, 3)}
    assert run.core.scheduler.kv.free == 4
    run.add(request(4, 0, 0, 20, frames=9))
    (utterance,) = run.core.scheduler.waiting
    run.end()
    assert run.known == {bytes([1, 8])}, "7 pages for the newcomer: 4 that were free, and those of voices 2 and 3"
    assert utterance.run == 1, "it had to start again"


def test_admission_counts_the_pages_of_prefixes_that_nobody_reads() -> None:
    run = Run(slots=3, pages=10)
    run.add(request(0, 1, 13, 1, frames=1), request(1, 2, 13, 1, frames=1))
    run.end()
    assert (run.core.scheduler.kv.free, run.core.scheduler.prefixes.free) == (4, 10)
    run.add(request(2, 0, 0, 6, frames=9), request(3, 1, 13, 3, frames=9), request(4, 0, 0, 5, frames=9))
    run.step()
    assert [one.request.request_id for one in run.core.scheduler.running] == ["r2", "r3", "r4"]
    assert run.known == {bytes([1, 13])}
    run.end()


def test_admission_does_not_count_the_pages_of_a_known_prefix_again() -> None:
    run = Run(slots=2, pages=9)
    run.add(request(0, 1, 16, 2, frames=9))
    while not run.known:
        run.step()
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
    doubtful = run.core.scheduler.running[1].shared
    # In the older one's own part: the other one says nothing of it.
    run.device.nan_at = 9
    run.step()
    assert run.heard.errors[pair[0]].code is ErrorCode.SYNTH_NAN
    assert doubtful is not None
    assert (doubtful.users, run.known) == (1, set())
    run.add(later := request(2, 1, 8, 3, frames=9))
    run.step()
    assert [one.shared is doubtful for one in run.core.scheduler.running] == [True, False]
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
    assert (run.known, run.core.scheduler.kv.free) == (set(), run.device.kv.pages)
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
    assert device.kv.free == 20 - 2
    assert engine.stats().kv_use == 0
    engine.close()


def test_a_prefix_is_known_by_its_content_and_its_pages() -> None:
    kv = PagedKV(1, 8, 1, PAGE, 1, torch.float32, CPU)
    cache = PrefixCache(kv)
    pages = kv.take(3) or []
    kept = cache.keep(None, b"voice", pages[:2])
    assert kept is not None
    assert cache.keep(None, b"voice", pages[1:]) is None, "it is known already"
    assert cache.use([(b"voice", 1)]) is None
    assert cache.use([(b"other", 2)]) is None
    assert cache.use([(b"voice", 2)]) is kept
    assert kept.users == 2


def test_a_longer_prefix_goes_on_from_the_very_shorter_one_and_both_are_read() -> None:
    kv = PagedKV(1, 8, 1, PAGE, 1, torch.float32, CPU)
    cache = PrefixCache(kv)
    pages = kv.take(5) or []
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
    turns = [request(0, 1, 8, 3, frames=9), request(1, 1, 12, 3, frames=1, within=(8,)), request(2, 1, 28, 3, frames=9, within=(8,))]
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
    scheduler = Scheduler(PagedKV(1, 8, 1, PAGE, 1, torch.float32, CPU), 2, 6, 64, 0)
    scheduler.waiting.extend(Utterance(request(number, 1, 0, 9)) for number in range(2))
    for utterance in scheduler.admit():
        utterance.prefilled = 8
        scheduler.keep_prefix(utterance)
    assert len(scheduler.prefixes) == 0
