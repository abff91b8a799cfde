"""What an item costs of an engine that works on many at once."""

from __future__ import annotations

import threading

from worker.clock import Clock


class EngineMeter:
    """Shares out the time of an engine: while n requests are in it, each of them pays a n-th of the time.

    All shares together are the time in which the engine had work, whatever the batch was. After fair queueing's virtual
    time (Demers, Keshav and Shenker, 1989): it runs at 1/n, and a request's share is how far it ran meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = 0
        self._virtual_seconds = 0.0
        self._read_at = clock.monotonic()

    def enter(self) -> float:
        """A request goes in; the mark to leave with."""
        with self._lock:
            mark = self._advance()
            self._requests += 1
            return mark

    def leave(self, mark: float) -> float:
        """The request that went in at `mark` is out; its share in milliseconds."""
        with self._lock:
            share = self._advance() - mark
            self._requests -= 1
            return share * 1000

    def _advance(self) -> float:
        now = self._clock.monotonic()
        if self._requests:
            self._virtual_seconds += (now - self._read_at) / self._requests
        self._read_at = now
        return self._virtual_seconds
