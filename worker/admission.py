"""The number of shards that a worker takes, and shards that must run alone."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from worker.leases import Clock

#: Maximum number of shards in flight if the user sets none; each shard has two threads.
MAX_SHARDS = 64
#: Shards in flight before an engine is open, when its slots are unknown.
SHARDS_AT_START = 2
#: Maximum number of messages whose shards are not yet claimed. The size of a shard is known only after its claim.
MAX_UNCLAIMED = 4
#: The reserve of items keeps the engine busy while another shard is claimed and read: the seconds that it lasts, and its
#: maximum in items.
RESERVE_SECONDS = 2.0
RESERVE_ITEMS = 1024
#: While more items wait for meters or the store, no shards are taken.
MAX_WRITING_ITEMS = 1024
#: Interval at which the engine's speed is measured. A measured speed can fall only by the factor `_DECAY` per interval.
MEASURE_SECONDS = 0.5
_DECAY = 0.8
#: Number of recent shards whose median size is the estimate for the next one.
_RECENT_SHARDS = 5
#: Interval at which a waiting shard checks whether it must give up.
CHECK_SECONDS = 0.5


class ItemCounts(NamedTuple):
    """The progress of the items of a shard."""

    #: Items that are in the engine or will be sent to it.
    open: int
    #: Items that the engine has answered.
    answered: int
    #: Answered items that have no outcome yet.
    writing: int


@dataclass(eq=False)
class Demand:
    """Decides whether the worker takes another message, and how many shards it can use. Thread-safe.

    The worker takes shards until their open items cover the engine's slots and a reserve: the larger of the number of
    slots and the items of `RESERVE_SECONDS`. `fixed`: a number of shards chosen by the user.
    """

    fixed: int | None = None
    #: Slots of the open engine; 0 if none is open.
    slots: Callable[[], int] = lambda: 0
    #: Whether no new shards may start at present.
    suspended: Callable[[], bool] = lambda: False
    clock: Clock = time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        #: Messages in progress.
        self._taken = 0
        #: Progress functions of the claimed shards.
        self._held: list[Callable[[], ItemCounts]] = []
        self._recent = deque[int](maxlen=_RECENT_SHARDS)
        #: Items that the engine has answered: of ended shards, and in total at the last measurement of its speed.
        self._answered_before = 0
        self._answered_then = 0
        self._items_per_second = 0.0
        self._measured_at = self.clock.monotonic()

    @property
    def wants_message(self) -> bool:
        """Whether the worker takes another message now."""
        if self.fixed is not None:
            return True
        unclaimed, held = self._messages()
        if unclaimed >= MAX_UNCLAIMED or self.suspended():
            return False
        return self.shards > held

    @property
    def shards(self) -> int:
        """The number of shards that the worker can use, including those it holds."""
        if self.fixed is not None:
            return self.fixed
        unclaimed, held = self._messages()
        slots = self.slots()
        if slots == 0:
            return max(held, SHARDS_AT_START)
        with self._lock:
            # Estimated items of the next shard; before the first claim, the slots and the reserve.
            typical = max(1, round(statistics.median(self._recent))) if self._recent else 2 * slots
            # All held shards, and the answered items of ended ones.
            held_items = [ItemCounts(0, self._answered_before, 0), *[counts() for counts in self._held]]
        open_items, answered, writing = map(sum, zip(*held_items, strict=True))
        #: Items needed to cover slots and reserve; zero or less if there are enough.
        missing = 0
        if writing < MAX_WRITING_ITEMS:
            reserve = max(slots, min(RESERVE_ITEMS, math.ceil(self._speed(answered) * RESERVE_SECONDS)))
            missing = slots + reserve - open_items - unclaimed * typical
        return min(MAX_SHARDS, max(held + math.ceil(max(0, missing) / typical), 1))

    def taken(self) -> None:
        """Counts a message that was taken."""
        with self._lock:
            self._taken += 1

    def ended(self) -> None:
        """Counts a message that was processed."""
        with self._lock:
            self._taken -= 1

    @contextmanager
    def hold(self, counts: Callable[[], ItemCounts]) -> Generator[None]:
        """Counts a claimed shard during the block; `counts` returns its progress."""
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
        """The number of messages without a claimed shard, and the number of all messages."""
        with self._lock:
            claimed = len(self._held)
            return max(0, self._taken - claimed), max(self._taken, claimed)

    def _speed(self, answered: int) -> float:
        """Items answered by the engine per second."""
        now = self.clock.monotonic()
        with self._lock:
            seconds = now - self._measured_at
            if seconds >= MEASURE_SECONDS:
                self._items_per_second = max(
                    (answered - self._answered_then) / seconds, self._items_per_second * _DECAY
                )
                self._answered_then = answered
                self._measured_at = now
            return self._items_per_second


class ExclusiveLock:
    """A lock that many threads share or one thread holds alone. A thread that waits to hold it alone takes precedence
    over later threads that would share it. Thread-safe.

    A shard whose next crash would fail its items runs alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._taken_alone = False
        self._waiting = 0

    @property
    def closed(self) -> bool:
        """Whether a thread holds the lock alone or waits to do so, so that no other thread can get it."""
        return self._taken_alone or self._waiting > 0

    @contextmanager
    def hold(self, alone: bool, give_up: Callable[[], bool]) -> Generator[bool]:
        """Waits for the lock and holds it inside the block. Yields True, or False without the lock once `give_up`
        returns True."""
        with self._changed:
            self._waiting += alone
            while must_wait := bool(self._running if alone else self.closed):
                if give_up():
                    break
                self._changed.wait(CHECK_SECONDS)
            self._waiting -= alone
            if not must_wait:
                self._running += 1
                self._taken_alone = alone
            self._changed.notify_all()
        try:
            yield not must_wait
        finally:
            if not must_wait:
                with self._changed:
                    self._running -= 1
                    self._taken_alone = False
                    self._changed.notify_all()
