"""How many shards a worker can use: as many as keep its engine full, or a number that the user set."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from jobs.ledger.records import Ticket
from worker.leases import Clock, SystemClock

#: Maximum shards in flight where they follow the engine: each has two threads while it runs.
MAX_SHARDS = 64
#: Shards in flight before an engine is open, as its slots are not known then.
SHARDS_AT_START = 2
#: Maximum messages at once whose shards are not claimed yet. A claim takes some milliseconds, and only then is the shard's size known.
MAX_UNCLAIMED = 4
#: The reserve lasts as long as it takes to claim and to read a shard, at the speed of the engine; so many items are enough for any.
RESERVE_SECONDS = 2.0
RESERVE_ITEMS = 1024
#: Maximum items that wait for meters or for their store before more shards are taken.
MAX_WRITING_ITEMS = 2048
#: Between two measurements of that speed; a slower one counts gradually.
MEASURE_SECONDS = 0.5
_DECAY = 0.8
#: The last claimed shards tell the size of the next one.
_RECENT_SHARDS = 5


class Progress(Protocol):
    """How far the items of a shard are."""

    @property
    def open_items(self) -> int: ...

    @property
    def answered_items(self) -> int: ...

    @property
    def writing_items(self) -> int: ...


class _Claimed:
    """A shard that was claimed; all its items are open until it begins."""

    answered_items = writing_items = 0

    def __init__(self, open_items: int) -> None:
        self.open_items = open_items


class Demand:
    """Whether the worker takes another message, and how many shards it can use. Thread-safe.

    An item of a shard in flight is open until it has left the engine. The worker takes shards until the open items cover the engine's
    slots and a reserve: as many again, or `RESERVE_SECONDS` of items if these are more. A `fixed` number of shards is the user's.
    """

    def __init__(
        self,
        fixed: int | None = None,
        slots: Callable[[], int] = lambda: 0,
        suspended: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        """`slots`: those of the open engine, 0 while none is open. `suspended`: whether no more shards may begin for now."""
        self.fixed = fixed
        self._slots = slots
        self._suspended = suspended
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        #: Messages that were taken and whose shards have not ended.
        self._taken = 0
        self._held: dict[Ticket, Progress] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT_SHARDS)
        #: Items that the engine has answered: of shards that are held no more, and when its speed was measured.
        self._answered_before = 0
        self._answered_then = 0
        self._items_per_second = 0.0
        self._measured_at = self._clock.monotonic()

    @property
    def hungry(self) -> bool:
        """Whether the worker takes another message now."""
        if self.fixed is not None:
            return True
        unclaimed, held = self._messages()
        if held >= MAX_SHARDS or unclaimed >= MAX_UNCLAIMED or self._suspended():
            return False
        slots = self._slots()
        if slots == 0:
            return held < SHARDS_AT_START
        return self._missing(slots, unclaimed) > 0

    @property
    def shards(self) -> int:
        """How many shards the worker can use, with those it has."""
        if self.fixed is not None:
            return self.fixed
        unclaimed, held = self._messages()
        slots = self._slots()
        if slots == 0:
            return max(held, SHARDS_AT_START)
        more = math.ceil(max(0, self._missing(slots, unclaimed)) / self._typical(slots))
        return min(MAX_SHARDS, max(held + more, 1))

    @property
    def open_items(self) -> int:
        """Items of the shards in flight that have not left the engine."""
        with self._lock:
            held = list(self._held.values())
        return sum([shard.open_items for shard in held])

    @property
    def writing_items(self) -> int:
        """Items of the shards in flight that left the engine and have no outcome yet."""
        with self._lock:
            return sum([shard.writing_items for shard in self._held.values()])

    def taken(self) -> None:
        """A message was taken."""
        with self._lock:
            self._taken += 1

    def ended(self) -> None:
        """A message that was taken is dealt with."""
        with self._lock:
            self._taken -= 1

    @contextmanager
    def hold(self, ticket: Ticket, items: int) -> Generator[None, None, None]:
        """A claimed shard with so many items to do runs inside the block."""
        with self._lock:
            self._held[ticket] = _Claimed(items)
            self._recent.append(items)
        try:
            yield
        finally:
            with self._lock:
                self._answered_before += self._held.pop(ticket).answered_items

    def follow(self, ticket: Ticket, progress: Progress) -> None:
        """From now on `progress` tells how far a shard is that is held."""
        with self._lock:
            self._held[ticket] = progress

    def _messages(self) -> tuple[int, int]:
        """Messages whose shards are not claimed, and those with the claimed ones."""
        with self._lock:
            claimed = len(self._held)
            return max(0, self._taken - claimed), max(self._taken, claimed)

    def _missing(self, slots: int, unclaimed: int) -> int:
        """Items to claim before slots and reserve are covered; zero or less where there are enough."""
        if self.writing_items >= MAX_WRITING_ITEMS:
            return 0
        reserve = max(slots, min(RESERVE_ITEMS, math.ceil(self._speed() * RESERVE_SECONDS)))
        return slots + reserve - self.open_items - unclaimed * self._typical(slots)

    def _typical(self, slots: int) -> int:
        """Items of the next shard; before one was claimed, as many as cover slots and reserve."""
        with self._lock:
            return max(1, round(statistics.median(self._recent))) if self._recent else 2 * slots

    def _speed(self) -> float:
        """Items a second that the engine answers."""
        now = self._clock.monotonic()
        with self._lock:
            seconds = now - self._measured_at
            if seconds >= MEASURE_SECONDS:
                answered = self._answered_before + sum([shard.answered_items for shard in self._held.values()])
                self._items_per_second = max((answered - self._answered_then) / seconds, self._items_per_second * _DECAY)
                self._answered_then, self._measured_at = answered, now
            return self._items_per_second
