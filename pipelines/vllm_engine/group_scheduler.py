"""vLLM's scheduler with less to do for hundreds of sequences, where its own Python decides how long a step
takes; and what they may share.

Newcomers enter in groups, since a step that holds a prompt runs without the CUDA graph of a whole step;
and a sequence that has room in its last block of KV is not asked for a new one.

vLLM finds a block of KV in its prefix cache by a hash of all ids up to its end, which do not say what the
KV of their positions holds. Here a block of a prompt is also hashed with the salts of the positions up to
its end (`SALTS` of a request's extras), and blocks that a request generates are never found (`PRIVATE`).
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from pipelines.vllm_engine.library import AT_ONCE, PRIVATE, SALTS

#: A group has one newcomer for so many sequences that run, so a few sequences never wait for company.
GROUP_SHARE = 16
#: No group is waited for longer than this after the last entry, nor when nobody has been added to it for the
#: shorter time.
GATHER_SECONDS, QUIET_SECONDS = 0.2, 0.05
#: vLLM 0.32 has a second one, for admission.
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")


@contextmanager
def running_limit(scheduler: Any, maximum: int) -> Generator[None]:
    """Inside, no more than `maximum` requests run."""
    saved = {name: value for name in _LIMITS if (value := getattr(scheduler, name, None)) is not None}
    for name in saved:
        setattr(scheduler, name, maximum)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(scheduler, name, value)


class SharedPrompts:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        if self.kv_cache_manager.enable_caching:
            coordinator = self.kv_cache_manager.coordinator
            coordinator.cache_blocks = self.kv_cache_manager.cache_blocks = _hashed_blocks(
                coordinator, self._hash_size
            )

    @property
    def _hash_size(self) -> int:
        """Positions that one hash stands for."""
        return getattr(self, "hash_block_size", self.block_size)

    def add_request(self, request: Any) -> None:
        if request._block_hasher is not None:
            extra = request_extra(request)
            request.block_hashes[:] = salted(request.block_hashes, self._hash_size, extra.get(SALTS, ()))
            if extra.get(PRIVATE):
                # Blocks behind the prompt get no hash.
                request._block_hasher = None
        super().add_request(request)


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


class _Grouped(SharedPrompts):
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._last_entry = self._last_growth = float("-inf")
        #: Newcomers that there were slots for when we last looked.
        self._ready = 0
        allocate_slots = quick_allocation(self.kv_cache_manager)
        if allocate_slots is not None:
            self.kv_cache_manager.allocate_slots = allocate_slots

    def schedule(self, *arguments: Any, **keys: Any) -> Any:
        before = len(self.running)
        if not self._may_enter():
            with running_limit(self, before):
                return super().schedule(*arguments, **keys)
        output = super().schedule(*arguments, **keys)
        if len(self.running) > before:
            self._last_entry, self._ready = time.monotonic(), 0
        return output

    def _may_enter(self) -> bool:
        """Whether a group is there, or one of it cannot wait, or it has waited long enough."""
        ready = min(len(self.waiting), self.max_num_running_reqs - len(self.running))
        now = time.monotonic()
        if ready > self._ready:
            self._last_growth = now
        self._ready = ready
        if ready <= 0 or ready >= len(self.running) // GROUP_SHARE:
            return True
        if now - self._last_entry >= GATHER_SECONDS or now - self._last_growth >= QUIET_SECONDS:
            return True
        return any(_enters_at_once(request) for request in islice(self.waiting, ready))


def _enters_at_once(request: Any) -> bool:
    return bool(request_extra(request).get(AT_ONCE))


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
