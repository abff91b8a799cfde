"""Processes that put objects into a remote store for a worker.

One put over S3 takes the interpreter for more than a millisecond (signing, HTTP). At hundreds of puts a
second these would leave no time to the threads that feed an engine. Both ends are here, joined by a
channel; the object travels in shared memory.

A process ends with its worker, however that ends. One that dies costs time only: its puts go to another
process, which adopts what is there already, because objects are written once.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec
import numpy as np
import structlog

from jobs.settings import S3Settings
from jobs.store import S3Store, is_remote, open_store
from jobs.store.base import BYTES, ObjectInfo, ObjectStore, PutResult
from jobs.store.s3 import split_s3_url
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, NightjarError, StoreError
from pipelines.ipc import (
    Channel,
    Child,
    ErrorRecord,
    beside_the_engine,
    close_all,
    parent_channel,
    read_shared,
    share,
)

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


class _Start(msgspec.Struct, frozen=True, tag="start"):
    #: How to reach S3: settings may come from a file that the child does not read.
    settings: dict[str, str | None] | None
    #: The first store; the process is up when it has a client for it.
    url: str


class _Put(msgspec.Struct, frozen=True, tag="put"):
    """The object is in the descriptor that comes with it."""

    number: int
    url: str
    key: str
    content_type: str
    metadata: dict[str, str]


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    #: Of the put; 0: the process is up.
    number: int
    created: bool = False
    info: ObjectInfo | None = None
    #: The store's.
    error: ErrorRecord | None = None


class ProcessEndedError(Exception):
    """The process died before it answered."""


class WriterProcess:
    """One process, and the puts that it has not answered."""

    def __init__(self, settings: S3Settings | None, url: str) -> None:
        self.up = False
        self.ended = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[_Answer]] = {}
        self._lock = threading.Lock()
        # A signal to the worker's group is the worker's: it drains, and this process puts until then.
        self.child = Child[_Answer](("-m", "worker.writer_processes"), _Answer, beside_the_engine())
        self._channel = self.child.channel
        with suppress(OSError):
            self._channel.send(_Start(_plain(settings), url))
        self._thread = threading.Thread(target=self._receive, name="writer-process", daemon=True)
        self._thread.start()

    def put(
        self, url: str, key: str, data: bytes, content_type: str, metadata: Mapping[str, str]
    ) -> PutResult:
        """Raises `StoreError` as the store does, and `ProcessEndedError`."""
        number, answered = next(self._numbers), Future[_Answer]()
        with self._lock:
            if self.ended:
                raise ProcessEndedError
            self._waiting[number] = answered
        try:
            self._send(_Put(number, url, key, content_type, dict(metadata)), data)
        except OSError as error:
            with self._lock:
                self._waiting.pop(number, None)
            raise ProcessEndedError from error
        answer = answered.result()
        if answer.error is not None:
            raise answer.error.error
        assert answer.info is not None
        return PutResult(answer.info, answer.created)

    def close(self) -> None:
        """Ends the process, with what it has not answered. May be called more than once."""
        self._channel.shut_down()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(_KILL_SECONDS)
        self.child.kill()
        self.child.wait()
        self._thread.join()
        self._channel.close()

    def _send(self, task: _Put, data: bytes) -> None:
        shared = share(data)
        try:
            self._channel.send(task, [shared])
        finally:
            os.close(shared)

    def _receive(self) -> None:
        with suppress(EOFError, OSError, msgspec.MsgspecError):
            while True:
                answer = self._channel.receive().message
                if not answer.number:
                    self.up = True
                    continue
                with self._lock:
                    answered = self._waiting.pop(answer.number, None)
                if answered is not None:
                    answered.set_result(answer)
        with self._lock:
            self.ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for answered in left:
            answered.set_exception(ProcessEndedError())


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
        #: Puts of each process, and of the worker itself.
        self.under_way: Counter[WriterProcess | None] = Counter()
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Of the processes that are up."""
        return [one.child.pid for one in self.processes if one.up and not one.ended]

    def open(self, url: str) -> ObjectStore:
        """The store at `url`; a remote one puts through these processes. Raises as `open_store` does."""
        return (
            ProcessStore(url, self._settings, self)
            if self.maximum and is_remote(url)
            else open_store(url, self._settings)
        )

    @contextmanager
    def chosen(self, url: str, *, itself: bool = False) -> Generator[WriterProcess | None]:
        """The process for a put that is made inside; None: the worker itself is to put, as with `itself`."""
        with self._lock:
            self._remove_ended()
            up = [one for one in self.processes if one.up]
            process = None if itself else min(up, key=lambda one: self.under_way[one], default=None)
            crowded = self.under_way[process] >= self._crowded
            if crowded and len(up) == len(self.processes) < self.maximum and not self._closed:
                self._start(url)
            self.under_way[process] += 1
        try:
            yield process
        finally:
            with self._lock:
                self.under_way[process] -= 1

    def close(self) -> None:
        """Ends the processes. May be called more than once."""
        with self._lock:
            self._closed = True
            processes, self.processes = self.processes, []
        for one in processes:
            one.close()

    def _start(self, url: str) -> None:
        try:
            self.processes.append(WriterProcess(self._settings, url))
        except OSError as error:
            self._count_failed_start(repr(error))

    def _remove_ended(self) -> None:
        for one in [one for one in self.processes if one.ended]:
            self.processes.remove(one)
            one.close()
            how = one.child.wait()
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
        for attempt in range(TRIES + 1):
            # A file is put by the worker itself: no other process can read it.
            itself = attempt == TRIES or not isinstance(data, bytes)
            with self._processes.chosen(self.url, itself=itself) as process:
                if process is None or not isinstance(data, bytes):
                    return super().put(key, data, content_type=content_type, metadata=metadata)
                with suppress(ProcessEndedError):
                    return process.put(self.url, key, data, content_type, metadata or {})
        raise AssertionError("the worker itself puts in the end")


