"""vLLM's engine core: started, watched, and replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import EngineState

log = logging.getLogger(__name__)

#: Engine cores that may die one after the other, with no sequence finished in between, before no further one
#: is started.
MAX_DEATHS = 3
#: Between looks at the engine core.
_LOOK_SECONDS = 0.25


class CoreSupervisor:
    """Keeps one engine core alive. Its methods run on the host's loop; `state`, `llm` and `failure` may be
    read from any thread."""

    def __init__(
        self,
        start: Callable[[], Any],
        changed: threading.Condition,
        outlive_users: Callable[[], Awaitable[None]],
    ) -> None:
        """`start` makes vLLM's `AsyncLLM`. `changed` is notified of a new core and of the end.

        `outlive_users` returns once every sequence of a dead core has failed.
        """
        self._start = start
        self._changed = changed
        self._outlive_users = outlive_users
        #: The living core; None while the next one starts.
        self.llm: Any = None
        #: Why no further core is started.
        self.failure: SynthesisError | None = None
        self._deaths = 0
        self._closing = False
        self._renewed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        with self._changed:
            if self.failure is not None:
                return "broken"
            return "starting" if self.llm is None or self.llm.errored else "ready"

    async def start(self) -> None:
        """Starts an engine core. Raises what vLLM raises."""
        begin = time.monotonic()
        llm = self._start()
        log.info("vLLM's engine core started in %.1f s", time.monotonic() - begin)
        with self._changed:
            self.llm = llm
            self._changed.notify_all()
        self._watch = asyncio.get_running_loop().create_task(self._watch_over(llm))
        self._renewed.set()

    async def living(self) -> Any:
        """The engine core, or the next one where it is dead. Raises `SynthesisError` (`synth.engine`)
        where there will be none."""
        while self.llm is None or self.llm.errored:
            if self.failure is not None:
                raise self.failure
            self.mark_dead(self.llm)
            await self._renewed.wait()
        return self.llm

    def mark_dead(self, llm: Any) -> None:
        """Takes a dead engine core out of use and has a new one started, once."""
        with self._changed:
            if llm is None or self.llm is not llm or self._closing:
                return
            self.llm = None
            self._deaths += 1
            log.error("vLLM's engine core died (%d in a row)", self._deaths)
        self._renewed.clear()
        self._renewal = asyncio.get_running_loop().create_task(self._renew(llm))

    def proved(self) -> None:
        """A sequence finished: earlier deaths count no more."""
        self._deaths = 0

    def close(self) -> None:
        """No core is started any more. May be called from any thread."""
        self._closing = True

    def shut_down(self) -> None:
        """Ends the engine core."""
        if self.llm is not None:
            llm, self.llm = self.llm, None
            llm.shutdown()

    async def _watch_over(self, llm: Any) -> None:
        """Has the engine core replaced when it dies, before a request finds it dead."""
        while not llm.errored:
            await asyncio.sleep(_LOOK_SECONDS)
        self.mark_dead(llm)

    async def _renew(self, dead: Any) -> None:
        """A new engine core, once every sequence of the old one has failed and its processes are gone."""
        try:
            await self._outlive_users()
        finally:
            try:
                dead.shutdown()
            except Exception:
                log.exception("a dead engine core left something behind")
        reason = f"{self._deaths} engine cores died one after the other"
        if self._deaths < MAX_DEATHS and not self._closing:
            try:
                await self.start()
                return
            except Exception as error:
                log.exception("vLLM did not start again")
                reason = f"it did not start again: {type(error).__name__}: {error}"
        with self._changed:
            self.failure = SynthesisError(
                ErrorCode.SYNTH_ENGINE, f"vLLM is given up: {reason}.", "See the log; open the model again."
            )
            self._changed.notify_all()
        self._renewed.set()
