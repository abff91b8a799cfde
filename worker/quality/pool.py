"""The meter pool: draws that wait for meters wait here, on disk where they are many, never in front of the
engine."""

from __future__ import annotations

import errno
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from jobs.checks import Option
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, ModelError, StoreError
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterHangError, MeterProcess

log = structlog.get_logger(__name__)

#: A temporary file of so many bytes takes no more of them.
SPOOL_FILE_BYTES = 256 << 20
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
#: The maximum number of draws whose samples wait in memory; those of others wait in a file.
IN_MEMORY = 64
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


class Measured(NamedTuple):
    """The result of a task. The samples come back with it, because only the pool kept them."""

    #: float32 [samples].
    samples: NDArray[np.float32]
    readings: Readings


class _SpoolFile:
    """A file without a name, which the system deletes when nothing of it is held, or with the process."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile(prefix="nightjar-draws-") as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        self.end = 0


@dataclass(frozen=True, slots=True)
class SpooledSamples:
    """Samples in a file."""

    file: _SpoolFile
    first_byte: int
    count: int

    def read(self) -> NDArray[np.float32]:
        """The samples [samples]. Raises `StoreError` as `Spool.put` does."""
        try:
            return np.frombuffer(os.pread(self.file.descriptor, self.count * 4, self.first_byte), np.float32)
        except OSError as error:
            raise _disk_error(error) from error


class Spool:
    """Samples in temporary files of `file_bytes`.

    Draws leave in nearly the order in which they came, so the disk holds those that wait and a file or two
    more.
    """

    def __init__(self, file_bytes: int = SPOOL_FILE_BYTES) -> None:
        self._file_bytes = file_bytes
        self._file: _SpoolFile | None = None
        self._lock = threading.Lock()

    def put(self, samples: NDArray[np.float32]) -> SpooledSamples:
        """Takes samples [samples]. Raises `StoreError`: `store.full`, or `store.forbidden` where temporary
        files cannot be written."""
        data = samples.astype(np.float32, copy=False).tobytes()
        try:
            with self._lock:
                if self._file is None or self._file.end >= self._file_bytes:
                    self._file = _SpoolFile()
                file, written = self._file, 0
                spooled = SpooledSamples(file, file.end, len(samples))
                while written < len(data):
                    written += os.pwrite(file.descriptor, data[written:], file.end + written)
                file.end += written
                return spooled
        except OSError as error:
            raise _disk_error(error) from error


def _disk_error(error: OSError) -> StoreError:
    code = ErrorCode.STORE_FORBIDDEN if error.errno in _FORBIDDEN else ErrorCode.STORE_FULL
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return StoreError(
        code,
        f"Draws that wait for meters cannot be kept in a temporary file: {reason}.",
        "Free space there, or set TMPDIR elsewhere.",
    )


class MeterPool:
    """Meter processes, with one thread for each. `submit` never waits: a slow meter delays items, not the
    engine.

    The number of waiting draws is bounded by the shards in flight. Memory holds the samples of the first
    `in_memory`, files hold the others'. After hangs on `HANGS_IN_A_ROW` items in a row a hang is an outage
    (`model.unreachable`), until the meters answer again or `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(
        self,
        processes: int = 1,
        *,
        in_memory: int = IN_MEMORY,
        open_host: Callable[[], MeterProcess] = MeterProcess,
    ) -> None:
        self._in_memory = in_memory
        self._threads = DaemonThreads(processes, "meter")
        self._hosts = [open_host() for _ in range(processes)]
        self._idle: queue.SimpleQueue[MeterProcess] = queue.SimpleQueue()
        for host in self._hosts:
            self._idle.put(host)
        self._spool = Spool()
        #: By meters: items on which they hung since their last answer, and how many outages were reported.
        self._hung: dict[bytes, tuple[set[str], int]] = {}
        self._lock = threading.Lock()
        self._closing = False

    @property
    def waiting(self) -> int:
        """Draws that no meter has begun to measure."""
        return self._threads.waiting

    def submit(self, task: MeterTask) -> Future[Measured]:
        """Measures a draw. The future raises `MeterError` or `ModelError` as `MeterProcess.measure` does,
        `ModelError` for an outage, and `CancelledError` where the task was abandoned or the pool was
        closed first.

        Raises `StoreError` (`store.full`, `store.forbidden`) where the samples have to wait in a file and
        cannot, and `CancelledError` once the pool is closed.
        """
        spooled = None
        if self.waiting >= self._in_memory:
            spooled = self._spool.put(task.utterance.samples)
            task = replace(task, utterance=replace(task.utterance, samples=np.empty(0, np.float32)))
        try:
            return self._threads.submit(self._measured, task, spooled)
        except RuntimeError:
            raise CancelledError from None

    def close(self) -> None:
        """Cancels what waits and what is measured now, and ends the processes."""
        self._closing = True
        for host in self._hosts:
            host.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for host in self._hosts:
            host.close()

    def _measured(self, task: MeterTask, spooled: SpooledSamples | None) -> Measured:
        utterance = task.utterance
        if spooled is not None:
            utterance = replace(utterance, samples=spooled.read())
        if self._closing or task.abandoned():
            raise CancelledError
        meters, host = msgspec.json.encode(task.meters), self._idle.get()
        try:
            readings = host.measure(task.meters, utterance)
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
        return Measured(utterance.samples, readings)

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
