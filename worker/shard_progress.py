"""Where the items of a leased shard are: not begun, in the engine, being written, settled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jobs.ledger.records import Outcome
from jobs.shard_file import ShardLine
from pipelines.request import Handle
from worker.leases import Clock, HeldLease
from worker.quality.verdict import History


class EngineTimer:
    """Shares out the time of an engine: while n requests are in it, each of them pays a n-th of the time.

    The sum of all shares is the time in which the engine had work, whatever the batch was. This is the virtual time of fair queueing
    (Demers, Keshav and Shenker, 1989): it runs at the rate 1/n, and a request's share is how far it ran while the request was there.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = 0
        self._virtual_seconds = 0.0
        self._read_at = clock.monotonic()

    def enter(self) -> float:
        """A request enters the engine. Returns the virtual time, to leave with."""
        with self._lock:
            entered_at = self._advance()
            self._requests += 1
            return entered_at

    def leave(self, entered_at: float) -> float:
        """The request that entered at this virtual time has left; its share in milliseconds."""
        with self._lock:
            share = self._advance() - entered_at
            self._requests -= 1
            return share * 1000

    def _advance(self) -> float:
        now = self._clock.monotonic()
        if self._requests:
            self._virtual_seconds += (now - self._read_at) / self._requests
        self._read_at = now
        return self._virtual_seconds


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """A draw that is to be made."""

    line: ShardLine
    draw: int
    #: The item's draws before this one.
    history: History = field(default_factory=History)


@dataclass(slots=True)
class EngineEntry:
    """A request in the engine."""

    #: By the worker's clock.
    started_at: float
    #: By the engine's timer.
    entered_at: float
    #: The item's draws before this one.
    history: History
    #: What ends it, once the pipeline has taken it.
    handle: Handle | None = None


@dataclass(frozen=True, slots=True)
class LateItem:
    """An item that was in the engine for too long."""

    index: int
    entry: EngineEntry
    engine_ms: float


