"""The meter pool: draws that wait for meters wait here, never in front of the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import msgspec
import structlog

from jobs.checks import Option
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, ModelError
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterHangError, MeterProcess

log = structlog.get_logger(__name__)

#: The maximum number of draws that wait, and of the samples of all that are here, 1 GiB: a draw may be an
#: hour long. Then the engine waits for the meters.
MAX_WAITING, MAX_SAMPLES = 1024, 1 << 28
#: When meters hang on so many items without an answer in between, the fault is the meters' and not the
#: items'.
HANGS_IN_A_ROW = 3
#: The maximum number of outages without an answer in between. Later hangs count for the items again; a job
#: whose last items all hang would never end otherwise.
OUTAGES_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class MeterTask:
    """A draw to measure."""

    meters: Mapping[str, Mapping[str, Option]]
    utterance: Utterance
    #: Whether nobody wants the result any more.
    abandoned: Callable[[], bool] = lambda: False
    #: The item whose draw it is, the same in all its attempts.
    item: str = ""


class MeterPool:
    """Meter processes, with one thread for each. `submit` never waits: a slow meter delays items, not the
    engine.

    Whoever feeds the engine stops while the pool is `full`. After hangs on `HANGS_IN_A_ROW` items in a row a hang is an outage
    (`model.unreachable`), until the meters answer again or `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(self, processes: int = 1, *, open_host: Callable[[], MeterProcess] = MeterProcess) -> None:
        self._threads = DaemonThreads(processes, "meter")
        self._hosts = [open_host() for _ in range(processes)]
        self._idle: queue.SimpleQueue[MeterProcess] = queue.SimpleQueue()
        for host in self._hosts:
            self._idle.put(host)
        #: By meters: items on which they hung since their last answer, and how many outages were reported.
        self._hung: dict[bytes, tuple[set[str], int]] = {}
        self._lock = threading.Lock()
        #: Of the draws that wait or are measured.
        self._samples = 0
        self._closing = False

    @property
    def full(self) -> bool:
        return self._threads.waiting >= MAX_WAITING or self._samples >= MAX_SAMPLES

    def submit(self, task: MeterTask) -> Future[Readings]:
        """Measures a draw. The future raises `MeterError` or `ModelError` as `MeterProcess.measure` does,
        `ModelError` for an outage, and `CancelledError` where the task was abandoned or the pool was
        closed first. Raises `CancelledError` once the pool is closed."""
        try:
            future = self._threads.submit(self._measured, task)
        except RuntimeError:
            raise CancelledError from None
        samples = len(task.utterance.samples)
        self._count_samples(samples)
        future.add_done_callback(lambda _: self._count_samples(-samples))
        return future

    def close(self) -> None:
        """Cancels what waits and what is measured now, and ends the processes."""
        self._closing = True
        for host in self._hosts:
            host.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for host in self._hosts:
            host.close()

    def _count_samples(self, more: int) -> None:
        with self._lock:
            self._samples += more

    def _measured(self, task: MeterTask) -> Readings:
        if self._closing or task.abandoned():
            raise CancelledError
        meters, host = msgspec.json.encode(task.meters), self._idle.get()
        try:
            readings = host.measure(task.meters, task.utterance)
        except Exception as error:
            if self._closing:
                # The measurement was cut short, which says nothing about the draw.
                raise CancelledError from error
            if isinstance(error, MeterHangError):
                self._count_hang(meters, task, error)
            elif not isinstance(error, ModelError):
                self._hung.pop(meters, None)
            raise
        finally:
            self._idle.put(host)
        self._hung.pop(meters, None)
        return readings

    def _count_hang(self, meters: bytes, task: MeterTask, error: MeterHangError) -> None:
        """Raises an outage in the place of a hang where the meters hung on too many items since their last
        answer: then the fault is not the item's."""
        with self._lock:
            items, outages = self._hung.get(meters, (set[str](), 0))
            items.add(task.item)
            is_outage = len(items) >= HANGS_IN_A_ROW and outages < OUTAGES_IN_A_ROW
            self._hung[meters] = items, outages + is_outage
        if is_outage:
            log.error("meters hang", meters=list(task.meters), error=error.message)
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The meters {', '.join(task.meters)} hung on {HANGS_IN_A_ROW} items in a row: {error.message}",
                "Items wait until the meters answer again. A smaller model or more cores may help.",
            ) from error
