"""The meter pool, in which draws wait for meters without blocking the engine."""

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

#: Maximum number of waiting draws, and of the samples of all draws in the pool (1 GiB). When either is reached, the
#: engine is not fed.
MAX_WAITING, MAX_SAMPLES = 1024, 1 << 28
#: If meters hang on this number of consecutive items, the meters are assumed to be the cause, not the items.
HANGS_IN_A_ROW = 3
#: Maximum number of consecutive outages. Later hangs count as failures of the items again, because otherwise a job whose
#: last items all hang would never end.
OUTAGES_IN_A_ROW = 5


@dataclass(frozen=True, slots=True)
class MeterTask:
    """A draw to measure."""

    meters: Mapping[str, Mapping[str, Option]]
    utterance: Utterance
    #: Whether the result is no longer needed.
    abandoned: Callable[[], bool] = lambda: False
    #: The item of the draw, the same in all attempts.
    item: str = ""


class MeterPool:
    """Meter processes, with one thread each. `submit` never waits, so a slow meter delays items but not the engine.

    The engine is not fed while the pool is `full`. After meters hang on `HANGS_IN_A_ROW` consecutive items, each hang is
    an outage (`model.unreachable`), until the meters answer again or `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(self, processes: int = 1, *, open_host: Callable[[], MeterProcess] = MeterProcess) -> None:
        self._threads = DaemonThreads(processes, "meter")
        self._hosts = [open_host() for _ in range(processes)]
        self._idle: queue.SimpleQueue[MeterProcess] = queue.SimpleQueue()
        for host in self._hosts:
            self._idle.put(host)
        #: Meters -> (items on which they hung since their last answer, number of reported outages).
        self._hung: dict[bytes, tuple[set[str], int]] = {}
        self._lock = threading.Lock()
        #: Number of samples of all draws that wait or are being measured.
        self._samples = 0
        self._closing = False

    @property
    def full(self) -> bool:
        return self._threads.waiting >= MAX_WAITING or self._samples >= MAX_SAMPLES

    def submit(self, task: MeterTask) -> Future[Readings]:
        """Measures a draw. The future raises the errors of `MeterProcess.measure`, `ModelError` for an outage, and
        `CancelledError` if the task is abandoned or the pool is closed first. Raises `CancelledError` if the pool is
        already closed."""
        try:
            future = self._threads.submit(self._measured, task)
        except RuntimeError:
            raise CancelledError from None
        samples = len(task.utterance.samples)
        self._count_samples(samples)
        future.add_done_callback(lambda _: self._count_samples(-samples))
        return future

    def close(self) -> None:
        """Cancels all tasks, and ends the processes."""
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
                # `close` interrupted the measurement, which is not a fault of the draw.
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
        """Counts a hang. Raises an outage instead if the meters hung on too many items since their last answer."""
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
                "Items wait until the meters answer again. Use a smaller model or more cores.",
            ) from error
