"""What a scheduler gave up for want of pages."""

from __future__ import annotations

from typing import Any

from pipelines.engine.core import EngineCore


class Evictions:
    """Counts the prefixes that a core evicts and the utterances that it starts again, from now on."""

    def __init__(self, core: EngineCore) -> None:
        self.prefixes = self.restarts = 0
        scheduler = core.scheduler
        self._evict, self._preempt = scheduler.prefixes.evict, scheduler.preempt
        scheduler.prefixes.evict, scheduler.preempt = self._evicted, self._preempted

    def _evicted(self, *_: object) -> None:
        self.prefixes += 1
        self._evict()

    def _preempted(self, utterance: Any) -> None:
        self.restarts += 1
        self._preempt(utterance)
