"""Processes that put objects into a remote store for a worker.

A put over S3 uses the interpreter for more than a millisecond (signing, HTTP). At hundreds of puts per second the
threads that feed an engine would starve. This module has the code of the worker and of its writer processes, which
are connected by a channel; objects are passed in shared memory.

A writer process always ends with its worker. If one dies, another one repeats its puts and adopts objects that already
exist, because objects are write-once.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from jobs.settings import S3Settings
from jobs.store import S3Store, is_remote, open_store
from jobs.store.base import Metadata, ObjectInfo, ObjectStore
from jobs.store.s3 import split_s3_url
from pipelines.child_process import CalledChild, ChildEndedError, answer_calls, helper_environment
from pipelines.errors import ErrorCode, StoreError

log = structlog.get_logger(__name__)

#: Threads per process. They mostly wait, because S3 answers after 10 to 100 ms.
PUTS_AT_ONCE = 32
#: Another process is started when the worker itself, or each running process, has this number of concurrent puts.
BUSY_PUTS = 6
#: A process uses one core for about 500 puts per second. More than four processes exceed the network of most machines.
MAX_PROCESSES = 4
#: After this number of processes has died during one put, or at the start, the worker puts objects itself.
TRIES = 3
_KILL_SECONDS = 5.0


class _Put(msgspec.Struct, frozen=True):
    """A call that opens a store, unless it is open, and puts an object. The first call of a process only opens."""

    url: str
    key: str = ""
    #: The content of the object; None: there is no object to put.
    data: NDArray[np.uint8] | None = None
    metadata: dict[str, str] = {}
    #: The S3 settings, which may come from a file that the child does not read; only in the first call, so that no
    #: trace of a failed put has them.
    settings: dict[str, str | None] | None = None


class WriterProcess(CalledChild[ObjectInfo | None]):
    """A writer process, as its worker sees it."""

    def __init__(self, opening: _Put) -> None:
        # Signals to the worker's process group do not reach this process, because it must work while the worker drains.
        # It is not bound to the thread that starts it, because that thread may end before the worker.
        program = ("-m", "worker.writer_processes")
        super().__init__(program, ObjectInfo | None, helper_environment(), bound=False)
        try:
            self._opened = self.call(opening)
        except ChildEndedError:
            self._opened = Future()

    @property
    def up(self) -> bool:
        return self._opened.done() and self._opened.exception() is None


class WriterProcesses:
    """Up to `maximum` processes, started as needed: when each existing one has `busy_puts` puts in progress.

    The default maximum is one process for every two cores, to leave cores to the engine and the worker. Until the first
    process is up, and after too many failed starts, the worker's own threads put.
    """

    def __init__(self, maximum: int | None, settings: S3Settings | None, busy_puts: int = BUSY_PUTS) -> None:
        self.maximum = min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2) if maximum is None else maximum
        self._settings = settings
        self._access: dict[str, str | None] | None = None
        if settings is not None:
            secret = settings.secret_access_key
            plain = secret.get_secret_value() if secret else None
            self._access = {**settings.model_dump(), "secret_access_key": plain}
        self._busy_puts = busy_puts
        self.processes: list[WriterProcess] = []
        #: Number of puts of the worker itself.
        self._own = 0
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()

    def open(self, url: str) -> ObjectStore:
        """The store at `url`; puts into a remote one run in these processes. Raises the errors of `open_store`."""
        return (
            ProcessStore(url, self._settings, self)
            if self.maximum and is_remote(url)
            else open_store(url, self._settings)
        )

    def least_busy(self, url: str) -> WriterProcess | None:
        """The process with the fewest puts in progress; None if the worker itself must put. Starts another process if
        all are busy."""
        with self._lock:
            for one in [one for one in self.processes if one.ended]:
                self.processes.remove(one)
                how = one.close()
                log.warning("a writer process ended", reason=how)
                if one.up:
                    self._failed_starts = 0
                else:
                    self._count_failed_start(how)
            up = [one for one in self.processes if one.up]
            process = min(up, key=lambda one: one.waiting, default=None)
            in_progress = self._own if process is None else process.waiting
            if (
                in_progress >= self._busy_puts
                and len(up) == len(self.processes) < self.maximum
                and not self._closed
            ):
                try:
                    self.processes.append(WriterProcess(_Put(url, settings=self._access)))
                except OSError as error:
                    self._count_failed_start(repr(error))
            return process

    @contextmanager
    def own_put(self) -> Generator[None]:
        """Counts a put of the worker itself during the block."""
        with self._lock:
            self._own += 1
        try:
            yield
        finally:
            with self._lock:
                self._own -= 1

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        with self._lock:
            self._closed = True
            processes = self.processes
            self.processes = []
        for one in processes:
            one.close(_KILL_SECONDS)

    def _count_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == TRIES:
            self.maximum = 0
            log.error("writer processes do not start; the worker itself writes", reason=reason)


class ProcessStore(S3Store):
    """An S3 store whose puts run in writer processes; other operations run here."""

    def __init__(self, url: str, settings: S3Settings | None, processes: WriterProcesses) -> None:
        super().__init__(*split_s3_url(url), settings)
        self._processes = processes

    def put(self, key: str, data: bytes | BinaryIO, metadata: Metadata = None) -> ObjectInfo:
        """Puts an object as `ObjectStore.put` does. If a process dies, another one repeats the put and may find that the
        object already exists."""
        if isinstance(data, bytes):
            put = _Put(self.url, key, np.frombuffer(data, np.uint8), dict(metadata or {}))
            for _ in range(TRIES):
                if (process := self._processes.least_busy(self.url)) is None:
                    break
                with suppress(ChildEndedError, OSError):
                    result = process.call(put).result()
                    assert result is not None
                    return result
        with self._processes.own_put():
            return super().put(key, data, metadata)


class _Stores:
    """The stores of the child process, with the settings of its first call."""

    def __init__(self) -> None:
        self._settings: S3Settings | None = None
        self._open: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()

    def answer(self, put: _Put) -> ObjectInfo | None:
        with self._lock:
            if put.settings is not None:
                self._settings = S3Settings.model_validate(put.settings)
            if put.url not in self._open:
                self._open[put.url] = open_store(put.url, self._settings)
        if put.data is None:
            return None
        return self._open[put.url].put(put.key, put.data.tobytes(), put.metadata)


def _failure(error: Exception) -> StoreError:
    # The trace without variables, which may be secret.
    log.error("put failed", trace="".join(traceback.format_exception(error)))
    return StoreError(ErrorCode.STORE_UNREACHABLE, f"A put failed: {error!r}.", "See the worker's log.")


if __name__ == "__main__":
    answer_calls(_Put, _Stores().answer, _failure, PUTS_AT_ONCE)