class ShardProgress:
    """The state of every item of a shard, under one lock. At each moment an item that was begun is in exactly one state.

    The feeder moves items into the engine and out of it, the runner takes their outcomes. `drawn_before` has the number of draws of
    items that a person reopened.
    """

    def __init__(
        self,
        held: HeldLease,
        lines: Sequence[ShardLine],
        *,
        clock: Clock,
        timer: EngineTimer,
        wake_at: int,
        drawn_before: Mapping[int, int] | None = None,
    ) -> None:
        self._held = held
        self._clock = clock
        self._timer = timer
        self._wake_at = wake_at
        self._drawn_before = drawn_before or {}
        quality = held.lease.job.spec.quality
        self._draws = 1 if quality is None else quality.draws
        self._by_index = {line.index: line for line in lines}
        self._fresh = deque(lines)
        self._redraws: deque[PlannedDraw] = deque()
        self._changed = threading.Condition()
        self._unsettled = set(self._by_index)
        #: By index, oldest first.
        self._in_engine: dict[int, EngineEntry] = {}
        self._submitting: int | None = None
        #: Draws that the engine has ended.
        self.answered_items = 0
        #: Whether the feeder has taken a line that may not be in the engine yet.
        self._feeding = False
        #: Items that left the engine and are not settled.
        self._writing: set[int] = set()
        self._outcomes: list[Outcome] = []
        self._halted = False
        #: No more is fed; what is in the engine may finish.
        self._winding_down = False
        self._closed = False
        self._error: BaseException | None = None
        held.on_gone(self._wake)

    @property
    def over(self) -> bool:
        """Whether the work has ended and takes no more outcomes."""
        return self._closed or self._error is not None

    @property
    def halted(self) -> bool:
        """Whether requests are aborted."""
        return self._halted

    @property
    def stopped(self) -> bool:
        """Whether nothing more is fed."""
        return self._halted or self._winding_down or self._error is not None or self._held.gone is not None

    @property
    def finished(self) -> bool:
        """Whether every item has its outcome and every outcome was taken; when it winds down, every item that was begun."""
        with self._changed:
            return not self._outcomes and not (self._begun if self._winding_down else self._unsettled)

    @property
    def unfinished(self) -> bool:
        """Whether items have no outcome."""
        return bool(self._unsettled)

    @property
    def open_items(self) -> int:
        """Items that have not left the engine; those that are not to be fed any more are not counted."""
        return len(self._in_engine) + (0 if self.stopped else len(self._fresh) + len(self._redraws))

    @property
    def writing_items(self) -> int:
        """Items that left the engine and are not settled."""
        return len(self._writing)

    @property
    def _begun(self) -> bool:
        """Whether items are on their way: on their way into the engine, in it, or being written."""
        return bool(self._feeding or self._in_engine or self._writing)

    def only_waits_for(self, stored: int) -> bool:
        """Whether the items that are on their way are as many as wait to be stored together, and no others will come."""
        with self._changed:
            if not self.stopped:
                return len(self._unsettled) <= stored
            # What is aborted does not come.
            coming = not self._halted and (self._feeding or self._in_engine)
            return not coming and len(self._writing) <= stored

    def last_draw(self, index: int) -> int:
        """The number of the last draw that an item may have."""
        return self._drawn_before.get(index, 0) + self._draws - 1

    def wind_down(self) -> None:
        """Feeds no more. Items that were not begun and draws that would follow stay without an outcome."""
        with self._changed:
            self._winding_down = True
            self._redraws.clear()
            self._changed.notify_all()

    def take(self, maximum: int, due_at: float, poll_seconds: float) -> list[Outcome]:
        """Up to `maximum` outcomes when a commit is worth it: there are as many, the shard is finished, or it is `due_at`.

        Empty when `poll_seconds` pass first. Raises the error that ended the work early, such as that of a full store.
        """
        with self._changed:
            self._changed.wait_for(self._worth_waking, min(poll_seconds, max(0.0, due_at - self._clock.monotonic())))
            if self._error is not None:
                raise self._error
            if not self._worth_waking() and self._clock.monotonic() < due_at:
                return []
            taken, self._outcomes = self._outcomes[:maximum], self._outcomes[maximum:]
        return taken

    def put_back(self, outcomes: Sequence[Outcome]) -> None:
        """Returns outcomes that were taken and could not be committed."""
        with self._changed:
            self._outcomes[:0] = outcomes

    def halt(self) -> list[Handle]:
        """Takes everything out of the engine, without outcomes. Returns the requests to cancel."""
        with self._changed:
            self._halted = True
            handles = [entry.handle for entry in self._in_engine.values() if entry.handle is not None]
            for index in list(self._in_engine):
                self._leave(index)
            self._changed.notify_all()
        return handles

    def close(self, writing_seconds: float) -> list[Outcome]:
        """Waits so long for what is being written. Returns the outcomes that were not taken; later ones are dropped."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, writing_seconds)
            left, self._outcomes = self._outcomes, []
            self._unsettled.clear()
            self._closed = True
        return left

    @property
    def has_draw(self) -> bool:
        """Whether `next_draw` has one without waiting."""
        return bool(self._redraws or self._fresh)

    def wait_for_draw(self) -> None:
        """Waits as `next_draw` does, and takes none."""
        with self._changed:
            self._wait_for_draw()

    def next_draw(self) -> PlannedDraw | None:
        """The next draw to make: a redraw before a new item. Waits while items may still need one; None when no more can come."""
        with self._changed:
            self._wait_for_draw()
            if self._redraws:
                return self._redraws.popleft()
            if not self._fresh:
                return None
            line = self._fresh.popleft()
            return PlannedDraw(line, self._drawn_before.get(line.index, 0))

    def begin(self) -> bool:
        """The feeder begins with a draw; False: it is too late for that."""
        with self._changed:
            self._feeding = not self.stopped
            return self._feeding

    def begun(self) -> None:
        """The draw is in the engine, or settled."""
        with self._changed:
            self._feeding = False
            self._changed.notify_all()

    def enter(self, planned: PlannedDraw) -> None:
        """The draw's request goes to the pipeline, which may let it wait for room."""
        with self._changed:
            self._submitting = planned.line.index
            entry = EngineEntry(self._clock.monotonic(), self._timer.enter(), planned.history)
            self._in_engine[planned.line.index] = entry

    def entered(self, index: int, handle: Handle) -> bool:
        """The pipeline has taken the request: an item's own time starts now. False where the item has left the engine meanwhile."""
        with self._changed:
            self._submitting = None
            entry = self._in_engine.pop(index, None)
            if entry is None:
                return False
            entry.started_at = self._clock.monotonic()
            entry.handle = handle
            self._in_engine[index] = entry
            if self._halted:
                self._leave(index)
            return not self._halted

    def refused(self, index: int) -> float:
        """The pipeline has refused the request. Returns the item's share of the engine's time in milliseconds."""
        with self._changed:
            self._submitting = None
            return self._leave(index)

    def answered(self, index: int, *, failed: bool) -> float | None:
        """The item leaves the engine to be written; its share of the engine's time in milliseconds. None for a failure after `halt`."""
        with self._changed:
            engine_ms = self._leave(index)
            if self._halted and failed:
                return None
            # In the same step: at no time is an item that was begun in no state.
            self._writing.add(index)
            self.answered_items += 1
            return engine_ms

    def take_late(self, timeout_seconds: float) -> tuple[list[LateItem], bool]:
        """Takes out of the engine what was in it for too long, to be written. Also returns whether the engine is stuck: it has not
        even accepted the next request for so long."""
        started_before = self._clock.monotonic() - timeout_seconds
        with self._changed:
            entries = [(index, entry) for index, entry in self._in_engine.items() if entry.started_at <= started_before]
            stuck = any(index == self._submitting for index, _ in entries)
            late = [LateItem(index, entry, self._leave(index)) for index, entry in entries]
            self._writing.update(one.index for one in late)
            self.answered_items += len(late)
        return late, stuck

    def settle(self, outcome: Outcome) -> None:
        """Takes the outcome of an item; only the first one counts."""
        with self._changed:
            self._writing.discard(outcome.index)
            if outcome.index not in self._unsettled:
                self._changed.notify_all()
                return
            self._unsettled.discard(outcome.index)
            self._outcomes.append(outcome)
            # Once is enough: whoever takes looks before it waits.
            if self._halted or not self._unsettled or len(self._outcomes) == self._wake_at:
                self._changed.notify_all()

    def redraw(self, index: int, history: History) -> None:
        """The item's draw did not pass its checks: the next one is planned."""
        with self._changed:
            self._writing.discard(index)
            if index in self._unsettled and not self._winding_down:
                self._redraws.append(PlannedDraw(self._by_index[index], history.draws[-1].draw + 1, history))
            self._changed.notify_all()

    def drop(self, index: int) -> None:
        """The item gets no outcome here: its lease was gone before it was stored."""
        with self._changed:
            self._writing.discard(index)
            self._changed.notify_all()

    def fail(self, error: BaseException, index: int | None = None) -> None:
        """Ends the work on the whole shard with an error that is not an item's own."""
        with self._changed:
            if index is not None:
                self._writing.discard(index)
            self._error = self._error or error
            self._changed.notify_all()

    def _wait_for_draw(self) -> None:
        if not self.has_draw and self._draws > 1:
            self._changed.wait_for(lambda: self._redraws or not self._unsettled or self.stopped)

    def _leave(self, index: int) -> float:
        entry = self._in_engine.pop(index, None)
        return 0.0 if entry is None else self._timer.leave(entry.entered_at)

    def _worth_waking(self) -> bool:
        over = not self._unsettled or (self._winding_down and not self._begun)
        return len(self._outcomes) >= self._wake_at or over or self._error is not None or self._held.gone is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
