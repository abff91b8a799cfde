"""vLLM's scheduler with less to do for hundreds of sequences, where its own Python decides how long a step takes.

Newcomers enter in groups, since a step that holds a prompt runs without the CUDA graph of a whole step; and a sequence that has room in
its last block of KV is not asked for a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from pipelines.vllm_engine.options import AT_ONCE
from pipelines.vllm_engine.prefix_cache import SharedPrompts, request_extra

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


# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false


#: A group has one newcomer for so many sequences that run, so a few sequences never wait for company.
GROUP_SHARE = 16
#: No group is waited for longer than this after the last entry, nor when nobody has been added to it for the shorter time.
GATHER_SECONDS, QUIET_SECONDS = 0.2, 0.05


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
    """`allocate_slots` of a KV cache manager that does nothing where nothing is needed; None where vLLM does more than blocks in it.

    With a prefix cache a block that has become full is known to it when the next one is allocated.
    """
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return None
    blocks, size = managers[0].req_to_blocks, managers[0].block_size
    plain, nothing, running = manager.allocate_slots, manager.empty_kv_cache_blocks, RequestStatus.RUNNING

    def allocate_slots(request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **keys: Any) -> Any:
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
