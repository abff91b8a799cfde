"""Who may come in: slots of the pipeline, a bounded queue before them, and a refusal that says when to
come back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from pipelines.serving.errors import ApiError, unavailable

_MAX_RETRY_SECONDS = 60
#: Weight of the last request in the mean time of a slot.
_LATEST = 0.1


class AdmissionQueue:
    """Hands out slots in the order of arrival. Used on the event loop only."""

    def __init__(self, slots: int, waiting_room: int) -> None:
        self._slots = slots
        self._room = waiting_room
        self._queue: deque[asyncio.Future[None]] = deque()
        self._mean_seconds = 1.0
        #: Is called with the seconds that each request waited for its slot.
        self.admitted: Callable[[float], None] = lambda _seconds: None
        self.running = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the next one has to wait."""
        return self.running >= self._slots

    def resize(self, slots: int) -> None:
        """Sets the number of slots; what waits comes in where there are more, and nothing that runs is
        sent away where there are fewer."""
        self._slots = slots
        self._let_in()

    def check_open(self) -> None:
        """Raises `ApiError` (503) once closed."""
        if self.closed:
            raise unavailable("The server is shutting down.", "shutting_down")

    async def admit(
        self, since: float | None = None, patience_seconds: float | None = None, *, under_way: bool = False
    ) -> Permit:
        """A slot, at once or after those who came before; being cancelled gives it up.

        `since` is when the request's first byte came, by the monotonic clock; None: now. Who has
        `patience_seconds` is refused if it would wait for longer, judged by the mean time of a slot, and
        once it has waited for so long. `under_way`: the next part of what came in earlier, which is
        finished also once the queue is closed.

        Raises `ApiError`: 429 when the queue is full, 503 once closed.
        """
        if not under_way:
            self.check_open()
        since = time.monotonic() if since is None else since
        if self.full:
            impatient = patience_seconds is not None and self._expected_seconds() > patience_seconds
            if impatient or len(self._queue) >= self._room:
                raise self._refusal()
            await self._turn(patience_seconds)
        else:
            self.running += 1
        permit = Permit(self, since)
        self.admitted(permit.began_at - since)
        return permit

    async def _turn(self, patience_seconds: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout(patience_seconds):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn in self._queue:
                self._queue.remove(turn)
            elif turn.done() and not turn.cancelled():
                self.running -= 1
                self._let_in()
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def leave(self, seconds: float) -> None:
        """Gives a slot back that was held for so long."""
        self._mean_seconds += _LATEST * (seconds - self._mean_seconds)
        self.running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._queue and not self.full:
            turn = self._queue.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    def _refusal(self) -> ApiError:
        seconds = str(min(max(math.ceil(self._expected_seconds()), 1), _MAX_RETRY_SECONDS))
        message = f"All {self._slots} slots are taken and {len(self._queue)} requests wait. Try again after {seconds} s."
        return ApiError(429, message, "rate_limit_exceeded", headers={"retry-after": seconds})

    def _expected_seconds(self) -> float:
        """How long the next one would wait."""
        return self._mean_seconds * (len(self._queue) + 1) / self._slots


class Permit:
    """One slot, held by the connection and by what it started in the pipeline; the last one to let go
    gives it back."""

    def __init__(self, gate: AdmissionQueue, since: float) -> None:
        self._gate = gate
        self._holders = 1
        self._connected = True
        #: When the request's first byte came, and when it got its slot.
        self.since = since
        self.began_at = time.monotonic()

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        """What the connection does when it is over, or earlier: once all that it started is made. May be
        called more than once."""
        if self._connected:
            self._connected = False
            self.release()

    def release(self) -> None:
        """Ends one `hold`."""
        self._holders -= 1
        if not self._holders:
            self._gate.leave(time.monotonic() - self.began_at)
