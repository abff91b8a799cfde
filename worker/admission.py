"""Which shards a worker takes, and which has to run alone."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.leases import Clock, SystemClock

#: Maximum shards in flight where they follow the engine: each has two threads while it runs.
MAX_SHARDS = 64
#: Shards in flight before an engine is open, as its slots are not known then.
SHARDS_AT_START = 2
#: Maximum messages at once whose shards are not claimed yet. A claim takes some milliseconds, and only then
#: is the shard's size known.
MAX_UNCLAIMED = 4
#: The reserve lasts as long as it takes to claim and to read a shard, at the speed of the engine; so many
#: items are enough for any.
RESERVE_SECONDS = 2.0
RESERVE_ITEMS = 1024
#: Maximum items that wait for meters or for their store before more shards are taken.
MAX_WRITING_ITEMS = 1024
#: Between two measurements of that speed; a slower one counts gradually.
MEASURE_SECONDS = 0.5
_DECAY = 0.8
#: The last claimed shards tell the size of the next one.
_RECENT_SHARDS = 5
#: Between two looks whether a shard that waits is still wanted.
LOOK_SECONDS = 0.5


class ItemCounts(NamedTuple):
    """How far the items of a shard are."""

    #: Have not left the engine, and are to be fed.
    open: int
    #: The engine has answered.
    answered: int
    #: Left the engine and have no outcome yet.
    writing: int


@dataclass(eq=False)
class Demand:
    """Whether the worker takes another message, and how many shards it can use. Thread-safe.

    The worker takes shards until their open items cover the engine's slots and a reserve: as many again,
    or `RESERVE_SECONDS` of items if these are more. A `fixed` number of shards is the user's.
    """

    fixed: int | None = None
    #: Those of the open engine, 0 while none is open.
    slots: Callable[[], int] = lambda: 0
    #: Whether no more shards may begin for now.
    suspended: Callable[[], bool] = lambda: False
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        #: Messages that were taken and whose shards have not ended.
        self._taken = 0
        #: Of the shards that were claimed.
        self._held: list[Callable[[], ItemCounts]] = []
        self._recent: deque[int] = deque(maxlen=_RECENT_SHARDS)
        #: Items that the engine has answered: of shards that are held no more, and when its speed was
        #: measured.
        self._answered_before = 0
        self._answered_then = 0
        self._items_per_second = 0.0
        self._measured_at = self.clock.monotonic()

    @property
    def hungry(self) -> bool:
        """Whether the worker takes another message now."""
        if self.fixed is not None:
            return True
        unclaimed, held = self._messages()
        if unclaimed >= MAX_UNCLAIMED or self.suspended():
            return False
        return self.shards > held

    @property
    def shards(self) -> int:
        """How many shards the worker can use, with those it has."""
        if self.fixed is not None:
            return self.fixed
        unclaimed, held = self._messages()
        slots = self.slots()
        if slots == 0:
            return max(held, SHARDS_AT_START)
        more = math.ceil(max(0, self._missing(slots, unclaimed)) / self._typical(slots))
        return min(MAX_SHARDS, max(held + more, 1))

    def taken(self) -> None:
        """A message was taken."""
        with self._lock:
            self._taken += 1

    def ended(self) -> None:
        """A message that was taken is dealt with."""
        with self._lock:
            self._taken -= 1

    @contextmanager
    def hold(self, counts: Callable[[], ItemCounts]) -> Generator[None, None, None]:
        """A claimed shard runs inside the block; `counts` tells how far it is."""
        with self._lock:
            self._held.append(counts)
            self._recent.append(counts().open)
        try:
            yield
        finally:
            with self._lock:
                self._held.remove(counts)
                self._answered_before += counts().answered

    def _messages(self) -> tuple[int, int]:
        """Messages whose shards are not claimed, and those with the claimed ones."""
        with self._lock:
            claimed = len(self._held)
            return max(0, self._taken - claimed), max(self._taken, claimed)

    def _missing(self, slots: int, unclaimed: int) -> int:
        """Items to claim before slots and reserve are covered; zero or less where there are enough."""
        counts = self._counts()
        if counts.writing >= MAX_WRITING_ITEMS:
            return 0
        reserve = max(slots, min(RESERVE_ITEMS, math.ceil(self._speed(counts.answered) * RESERVE_SECONDS)))
        return slots + reserve - counts.open - unclaimed * self._typical(slots)

    def _typical(self, slots: int) -> int:
        """Items of the next shard; before one was claimed, as many as cover slots and reserve."""
        with self._lock:
            return max(1, round(statistics.median(self._recent))) if self._recent else 2 * slots

    def _counts(self) -> ItemCounts:
        """Of all shards that are held; answered items with those of earlier ones."""
        with self._lock:
            held = [ItemCounts(0, self._answered_before, 0), *[counts() for counts in self._held]]
        return ItemCounts(*map(sum, zip(*held, strict=True)))

    def _speed(self, answered: int) -> float:
        """Items a second that the engine answers."""
        now = self.clock.monotonic()
        with self._lock:
            seconds = now - self._measured_at
            if seconds >= MEASURE_SECONDS:
                self._items_per_second = max(
                    (answered - self._answered_then) / seconds, self._items_per_second * _DECAY
                )
                self._answered_then, self._measured_at = answered, now
            return self._items_per_second


class ExclusiveLock:
    """Many may hold it together, or one alone. Who waits to be alone goes before those who come later.
    Thread-safe.

    A shard whose next crash would fail its items runs with no other beside it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._taken_alone = False
        self._waiting = 0

    @property
    def closed(self) -> bool:
        """Whether one holds it alone, or waits to: nobody else comes in now."""
        return self._taken_alone or self._waiting > 0

    @contextmanager
    def hold(self, alone: bool, give_up: Callable[[], bool]) -> Generator[bool, None, None]:
        """Waits for the lock and holds it inside the block. Yields False, without the lock, when `give_up`
        returns True."""
        with self._changed:
            self._waiting += alone
            while waits := bool(self._running if alone else self.closed):
                if give_up():
                    break
                self._changed.wait(LOOK_SECONDS)
            self._waiting -= alone
            if not waits:
                self._running += 1
                self._taken_alone = alone
            self._changed.notify_all()
        try:
            yield not waits
        finally:
            if not waits:
                with self._changed:
                    self._running -= 1
                    self._taken_alone = False
                    self._changed.notify_all()
