"""vLLM's scheduler with less to do for hundreds of sequences, where its own Python decides how long a step
takes; what they may share; and guidance pairs that advance in lockstep.

Newcomers enter in groups, since a step that holds a prompt runs without the CUDA graph of a whole step;
and a sequence that has room in its last block of KV is not asked for a new one.

vLLM finds a block of KV in its prefix cache by a hash of all ids up to its end, which do not say what the
KV of their positions holds. Here a block of a prompt is also hashed with the salts of the positions up to
its end (`SALTS` of a request's extras), and blocks that a request generates are never found (`PRIVATE`).

The halves of a pair enter whole and in one step, which has room for any pair (`ModelSpec.pairs`). Pairs
run before all others, and the KV of their next step is made free before vLLM looks for it: it never
preempts one half by itself.
"""

# vLLM is an extra: its imports are checked where it is installed.
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

from pipelines.vllm_engine.library import AT_ONCE, PRIVATE, SALTS
from pipelines.vllm_engine.pairs import half_of

#: A group has one newcomer for so many sequences that run, so a few sequences never wait for company.
GROUP_SHARE = 16
#: No group is waited for longer than this after the last entry, nor when nobody has been added to it for the
#: shorter time.
GATHER_SECONDS, QUIET_SECONDS = 0.2, 0.05


class _Grouped:
    """Mixed in before one of vLLM's schedulers."""

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
        #: Newcomers that there were slots for when we last looked.
        self._ready = 0
        #: The halves of every pair by its name, the main one first; one alone waits for the other.
        self._pairs: dict[str, list[Any]] = {}

    def add_request(self, request: Any) -> None:
        extra = request_extra(request)
        if request._block_hasher is not None:
            request.block_hashes[:] = salted(request.block_hashes, self.hash_block_size, extra.get(SALTS, ()))
            if extra.get(PRIVATE):
                # Blocks behind the prompt get no hash.
                request._block_hasher = None
        if (half := half_of(extra)) is not None:
            pair = self._pairs.setdefault(half.pair, [])
            pair.insert(0 if half.part == "main" else 1, request)
        super().add_request(request)

    def schedule(self, *arguments: Any, **keys: Any) -> Any:
        # What is left of a pair is a request like any other: its sampler ends it.
        self._pairs = {
            name: pair for name, pair in self._pairs.items() if not any(half.is_finished() for half in pair)
        }
        before, most = len(self.running), self.max_num_active_reqs
        # Newcomers enter until so many requests run.
        self.max_num_active_reqs = self._paired_limit() if self._pairs else self._grouped_limit()
        try:
            output = super().schedule(*arguments, **keys)
        finally:
            self.max_num_active_reqs = most
        if len(self.running) > before:
            self._last_entry, self._ready = time.monotonic(), 0
        return output

    def _grouped_limit(self) -> int:
        """As many as run, unless a group is there, or one of it cannot wait, or it has waited long enough."""
        ready = min(len(self.waiting), self.max_num_running_reqs - len(self.running))
        now = time.monotonic()
        if ready > self._ready:
            self._last_growth = now
        self._ready = ready
        enters = (
            ready >= max(len(self.running) // GROUP_SHARE, 1)
            or now - self._last_entry >= GATHER_SECONDS
            or now - self._last_growth >= QUIET_SECONDS
            or any(request_extra(request).get(AT_ONCE) for request in islice(self.waiting, ready))
        )
        return self.max_num_running_reqs if enters else len(self.running)

    def _paired_limit(self) -> int:
        """Puts pairs that enter before all others that wait; how many requests may run in this step.

        A pair that cannot enter lets nobody pass: slots and blocks would never be free for two at once.
        """
        halves = {half for pair in self._pairs.values() for half in pair}
        # vLLM gives tokens and blocks to the first ones, and takes blocks from the last ones.
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
        """Preempts the newest requests, or pairs, until the KV of this step's pairs is free; whether any was."""
        preempted = False
        while self._blocks_needed(one for one in self.running if one in halves) > self._blocks_free():
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
        """The first of these pairs that have room in this step."""
        slots = self.max_num_running_reqs - len(self.running)
        tokens = self.max_num_scheduled_tokens - sum(map(_left, self.running))
        free = self._blocks_free() - self._blocks_needed(self.running)
        entering: list[list[Any]] = []
        for pair in waiting:
            blocks = self._blocks_needed(pair)
            if blocks > free and not self.running and not entering:
                self._give_up(pair)
                break
            slots, tokens, free = slots - 2, tokens - sum(map(_left, pair)), free - blocks
            if min(slots, tokens, free) < 0 or any(half.num_stale_output_tokens for half in pair):
                break
            entering.append(pair)
        return entering

    def _give_up(self, pair: list[Any]) -> None:
        """Ends the null branch of a pair that does not fit the KV cache by itself; its sampler then ends
        the main one as broken."""
        super().finish_requests(pair[1].request_id, RequestStatus.FINISHED_ABORTED)

    def _blocks_needed(self, requests: Iterable[Any]) -> int:
        """New blocks of KV that these requests take when all their tokens are computed."""
        size = self.block_size
        return sum(
            -(-(one.num_computed_tokens + _left(one)) // size) + -one.num_computed_tokens // size
            for one in requests
        )

    def _blocks_free(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()


def _left(request: Any) -> int:
    """Tokens of a request that are not computed; 0 for one whose last token is on its way (vLLM's own
    rule)."""
    placeholders = request.num_output_placeholders
    if (
        placeholders > 0
        and request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
    ):
        return 0
    return request.num_tokens_with_spec + placeholders - request.num_computed_tokens


def salted(hashes: list[bytes], size: int, salts: list[tuple[int, bytes]]) -> list[bytes]:
    """Hashes of a prompt's blocks of `size` positions, each with the salts that begin before its end;
    `salts` have one length."""
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
    """`cache_blocks` of vLLM's coordinator, which itself takes a hash of every full block for granted."""
    plain, managers = coordinator.cache_blocks, coordinator.single_type_managers
    cached = managers[0].num_cached_block if len(managers) == 1 and managers[0].block_size == size else None

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if request._block_hasher is None:
            hashes = len(request.block_hashes)
            # Asked in every step of every sequence; once a prompt's blocks are in, there is nothing more to
            # do.
            if cached is not None and cached.get(request.request_id, 0) >= hashes:
                return
            num_computed_tokens = min(num_computed_tokens, hashes * size)
        plain(request, num_computed_tokens)

    return cache_blocks


def quick_allocation(manager: Any) -> Callable[..., Any] | None:
    """`allocate_slots` of a KV cache manager that does nothing where nothing is needed; None where vLLM
    does more than blocks in it.

    With a prefix cache a block that has become full is known to it when the next one is allocated.
    """
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return None
    blocks, size = managers[0].req_to_blocks, managers[0].block_size
    plain, nothing, running = manager.allocate_slots, manager.empty_kv_cache_blocks, RequestStatus.RUNNING

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
    """One step after the other."""


class AsyncGroupScheduler(_Grouped, AsyncScheduler):
    """The next step is scheduled before the last one's tokens are known, as on CUDA."""
