"""Admission to vLLM: order, places, and groups under load. The loop's clock stands still unless a test moves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack

from pipelines.vllm_engine.admission import GATHER_SECONDS, GROUP_SHARE, Admission


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is moved by hand."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Stage:
    """An admission and the sequences that came to it."""

    def __init__(self, loop: StillLoop, places: int) -> None:
        self.loop = loop
        self.admission = Admission(places)
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, *names: str, sequences: int = 1, at_once: bool = False) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name, sequences, at_once))
        await self.settle()

    async def fill(self, *names: str) -> None:
        """So many that later ones wait for company; the last of these enter now."""
        await self.come(*names)
        await self.wait(GATHER_SECONDS)
        assert set(self.entered) == set(names)

    async def leave(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        self.loop.now += seconds
        await self.settle()

    async def _stay(self, name: str, sequences: int, at_once: bool) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.admission.places(sequences, at_once))
            self.entered.append(name)
            await self._ends[name].wait()


def played(scene: Callable[[Stage], Coroutine[None, None, None]], places: int) -> None:
    loop = StillLoop()
    stage = Stage(loop, places)

    async def tidied() -> None:
        try:
            await scene(stage)
        finally:
            for task in stage.tasks.values():
                task.cancel()
            await asyncio.gather(*stage.tasks.values(), return_exceptions=True)

    try:
        loop.run_until_complete(tidied())
        assert stage.admission.inside == 0
    finally:
        loop.close()


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def test_few_sequences_never_wait_for_company() -> None:
    async def scene(stage: Stage) -> None:
        for name in names("a", GROUP_SHARE):
            await stage.come(name)
            assert stage.entered[-1] == name

    played(scene, 2 * GROUP_SHARE)


def test_a_full_engine_lets_nobody_in_until_somebody_leaves_and_then_in_order() -> None:
    async def scene(stage: Stage) -> None:
        await stage.come("a", "b", "c", "d")
        assert stage.entered == ["a", "b"]
        await stage.leave("b")
        assert stage.entered == ["a", "b", "c"]
        await stage.leave("a", "c")
        assert stage.entered == ["a", "b", "c", "d"]

    played(scene, 2)


def test_under_load_newcomers_enter_in_groups() -> None:
    async def scene(stage: Stage) -> None:
        inside = names("a", 4 * GROUP_SHARE)
        await stage.fill(*inside)
        await stage.come(*names("b", 9))
        for left in inside[:2]:
            await stage.leave(left)
            assert len(stage.entered) == len(inside)
        await stage.leave(inside[2])
        assert stage.entered[-3:] == ["b0", "b1", "b2"]
        assert stage.admission.inside == len(inside)

    played(scene, 4 * GROUP_SHARE)


def test_a_group_that_does_not_come_together_is_not_waited_for() -> None:
    async def scene(stage: Stage) -> None:
        await stage.fill(*names("a", 4 * GROUP_SHARE))
        await stage.come("late")
        await stage.wait(GATHER_SECONDS / 2)
        assert "late" not in stage.entered
        await stage.wait(GATHER_SECONDS / 2)
        assert stage.entered[-1] == "late"

    played(scene, 8 * GROUP_SHARE)


def test_who_is_heard_while_it_grows_enters_at_once_with_all_before_it() -> None:
    async def scene(stage: Stage) -> None:
        await stage.fill(*names("a", 4 * GROUP_SHARE))
        await stage.come("first")
        assert "first" not in stage.entered
        await stage.come("stream", at_once=True)
        assert set(stage.entered[-2:]) == {"first", "stream"}

    played(scene, 8 * GROUP_SHARE)


def test_who_gives_up_waiting_gives_its_place_to_the_next() -> None:
    async def scene(stage: Stage) -> None:
        await stage.come("a", "b", "c")
        stage.tasks["b"].cancel()
        await stage.leave("a")
        assert stage.entered == ["a", "c"]
        assert stage.admission.inside == 1

    played(scene, 1)


def test_who_gives_up_at_the_moment_of_its_entry_frees_the_place() -> None:
    async def scene(stage: Stage) -> None:
        await stage.come("a", "b", "c")
        stage._ends["a"].set()
        # "a" lets "b" in before "b" has heard that it is cancelled.
        await asyncio.sleep(0)
        stage.tasks["b"].cancel()
        await stage.settle()
        assert "b" not in stage.entered
        assert stage.entered[-1] == "c"

    played(scene, 1)


def test_a_pair_enters_whole() -> None:
    async def scene(stage: Stage) -> None:
        await stage.come("a", "b")
        await stage.come("pair", sequences=2)
        await stage.come("c")
        await stage.leave("a")
        assert stage.entered == ["a", "b"]
        await stage.leave("b")
        assert stage.entered == ["a", "b", "pair"]
        await stage.leave("pair")
        assert stage.entered == ["a", "b", "pair", "c"]

    played(scene, 2)


def test_a_pair_enters_an_empty_engine_that_has_too_few_places_for_it() -> None:
    async def scene(stage: Stage) -> None:
        await stage.come("pair", sequences=2)
        assert stage.entered == ["pair"]

    played(scene, 1)
