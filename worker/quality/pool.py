"""The meter pool: draws that wait for meters wait here, never in front of the engine."""

from __future__ import annotations

import errno
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import structlog

from jobs.checks import Option
from pipelines.errors import ErrorCode, ModelError, NightjarError, StoreError
from worker.quality.metrics import Readings, Sample
from worker.quality.process import MeterError, MeterHangError, MeterProcess

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = structlog.get_logger(__name__)

#: Draws whose samples wait in memory; those of more wait in a file.
IN_MEMORY = 64
#: A temporary file of so many bytes takes no more of them.
SPOOL_FILE_BYTES = 256 << 20
#: Items on which the same meters hang, without an answer in between: it is the meters then, and no more items are tried.
HANGS_IN_A_ROW = 3
#: Outages that are told without an answer in between; then hangs are the items' again, or a job whose last items all hang never ends.
OUTAGES_IN_A_ROW = 5
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class MeterHost(Protocol):
    """What measures: a process, or in a test this thread."""

    def measure(self, meters: Mapping[str, Mapping[str, Option]], sample: Sample) -> Readings: ...

    def stop(self) -> None:
        """Cuts short what is measured, from another thread, and measures nothing more."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MeterTask:
    """A draw to measure. Exactly one of `done` and `dropped` is called, from a thread of the pool."""

    meters: Mapping[str, Mapping[str, Option]]
    sample: Sample
    #: Whether nobody wants the result any more.
    abandoned: Callable[[], bool]
    #: Takes the samples back with the readings, or with what failed.
    done: Callable[[NDArray[np.float32], Readings | NightjarError], None]
    dropped: Callable[[], None]
    #: The item whose draw it is, the same in all its attempts.
    item: str = ""


class _SpoolFile:
    """A file without a name, which is gone with the process, and what of it is in use."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="nightjar-draws-")  # noqa: SIM115 - closed when it is full and nothing of it is held
        self.end = 0
        self.held = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where samples are."""

    file: _SpoolFile
    #: Their first byte.
    start: int
    #: How many samples.
    count: int


class Spool:
    """Samples in temporary files. A file's space is free again when nothing of it is held; one of `file_bytes` takes no more.

    Draws leave in nearly the order they came in, so the disk holds those that wait and a file or two more.
    """

    def __init__(self, file_bytes: int = SPOOL_FILE_BYTES) -> None:
        self._file_bytes = file_bytes
        self._current: _SpoolFile | None = None
        self._lock = threading.Lock()

    def put(self, samples: NDArray[np.float32]) -> Place:
        """Takes samples [samples]. Raises `OSError` on a full disk and where there is no place for temporary files."""
        with self._lock:
            into = self._with_room()
            data = samples.astype(np.float32, copy=False).tobytes()
            written = 0
            while written < len(data):
                written += os.pwrite(into.file.fileno(), data[written:], into.end + written)
            place = Place(into, into.end, len(samples))
            into.end += len(data)
            into.held += 1
            return place

    def take(self, place: Place) -> NDArray[np.float32]:
        """The samples back; once for each `put`."""
        try:
            data = os.pread(place.file.file.fileno(), place.count * 4, place.start)
        finally:
            with self._lock:
                place.file.held -= 1
                if not place.file.held:
                    self._free(place.file)
        return np.frombuffer(data, np.float32)

    def close(self) -> None:
        """Closes the file that takes samples; call it when nothing is held."""
        with self._lock:
            current, self._current = self._current, None
            if current is not None:
                current.file.close()

    def _with_room(self) -> _SpoolFile:
        if self._current is None or self._current.end >= self._file_bytes:
            self._current = _SpoolFile()
        return self._current

    def _free(self, empty: _SpoolFile) -> None:
        if empty is self._current:
            empty.file.truncate(0)
            empty.end = 0
        else:
            empty.file.close()


@dataclass(slots=True)
class _Hangs:
    """What hung since the last answer."""

    items: set[str] = field(default_factory=set[str])
    #: Of these hangs, those that were told as an outage.
    outages: int = 0


class Breaker:
    """Tells meters that hang on everything from an item that everything hangs on."""

    def __init__(self) -> None:
        self._hung: dict[bytes, _Hangs] = {}
        self._lock = threading.Lock()

    def answered(self, meters: Mapping[str, Mapping[str, Option]]) -> None:
        with self._lock:
            self._hung.pop(msgspec.json.encode(meters), None)

    def hung(self, meters: Mapping[str, Mapping[str, Option]], item: str) -> bool:
        """Notes one more hang; whether it is told as an outage: so many items hung since the last answer that it is the meters."""
        with self._lock:
            hangs = self._hung.setdefault(msgspec.json.encode(meters), _Hangs())
            hangs.items.add(item)
            if len(hangs.items) < HANGS_IN_A_ROW or hangs.outages >= OUTAGES_IN_A_ROW:
                return False
            hangs.outages += 1
            return True


class MeterPool:
    """`processes` meter processes, one thread each. `submit` never blocks: a slow meter delays items, not the engine.

    Draws that wait are bounded by the shards in flight; memory holds the samples of the first `in_memory`, a file the others'.
    After hangs on `HANGS_IN_A_ROW` items in a row a hang is an outage (`model.unreachable`), until the meters answer again or
    `OUTAGES_IN_A_ROW` were told.
    """

    def __init__(
        self,
        processes: int = 1,
        *,
        in_memory: int = IN_MEMORY,
        open_host: Callable[[], MeterHost] = MeterProcess,
    ) -> None:
        self._processes = processes
        self._in_memory = in_memory
        self._open_host = open_host
        self._queue: queue.SimpleQueue[tuple[MeterTask, Place | None] | None] = queue.SimpleQueue()
        self._hosts: list[MeterHost] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._spool = Spool()
        self._closing = False
        self._breaker = Breaker()

    @property
    def waiting(self) -> int:
        """Draws that no meter has looked at yet."""
        return self._queue.qsize()

    def submit(self, task: MeterTask) -> None:
        """Raises `StoreError` (`store.full`, `store.forbidden`) where the samples have to wait in a file and cannot."""
        self._start()
        place = None
        if self.waiting >= self._in_memory:
            place = self._spooled(task.sample.samples)
        if place is not None:
            task = replace(task, sample=replace(task.sample, samples=np.empty(0, np.float32)))
        with self._lock:
            closed = self._closing
            if not closed:
                self._queue.put((task, place))
        if closed:
            task.dropped()

    def close(self) -> None:
        """Drops what waits and what is measured now, and ends the processes."""
        with self._lock:
            self._closing = True
        for host in self._hosts:
            host.stop()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._spool.close()

    def _start(self) -> None:
        with self._lock:
            while not self._closing and len(self._threads) < self._processes:
                host = self._open_host()
                thread = threading.Thread(target=self._run, args=(host,), name=f"meter-{len(self._threads)}", daemon=True)
                self._hosts.append(host)
                self._threads.append(thread)
                thread.start()

    def _spooled(self, samples: NDArray[np.float32]) -> Place:
        try:
            return self._spool.put(samples)
        except OSError as error:
            raise _disk_error(error) from error

    def _run(self, host: MeterHost) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                task, place = entry
                try:
                    task = self._with_samples(task, place)
                except OSError as error:
                    task.done(task.sample.samples, _disk_error(error))
                    continue
                if self._closing or task.abandoned():
                    task.dropped()
                else:
                    self._measure(host, task)
        finally:
            host.close()

    def _with_samples(self, task: MeterTask, place: Place | None) -> MeterTask:
        if place is None:
            return task
        return replace(task, sample=replace(task.sample, samples=self._spool.take(place)))

    def _measure(self, host: MeterHost, task: MeterTask) -> None:
        try:
            result: Readings | NightjarError = host.measure(task.meters, task.sample)
        except NightjarError as error:
            result = error
        except Exception as error:
            log.exception("meter failed")
            result = MeterError(f"A meter failed: {error!r}")
        if self._closing and isinstance(result, NightjarError):
            # It was cut short: that says nothing of the draw.
            task.dropped()
            return
        task.done(task.sample.samples, self._outage(task, result))

    def _outage(self, task: MeterTask, result: Readings | NightjarError) -> Readings | NightjarError:
        """The result, or an outage in the place of one hang too many."""
        if not isinstance(result, MeterHangError):
            if not isinstance(result, ModelError):
                self._breaker.answered(task.meters)
            return result
        if not self._breaker.hung(task.meters, task.item):
            return result
        log.error("meters hang", meters=list(task.meters), error=result.message)
        return ModelError(
            ErrorCode.MODEL_UNREACHABLE,
            f"The meters {', '.join(task.meters)} hung on {HANGS_IN_A_ROW} items in a row: {result.message}",
            "Items wait until they answer again; a smaller model or more cores may help.",
        )


def _disk_error(error: OSError) -> StoreError:
    code = ErrorCode.STORE_FORBIDDEN if error.errno in _FORBIDDEN else ErrorCode.STORE_FULL
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return StoreError(
        code, f"Draws that wait for meters cannot be kept in a temporary file: {reason}.", "Free space there, or set TMPDIR elsewhere."
    )
