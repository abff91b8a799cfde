"""vLLM's scheduler for small LMs with hundreds of sequences, where its own Python decides how long a step takes.

Newcomers enter in groups, since a step that holds a prompt runs without the CUDA graph of a whole step; and a sequence that has room in
its last block of KV is not asked for a new one.
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus

from pipelines.vllm_engine.options import AT_ONCE

#: A group is as large as this share of the sequences that run, so a few sequences never wait for company.
GROUP_SHARE = 16
#: No group is waited for longer than this after the last one.
GATHER_SECONDS = 0.2


class Grouped:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._last_entry = float("-inf")
        allocate_slots = quick_allocation(self.kv_cache_manager)
        if allocate_slots is not None:
            self.kv_cache_manager.allocate_slots = allocate_slots

    def schedule(self, *arguments: Any, **keys: Any) -> Any:
        if not self._may_enter():
            limits = [name for name in ("max_num_running_reqs", "max_num_active_reqs") if getattr(self, name, None) is not None]
            saved = {name: getattr(self, name) for name in limits}
            for name in limits:
                setattr(self, name, len(self.running))
            try:
                return super().schedule(*arguments, **keys)
            finally:
                for name, value in saved.items():
                    setattr(self, name, value)
        output = super().schedule(*arguments, **keys)
        if output.scheduled_new_reqs:
            self._last_entry = time.monotonic()
        return output

    def _may_enter(self) -> bool:
        """Whether a group is there, or one of it cannot wait, or all have waited long enough."""
        ready = min(len(self.waiting), self.max_num_running_reqs - len(self.running))
        if ready <= 0 or ready >= len(self.running) // GROUP_SHARE:
            return True
        if time.monotonic() - self._last_entry >= GATHER_SECONDS:
            return True
        return any((request.sampling_params.extra_args or {}).get(AT_ONCE) for request in islice(self.waiting, ready))


def quick_allocation(manager: Any) -> Callable[..., Any] | None:
    """`allocate_slots` of a KV cache manager that does nothing where nothing is needed; None where vLLM does more than blocks in it."""
    managers = manager.coordinator.single_type_managers
    if manager.enable_caching or len(managers) != 1 or type(managers[0]) is not FullAttentionManager:
        return None
    blocks, size = managers[0].req_to_blocks, managers[0].block_size
    plain, nothing, running = manager.allocate_slots, manager.empty_kv_cache_blocks, RequestStatus.RUNNING

    def allocate_slots(request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **keys: Any) -> Any:
        if request.status is running and not keys:
            tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if num_new_tokens > 0 and tokens <= len(blocks.get(request.request_id, ())) * size:
                return nothing
        return plain(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **keys)

    return allocate_slots


class GroupScheduler(Grouped, Scheduler):
    """One step after the other."""


class AsyncGroupScheduler(Grouped, AsyncScheduler):
    """The next step is scheduled before the last one's tokens are known, as on CUDA."""
