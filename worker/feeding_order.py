"""Which shards of a worker are fed to the engine first: those of a higher priority, then the older ones."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

#: Shards that are fed at the same time: reference audio of a store behind a network takes a while to come.
FOLDER_SHARDS, S3_SHARDS = 2, 16
#: Between two looks whether a shard that waits for its turn is still wanted.
LOOK_SECONDS = 0.5

#: The smaller one goes first.
_Rank = tuple[int, int]


class Turn:
    """The place of one shard in the order. Used by one thread."""

    def __init__(self, order: FeedingOrder, rank: _Rank) -> None:
        self._order = order
        self._rank = rank
        self._granted = threading.Event()
        self._held = False

    def take(self, give_up: Callable[[], bool]) -> bool:
        """Waits until it is this shard's turn, or `give_up` returns True; returns whether it is. A shard of a higher rank that waits
        takes the turn of the lowest one."""
        if self._held and not self._order.outranked(self._rank):
            return True
        self.leave()
        self._granted.clear()
        self._order.enter(self._rank, self._granted)
        while not self._granted.wait(LOOK_SECONDS):
            if give_up() and self._order.withdraw(self._rank):
                return False
        self._held = True
        return True

    def leave(self) -> None:
        """Lets another shard have its turn, until the next `take`."""
        if self._held:
            self._held = False
            self._order.leave(self._rank)


class FeedingOrder:
    """A few shards at a time have their turn. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._shards = FOLDER_SHARDS
        self._feeding: list[_Rank] = []
        self._waiting: list[tuple[_Rank, threading.Event]] = []

    def turn(self, priority: int, *, remote: bool) -> Turn:
        """The place of a shard that was claimed now. `remote`: a network lies before its store."""
        with self._lock:
            if remote:
                self._shards = S3_SHARDS
            return Turn(self, (-priority, next(self._count)))

    def enter(self, rank: _Rank, granted: threading.Event) -> None:
        with self._lock:
            heapq.heappush(self._waiting, (rank, granted))
            self._grant()

    def leave(self, rank: _Rank) -> None:
        with self._lock:
            self._feeding.remove(rank)
            self._grant()

    def withdraw(self, rank: _Rank) -> bool:
        """Ends a wait; False: the turn has been granted."""
        with self._lock:
            left = [entry for entry in self._waiting if entry[0] != rank]
            found = len(left) < len(self._waiting)
            self._waiting = left
            heapq.heapify(self._waiting)
            return found

    def outranked(self, rank: _Rank) -> bool:
        """Whether a shard that has its turn has to let a higher one go first."""
        with self._lock:
            return bool(self._waiting) and self._waiting[0][0] < rank and rank == max(self._feeding)

    def _grant(self) -> None:
        while self._waiting and len(self._feeding) < self._shards:
            rank, granted = heapq.heappop(self._waiting)
            self._feeding.append(rank)
            granted.set()
