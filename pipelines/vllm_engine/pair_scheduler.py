"""vLLM's scheduler, with guidance pairs that advance in lockstep: admitted, chunked, preempted and resumed
together.

A step is planned before vLLM schedules it: what may run is put into `running`, what must wait is held out,
and room for the step's KV is made first, so that vLLM itself never preempts one half. Neither half
finishes its prompt in a step in which the other does not.
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from pipelines.vllm_engine.group_scheduler import SharedPrompts, request_extra, running_limit
from pipelines.vllm_engine.pairs import half_of


@dataclass(slots=True, eq=False)
class _Pair:
    main: Any
    null: Any
    #: Halves that vLLM does not know of at the moment.
    outside: list[Any] = field(default_factory=list[Any])

    @property
    def halves(self) -> tuple[Any, Any]:
        return self.main, self.null

    @property
    def over(self) -> bool:
        return self.main.is_finished() or self.null.is_finished()


@dataclass(slots=True)
class _Plan:
    """One step: who runs, who is held out, and tokens left for newcomers."""

    run: list[Any]
    held: list[Any]
    tokens: dict[str, int]
    left: int
    #: Whether newcomers may come; not beside a half that must stop short of its prompt's end.
    open: bool = True


class _Paired(SharedPrompts):
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        #: Halves whose partner has not come.
        self._lone: dict[str, Any] = {}
        #: Pairs that wait as a whole, the next first; and the pairs of every request id that is a half of
        #: one.
        self._ready: deque[_Pair] = deque()
        self._pairs: dict[str, _Pair] = {}

    def add_request(self, request: Any) -> None:
        half = half_of(request_extra(request))
        super().add_request(request)
        if half is None:
            return
        self.waiting.remove_requests([request])
        other = self._lone.pop(half.pair, None)
        if other is None:
            self._lone[half.pair] = request
            return
        pair = _Pair(request, other) if half.part == "main" else _Pair(other, request)
        pair.outside = [pair.main, pair.null]
        for one in pair.halves:
            self._pairs[one.request_id] = pair
        self._ready.append(pair)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self._lone = {pair: one for pair, one in self._lone.items() if not one.is_finished()}
        self._forget_finished()
        return finished

    def get_num_unfinished_requests(self) -> int:
        return super().get_num_unfinished_requests() + sum(
            len(pair.outside) for pair in self._waiting_pairs()
        )

    def schedule(self, *arguments: Any, **keys: Any) -> Any:
        self._forget_finished()
        self._take_back()
        if not self._pairs:
            return super().schedule(*arguments, **keys)
        plan, preempted = self._fitting_plan()
        limit = self._admit(plan) if plan.open and not preempted else len(plan.run)
        tokens = sum(plan.tokens.values()) if not plan.open else self.max_num_scheduled_tokens
        budget = self.max_num_scheduled_tokens
        self.running = plan.run
        # A budget of nothing is a step of nothing, which vLLM knows.
        self.max_num_scheduled_tokens = tokens
        try:
            with running_limit(self, limit):
                return super().schedule(*arguments, **keys)
        finally:
            self.running = self.running + plan.held
            self.max_num_scheduled_tokens = budget

    def _take_back(self) -> None:
        """Halves that vLLM did not admit, or preempted by itself, wait with us again."""
        for pair in dict.fromkeys(self._pairs.values()):
            back = [
                one for one in pair.halves if one.status != RequestStatus.RUNNING and one not in pair.outside
            ]
            if back:
                self.waiting.remove_requests(back)
                pair.outside += back
            if len(pair.outside) == 2 and pair not in self._ready:
                self._ready.appendleft(pair)

    def _fitting_plan(self) -> tuple[_Plan, bool]:
        """A plan whose KV fits, after preempting the newest for it where it must be; and whether any was."""
        preempted = False
        while True:
            plan = self._plan()
            if self._blocks_needed(plan) <= self._blocks_free():
                return plan, preempted
            preempted = True
            self._make_room()

    def _plan(self) -> _Plan:
        singles, pairs = self._groups()
        decoding = [group for group in (*singles, *pairs) if all(_left(one) <= 1 for one in group)]
        filling = [group for group in (*singles, *pairs) if any(_left(one) > 1 for one in group)]
        plan = _Plan([], [], {}, self.max_num_scheduled_tokens)
        for group in decoding:
            self._take(plan, group)
        for group in sorted(filling, key=lambda group: self.running.index(group[0])):
            wanted = sum(map(_left, group))
            if not plan.open or plan.left < (wanted if len(group) == 2 else 1):
                if (
                    plan.open
                    and len(group) == 2
                    and plan.left
                    and not any(_left(one) > 1 for one in plan.run)
                ):
                    self._take_chunk(plan, group)
                else:
                    plan.held += group
            else:
                self._take(plan, group)
        planned = {one.request_id for one in (*plan.run, *plan.held)}
        plan.held += [one for one in self.running if one.request_id not in planned]
        return plan

    def _groups(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """What runs: single requests, and whole pairs. A half whose partner is gone is single; one whose
        partner is outside waits."""
        singles: list[list[Any]] = []
        pairs: list[list[Any]] = []
        for one in self.running:
            pair = self._pairs.get(one.request_id)
            if pair is None or pair.over:
                singles.append([one])
            elif not pair.outside and one is pair.main:
                pairs.append([pair.main, pair.null])
        return singles, pairs

    def _take(self, plan: _Plan, group: list[Any]) -> None:
        for one in group:
            tokens = min(_left(one), plan.left)
            plan.run.append(one)
            plan.tokens[one.request_id] = tokens
            plan.left -= tokens

    def _take_chunk(self, plan: _Plan, group: list[Any]) -> None:
        """The longer half goes on, up to the token before its prompt's last; all that is not decoding
        waits for it."""
        longer, other = sorted(group, key=_left, reverse=True)
        plan.tokens[longer.request_id] = min(plan.left, _left(longer) - 1)
        plan.run.append(longer)
        plan.held.append(other)
        plan.open = False

    def _admit(self, plan: _Plan) -> int:
        """Puts waiting pairs at the head of vLLM's queue; returns how many requests may run in this step."""
        if (
            late := next((pair for pair in self._waiting_pairs() if len(pair.outside) == 1), None)
        ) is not None:
            # Its partner holds KV and waits for it: it goes before all others.
            half = late.outside[0]
            blocks = _blocks(half.num_tokens, self.block_size)
            if (
                plan.left > 1
                and not _stale(half)
                and blocks <= self._blocks_free() - self._blocks_needed(plan)
            ):
                self._let_in(plan, late)
                return len(plan.run) + 1
            return len(plan.run)
        room = self.max_num_running_reqs - len(self.running)
        free = self._blocks_free() - self._blocks_needed(plan)
        admitted = 0
        while self._ready:
            pair = self._ready[0]
            blocks = sum(_blocks(one.num_tokens, self.block_size) for one in pair.halves)
            wanted = sum(one.num_tokens for one in pair.halves)
            if blocks > free and not self.running and not admitted:
                self._give_up(pair)
                continue
            if room < 2 or blocks > free or any(map(_stale, pair.halves)):
                break
            if wanted > plan.left:
                if admitted or not self._alone(plan):
                    break
                # Its prompts fit no step together: its halves come in one after the other, in chunks.
                self._ready.popleft()
                self._let_in(plan, pair)
                return len(plan.run) + 1
            self._ready.popleft()
            for one in reversed(pair.halves):
                self.waiting.prepend_request(one)
            pair.outside = []
            admitted, room, free, plan.left = admitted + 2, room - 2, free - blocks, plan.left - wanted
        # A pair that waits at the head lets nobody pass: slots and blocks would never be free for two at
        # once.
        return len(plan.run) + admitted if self._ready else self.max_num_running_reqs - len(plan.held)

    def _alone(self, plan: _Plan) -> bool:
        return not plan.held and all(_left(one) <= 1 for one in plan.run)

    def _let_in(self, plan: _Plan, pair: _Pair) -> None:
        half = pair.outside.pop(0)
        # A hit in the prefix cache could end the prompt in its first chunk.
        half.skip_reading_prefix_cache = True
        self.waiting.prepend_request(half)
        plan.tokens[half.request_id] = min(plan.left, half.num_tokens - 1)
        plan.open = False

    def _give_up(self, pair: _Pair) -> None:
        """Ends the null branch of a pair that does not fit the KV cache by itself; the sampler then ends
        the main one as broken."""
        self._ready.remove(pair)
        for one in pair.halves:
            del self._pairs[one.request_id]
        super().finish_requests(pair.null.request_id, RequestStatus.FINISHED_ABORTED)
        if pair.main in pair.outside:
            self.waiting.prepend_request(pair.main)

    def _make_room(self) -> None:
        """Preempts the newest request, or the whole pair that it belongs to."""
        victim = self.running[-1]
        pair = self._pairs.get(victim.request_id)
        victims = [victim] if pair is None else [one for one in pair.halves if one in self.running]
        if pair is not None and len(victims) == len(self.running):
            super().finish_requests(pair.null.request_id, RequestStatus.FINISHED_ABORTED)
            self._forget_finished()
            return
        now = time.monotonic()
        for one in victims:
            self.running.remove(one)
            self._preempt_request(one, now)
        self._take_back()

    def _waiting_pairs(self) -> list[_Pair]:
        return [pair for pair in dict.fromkeys(self._pairs.values()) if pair.outside]

    def _forget_finished(self) -> None:
        over = {request_id: pair for request_id, pair in self._pairs.items() if pair.over}
        for request_id, pair in over.items():
            del self._pairs[request_id]
            if pair in self._ready:
                self._ready.remove(pair)

    def _blocks_needed(self, plan: _Plan) -> int:
        """New blocks of KV that a plan's tokens take."""
        size = self.block_size
        computed = {one.request_id: one.num_computed_tokens for one in plan.run}
        return sum(
            _blocks(computed.get(name, 0) + tokens, size) - _blocks(computed.get(name, 0), size)
            for name, tokens in plan.tokens.items()
        )

    def _blocks_free(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()


class PairScheduler(_Paired, Scheduler):
    """Pairs in lockstep, one step after the other."""


class AsyncPairScheduler(_Paired, AsyncScheduler):
    """Pairs in lockstep, where the next step is scheduled before the last one's tokens are known, as on
    CUDA."""


def _left(request: Any) -> int:
    """Tokens of a running request that are not computed; 0 for one whose last token is on its way (vLLM's
    own rule)."""
    placeholders = request.num_output_placeholders
    if (
        placeholders > 0
        and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
    ):
        return 0
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _stale(request: Any) -> bool:
    """Whether tokens from before its preemption are still on their way (vLLM 0.32)."""
    return bool(getattr(request, "num_stale_output_tokens", 0))
