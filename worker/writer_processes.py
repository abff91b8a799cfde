"""Processes that put objects into a remote store for a worker.

One put over S3 takes the interpreter for more than a millisecond (signing, HTTP). At hundreds of puts a
second these would leave no time to the threads that feed an engine. Both ends are here, joined by a
channel; the object travels in shared memory.

A process ends with its worker, however that ends. One that dies costs time only: its puts go to another
process, which adopts what is there already, because objects are written once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import msgspec
import structlog
from numpy.typing import NDArray

from jobs.settings import S3Settings
from jobs.store import S3Store, is_remote, open_store
from jobs.store.base import BYTES, ObjectStore, PutResult
from jobs.store.s3 import split_s3_url
from pipelines.child_process import CalledChild, ChildEndedError, answer_calls, beside_the_engine
from pipelines.errors import ErrorCode, StoreError

log = structlog.get_logger(__name__)

#: Threads of one process: S3 answers after 10 to 100 ms.
PUTS_AT_ONCE = 32
#: Puts of the worker itself, or of each process, at the same time, above which another process is started.
CROWDED = 6
#: A process has a core for about 500 puts a second; more than four need a faster network than most machines
#: have.
MOST_PROCESSES = 4
#: Processes that may die in one put, or at their start, before the worker puts by itself.
TRIES = 3
_KILL_SECONDS = 5.0


class _Open(msgspec.Struct, frozen=True, tag="open"):
    """The first call: the process is up when it has a client for this store."""

    #: How to reach S3: settings may come from a file that the child does not read.
    settings: dict[str, str | None] | None
    url: str


class _Put(msgspec.Struct, frozen=True, tag="put"):
    """The object is the data of the call."""

    url: str
    key: str
    content_type: str
    metadata: dict[str, str]


class WriterProcess(CalledChild[PutResult | None]):
    """One process."""

    def __init__(self, settings: S3Settings | None, url: str) -> None:
        # A signal to the worker's group is the worker's: it drains, and this process puts until then. It is
        # not bound to the thread that starts it: any that puts may do that, and end before the worker does.
        program = ("-m", "worker.writer_processes")
        super().__init__(program, PutResult | None, beside_the_engine(), bound=False)
        try:
            self._opened = self.call(_Open(_plain(settings), url))
        except ChildEndedError:
            self._opened = Future()

    @property
    def up(self) -> bool:
        return self._opened.done() and self._opened.exception() is None


class WriterProcesses:
    """Up to `maximum` processes, which start as they are needed: when `crowded` puts are under way in each
    that is there.

    Until the first one is up, and after too many that never came up, the worker's own threads put.
    """

    def __init__(self, maximum: int, settings: S3Settings | None, crowded: int = CROWDED) -> None:
        self.maximum = maximum
        self._settings = settings
        self._crowded = crowded
        self.processes: list[WriterProcess] = []
        #: Puts of the worker itself.
        self._own = 0
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return [one.pid for one in self.processes if one.up and not one.ended]

    def open(self, url: str) -> ObjectStore:
        """The store at `url`; a remote one puts through these processes. Raises as `open_store` does."""
        return (
            ProcessStore(url, self._settings, self)
            if self.maximum and is_remote(url)
            else open_store(url, self._settings)
        )

    def least_busy(self, url: str) -> WriterProcess | None:
        """The process for a put into a store; None: the worker itself is to put. Starts another process
        where all have enough to do."""
        with self._lock:
            self._remove_ended()
            up = [one for one in self.processes if one.up]
            process = min(up, key=lambda one: one.waiting, default=None)
            under_way = self._own if process is None else process.waiting
            if (
                under_way >= self._crowded
                and len(up) == len(self.processes) < self.maximum
                and not self._closed
            ):
                self._start(url)
            return process

    @contextmanager
    def itself(self) -> Generator[None]:
        """The worker puts inside."""
        with self._lock:
            self._own += 1
        try:
            yield
        finally:
            with self._lock:
                self._own -= 1

    def close(self) -> None:
        """Ends the processes. May be called more than once."""
        with self._lock:
            self._closed = True
            processes, self.processes = self.processes, []
        for one in processes:
            one.close(_KILL_SECONDS)

    def _start(self, url: str) -> None:
        try:
            self.processes.append(WriterProcess(self._settings, url))
        except OSError as error:
            self._count_failed_start(repr(error))

    def _remove_ended(self) -> None:
        for one in [one for one in self.processes if one.ended]:
            self.processes.remove(one)
            how = one.close()
            log.warning("a writer process ended", reason=how)
            if one.up:
                self._failed_starts = 0
            else:
                self._count_failed_start(how)

    def _count_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts == TRIES:
            self.maximum = 0
            log.error("writer processes do not start; the worker writes by itself", reason=reason)


class ProcessStore(S3Store):
    """An S3 store whose puts run in the processes of a worker. Everything else runs here."""

    def __init__(self, url: str, settings: S3Settings | None, processes: WriterProcesses) -> None:
        super().__init__(*split_s3_url(url), settings)
        self._processes = processes

    def put(
        self,
        key: str,
        data: bytes | BinaryIO,
        *,
        content_type: str = BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> PutResult:
        """Writes once, as any store. A put whose process died is given to another, which may find the
        object there."""
        put = _Put(self.url, key, content_type, dict(metadata or {}))
        for _ in range(TRIES):
            process = self._processes.least_busy(self.url)
            if process is None or not isinstance(data, bytes):
                break
            with suppress(ChildEndedError, OSError):
                result = process.call(put, data).result()
                assert result is not None
                return result
        with self._processes.itself():
            return super().put(key, data, content_type=content_type, metadata=metadata)


def default_processes() -> int:
    """One for each two cores of this process, so that the engine and the worker keep theirs."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2)


def _plain(settings: S3Settings | None) -> dict[str, str | None] | None:
    if settings is None:
        return None
    secret = settings.secret_access_key
    return {**settings.model_dump(), "secret_access_key": secret.get_secret_value() if secret else None}


class _Stores:
    """The child's stores."""

    def __init__(self) -> None:
        self._settings: S3Settings | None = None
        self._open: dict[str, ObjectStore] = {}
        self._lock = threading.Lock()

    def answer(self, asked: _Open | _Put, data: NDArray[Any]) -> PutResult | None:
        if isinstance(asked, _Open) and asked.settings is not None:
            self._settings = S3Settings.model_validate(asked.settings)
        with self._lock:
            if asked.url not in self._open:
                self._open[asked.url] = open_store(asked.url, self._settings)
        if isinstance(asked, _Open):
            return None
        store = self._open[asked.url]
        return store.put(asked.key, data.tobytes(), content_type=asked.content_type, metadata=asked.metadata)


def _failure(error: Exception) -> StoreError:
    log.error("put failed", exc_info=error)
    return StoreError(ErrorCode.STORE_UNREACHABLE, f"A put failed: {error!r}.", "See the worker's log.")


if __name__ == "__main__":
    answer_calls(_Open | _Put, _Stores().answer, _failure, PUTS_AT_ONCE)
