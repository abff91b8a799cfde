"""Admission of requests: slots of the pipeline, a bounded queue, and a refusal that says when to retry."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipelines.serving.errors import ApiError, unavailable

#: Maximum time that a refusal asks the client to wait.
_MAX_RETRY_SECONDS = 60
#: Weight of the newest request in the moving average of the time that a slot is held.
_NEWEST_WEIGHT = 0.1


@dataclass(eq=False, slots=True)
class AdmissionQueue:
    """Assigns slots in the order of arrival. Used on the event loop only."""

    slots: int
    waiting_room: int
    #: Called for each admitted request with the seconds that it waited.
    admitted: Callable[[float], None] = lambda _seconds: None
    running: int = 0
    closed: bool = False
    _queue: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])
    _mean_seconds: float = 1.0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the next request has to wait."""
        return self.running >= self.slots

    def resize(self, slots: int) -> None:
        """Sets the number of slots. More slots admit waiting requests; fewer never stop running ones."""
        self.slots = slots
        self._admit_waiting()

    def check_open(self) -> None:
        """Raises `ApiError` (503) once closed."""
        if self.closed:
            raise unavailable("The server is shutting down.", "shutting_down")

    async def admit(
        self, since: float | None = None, max_wait_seconds: float | None = None, *, continuing: bool = False
    ) -> Permit:
        """Returns a slot, after waiting in the order of arrival if none is free. Cancelling the call gives
        the slot back.

        `since`: the arrival of the request's first byte, by the monotonic clock; None: now.
        `max_wait_seconds`: a request is refused if it is expected to wait longer, by the mean time of a slot,
        or has waited that long. `continuing`: the request is the next part of an admitted one, and is
        admitted even after the queue is closed.

        Raises `ApiError`: 429 when the queue is full, 503 once closed.
        """
        if not continuing:
            self.check_open()
        since = time.monotonic() if since is None else since
        if self.full:
            too_long = max_wait_seconds is not None and self._expected_seconds() > max_wait_seconds
            if too_long or len(self._queue) >= self.waiting_room:
                raise self._refusal()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(waiter)
            try:
                async with asyncio.timeout(max_wait_seconds):
                    await waiter
            except (TimeoutError, asyncio.CancelledError) as error:
                if waiter in self._queue:
                    self._queue.remove(waiter)
                elif waiter.done() and not waiter.cancelled():
                    self.running -= 1
                    self._admit_waiting()
                if isinstance(error, TimeoutError):
                    raise self._refusal() from None
                raise
        else:
            self.running += 1
        permit = Permit(self, since)
        self.admitted(permit.began_at - since)
        return permit

    def leave(self, seconds: float) -> None:
        """Gives back a slot that was held for `seconds`."""
        self._mean_seconds += _NEWEST_WEIGHT * (seconds - self._mean_seconds)
        self.running -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._queue and not self.full:
            waiter = self._queue.popleft()
            if not waiter.done():
                self.running += 1
                waiter.set_result(None)

    def _refusal(self) -> ApiError:
        seconds = str(min(math.ceil(self._expected_seconds()), _MAX_RETRY_SECONDS))
        return ApiError(
            429,
            f"All {self.slots} slots are taken and {len(self._queue)} requests wait. Try again after {seconds} s.",
            "rate_limit_exceeded",
            headers={"retry-after": seconds},
        )

    def _expected_seconds(self) -> float:
        """How long the next request is expected to wait."""
        return self._mean_seconds * (len(self._queue) + 1) / self.slots


@dataclass(eq=False, slots=True)
class Permit:
    """One slot, held by the connection and by its requests in the pipeline. The last holder gives it back."""

    _admission: AdmissionQueue
    #: Arrival of the request's first byte, and time of its admission.
    since: float
    began_at: float = field(default_factory=time.monotonic)
    _holders: int = 1
    _connected: bool = True

    def hold(self) -> None:
        self._holders += 1

    def disconnect(self) -> None:
        """Ends the connection's hold, when the connection ends or all of its speech is made. May be called
        more than once."""
        if self._connected:
            self._connected = False
            self.release()

    def release(self) -> None:
        """Ends one `hold`."""
        self._holders -= 1
        if not self._holders:
            self._admission.leave(time.monotonic() - self.began_at)
