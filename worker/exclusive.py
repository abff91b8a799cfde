"""A lock for shards: a shard whose next crash would fail its items runs with no other beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

POLL_SECONDS = 0.2


class ExclusiveLock:
    """Many may hold it together, or one alone. Who waits to be alone goes before those who come later. Thread-safe."""

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
        """Waits for the lock and holds it inside the block. Yields False, without the lock, when `give_up` returns True."""
        if not self._enter(alone, give_up):
            yield False
            return
        try:
            yield True
        finally:
            with self._changed:
                self._running -= 1
                self._taken_alone = False
                self._changed.notify_all()

    def _enter(self, alone: bool, give_up: Callable[[], bool]) -> bool:
        with self._changed:
            self._waiting += alone
            try:
                while not self._free(alone):
                    if give_up():
                        return False
                    self._changed.wait(POLL_SECONDS)
            finally:
                self._waiting -= alone
                self._changed.notify_all()
            self._running += 1
            self._taken_alone = alone
            return True

    def _free(self, alone: bool) -> bool:
        if alone:
            return self._running == 0
        return not self._taken_alone and self._waiting == 0
