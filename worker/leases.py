"""The leases of this process: renewed by heartbeats, and given up if they are lost or the worker drains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from jobs.ledger.records import LASTING_OUTAGES, Lease, Ticket
from pipelines.errors import ErrorCode, NightjarError


class Clock(Protocol):
    """A monotonic clock in seconds, for waits inside a worker: the module `time`, except in tests. Leases expire by the
    ledger's clock."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


T = TypeVar("T")
#: Called with each error before a retry.
OnRetry = Callable[[NightjarError], None]

#: Errors that a network or disk may temporarily report for an intact object.
POSSIBLY_TEMPORARY = frozenset({ErrorCode.STORE_MISSING, ErrorCode.STORE_CONFLICT})
#: Retries after such errors; with their pauses they take more than three seconds.
MAX_REREADS = 5
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 5.0


#: Why the work under a lease must stop: another worker has the shard, or its job was cancelled; no heartbeat reached the
#: ledger in time; the worker drains and gives the shard back; or the job was paused, and items that were not started are
#: given back.
GoneReason = Literal["lost", "expired", "drained", "paused"]


#: How a run of a shard ended. `lost`: another worker has the shard, or its job was cancelled. `released`: given back because
#: the worker drains or the job was paused; done items stay done. `refused`: given back because this worker cannot run the
#: shard and another one may. `failed`: an error ended the work on the whole shard.
ShardEnd = Literal["finished", "lost", "released", "refused", "failed"]


class LeaseGoneError(Exception):
    """The lease has ended, so its work must stop."""

    def __init__(self, reason: GoneReason) -> None:
        super().__init__(reason)
        self.reason: GoneReason = reason


@dataclass(eq=False)
class HeldLease:
    """A lease whose shard runs in this process. `gone` is set once and never reset."""

    lease: Lease
    _lease_seconds: float
    _clock: Clock
    _on_retry: OnRetry
    #: Called after the lease was given up, perhaps more than once.
    on_gone: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        #: When the last heartbeat that reached the ledger was sent.
        self.renewed_at = self._clock.monotonic()
        self._gone: GoneReason | None = None
        self._lock = threading.Lock()

    @property
    def gone(self) -> GoneReason | None:
        """Why the work must stop; None while it can continue."""
        if self._gone is None and self._clock.monotonic() - self.renewed_at > self._lease_seconds:
            self.give_up("expired")
        return self._gone

    def give_up(self, reason: GoneReason) -> None:
        with self._lock:
            self._gone = self._gone or reason
        self.on_gone()

    def check(self) -> None:
        """Raises `LeaseGoneError` if the work must stop."""
        if (reason := self.gone) is not None:
            raise LeaseGoneError(reason)

    def retrying(self, call: Callable[[], T], rereads: int = 0) -> T:
        """The result of `call`, retried with growing pauses after retryable errors until the lease ends.

        A missing or changed object is read again up to `rereads` times. After a drain has ended the lease, `call` is
        tried once, to save finished work. Raises errors that are not retryable or that a person must correct, and
        `LeaseGoneError` if the lease ends first.
        """
        if (reason := self.gone) is not None and reason != "drained":
            raise LeaseGoneError(reason)
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                return call()
            except NightjarError as error:
                if error.code in POSSIBLY_TEMPORARY and rereads:
                    rereads -= 1
                elif not error.code.retryable or error.code in LASTING_OUTAGES:
                    raise
                self._on_retry(error)
            # The pause is no longer than the lease.
            deadline = self._clock.monotonic() + pause_seconds
            while self.gone is None and (left := deadline - self._clock.monotonic()) > 0:
                self._clock.sleep(min(left, 0.1))
            self.check()
            pause_seconds = min(pause_seconds * 2, LONGEST_RETRY_SECONDS)


@dataclass(eq=False)
class HeldLeases:
    """All leases of this process, for heartbeats and draining. Thread-safe."""

    lease_seconds: float
    clock: Clock
    on_retry: OnRetry = lambda _: None

    def __post_init__(self) -> None:
        self._held: dict[Ticket, HeldLease] = {}
        self._lock = threading.Lock()
        self._draining = False

    def hold(self, lease: Lease) -> HeldLease:
        held = HeldLease(lease, self.lease_seconds, self.clock, self.on_retry)
        with self._lock:
            self._held[lease.ticket] = held
        if self._draining:
            held.give_up("drained")
        return held

    def drop(self, held: HeldLease) -> None:
        with self._lock:
            self._held.pop(held.lease.ticket, None)

    def tickets(self) -> list[Ticket]:
        """The tickets of the leases that a heartbeat extends; leases that were given up expire or are released."""
        with self._lock:
            return [ticket for ticket, held in self._held.items() if held.gone is None]

    def renewed(self, tickets: Collection[Ticket], lost: Collection[Ticket], at: float) -> None:
        """Processes the answer to a heartbeat that was sent for these leases at `at`, by the clock of this process."""
        with self._lock:
            held = [self._held[ticket] for ticket in tickets if ticket in self._held]
        for one in held:
            if one.lease.ticket in lost:
                one.give_up("lost")
            else:
                one.renewed_at = max(one.renewed_at, at)

    def drain(self) -> None:
        """Gives up all leases, also those that are added later."""
        with self._lock:
            self._draining = True
            held = list(self._held.values())
        for one in held:
            one.give_up("drained")

    def __len__(self) -> int:
        return len(self._held)
