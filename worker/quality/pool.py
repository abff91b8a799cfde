"""The pool of meter processes. Draws that have to be measured wait here, and the engine goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np
import structlog

from jobs.checks import Option
from pipelines.errors import ErrorCode, ModelError, NightjarError
from worker.quality.metrics import Readings, Utterance
from worker.quality.process import MeterError, MeterHangError, MeterProcess
from worker.quality.spool import Spool, SpooledSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

#: The maximum number of draws whose samples wait in memory; those of others wait in a file.
IN_MEMORY = 64
#: When meters hang on so many items without an answer in between, the fault is the meters' and not the items'.
HANGS_IN_A_ROW = 3
#: The maximum number of outages without an answer in between. Later hangs count for the items again; a job whose last items all hang
#: would never end otherwise.
OUTAGES_IN_A_ROW = 5


class MeterHost(Protocol):
    """What measures: a process, or in a test this thread."""

    def measure(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings: ...

    def stop(self) -> None:
        """Ends the current measurement, from another thread, and refuses later ones."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MeterTask:
    """A draw to measure."""

    meters: Mapping[str, Mapping[str, Option]]
    utterance: Utterance
    #: Whether nobody wants the result any more.
    abandoned: Callable[[], bool] = lambda: False
    #: The item whose draw it is, the same in all its attempts.
    item: str = ""


class Measured(NamedTuple):
    """The result of a task. The samples come back with it, because only the pool kept them."""

    #: float32 [samples].
    samples: NDArray[np.float32]
    readings: Readings


@dataclass(slots=True)
class _Hangs:
    """Hangs since the last answer."""

    items: set[str] = field(default_factory=set[str])
    #: How many of them were reported as an outage.
    outages: int = 0


class Breaker:
    """Tells meters that hang on every item from an item on which the meters hang."""

    def __init__(self) -> None:
        self._hung: dict[bytes, _Hangs] = {}
        self._lock = threading.Lock()

    def answered(self, meters: Mapping[str, Mapping[str, Option]]) -> None:
        with self._lock:
            self._hung.pop(msgspec.json.encode(meters), None)

    def hung(self, meters: Mapping[str, Mapping[str, Option]], item: str) -> bool:
        """Records a hang. Returns whether it is an outage: the meters hung on too many items since their last answer."""
        with self._lock:
            hangs = self._hung.setdefault(msgspec.json.encode(meters), _Hangs())
            hangs.items.add(item)
            if len(hangs.items) < HANGS_IN_A_ROW or hangs.outages >= OUTAGES_IN_A_ROW:
                return False
            hangs.outages += 1
            return True


class MeterPool:
    """Meter processes, with one thread for each. `submit` never waits: a slow meter delays items, not the engine.

    The number of waiting draws is bounded by the shards in flight. Memory holds the samples of the first `in_memory`, files hold the
    others'. After hangs on `HANGS_IN_A_ROW` items in a row a hang is an outage (`model.unreachable`), until the meters answer again or
    `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(self, processes: int = 1, *, in_memory: int = IN_MEMORY, open_host: Callable[[], MeterHost] = MeterProcess) -> None:
        self._in_memory = in_memory
        self._open_host = open_host
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="meter")
        self._hosts: dict[int, MeterHost] = {}
        self._spool = Spool()
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._waiting = 0
        self._closing = False

    @property
    def waiting(self) -> int:
        """Draws that no meter has begun to measure."""
        return self._waiting

    def submit(self, task: MeterTask) -> Future[Measured]:
        """Measures a draw. The future raises `MeterError` or `ModelError` as `MeterProcess.measure` does, `ModelError` for an outage,
        and `CancelledError` where the task was abandoned or the pool was closed first.

        Raises `StoreError` (`store.full`, `store.forbidden`) where the samples have to wait in a file and cannot.
        """
        spooled = None
        if self._waiting >= self._in_memory:
            spooled = self._spool.put(task.utterance.samples)
            task = replace(task, utterance=replace(task.utterance, samples=np.empty(0, np.float32)))
        with self._lock:
            if not self._closing:
                self._waiting += 1
                return self._threads.submit(self._measured, task, spooled)
        dropped: Future[Measured] = Future()
        dropped.cancel()
        return dropped

    def close(self) -> None:
        """Cancels what waits and what is measured now, and ends the processes."""
        with self._lock:
            self._closing = True
        for host in self._hosts.values():
            host.stop()
        self._threads.shutdown(cancel_futures=True)
        for host in self._hosts.values():
            host.close()
        self._spool.close()

    def _measured(self, task: MeterTask, spooled: SpooledSamples | None) -> Measured:
        with self._lock:
            self._waiting -= 1
        utterance = task.utterance
        if spooled is not None:
            utterance = replace(utterance, samples=self._spool.take(spooled))
        if task.abandoned():
            raise CancelledError
        try:
            readings = self._host().measure(task.meters, utterance)
        except NightjarError as error:
            self._raise(task, error)
        except Exception as error:
            log.exception("meter failed")
            self._raise(task, MeterError(f"A meter failed: {error!r}"))
        self._breaker.answered(task.meters)
        return Measured(utterance.samples, readings)

    def _host(self) -> MeterHost:
        """The host of this thread."""
        with self._lock:
            if self._closing:
                raise CancelledError
            thread = threading.get_ident()
            if thread not in self._hosts:
                self._hosts[thread] = self._open_host()
            return self._hosts[thread]

    def _raise(self, task: MeterTask, error: NightjarError) -> NoReturn:
        """Raises the error, or an outage in its place after too many hangs."""
        if self._closing:
            # The measurement was cut short, which says nothing about the draw.
            raise CancelledError
        if not isinstance(error, MeterHangError):
            if not isinstance(error, ModelError):
                self._breaker.answered(task.meters)
            raise error
        if not self._breaker.hung(task.meters, task.item):
            raise error
        log.error("meters hang", meters=list(task.meters), error=error.message)
        raise ModelError(
            ErrorCode.MODEL_UNREACHABLE,
            f"The meters {', '.join(task.meters)} hung on {HANGS_IN_A_ROW} items in a row: {error.message}",
            "Items wait until the meters answer again. A smaller model or more cores may help.",
        )