def default_processes() -> int:
    """One for each two cores of this process, so that the engine and the worker keep theirs."""
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2)


def _plain(settings: S3Settings | None) -> dict[str, str | None] | None:
    if settings is None:
        return None
    secret = settings.secret_access_key
    return {**settings.model_dump(), "secret_access_key": secret.get_secret_value() if secret else None}


class _Server:
    """The child's side: puts on its threads, an answer for each."""

    def __init__(self, channel: Channel[_Start | _Put]) -> None:
        self._channel = channel
        self._settings: S3Settings | None = None
        self._stores: dict[str, ObjectStore] = {}
        self._threads = DaemonThreads(PUTS_AT_ONCE, "put")
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Puts until the other end is closed."""
        while True:
            message, descriptors = self._channel.receive()
            if isinstance(message, _Start):
                if message.settings is not None:
                    self._settings = S3Settings.model_validate(message.settings)
                self._stores[message.url] = open_store(message.url, self._settings)
                self._channel.send(_Answer(0))
                continue
            try:
                data = read_shared(descriptors.pop(), np.uint8).tobytes()
            finally:
                close_all(descriptors)
            self._threads.submit(self._put, message, data)

    def _put(self, task: _Put, data: bytes) -> None:
        try:
            result = self._store(task.url).put(
                task.key, data, content_type=task.content_type, metadata=task.metadata
            )
            answer = _Answer(task.number, result.created, result.info)
        except NightjarError as error:
            answer = _Answer(task.number, error=ErrorRecord.of(error))
        except Exception as error:
            log.exception("put failed")
            failure = StoreError(
                ErrorCode.STORE_UNREACHABLE, f"A put failed: {error!r}.", "See the worker's log."
            )
            answer = _Answer(task.number, error=ErrorRecord.of(failure))
        with suppress(OSError):
            self._channel.send(answer)

    def _store(self, url: str) -> ObjectStore:
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url, self._settings)
            return self._stores[url]


def main() -> None:
    """The child's side. Ends when the other end is closed, as it is when the worker ends in any way,
    whatever its puts wait for."""
    # Not with the thread that started it: any that puts may do that, and end before the worker does.
    channel: Channel[_Start | _Put] = parent_channel(_Start | _Put, die_with_parent=False)
    with suppress(EOFError, OSError):
        _Server(channel).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
