"""The items of one lease on their way: waiting to be fed, in the engine, being stored, settled."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import structlog

from jobs.dialogue import spoken_text
from jobs.ledger.records import Failed, Outcome
from jobs.ledger.states import LASTING_OUTAGES
from jobs.shard_file import ShardLine
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError
from pipelines.request import Pipeline, Speech, SynthesisRequest
from worker.leases import Clock, HeldLease
from worker.quality.verdict import REDRAWN, History
from worker.result_writer import SpeechToStore, Storer


class EngineMeter:
    """Shares out the time of an engine: while n requests are in it, each of them pays a n-th of the time.

    All shares together are the time in which the engine had work, whatever the batch was. After fair queueing's virtual
    time (Demers, Keshav and Shenker, 1989): it runs at 1/n, and a request's share is how far it ran meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = 0
        self._virtual_seconds = 0.0
        self._read_at = clock.monotonic()

    def enter(self) -> float:
        """A request goes in; the mark to leave with."""
        with self._lock:
            mark = self._advance()
            self._requests += 1
            return mark

    def leave(self, mark: float) -> float:
        """The request that went in at `mark` is out; its share in milliseconds."""
        with self._lock:
            share = self._advance() - mark
            self._requests -= 1
            return share * 1000

    def _advance(self) -> float:
        now = self._clock.monotonic()
        if self._requests:
            self._virtual_seconds += (now - self._read_at) / self._requests
        self._read_at = now
        return self._virtual_seconds


log = structlog.get_logger(__name__)

ROOM_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Turn:
    """One draw of a line that is to be made."""

    line: ShardLine
    draw: int
    history: History = field(default_factory=History)


@dataclass(slots=True)
class _InEngine:
    request_id: str
    #: By our clock.
    started_at: float
    #: Of the engine's meter.
    mark: float
    #: The item's draws before this one.
    history: History


