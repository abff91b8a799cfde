"""vLLM's scheduler with less Python work for hundreds of sequences, salted prefix caching, and guidance pairs
that advance in lockstep.

New sequences are scheduled in groups, because a step with a prompt runs without the CUDA graph of a whole step.
A sequence with room in its last KV block skips the allocation.

vLLM finds KV blocks in its prefix cache by a hash of the ids, which do not determine the KV here. So blocks of a
prompt are also hashed with the salts of their positions (`SALTS` of a request's extras), and generated blocks
are never shared (`PRIVATE`).

Both halves of a pair are scheduled whole and in one step (`ModelSpec.pairs`). Pairs run before all other
sequences, and the KV blocks of their next step are freed in advance, so that vLLM never preempts one half.
"""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from pipelines.vllm_engine.library import AT_ONCE, PRIVATE, SALTS, half_of

#: A group is complete with one new sequence for this many running ones; with fewer running ones nothing
#: waits.
GROUP_SHARE = 16
#: Maximum time between two groups, and maximum time without a new sequence while a group is gathered.
GATHER_SECONDS = 0.2
QUIET_SECONDS = 0.05


class _Grouped:
    """A mixin, which precedes one of vLLM's schedulers among the bases of a class."""

    gather_seconds = GATHER_SECONDS
    monotonic = staticmethod(time.monotonic)

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        manager = self.kv_cache_manager
        if manager.enable_caching:
            manager.coordinator.cache_blocks = manager.cache_blocks = _hashed_blocks(
                manager.coordinator, self.hash_block_size
            )
        if (allocate_slots := quick_allocation(manager)) is not None:
            manager.allocate_slots = allocate_slots
        self._last_entry = self._last_growth = float("-inf")
        #: New sequences with a slot at the last check.
        self._ready = 0
        #: The halves of every pair by its name, the main one first; a single half waits for the other.
        self._pairs = dict[str, list[Any]]()

    def add_request(self, request: Any) -> None:
        extra = request_extra(request)
        if request._block_hasher is not None:
            request.block_hashes[:] = salted(request.block_hashes, self.hash_block_size, extra.get(SALTS, ()))
            if extra.get(PRIVATE):
                # Blocks after the prompt get no hash.
                request._block_hasher = None
        if (half := half_of(extra)) is not None:
            self._pairs.setdefault(half.pair, []).insert(0 if half.part == "main" else 1, request)
        super().add_request(request)

    def schedule(self, *arguments: Any, **keys: Any) -> Any:
        # A half without its partner is an ordinary request, which its sampler ends.
        self._pairs = {
            name: pair for name, pair in self._pairs.items() if not any(half.is_finished() for half in pair)
        }
        before = len(self.running)
        most = self.max_num_active_reqs
        # New sequences are scheduled up to this number of running ones.
        self.max_num_active_reqs = self._paired_limit() if self._pairs else self._grouped_limit()
        try:
            output = super().schedule(*arguments, **keys)
        finally:
            self.max_num_active_reqs = most
        if len(self.running) > before:
            self._last_entry = self.monotonic()
            self._ready = 0
        return output

    def _grouped_limit(self) -> int:
        """The limit of running sequences: the current number while a group is gathered, else the maximum."""
        ready = min(len(self.waiting), self.max_num_running_reqs - len(self.running))
        now = self.monotonic()
        if ready > self._ready:
            self._last_growth = now
        self._ready = ready
        enters = (
            ready >= max(len(self.running) // GROUP_SHARE, 1)
            or now - self._last_entry >= self.gather_seconds
            or now - self._last_growth >= QUIET_SECONDS
            or any(request_extra(request).get(AT_ONCE) for request in islice(self.waiting, ready))
        )
        return self.max_num_running_reqs if enters else len(self.running)

    def _paired_limit(self) -> int:
        """Moves pairs to the front of the queue, and returns the limit of running sequences for this step.

        No request overtakes a pair that does not fit yet; otherwise two slots might never be free at the same
        time.
        """
        halves = {half for pair in self._pairs.values() for half in pair}
        # vLLM schedules the first requests first, and preempts the last ones.
        self.running.sort(key=lambda one: one not in halves)
        if self._make_room(halves):
            return len(self.running)
        waiting = [
            pair
            for pair in self._pairs.values()
            if len(pair) == 2 and pair[0].status != RequestStatus.RUNNING
        ]
        entering = self._entering(waiting)
        first = [half for pair in entering for half in pair]
        singles = [one for one in self.waiting if one not in halves]
        self.waiting.remove_requests([*first, *singles])
        self.waiting.extendleft(reversed([*first, *singles]))
        limit = len(self.running) + len(first)
        if len(entering) == len(waiting):
            limit += sum(not one.num_stale_output_tokens for one in singles)
        return min(limit, self.max_num_running_reqs)

    def _make_room(self, halves: set[Any]) -> bool:
        """Preempts the newest requests or pairs until the KV blocks of this step's pairs are free; True if any
        was preempted."""
        preempted = False
        pool = self.kv_cache_manager.block_pool
        while self._blocks_needed(one for one in self.running if one in halves) > pool.get_num_free_blocks():
            victim = self.running[-1]
            pair = next((pair for pair in self._pairs.values() if victim in pair), None)
            if pair is not None and len(self.running) == 2:
                self._give_up(pair)
                break
            preempted = True
            for one in pair or [victim]:
                self.running.remove(one)
                self._preempt_request(one, time.monotonic())
        return preempted

    def _entering(self, waiting: list[list[Any]]) -> list[list[Any]]:
        """The waiting pairs, from the first one on, that fit into this step."""
        slots = self.max_num_running_reqs - len(self.running)
        tokens = self.max_num_scheduled_tokens - sum(map(_left, self.running))
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() - self._blocks_needed(self.running)
        entering = list[list[Any]]()
        for pair in waiting:
            blocks = self._blocks_needed(pair)
            if blocks > free and not self.running and not entering:
                self._give_up(pair)
                break
            slots -= 2
            tokens -= sum(map(_left, pair))
            free -= blocks
            if min(slots, tokens, free) < 0 or any(half.num_stale_output_tokens for half in pair):
                break
            entering.append(pair)
        return entering

    def _give_up(self, pair: list[Any]) -> None:
        """Ends the null branch of a pair that does not fit into an empty KV cache; the sampler then ends the
        main one as broken."""
        super().finish_requests(pair[1].request_id, RequestStatus.FINISHED_ABORTED)

    def _blocks_needed(self, requests: Iterable[Any]) -> int:
        """Number of new KV blocks that these requests need until all their tokens are computed."""
        size = self.block_size
        return sum(
            -(-(one.num_computed_tokens + _left(one)) // size) + -one.num_computed_tokens // size
            for one in requests
        )


def _left(request: Any) -> int:
    """Tokens of a request that are not computed yet; 0 if its last token is pending (vLLM's own rule)."""
    placeholders = request.num_output_placeholders
    if (
        placeholders > 0
        and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
    ):
        return 0
    return request.num_tokens_with_spec + placeholders - request.num_computed_tokens


def salted(hashes: list[bytes], size: int, salts: list[tuple[int, bytes]]) -> list[bytes]:
    """Hashes of a prompt's blocks of `size` positions, each combined with the salts that begin before the end
    of the block. All salts have the same length."""
    known = [
        b"".join(salt for position, salt in salts if position < end * size)
        for end in range(1, len(hashes) + 1)
    ]
    return [hashlib.sha256(salt + plain).digest() if salt else plain for salt, plain in zip(known, hashes)]


def request_extra(request: Any) -> dict[str, Any]:
    """`TokenRequest.extra` of vLLM's request."""
    parameters = request.sampling_params
    return (parameters.extra_args or {}) if parameters is not None else {}


def _hashed_blocks(coordinator: Any, size: int) -> Callable[[Any, int], None]:
    """A `cache_blocks` for vLLM's coordinator that allows blocks without a hash."""
    plain = coordinator.cache_blocks
    managers = coordinator.single_type_managers
    cached = managers[0].num_cached_block if len(managers) == 1 and managers[0].block_size == size else None

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if request._block_hasher is None:
            hashes = len(request.block_hashes)
            # This is called in every step of every sequence, so it returns early once the prompt's blocks are
            # cached.
            if cached is not None and cached.get(request.request_id, 0) >= hashes:
                return
            num_computed_tokens = min(num_computed_tokens, hashes * size)
        plain(request, num_computed_tokens)

    return cache_blocks


def quick_allocation(manager: Any) -> Callable[..., Any] | None:
    """A fast `allocate_slots` for a KV cache manager, which skips sequences with room in their last block; None
    if vLLM's own does more than allocate blocks.

    A full block enters the prefix cache when the next one is allocated.
    """
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return None
    blocks = managers[0].req_to_blocks
    size = managers[0].block_size
    plain = manager.allocate_slots
    nothing = manager.empty_kv_cache_blocks
    running = RequestStatus.RUNNING

    def allocate_slots(
        request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **keys: Any
    ) -> Any:
        if request.status is running and not keys:
            tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if num_new_tokens > 0 and tokens <= len(blocks.get(request.request_id, ())) * size:
                return nothing
        return plain(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **keys)

    return allocate_slots


class GroupScheduler(_Grouped, Scheduler):
    """Schedules a step after the tokens of the step before it are known."""


class AsyncGroupScheduler(_Grouped, AsyncScheduler):
    """Schedules a step before the tokens of the step before it are known, as on CUDA."""
