"""Who enters the engine when: under load newcomers come in groups, since a step that holds a prompt delays every sequence in it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

#: A group is as large as this share of the sequences inside, so a few sequences never wait for company.
GROUP_SHARE = 32
#: No group is waited for longer than this after the last one.
GATHER_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Newcomer:
    sequences: int
    at_once: bool
    entered: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """The engine's places, to be used on one event loop. They are given in the order of coming."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._inside = 0
        self._waiting: deque[_Newcomer] = deque()
        self._last_entry = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def inside(self) -> int:
        """Sequences that hold a place."""
        return self._inside

    @asynccontextmanager
    async def places(self, sequences: int, at_once: bool) -> AsyncGenerator[None]:
        """Holds places for so many sequences; `at_once` takes them, and lets all before it in, as soon as they are free."""
        newcomer = _Newcomer(sequences, at_once)
        self._waiting.append(newcomer)
        self._admit()
        try:
            await newcomer.entered
            yield
        finally:
            if newcomer in self._waiting:
                self._waiting.remove(newcomer)
            else:
                self._inside -= sequences
            self._admit()

    def _admit(self) -> None:
        """Lets a group in when it is there, or sees to it that it is not waited for too long."""
        ready = self._ready()
        if not ready:
            return
        loop = asyncio.get_running_loop()
        wait = self._last_entry + GATHER_SECONDS - loop.time()
        together = sum(newcomer.sequences for newcomer in ready)
        if wait > 0 and together < self._inside // GROUP_SHARE and not any(newcomer.at_once for newcomer in ready):
            if self._timer is None:
                self._timer = loop.call_later(wait, self._enter)
            return
        self._enter()

    def _enter(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for newcomer in self._ready():
            self._waiting.popleft()
            self._inside += newcomer.sequences
            if not newcomer.entered.done():
                newcomer.entered.set_result(None)
        self._last_entry = asyncio.get_running_loop().time()

    def _ready(self) -> list[_Newcomer]:
        """The first newcomers that there are places for; at least one when nobody is inside, however many places it wants."""
        ready: list[_Newcomer] = []
        free = self._places - self._inside
        for newcomer in self._waiting:
            if newcomer.sequences > free and (ready or self._inside):
                break
            ready.append(newcomer)
            free -= newcomer.sequences
        return ready
