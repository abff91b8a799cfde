"""Guidance pairs on the real scheduler without a model: both halves draw in the same steps, whatever there
is too little of."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.support.rounds import turn_until
from tests.support.vllm_kit import require_vllm

require_vllm()

from pipelines.vllm_engine.library import (  # noqa: E402
    PRIVATE,
    Half,
    half_of,
    match,
)
from tests.support.scheduler_rig import BLOCK, NEVER, Run, hashed, newcomer, scheduler  # noqa: E402

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402  # isort: skip
from vllm.v1.request import RequestStatus  # noqa: E402  # isort: skip

from pipelines.vllm_engine.scheduler import AsyncGroupScheduler, GroupScheduler  # noqa: E402

#: What a row draws whose partner is not where it is; it ends a request.
BROKEN = 1_000
#: Room for the longest pair of these tests and what runs beside it.
STEP_TOKENS = 440
KINDS = [GroupScheduler, AsyncGroupScheduler]


class PairRun(Run):
    """Draws as our samplers do: once for both halves of a pair, and the end for a half whose partner is
    not there."""

    def __init__(self, kind: Any, blocks: int, caching: bool = False) -> None:
        super().__init__(scheduler(kind, 12, blocks, STEP_TOKENS, caching), issubclass(kind, AsyncScheduler))
        self.asked: dict[str, Any] = {}
        #: Tokens of the prompt, and of what was drawn before a preemption, that a request enters with.
        self._entered: dict[str, int] = {}
        self.drawn: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()

    def add(self, name: str, prompt: int, most: int) -> None:
        """A pair whose halves come one after the other."""
        for part in ("main", "null"):
            self.one(f"{name}-{part}", prompt, most, pair=Half(name, part, 2.0))

    def one(self, name: str, prompt: int, most: int, **extra: Any) -> None:
        self._enter(newcomer(name, prompt, most, BROKEN, **extra))

    def cached(self, name: str, main: list[int], most: int) -> None:
        """A pair whose prompts the prefix cache may know; that of the null branch is of zeros, as that of
        every other one."""
        for part, prompt in (("main", main), ("null", [0] * len(main))):
            self._enter(
                hashed(f"{name}-{part}", prompt, most, BROKEN, pair=Half(name, part, 2.0), **{PRIVATE: True})
            )

    def _enter(self, request: Any) -> None:
        self.asked[request.request_id] = request
        self.drawn[request.request_id] = []
        self.scheduler.add_request(request)

    def finish(self, steps: int = 4_000) -> None:
        """Steps until all that was asked is over."""
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), f"still there after {steps} steps"
        for _ in range(2):
            self.step()

    def _model(self, planned: Any) -> Any:
        resumed = planned.scheduled_cached_reqs.resumed_req_ids
        for name in [*(one.req_id for one in planned.scheduled_new_reqs), *resumed]:
            self._entered[name] = self.asked[name].num_tokens
            self.seen["resumed"] += name in resumed
        made = super()._model(planned)
        requests = [self.asked[name] for name in made.req_ids]
        positions = np.array([one.num_computed_tokens for one in requests])
        whole = positions >= np.array([self._entered[name] for name in made.req_ids])
        halves = [half_of(one.sampling_params.extra_args or {}) for one in requests]
        found = match(halves, positions, whole)
        self._look(made.req_ids, whole, halves)
        for main, null in zip(found.mains, found.nulls):
            made.sampled_token_ids[null] = made.sampled_token_ids[main]
        for row in found.broken:
            made.sampled_token_ids[row] = [BROKEN]
        for row, name in enumerate(made.req_ids):
            made.sampled_token_ids[row] = made.sampled_token_ids[row] if whole[row] else []
            self.drawn[name] += made.sampled_token_ids[row]
        return made

    def _look(self, names: list[str], whole: Any, halves: list[Any]) -> None:
        """No half draws without its partner."""
        rows = Counter(half.pair for half in halves if half is not None)
        for row, half in enumerate(halves):
            if half is None or rows[half.pair] == 2:
                continue
            partner = self.asked[f"{half.pair}-{'null' if half.part == 'main' else 'main'}"]
            assert not whole[row] or partner.is_finished(), (
                f"{names[row]} draws in a step without its partner"
            )


def check_even(run: PairRun, name: str, most: int) -> None:
    main, null = (run.drawn[f"{name}-{part}"] for part in ("main", "null"))
    assert main == null, f"the halves of {name} drew {len(main)} and {len(null)} tokens"
    assert BROKEN not in main, f"{name} broke"
    assert len(main) == most
    lost = [run.asked[f"{name}-{part}"].num_preemptions for part in ("main", "null")]
    assert lost[0] == lost[1], f"the halves of {name} were preempted {lost} times"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_pairs_advance_evenly_through_preemptions_and_aborts(kind: Any, seed: int) -> None:
    """Pairs and single requests come at any time, KV has room for few of them, and some are aborted."""
    run, dice, blocks = PairRun(kind, 60), random.Random(seed), 60
    most: dict[str, int] = {}
    for moment in range(120):
        if dice.random() < 0.3:
            name = f"p{moment}"
            most[name] = dice.randrange(1, 60)
            run.add(name, dice.choice((5, 31, 40, 90, 150)), most[name])
        if dice.random() < 0.2:
            run.one(f"s{moment}", dice.randrange(1, 120), dice.randrange(1, 60))
        if dice.random() < 0.05 and most:
            name = dice.choice(sorted(most))
            if not run.asked[f"{name}-main"].is_finished():
                del most[name]
                run.scheduler.finish_requests(
                    [f"{name}-main", f"{name}-null"], RequestStatus.FINISHED_ABORTED
                )
        run.step()
    run.finish()
    for name, count in most.items():
        check_even(run, name, count)
    assert run.seen["resumed"] > 0
    assert run.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1, (
        "blocks are left behind"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_half_whose_partner_is_aborted_breaks(kind: Any) -> None:
    run = PairRun(kind, 80)
    run.add("a", 20, 50)
    for _ in range(5):
        run.step()
    run.scheduler.finish_requests("a-null", RequestStatus.FINISHED_ABORTED)
    run.finish()
    assert run.drawn["a-main"][-1] == BROKEN
    assert 0 < len(run.drawn["a-main"]) < 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [20, 31, 103, 150])
def test_prompts_that_another_pair_left_in_the_cache_are_read_by_both_halves_alike(
    kind: Any, prompt: int
) -> None:
    """The zeros of a null branch are in the cache from the first pair on, the prompts of the main ones are
    not."""
    run = PairRun(kind, 200, caching=True)
    dice = random.Random(prompt)
    for name in ("a", "b", "c"):
        run.cached(name, [dice.randrange(10, 500) for _ in range(prompt)], 9)
        for _ in range(7):
            run.step()
    run.finish()
    for name in ("a", "b", "c"):
        check_even(run, name, 9)


@pytest.mark.parametrize("private", [True, False])
def test_kv_of_generated_frames_is_shared_by_nobody_and_that_of_prompts_is(private: bool) -> None:
    """A later request whose prompt is the ids of an earlier one, prompt and output: only the prompt's
    blocks are the same frames."""
    prompt, written = 3 * BLOCK, 4 * BLOCK
    made = scheduler(GroupScheduler, 4, 80, 512, caching=True)
    run = Run(made, late=False)
    first = hashed("first", list(range(10, 10 + prompt)), written + 1, NEVER, **{PRIVATE: private})
    made.add_request(first)
    turn_until(first.is_finished, run.step)
    ids = list(first.all_token_ids)
    assert len(ids) == prompt + written + 1
    for name in ("same", "other"):
        again = hashed(name, ids, 2, NEVER, **{PRIVATE: private})
        made.add_request(again)
        planned = made.schedule()
        (entered,) = planned.scheduled_new_reqs
        # The last block that was filled is known when the next one is allocated.
        expected = prompt if private else prompt + written - BLOCK
        if name == "other":
            # Its prompt is that of `same`, whose frames are given with it.
            expected = prompt + written
        assert entered.num_computed_tokens == expected, (
            f"{name} took {entered.num_computed_tokens} tokens of KV over"
        )
        made.update_from_output(planned, run._model(planned))
        made.finish_requests(name, RequestStatus.FINISHED_ABORTED)
