"""Whether anything comes of the requests that are in a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelines.request import EngineStats


class Progress:
    """Calls of the pipeline that are under way, and when one of them, or the engine itself, last came further.

    Counts are changed on the event loop; `is_stuck` may be asked from any thread.
    """

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_seconds = stuck_seconds
        self._clock = clock
        self._under_way = 0
        self._moves = 0
        self._seen: tuple[object, ...] = ()
        self._moved_at = clock()

    def began(self) -> None:
        """A call of the pipeline begins."""
        self._under_way += 1

    def moved(self) -> None:
        """A call gave something."""
        self._moves += 1

    def ended(self) -> None:
        """A call is over, however it ended."""
        self._under_way -= 1
        self._moves += 1

    def is_stuck(self, stats: EngineStats) -> bool:
        """Whether calls are under way and for `stuck_seconds` nothing came of any; to be asked now and then. `stats`: the engine's."""
        now = (self._moves, stats.requests_done, stats.frames, stats.audio_seconds, stats.state)
        if not self._under_way or now != self._seen:
            self._seen, self._moved_at = now, self._clock()
        return self._clock() - self._moved_at >= self._stuck_seconds
