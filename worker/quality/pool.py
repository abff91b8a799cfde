"""The meter pool: draws that wait for meters wait here, on disk where they are many, never in front of the
engine."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from jobs.checks import Option
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, ModelError, NightjarError, StoreError
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterError, MeterHangError, MeterProcess

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: A temporary file of so many bytes takes no more of them.
SPOOL_FILE_BYTES = 256 << 20
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class _SpoolFile:
    """A file without a name, which the system deletes with the process."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="nightjar-draws-")  # noqa: SIM115 - closed when it is full and nothing of it is held
        self.end = 0
        self.held = 0


@dataclass(frozen=True, slots=True)
class SpooledSamples:
    """Samples in a file."""

    file: _SpoolFile
    first_byte: int
    count: int


class Spool:
    """Samples in temporary files of `file_bytes`. A file's space is free again when nothing of it is held.

    Draws leave in nearly the order in which they came, so the disk holds those that wait and a file or two
    more.
    """

    def __init__(self, file_bytes: int = SPOOL_FILE_BYTES) -> None:
        self._file_bytes = file_bytes
        self._current: _SpoolFile | None = None
        self._files: set[_SpoolFile] = set()
        self._lock = threading.Lock()

    def put(self, samples: NDArray[np.float32]) -> SpooledSamples:
        """Takes samples [samples]. Raises `StoreError`: `store.full`, or `store.forbidden` where temporary
        files cannot be written."""
        try:
            with self._lock:
                return self._written(samples.astype(np.float32, copy=False).tobytes(), len(samples))
        except OSError as error:
            raise _disk_error(error) from error

    def take(self, spooled: SpooledSamples) -> NDArray[np.float32]:
        """The samples [samples]; once for each `put`. Raises `StoreError` as `put` does."""
        try:
            data = os.pread(spooled.file.file.fileno(), spooled.count * 4, spooled.first_byte)
        except OSError as error:
            raise _disk_error(error) from error
        finally:
            with self._lock:
                spooled.file.held -= 1
                if not spooled.file.held:
                    self._free(spooled.file)
        return np.frombuffer(data, np.float32)

    def close(self) -> None:
        """Closes the files, with what they hold."""
        with self._lock:
            self._current = None
            for one in self._files:
                one.file.close()
            self._files.clear()

    def _written(self, data: bytes, count: int) -> SpooledSamples:
        if self._current is None or self._current.end >= self._file_bytes:
            self._current = _SpoolFile()
            self._files.add(self._current)
        into, written = self._current, 0
        while written < len(data):
            written += os.pwrite(into.file.fileno(), data[written:], into.end + written)
        spooled = SpooledSamples(into, into.end, count)
        into.end += len(data)
        into.held += 1
        return spooled

    def _free(self, empty: _SpoolFile) -> None:
        if empty is self._current:
            empty.file.truncate(0)
            empty.end = 0
        else:
            empty.file.close()
            self._files.discard(empty)


def _disk_error(error: OSError) -> StoreError:
    code = ErrorCode.STORE_FORBIDDEN if error.errno in _FORBIDDEN else ErrorCode.STORE_FULL
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return StoreError(
        code,
        f"Draws that wait for meters cannot be kept in a temporary file: {reason}.",
        "Free space there, or set TMPDIR elsewhere.",
    )


log = structlog.get_logger(__name__)

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
        """Records a hang. Returns whether it is an outage: the meters hung on too many items since their
        last answer."""
        with self._lock:
            hangs = self._hung.setdefault(msgspec.json.encode(meters), _Hangs())
            hangs.items.add(item)
            if len(hangs.items) < HANGS_IN_A_ROW or hangs.outages >= OUTAGES_IN_A_ROW:
                return False
            hangs.outages += 1
            return True


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
        self._open_host = open_host
        self._threads = DaemonThreads(processes, "meter")
        self._hosts: dict[int, MeterProcess] = {}
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
        """Measures a draw. The future raises `MeterError` or `ModelError` as `MeterProcess.measure` does,
        `ModelError` for an outage, and `CancelledError` where the task was abandoned or the pool was
        closed first.

        Raises `StoreError` (`store.full`, `store.forbidden`) where the samples have to wait in a file and
        cannot.
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
        self._threads.shutdown(wait=True, cancel_futures=True)
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

    def _host(self) -> MeterProcess:
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