class ShardWork:
    """Feeds the lines of a shard to a pipeline from a thread of its own and collects one outcome for every line.

    `build` turns a line and the number of its draw into its request, or raises a `NightjarError` that becomes the line's
    outcome. A line whose draw did not pass its checks is fed again with the next one, before lines that were not fed yet.
    `drawn_before` counts the draws of items that a person opened again.
    """

    def __init__(
        self,
        held: HeldLease,
        lines: Sequence[ShardLine],
        build: Callable[[ShardLine, int], SynthesisRequest],
        *,
        pipeline: Pipeline,
        storer: Storer,
        store: ObjectStore,
        clock: Clock,
        meter: EngineMeter,
        wake_at: int,
        drawn_before: Mapping[int, int] | None = None,
    ) -> None:
        self._held = held
        self._lines = lines
        self._build = build
        self._pipeline = pipeline
        self._storer = storer
        self._store = store
        self._clock = clock
        self._meter = meter
        self._wake_at = wake_at
        self._drawn_before = drawn_before or {}
        quality = held.lease.job.spec.quality
        self._checked = quality is not None
        self._draws = 1 if quality is None else quality.draws
        self._by_index = {line.index: line for line in lines}
        self._again: deque[_Turn] = deque()
        self._changed = threading.Condition()
        self._unsettled = {line.index for line in lines}
        #: By index, oldest first.
        self._in_engine: dict[int, _InEngine] = {}
        self._submitting: int | None = None
        #: Whether the feeder has taken a line that may not be in the engine yet.
        self._feeding = False
        self._outcomes: list[Outcome] = []
        #: Out of the engine and not yet settled.
        self._storing: set[int] = set()
        self._halted = False
        #: No more is fed; what is in the engine may finish.
        self._winding_down = False
        self._closed = False
        self._error: BaseException | None = None
        in_context = contextvars.copy_context().run
        self._feeder = threading.Thread(target=in_context, args=(self._feed,), name=f"feeder-{held.lease.shard_no}", daemon=True)

    def start(self) -> None:
        self._held.on_gone(self._wake)
        self._feeder.start()

    @property
    def over(self) -> bool:
        """Whether the work has ended, and takes no outcome any more."""
        return self._closed or self._error is not None

    @property
    def finished(self) -> bool:
        """Whether every line has its outcome and every outcome was taken; once it winds down, every line that was begun."""
        with self._changed:
            return not self._outcomes and not (self._begun if self._winding_down else self._unsettled)

    @property
    def unfinished(self) -> bool:
        """Whether lines have no outcome."""
        return bool(self._unsettled)

    @property
    def _begun(self) -> bool:
        """Whether lines are on their way: in the engine, in a call of `submit`, or out of the engine and not yet settled."""
        return bool(self._in_engine or self._storing or self._feeding)

    def wind_down(self) -> None:
        """Feeds no more: lines that were not begun, and draws that would follow, are left without an outcome."""
        with self._changed:
            self._winding_down = True
            self._again.clear()
            self._changed.notify_all()

    def take(self, most: int, due_at: float, poll_seconds: float) -> list[Outcome]:
        """Up to `most` outcomes once a commit is worth it: there are `most`, the shard is through, or it is `due_at`.

        Empty when `poll_seconds` pass first. Raises what ended the work early, such as a full store.
        """
        with self._changed:
            self._changed.wait_for(self._worth_waking, min(poll_seconds, max(0.0, due_at - self._clock.monotonic())))
            if self._error is not None:
                raise self._error
            if not self._worth_waking() and self._clock.monotonic() < due_at:
                return []
            taken, self._outcomes = self._outcomes[:most], self._outcomes[most:]
        return taken

    def put_back(self, outcomes: Sequence[Outcome]) -> None:
        """Outcomes that were taken and could not be committed."""
        with self._changed:
            self._outcomes[:0] = outcomes

    def settle(self, outcome: Outcome) -> None:
        """Takes the outcome of an item; only the first one counts."""
        with self._changed:
            self._storing.discard(outcome.index)
            if outcome.index not in self._unsettled:
                self._changed.notify_all()
                return
            self._unsettled.discard(outcome.index)
            self._outcomes.append(outcome)
            # Told once: whoever takes looks before it waits.
            if self._halted or not self._unsettled or len(self._outcomes) == self._wake_at:
                self._changed.notify_all()

    def forget(self, index: int) -> None:
        with self._changed:
            self._storing.discard(index)
            self._changed.notify_all()

    def redraw(self, index: int, history: History) -> None:
        """Takes an item whose draw did not pass; its next draw is made."""
        with self._changed:
            self._storing.discard(index)
            if index in self._unsettled and not self._winding_down:
                self._again.append(_Turn(self._by_index[index], history.draws[-1].draw + 1, history))
            self._changed.notify_all()

    def interrupt(self, index: int, error: NightjarError) -> None:
        """Ends the whole work with an error that is not the item's own."""
        with self._changed:
            self._storing.discard(index)
            self._error = self._error or error
            self._changed.notify_all()

    def expire(self, timeout_seconds: float) -> bool:
        """Fails items that were in the engine for too long (`synth.timeout`) and aborts their requests.

        Returns whether the engine is stuck: for as long as that it has not even taken the next request.
        """
        started_before = self._clock.monotonic() - timeout_seconds
        late: list[tuple[int, _InEngine]] = []
        with self._changed:
            for index, entry in self._in_engine.items():
                if entry.started_at > started_before:
                    break
                late.append((index, entry))
            engine_ms = {index: self._leave(index) for index, _ in late}
            self._storing.update(engine_ms)
            stuck = any(index == self._submitting for index, _ in late)
        message = f"The item took more than {timeout_seconds:g} s in the engine."
        for index, entry in late:
            # OnDone first: the abort makes the future fail with `synth.aborted`, which then comes too late to count.
            self._fail(index, ErrorCode.SYNTH_TIMEOUT, message, entry.history, engine_ms[index])
            self._pipeline.abort(entry.request_id)
        return stuck

    def close(self, storing_seconds: float) -> list[Outcome]:
        """Ends the work: nothing more is fed, requests in the engine are aborted without an outcome.

        Waits so long for speeches that are being stored, and returns the outcomes that were not taken.
        """
        with self._changed:
            self._halted = True
            request_ids = [entry.request_id for entry in self._in_engine.values()]
            for index in list(self._in_engine):
                self._leave(index)
            self._changed.notify_all()
        for request_id in request_ids:
            self._pipeline.abort(request_id)
        with self._changed:
            self._changed.wait_for(lambda: not self._storing, storing_seconds)
            left, self._outcomes = self._outcomes, []
            self._unsettled.clear()
            self._closed = True
        return left

    def _worth_waking(self) -> bool:
        over = not self._unsettled or (self._winding_down and not self._begun)
        return len(self._outcomes) >= self._wake_at or over or self._error is not None or self._held.gone is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _feed(self) -> None:
        try:
            fresh = deque(self._lines)
            while (turn := self._next(fresh)) is not None:
                while self._storer.full and not self._stopped():
                    self._clock.sleep(ROOM_POLL_SECONDS)
                with self._changed:
                    if self._stopped():
                        return
                    self._feeding = True
                self._feed_one(turn)
                with self._changed:
                    self._feeding = False
                    self._changed.notify_all()
        except Exception as error:
            log.exception("feeder failed")
            self._error = error
            self._wake()

    def _next(self, fresh: deque[ShardLine]) -> _Turn | None:
        """The next draw to feed; waits while items may still want another one. None once there is nothing more to come."""
        with self._changed:
            if not self._again and not fresh and self._draws > 1:
                self._changed.wait_for(lambda: self._again or not self._unsettled or self._stopped())
            if self._again:
                return self._again.popleft()
        if not fresh:
            return None
        line = fresh.popleft()
        return _Turn(line, self._drawn_before.get(line.index, 0))

    def _stopped(self) -> bool:
        return self._halted or self._winding_down or self._error is not None or self._held.gone is not None

    def _feed_one(self, turn: _Turn) -> None:
        index = turn.line.index
        try:
            request = self._build(turn.line, turn.draw)
            self._start_clock(turn, request.request_id)
            self._submitting = index
            future = self._pipeline.submit(request)
        except NightjarError as error:
            with self._changed:
                engine_ms = self._leave(index)
            if error.code in LASTING_OUTAGES:
                self.interrupt(index, error)
            else:
                self._fail(index, error.code, str(error), turn.history, engine_ms)
            return
        finally:
            self._submitting = None
        self._restart_clock(index)
        if self._halted:
            self._pipeline.abort(request.request_id)
        future.add_done_callback(partial(self._answered, turn, request))

    def _start_clock(self, turn: _Turn, request_id: str) -> None:
        with self._changed:
            started = self._clock.monotonic(), self._meter.enter()
            self._in_engine[turn.line.index] = _InEngine(request_id, *started, turn.history)

    def _restart_clock(self, index: int) -> None:
        """`submit` may have waited for room: an item's own time starts when it returns."""
        with self._changed:
            entry = self._in_engine.pop(index, None)
            if entry is not None:
                entry.started_at = self._clock.monotonic()
                self._in_engine[index] = entry

    def _leave(self, index: int) -> float:
        """Takes an item out of the engine's book; its share of the engine's time in milliseconds."""
        entry = self._in_engine.pop(index, None)
        return 0.0 if entry is None else self._meter.leave(entry.mark)

    def _answered(self, turn: _Turn, request: SynthesisRequest, future: Future[Speech]) -> None:
        index = turn.line.index
        error = future.exception()
        # A failure that another seed may mend goes the way of a draw that does not pass its checks.
        redrawn = self._checked and isinstance(error, NightjarError) and error.code in REDRAWN
        with self._changed:
            engine_ms = self._leave(index)
            if self._halted and error is not None:
                return
            # In the same step: at no time is a line that was begun on no book.
            self._storing.add(index)
        if error is None:
            self._storer.submit(self._item(turn, request, future.result(), round(engine_ms)))
        elif not isinstance(error, NightjarError):
            log.error("engine error", index=index, exc_info=error)
            self._fail(index, ErrorCode.SYNTH_ENGINE, f"The engine failed: {error!r}", turn.history, engine_ms)
        elif redrawn:
            self._storer.submit(self._item(turn, request, error, round(engine_ms)))
        else:
            self._fail(index, error.code, str(error), turn.history, engine_ms)

    def _fail(self, index: int, code: ErrorCode, message: str, history: History, engine_ms: float) -> None:
        """Settles an item that failed in the engine; `engine_ms` is its last draw's."""
        self.settle(Failed(index, code, message, history.draws, engine_ms=history.engine_ms + round(engine_ms)))

    def _item(self, turn: _Turn, request: SynthesisRequest, made: Speech | NightjarError, engine_ms: int) -> SpeechToStore:
        line = turn.line
        last = self._drawn_before.get(line.index, 0) + self._draws - 1
        return SpeechToStore(
            self._held,
            self._store,
            line.index,
            line.example_id,
            request,
            made,
            engine_ms,
            self,
            text=spoken_text(line.messages),
            draw=turn.draw,
            last_draw=last,
            sampled=self._pipeline.capabilities.sampling and request.generation.temperature != 0,
            history=turn.history,
        )
