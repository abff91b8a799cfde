"""Loops of tests that end although the rule they wait for is broken."""

from __future__ import annotations

import time
from collections.abc import Callable


def turn_until(done: Callable[[], object], turn: Callable[[], object], rounds: int = 4000) -> None:
    """Calls `turn` until `done`. Fails the test after so many rounds."""
    for _ in range(rounds):
        if done():
            return
        turn()
    raise AssertionError(f"it did not come about in {rounds:,} rounds")


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for what another thread or process does. Fails the test after so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it did not come about in {seconds:g} s"
        time.sleep(0.01)
